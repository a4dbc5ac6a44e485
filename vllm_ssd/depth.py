"""How many drafts a row should take: as many as pay, none if none do.

Drafts are verified in one forward, but a forward over more tokens takes longer, a little on an
idle GPU, in proportion on a busy device. The depth d that maximises E(d) / T(n·(1 + d)) is
taken, with E the expected tokens of a row, T the measured time of a verify and n the rows.
"""

from vllm_ssd.statistics import DriftingTime, MixedAcceptance

_PROBE_EVERY = 64  # rounds between looks at whether drafting pays again
_PROBE_ROUNDS = 4  # that a look takes: the draft has no tree at its first round
_DETOUR_EVERY = (8, 32)  # rounds between looks at another depth: at first, later
_DETOUR_ROUNDS = 2  # that such a look takes: the tree of the first is as deep as the rounds before


class DepthControl:
    """Chooses the number of drafts for each round from what was measured."""

    def __init__(self, most: int) -> None:
        """`most`: K, the option num_speculative_tokens."""
        self._most = most
        self._acceptance = MixedAcceptance(most)
        self._verify_time = DriftingTime()  # by tokens in the batch
        self._round = 0
        self._detours = self._detour = 0  # how many; the depth of the latest
        self._probes = self._probed = False  # in the coming verification, in the one before
        self.depth = most
        """What was chosen last."""

    def observe_verify(self, num_tokens: int, seconds: float) -> None:
        """A decoding step over `num_tokens` tokens took `seconds`."""
        self._verify_time.observe(num_tokens, seconds)

    def observe_outcome(self, num_drafts: int, num_accepted: int, samples: bool = False) -> None:
        """Of `num_drafts` drafts of a row, the first `num_accepted` were accepted.

        In the verification that ended before the latest `choose`. A row of a probe speaks for the rounds between.
        """
        rows = _PROBE_EVERY / _PROBE_ROUNDS if self._probed else 1.0
        self._acceptance.observe(num_drafts, num_accepted, samples, rows)

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
        self._probed, self._probes = self._probes, False
        if self.depth == 0:
            self._probes = self._round % _PROBE_EVERY >= _PROBE_EVERY - _PROBE_ROUNDS
            self.depth = int(self._probes)
        elif (left := -self._round % _DETOUR_EVERY[self._verify_time.trusted]) < _DETOUR_ROUNDS:
            if left == _DETOUR_ROUNDS - 1:
                self._detour = self._another(self.depth)
            self.depth = self._detour
        return self.depth

    def _another(self, depth: int) -> int:
        """A depth to look at: its neighbours in turn with the deepest and a middle one."""
        self._detours += 1
        around = (depth + 1, depth - 1, self._most, self._most // 2)
        others = [other for other in around if 0 < other <= self._most and other != depth]
        return others[self._detours % len(others)] if others else 0

    def _best(self, rows: int) -> int:
        if not self._verify_time.trusted:
            return self._most
        return max(
            range(self._most, -1, -1),
            key=lambda depth: self.expected_tokens(depth) / self.verify_seconds(rows, depth),
        )
