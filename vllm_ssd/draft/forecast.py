"""Which outcomes of a verification the draft bets on.

Learns from each outcome where verifications stop and how far the draft's probabilities can be
taken at their word. Knows nothing about KV, models or time.

Of several drafts that share a tree each bets on a class of outcomes of its own, the most probable ones
of its class. To deal out the ranks instead would need rankings that agree to the last place, and they do
not: drafts compute the same candidates in other batches, and learn of an outcome a step earlier or
later. Two neighbours that changed places would then be built twice, or not at all, at the top of the
ranking as well. Classes never overlap, and what they lose is at the lower end: a class may hold a few
more of the most probable outcomes than another.
"""

from dataclasses import dataclass

import numpy as np

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.sequence import Candidates, Sequence
from vllm_ssd.fanout import FanOut, Sharpness, most_probable_outcomes
from vllm_ssd.statistics import Acceptance, OutcomeCounts, Recovery

_MAX_FAN_OUT = 32  # alternatives considered at one position
_MOST_LESSONS = 64
_CLASSES = (("greedy", False), ("sampled", True))


@dataclass(frozen=True)
class Part:
    """The class of outcomes that a draft bets on, of `count` drafts that share a tree."""

    index: int = 0
    count: int = 1

    def holds(self, offset: int, token_id: int | np.ndarray) -> bool | np.ndarray:
        """Whether the outcome (drafts accepted, token that follows) is of this class; for an array: which are."""
        return (offset + token_id) % self.count == self.index


@dataclass(frozen=True)
class _Lesson:
    """An outcome, and what was known before it."""

    samples: bool
    trunk: list[int]
    candidates: list[Candidates]  # after the committed tokens, and after each draft
    logits: list[np.ndarray]  # of the same, at the request's temperature
    emitted: list[int]
    drawn: bool  # the trunk, or argmax or n-grams


def candidates_wanted(config: SaguaroConfig, part: Part) -> int:
    """Candidates of each row that a draft chooses its bets from."""
    return min(part.count * config.most_branches, _MAX_FAN_OUT) + 1


