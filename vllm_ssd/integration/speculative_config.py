"""vLLM's SpeculativeConfig, with saguaro's options in it.

EngineCore unpickles it before plugins are loaded: this module must import by itself.
"""

from typing import Any

from pydantic import SkipValidation
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.integration import request_options

DRAFTER = "vllm_ssd.integration.drafter.SaguaroDrafter"


@config
class SaguaroSpeculativeConfig(SpeculativeConfig):
    """To vLLM this is method `custom_class` with our drafter: ragged drafts, V1 runner."""

    saguaro: SkipValidation[SaguaroConfig] = None  # type: ignore[assignment]
    """What the user asked for."""
    real_vocab_size: int = 0
    """Token ids from here on are padding, in either model."""
    metrics_directory: str | None = None
    """Where the worker leaves its figures for Prometheus; None: nobody wants them."""
    ray_draft: str | None = None
    """Name of the draft's Ray actor, once the executor has started it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # vLLM's n-gram proposer reads these from here; `custom_class` sets them to 0.
        self.prompt_lookup_min = self.saguaro.prompt_lookup_min
        self.prompt_lookup_max = self.saguaro.prompt_lookup_max

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The process that takes requests may have got its configuration from another one, as in Ray Serve."""
        self.__dict__.update(state)
        request_options.install()

    def __repr__(self) -> str:
        return f"SpeculativeConfig(method='saguaro', {self.saguaro!r})"


def make_speculative_config(
    saguaro: SaguaroConfig, target_model_config: Any, target_parallel_config: Any, real_vocab_size: int
) -> SaguaroSpeculativeConfig:
    """What `EngineArgs.create_speculative_config` returns for method `saguaro`."""
    return SaguaroSpeculativeConfig(
        method="custom_class",
        model=DRAFTER,
        num_speculative_tokens=saguaro.num_speculative_tokens,
        target_model_config=target_model_config,
        target_parallel_config=target_parallel_config,
        saguaro=saguaro,
        real_vocab_size=real_vocab_size,
    )
