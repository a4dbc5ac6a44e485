"""The engine over rounds on a device: steps feed one another there, one ahead of the host.

What a wave of branches draws in a step is read while the device is at work on the next. After an outcome
the branches are chosen on the device too, behind the glue: nothing is read back until the first step has
drawn. Drafts that a target waits for are a chain of steps of their own. Whatever does not fit a round on the
device (more rows, or longer sequences, than the buffers hold, or too few free slots) takes the engine's own
step. A new outcome ends its sequence's part of the round: what was built stays as it is, what has not come
yet is not read. Tested on the CPU, where a round runs at once, and on a simulated GPU.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.batch import causal_group
from vllm_ssd.draft.engine import DraftEngine, Forwards, Work
from vllm_ssd.draft.forecast import Part
from vllm_ssd.draft.graph_planting import Choice, Step
from vllm_ssd.draft.graph_round import GraphRound
from vllm_ssd.draft.graph_rows import host_rows
from vllm_ssd.draft.graph_trunks import TrunkTable
from vllm_ssd.draft.graph_waves import Chain, Planted, Wave, waves_of
from vllm_ssd.draft.sequence import Candidates, Sequence
from vllm_ssd.messages import Round

_AHEAD = 2  # steps under way: one that is read, one that keeps the device busy


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
        self._planted: Planted | None = None

    def begin_round(self, message: Round, earliest: float | None = None) -> None:
        """As the engine's; slots of waves that are not wanted any more are free before others need them."""
        told = {*message.finished, *(news.seq_id for news in (*message.starts, *message.outcomes))}
        self._let_go(lambda wave: wave.sequence.seq_id in told)
        super().begin_round(message, earliest)

    def _work(self) -> Work:
        """As the engine's; what is under way is taken in, too, though its trees are to rest."""
        work, planted = super()._work(), self._planted
        if planted is not None and planted.under_way and not planted.is_for_target:
            work.growing.extend(w.sequence for w in planted.waves if w.grows and w.sequence not in work.growing)
        return work

    def _prefill(self, sequence: Sequence, seconds: float) -> Forwards:
        """As the engine's, behind the steps under way: their time is not the prompt's."""
        if self._planted is not None:
            self._take_in_all(self._round.finished(at_least=self._planted.under_way))
        yield from super()._prefill(sequence, seconds)

    # ---- waves that the host chose ----

    def _tree_step(self, sequences: list[Sequence]) -> Forwards:
        """One token for each branch of all waves."""
        if self._planted is None or not self._planted.is_of(sequences):
            self._end()
            sequences = self._planner.growing([sequence for sequence in sequences if sequence.steps_left])
            if not self._plant(sequences):
                yield from super()._tree_step(sequences)
                return
        self._go_on()

    def _plant(self, sequences: list[Sequence]) -> bool:
        """Send the waves to the device, with slots for all their steps; returns False if they do not fit a round."""
        waves = waves_of(sequences)
        if not waves or not self._fits(waves) or not self._give_slots(waves):
            return False
        self._planted = Planted(waves, max(s.steps_due for s in sequences), time.perf_counter(), self._round.under_way)
        with torch.inference_mode():
            self._round.change_trunks(*self._trunks.update(sequences))
            self._begin(waves)
        return True

    # ---- drafts that the target waits for ----

    def _jit_step(self, sequences: list[Sequence]) -> Forwards:
        """One more draft for each row that the target waits for; the others are under way."""
        if not self._draft_for_target(sequences):
            yield from super()._jit_step(sequences)

    def _draft_for_target(self, waiting: list[Sequence]) -> bool:
        """A draft more for each, by candidates that the host has, or else by the device.

        Returns False if they do not fit a round.
        """
        if known := [sequence for sequence in waiting if not sequence.pending]:
            self._draw_for_target(known)
            return True
        if (self._planted is None or not self._planted.is_of(waiting)) and not self._plant_chains(waiting):
            return False
        self._go_on()
        self._pace.restart_clock()
        return True

    def _plant_chains(self, waiting: list[Sequence]) -> bool:
        """Enqueue what has no KV, but for the last token of each, with which its drafts begin."""
        self._end()
        if any(len(sequence.pending) > 1 and sequence.trunk for sequence in waiting):
            return False  # the host has no candidates after drafts of others
        chains = [
            Chain(sequence, row, np.empty((1, sequence.wanted), dtype=np.int64), trunk=sequence.trunk)
            for row, sequence in enumerate(waiting)
        ]
        glued = {sequence: len(sequence.pending) - 1 for sequence in waiting if len(sequence.pending) > 1}
        if not self._fits(chains, sum(glued.values())) or not self._give_slots(chains, glued):
            return False
        steps = max(chain.steps for chain in chains)
        before = self._round.under_way + bool(glued)
        self._planted = Planted(chains, steps, time.perf_counter(), before)
        with torch.inference_mode():
            self._round.change_trunks(*self._trunks.update(waiting))
            self._enqueue_glue(glued)
            self._begin(chains)
        return True

    # ---- a wave that the device chooses ----

    def _glue(self, work: Work) -> Forwards:
        """The glue, and with it the fork and the first step; if a target waits, only what that needs."""
        if waiting := [*work.waiting, *(sequence for sequence in work.glue if sequence.wanted)]:
            done = self._draft_for_target(waiting)
        else:
            done = self._fork_on_device(work)
        if not done:
            yield from super()._glue(work)

    def _fork_on_device(self, work: Work) -> bool:
        """Enqueue glue, fork and steps, and take in the first; returns False if they do not fit a round.

        Trees that grow already go on beside the new ones.
        """
        self._end()  # the same waves go on in another round
        forking, growing = [*work.glue, *work.forks], [s for s in work.growing if s.steps_left]
        (width, depth), steps = self._planner.shape(forking), self._planner.most_steps
        counts = {sequence: self._forecast.counts_of(sequence, width) for sequence in forking}
        width = max(width if own is None else sum(own) for own in counts.values())
        old = waves_of(growing)
        first = sum(len(wave.tail) for wave in old)
        first_rows = range(first, first + width * len(forking), width)
        new = [Wave(s, row, np.empty((width, steps), dtype=np.int64)) for s, row in zip(forking, first_rows)]
        waves, glued = [*old, *new], {sequence: len(sequence.pending) for sequence in work.glue}
        candidates = sum(glued.values()) + sum(len(sequence.candidates) for sequence in forking)
        if not self._fits(waves, candidates) or not self._give_slots(waves, glued):
            return False
        steps_due = max([depth, *(sequence.steps_due for sequence in growing)])
        planted = Planted(waves, steps_due, time.perf_counter(), self._round.under_way + 1)
        with torch.inference_mode():
            self._round.change_trunks(*self._trunks.update([*growing, *forking]))
            glue_rows = self._enqueue_glue(glued)
            known_rows = self._send_candidates(forking)
            rows = {sequence: [*known_rows[sequence], *glue_rows.get(sequence, ())] for sequence in forking}
            self._begin(waves, {s: self._choice(s, rows[s], counts[s]) for s in forking})
        self._enqueue(planted)
        finished = self._round.finished(at_least=1)
        self._keep_candidates(glue_rows)
        for wave in new:
            self._hang_chosen(wave, finished[0], depth)
        planted.waves = [wave for wave in waves if wave.branches]
        self._planted = planted
        self._take_in_all(finished)
        return True

    def _enqueue_glue(self, glued: dict[Sequence, int]) -> dict[Sequence, range]:
        """KV of tokens whose slots are the last of their sequence, so many of each; the rows of their candidates."""
        groups, rows, begin = [], {}, 0
        for sequence, count in glued.items():
            slots, known = sequence.slots.view(), len(sequence.slots) - count
            committed = len(sequence.tokens)
            token_ids = [*sequence.tokens[known:], *sequence.trunk[max(known - committed, 0) :]][:count]
            groups.append(causal_group(token_ids, known, slots, slots[known:].copy()))
            # Candidates are wanted from the last committed token on.
            rows[sequence] = range(begin + max(committed - 1 - known, 0), begin + count)
            begin += count
        if groups:
            places = np.asarray([self._trunks.place_of(sequence) for sequence in glued], dtype=np.int32)
            found = host_rows(groups, self._round.shape.depth)
            self._round.glue(dataclasses.replace(found, row_sequence=places[found.row_sequence]))
        return rows

    def _send_candidates(self, sequences: list[Sequence]) -> dict[Sequence, range]:
        """What the host knows of them, and its rows."""
        found = [candidates for sequence in sequences for candidates in sequence.candidates]
        shape = (len(found), self._round.shape.width)
        token_ids, values = np.full(shape, -1, dtype=np.int32), np.full(shape, -np.inf, dtype=np.float32)
        for row, candidates in enumerate(found):
            token_ids[row, : len(candidates.token_ids)] = candidates.token_ids
            values[row, : len(candidates.logits)] = candidates.logits
        row, rows = self._round.add_candidates(token_ids, values), {}
        for sequence in sequences:
            rows[sequence] = range(row, row + len(sequence.candidates))
            row += len(sequence.candidates)
        return rows

    def _choice(self, sequence: Sequence, rows: list[int], counts: list[int] | None) -> Choice:
        """By what the device chooses the bets."""
        return Choice(
            trunk=sequence.trunk,
            rows=rows,
            sharpness=self._forecast.sharpness_of(sequence),
            acceptance=self._forecast.acceptance_of(sequence),
            counts=counts,
        )

    def _keep_candidates(self, rows: dict[Sequence, range]) -> None:
        """The glue's candidates have come with the first step."""
        token_ids, values = self._round.glued()
        for sequence, own in rows.items():
            sequence.candidates += [Candidates(token_ids[row].astype(np.int64), values[row]) for row in own]

    def _hang_chosen(self, wave: Wave, step: Step, depth: int) -> None:
        """The first step brought what the device bet on."""
        above = step.above[wave.rows]
        count = int((above > 0).sum())  # the best come first; there may be fewer outcomes than rows
        offsets = (above[:count] - len(wave.sequence.tokens)).tolist()
        self._hang(wave.sequence, list(zip(offsets, step.bets[wave.rows][:count].tolist())), depth)
        self._pool.give_back(wave.tail[count:].reshape(-1))
        wave.tail, wave.branches = wave.tail[:count], wave.sequence.wave

    # ---- what all have in common ----

    def _fits(self, waves: list[Wave], num_candidates: int = 0) -> bool:
        """Whether the buffers hold them, and so many rows of candidates."""
        shape = self._round.shape
        rows, steps = sum(len(wave.tail) for wave in waves), max(wave.tail.shape[1] for wave in waves)
        longest = max(len(wave.sequence.tokens) + len(wave.sequence.trunk) for wave in waves)
        within = max(rows, num_candidates) <= shape.max_rows and len(waves) <= shape.max_sequences
        return within and steps <= shape.depth and longest <= shape.max_length

    def _give_slots(self, waves: list[Wave], glued: dict[Sequence, int] | None = None) -> bool:
        """Slots for all steps, and for so many tokens of sequences; returns False if there are not so many."""
        glued = glued or {}
        num_slots = sum(glued.values()) + sum(wave.unused_slots(0).size for wave in waves)
        slots = self._sequences.take_slots(num_slots, [wave.sequence for wave in waves])
        if slots is None:
            return False
        for sequence, count in glued.items():
            sequence.slots.extend(slots[:count])
            slots = slots[count:]
        for wave in waves:
            count = wave.unused_slots(0).size
            wave.tail[:, wave.begun :] = slots[:count].reshape(len(wave.tail), -1)
            slots = slots[count:]
        return True

    def _begin(self, waves: list[Wave], choices: dict[Sequence, Choice] | None = None) -> None:
        """Plant them: those of `choices` come last."""
        choices = choices or {}
        plantings = [
            wave.planting(
                self._trunks.place_of(wave.sequence), int(self._seeds.integers(1 << 62)), choices.get(wave.sequence)
            )
            for wave in waves
        ]
        forecast = self._forecast
        self._round.plant(plantings, forecast.fan_out(), forecast.recovered, forecast.part)

    def _go_on(self) -> None:
        """Keep the device busy, and take in what it has done since; at least a step."""
        self._enqueue(self._planted)
        self._take_in_all(self._round.finished(at_least=min(self._planted.under_way, 1)))

    def _enqueue(self, planted: Planted) -> None:
        """Keep the device busy with the next steps, as long as there is time for them."""
        if planted.enqueued and not planted.under_way:
            planted.since = time.perf_counter()  # it was idle
        while planted.under_way < _AHEAD and planted.enqueued < planted.steps:
            if planted.enqueued >= planted.steps_due:
                # Optional steps must be over before the outcome, which they would delay.
                count = planted.num_rows
                if planted.enqueued and self._pace.branches_of_one_more_step(count, planted.under_way + 1) < count:
                    planted.steps = planted.enqueued
                    break
            elif planted.under_way and not planted.is_for_target and not self._planner.lets_step():
                break
            with torch.inference_mode():
                self._round.grow()
            planted.enqueued += 1

    def _take_in_all(self, steps: list[Step]) -> None:
        """These steps came in. The time since the last ones did is theirs and that of what went before, in equal parts.

        What the host did meanwhile is in it if it took longer than the device: trees grow no faster then.
        """
        planted, now = self._planted, time.perf_counter()
        if steps:
            seconds = (now - planted.since) / (planted.before + len(steps))
            planted.since, planted.before = now, 0
        for step in steps:
            self._pace.observe_step(planted.num_rows, seconds)
            if not planted.is_for_target:
                self._outbox.add_tree_step(seconds)
            self._take_in(planted, step)
        if planted.done == planted.steps:  # no branch is to grow further
            for wave in planted.waves:
                wave.sequence.steps_left = 0
        self._let_go(lambda wave: not wave.grows)

    def _take_in(self, planted: Planted, step: Step) -> None:
        """Every wave that its sequence still wants grows."""
        self._let_go(lambda wave: not wave.grows)
        for wave in planted.waves:
            wave.take_in(step, self._config.draft_top_m, self._outbox, self._sequences.round_id)
        planted.done += 1

    def _end(self) -> None:
        """The round on the device is over; what has come of it is taken in."""
        if self._planted is not None:
            self._take_in_all(self._round.finished())
        self._let_go(lambda wave: True)

    def _let_go(self, unwanted: Callable[[Wave], bool]) -> None:
        """Some waves grow no more: slots of their steps that have not come yet are free.

        A step under way may still write to them, but before whatever is enqueued from now on.
        """
        if (planted := self._planted) is not None:
            for wave in filter(unwanted, planted.waves):
                self._pool.give_back(wave.unused_slots(planted.done))
            planted.waves = [wave for wave in planted.waves if not unwanted(wave)]
            if not planted.waves:
                self._planted = None
