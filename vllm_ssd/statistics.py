"""What is measured while running, and the estimates made from it.

Plain arithmetic on floats; costs microseconds a round. Knows nothing about vLLM or torch.
"""

import bisect
import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable

_FORGET = 0.98  # weight of the past at each ratio
_FORGET_ROW = 0.995  # the same at each row that is verified
_STALL = 0.5  # a ratio that is farther from the mean tells of a stall
_LEVELS = 15  # measurements that say how fast the device is now
_GROWTHS = 64  # pairs of measurements that say how the time grows with the load, which hardly changes
_ELASTICITIES = 32  # the same at a load
_RENEW_EVERY = 4  # pairs, once there are enough: medians cost time
_WEIGHT_OF_LINE = 2.0  # against that of the pairs at a load: half octaves that they span
_FEW = 5  # fewer say nothing
_ALIKE = 0.05  # logarithm of two loads' ratio, below which they hardly differ
_LEAST_SECONDS = 1e-9
_MOST_GROWTH = 1e6
_HALF_OCTAVE = 0.5 * math.log(2.0)
_PRIOR = 0.7  # acceptance while nothing was observed
_NEIGHBOUR = 4.0  # rows that the position before counts for
_LEAST_SHARE = 0.01  # of the tokens that are found


class Deviation:
    """Mean and standard deviation of a ratio of measured to expected, over the recent past."""

    def __init__(self) -> None:
        self.mean = 1.0
        self._variance = 0.05**2

    def observe(self, ratio: float) -> None:
        """Add a ratio; an outlier counts as a stall, and is cut."""
        distance = min(max(ratio - self.mean, -_STALL), _STALL)
        self.mean += (1.0 - _FORGET) * distance
        self._variance = _FORGET * (self._variance + (1.0 - _FORGET) * distance * distance)

    @property
    def deviation(self) -> float:
        """Standard deviation."""
        return self._variance**0.5


