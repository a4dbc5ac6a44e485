"""A round on the device builds the trees that the engine builds, on real weights and under padding."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.batch import causal_group, flatten
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.graph_buffers import Shape, tree_bytes
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_outcomes import UNKNOWN, most_probable_outcomes
from vllm_ssd.draft.graph_planting import Choice, Planting, Step
from vllm_ssd.draft.graph_round import GraphRound
from vllm_ssd.draft.graph_rows import host_rows
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.fanout import most_probable_outcomes as on_the_host
from vllm_ssd.messages import Branches, Growth, Round, Start, pack_tokens
from vllm_ssd.sampling import saguaro_law, top_tokens

DRAFT = str(Path(__file__).parents[1] / "data" / "models" / "draft")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K, BUDGET, DEPTH = 3, 6, 4
PROMPTS = (
    ([308, 907, 12, 44, 1201, 7, 7, 93, 400], [12, 44, 1201]),
    ([55, 2, 3001, 17, 4, 91, 1, 8, 12, 77, 500, 41], [7, 8]),
    ([9, 10], []),
)


@pytest.fixture(scope="module")
def model() -> DraftModel:
    config = SaguaroConfig(DRAFT, K, tree_budget=BUDGET, draft_dtype="float32")
    model = DraftModel(config, DEVICE, vocab_size=4000)
    model.allocate_kv_cache(None, most_useful=1024)
    return model


def make(model: DraftModel, **changes) -> GraphRound:
    decoder = GraphDecoder(model._decoder)
    shape = Shape(
        **{
            "max_rows": 40,
            "max_sequences": 4,
            "max_length": 64,
            "depth": DEPTH,
            "width": 16,
            "num_heads": decoder.num_heads,
            "num_kv_heads": decoder.num_kv_heads,
            "head_size": decoder.head_size,
            "vocab_size": 4096,
            "dtype": torch.float32,
            **changes,
        }
    )
    return GraphRound(decoder, model._pools, shape, model.vocab_size, top_m=8)


def feed(graph_round: GraphRound, plan: list[tuple[list[int], list[int]]]) -> tuple[list[int], np.ndarray]:
    """Glue whole prompts and their trunks; the row after each prompt's last token, and slots that are left."""
    slots = np.random.default_rng(0).permutation(1000)
    groups, first_rows, used = [], [], 0
    for prompt, trunk in plan:
        tokens = prompt + trunk
        mine = slots[used : used + len(tokens)]
        first_rows.append(used + len(prompt) - 1)
        groups.append(causal_group(tokens, 0, mine, mine))
        used += len(tokens)
    with torch.inference_mode():
        graph_round.set_trunks([group.trunk for group in groups])
        graph_round.glue(host_rows(groups, DEPTH))
    return first_rows, slots[used:]


def planted(plan, left: np.ndarray, bets: list[list[tuple[int, int]]], **law) -> list[Planting]:
    """Branches that the host chose, of each prompt."""
    used = np.cumsum([0, *map(len, bets)]) * DEPTH
    tails = [left[begin:end].reshape(-1, DEPTH).astype(np.int32) for begin, end in zip(used, used[1:])]
    return [Planting(i, len(plan[i][0]), tails[i], own, seed=i, **law) for i, own in enumerate(bets)]


def chosen(plan, left: np.ndarray, first_rows: list[int], count: int = BUDGET, **facts) -> list[Planting]:
    """Branches that the device chooses, `count` for each prompt."""
    unset = planted(plan, left, [[(0, 0)] * count] * len(plan))
    rows = [range(row, row + len(trunk) + 1) for row, (_, trunk) in zip(first_rows, plan)]
    choices = [Choice(trunk, own, **facts) for own, (_, trunk) in zip(rows, plan)]
    return [dataclasses.replace(planting, bets=(), choice=choice) for planting, choice in zip(unset, choices)]


