"""The engine over rounds on a device builds what the plain engine builds, round after round, on real weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft import graph_round
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_engine import GraphEngine
from vllm_ssd.draft.graph_round import GraphRound
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.messages import Branches, Growth, Outcome, Round, Start, pack_tokens, unpack_law

DRAFT = str(Path(__file__).parents[1] / "data" / "models" / "draft")
K, NUM_SLOTS = 3, 600


def model_and_config(**options) -> tuple[DraftModel, SaguaroConfig]:
    config = SaguaroConfig(DRAFT, K, **{"tree_budget": 5, "draft_dtype": "float32", "draft_top_m": 8, **options})
    model = DraftModel(config, torch.device("cpu"), vocab_size=4000)
    model.allocate_kv_cache(None, most_useful=NUM_SLOTS)
    return model, config


def plain(**options) -> DraftEngine:
    model, config = model_and_config(**options)
    return DraftEngine(model, config, NUM_SLOTS)


def on_device(max_sequences: int = 4, **options) -> GraphEngine:
    model, config = model_and_config(**options)
    device_round = graph_round.make(GraphDecoder(model._decoder), model._pools, config, 4000, max_sequences, 64)
    return GraphEngine(model, config, NUM_SLOTS, device_round, seed=0)


def start(seq_id: int, prompt: list[int], temperature: float = 0.0) -> Start:
    return Start(seq_id, pack_tokens(prompt), [], temperature, 0, 1.0)


class Side:
    """One engine, and the branches it pushed in the current round."""

    def __init__(self, engine: DraftEngine) -> None:
        self.engine = engine
        self.trees: dict[int, list[tuple[int, list[int]]]] = {}
        self.laws: list[tuple[list[int], np.ndarray, np.ndarray]] = []
        self.usage = 0.0

    def play(self, number: int, starts=(), outcomes=(), finished=(), steps: int = 1000) -> dict:
        """Tell a round, work for so many steps; (tokens above, first token) → chain, of each sequence."""
        message = Round(number, list(starts), list(outcomes), list(finished), depth=K, verify_seconds=0.0)
        self.engine.begin_round(message)
        self.trees = {}
        while steps and self.engine.step():
            steps -= 1
            push = self.engine.take_push()
            for item in push.items if push else []:
                self._take(item)
            self.usage = push.kv_usage if push else self.usage
        return {
            seq_id: {(offset, chain[0]): chain[1:] for offset, chain in tree} for seq_id, tree in self.trees.items()
        }

    def _take(self, item: Branches | Growth) -> None:
        if isinstance(item, Branches):
            self.trees[item.seq_id] = [(offset, [token]) for offset, token in zip(item.offsets, item.token_ids)]
            return
        for (_, chain), token_id in zip(self.trees[item.seq_id], item.token_ids):
            chain.append(token_id)
        if item.law is not None:
            self.laws.append((item.token_ids, *unpack_law(item.law, len(item.token_ids))))


def test_rounds_are_those_of_the_plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, candidates or waves get lost between two rounds: hits, misses, cut drafts, requests that come and go."""
    sides = [Side(plain()), Side(on_device())]
    grown = []
    grow = GraphRound.grow
    monkeypatch.setattr(GraphRound, "grow", lambda self: (grown.append(self), grow(self)))

    def play(number: int, **news) -> dict:
        expected, mine = (side.play(number, **news) for side in sides)
        assert mine == expected
        assert sides[0].usage == pytest.approx(sides[1].usage)
        return mine

    tree = play(1, starts=[start(0, [308, 907, 12, 44]), start(1, [55, 2, 3001, 17, 4])])
    (_, first), chain = next(iter(tree[0].items()))
    hit = Outcome(0, 5, [first], chain[:K], 0)
    miss = Outcome(1, 6, [3999], [], 0)
    tree = play(2, starts=[start(2, [9, 10, 11])], outcomes=[hit, miss])
    # Sequence 0: the verification goes as far as any bet; the scheduler cuts the new drafts to one.
    (offset, bet), below = max(tree[0].items(), key=lambda item: item[0][0])
    hit = Outcome(0, 5 + offset + 1, [*chain[:offset], bet], below[:1], 0)
    (_, first), chain = next(iter(tree[2].items()))
    tree = play(3, outcomes=[hit, Outcome(1, 7, [3], [], 0), Outcome(2, 4, [first], chain[:K], 0)])
    # Sequence 2: everything accepted, and a bonus token that no branch has. Sequence 1 is over.
    play(4, outcomes=[Outcome(2, 8, [*chain[:K], 3998], [], 0)], finished=[1])
    assert len(grown) >= 4 * K  # the device, not the plain step, grew the trees
    for side in sides:
        side.play(5, finished=[0, 2], starts=[start(9, [1, 2])])
    assert sides[0].usage == pytest.approx(sides[1].usage)


def test_an_outcome_in_the_middle_of_a_tree_costs_no_slot() -> None:
    """Slots that were reserved for later steps are never given back, or twice."""
    side = Side(on_device())
    number, length = 1, 3
    side.play(number, starts=[start(0, [7, 8, 9])], steps=4)
    for _ in range(40):  # of 600 slots a round reserves 20
        number, length = number + 1, length + 1
        side.play(number, outcomes=[Outcome(0, length, [number], [], 0)], steps=4)
    side.play(number + 1, finished=[0], starts=[start(1, [5])])
    assert side.usage == pytest.approx((1 + 5 * (K + 1)) / NUM_SLOTS)


def test_more_sequences_than_the_buffers_hold_take_the_plain_step() -> None:
    """A batch beyond the buffers ends the draft."""
    starts = [start(i, [20 + i, 30, 40]) for i in range(3)]
    assert Side(on_device(max_sequences=2)).play(1, starts=starts) == Side(plain()).play(1, starts=starts)


def test_sampled_tokens_come_with_laws_that_hold_them() -> None:
    """The law pushed is not the one the token was drawn from, or greedy rows carry one."""
    side = Side(on_device(saguaro_c=0.6))
    side.play(1, starts=[start(0, [7, 8, 9], temperature=1.0), start(1, [7, 8, 9])])
    assert len(side.laws) == K + 1
    for token_ids, ids, probs in side.laws:
        assert probs.shape == (5, 8)
        np.testing.assert_allclose(probs.sum(axis=1), 1.0, atol=1e-5)
        assert all(probs[row][ids[row] == token_id] > 0 for row, token_id in enumerate(token_ids))
