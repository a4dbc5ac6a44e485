"""What a message of the target changes: sequences begin, go on with an outcome, and end.

Nothing is computed here; it says what is to be built. Knows nothing about forwards.
"""

import time

from vllm_ssd.draft.bandit import SaguaroBandit
from vllm_ssd.draft.forecast import Forecast
from vllm_ssd.draft.kv_cache import SlotPool
from vllm_ssd.draft.outbox import Outbox
from vllm_ssd.draft.pace import Pace
from vllm_ssd.draft.planner import Planner
from vllm_ssd.draft.sequence import Sequence
from vllm_ssd.draft.sequences import Sequences
from vllm_ssd.messages import ELSEWHERE, Outcome, Round, Start, unpack_tokens


class Intake:
    """Takes in the rounds of one target."""

    def __init__(
        self,
        sequences: Sequences,
        pool: SlotPool,
        outbox: Outbox,
        forecast: Forecast,
        bandit: SaguaroBandit,
        pace: Pace,
        planner: Planner,
        *,
        most_tokens: int,
        num_embeddings: int,
    ) -> None:
        """`most_tokens`: of a sequence, so that the model's context holds it and what is drafted for it;
        `num_embeddings`: token ids from here on are unknown to the model.
        """
        self._sequences = sequences
        self._pool = pool
        self._outbox = outbox
        self._forecast = forecast
        self._bandit = bandit
        self._pace = pace
        self._planner = planner
        self._most_tokens = most_tokens
        self._num_embeddings = num_embeddings

    def take(self, message: Round, earliest: float | None) -> None:
        """Drop what the message made worthless, and note what is due.

        `earliest`: when it may have come, by `time.perf_counter()`; None: just now.
        """
        self._sequences.round_id = message.round_id
        self._planner.depth = message.depth
        now = time.perf_counter()
        came_at = now if earliest is None else min(max(message.sent_at, earliest), now)
        verified = any(outcome.emitted for outcome in message.outcomes)
        self._pace.begin_round(message.verify_seconds, came_at, observe=verified)
        for seq_id in message.finished:
            if (sequence := self._sequences.get(seq_id)) is not None:
                self._outbox.add_cancelled(sequence.num_unfinished)
                self._sequences.remove(seq_id)
        for start in message.starts:
            self._start(start)
        for outcome in message.outcomes:
            self._take_outcome(outcome)

    def _start(self, start: Start) -> None:
        self._sequences.remove(start.seq_id)
        tokens = unpack_tokens(start.token_ids).tolist()
        sequence = Sequence(start.seq_id, tokens, start.temperature, start.top_k, start.top_p, self._pool)
        sequence.trunk = list(start.drafts)
        sequence.saguaro_c = self._bandit.choose()
        sequence.fork_due = self._planner.depth > 0 and self._sequences.has_room(sequence)
        self._keep(sequence)

    def _take_outcome(self, outcome: Outcome) -> None:
        sequence = self._sequences.get(outcome.seq_id)
        if sequence is None or len(sequence.tokens) + len(outcome.emitted) != outcome.length:
            self._lose(outcome.seq_id)
            return
        if outcome.emitted:
            self._forecast.remember(sequence, outcome.emitted)
            if sequence.samples:
                self._choose_c(sequence, outcome)
        self._outbox.add_cancelled(sequence.num_unfinished)
        sequence.advance(outcome.emitted, outcome.drafts)
        sequence.rest()
        if outcome.wanted != ELSEWHERE:
            sequence.wanted = outcome.wanted
            if self._sequences.has_room(sequence):
                sequence.fork_due = self._planner.depth > 0
            else:
                self._outbox.decline(sequence)
        self._keep(sequence)

    def _choose_c(self, sequence: Sequence, outcome: Outcome) -> None:
        """Learn what came of the C that the trunk was drawn with, and choose the next tree's."""
        foreseen = sequence.foresaw(outcome.emitted)
        if sequence.trunk and sequence.trunk_c is not None:
            self._bandit.observe(sequence.trunk_c, len(outcome.emitted), foreseen)
        verify_seconds = self._pace.verify_seconds
        if not foreseen and verify_seconds:
            # It waits for drafts, or the next verification goes without.
            waits = max(outcome.wanted, 0) * self._pace.step_seconds(1)
            self._bandit.observe_miss_cost(waits or 0.5 * verify_seconds, verify_seconds)
        sequence.trunk_c = sequence.saguaro_c if foreseen and outcome.drafts else None
        sequence.saguaro_c = self._bandit.choose()
        if outcome.wanted > 0:
            sequence.trunk_c = sequence.saguaro_c

    def _keep(self, sequence: Sequence) -> None:
        """Go on with a sequence, unless the model cannot."""
        self._sequences.touch(sequence)
        # The target's padded vocabulary may be larger than the draft's embedding.
        unknown = max(sequence.pending, default=0) >= self._num_embeddings
        if unknown or len(sequence.tokens) > self._most_tokens:
            self._lose(sequence.seq_id)

    def _lose(self, seq_id: int) -> None:
        self._outbox.lose(seq_id)
        self._sequences.remove(seq_id)
