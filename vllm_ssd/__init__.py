"""Speculative Speculative Decoding (arXiv 2603.03251) for vLLM: the method `saguaro`."""

from typing import Any

__version__ = "0.1.0"


def get_stats(llm: Any) -> dict[str, float | bool]:
    """Totals of an engine that runs saguaro, as described in `vllm_ssd.metrics.Totals`.

    `llm`: a `vllm.LLM`. Raises `RuntimeError` if it does not run saguaro. Of an `AsyncLLM`, await
    `collective_rpc("get_saguaro_stats")` and take the answer that is not None.
    """
    try:
        answers = llm.collective_rpc("get_saguaro_stats")
    except Exception as error:  # which one depends on the executor
        if "get_saguaro_stats" not in str(error):
            raise
        raise RuntimeError("this engine does not run the speculative method 'saguaro'") from error
    return next(answer for answer in answers if answer is not None)
