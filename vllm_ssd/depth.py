"""How many drafts a row should take: as many as pay, none if none do.

Drafts are verified in one forward, but a forward over more tokens takes longer, a little on an
idle GPU, in proportion on a busy device. The depth d that maximises E(d) / T(n·(1 + d)) is
taken, with E the expected tokens of a row, T the measured time of a verify and n the rows.
"""

from vllm_ssd.statistics import DriftingTime, MixedAcceptance

_PROBE_EVERY = 64  # rounds between looks at whether drafting pays again
_PROBE_ROUNDS = 4  # that a look takes: the draft has no tree at its first round
_EXPLORE_EVERY = 8  # rounds between detours while all loads were alike
_ENOUGH_SPREAD = 0.05


class DepthControl:
    """Chooses the number of drafts for each round from what was measured."""

    def __init__(self, most: int) -> None:
        """`most`: K, the option num_speculative_tokens."""
        self._most = most
        self._acceptance = MixedAcceptance(most)
        self._verify_time = DriftingTime()  # by tokens in the batch
        self._round = 0
        self.depth = most
        """What was chosen last."""

    def observe_verify(self, num_tokens: int, seconds: float) -> None:
        """A decoding step over `num_tokens` tokens took `seconds`."""
        self._verify_time.observe(num_tokens, seconds)

    def observe_outcome(self, num_drafts: int, num_accepted: int, samples: bool = False) -> None:
        """Of `num_drafts` drafts of a row, the first `num_accepted` were accepted."""
        self._acceptance.observe(num_drafts, num_accepted, samples)

    def expected_tokens(self, num_drafts: int) -> float:
        """E of a row with so many drafts, in the latest batch's mixture of greedy and sampled rows."""
        return self._acceptance.expected_tokens(num_drafts)

    @property
    def sampled_share(self) -> float:
        """Of the rows in the latest batch."""
        return self._acceptance.sampled_share

    def verify_seconds(self, rows: int, depth: int) -> float:
        """T of a batch of `rows` rows with `depth` drafts each; 0 while unknown."""
        return self.verify_seconds_of(rows * (1 + depth))

    def verify_seconds_of(self, num_tokens: float) -> float:
        """T of a batch of `num_tokens` tokens; 0 while unknown."""
        return self._verify_time.seconds(num_tokens)

    def seconds_per_token(self) -> float:
        """What a token more in the batch adds to T; 0 while unknown."""
        return self._verify_time.slope()

    def choose(self, rows: int, sampled: int = 0) -> int:
        """The depth for a batch of `rows` rows, `sampled` of which sample."""
        self._round += 1
        self._acceptance.sampled_share = sampled / rows if rows else 0.0
        self.depth = self._best(rows)
        if self.depth == 0 and self._round % _PROBE_EVERY >= _PROBE_EVERY - _PROBE_ROUNDS:
            self.depth = 1
        elif rows > 1 and self._verify_time.spread < _ENOUGH_SPREAD and self._round % _EXPLORE_EVERY == 0:
            self.depth = self._most // 2
        return self.depth

    def _best(self, rows: int) -> int:
        if not self._verify_time.trusted:
            return self._most
        return max(
            range(self._most, -1, -1),
            key=lambda depth: self.expected_tokens(depth) / self.verify_seconds(rows, depth),
        )
