"""The pool of KV slots and the lists that hold them."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_ssd.draft.graph_trunks import TrunkTable
from vllm_ssd.draft.kv_cache import SlotList, SlotPool


class PoolMachine(RuleBasedStateMachine):
    """Slots are taken, listed, cut and given back in any order."""

    @initialize(num_slots=st.integers(1, 600))
    def make(self, num_slots: int) -> None:
        self.pool = SlotPool(num_slots)
        self.loose: list[int] = []
        self.lists = [SlotList(self.pool) for _ in range(3)]
        self.expected: list[list[int]] = [[], [], []]

    @property
    def held(self) -> list[int]:
        return self.loose + [slot for slots in self.expected for slot in slots]

    @rule(count=st.integers(0, 400))
    def take(self, count: int) -> None:
        slots = self.pool.take(count)
        assert (slots is None) == (count + len(self.held) > self.pool.num_slots)
        if slots is not None:
            assert len(slots) == count
            self.loose.extend(slots.tolist())

    @rule(index=st.integers(0, 2), share=st.floats(0, 1))
    def extend(self, index: int, share: float) -> None:
        count = int(share * len(self.loose))
        moved, self.loose = self.loose[:count], self.loose[count:]
        self.lists[index].extend(np.asarray(moved, dtype=np.int64))
        self.expected[index].extend(moved)

    @rule(index=st.integers(0, 2), length=st.integers(0, 500))
    def cut(self, index: int, length: int) -> None:
        self.lists[index].cut(length)
        del self.expected[index][length:]

    @rule(share=st.floats(0, 1))
    def give_back(self, share: float) -> None:
        count = int(share * len(self.loose))
        self.pool.give_back(np.asarray(self.loose[:count], dtype=np.int64))
        self.loose = self.loose[count:]

    @invariant()
    def no_slot_is_held_twice(self) -> None:
        assert len(set(self.held)) == len(self.held)
        assert all(0 <= slot < self.pool.num_slots for slot in self.held)

    @invariant()
    def counts_add_up(self) -> None:
        assert self.pool.num_free + len(self.held) == self.pool.num_slots
        assert self.pool.usage == pytest.approx(len(self.held) / self.pool.num_slots)

    @invariant()
    def lists_keep_their_slots_in_order(self) -> None:
        for slots, expected in zip(self.lists, self.expected, strict=True):
            assert len(slots) == len(expected)
            assert slots.view().tolist() == expected


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSlotPool = PoolMachine.TestCase


def test_more_slots_than_were_taken_are_refused() -> None:
    """A slot returned twice is handed to two sequences later."""
    pool = SlotPool(4)
    slots = pool.take(2)
    pool.give_back(slots)
    with pytest.raises(ValueError, match="more slots"):
        pool.give_back(slots)
    assert pool.num_free == 4


def test_taken_slots_stay_as_they_were() -> None:
    """What `take` returned changes when the pool goes on."""
    pool = SlotPool(6)
    first = pool.take(3)
    before = first.tolist()
    pool.give_back(pool.take(3))
    pool.give_back(first[:1])
    pool.take(1)
    assert first.tolist() == before


@pytest.mark.parametrize("seed", range(8))
def test_the_device_hears_of_every_slot_that_changed(seed: int) -> None:
    """A row keeps slots that were cut, or those of a sequence that had it before."""
    generator, pool, rows, columns = random.Random(seed), SlotPool(400), 4, 40
    table, trunks = np.full(rows * columns, -1), TrunkTable(rows, columns)
    ids = iter(range(1000))

    def new(seq_id: int) -> SimpleNamespace:
        return SimpleNamespace(seq_id=seq_id, slots=SlotList(pool))

    sequences = [new(next(ids)) for _ in range(7)]  # more than rows: they come back after others had theirs
    sent = held = 0
    for _ in range(200):
        for sequence in sequences:
            if generator.random() < 0.5:
                sequence.slots.cut(max(len(sequence.slots) - generator.randint(0, 3), 0))
            sequence.slots.extend(pool.take(min(generator.randint(0, 4), columns - len(sequence.slots))))
        if generator.random() < 0.2:
            at = generator.randrange(7)
            sequences[at].slots.cut(0)
            # Its successor, or another of the same number.
            sequences[at] = new(generator.choice((sequences[at].seq_id, next(ids))))
        here = generator.sample(sequences, generator.randint(1, rows))
        cells, slots = trunks.update(here)
        table[cells] = slots
        sent, held = sent + len(cells), held + sum(len(sequence.slots) for sequence in here)
        assert len({trunks.place_of(sequence) for sequence in here}) == len(here)
        for sequence in here:
            begin = trunks.place_of(sequence) * columns
            assert table[begin : begin + len(sequence.slots)].tolist() == sequence.slots.view().tolist()
    assert sent < 0.7 * held
