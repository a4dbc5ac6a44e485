"""The engine over rounds on a device builds what the plain engine builds, round after round, on real weights."""

import types
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft import engine as engine_module
from vllm_ssd.draft import graph_engine, kernel_trial
from vllm_ssd.draft.batch import causal_group, flatten
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.engine_choice import make_engine, make_round
from vllm_ssd.draft.forecast import Part
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_engine import GraphEngine
from vllm_ssd.draft.graph_round import GraphRound
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.outbox import Outbox
from vllm_ssd.draft.pace import Pace
from vllm_ssd.draft.planner import Planner
from vllm_ssd.messages import Branches, Growth, Outcome, Round, Start, pack_tokens, unpack_law
from vllm_ssd.sampling import saguaro_law, top_tokens

DRAFT = str(Path(__file__).parents[1] / "data" / "models" / "draft")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K, NUM_SLOTS = 3, 600
WHOLE = Part()


def loaded(config: SaguaroConfig, device: torch.device, vocab_size: int = 4000, num_slots: int = NUM_SLOTS):
    model = DraftModel(config, device, vocab_size)
    model.allocate_kv_cache(None, most_useful=num_slots)
    if device.type == "cuda":
        model.warm_up()  # only then it has what rounds on a device need
    return model


def model_and_config(device: torch.device = DEVICE, **options) -> tuple[DraftModel, SaguaroConfig]:
    config = SaguaroConfig(DRAFT, K, **{"tree_budget": 5, "draft_dtype": "float32", "draft_top_m": 8, **options})
    return loaded(config, device), config


def plain(part: Part = WHOLE, **options) -> DraftEngine:
    model, config = model_and_config(**options)
    return DraftEngine(model, config, NUM_SLOTS, part=part)


def on_device(max_sequences: int = 4, part: Part = WHOLE, **options) -> GraphEngine:
    model, config = model_and_config(**options)
    device_round = make_round(model, config, part, max_sequences, 64)
    return GraphEngine(model, config, NUM_SLOTS, device_round, seed=0, part=part)


def start(seq_id: int, prompt: list[int], temperature: float = 0.0) -> Start:
    return Start(seq_id, pack_tokens(prompt), [], temperature, 0, 1.0)


class Side:
    """One engine, and the branches it pushed in the current round."""

    def __init__(self, engine: DraftEngine) -> None:
        self.engine = engine
        self.trees: dict[int, list[tuple[int, list[int]]]] = {}
        self.drafts: dict[int, list[int]] = {}  # that a target waits for
        self.laws: list[tuple[list[int], np.ndarray, np.ndarray]] = []
        self.usage = 0.0

    def play(self, number: int, starts=(), outcomes=(), finished=(), steps: int = 1000, depth: int = K) -> dict:
        """Tell a round, work for so many steps; (tokens above, first token) → chain, of each sequence."""
        self.trees = {}
        return self.play_on(number, starts, outcomes, finished, steps, depth)

    def play_on(self, number: int, starts=(), outcomes=(), finished=(), steps: int = 1000, depth: int = K) -> dict:
        """The same while the trees of other sequences grow."""
        message = Round(number, list(starts), list(outcomes), list(finished), depth=depth, verify_seconds=0.0)
        self.engine.begin_round(message)
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
        if isinstance(item, Branches) and item.drafts:  # they had rested
            begun = {(offset, tuple(chain)): chain for offset, chain in self.trees[item.seq_id]}
            chains = [(o, (t, *drafts)) for o, t, drafts in zip(item.offsets, item.token_ids, item.drafts)]
            self.trees[item.seq_id] = [(chain[0], begun[chain]) for chain in chains]
            return
        if isinstance(item, Branches) and not item.offsets:
            self.drafts[item.seq_id] = []
            self.trees[item.seq_id] = [(len(item.trunk), self.drafts[item.seq_id])]
            return
        if isinstance(item, Branches):
            self.trees[item.seq_id] = [(offset, [token]) for offset, token in zip(item.offsets, item.token_ids)]
            return
        for (_, chain), token_id in zip(self.trees[item.seq_id], item.token_ids):
            chain.append(token_id)
        if item.law is not None:
            self.laws.append((item.token_ids, *unpack_law(item.law, len(item.token_ids))))


def counted(name: str, monkeypatch: pytest.MonkeyPatch, owner: type = GraphRound) -> list[tuple]:
    """The arguments of each call of this method, growing as it is called."""
    calls, method = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args: (calls.append(args), method(self, *args))[1])
    return calls


