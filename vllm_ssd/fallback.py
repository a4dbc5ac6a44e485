"""What a row takes that missed: it waits for the draft (JIT), takes n-grams, or nothing.

The rule of the paper at any batch size (arXiv 2603.03251; its b* is this rule at equilibrium): wait
for the m drafts that bring the most. Waiting costs time in which the batch would emit R tokens a
second, so the gain of a round is N(m) − R · (T_v(m) + T_jit(m)), N being the expected tokens of the
whole batch and R its rate in the long run; every quantity is measured while running. (To compare
N(m) / T(m) of this round alone is wrong: a round after a miss is a poor one, and would wait too long.
So is an R over steps in which prompts are read, if there are others: they take their time whatever is
decided here.)

The choice also decides how the next round begins. Where no drafts are verified, the verification can
end in one place only, and the tree bets on that with all its branches: the round after is a hit more
often than after a wait. And while some rows wait, the draft works for them instead of for the trees of
the others, which then hit less. Both are measured: how often rows that missed, and rows that hit, hit
in the round after a wait, and after none. A hit is worth what it emits more than a miss, less the time
that verifying it takes.
"""

from collections.abc import Sequence

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.depth import DepthControl
from vllm_ssd.statistics import DriftingTime, MixedAcceptance

_TRIAL_EVERY = 32  # decisions between trials of what was not chosen, to notice when it pays
_TRIAL_SHARE = 0.02  # of the time between them, that a trial of waiting may take
_FIRST_WAITS = 3  # before waiting is judged: the first of an engine may be slow
_NGRAM_MEMORY = 20.0  # rows
_UNKNOWN_PATIENCE = 1.0  # seconds to wait while nothing was measured
_PATIENCE = 4.0  # times the expected wait
_FORGET_ROUND = 0.95  # weight of the past at each round: the batch changes
_LONGEST_ROUND = 2.0  # seconds; longer ones were pauses


