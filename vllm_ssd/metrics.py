"""What a user may ask for: totals since the start, and a line in the log.

Everything is a total, so that rates can be formed over any span.
"""

import bisect
import dataclasses
import logging
import time
from collections.abc import Iterable

logger = logging.getLogger("vllm.saguaro")

_LOG_EVERY = 10.0  # seconds, as vLLM's own statistics
_MOST_POSITIONS = 33  # a verification may stop after 0 to 32 drafts
_STEP_BOUNDS = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25)


class Histogram:
    """How often a value fell into each bucket, and the sum of all values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: the largest value of each bucket, rising; a last bucket takes the rest."""
        self.bounds = (*bounds, float("inf"))
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


def _by_position() -> list[int]:
    return [0] * _MOST_POSITIONS


@dataclasses.dataclass
class Totals:
    """Counts and seconds since the engine started."""

    rounds: int = 0
    """Steps of the target after which drafts were handed out."""
    verified_rows: int = 0
    """Rows summed over rounds."""
    lookups: int = 0
    """Rows that looked for drafts in their tree: hits + part_hits + misses."""
    hits: int = 0
    """The tree held all the drafts the row could take."""
    part_hits: int = 0
    """The tree held some of them."""
    misses: int = 0
    """The tree held none."""
    late_rounds: int = 0
    """Rounds in which a row's outcome was foreseen but has fewer drafts than were planned for it."""
    fallback_draft: int = 0
    """Misses that waited for the draft (JIT)."""
    fallback_ngram: int = 0
    """Misses that took n-grams."""
    fallback_none: int = 0
    """Misses that went on without drafts."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    verified_drafts_tree: int = 0
    """Drafts verified, and below accepted, by source: a whole branch of the tree, ..."""
    accepted_drafts_tree: int = 0
    verified_drafts_part: int = 0
    """... the built part of a branch, ..."""
    accepted_drafts_part: int = 0
    verified_drafts_draft: int = 0
    """... drafts that the row waited for (JIT), ..."""
    accepted_drafts_draft: int = 0
    verified_drafts_ngram: int = 0
    """... n-grams."""
    accepted_drafts_ngram: int = 0
    branches: int = 0
    """Branches that the draft began."""
    branches_cancelled: int = 0
    """Branches that an outcome stopped before all their drafts were built."""
    select_seconds: float = 0.0
    """From emitted tokens to drafts handed over, without waiting."""
    wait_seconds: float = 0.0
    """The target waiting for the draft."""
    verify_seconds: float = 0.0
    """Forward and sampling of the target, decoding steps only."""
    draft_seconds: float = 0.0
    """The draft at work, hidden behind the target or not; of several drafts the sum."""
    draft_kv_usage: float = 0.0
    """Share of the draft's KV slots in use, the latest; of several drafts the largest."""
    lookups_per_pos: list[int] = dataclasses.field(default_factory=_by_position)
    """Lookups after a verification that accepted 0, 1, 2, ... drafts."""
    hits_per_pos: list[int] = dataclasses.field(default_factory=_by_position)
    """Hits among them."""
    tree_steps: Histogram = dataclasses.field(default_factory=lambda: Histogram(_STEP_BOUNDS))
    """Seconds of each tree step of the draft: one more token for every branch."""

    hits_per_part: list[int] = dataclasses.field(default_factory=list)
    """Hits and part hits by the draft that built them, of several that share each tree; else empty."""
    _seen: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)  # part -> seconds, KV usage

    def observe_draft(self, busy_seconds: float, kv_usage: float, part: int = 0) -> None:
        """A draft's own total of busy seconds, which begins anew when it is restarted."""
        before = self._seen.get(part, (0.0, 0.0))[0]
        self.draft_seconds += busy_seconds - before if busy_seconds >= before else busy_seconds
        self._seen[part] = (busy_seconds, kv_usage)
        self.draft_kv_usage = max(usage for _, usage in self._seen.values())

    def observe_tree(self, step_seconds: Iterable[float], cancelled: int) -> None:
        """What a push of the draft says of its tree steps and of branches given up unfinished."""
        for seconds in step_seconds:
            self.tree_steps.observe(seconds)
        self.branches_cancelled += cancelled

    def observe_verified(self, source: str, num_drafts: int, num_accepted: int) -> None:
        """A verification looked at `num_drafts` drafts of this source, and accepted the first `num_accepted`."""
        if num_drafts:
            name = f"verified_drafts_{source}"
            setattr(self, name, getattr(self, name) + num_drafts)
            name = f"accepted_drafts_{source}"
            setattr(self, name, getattr(self, name) + num_accepted)

    def observe_row(self, num_emitted: int, num_verified: int, num_drafts: int) -> None:
        """A row emitted tokens, after a verification of `num_verified` drafts, and got `num_drafts` for the next."""
        self.verified_rows += 1
        self.emitted_tokens += num_emitted
        self.accepted_tokens += max(num_emitted - 1, 0) if num_verified else 0
        self.drafted_tokens += num_drafts

    def observe_lookup(self, num_accepted: int, found: int, wanted: int, part: int = 0) -> None:
        """After a verification that accepted so many drafts, a row found `found` of `wanted` in its tree.

        `part`: of several drafts that share the tree, the one that built what was found.
        """
        hit = found >= wanted
        position = min(max(num_accepted, 0), _MOST_POSITIONS - 1)
        self.lookups += 1
        self.lookups_per_pos[position] += 1
        self.hits_per_pos[position] += hit
        self.hits += hit
        self.part_hits += 0 < found < wanted
        self.misses += not found
        if found and self.hits_per_part:
            self.hits_per_part[part] += 1

    def as_dict(self) -> dict[str, float]:
        """Name → total, of all that is one number."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, (int, float))}


class PeriodicLog:
    """One line every few seconds while there is work."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._logged_at = time.monotonic()

    def __call__(self, totals: Totals) -> None:
        """Log what changed, if it is time to."""
        now = time.monotonic()
        if now - self._logged_at < _LOG_EVERY:
            return
        now_totals = totals.as_dict()
        delta = {key: value - self._before.get(key, 0) for key, value in now_totals.items()}
        self._before, self._logged_at = now_totals, now
        if delta["rounds"]:
            logger.info("%s", describe(delta))


def describe(totals: dict[str, float]) -> str:
    """A line of figures from totals (or differences of totals)."""
    lookups, rounds = max(totals["lookups"], 1), max(totals["rounds"], 1)
    return (
        f"Saguaro: hit rate {totals['hits'] / lookups:.1%} (part hits {totals['part_hits'] / lookups:.1%}), "
        f"acceptance length {totals['emitted_tokens'] / max(totals['verified_rows'], 1):.2f}, "
        f"fallbacks draft {totals['fallback_draft']:.0f} n-gram {totals['fallback_ngram']:.0f} "
        f"none {totals['fallback_none']:.0f}, per round: verify {1e3 * totals['verify_seconds'] / rounds:.1f} ms, "
        f"select {1e3 * totals['select_seconds'] / rounds:.2f} ms, "
        f"wait {1e3 * totals['wait_seconds'] / rounds:.2f} ms, draft {1e3 * totals['draft_seconds'] / rounds:.1f} ms"
    )
