"""What is measured while running, and the estimates made from it.

Plain arithmetic on floats; costs microseconds a round. Knows nothing about vLLM or torch.
"""

_FORGET = 0.98  # weight of the past at each step that is timed
_FORGET_SHAPE = 0.998  # how the time grows with the load hardly changes
_FORGET_LEVEL = 0.95  # how fast the device is, may
_FORGET_ROW = 0.995  # the same at each row that is verified
_STALL = 0.5  # a ratio that is farther from the mean tells of a stall
_STALL_FACTOR = 3.0  # times the estimate: what takes longer is a stall
_FEW = 5.0  # measurements of which one may be a stall that nothing tells of


class LinearTime:
    """Seconds as a linear function of a load (tokens of a batch, branches of a step).

    Weighted least squares over the recent past.
    """

    def __init__(self, forget: float = _FORGET) -> None:
        """`forget`: weight of the past at each observation."""
        self._forget = forget
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, load: float, seconds: float) -> None:
        """Add a measurement; an outlier far above the estimate counts as a stall, and is cut."""
        if self.trusted:
            seconds = min(seconds, _STALL_FACTOR * self.seconds(load))
        self._weight = self._weight * self._forget + 1.0
        self._x = self._x * self._forget + load
        self._y = self._y * self._forget + seconds
        self._xx = self._xx * self._forget + load * load
        self._xy = self._xy * self._forget + load * seconds

    @property
    def known(self) -> bool:
        """Whether there is anything to estimate from."""
        return self._weight > 0.0

    @property
    def trusted(self) -> bool:
        """Whether there is enough to tell a stall from what is usual."""
        return self._weight > _FEW

    @property
    def spread(self) -> float:
        """Standard deviation of the observed loads over their mean: how far the slope can be trusted."""
        if not self.known or self._x == 0.0:
            return 0.0
        mean = self._x / self._weight
        return max(self._xx / self._weight - mean * mean, 0.0) ** 0.5 / mean

    def slope(self) -> float:
        """Seconds per unit of load; 0 while all loads were alike.

        Never negative, nor so steep that no load would take less than no time.
        """
        if not self.known:
            return 0.0
        mean, average = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean * mean
        if variance <= 1e-9 * (1.0 + mean * mean):
            return 0.0
        slope = (self._xy / self._weight - mean * average) / variance
        return min(max(slope, 0.0), (1.0 - 1e-6) * average / mean)

    def seconds(self, load: float) -> float:
        """Estimated seconds at this load (above 0); 0 while nothing was observed."""
        if not self.known:
            return 0.0
        mean = self._x / self._weight
        average = self._y / self._weight
        return average + self.slope() * (load - mean)


class Deviation:
    """Mean and standard deviation of a ratio of measured to expected, over the recent past."""

    def __init__(self, mean: float = 1.0, deviation: float = 0.05, forget: float = _FORGET) -> None:
        """`mean`, `deviation`: assumed while little was observed; `forget`: weight of the past each time."""
        self._forget = forget
        self.mean = mean
        self._variance = deviation * deviation

    def observe(self, ratio: float) -> None:
        """Add a ratio; an outlier counts as a stall, and is cut."""
        distance = min(max(ratio - self.mean, -_STALL), _STALL)
        self.mean += (1.0 - self._forget) * distance
        self._variance = self._forget * (self._variance + (1.0 - self._forget) * distance * distance)

    @property
    def deviation(self) -> float:
        """Standard deviation."""
        return self._variance**0.5


class DriftingTime:
    """Seconds of a load on a device whose speed varies: their ratios to each other hardly change, their level does.

    A slope measured over the recent past alone is as much that of the device's speed, which changes
    together with the load by chance.
    """

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._shape = LinearTime(_FORGET_SHAPE)
        self._level = Deviation(forget=_FORGET_LEVEL)  # measured to expected
        self._fast_in_a_row = 0

    def observe(self, load: float, seconds: float) -> None:
        """Add a measurement; two in a row far below the estimate show that there are stalls in it, and end it.

        The first steps of a process often are stalls, and would be remembered for a thousand steps.
        """
        expected = self._shape.seconds(load)
        self._fast_in_a_row = self._fast_in_a_row + 1 if _STALL_FACTOR * seconds < expected else 0
        if self._fast_in_a_row == 2:
            self._begin_anew()
        elif self._shape.known:
            self._level.observe(seconds / expected)
        self._shape.observe(load, seconds)

    @property
    def known(self) -> bool:
        """Whether there is anything to estimate from."""
        return self._shape.known

    @property
    def trusted(self) -> bool:
        """As of `LinearTime`."""
        return self._shape.trusted

    @property
    def spread(self) -> float:
        """As of `LinearTime`."""
        return self._shape.spread

    @property
    def deviation(self) -> float:
        """Standard deviation of the measured times, over those that are expected."""
        return self._level.deviation

    def slope(self) -> float:
        """Seconds per unit of load, now; 0 while all loads were alike."""
        return self._level.mean * self._shape.slope()

    def seconds(self, load: float) -> float:
        """Estimated seconds at this load (above 0), now; 0 while nothing was observed."""
        return self._level.mean * self._shape.seconds(load)


class Acceptance:
    """A_i: the probability that the first i drafts of a row are all accepted."""

    def __init__(self, num_positions: int, prior: float = 0.7, prior_weight: float = 4.0) -> None:
        self._accepted = [prior * prior_weight] * num_positions
        self._weight = [prior_weight] * num_positions

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """A row had `num_drafts` drafts verified, and the first `num_accepted` were right."""
        for i in range(min(num_drafts, num_accepted + 1)):
            self._accepted[i] = self._accepted[i] * _FORGET_ROW + (1.0 if i < num_accepted else 0.0)
            self._weight[i] = self._weight[i] * _FORGET_ROW + 1.0

    @property
    def rate(self) -> float:
        """a: the share of drafts accepted, given that those before were."""
        return sum(self._accepted) / sum(self._weight)

    def expected_tokens(self, num_drafts: int) -> float:
        """E: tokens a row emits when `num_drafts` are verified, the bonus or recovery token included."""
        expected, chance = 1.0, 1.0
        for i in range(num_drafts):
            chance *= self._accepted[i] / self._weight[i]
            expected += chance
        return expected


class MixedAcceptance:
    """Acceptance of greedy and of sampled rows, told apart, in the mixture of a batch."""

    def __init__(self, num_positions: int) -> None:
        self._by_class = {samples: Acceptance(num_positions) for samples in (False, True)}
        self.sampled_share = 0.0
        """Of the rows in the batch that is asked about."""

    def observe(self, num_drafts: int, num_accepted: int, samples: bool) -> None:
        """As of `Acceptance`."""
        self._by_class[samples].observe(num_drafts, num_accepted)

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
