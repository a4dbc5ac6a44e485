"""Speculative Speculative Decoding (arXiv 2603.03251) for vLLM: the method `saguaro`."""

from typing import Any

__version__ = "0.1.0"


def get_stats(llm: Any) -> dict[str, float | bool]:
    """Totals of an engine that runs saguaro, as described in `vllm_ssd.metrics.Totals`.

    `llm`: a `vllm.LLM`, or anything else with its `collective_rpc`. Raises `RuntimeError` if
    the engine does not run saguaro.
    """
    try:
        answers = llm.collective_rpc("get_saguaro_stats")
    except AttributeError as error:
        raise RuntimeError("this engine does not run the speculative method 'saguaro'") from error
    return next(answer for answer in answers if answer is not None)
