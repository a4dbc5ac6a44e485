"""Fair shares of one KV cache: a pool of slots that several targets take from.

Each target may hold as many slots as all targets may: the pool over their number. One that holds
more when another comes takes nothing until it is below its share again (`excess` says how much it
is to give back).
"""

import numpy as np

from vllm_ssd.draft.kv_cache import SlotPool


class SharedPool:
    """Slots, and who may have how many."""

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotPool(num_slots)
        self.num_shares = 0

    def open_share(self) -> "SlotShare":
        """A share for one more target; the others' shrink."""
        self.num_shares += 1
        return SlotShare(self)


class SlotShare:
    """What one target sees as its `SlotPool`."""

    def __init__(self, pool: SharedPool) -> None:
        self._pool = pool
        self._used = 0
        self._held = np.zeros(pool.slots.num_slots, dtype=bool)

    @property
    def num_slots(self) -> int:
        """The most it may hold now."""
        return self._pool.slots.num_slots // max(self._pool.num_shares, 1)

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return max(min(self.num_slots - self._used, self._pool.slots.num_free), 0)

    @property
    def usage(self) -> float:
        """Part of its share in use, 0 to 1 (above, until it gave back what another target is due)."""
        return self._used / self.num_slots if self.num_slots else 1.0

    @property
    def excess(self) -> int:
        """Slots to give back."""
        return max(self._used - self.num_slots, 0)

    def take(self, count: int) -> np.ndarray | None:
        """[count] int64 slots, or None if there are not that many."""
        if count > self.num_free:
            return None
        slots = self._pool.slots.take(count)
        self._used += count
        self._held[slots] = True
        return slots

    def give_back(self, slots: np.ndarray) -> None:
        """Return slots taken before; each may be returned once."""
        if not self._held[slots].all():
            raise ValueError("slots returned that were not taken")
        self._held[slots] = False
        self._used -= len(slots)
        self._pool.slots.give_back(slots)

    def close(self) -> None:
        """The target is gone: all it held goes back, whatever state its engine is in."""
        self.give_back(np.flatnonzero(self._held))
        self._pool.num_shares -= 1