def chains_of_the_engine(model: DraftModel, plan) -> list[dict[tuple[int, int], list[int]]]:
    """(tokens of the trunk above, first token) → drafts, for each prompt, as the engine pushes them."""
    config = SaguaroConfig(DRAFT, K, tree_budget=BUDGET, draft_dtype="float32")
    engine = DraftEngine(model, config, 1024)
    starts = [Start(i, pack_tokens(prompt), trunk, 0.0, 0, 1.0) for i, (prompt, trunk) in enumerate(plan)]
    engine.begin_round(Round(1, starts, [], [], depth=K, verify_seconds=0.0))
    trees: list[list] = [[] for _ in plan]
    while engine.step():
        push = engine.take_push()
        for item in push.items if push else []:
            if isinstance(item, Branches):
                trees[item.seq_id] = [(offset, [token]) for offset, token in zip(item.offsets, item.token_ids)]
            elif isinstance(item, Growth):
                for (_, chain), token_id in zip(trees[item.seq_id], item.token_ids):
                    chain.append(token_id)
    return [{(offset, chain[0]): chain[1:] for offset, chain in tree} for tree in trees]


@pytest.mark.parametrize("changes", ({}, {"vocab_size": 8 << 20}), ids=("at once", "logits in parts"))
def test_the_tree_is_the_engines(model: DraftModel, changes: dict) -> None:
    """Outcomes, tokens or attention on the device differ from those of the engine."""
    graph_round = make(model, **changes)
    with torch.inference_mode():
        first_rows, left = feed(graph_round, PROMPTS)
        graph_round.plant(chosen(PROMPTS, left, first_rows), [2] * (K + 1))
        graph_round.grow(DEPTH)
    steps = graph_round.finished(at_least=DEPTH)
    assert [step.number for step in steps] == list(range(DEPTH))
    found = []
    for place, (prompt, _) in enumerate(PROMPTS):
        rows = range(place * BUDGET, (place + 1) * BUDGET)
        bets = [(int(steps[0].above[row]) - len(prompt), int(steps[0].bets[row])) for row in rows]
        found.append({bet: [int(step.tokens[row]) for step in steps] for bet, row in zip(bets, rows)})
    expected = chains_of_the_engine(model, PROMPTS)
    for mine, theirs in zip(found, expected):
        assert mine.keys() == theirs.keys()
        assert all(mine[bet][: len(chain)] == chain for bet, chain in theirs.items())
        assert all(len(chain) >= K for chain in theirs.values())


