"""Speculative Speculative Decoding (arXiv 2603.03251) for vLLM: the method `saguaro`."""

from typing import Any

__version__ = "0.1.0"


def get_stats(llm: Any) -> dict[str, float | bool]:
    """Totals of an engine that runs saguaro, as described in `vllm_ssd.metrics.Totals`.

    `llm`: a `vllm.LLM`. Raises `RuntimeError` if it does not run saguaro. Of an `AsyncLLM`, await
    `collective_rpc("get_saguaro_stats")` and take the answer that is not None.
    """
    return next(answer for answer in _ask(llm, "get_saguaro_stats") if answer is not None)


def get_report(llm: Any) -> dict[str, Any] | None:
    """What the draft has measured and decided, as described in `vllm_ssd.messages.Report`.

    None until the draft has reported, within a second of its first tree. Otherwise as `get_stats`.
    """
    return next((answer for answer in _ask(llm, "get_saguaro_report") if answer is not None), None)


def _ask(llm: Any, question: str) -> list[Any]:
    """The answers of all workers."""
    try:
        return llm.collective_rpc(question)
    except Exception as error:  # which one depends on the executor
        if question not in str(error):
            raise
        raise RuntimeError("this engine does not run the speculative method 'saguaro'") from error
