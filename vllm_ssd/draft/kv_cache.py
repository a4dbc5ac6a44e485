"""The draft's KV cache: a pool of slots, one token each.

A sequence is a list of slots; a branch is its sequence's list plus a tail of its own. To adopt
a branch is to edit that list. Knows nothing about tokens or models; the tensors belong to the
model (`model.py`).
"""

import numpy as np


class SlotPool:
    """Hands out slot numbers."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int64)
        self._num_free = num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return self._num_free

    @property
    def usage(self) -> float:
        """Share of slots in use, 0 to 1."""
        return 1.0 - self._num_free / self.num_slots

    def take(self, count: int) -> np.ndarray | None:
        """[count] int64 slots, or None if there are not that many."""
        if count > self._num_free:
            return None
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def give_back(self, slots: np.ndarray) -> None:
        """Return slots taken before; each may be returned once."""
        count = len(slots)
        if self._num_free + count > self.num_slots:
            raise ValueError("more slots returned than were taken")
        self._free[self._num_free : self._num_free + count] = slots
        self._num_free += count


class SlotList:
    """The slots of one sequence, in token order; grows and is cut at its end."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._slots = np.empty(256, dtype=np.int64)
        self._length = 0
        self._unchanged = 0

    def __len__(self) -> int:
        return self._length

    def view(self) -> np.ndarray:
        """[length] int64, valid until the next change."""
        return self._slots[: self._length]

    @property
    def unchanged(self) -> int:
        """How many slots from the first on are those of the last `mark`."""
        return self._unchanged

    def mark(self) -> None:
        """From here on changes count."""
        self._unchanged = self._length

    def extend(self, slots: np.ndarray) -> None:
        """Append slots that were taken from the pool."""
        needed = self._length + len(slots)
        if needed > len(self._slots):
            grown = np.empty(max(needed, 2 * len(self._slots)), dtype=np.int64)
            grown[: self._length] = self.view()
            self._slots = grown
        self._slots[self._length : needed] = slots
        self._length = needed

    def cut(self, length: int) -> None:
        """Keep the first `length` slots, return the others to the pool."""
        if length < self._length:
            self._pool.give_back(self._slots[length : self._length])
            self._length = length
            self._unchanged = min(self._unchanged, length)
