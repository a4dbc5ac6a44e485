"""Where the user's speculative configuration enters: the one function of vLLM that is wrapped."""

import difflib
import functools
from collections.abc import Mapping
from typing import Any

METHOD = "saguaro"
_CLOSE = 0.8  # of 1, by difflib; no method of vLLM's own comes near


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
            _refuse_typo(options.get("method"))
            return original(self, target_model_config, target_parallel_config)
        from vllm_ssd.integration import metrics_endpoint, request_options, start_checks

        config = start_checks.build(options, target_model_config, target_parallel_config)
        request_options.install()
        if not self.disable_log_stats:
            config.metrics_directory = metrics_endpoint.metrics_directory()
        return config

    create_speculative_config._saguaro = True
    EngineArgs.create_speculative_config = create_speculative_config


def _refuse_typo(method: Any) -> None:
    """Raise `ValueError` if our method was meant; vLLM would list its own methods."""
    if isinstance(method, str) and difflib.get_close_matches(method.strip().lower(), [METHOD], cutoff=_CLOSE):
        raise ValueError(f"speculative_config['method'] is {method!r}, which vLLM does not know; write {METHOD!r}.")


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