class DriftingTime:
    """Seconds by load (tokens of a batch, branches of a step), on a device whose speed varies.

    seconds = level · shape(load). Two measurements that follow each other are of nearly the same level, so that
    their difference tells of the shape. It is a straight line 1 + growth · load, whose growth is the median over
    such pairs (as in the estimator of Theil and Sen), each weighted by how much its loads differ; and where pairs
    say otherwise, each half octave of loads has an elasticity of its own, d log(seconds) / d log(load), between 0
    for a time that is constant and 1 for one in proportion to the load: their median again. The level is the median
    of the latest measurements. So neither a stall nor a device that becomes slower, or faster, is taken for what a
    load costs.
    """

    def __init__(self, in_proportion: bool = False) -> None:
        """`in_proportion`: whether the time is taken to grow so until enough was observed, or not at all."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=_LEVELS)  # load, seconds
        self._growths: deque[tuple[float, float]] = deque(maxlen=_GROWTHS)  # and their weights
        self._elasticities: dict[int, deque[tuple[float, float]]] = {}  # half octave → the same of elasticities
        self._ratio = Deviation()  # measured to expected
        self._level = 0.0
        self._num_pairs = 0
        self._growth = _MOST_GROWTH if in_proportion else 0.0
        self._first, self._corrections, self._sums = 0, [], [0.0]

    def observe(self, load: float, seconds: float) -> None:
        """Add a measurement."""
        seconds = max(seconds, _LEAST_SECONDS)
        if self._recent:
            if self.trusted:
                self._ratio.observe(seconds / self.seconds(load))
            self._compare(*self._recent[-1], load, seconds)
        self._recent.append((load, seconds))
        levels = sorted(seconds / self._shape(load) for load, seconds in self._recent)
        self._level = levels[(len(levels) - 1) // 2]

    def _compare(self, load: float, seconds: float, next_load: float, next_seconds: float) -> None:
        """What two measurements in a row say of the shape; nothing, if a stall or a jump of the level is in them."""
        if next_load < load:
            load, seconds, next_load, next_seconds = next_load, next_seconds, load, seconds
        first, last = _size(load), _size(next_load)
        span = (last - first) * _HALF_OCTAVE
        if span < _ALIKE:
            return
        elasticity = math.log(next_seconds / seconds) / span
        noise = 3.0 * self._ratio.deviation / span
        if not -noise <= elasticity <= 1.0 + noise:
            return
        self._growths.append((_growth(load, seconds, next_load, next_seconds), span))
        self._num_pairs += 1
        if not self.trusted:
            return
        is_due = self._num_pairs <= _GROWTHS or self._num_pairs % _RENEW_EVERY == 0
        if is_due:
            self._growth = max(_weighted_median(self._growths), 0.0)
        # Over several half octaves the shape is known already but for this.
        error = elasticity - math.log(self._shape(next_load) / self._shape(load)) / span
        for size in range(int(first), int(last) + 1):
            part = min(last, size + 1) - max(first, size)
            own = self._elasticities.setdefault(size, deque(maxlen=_ELASTICITIES))
            own.append((self._elasticity(size) + error, part))
        if is_due:
            self._set_shape()

    def _set_shape(self) -> None:
        first, last = min(self._elasticities), max(self._elasticities)
        corrections, sums = [], [0.0]  # of the line's elasticity in each half octave; at its lower end
        for size in range(first, last + 1):
            of_line = self._elasticity_of_line(size)
            elasticity = _weighted_median([*self._elasticities.get(size, ()), (of_line, _WEIGHT_OF_LINE)])
            corrections.append(min(max(elasticity, 0.0), 1.0) - of_line)
            sums.append(sums[-1] + _HALF_OCTAVE * corrections[-1])
        self._first, self._corrections, self._sums = first, corrections, sums

    def _elasticity_of_line(self, size: int) -> float:
        part = self._growth * math.exp((size + 0.5) * _HALF_OCTAVE)
        return part / (1.0 + part)

    def _elasticity(self, size: int) -> float:
        at = size - self._first
        correction = self._corrections[at] if 0 <= at < len(self._corrections) else 0.0
        return self._elasticity_of_line(size) + correction

    def _shape(self, load: float) -> float:
        load = max(load, 1.0)
        size = min(max(_size(load) - self._first, 0.0), len(self._corrections))
        at = int(size)
        within = (size - at) * self._corrections[at] if at < len(self._corrections) else 0.0
        return (1.0 + self._growth * load) * math.exp(self._sums[at] + _HALF_OCTAVE * within)

    @property
    def known(self) -> bool:
        """Whether there is anything to estimate from."""
        return bool(self._recent)

    @property
    def trusted(self) -> bool:
        """Whether there is enough to say how the time grows with the load."""
        return len(self._growths) >= _FEW

    @property
    def deviation(self) -> float:
        """Standard deviation of the measured times, over those that are expected."""
        return self._ratio.deviation

    def slope(self) -> float:
        """Seconds per unit of load, now, at the latest load; never negative; 0 while nothing was observed."""
        if not self._recent:
            return 0.0
        load = max(self._recent[-1][0], 1.0)
        return self.seconds(load) * self._elasticity(int(_size(load))) / load

    def seconds(self, load: float) -> float:
        """Estimated seconds at this load (above 0), now; 0 while nothing was observed."""
        return self._level * self._shape(load)

    def most_within(self, seconds: float, most: int) -> int:
        """The largest whole load, `most` at most, that is expected to take no longer; 0 if 1 does."""
        return bisect.bisect_right(range(1, most + 1), seconds, key=self.seconds)


def _growth(load: float, seconds: float, next_load: float, next_seconds: float) -> float:
    """Of the straight line through two measurements, the second with the larger load; seconds ∝ 1 + growth · load."""
    base = next_load * seconds - load * next_seconds
    return min((next_seconds - seconds) / base, _MOST_GROWTH) if base > 0.0 else _MOST_GROWTH


def _size(load: float) -> float:
    """Half octaves above 1."""
    return 2.0 * math.log2(max(load, 1.0))


def _weighted_median(pairs: Iterable[tuple[float, float]]) -> float:
    """Of values with weights."""
    ordered = sorted(pairs)
    sums = list(itertools.accumulate(weight for _, weight in ordered))
    return ordered[bisect.bisect_left(sums, 0.5 * sums[-1])][0]


class Acceptance:
    """a_i: the probability that draft i of a row is accepted, given that those before it were.

    A position that was hardly reached lately takes after the one before it: what is known of it is forgotten
    with each row, whether it was reached or not, so that deeper drafts are tried again when others do better.
    """

    def __init__(self, num_positions: int) -> None:
        self._accepted = [0.0] * num_positions
        self._weight = [0.0] * num_positions
        self._unit = 1.0  # weight of a row; growing it forgets the past

    def observe(self, num_drafts: int, num_accepted: int, rows: float = 1.0) -> None:
        """A row had `num_drafts` drafts verified, and the first `num_accepted` were right; it speaks for `rows`."""
        if num_drafts <= 0:
            return
        self._unit /= _FORGET_ROW**rows
        for i in range(min(num_drafts, num_accepted + 1)):
            self._accepted[i] += self._unit * rows * (i < num_accepted)
            self._weight[i] += self._unit * rows
        if self._unit > 1e100:
            self._accepted = [accepted / self._unit for accepted in self._accepted]
            self._weight = [weight / self._unit for weight in self._weight]
            self._unit = 1.0

    @property
    def rate(self) -> float:
        """a: the share of drafts accepted, given that those before were."""
        neighbour = _NEIGHBOUR * self._unit
        return (sum(self._accepted) + neighbour * _PRIOR) / (sum(self._weight) + neighbour)

    def expected_tokens(self, num_drafts: int) -> float:
        """E: tokens a row emits when `num_drafts` are verified, the bonus or recovery token included."""
        return 1.0 + sum(itertools.accumulate(self.rates(num_drafts), operator.mul))

    def rates(self, num_drafts: int) -> list[float]:
        """a_i of the first drafts."""
        rates, neighbour = [_PRIOR], _NEIGHBOUR * self._unit
        for accepted, weight in zip(self._accepted[:num_drafts], self._weight):
            rates.append((accepted + neighbour * rates[-1]) / (weight + neighbour))
        return rates[1:]


class Recovery:
    """Whether the draft's candidates hold the token that a verification of drawn drafts adds to the accepted ones.

    After a rejection it comes from what the target's law has above the draft's, which is little where the drafts
    are good, and of the tokens that the draft was cut to (`draft_top_m`) may be nothing at all.
    """

    def __init__(self) -> None:
        self._shares = {True: 1.0, False: 1.0}
        self._counts = {True: 0, False: 0}

    def observe(self, rejected: bool, found: bool) -> None:
        """A draft was `rejected`, or all were accepted; the token that came then was among the candidates or not."""
        self._counts[rejected] += 1
        weight = max(1.0 / (1 + self._counts[rejected]), 1.0 - _FORGET)
        self._shares[rejected] += weight * (found - self._shares[rejected])

    @property
    def ratio(self) -> float:
        """Share of the rejections whose token was found, to that of the verifications without one; may be above 1."""
        return max(self._shares[True], _LEAST_SHARE) / max(self._shares[False], _LEAST_SHARE)


class MixedAcceptance:
    """Acceptance of greedy and of sampled rows, told apart, in the mixture of a batch."""

    def __init__(self, num_positions: int) -> None:
        self._by_class = {samples: Acceptance(num_positions) for samples in (False, True)}
        self.sampled_share = 0.0
        """Of the rows in the batch that is asked about."""

    def observe(self, num_drafts: int, num_accepted: int, samples: bool, rows: float = 1.0) -> None:
        """As of `Acceptance`."""
        self._by_class[samples].observe(num_drafts, num_accepted, rows)

    def expected_tokens(self, num_drafts: int) -> float:
        """As of `Acceptance`, on average over the batch."""
        share = self.sampled_share
        expected = share and share * self._by_class[True].expected_tokens(num_drafts)
        return expected + (share < 1.0 and (1.0 - share) * self._by_class[False].expected_tokens(num_drafts))


class OutcomeCounts:
    """Where verifications stop, and which of the draft's candidates they emit there."""

    RANKS = 32
    """Ranks that are told apart; the last cell of a position counts all that are worse."""

    def __init__(self, num_drafts: int) -> None:
        """`num_drafts`: K; a verification stops at position 0..K."""
        self._cells = [[0.0] * (self.RANKS + 1) for _ in range(num_drafts + 1)]
        self._unit = 1.0  # weight of an observation; growing it forgets the past

    def observe(self, position: int, rank: int | None) -> None:
        """The token emitted at `position` had this rank among the candidates there (None: it was none)."""
        self._unit /= _FORGET_ROW
        self._cells[position][self.RANKS if rank is None else min(rank, self.RANKS)] += self._unit
        if self._unit > 1e100:
            self._cells = [[count / self._unit for count in counts] for counts in self._cells]
            self._unit = 1.0

    def shares(self) -> list[list[float]]:
        """P(position, rank), [K + 1][RANKS + 1], in sum 1 (0 while nothing was observed)."""
        total = sum(map(sum, self._cells)) or 1.0
        return [[count / total for count in counts] for counts in self._cells]