@pytest.mark.parametrize("part", (WHOLE, Part(1, 2)), ids=("a whole tree", "a part of it"))
def test_rounds_are_those_of_the_plain_engine(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots, candidates or waves get lost between two rounds: hits, misses, cut drafts, requests that come and go."""
    sides = [Side(plain(part)), Side(on_device(part=part))]
    grown, forked = counted("grow", monkeypatch), counted("_choose", monkeypatch)

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
    assert len(forked) == 4  # in every round something was to be glued; hits beside it were forked with it
    for side in sides:
        side.play(5, finished=[0, 2], starts=[start(9, [1, 2])])
    assert sides[0].usage == pytest.approx(sides[1].usage)


class Shallow(Pace):
    """Has time for one draft of five branches, then the verification is overdue for long."""

    def shapes(self, sequences: int, depth: int) -> list[tuple[int, int]]:
        return [(1, 5)]

    def branches_of_one_more_step(self, num_branches: int, steps: int = 1) -> int:
        return num_branches if self._extended else 0

    @property
    def overdue(self) -> bool:
        return not self._extended


def test_branches_of_a_shallow_plan_grow_when_the_verification_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device left at the depth that was planned stays there, or goes on with the KV of others."""
    monkeypatch.setattr(engine_module, "Pace", Shallow)
    trees, sides = [], (Side(plain()), Side(on_device()))
    for side in sides:
        side.play(1, starts=[start(0, [308, 907, 12, 44]), start(1, [55, 2, 3001, 17, 4])])
        trees.append(side.play(2, outcomes=[Outcome(0, 5, [7], [], 0), Outcome(1, 6, [3999], [], 0)]))
        side.play(3, finished=[0, 1], starts=[start(9, [1, 2])])
    assert trees[0] == trees[1]
    assert {len(chain) for tree in trees[1].values() for chain in tree.values()} == {K + 1}
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


def test_slots_of_dead_waves_are_free_for_whoever_comes() -> None:
    """A request that begins as another ends gets no tree, for the other's steps to come still hold slots."""
    config = SaguaroConfig(DRAFT, K, tree_budget=5, draft_dtype="float32", draft_top_m=8)
    model = loaded(config, DEVICE, num_slots=30)
    side = Side(GraphEngine(model, config, 30, make_round(model, config, WHOLE, 4, 64), seed=0))
    side.play(1, starts=[start(0, [7, 8, 9])], steps=1)
    assert side.engine.sequence(0).steps_left
    assert side.play(2, starts=[start(1, list(range(5, 27)))], finished=[0])[1]


def test_more_sequences_than_the_buffers_hold_take_the_plain_step() -> None:
    """A batch beyond the buffers ends the draft."""
    starts = [start(i, [20 + i, 30, 40]) for i in range(3)]
    assert Side(on_device(max_sequences=2)).play(1, starts=starts) == Side(plain()).play(1, starts=starts)


def test_a_target_may_know_more_tokens_than_the_draft_has() -> None:
    """Its padded vocabulary is larger, and the round on the device is refused."""
    config = model_and_config()[1]
    model = loaded(config, DEVICE, vocab_size=5000)
    assert model.num_embeddings < 5000
    side = Side(GraphEngine(model, config, NUM_SLOTS, make_round(model, config, WHOLE, 4, 64), seed=0))
    assert side.play(1, starts=[start(0, [308, 907, 12, 44])])[0]


def test_sampled_tokens_come_with_laws_that_hold_them() -> None:
    """The law pushed is not the one the token was drawn from, or greedy rows carry one."""
    side = Side(on_device(saguaro_c=0.6))
    side.play(1, starts=[start(0, [7, 8, 9], temperature=1.0), start(1, [7, 8, 9])])
    assert len(side.laws) == K + 1
    for token_ids, ids, probs in side.laws:
        assert probs.shape == (5, 8)
        np.testing.assert_allclose(probs.sum(axis=1), 1.0, atol=1e-5)
        assert all(probs[row][ids[row] == token_id] > 0 for row, token_id in enumerate(token_ids))


def test_drafts_for_a_target_are_drawn_with_the_f_of_their_place() -> None:
    """A chain that begins in the middle, behind a draft that the host drew, has the F of the first place."""
    counts, reference = [4, 1, 1, 1], model_and_config()[0]
    side = Side(on_device(fan_out=counts, tree_budget=7, saguaro_c=0.3))
    tree = side.play(1, starts=[start(0, [7, 8, 9], temperature=1.0)])
    side.laws.clear()
    (_, first), text = next(iter(tree[0])), [7, 8, 9]
    side.play(2, outcomes=[Outcome(0, 4, [first], [], K)])
    text.append(first)
    laws = [law for law in side.laws if len(law[0]) == 1]  # trees have more rows
    assert [token_id for [token_id], _, _ in laws] == side.drafts[0] and len(laws) == K
    for fan_out, ([token_id], ids, probs) in zip(counts, laws):
        slots = np.arange(len(text))
        batch = flatten([causal_group(text, 0, slots, slots)], DEVICE, np.array([len(text) - 1]))
        values, best = top_tokens(reference.forward(batch), 8, 4000)
        facts = torch.tensor([[1.0], [0.0], [1.0], [fan_out]])
        expected = saguaro_law(values.cpu(), facts[0], facts[1].int(), facts[2], facts[3].int(), 0.3)
        assert ids[0].tolist() == best[0].tolist()
        np.testing.assert_allclose(probs[0], expected[0], atol=1e-4)
        text.append(token_id)


def test_fewer_outcomes_than_rows_leave_no_slots_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without an outcome grow, are pushed, or keep their slots."""
    forked = counted("_choose", monkeypatch)
    sides = [Side(plain(tree_budget=40)), Side(on_device(tree_budget=40))]
    for number, outcomes in enumerate(([], [Outcome(0, 4, [3999], [], 0)], [Outcome(0, 5, [3998], [], 0)]), 1):
        starts = [start(0, [7, 8, 9])] if number == 1 else []
        expected, mine = (side.play(number, starts, outcomes) for side in sides)
        assert mine == expected and len(mine[0]) == 33  # the candidates that bets are chosen from
        assert sides[0].usage == pytest.approx(sides[1].usage)
    assert len(forked) == 3


FAN_OUTS = ("measured", "geometric", "uniform", [2, 1, 1, 1], [0, 0, 0, 3])


@pytest.mark.parametrize("fan_out", FAN_OUTS, ids=str)
@pytest.mark.parametrize("part", (WHOLE, Part(1, 2)), ids=("a whole tree", "a part of it"))
def test_no_candidates_are_waited_for(fan_out: str | list[int], part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """A glue is read back before the branches are chosen: after misses, hits, drafts for a target, beside trees."""
    sides = [Side(plain(part, fan_out=fan_out)), Side(on_device(part=part, fan_out=fan_out))]
    # Without their last step: then the last draft of a hit has no KV.
    monkeypatch.setattr(Planner, "most_steps", property(lambda planner: max(planner.depth, 1)))
    forwards, forward = [], DraftEngine._forward
    monkeypatch.setattr(
        DraftEngine,
        "_forward",
        lambda self, batch: (forwards.append(batch) if self is sides[1].engine else None, forward(self, batch))[1],
    )

    def play(number: int, **news) -> dict:
        expected, mine = (side.play(number, **news) for side in sides)
        assert mine == expected and sides[0].drafts == sides[1].drafts
        assert sides[0].usage == pytest.approx(sides[1].usage)
        return mine

    tree = play(1, starts=[start(0, [308, 907, 12, 44]), start(1, [55, 2, 3001, 17, 4]), start(2, [9])])
    (_, first), chain = next(iter(tree[0].items()))
    hit, miss = Outcome(0, 5, [first], chain, 0), Outcome(1, 6, [3999], [], 0)
    play(2, outcomes=[hit, miss, Outcome(2, 2, [77], [], K)])
    drafts = [side.drafts.pop(2) for side in sides][1]
    assert len(drafts) == len(chain) == K
    # The verification accepts all but the last draft of sequence 0, and all that sequence 2 waited for.
    hit, miss = Outcome(0, 5 + K, [*chain[: K - 1], 3998], [], 2), Outcome(2, 3 + K, [*drafts, 3997], [], 0)
    play(3, outcomes=[hit, Outcome(1, 7, [3], [], 1), miss])
    assert [len(drafts) for drafts in sides[1].drafts.values()] == [2, 1]
    assert not forwards


def test_a_request_that_comes_while_trees_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its glue is waited for, or the others' trees lose what they have, or their slots."""
    first, second = start(0, [308, 907, 12, 44]), start(1, [9, 7])
    expected = Side(plain()).play(1, starts=[first, second])
    side, forwards = Side(on_device()), []
    monkeypatch.setattr(DraftEngine, "_forward", lambda self, batch: forwards.append(batch))
    grew = 0
    for steps in range(1, K + 2):
        side.play(3 * steps, starts=[first], steps=steps)
        grew += side.engine.sequence(0).steps_left > 0
        assert side.play_on(3 * steps + 1, starts=[second]) == expected
        side.play(3 * steps + 2, finished=[0, 1])
        assert side.engine._pool.usage == 0.0
    assert grew and not forwards


@pytest.mark.parametrize("options", ({}, {"fan_out": "uniform"}), ids=("branches of the device", "of the host"))
def test_every_step_is_timed(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that come in together, or with the fork, are not counted: trees are planned by hardly a time."""
    timed, grown = (counted(name, monkeypatch, Outbox) for name in ("add_tree_step", "add_growth"))
    side = Side(on_device(**options))
    tree = side.play(1, starts=[start(0, [308, 907, 12, 44])])
    (_, first), chain = next(iter(tree[0].items()))
    side.play(2, outcomes=[Outcome(0, 5, [first], chain[:K], 0)])
    side.play(3, outcomes=[Outcome(0, 6, [3999], [], 0)])
    assert len(timed) == len(grown) > 2 * K
    assert all(seconds > 0 for (seconds,) in timed)


class ScriptedDevice:
    """A clock, and a device that takes so long for a step while the host goes on."""

    STEP = 0.010

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self._busy_until = 0.0
        monkeypatch.setattr(graph_engine, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        grow, glue = GraphRound.grow, GraphRound.glue

        def scripted_grow(graph_round: GraphRound) -> None:
            grow(graph_round)
            number, _ = graph_round._pending.pop()
            graph_round._pending.append((number, self._event()))

        monkeypatch.setattr(GraphRound, "grow", scripted_grow)
        monkeypatch.setattr(GraphRound, "glue", lambda graph_round, rows: (glue(graph_round, rows), self._event()))

    def _event(self) -> types.SimpleNamespace:
        done = self._busy_until = max(self._busy_until, self.now) + self.STEP

        def wait() -> None:
            self.now = max(self.now, done)

        return types.SimpleNamespace(query=lambda: self.now >= done, synchronize=wait)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the scripted events stand for those of a GPU")
@pytest.mark.parametrize("away", (0.0, 0.001, 0.006, 0.012, 0.030))
def test_the_time_of_a_step_is_the_devices(away: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device does while the host is away is not counted, or twice: trees are planned too large or small."""
    device, timed = ScriptedDevice(monkeypatch), counted("add_tree_step", monkeypatch, Outbox)
    side = Side(on_device())
    step = side.engine.step

    def slow_step() -> bool:
        works = step()
        device.now += away
        return works

    side.engine.step = slow_step
    side.play(1, starts=[start(0, [308, 907, 12, 44])])
    for number in range(2, 6):
        side.play(number, outcomes=[Outcome(0, 3 + number, [3990 - number], [], 0)])
    first, later = device.STEP, max(device.STEP, away)  # a tree grows no faster than the host asks
    assert [seconds for (seconds,) in timed] == pytest.approx([first, later, later, later] * 5, rel=1e-6)


def test_a_wave_whose_sequence_lost_its_slots_gives_back_the_rest() -> None:
    """Its steps that were not taken in keep their slots for good, once another wave is planted."""
    config = SaguaroConfig(DRAFT, 8, tree_budget=3, draft_dtype="float32", draft_top_m=8)
    model = loaded(config, DEVICE, num_slots=115)
    engine = GraphEngine(model, config, 115, make_round(model, config, WHOLE, 24, 200), seed=0)

    def tell(number: int, starts=(), finished=()) -> None:
        engine.begin_round(Round(number, list(starts), [], list(finished), depth=8, verify_seconds=0.0))

    tell(1, [start(0, list(range(5, 69)))])
    engine.step()
    tell(2)  # of others
    tell(3)
    tell(4, [start(1, list(range(7, 73)))])
    while engine.step():
        pass
    tell(5, finished=[0, 1])
    assert engine._pool.usage == 0.0


@pytest.mark.parametrize(("choice", "kind"), [("auto", DraftEngine), ("off", DraftEngine), ("on", GraphEngine)])
def test_the_environment_decides_on_a_cpu(choice: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSD_DEVICE_ROUNDS", choice)
    model, config = model_and_config(torch.device("cpu"))
    assert type(make_engine(model, config, NUM_SLOTS, WHOLE, 4, 64)) is kind


def test_another_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SSD_DEVICE_ROUNDS", "yes")
    model, config = model_and_config()
    with pytest.raises(ValueError, match="VLLM_SSD_DEVICE_ROUNDS is 'yes'; it must be one of auto, on, off"):
        make_engine(model, config, NUM_SLOTS, WHOLE, 4, 64)


@pytest.mark.parametrize("fault", ("wrong", "raises"))
def test_a_device_that_computes_something_else_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that a new compiler breaks costs the drafts, or the start."""
    logits = GraphDecoder.logits

    def broken(self: GraphDecoder, hidden: torch.Tensor) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no such instruction")
        return 0.8 * logits(self, hidden)

    monkeypatch.setattr(GraphDecoder, "logits", broken)
    monkeypatch.setenv("VLLM_SSD_DEVICE_ROUNDS", "on")
    model, config = model_and_config()
    assert type(make_engine(model, config, NUM_SLOTS, WHOLE, 4, 64)) is DraftEngine
    reason = {"wrong": "its logits differ", "raises": "RuntimeError: no such instruction"}[fault]
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    (
        ("draw", lambda drawn: drawn._replace(tokens=drawn.token_ids[:, 1])),
        ("draw", lambda drawn: drawn._replace(tokens=drawn.token_ids[:, 0])),
        ("draw", lambda drawn: drawn._replace(q=drawn.probs[:, 0])),
        ("draw", lambda drawn: drawn._replace(probs=drawn.values.softmax(dim=1))),
        ("draw", lambda drawn: drawn._replace(token_ids=drawn.token_ids.flip(1))),
        ("fork", lambda found: (found[0], found[1].where(found[1] < 0, 5))),
        ("fork", lambda found: (found[0].roll(1, 0), found[1])),
    ),
    ids=("next token", "always the best", "q of another", "law not cut", "laws backwards", "one id", "other rows"),
)
def test_kernels_that_choose_something_else_are_not_used(
    kernel: str, wrong, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A token is drawn from another law than the one that is sent, and the target's text has another law too."""
    right = getattr(kernel_trial, kernel)

    def broken(*args, backend: str | None = None):
        found = right(*args, backend=backend)
        return found if backend else wrong(found)

    monkeypatch.setattr(kernel_trial, kernel, broken)
    monkeypatch.setenv("VLLM_SSD_DEVICE_ROUNDS", "on")
    model, config = model_and_config()
    assert type(make_engine(model, config, NUM_SLOTS, WHOLE, 4, 64)) is DraftEngine
    assert "its candidates and draws differ" in caplog.text


@pytest.mark.parametrize("graph", ("_step", "_glue", "_step of trees that go on"))
def test_graphs_of_a_round_that_go_wrong_are_not_used(
    graph: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All but the graph of one row, and trees that begin with a token, are taken as they are."""
    graph, _, of_begun = graph.partition(" ")
    right = getattr(GraphRound, graph)

    def broken(self: GraphRound, bucket: int, per_block: int) -> None:
        if of_begun:
            self._tree.begun.zero_()
        right(self, bucket, per_block)
        if bucket > 1 and not of_begun:
            self._tree.law_values[:, 1:bucket] = self._tree.glue_values[1:bucket] = 0.0

    monkeypatch.setattr(GraphRound, graph, broken)
    monkeypatch.setenv("VLLM_SSD_DEVICE_ROUNDS", "on")
    model, config = model_and_config()
    assert type(make_engine(model, config, NUM_SLOTS, WHOLE, 4, 64)) is DraftEngine
    assert "its logits differ from those of the plain forward" in caplog.text


@pytest.mark.parametrize("width", (1, 10, 20, 40, 64))
@pytest.mark.parametrize(
    "logits", (torch.zeros(8, 97), 1000 * torch.randn(8, 97, generator=torch.Generator().manual_seed(0)))
)
def test_draws_from_logits_that_tie_or_are_large(
    width: int, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that sum in another order are refused."""
    right = kernel_trial.draw

    def rounded(*args, backend: str | None = None):
        drawn = right(*args, backend=backend)
        return drawn if backend else drawn._replace(probs=drawn.probs * (1 + 1e-6))

    monkeypatch.setattr(kernel_trial, "draw", rounded)
    assert kernel_trial._draws_agree(logits, width, 97)


@pytest.mark.parametrize("options", ({}, {"draft_top_m": 64}, {"draft_top_m": 1, "fan_out": [1, 1, 1, 1]}), ids=str)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_the_trial_of_a_round_passes_where_it_works(dtype: str, options: dict) -> None:
    model, config = model_and_config(**{"draft_dtype": dtype, **options})
    device_round = make_round(model, config, WHOLE, 4, 64)
    assert kernel_trial.round_difference(device_round, model) is None
