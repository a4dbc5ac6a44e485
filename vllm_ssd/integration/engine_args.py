"""Where the user's speculative configuration enters: the one function of vLLM that is wrapped."""

import functools
from collections.abc import Mapping
from typing import Any

METHOD = "saguaro"


def install() -> None:
    """Wrap `EngineArgs.create_speculative_config`, once."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config
    if getattr(original, "_saguaro", False):
        return

    @functools.wraps(original)
    def create_speculative_config(self, target_model_config, target_parallel_config):
        options = _merged_options(self)
        if options.get("method") != METHOD:
            return original(self, target_model_config, target_parallel_config)
        from vllm_ssd.integration.start_checks import build

        return build(options, target_model_config, target_parallel_config)

    create_speculative_config._saguaro = True
    EngineArgs.create_speculative_config = create_speculative_config


def _merged_options(args: Any) -> dict[str, Any]:
    """`--speculative-config` together with the flags that stand for single keys of it."""
    given: Mapping[str, Any] = args.speculative_config or {}
    options = {key.replace("-", "_"): value for key, value in given.items()}
    flags = (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens"))
    for attribute, key in flags:
        value = getattr(args, attribute, None)
        if value is None:
            continue
        if key in options and METHOD in (value, options.get("method")):
            flag = "--" + attribute.replace("_", "-")
            raise ValueError(f"{flag} and --speculative-config[{key!r}] are mutually exclusive")
        options.setdefault(key, value)
    return options
