"""The sequences that the draft works for, and who gets the KV slots when they run short."""

from collections.abc import Iterable, Iterator

import numpy as np

from vllm_ssd.draft.kv_cache import SlotPool
from vllm_ssd.draft.sequence import Sequence

_RECENT_ROUNDS = 1  # a step may bring two rounds: new prompts, then outcomes


class Sequences:
    """All sequences of one target, by `seq_id`."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._by_id: dict[int, Sequence] = {}
        self.round_id = -1
        """The latest round; sequences that it, or the one before it, spoke of are never evicted."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def get(self, seq_id: int) -> Sequence | None:
        """The sequence, or None if it is not known."""
        return self._by_id.get(seq_id)

    def touch(self, sequence: Sequence) -> None:
        """This round speaks of the sequence, which may be new."""
        sequence.last_round = self.round_id
        self._by_id[sequence.seq_id] = sequence

    def remove(self, seq_id: int) -> Sequence | None:
        """Forget a sequence and free its slots; returns it, or None if it is not known."""
        if (sequence := self._by_id.pop(seq_id, None)) is not None:
            sequence.drop_kv()
        return sequence

    def is_recent(self, sequence: Sequence) -> bool:
        """Whether it is in the target's batch, as far as is known."""
        return sequence.last_round >= self.round_id - _RECENT_ROUNDS

    def take_slots(self, count: int, batch: Iterable[Sequence]) -> np.ndarray | None:
        """Slots for a sequence of `batch`; evicts sequences that no recent round had, oldest first.

        None if that does not make enough room.
        """
        while (slots := self._pool.take(count)) is None:
            idle = [sequence for sequence in self._idle() if sequence not in batch]
            if not idle:
                return None
            min(idle, key=lambda sequence: sequence.last_round).drop_kv()
        return slots

    def has_room(self, sequence: Sequence) -> bool:
        """Whether what the sequence lacks fits the KV cache; if not, it is not even begun."""
        lacking = len(sequence.tokens) + len(sequence.trunk) - len(sequence.slots)
        free = self._pool.num_free
        return lacking <= free or lacking <= free + sum(s.num_slots for s in self._idle() if s is not sequence)

    def oldest_first(self) -> list[Sequence]:
        """In the order of the rounds that spoke of them last."""
        return sorted(self, key=lambda sequence: sequence.last_round)

    def _idle(self) -> list[Sequence]:
        """Sequences with KV that may be evicted."""
        return [sequence for sequence in self if len(sequence.slots) and not self.is_recent(sequence)]
