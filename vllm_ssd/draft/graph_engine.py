"""The engine over rounds on a device: tree steps feed one another there, one ahead of the host.

What a wave of branches draws in a step is read while the device is at work on the next. Whatever does
not fit a round on the device (waves that are not equally deep, more rows than the buffers hold) takes
the engine's own step. A new outcome ends the round: what was built stays as it is, what is under way is
not read. Tested on the CPU, where a round runs at once; no GPU was at hand.
"""

import dataclasses
import time

import numpy as np
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.engine import DraftEngine, Forwards
from vllm_ssd.draft.graph_round import GraphRound, Planting, Step
from vllm_ssd.draft.sequence import Branch, Candidates, Sequence
from vllm_ssd.messages import Round, pack_law

_AHEAD = 2  # steps under way: one that is read, one that keeps the device busy


@dataclasses.dataclass
class _Planted:
    """Waves that grow on the device."""

    waves: list[tuple[Sequence, list[Branch]]]
    tails: list[np.ndarray]  # [n, steps] slots of each wave
    steps: int  # in all
    enqueued: int = 0
    done: int = 0

    @property
    def stands(self) -> bool:
        """Whether all sequences still want these waves to grow."""
        return all(sequence.wave is wave and sequence.steps_left for sequence, wave in self.waves)


class GraphEngine(DraftEngine):
    """Trees for all sequences of one target, grown on the device."""

    def __init__(
        self, model, config: SaguaroConfig, num_slots: int, graph_round: GraphRound, seed: int | None = None
    ) -> None:
        """`graph_round`: over the pools of `model`."""
        super().__init__(model, config, num_slots, seed)
        self._round = graph_round
        self._seeds = np.random.default_rng(seed)
        self._planted: _Planted | None = None

    def begin_round(self, message: Round, earliest: float | None = None) -> None:
        """As the engine's; slots of waves that are not wanted any more are free again."""
        super().begin_round(message, earliest)
        if self._planted is not None and not self._planted.stands:
            self._end()

    def _tree_step(self, sequences: list[Sequence]) -> Forwards:
        """One token for each branch of all waves."""
        began = time.perf_counter()
        planted = self._planted
        if planted is None or not planted.stands or [s for s, _ in planted.waves] != sequences:
            self._end()
            planted = self._plant(sequences)
            if planted is None:
                yield from super()._tree_step(sequences)
                return
        count = sum(len(wave) for _, wave in planted.waves)
        while planted.enqueued < min(planted.done + _AHEAD, planted.steps):
            # The last step is optional: it must be over before the outcome, which it would delay.
            last = planted.enqueued == planted.steps - 1
            if last and planted.enqueued and self._pace.branches_of_one_more_step(count) < count:
                planted.steps -= 1
                break
            with torch.inference_mode():
                self._round.grow()
            planted.enqueued += 1
        for step in self._round.finished(at_least=1) if planted.enqueued > planted.done else []:
            self._take_in(planted, step)
        if planted.done == planted.steps:
            for sequence, _ in planted.waves:
                sequence.steps_left = 0
            self._end()
        seconds = time.perf_counter() - began
        self._outbox.add_tree_step(seconds)
        self._pace.observe_step(count, seconds)

    def _plant(self, sequences: list[Sequence]) -> _Planted | None:
        """Send the waves to the device, with slots for all their steps; None if they do not fit a round."""
        shape, steps = self._round.shape, sequences[0].steps_left
        waves = [(sequence, sequence.wave) for sequence in sequences]
        fresh = all(sequence.steps_left == steps for sequence in sequences)
        fresh = fresh and not any(branch.slots for _, wave in waves for branch in wave)
        fits = sum(len(wave) for _, wave in waves) <= shape.max_rows and len(waves) <= shape.max_sequences
        if not fresh or not fits or steps > shape.depth or max(len(s.slots) for s in sequences) > shape.max_length:
            return None
        tails: list[np.ndarray] = []
        for _, wave in waves:
            slots = self._sequences.take_slots(len(wave) * steps, sequences)
            if slots is None:
                for tail in tails:
                    self._pool.give_back(tail.reshape(-1))
                return None
            tails.append(slots.reshape(len(wave), steps))
        self._planted = _Planted(waves, tails, steps)
        with torch.inference_mode():
            self._round.set_trunks([sequence.slots.view() for sequence in sequences])
            self._round.plant(
                [self._planting(place, sequence, tail) for place, (sequence, tail) in enumerate(zip(sequences, tails))],
                [(branch.offset, branch.tokens[0]) for _, wave in waves for branch in wave],
                self._forecast.fan_out(),
            )
        return self._planted

    def _planting(self, place: int, sequence: Sequence, tail: np.ndarray) -> Planting:
        padded = np.zeros((len(tail), self._round.shape.depth), dtype=np.int32)
        padded[:, : tail.shape[1]] = tail
        return Planting(
            place=place,
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
        top_m, begin = self._config.draft_top_m, 0
        for (sequence, wave), tail in zip(planted.waves, planted.tails):
            rows = slice(begin, begin + len(wave))
            begin = rows.stop
            token_ids = step.tokens[rows].tolist()
            fields = zip(wave, tail[:, step.number].tolist(), token_ids, step.token_ids[rows], step.values[rows])
            for branch, slot, token_id, ids, values in fields:
                branch.slots.append(slot)
                branch.tokens.append(token_id)
                branch.candidates.append(Candidates(ids.astype(np.int64), values))
            law = pack_law(step.token_ids[rows, :top_m], step.probs[rows, :top_m]) if sequence.samples else None
            self._outbox.add_growth(sequence, token_ids, law)
            sequence.steps_left -= 1
        planted.done += 1

    def _end(self) -> None:
        """The round on the device is over: slots of steps that were not taken in are free.

        A step under way may still write to them, but before whatever is enqueued from now on.
        """
        if self._planted is not None:
            for tail in self._planted.tails:
                self._pool.give_back(tail[:, self._planted.done :].reshape(-1))
            self._planted = None
