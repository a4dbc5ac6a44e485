"""Which waves of branches are begun, and which of them grow, in the time that a verification leaves.

Joins what fits (`pace.py`) with what promises most (`forecast.py`). Knows nothing about models, KV or
messages.
"""

import math

from vllm_ssd.draft.forecast import Forecast
from vllm_ssd.draft.pace import Pace
from vllm_ssd.draft.sequence import Sequence
from vllm_ssd.draft.sequences import Sequences

_MOST_WAVES = 4  # times the planned branches, while a verification is delayed


class Planner:
    """Decides for the trees of one target."""

    def __init__(self, sequences: Sequences, forecast: Forecast, pace: Pace, depth: int, most_branches: int) -> None:
        """`depth`: drafts of a branch until the target asks for others; `most_branches`: of a planned tree."""
        self._sequences = sequences
        self._forecast = forecast
        self._pace = pace
        self._most_branches = most_branches
        self.depth = depth
        """Drafts that a row takes in the next round, as the target says; 0: none."""
        self.latest_shape = (0, 0)
        """Width and depth of the trees that were planned last."""

    def shape(self, sequences: list[Sequence]) -> tuple[int, int]:
        """Width and depth of a wave for each: of what there is time for, what promises most."""
        self._forecast.learn()
        growing = len(sequences) + len(self.unfinished())  # what was begun before takes its share of each step
        shapes = self._pace.shapes(growing, max(self.depth, 1))
        sampled = sum(sequence.samples for sequence in sequences) / len(sequences)
        depth, width = max(shapes, key=lambda shape: self._forecast.expected_drafts(*shape, sampled))
        self.latest_shape = (width, depth)
        return width, depth

    @property
    def most_steps(self) -> int:
        """By which a wave grows if there is time.

        One more than is handed out: it computes the KV and the candidates of the last draft, so that a hit
        needs no glue.
        """
        return max(self.depth, 1) + 1

    def lets_step(self) -> bool:
        """Whether trees that are not full may take a step now; if not, they rest."""
        return self._pace.lets_step(max(len(self.unfinished()), 1))

    def growing(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those whose waves grow now, by the branches that there is time for.

        Branches that would be late, or have no part in an optional step, grow no more.
        """
        total = sum(len(sequence.wave) for sequence in sequences)
        optional = sum(len(sequence.wave) for sequence in sequences if not sequence.steps_due)
        most = self._pace.branches_of_one_more_step(optional)
        for sequence in sequences:
            count = len(sequence.wave)
            if not sequence.steps_due:
                count = count * most // optional
            elif (on_time := self._pace.branches_on_time(total, sequence.steps_due)) < total:
                count = max(on_time // len(sequences), 1)
            del sequence.wave[count:]
            if not sequence.wave:
                sequence.steps_left = 0
        return [sequence for sequence in sequences if sequence.wave]

    def unfinished(self) -> list[Sequence]:
        """Sequences whose trees may rest before they are full; not for the step past the last draft alone."""
        return [sequence for sequence in self._sequences if sequence.steps_left > 1]

    def to_extend(self) -> list[Sequence] | None:
        """With nothing else to do: trees that get more, for the verification is delayed by others' prompts.

        None if it is not; empty if there is time again for trees that rest.
        """
        unfinished, extensible = self.unfinished(), self._extensible()
        if self._pace.overdue and (unfinished or extensible):
            self._pace.extend()
        elif unfinished or not extensible or not self._pace.has_spare_time(len(extensible)):
            return None
        return [] if unfinished else extensible

    def _extensible(self) -> list[Sequence]:
        """Sequences whose trees are done, and may get deeper or another wave."""
        if not self.depth:
            return []
        most = _MOST_WAVES * self._most_branches
        recent = filter(self._sequences.is_recent, self._sequences)
        trees = [sequence for sequence in recent if sequence.branches and not sequence.is_exhausted]
        return [s for s in trees if len(s.branches) < most or s.short_branches(self.depth)]

    def seconds_until_more(self) -> float:
        """How long to wait for an outcome before there is work again; infinite if there will be none."""
        return self._pace.seconds_until_overdue() if self.unfinished() or self._extensible() else math.inf
