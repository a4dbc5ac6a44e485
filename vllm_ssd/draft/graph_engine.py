"""The engine over rounds on a device: tree steps feed one another there, one ahead of the host.

What a wave of branches draws in a step is read while the device is at work on the next. After an outcome
that no branch foresaw the branches are chosen on the device too, behind the glue: nothing is read back
until the first step has drawn. Whatever does not fit a round on the device (waves that are not equally
deep, more rows than the buffers hold) takes the engine's own step. A new outcome ends the round: what was
built stays as it is, what is under way is not read. Tested on the CPU, where a round runs at once, and on
a simulated GPU.
"""

import dataclasses
import time

import numpy as np
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.batch import causal_group
from vllm_ssd.draft.engine import DraftEngine, Forwards
from vllm_ssd.draft.forecast import Part
from vllm_ssd.draft.graph_planting import Planting, Step
from vllm_ssd.draft.graph_round import GraphRound
from vllm_ssd.draft.graph_rows import host_rows
from vllm_ssd.draft.graph_trunks import TrunkTable
from vllm_ssd.draft.sequence import Branch, Candidates, Sequence
from vllm_ssd.messages import Round, pack_law

_AHEAD = 2  # steps under way: one that is read, one that keeps the device busy


@dataclasses.dataclass
class _Wave:
    """A sequence's branches on the device."""

    sequence: Sequence
    first_row: int
    tail: np.ndarray  # [n, steps] slots of its n branches
    branches: list[Branch] = dataclasses.field(default_factory=list)  # n; none before the host knows them

    @property
    def rows(self) -> slice:
        """Its rows in the results of a step."""
        return slice(self.first_row, self.first_row + len(self.tail))


@dataclasses.dataclass
class _Planted:
    """Waves that grow on the device."""

    waves: list[_Wave]
    steps: int  # in all
    steps_due: int  # the others are optional
    since: float  # when the device began with the step that comes in next, as far as the host knows
    enqueued: int = 0
    done: int = 0

    @property
    def num_rows(self) -> int:
        """Branches that grow."""
        return sum(len(wave.branches) for wave in self.waves)

    @property
    def stands(self) -> bool:
        """Whether all sequences still want these waves to grow."""
        return all(w.sequence.wave is w.branches and w.sequence.steps_left for w in self.waves)