class Forecast:
    """Bets for all sequences."""

    def __init__(self, config: SaguaroConfig, part: Part | None = None) -> None:
        """`part`: None for a draft that builds whole trees."""
        self.part = part or Part()
        self._budget = self.part.count * config.most_branches  # of the whole tree
        self.num_candidates = candidates_wanted(config, self.part)
        """Candidates wanted of each row: the trunk's own token may be among them."""
        self._fan_out = FanOut(config.fan_out)
        self._num_drafts = config.num_speculative_tokens
        self._acceptance = Acceptance(config.num_speculative_tokens)
        self._drawn_acceptance = Acceptance(config.num_speculative_tokens)  # of drafts that were drawn
        self._recovery = Recovery()
        self._lessons: list[_Lesson] = []
        self._counts = {samples: OutcomeCounts(config.num_speculative_tokens) for _, samples in _CLASSES}
        self._sharpness = {samples: Sharpness() for _, samples in _CLASSES}
        self._bet_ranks = {samples: OutcomeCounts(0) for _, samples in _CLASSES}

    def remember(self, sequence: Sequence, emitted: list[int]) -> None:
        """The verification of `sequence`'s trunk emitted these tokens; called before the sequence takes them in."""
        logits = [self._scaled(sequence, candidates) for candidates in sequence.candidates]
        candidates, drawn = list(sequence.candidates), _is_drawn(sequence)
        self._lessons.append(_Lesson(sequence.samples, sequence.trunk, candidates, logits, emitted, drawn))
        if len(self._lessons) > _MOST_LESSONS:
            self.learn()

    def learn(self) -> None:
        """Draw the lessons of what was remembered: later, so that no target waits for it."""
        for lesson in self._lessons:
            if lesson.trunk:
                self._acceptance.observe(len(lesson.trunk), len(lesson.emitted) - 1)
            if lesson.drawn:
                self._drawn_acceptance.observe(len(lesson.trunk), len(lesson.emitted) - 1)
                self._recover(lesson)
            self._sharpen(lesson)
            self._count(lesson)
        # One of a class says enough of how far down the bets an outcome is: a ranking is not for nothing.
        for lesson in {lesson.samples: lesson for lesson in self._lessons}.values():
            self._rank(lesson)
        self._lessons.clear()

    def _sharpen(self, lesson: _Lesson) -> None:
        """By what the target emitted of its own; at drawn drafts that is as much the draft's choice."""
        sharpness, first = self._sharpness[lesson.samples], len(lesson.trunk) if lesson.drawn else 0
        for candidates, logits, token_id in list(zip(lesson.candidates, lesson.logits, lesson.emitted))[first:]:
            (found,) = np.nonzero(candidates.token_ids[: self.num_candidates] == token_id)
            if len(found):
                sharpness.observe(logits, int(found[0]))

    def _recover(self, lesson: _Lesson) -> None:
        """Whether a bet on the outcome was possible."""
        position = len(lesson.emitted) - 1
        if position < len(lesson.candidates):
            found = lesson.emitted[-1] in lesson.candidates[position].token_ids[: self.num_candidates]
            self._recovery.observe(position < len(lesson.trunk), bool(found))

    def _rank(self, lesson: _Lesson) -> None:
        """Where the outcome was among the most probable ones."""
        if len(lesson.candidates) != len(lesson.trunk) + 1:
            return
        sharpness, ranks = self._sharpness[lesson.samples].value, self._bet_ranks[lesson.samples]
        acceptance = self._drawn_acceptance.rates(len(lesson.trunk)) if lesson.drawn else None
        ranking = self._ranking(lesson.candidates, lesson.logits, lesson.trunk, ranks.RANKS, sharpness, acceptance)
        outcome = (len(lesson.emitted) - 1, lesson.emitted[-1])
        ranks.observe(0, ranking.index(outcome) if outcome in ranking else None)

    def _count(self, lesson: _Lesson) -> None:
        """Where the verification of a full trunk stopped, and the rank of its token there."""
        position = len(lesson.emitted) - 1
        if len(lesson.trunk) != self._num_drafts or position >= len(lesson.candidates):
            return
        ids = lesson.candidates[position].token_ids[: self.num_candidates].tolist()
        if position < len(lesson.trunk) and lesson.trunk[position] in ids:
            ids.remove(lesson.trunk[position])
        token_id = lesson.emitted[-1]
        self._counts[lesson.samples].observe(position, ids.index(token_id) if token_id in ids else None)

    @property
    def acceptance(self) -> float:
        """a: the share of trunk drafts accepted, given that those before were."""
        return self._acceptance.rate

    def expected_drafts(self, depth: int, width: int, sampled_share: float) -> float:
        """Drafts that are accepted of a tree with so many branches, 0 if the outcome is none of them.

        `sampled_share`: of the rows in the batch.
        """
        shares = {True: sampled_share, False: 1.0 - sampled_share}
        width *= self.part.count
        hits = sum(share * sum(self._bet_ranks[samples].shares()[0][:width]) for samples, share in shares.items())
        return hits * (self._acceptance.expected_tokens(depth) - 1.0)

    def outcome_shares(self) -> dict[str, list[list[float]]]:
        """P(position, rank of t*) of full trunks, for greedy and for sampled rows."""
        return {name: self._counts[samples].shares() for name, samples in _CLASSES}

    def sharpness(self) -> dict[str, float]:
        """How far the draft's probabilities are taken at their word, for greedy and for sampled rows."""
        return {name: self._sharpness[samples].value for name, samples in _CLASSES}

    @property
    def by_row(self) -> bool:
        """Whether a row's own draft probabilities say where its branches go."""
        return self._fan_out.by_row

    def sharpness_of(self, sequence: Sequence) -> float:
        """By what the logits of its candidates are multiplied before they are probabilities."""
        value = self._sharpness[sequence.samples].value
        return value / sequence.temperature if sequence.samples else value

    def acceptance_of(self, sequence: Sequence) -> list[float] | None:
        """Of each draft of its trunk, given those before; None if they were not drawn: their probabilities tell."""
        return self._drawn_acceptance.rates(len(sequence.trunk)) if _is_drawn(sequence) else None

    @property
    def recovered(self) -> float:
        """How much more often than a bonus token the one after a rejected drawn draft is a candidate (`Recovery`)."""
        return self._recovery.ratio

    def counts_of(self, sequence: Sequence, budget: int) -> list[int] | None:
        """Bets by position, at most `budget` in sum; None if a row's own probabilities say where they go."""
        return None if self.by_row else self._spread(sequence, budget)

    def outcomes(self, sequence: Sequence, budget: int) -> list[tuple[int, int]]:
        """At most `budget` bets of this draft's own: (drafts accepted, token that follows)."""
        part = self.part
        if self.by_row and len(sequence.candidates) == len(sequence.trunk) + 1:
            logits = [candidates.logits[: self.num_candidates] for candidates in sequence.candidates]
            sharpness, acceptance = self.sharpness_of(sequence), self.acceptance_of(sequence)
            most = budget if part.count == 1 else sum(map(len, logits))
            ranking = self._ranking(sequence.candidates, logits, sequence.trunk, most, sharpness, acceptance)
            return [outcome for outcome in ranking if part.holds(*outcome)][:budget]
        counts = self._spread(sequence, budget)
        return [
            (offset, token_id)
            for offset, count in enumerate(counts)
            for token_id in _alternatives(sequence, offset, count, part)
        ]

    def _spread(self, sequence: Sequence, budget: int) -> list[int]:
        return self._fan_out.counts(len(sequence.trunk), budget, self._acceptance.rate)

    def fan_out(self) -> list[int]:
        """F by position for Saguaro sampling: what a full trunk would get."""
        return self._fan_out.counts(self._num_drafts, self._budget, self._acceptance.rate)

    def _ranking(
        self,
        candidates: list[Candidates],
        logits: list[np.ndarray],
        trunk: list[int],
        most: int,
        sharpness: float,
        acceptance: list[float] | None,
    ) -> list[tuple[int, int]]:
        """As `most_probable_outcomes`, by the best candidates of each position and logits of the same."""
        token_ids = np.stack([each.token_ids[: self.num_candidates] for each in candidates])
        logits = np.stack(logits)
        return most_probable_outcomes(token_ids, logits, trunk, most, sharpness, acceptance, self.recovered)

    def _scaled(self, sequence: Sequence, candidates: Candidates) -> np.ndarray:
        """Logits of the best candidates at the request's temperature."""
        logits = candidates.logits[: self.num_candidates]
        return logits / sequence.temperature if sequence.samples else logits


def _is_drawn(sequence: Sequence) -> bool:
    """Whether the drafts in flight were drawn, each from its law."""
    return sequence.samples and sequence.trunk_c is not None and bool(sequence.trunk)


def _alternatives(sequence: Sequence, offset: int, count: int, part: Part) -> list[int]:
    """The `count` most probable tokens of a part after trunk[:offset], without the trunk's own next token."""
    if offset >= len(sequence.candidates):
        return []
    candidates = sequence.candidates[offset].token_ids
    token_ids = candidates[part.holds(offset, candidates)][: count + 1].tolist()
    if offset < len(sequence.trunk):
        token_ids = [token_id for token_id in token_ids if token_id != sequence.trunk[offset]]
    return token_ids[:count]
