"""What grows on the device, as the host keeps it: which rows are whose, and what is to become of their tokens."""

import dataclasses

import numpy as np

from vllm_ssd.draft.graph_planting import Choice, Planting, Step
from vllm_ssd.draft.outbox import Outbox
from vllm_ssd.draft.sequence import Branch, Candidates, Sequence
from vllm_ssd.messages import Law, pack_law


@dataclasses.dataclass
class Wave:
    """Branches of a sequence, each a row."""

    sequence: Sequence
    first_row: int
    tail: np.ndarray  # [n, begun + steps] slots of its n branches
    begun: int = 0  # of them hold KV since before
    branches: list[Branch] = dataclasses.field(default_factory=list)  # n; none before the host knows them

    @property
    def rows(self) -> slice:
        """Its rows in the results of a step."""
        return slice(self.first_row, self.first_row + len(self.tail))

    @property
    def steps(self) -> int:
        """For which it has slots."""
        return self.tail.shape[1] - self.begun

    @property
    def grows(self) -> bool:
        """Whether its sequence still wants another step of it."""
        return self.sequence.wave is self.branches and self.sequence.steps_left > 0

    @property
    def position(self) -> int:
        """Of the first draft that it draws, in the chain of drafts that it belongs to."""
        return self.begun

    def bets(self) -> list[tuple[int, int]]:
        """Drafts above each branch, and its latest token."""
        return [(branch.offset, branch.tokens[-1]) for branch in self.branches]

    def planting(self, place: int, seed: int, choice: Choice | None = None) -> Planting:
        """What the device must know: bets, or by what it chooses them."""
        sequence = self.sequence
        return Planting(
            place=place,
            length=len(sequence.tokens),
            tail_slots=self.tail,
            bets=() if choice else self.bets(),
            choice=choice,
            begun=self.begun,
            position=self.position,
            temperature=sequence.temperature,
            top_k=sequence.top_k,
            top_p=sequence.top_p,
            saguaro_c=sequence.saguaro_c,
            seed=seed,
        )

    def take_in(self, step: Step, top_m: int, outbox: Outbox, round_id: int) -> None:
        """A step has come to the host: the branches grow, and the target hears of it."""
        token_ids = step.tokens[self.rows].tolist()
        slots = self.tail[:, self.begun + step.number].tolist()
        for branch, slot, token_id, candidates in zip(self.branches, slots, token_ids, _candidates(step, self.rows)):
            branch.slots.append(slot)
            branch.tokens.append(token_id)
            branch.candidates.append(candidates)
        outbox.add_growth(self.sequence, token_ids, self._law(step, top_m))
        self.sequence.steps_left -= 1

    def unused_slots(self, steps: int) -> np.ndarray:
        """Those that so many steps did not fill."""
        return self.tail[:, self.begun + steps :].reshape(-1)

    def _law(self, step: Step, top_m: int) -> Law | None:
        if not self.sequence.samples:
            return None
        return pack_law(step.token_ids[self.rows, :top_m], step.probs[self.rows, :top_m])


@dataclasses.dataclass
class Chain(Wave):
    """Drafts that the target waits for: the trunk itself, which grows from the last token that has no KV."""

    trunk: list[int] = dataclasses.field(default_factory=list)  # the sequence's

    @property
    def grows(self) -> bool:
        """Whether the target still waits."""
        return self.sequence.trunk is self.trunk and self.sequence.wanted > 0

    @property
    def position(self) -> int:
        """As of a wave."""
        return len(self.trunk)

    def bets(self) -> list[tuple[int, int]]:
        """As of a wave; above its only row is all that has KV."""
        return [(len(self.sequence.trunk) - 1, self.sequence.pending[-1])]

    def take_in(self, step: Step, top_m: int, outbox: Outbox, round_id: int) -> None:
        """A step has come to the host: a draft more, and the target hears of it."""
        sequence, [token_id] = self.sequence, step.tokens[self.rows].tolist()
        sequence.slots.extend(self.tail[0, step.number : step.number + 1])
        sequence.candidates += _candidates(step, self.rows)
        if not sequence.trunk:
            outbox.add_branches(sequence, round_id, [])
        outbox.add_growth(sequence, [token_id], self._law(step, top_m))
        sequence.trunk.append(token_id)
        sequence.wanted -= 1


class Planted:
    """Waves that grow on the device."""

    def __init__(self, waves: list[Wave], steps_due: int, since: float, before: int) -> None:
        """`steps_due`: the others are optional. `since`: when the device began, as far as the host knows, with the
        step that comes in next, and with so many forwards `before` it.
        """
        self.waves = waves
        self.steps = max(wave.steps for wave in waves)
        self.steps_due = steps_due
        self.since = since
        self.before = before
        self.num_rows = sum(len(wave.tail) for wave in waves)
        self.is_for_target = isinstance(waves[0], Chain)
        self.enqueued = 0
        self.done = 0

    @property
    def under_way(self) -> int:
        """Steps that have not come to the host yet."""
        return self.enqueued - self.done

    def is_of(self, sequences: list[Sequence]) -> bool:
        """Whether it is these whose waves grow, all of them still wanted."""
        return all(wave.grows for wave in self.waves) and {wave.sequence for wave in self.waves} == set(sequences)


def waves_of(sequences: list[Sequence]) -> list[Wave]:
    """The waves that grow, with room for the slots of all their steps."""
    waves, row = [], 0
    for sequence in sequences:
        known = np.asarray([branch.slots for branch in sequence.wave], dtype=np.int64)  # [n, begun]
        tail = np.pad(known, ((0, 0), (0, sequence.steps_left)))
        waves.append(Wave(sequence, row, tail, known.shape[1], sequence.wave))
        row += len(tail)
    return waves


def _candidates(step: Step, rows: slice) -> list[Candidates]:
    """Those after the tokens that went into a step."""
    return [Candidates(ids.astype(np.int64), values) for ids, values in zip(step.token_ids[rows], step.values[rows])]