class GraphEngine(DraftEngine):
    """Trees for all sequences of one target, grown on the device."""

    def __init__(
        self,
        model,
        config: SaguaroConfig,
        num_slots: int,
        graph_round: GraphRound,
        seed: int | None = None,
        part: Part | None = None,
    ) -> None:
        """`graph_round`: over the pools of `model`. Else as for `DraftEngine`."""
        super().__init__(model, config, num_slots, seed, part=part)
        self._round = graph_round
        self._trunks = TrunkTable(graph_round.shape.max_sequences, graph_round.shape.max_length)
        self._seeds = np.random.default_rng(seed)
        self._planted: _Planted | None = None

    def begin_round(self, message: Round, earliest: float | None = None) -> None:
        """As the engine's; slots of waves that are not wanted any more are free again."""
        super().begin_round(message, earliest)
        if self._planted is not None and not self._planted.stands:
            self._end()

    # ---- a wave that the host chose ----

    def _tree_step(self, sequences: list[Sequence]) -> Forwards:
        """One token for each branch of all waves."""
        planted = self._planted
        if planted is None or not planted.stands or {wave.sequence for wave in planted.waves} != set(sequences):
            self._end()
            planted = self._plant(sequences)
            if planted is None:
                yield from super()._tree_step(sequences)
                return
        self._enqueue(planted, planted.num_rows)
        finished = self._round.finished(at_least=1) if planted.enqueued > planted.done else []
        for step in finished:
            self._take_in(planted, step)
        self._observe(planted, len(finished), of_forwards=len(finished))
        self._end_if_full()

    def _enqueue(self, planted: _Planted, count: int) -> None:
        """Keep the device busy with the next steps over `count` rows."""
        if planted.enqueued and planted.enqueued == planted.done:
            planted.since = time.perf_counter()  # it was idle
        while planted.enqueued < min(planted.done + _AHEAD, planted.steps):
            # Optional steps must be over before the outcome, which they would delay.
            optional = planted.enqueued >= planted.steps_due
            if optional and planted.enqueued and self._pace.branches_of_one_more_step(count) < count:
                planted.steps = planted.enqueued
                break
            with torch.inference_mode():
                self._round.grow()
            planted.enqueued += 1

    def _plant(self, sequences: list[Sequence]) -> _Planted | None:
        """Send the waves to the device, with slots for all their steps; None if they do not fit a round."""
        steps = sequences[0].steps_left
        sizes = [len(sequence.wave) for sequence in sequences]
        due = sequences[0].steps_due
        fresh = all(sequence.steps_left == steps and sequence.steps_due == due for sequence in sequences)
        fresh = fresh and not any(branch.slots for sequence in sequences for branch in sequence.wave)
        if not fresh or not self._fits(sequences, sum(sizes), steps):
            return None
        slots = self._sequences.take_slots(sum(sizes) * steps, sequences)
        if slots is None:
            return None
        tails = np.split(slots.reshape(-1, steps), np.cumsum(sizes)[:-1])
        first_rows = np.cumsum([0, *sizes]).tolist()
        waves = [_Wave(s, row, tail, s.wave) for s, row, tail in zip(sequences, first_rows, tails)]
        self._planted = _Planted(waves, steps, due, time.perf_counter())
        with torch.inference_mode():
            self._round.change_trunks(*self._trunks.update(sequences))
            self._round.plant(
                [self._planting(wave) for wave in waves],
                [(branch.offset, branch.tokens[0]) for wave in waves for branch in wave.branches],
                self._forecast.fan_out(),
            )
        return self._planted

    def _fits(self, sequences: list[Sequence], rows: int, steps: int) -> bool:
        """Whether the buffers hold so many rows of these sequences, and so deep trees."""
        shape = self._round.shape
        longest = max(len(sequence.tokens) + len(sequence.trunk) for sequence in sequences)
        within = rows <= shape.max_rows and len(sequences) <= shape.max_sequences
        return within and steps <= shape.depth and longest <= shape.max_length

    def _planting(self, wave: _Wave) -> Planting:
        sequence = wave.sequence
        padded = np.zeros((len(wave.tail), self._round.shape.depth), dtype=np.int32)
        padded[:, : wave.tail.shape[1]] = wave.tail
        return Planting(
            place=self._trunks.place_of(sequence),
            length=len(sequence.tokens),
            tail_slots=padded,
            temperature=sequence.temperature,
            top_k=sequence.top_k,
            top_p=sequence.top_p,
            saguaro_c=sequence.saguaro_c,
            seed=int(self._seeds.integers(1 << 62)),
        )

    def _take_in(self, planted: _Planted, step: Step) -> None:
        """A step has come to the host: the branches grow, and the target hears of it."""
        top_m = self._config.draft_top_m
        for wave in planted.waves:
            sequence, rows = wave.sequence, wave.rows
            token_ids = step.tokens[rows].tolist()
            slots = wave.tail[:, step.number].tolist()
            fields = zip(wave.branches, slots, token_ids, step.token_ids[rows], step.values[rows])
            for branch, slot, token_id, ids, values in fields:
                branch.slots.append(slot)
                branch.tokens.append(token_id)
                branch.candidates.append(Candidates(ids.astype(np.int64), values))
            law = pack_law(step.token_ids[rows, :top_m], step.probs[rows, :top_m]) if sequence.samples else None
            self._outbox.add_growth(sequence, token_ids, law)
            sequence.steps_left -= 1
        planted.done += 1

    def _observe(self, planted: _Planted, steps: int, of_forwards: int) -> None:
        """So many steps came in. The time since the last ones did went by with `of_forwards`, taken for equal.

        What the host did meanwhile is in it if it took longer than the device: trees grow no faster then.
        """
        now, rows = time.perf_counter(), planted.num_rows
        for _ in range(steps if rows else 0):
            seconds = (now - planted.since) / of_forwards
            self._outbox.add_tree_step(seconds)
            self._pace.observe_step(rows, seconds)
        planted.since = now

    def _end_if_full(self) -> None:
        """No branch is to grow further."""
        if self._planted.done == self._planted.steps:
            for wave in self._planted.waves:
                wave.sequence.steps_left = 0
            self._end()

    def _end(self) -> None:
        """The round on the device is over: slots of steps that were not taken in are free.

        A step under way may still write to them, but before whatever is enqueued from now on.
        """
        if self._planted is not None:
            for wave in self._planted.waves:
                self._pool.give_back(wave.tail[:, self._planted.done :].reshape(-1))
            self._planted = None

    # ---- a wave that the device chooses ----

    def _glue(self, sequences: list[Sequence]) -> Forwards:
        """The glue; if its candidates are wanted for branches only, the fork and the first step with it."""
        others = [s for s in self._sequences if (s.fork_due or s.wanted or s.steps_left) and s not in sequences]
        if not (self._nobody_waits(sequences, others) and self._fork_on_device(sequences, others)):
            yield from super()._glue(sequences)

    def _nobody_waits(self, glued: list[Sequence], others: list[Sequence]) -> bool:
        """Whether all that is due are whole trees, over candidates that the glue brings or the host has."""
        return (
            self._forecast.by_row
            and all(s.fork_due and not s.wanted and not s.branches for s in (*glued, *others))
            and all(len(s.slots) < len(s.tokens) for s in glued)
            and all(not s.pending and len(s.candidates) == len(s.trunk) + 1 for s in others)
        )

    def _fork_on_device(self, glued: list[Sequence], others: list[Sequence]) -> bool:
        """Enqueue glue, fork and steps, and take in the first; returns False if they do not fit a round."""
        began = time.perf_counter()
        sequences = [*glued, *others]
        (width, depth), steps = self._planner.shape(sequences), self._planner.most_steps
        count, known = sum(len(s.pending) for s in glued), sum(len(s.candidates) for s in others)
        if count + known > self._round.shape.max_rows or not self._fits(sequences, width * len(sequences), steps):
            return False
        self._end()  # of what was planted nothing is to grow any more, but it may hold slots
        slots = self._sequences.take_slots(count + width * steps * len(sequences), sequences)
        if slots is None:
            return False
        tails = slots[count:].reshape(len(sequences), width, steps)
        planted = _Planted([_Wave(s, i * width, tails[i]) for i, s in enumerate(sequences)], steps, depth, began)
        with torch.inference_mode():
            rows = {**self._enqueue_glue(glued, others, slots[:count]), **self._send_candidates(others)}
            self._enqueue_fork(planted, rows)
        self._enqueue(planted, width * len(sequences))
        finished = self._round.finished(at_least=1)
        self._keep_candidates(glued, rows)
        self._hang_chosen(planted, finished[0])
        for step in finished:
            self._take_in(planted, step)
        self._observe(planted, len(finished), of_forwards=1 + len(finished))
        self._planted = planted
        self._end_if_full()
        return True

    def _enqueue_glue(self, glued: list[Sequence], others: list[Sequence], slots: np.ndarray) -> dict[int, int]:
        """The trunks of all and the glue of some; by `seq_id`, the row of each one's last committed token."""
        groups, rows, begin = [], {}, 0
        for sequence in glued:
            token_ids, known = sequence.pending, len(sequence.slots)
            mine = slots[begin : begin + len(token_ids)]
            sequence.slots.extend(mine)
            groups.append(causal_group(token_ids, known, sequence.slots.view(), mine))
            rows[sequence.seq_id] = begin + len(sequence.tokens) - 1 - known
            begin += len(token_ids)
        self._round.change_trunks(*self._trunks.update([*glued, *others]))
        places = np.asarray([self._trunks.place_of(sequence) for sequence in glued], dtype=np.int32)
        found = host_rows(groups, self._round.shape.depth)
        self._round.glue(dataclasses.replace(found, row_sequence=places[found.row_sequence]))
        return rows

    def _send_candidates(self, sequences: list[Sequence]) -> dict[int, int]:
        """What the host knows of sequences that need no glue; rows as above."""
        found = [candidates for sequence in sequences for candidates in sequence.candidates]
        shape = (len(found), self._round.shape.width)
        token_ids, values = np.full(shape, -1, dtype=np.int32), np.full(shape, -np.inf, dtype=np.float32)
        for row, candidates in enumerate(found):
            token_ids[row, : len(candidates.token_ids)] = candidates.token_ids
            values[row, : len(candidates.logits)] = candidates.logits
        row, rows = self._round.add_candidates(token_ids, values), {}
        for sequence in sequences:
            rows[sequence.seq_id] = row
            row += len(sequence.candidates)
        return rows

    def _enqueue_fork(self, planted: _Planted, rows: dict[int, int]) -> None:
        sequences = [wave.sequence for wave in planted.waves]
        self._round.plant_most_probable(
            [self._planting(wave) for wave in planted.waves],
            [rows[sequence.seq_id] for sequence in sequences],
            [sequence.trunk for sequence in sequences],
            [self._forecast.sharpness_of(sequence) for sequence in sequences],
            [self._forecast.acceptance_of(sequence) for sequence in sequences],
            self._forecast.recovered,
            self._forecast.fan_out(),
            self._forecast.part,
        )

    def _keep_candidates(self, glued: list[Sequence], rows: dict[int, int]) -> None:
        """The glue's candidates have come with the first step."""
        token_ids, values = self._round.glued()
        for sequence in glued:
            row = rows[sequence.seq_id]
            found = range(row, row + len(sequence.trunk) + 1)
            sequence.candidates = [Candidates(token_ids[at].astype(np.int64), values[at]) for at in found]

    def _hang_chosen(self, planted: _Planted, step: Step) -> None:
        """The first step brought what the device bet on."""
        for wave in planted.waves:
            sequence = wave.sequence
            above = step.above[wave.rows]
            count = int((above > 0).sum())  # the best come first; there may be fewer outcomes than rows
            offsets = (above[:count] - len(sequence.tokens)).tolist()
            self._hang(sequence, list(zip(offsets, step.bets[wave.rows][:count].tolist())), planted.steps_due)
            self._pool.give_back(wave.tail[count:].reshape(-1))
            wave.tail, wave.branches = wave.tail[:count], sequence.wave
        planted.waves = [wave for wave in planted.waves if wave.branches]
