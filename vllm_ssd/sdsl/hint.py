"""The one line that saguaro may log at its start: this draft is far from what advice would choose.

`size_hint` is a pure function of sizes and of what the rounds measured; `SizeHint` asks it once there
were enough of them. Knows no engine.
"""

import logging

from vllm_ssd import theory
from vllm_ssd.metrics import Totals
from vllm_ssd.sdsl.models import num_params_on_disk
from vllm_ssd.sdsl.sizes import show_size

logger = logging.getLogger("vllm.saguaro")

_FAR = 4.0  # times N_opt, or that part of it
_SLOW = 0.10  # share of the trees that are late, or not as deep as was asked
_FEW_ACCEPTED = 0.4  # acceptance rate of a draft
# N_opt = M_0 + μ·M as in `scaling_law.linear_rule`, whose scipy an engine need not have.
_SLOPE, _START = 2.71e-3, 8.71e7
_SMALL_TARGET = 1e9  # below it the rule does not hold
_ENOUGH_ROUNDS = 500


def size_hint(
    target_params: float,
    draft_params: float,
    num_speculative_tokens: int,
    slow_rate: float | None = None,
    acceptance: float | None = None,
    names: tuple[str, str] | None = None,
) -> str | None:
    """One line, or None where there is nothing to say.

    Speaks only if the draft is outside a quarter to four times N_opt *and* what was measured agrees:
    too large and too slow, or too small and seldom accepted. SSD hides a draft's time, so a large draft
    that is in time is right. For targets under 1B parameters, where the rule does not hold, measured
    figures alone never speak.

    `slow_rate`: share of the trees that were late, or not as deep as was asked; `acceptance`: share of the drafts
    accepted, given that those before were; None: not measured. `names`: target and draft, for the
    command in the line.
    """
    if target_params < _SMALL_TARGET or draft_params <= 0:
        return None
    best, most = _START + _SLOPE * target_params, num_speculative_tokens
    if draft_params > _FAR * best and slow_rate is not None and slow_rate > _SLOW:
        what = f"and {slow_rate:.0%} of its trees are late or short: try a smaller one, or a K under {most}"
    elif draft_params < best / _FAR and acceptance is not None and acceptance < _FEW_ACCEPTED:
        what = f"and {acceptance:.0%} of its drafts are accepted: try a larger draft"
    else:
        return None
    target, draft = names or ("TARGET", "DRAFT")
    return (
        f"Saguaro: the draft ({show_size(draft_params)}) is {draft_params / best:.2g} times the size that scaling laws "
        f"ask for ({show_size(best)}) {what}. Compare drafts with: "
        f"vllm-ssd advise --target {target} --draft {draft} OTHERS --measure (size_hint: false silences this line)"
    )


class SizeHint:
    """Logs the line at most once, after enough rounds."""

    def __init__(self, target: str, draft: str, num_speculative_tokens: int, enabled: bool = True) -> None:
        """`target`, `draft`: folders or hub names; sizes are read from weights that are here, else it is silent."""
        self._names, self._most = (target, draft), num_speculative_tokens
        sizes = [num_params_on_disk(name) if enabled else None for name in self._names]
        self._sizes = None if None in sizes else sizes
        self.open = self._sizes is not None
        """Whether there may still be something to say."""

    def __call__(self, totals: Totals) -> None:
        """Look at the totals since the start; costs nothing once it has spoken or found nothing to say."""
        if not self.open or totals.rounds < _ENOUGH_ROUNDS:
            return
        self.open = False
        line = size_hint(*self._sizes, self._most, measured_slow_rate(totals), measured_acceptance(totals), self._names)
        if line is not None:
            logger.info("%s", line)


def measured_slow_rate(totals: Totals) -> float:
    """Share of the rounds with a late tree, or of the hits that brought fewer drafts than were asked for."""
    hits = totals.hits + totals.part_hits
    return max(totals.late_rounds / max(totals.rounds, 1), totals.part_hits / hits if hits else 0.0)


def measured_acceptance(totals: Totals) -> float | None:
    """a, from how many drafts a row had and how many of them were accepted; None without drafts."""
    rows = totals.verified_rows - totals.fallback_none
    if rows <= 0 or totals.drafted_tokens <= 0:
        return None
    drafts = max(1, round(totals.drafted_tokens / rows))
    tokens = min(1.0 + totals.accepted_tokens / rows, drafts + 1.0)
    return theory.acceptance_from_tokens(tokens, drafts)
