"""How wide and how deep trees may grow: what fits the verification that they hide behind.

glue + d · t_tree(N) ≤ share · T_verify, with every time measured. The share leaves room for what
varies, the verifies and the steps. Knows nothing about models or sequences.
"""

import math
import time

from vllm_ssd.config import AUTO_BRANCHES, OVERDUE
from vllm_ssd.statistics import Deviation, DriftingTime

_DEVIATIONS = 3.0  # standard deviations of the times that a tree leaves free when it is planned
_DEVIATIONS_UNDER_WAY = 0.5  # the same while it grows: what was planned is cut when it gets late, not before
_LEAST_SHARE = 0.7  # on a restless machine too: narrow trees cost more than late ones
_MOST_BRANCHES = 2048  # of all trees
_WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, AUTO_BRANCHES)  # few: each new shape costs a compilation on a CPU


class Pace:
    """The clock of the rounds, and the sizes that fit."""

    def __init__(self, tree_budget: int | str) -> None:
        """`tree_budget`: branches a request, or "auto"."""
        self._fixed = None if tree_budget == "auto" else int(tree_budget)
        self._step_time = DriftingTime()  # by number of tokens: tips of branches, or a few to glue
        self._verify_ratio = Deviation()  # measured to expected
        self.verify_seconds = 0.0
        """What the verification under way is expected to take; 0 if that is unknown."""
        self._round_began = self._began = 0.0  # the latter from when it is expected to take as long
        self._extended = False
        self._delayed = False

    def begin_round(self, verify_seconds: float, began: float, observe: bool = True) -> None:
        """The target verifies since `began`, for about so long; 0 if that is unknown.

        `observe`: a verification has just ended, the one that the last call spoke of. If not, this is news of the
        one under way, which prompts of others may make much longer.
        """
        if observe and self.verify_seconds > 0.0 and not self._delayed:
            self._verify_ratio.observe((began - self._round_began) / self.verify_seconds)
        grows = verify_seconds > OVERDUE * self.verify_seconds > 0.0
        self._delayed = not observe and (grows or self._delayed)
        self.verify_seconds = verify_seconds
        self._extended = False
        self._round_began = self._began = began

    def restart_clock(self) -> None:
        """The target waited until now before it could verify."""
        self._round_began = self._began = time.perf_counter()

    def extend(self) -> None:
        """The verification is overdue: expect it to take once more as long."""
        self._extended = True
        self._began = time.perf_counter()

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A step over so many tokens took so long: the tips of all branches, or a glue."""
        self._step_time.observe(num_tokens, seconds)

    def shapes(self, sequences: int, depth: int) -> list[tuple[int, int]]:
        """(depth, branches) that each of so many trees may have, the deepest first; one branch of one draft at least.

        As deep as `depth`, and as wide as there is time for. A fixed number of branches has one shape.
        """
        if not self._timed or self._fixed is not None:
            return [(depth, self._fixed or AUTO_BRANCHES)]
        left = self._seconds_until(_DEVIATIONS)
        shapes = []
        for steps in range(depth, 0, -1):
            width = _usual_width(self._branches_within(left / steps) // sequences)
            if width > (shapes[-1][1] if shapes else 0):
                shapes.append((steps, width))
        return shapes or [(1, 1)]

    def lets_step(self, sequences: int) -> bool:
        """Whether a step of one branch for each of so many trees may be over before the outcome.

        If not, unfinished trees rest, so that the outcome finds an idle draft, until the verification is
        overdue. Trees of fixed width go on.
        """
        return self._fixed is not None or self._extended or self.branches_of_one_more_step(sequences) >= sequences

    def branches_on_time(self, num_branches: int, steps: int) -> int:
        """Of so many branches, those that can take `steps` steps more before the outcome, at least one.

        All, if the width is fixed, or if the time is up: nobody knows then how much is left.
        """
        left = self._seconds_until(_DEVIATIONS_UNDER_WAY)
        if not self._timed or self._fixed is not None or left <= 0.0:
            return num_branches
        most = self._branches_within(left / steps)
        return num_branches if most >= num_branches else max(_usual_width(most), 1)

    def branches_of_one_more_step(self, num_branches: int, steps: int = 1) -> int:
        """Of so many branches, those that one more step may take and be over before the outcome; maybe 0.

        `steps`: this one and those like it that are still to come before it.
        """
        if not self._timed:
            return num_branches
        most = self._branches_within((self._verify_ratio.mean * self.verify_seconds - self._elapsed) / steps)
        return num_branches if most >= num_branches else _usual_width(most)

    def has_spare_time(self, sequences: int) -> bool:
        """Whether so many trees may get further branches: the verification is known to take long."""
        most = self._branches_within(self._seconds_until(_DEVIATIONS)) if self._timed else 0
        return self._delayed and self._fixed is None and most >= sequences

    @property
    def overdue(self) -> bool:
        """Whether the verification takes longer than expected, as when others' prompts are prefilled."""
        return self.seconds_until_overdue() <= 0.0

    def seconds_until_overdue(self) -> float:
        """How long until then; infinite while nothing is expected."""
        if not self._timed or self._fixed is not None:
            return math.inf
        return OVERDUE * self._verify_ratio.mean * self.verify_seconds - self._elapsed

    @property
    def _timed(self) -> bool:
        return self.verify_seconds > 0.0 and self._step_time.known

    @property
    def share(self) -> float:
        """The part of an expected verify that a tree is planned to take."""
        return self._share(_DEVIATIONS)

    def _share(self, deviations: float) -> float:
        spread = math.hypot(self._verify_ratio.deviation, self._step_time.deviation)
        return max(1.0 - deviations * spread, _LEAST_SHARE) * self._verify_ratio.mean

    def _seconds_until(self, deviations: float) -> float:
        """The time until so many standard deviations before the expected end."""
        return self._share(deviations) * self.verify_seconds - self._elapsed

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def step_seconds(self, num_tokens: int) -> float:
        """Expected time of a step over so many tokens; 0 while nothing was measured."""
        return self._step_time.seconds(num_tokens)

    def _branches_within(self, seconds: float) -> int:
        """The most branches of a step that takes no longer than `seconds`; 0 if even one does."""
        return self._step_time.most_within(seconds, _MOST_BRANCHES if self._step_time.trusted else AUTO_BRANCHES)


def _usual_width(most: int) -> int:
    """The largest of a few widths that is at most `most`; 0 if none is."""
    return max((width for width in _WIDTHS if width <= most), default=0)
