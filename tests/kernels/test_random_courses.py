"""Random courses of requests over the engine on the device: its trees are the model's, whatever comes between."""

import functools

import numpy as np
import pytest
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.batch import causal_group, flatten
from vllm_ssd.draft.engine_choice import make_round
from vllm_ssd.draft.graph_engine import GraphEngine
from vllm_ssd.draft.graph_waves import Chain, Wave
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.messages import ELSEWHERE, Outcome

from .test_graph_engine import DEVICE, DRAFT, NUM_SLOTS, WHOLE, Side, counted, loaded, start

K, MAX_LENGTH = 3, 200
FAN_OUTS = ("measured", "geometric", [2, 1, 1, 1])


class Target:
    """Verifies at random what the engine drafts: it takes what was foreseen, a part of it, or something else."""

    def __init__(self, seed: int, num_slots: int) -> None:
        self.random = np.random.default_rng(seed)
        # A fixed number of branches: what there is time for would change from run to run.
        options = {"fan_out": FAN_OUTS[seed % len(FAN_OUTS)], "tree_budget": int(self.random.integers(1, 9))}
        config = SaguaroConfig(DRAFT, K, draft_dtype="float32", draft_top_m=8, **options)
        self.model = loaded(config, DEVICE, num_slots=NUM_SLOTS + MAX_LENGTH)  # the last ones are the test's own
        self.engine = GraphEngine(
            self.model, config, num_slots, make_round(self.model, config, WHOLE, 3, MAX_LENGTH), seed=seed
        )
        self.side = Side(self.engine)
        self.texts: dict[int, list[int]] = {}
        self.trunks: dict[int, list[int]] = {}
        self.temperatures: dict[int, float] = {}
        self.number = self.next_id = 0

    def play(self) -> None:
        """A round."""
        self.number += 1
        outcomes, finished = [], []
        for seq_id in list(self.texts):
            if len(self.texts[seq_id]) > MAX_LENGTH - 20 or self.random.random() < 0.05:
                finished.append(seq_id)
                for known in (self.texts, self.trunks, self.temperatures, self.side.trees, self.side.drafts):
                    known.pop(seq_id, None)
            elif self.random.random() < 0.8:
                outcomes.append(self.verify(seq_id))
        starts = []
        while len(self.texts) < 4 and self.random.random() < 0.5:  # one more than the buffers hold
            prompt = self.random.integers(1, 4000, self.random.choice((1, 2, 9, 40, 63, 64, 65, 100))).tolist()
            self.texts[self.next_id], self.trunks[self.next_id] = prompt, []
            self.temperatures[self.next_id] = float(self.random.choice((0.0, 0.0, 0.8)))
            starts.append(start(self.next_id, prompt, self.temperatures[self.next_id]))
            self.next_id += 1
        depth = int(self.random.integers(1, K + 1))
        self.side.play_on(self.number, starts, outcomes, finished, int(self.random.choice((1, 2, 3, 5, 1000))), depth)
        for seq_id, drafts in self.side.drafts.items():
            self.trunks[seq_id] = list(drafts)  # more may come in the next round

    def verify(self, seq_id: int) -> Outcome:
        """An outcome: it may be one of the tree's."""
        tree, trunk = self.side.trees.pop(seq_id, []), self.trunks[seq_id]
        self.side.drafts.pop(seq_id, None)
        bets = [(offset, chain) for offset, chain in tree if len(chain) > 1]
        drafts, wanted = [], 0
        if bets and self.random.random() < 0.6:
            offset, chain = bets[self.random.integers(len(bets))]
            emitted, drafts = [*trunk[:offset], chain[0]], chain[1 : 1 + int(self.random.integers(1, K + 1))]
        else:
            emitted = [*trunk[: self.random.integers(len(trunk) + 1)], int(self.random.integers(1, 4000))]
            wanted = int(self.random.choice((0, 0, 1, K, ELSEWHERE)))
            if wanted == 0 and self.random.random() < 0.3:
                drafts = self.random.integers(1, 4000, K).tolist()  # n-grams
        if trunk and self.random.random() < 0.1:
            emitted, drafts, wanted = trunk[: self.random.integers(1, len(trunk) + 1)], [], 0  # it was not all verified
        self.texts[seq_id] += emitted
        self.trunks[seq_id] = drafts
        return Outcome(seq_id, len(self.texts[seq_id]), emitted, drafts, wanted)


@functools.cache
@torch.inference_mode()
def greedy(model: DraftModel, text: tuple[int, ...]) -> int:
    """The model's next token, over slots that are nobody else's."""
    slots = NUM_SLOTS + np.arange(len(text))
    batch = flatten([causal_group(text, 0, slots, slots)], model.device, np.array([len(text) - 1]))
    return int(model.forward(batch)[0, :4000].argmax())


def check(target: Target, drafts: list[int], text: list[int]) -> int:
    """Whether the model goes on like that after the text; how many tokens that was."""
    for place, token_id in enumerate(drafts):
        assert token_id == greedy(target.model, (*text, *drafts[:place]))
    return len(drafts)


@pytest.mark.parametrize("num_slots", (NUM_SLOTS, 260), ids=("room", "hardly room"))
@pytest.mark.parametrize("seed", range(6))
def test_random_courses(seed: int, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is not the model's, a slot is used twice or lost, or a course ends the draft."""
    drafted, grown = (counted("take_in", monkeypatch, kind) for kind in (Chain, Wave))
    target = Target(seed, num_slots)
    engine, checked = target.engine, 0
    for _ in range(40):
        target.play()
        for seq_id, tree in target.side.trees.items():
            if target.temperatures[seq_id]:
                continue
            checked += check(target, target.side.drafts.get(seq_id, []), target.texts[seq_id])
            for offset, chain in tree:
                if chain is not target.side.drafts.get(seq_id):
                    text = [*target.texts[seq_id], *target.trunks[seq_id][:offset], chain[0]]
                    checked += check(target, chain[1:], text)
        planted = [wave.unused_slots(engine._planted.done) for wave in engine._planted.waves] if engine._planted else []
        held = [np.asarray(branch.slots) for s in engine._sequences for branch in s.branches]
        slots = np.concatenate([[], *planted, *held, *(sequence.slots.view() for sequence in engine._sequences)])
        assert len(slots) == len(set(slots.tolist())) == engine._pool.num_slots - engine._pool.num_free
    assert checked > 100 and len(grown) > 40 and len(drafted) > 3  # by the device
    target.side.play(1000, finished=list(target.texts))
    assert engine._pool.usage == 0.0