def test_sampled_rows_carry_the_law_they_were_drawn_from(model: DraftModel) -> None:
    """The law that comes to the host is not that of the draft at this place."""
    plan = PROMPTS[:2]
    law = {"temperature": 0.8, "top_k": 6, "top_p": 0.95, "saguaro_c": 0.5}
    bets = [(0, 11), (1, 12), (3, 13), (0, 21), (2, 22), (2, 23)]
    graph_round = make(model)
    with torch.inference_mode():
        _, left = feed(graph_round, plan)
        plantings = planted(plan, left, [bets[:3], bets[3:]], **law)
        graph_round.plant(plantings, [2, 1])
        graph_round.grow(DEPTH)
        steps = graph_round.finished(at_least=DEPTH)
        # They go on after two steps, in another order and by other draws; the longer ones first.
        tips = [(offset, int(token)) for (offset, _), token in zip(bets, steps[1].tokens)]
        resumed = [
            dataclasses.replace(plantings[1], bets=tips[3:], begun=2, position=2),
            dataclasses.replace(plantings[0], bets=tips[:3], begun=2, tail_slots=plantings[0].tail_slots[:, :3]),
        ]
        graph_round.plant(resumed, [2, 1])
        graph_round.grow(2)
        [again, _] = graph_round.finished(at_least=2)
        for row, (offset, first) in enumerate(bets):
            prompt, trunk = plan[row // 3]
            chain = [*prompt, *trunk[:offset], first]
            for step in steps:
                check_law(model, chain, step, row, fan_out=2 if step.number == 0 else 1)
                chain.append(int(step.tokens[row]))
            # `position` says which F: of the first planting none was given, and it is the first one.
            check_law(model, chain[:-2], again, (row + 3) % 6, fan_out=2 if row < 3 else 1)


def check_law(model: DraftModel, text: list[int], step: Step, row: int, fan_out: int) -> None:
    """Whether a row was drawn from the law after this text."""
    slots = np.arange(len(text))
    # Slots from 1000 on are of no sequence: the oracle's own.
    batch = flatten([causal_group(text, 0, slots % 24 + 1000, slots % 24 + 1000)], DEVICE)
    values, token_ids = top_tokens(model.forward(batch)[-1:], 8, model.vocab_size)
    expected = saguaro_law(
        values.cpu(), torch.tensor([0.8]), torch.tensor([6]), torch.tensor([0.95]), torch.tensor([fan_out]), 0.5
    )
    assert step.token_ids[row, :8].tolist() == token_ids[0].tolist()
    np.testing.assert_allclose(step.probs[row, :8], expected[0], atol=1e-5)
    assert step.probs[row, 8:].max() == 0.0
    assert step.tokens[row] in step.token_ids[row][step.probs[row] > 0]


def test_branches_of_a_sequence_draw_independently(model: DraftModel) -> None:
    """All branches with the same context draw the same token."""
    graph_round = make(model)
    with torch.inference_mode():
        _, left = feed(graph_round, PROMPTS[:1])
        graph_round.plant(planted(PROMPTS[:1], left, [[(3, 11)] * 20], temperature=5.0), [1])
        graph_round.grow()
    [step] = graph_round.finished(at_least=1)
    assert len(set(step.tokens.tolist())) > 3


def test_steps_of_a_branch_draw_independently(model: DraftModel) -> None:
    """All steps of a branch draw with the same number: from laws that are nearly level, the same rank."""
    graph_round = make(model)
    with torch.inference_mode():
        _, left = feed(graph_round, PROMPTS[:1])
        graph_round.plant(planted(PROMPTS[:1], left, [[(3, 11)] * 20], temperature=1e4), [1])
        graph_round.grow(DEPTH)
    steps = graph_round.finished(at_least=DEPTH)
    ranks = np.stack([(step.token_ids == step.tokens[:, None]).argmax(axis=1) for step in steps])
    assert (ranks != ranks[0]).any(axis=0).sum() > 15


def arrays(steps) -> list[np.ndarray]:
    return [np.copy(field) for step in steps for field in vars(step).values() if isinstance(field, np.ndarray)]


def test_what_came_stays(model: DraftModel) -> None:
    """A later round changes what an earlier one brought, and the engine kept."""
    graph_round, plan = make(model), PROMPTS[:1]
    with torch.inference_mode():
        first_rows, left = feed(graph_round, plan)
        graph_round.plant(chosen(plan, left, first_rows), [2])
        graph_round.grow(DEPTH)
        steps, glued = graph_round.finished(at_least=DEPTH), graph_round.glued()
        before = arrays(steps), [np.copy(field) for field in glued]
        first_rows, left = feed(graph_round, PROMPTS[1:2])
        graph_round.plant(chosen(PROMPTS[1:2], left, first_rows), [2])
        graph_round.grow(DEPTH)
        graph_round.finished(at_least=DEPTH)
    assert all(np.array_equal(mine, old) for mine, old in zip(arrays(steps), before[0], strict=True))
    assert all(np.array_equal(mine, old) for mine, old in zip(glued, before[1], strict=True))


@pytest.mark.parametrize("by_host", (True, False), ids=("chosen by the host", "by the device"))
def test_rows_of_an_earlier_round_are_over(model: DraftModel, by_host: bool) -> None:
    """They live on as padding of the same bucket, and write to slots that others have now."""
    graph_round, plan = make(model), PROMPTS[:1]
    with torch.inference_mode():
        first_rows, left = feed(graph_round, plan)
        larger = planted(plan, left, [[(3, 11 + row) for row in range(12)]])
        graph_round.plant(larger, [1])
        graph_round.grow(DEPTH)
        for pool in model._pools:
            pool[:, larger[0].tail_slots.reshape(-1).tolist()] = 0.0
        smaller = planted(plan, left, [[(3, 11)] * 10]) if by_host else chosen(plan, left, first_rows, 10)
        graph_round.plant(smaller, [1])
        graph_round.grow(DEPTH)
    mine = smaller[0].tail_slots.reshape(-1).tolist()
    others = sorted(set(larger[0].tail_slots.reshape(-1).tolist()) - set(mine))
    assert len(others) == 2 * DEPTH
    for pool in model._pools:
        assert pool[:, mine].any() and not pool[:, others].any()


def test_more_steps_than_the_tree_is_deep_are_refused(model: DraftModel) -> None:
    """Tails run into the slots of others."""
    graph_round = make(model)
    with torch.inference_mode():
        _, left = feed(graph_round, PROMPTS[:1])
        graph_round.plant(planted(PROMPTS[:1], left, [[(0, 11), (1, 12)]]), [1])
        with pytest.raises(ValueError, match="a tree has 4"):
            graph_round.grow(DEPTH + 1)


def test_warm_up_changes_no_slot(model: DraftModel) -> None:
    """Capturing the graphs destroys KV."""
    before = [pool.clone() for pool in model._pools]
    with torch.inference_mode():
        make(model).warm_up()
    assert all(torch.equal(pool, old) for pool, old in zip(model._pools, before))


def test_outcomes_are_those_of_the_host() -> None:
    """The device bets on other outcomes than the host would."""
    generator = np.random.default_rng(0)
    for _ in range(30):
        size, positions, width, budget = 4, 4, 5, int(generator.integers(1, 25))
        values = -np.sort(-3 * generator.standard_normal((size, positions, width)).astype(np.float32), axis=-1)
        token_ids = np.argsort(generator.random((size, positions, 12)), axis=-1)[..., :width].astype(np.int32)
        lengths = generator.integers(0, positions, size)
        trunks = generator.integers(0, 12, (size, positions - 1)).astype(np.int32)
        sharpness = generator.uniform(0.3, 2.0, size).astype(np.float32)
        acceptance = generator.uniform(0.0, 1.0, trunks.shape).astype(np.float32)
        acceptance[generator.random(size) < 0.5] = UNKNOWN
        recovered = float(generator.uniform(0.01, 2.0))
        offsets, tokens, possible = most_probable_outcomes(
            *(torch.from_numpy(a) for a in (values, token_ids, trunks, lengths, sharpness, acceptance)),
            recovered,
            budget,
        )
        for row, length in enumerate(lengths):
            expected = on_the_host(
                token_ids[row, : length + 1],
                values[row, : length + 1],
                trunks[row, :length].tolist(),
                budget,
                float(sharpness[row]),
                None if (acceptance[row] == UNKNOWN).all() else acceptance[row, :length].tolist(),
                recovered,
            )
            mine = [(int(k), int(t)) for k, t, there in zip(offsets[row], tokens[row], possible[row]) if there]
            assert mine == expected


def test_the_tree_of_a_full_batch_fits_200_megabytes() -> None:
    """Batch 64, K 7, 24 branches, vocabulary 128k: logits or laws of all branches at once are gigabytes."""
    shape = Shape(
        max_rows=64 * 24,
        max_sequences=64,
        max_length=131_072,
        depth=8,
        width=64,
        num_heads=32,  # as Llama 3.2 1B
        num_kv_heads=8,
        head_size=64,
        vocab_size=128_256,
        dtype=torch.bfloat16,
    )
    assert 60e6 < tree_bytes(shape) < 200e6
