"""What a single request may ask of saguaro: to be left alone.

`SamplingParams(extra_args={"saguaro": False})`, over HTTP `"vllm_xargs": {"saguaro": false}`: the
request gets no drafts, and costs the draft nothing.
"""

import functools
from typing import Any

KEY = "saguaro"
_MEANINGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def wants_drafts(params: Any) -> bool:
    """Whether a request with these `SamplingParams` is to be drafted for.

    A value that says neither yes nor no, which `install` refuses, is as good as none.
    """
    return params is not None and (not params.extra_args or _read(params.extra_args.get(KEY, True)) is not False)


def check(params: Any) -> None:
    """Raise `ValueError` if the value says neither yes nor no."""
    extra_args = getattr(params, "extra_args", None)
    if extra_args and KEY in extra_args and _read(extra_args[KEY]) is None:
        raise ValueError(
            f"extra_args[{KEY!r}] (vllm_xargs over HTTP) is {extra_args[KEY]!r}: "
            "it must be true or false (false: no drafts for this request)."
        )


def _read(value: Any) -> bool | None:
    """vLLM's HTTP server turns JSON's booleans into 0 and 1; some clients send strings."""
    return _MEANINGS.get(str(value).strip().lower())


def install() -> None:
    """Have vLLM refuse requests with a wrong value (over HTTP: 400), in engines that run saguaro; once."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs
    if getattr(original, "_saguaro", False):
        return

    @functools.wraps(original)
    def process_inputs(self, request_id, prompt, params, *args, **kwargs):
        if hasattr(self.vllm_config.speculative_config, "saguaro"):
            try:
                check(params)
            except ValueError as error:
                raise VLLMValidationError(str(error)) from None
        return original(self, request_id, prompt, params, *args, **kwargs)

    process_inputs._saguaro = True
    InputProcessor.process_inputs = process_inputs