class FallbackRule:
    """Decides, round by round, for the rows that missed."""

    def __init__(self, config: SaguaroConfig, depth: DepthControl) -> None:
        self._setting = config.fallback
        self._threshold = config.fallback_batch_threshold
        self._depth = depth
        self._wait_time = DriftingTime(in_proportion=True)  # by number of drafts waited for
        self._came = 1.0  # part of the drafts waited for that came in time
        self._emitted = self._seconds = 0.0  # of the whole batch, over the recent rounds
        self._only_mixed = True  # of these rounds, all read prompts
        self._acceptance = MixedAcceptance(config.num_speculative_tokens)  # of drafts that were waited for
        self._waits = 0
        self._ngram_tokens = 1.0  # tokens a row emits after n-grams were looked up
        self._ngram_rows = 1.0  # that this is the mean of
        # Chance of a hit in the next round of a row that missed or not, by whether the batch waited.
        self._next_hit = {(missed, waited): 0.5 for missed in (True, False) for waited in (True, False)}
        self._decisions, self._seconds_since = 0, 0.0  # all alike; since the last trial
        self._chose_to_wait = False

    def observe_wait(self, num_drafts: int, seconds: float, came: float = 1.0) -> None:
        """Waiting for `num_drafts` drafts took `seconds`, and this part of them came."""
        self._waits += 1
        self._wait_time.observe(num_drafts, seconds)
        self._came += 0.5 * (came - self._came)

    def observe_waited(self, num_drafts: int, num_accepted: int, samples: bool) -> None:
        """Of drafts that a row waited for, so many were accepted: fewer than of others, after a miss."""
        self._acceptance.observe(num_drafts, num_accepted, samples)

    def observe_ngrams(self, num_emitted: int) -> None:
        """A row that took n-grams, or found none, emitted so many tokens."""
        self._ngram_rows = min(self._ngram_rows + 1.0, _NGRAM_MEMORY)
        self._ngram_tokens += (num_emitted - self._ngram_tokens) / self._ngram_rows

    def observe_next(self, missed: bool, waited: bool, hit: float) -> None:
        """A row missed or not, its batch waited or not; in the next round this part of its drafts was there."""
        self._next_hit[missed, waited] += 0.05 * (hit - self._next_hit[missed, waited])

    def observe_round(self, num_emitted: int, seconds: float, reads_prompts: bool = False) -> None:
        """A round of the whole batch emitted so many tokens, from one selection of drafts to the next.

        Rounds that read prompts count only until there are others.
        """
        if seconds > _LONGEST_ROUND or (reads_prompts and not self._only_mixed):
            return
        if self._only_mixed and not reads_prompts:
            self._only_mixed, self._emitted, self._seconds = False, 0.0, 0.0
        self._seconds_since += seconds
        self._emitted = _FORGET_ROUND * self._emitted + num_emitted
        self._seconds = _FORGET_ROUND * self._seconds + seconds

    def takes_ngrams(self) -> bool:
        """Whether rows that do not wait look up n-grams; so do rows whose draft is down."""
        return self._setting != "none"

    def patience(self, num_drafts: int) -> float:
        """Seconds after which a step stops waiting for `num_drafts` drafts."""
        return _PATIENCE * self._wait_time.seconds(num_drafts) if self._wait_time.known else _UNKNOWN_PATIENCE

    def drafts_to_wait_for(self, hits: Sequence[int], misses: int, depth: int) -> int:
        """m, 0 for not waiting. `hits`: drafts of each row that hit; `misses`: rows that could wait."""
        if misses == 0 or self._setting in ("ngram", "none"):
            return 0
        if self._setting == "draft":
            return depth
        if self._threshold is not None:
            return depth if len(hits) + misses <= self._threshold else 0
        self._acceptance.sampled_share = self._depth.sampled_share
        if self._waits < _FIRST_WAITS:
            return depth
        worth_of_hit = self._worth_of_hit(depth)
        best = max(
            range(depth, -1, -1),
            key=lambda m: self._gain(hits, misses, m) + self._hits_after(hits, misses, m) * worth_of_hit,
        )
        if self._is_time_for_a_trial(best, depth):
            return 0 if best else depth
        return best

    def _is_time_for_a_trial(self, best: int, depth: int) -> bool:
        """Whether to do what was not chosen for long: wait for `depth` drafts, or not."""
        self._decisions = self._decisions + 1 if (best > 0) == self._chose_to_wait else 1
        self._chose_to_wait = best > 0
        affordable = best > 0 or self._wait_time.seconds(depth) <= _TRIAL_SHARE * self._seconds_since
        if self._decisions < _TRIAL_EVERY or not affordable:
            return False
        self._decisions, self._seconds_since = 0, 0.0
        return True

    def _hits_after(self, hits: Sequence[int], misses: int, wanted: int) -> float:
        """Expected rows that hit in the next round."""
        return sum(rows * self._next_hit[missed, wanted > 0] for rows, missed in ((misses, True), (len(hits), False)))

    def _worth_of_hit(self, depth: int) -> float:
        """Tokens that a row emits more if it hits, less what the time would bring."""
        seconds = depth * self._depth.seconds_per_token()
        lost = self._emitted / self._seconds * seconds if self._seconds else 0.0
        return max(self._depth.expected_tokens(depth) - self._ngram_tokens - lost, 0.0)

    def _gain(self, hits: Sequence[int], misses: int, wanted: int) -> float:
        """Expected tokens of the batch if the misses wait for `wanted` drafts, less what the time would bring."""
        tokens_hit = sum(self._depth.expected_tokens(count) for count in hits)
        if wanted == 0:
            load, tokens, waited = 1.0, self._ngram_tokens, 0.0
        else:
            load = 1.0 + wanted
            tokens = 1.0 + self._came * (self._acceptance.expected_tokens(wanted) - 1.0)
            waited = self._wait_time.seconds(wanted)
        num_tokens = sum(hits) + len(hits) + misses * load
        verify = self._depth.verify_seconds_of(num_tokens)
        if self._seconds == 0.0:  # the first rounds: as if all were like this one
            return (tokens_hit + misses * tokens) / (verify + waited) if verify else float(wanted)
        return tokens_hit + misses * tokens - self._emitted / self._seconds * (verify + waited)
