"""Time stamps and counters of one run made into rates and latencies. Knows no engine.

Inter-token latency (ITL): speculation delivers tokens in bursts. A burst of n tokens that
comes g seconds after the request's last delivery counts as n latencies of g/n. The first
delivery of a request is its TTFT and counts no ITL.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass
class Timeline:
    """What a run did and when; times in seconds on one clock."""

    started: float
    submitted: list[float]  # [num_requests]
    deliveries: list[list[tuple[float, int]]]  # request -> (when, how many tokens)
    steps: list[tuple[float, int, bool]]  # engine step -> (seconds, tokens, holds a first token)

    @property
    def ended(self) -> float:
        return max(bursts[-1][0] for bursts in self.deliveries)


@dataclasses.dataclass
class Measurement:
    """Figures of one run; None where a method has no such thing."""

    tok_s: float
    """Generated tokens a second from the first submission to the last token, prefill included."""
    decode_tok_s: float | None
    """The same over the engine steps that held no request's first token."""
    itl_ms_p50: float | None
    itl_ms_p99: float | None
    ttft_ms_p50: float
    round_ms_p50: float
    """Duration of an engine step that delivered tokens."""
    tokens_per_round: float | None
    """Tokens in a delivery after the first: rounds without drafts count, as 1."""
    acceptance_length: float | None
    """1 + accepted / drafts, as vLLM counts them: rounds without drafts do not count."""
    hit_rate: float | None
    """Share of the lookups for which the tree held all the drafts the row could take."""
    part_hit_rate: float | None
    """Share of the lookups for which it held some of them."""
    wait_ms_per_round: float | None
    draft_ms_per_round: float | None
    late_round_share: float | None
    tokens: int
    prefill_s: float
    """Seconds of the engine steps that held a request's first token."""
    decode_step_ms: float | None
    """Mean duration of the other engine steps that delivered tokens."""
    rows_per_round: float | None
    """Requests that got tokens in such a step."""
    verify_ms_per_round: float | None
    drafting_share: float | None
    """Rows with drafts, of all that were verified after their first token."""
    drafts_per_drafting_row: float | None
    acceptance_by_position: list[float] | None
    """Chance that the i-th draft is accepted if those before it were."""


def measure(
    timeline: Timeline,
    vllm: Mapping[str, float],
    saguaro: Mapping[str, float] | None,
    accepted_at: Sequence[float] = (),
) -> Measurement:
    """Figures of a run from its time stamps and from what the counters rose by.

    `vllm` holds vLLM's `drafts`, `draft_tokens` and `accepted`, `accepted_at` how many drafts were
    accepted at each position; `saguaro` the totals of `vllm_ssd.get_stats`.
    """
    itl = [value for bursts in timeline.deliveries for value in inter_token_latencies(bursts)]
    ttft = [bursts[0][0] - start for start, bursts in zip(timeline.submitted, timeline.deliveries, strict=True)]
    later = [count for bursts in timeline.deliveries for _, count in bursts[1:]]
    decode = [(seconds, count) for seconds, count, is_first in timeline.steps if not is_first]
    prefill_s = sum(seconds for seconds, _, is_first in timeline.steps if is_first)
    drafts = vllm["drafts"]
    tokens = sum(count for bursts in timeline.deliveries for _, count in bursts)
    totals = saguaro or {}
    rounds, lookups = totals.get("rounds", 0), totals.get("lookups", 0)
    return Measurement(
        tok_s=tokens / (timeline.ended - timeline.started),
        decode_tok_s=_ratio(sum(count for _, count in decode), sum(seconds for seconds, _ in decode)),
        itl_ms_p50=_percentile_ms(itl, 50),
        itl_ms_p99=_percentile_ms(itl, 99),
        ttft_ms_p50=1e3 * float(np.median(ttft)),
        round_ms_p50=1e3 * float(np.median([seconds for seconds, _, _ in timeline.steps])),
        tokens_per_round=_ratio(sum(later), len(later)),
        acceptance_length=1 + vllm["accepted"] / drafts if drafts else None,
        hit_rate=_ratio(totals.get("hits", 0), lookups),
        part_hit_rate=_ratio(totals.get("part_hits", 0), lookups),
        wait_ms_per_round=_ratio(1e3 * totals.get("wait_seconds", 0), rounds),
        draft_ms_per_round=_ratio(1e3 * totals.get("draft_seconds", 0), rounds),
        late_round_share=_ratio(totals.get("late_rounds", 0), rounds),
        tokens=tokens,
        prefill_s=prefill_s,
        decode_step_ms=_ratio(1e3 * sum(seconds for seconds, _ in decode), len(decode)),
        rows_per_round=_ratio(len(later), len(decode)),
        verify_ms_per_round=_ratio(1e3 * totals.get("verify_seconds", 0), rounds),
        drafting_share=_ratio(min(drafts, len(later)), len(later)) if drafts else None,
        drafts_per_drafting_row=_ratio(vllm.get("draft_tokens", 0), drafts),
        acceptance_by_position=_conditional(drafts, accepted_at),
    )


def _conditional(drafts: float, accepted_at: Sequence[float]) -> list[float] | None:
    """How many reached and passed each position → the chance to pass it, once reached."""
    rates, reached = [], drafts
    for passed in accepted_at:
        if not reached:
            break
        rates.append(min(passed / reached, 1.0))
        reached = passed
    return rates or None


def inter_token_latencies(bursts: Sequence[tuple[float, int]]) -> list[float]:
    """The latencies of one request's tokens after its first delivery, in seconds."""
    values: list[float] = []
    for (before, _), (now, count) in zip(bursts, bursts[1:], strict=False):
        values += [(now - before) / count] * count
    return values


def median(measurements: Sequence[Measurement]) -> Measurement:
    """Field by field, over the runs that have a value."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Measurement):
        values = [getattr(each, field.name) for each in measurements]
        known = [value for value in values if value is not None]
        if known and isinstance(known[0], list):  # position by position, as far as all know it
            fields[field.name] = [float(np.median(column)) for column in zip(*known)]
        else:
            fields[field.name] = float(np.median(known)) if known else None
    fields["tokens"] = int(fields["tokens"])
    return Measurement(**fields)


def _ratio(value: float, count: float) -> float | None:
    return value / count if count else None


def _percentile_ms(seconds: Sequence[float], percentile: float) -> float | None:
    return 1e3 * float(np.percentile(seconds, percentile)) if seconds else None
