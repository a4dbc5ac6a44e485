"""What the draft has to tell its target: gathered while it works, taken when a step is over."""

import logging
import time
from collections.abc import Callable

from vllm_ssd.draft.sequence import Sequence
from vllm_ssd.messages import Branches, Growth, Law, Push, Report

logger = logging.getLogger("vllm_ssd.draft")

_REPORT_SECONDS = 1.0


class Outbox:
    """The parts of the next `Push`."""

    def __init__(self, report: Callable[[], Report | None], part: int = 0) -> None:
        """`report`: asked once a second for what was measured and decided; None: nothing yet.

        `part`: of the tree, that this draft builds.
        """
        self._report = report
        self._part = part
        self._report_at = 0.0
        self._clear()

    def _clear(self) -> None:
        self._items: list[Branches | Growth] = []
        self._lost: list[int] = []
        self._declined: list[int] = []
        self._tree_seconds: list[float] = []
        self._cancelled = 0

    def add_branches(self, sequence: Sequence, round_id: int, outcomes: list[tuple[int, int]], depth: int = 0) -> None:
        """New branches hang on the trunk, with `depth` drafts planned for each; without `outcomes` one at its end."""
        self._add(sequence, round_id, outcomes, depth=depth)

    def add_resumed(self, sequence: Sequence, round_id: int) -> None:
        """The branches of the wave had rested, and grow again."""
        outcomes = [(branch.offset, branch.tokens[0]) for branch in sequence.wave]
        self._add(sequence, round_id, outcomes, drafts=[branch.tokens[1:] for branch in sequence.wave])

    def _add(self, sequence: Sequence, round_id: int, outcomes: list[tuple[int, int]], **fields) -> None:
        offsets = [offset for offset, _ in outcomes]
        token_ids = [token_id for _, token_id in outcomes]
        trunk, length = list(sequence.trunk), len(sequence.tokens)
        self._items.append(Branches(sequence.seq_id, round_id, length, trunk, offsets, token_ids, **fields))

    def add_growth(self, sequence: Sequence, token_ids: list[int], law: Law | None) -> None:
        """The latest branches, or the first of them, grew by one token each."""
        self._items.append(Growth(sequence.seq_id, token_ids, law))

    def add_tree_step(self, seconds: float) -> None:
        """A tree step took so long."""
        self._tree_seconds.append(seconds)

    def add_cancelled(self, num_branches: int) -> None:
        """So many branches were given up before all their drafts were built."""
        self._cancelled += num_branches

    def lose(self, seq_id: int) -> None:
        """The draft cannot go on with a sequence."""
        self._lost.append(seq_id)

    def decline(self, sequence: Sequence) -> None:
        """The target need not wait: the JIT drafts of this row, if it waits for any, will not come in this round."""
        if sequence.wanted:
            self._declined.append(sequence.seq_id)
            sequence.wanted = 0

    def take(self, round_id: int, busy_seconds: float, kv_usage: float) -> Push | None:
        """All since the last call, or None if there is nothing that the target must know."""
        if not self._items and not self._lost and not self._declined:
            return None
        push = Push(
            round_id,
            self._items,
            self._lost,
            self._declined,
            busy_seconds,
            kv_usage,
            self._tree_seconds,
            self._cancelled,
            self._report_when_due(),
            self._part,
        )
        self._clear()
        return push

    def _report_when_due(self) -> Report | None:
        now = time.monotonic()
        if now < self._report_at or (report := self._report()) is None:
            return None
        self._report_at = now + _REPORT_SECONDS
        logger.debug("fan-out %s, %d branches of %d drafts", report.fan_out, report.branches, report.depth)
        return report
