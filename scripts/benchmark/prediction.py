"""What `vllm_ssd.theory` expects of a result, from parts that were measured, never from its speed.

Tokens come from acceptance by position, times from the parts of a round. The inputs of one repeat
are those measured in the *other* repeats (with a single repeat: its own). Saguaro's acceptance is
taken from vLLM's `draft_model` on the same workload where that was run: the drafts are the same
model's. Saguaro's own counters give the shares of hits and fallbacks, and its times.
"""

import statistics
from collections.abc import Sequence

from benchmark.measurement import Measurement, median
from benchmark.report import Result
from vllm_ssd.theory import Source, predict_tokens_per_second


def predicted_tok_s(result: Result, results: Sequence[Result]) -> float | None:
    """Tokens a second as `tok_s` counts them, prefill included; None where a part was not measured."""
    runs = result.measurements
    reference = _same_drafts(result, results)
    predictions = []
    for place, run in enumerate(runs):
        others = [*runs[:place], *runs[place + 1 :]] or [run]
        rate = _decode_rate(result.engine.method, median(others), reference)
        if rate is None:
            return None
        first = len(result.outputs[0])  # first tokens come from the prefill steps
        seconds = statistics.median(other.prefill_s for other in others)
        predictions.append(run.tokens / (seconds + (run.tokens - first) / rate))
    return statistics.median(predictions) if predictions else None


def _decode_rate(method: str, parts: Measurement, reference: Sequence[float] | None) -> float | None:
    """Tokens a second between prefills."""
    if parts.decode_step_ms is None or parts.rows_per_round is None:
        return None
    step = 1e-3 * parts.decode_step_ms
    if method == "none":
        return predict_tokens_per_second(parts.rows_per_round, [Source(1.0, 0, 0.0)], step, 0.0)
    if parts.drafting_share is None or parts.drafts_per_drafting_row is None:
        return None
    acceptance = reference or parts.acceptance_by_position or [0.0]
    drafting = min(parts.drafting_share, 1.0)
    sources = [Source(drafting, parts.drafts_per_drafting_row, acceptance), Source(1.0 - drafting, 0, 0.0)]
    if method != "saguaro":
        return predict_tokens_per_second(parts.rows_per_round, sources, step, 0.0)
    verify, wait = 1e-3 * (parts.verify_ms_per_round or 0.0), 1e-3 * (parts.wait_ms_per_round or 0.0)
    # What is left of a step: vLLM's scheduler and output, and picking the drafts.
    overhead = max(step - verify - wait, 0.0)
    return predict_tokens_per_second(parts.rows_per_round, sources, verify, overhead, wait)


def _same_drafts(result: Result, results: Sequence[Result]) -> Sequence[float] | None:
    """Acceptance by position of vLLM's draft_model with the same K on the same workload, for saguaro."""
    if result.engine.method != "saguaro":
        return None
    for other in results:
        same = other.workload == result.workload and other.engine.k == result.engine.k
        if other.engine.method == "draft_model" and same and other.measurements:
            return median(other.measurements).acceptance_by_position
    return None
