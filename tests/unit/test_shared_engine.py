"""One model for several targets: trees apart, forwards together, fair shares."""

import random
from collections import defaultdict

import pytest

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.kv_shares import SharedPool
from vllm_ssd.draft.shared_engine import SharedEngine
from vllm_ssd.messages import Failed, Outcome, Push, Round, Start, pack_tokens

from .scripted import VOCABULARY, ContextModel, Target, assert_greedy, context_logits, play_round


class Port:
    """What one scripted target sees of the shared engine: looks like an engine of its own."""

    def __init__(self, shared: SharedEngine, name: str, pushes: dict[str, list[Push | Failed]]) -> None:
        self._shared, self._name, self._pushes = shared, name, pushes

    def begin_round(self, message: Round) -> None:
        self._shared.begin_round(self._name, message)

    def step(self) -> bool:
        went_on = self._shared.step()
        for name, push in self._shared.take_pushes():
            self._pushes[name].append(push)
        return went_on or len(self._pushes[self._name]) > 1

    def take_push(self) -> Push | None:
        found = self._pushes[self._name]
        return found.pop(0) if found and isinstance(found[0], Push) else None


class Shared:
    """A shared engine and its scripted targets."""

    def __init__(self, num_slots: int = 4000, names: str = "ab", **options) -> None:
        self.model = ContextModel(num_slots)
        self.engine = SharedEngine(self.model, num_slots)
        self.options = {"model": "scripted", "num_speculative_tokens": 4, "tree_budget": 6, **options}
        self._pushes: dict[str, list[Push | Failed]] = defaultdict(list)
        self.targets: dict[str, Target] = {}
        for name in names:
            self.admit(name)

    def admit(self, name: str, max_num_seqs: int = 8, **options) -> Target:
        self.engine.admit(name, SaguaroConfig(**{**self.options, **options}), max_num_seqs)
        self.targets[name] = Target(Port(self.engine, name, self._pushes))
        return self.targets[name]

    def forwards(self) -> int:
        return len(self.model.batches)

    def failures(self, name: str) -> list[str]:
        return [push.reason for push in self._pushes[name] if isinstance(push, Failed)]


def prompt(seed: int, length: int = 12) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


@pytest.mark.parametrize("seed", range(4))
def test_trees_of_two_targets_are_each_their_own(seed: int) -> None:
    """Sequence ids, slots, trunks or answers of one target get into the other's trees."""
    shared, generator = Shared(), random.Random(seed)
    for i, target in enumerate(shared.targets.values()):
        target.tell([target.start(s, prompt(10 * i + s)) for s in range(3)])  # the same ids in both
    for _ in range(12):
        for target in shared.targets.values():
            play_round(target, generator, 4, VOCABULARY)
            target.run(generator.randint(0, 6))  # often not to the end
    for target in shared.targets.values():
        assert target.run()
        assert len(target.bets) > 50 and len(target.forks) > 10
        assert_greedy(target, context_logits, 0.0)


def test_forwards_are_joined() -> None:
    """Each target costs forwards of its own: two take twice the time of one."""
    counts = {}
    for names in ("a", "ab", "abc"):
        shared = Shared(names=names)
        for i, target in enumerate(shared.targets.values()):
            target.tell([target.start(0, prompt(i))])
        for target in shared.targets.values():
            assert target.run()
            assert_greedy(target, context_logits, 0.0)
        counts[names] = shared.forwards()
    assert counts["a"] == counts["ab"] == counts["abc"]


def test_each_target_has_options_of_its_own() -> None:
    """Budgets, depths or candidates of one target are taken for the other's."""
    shared = Shared(names="a")
    shared.admit("b", tree_budget=2, num_speculative_tokens=2)
    for name, depth in (("a", 4), ("b", 2)):
        target = shared.targets[name]
        target.tell([target.start(0, prompt(1))], depth=depth)
    for name, branches, chain in (("a", 6, 5), ("b", 2, 3)):
        target = shared.targets[name]
        assert target.run()
        assert [len(bet.chain) for bet in target.branches(0)] == [chain] * branches
        assert_greedy(target, context_logits, 0.0)


def test_sampled_rows_of_one_target_do_not_change_the_others() -> None:
    """A target that samples needs wide laws; the joined forward gives them to everyone."""
    shared = Shared(draft_top_m=20)
    greedy, sampled = shared.targets.values()
    greedy.tell([greedy.start(0, prompt(1))])
    sampled.tell([sampled.start(0, prompt(2), temperature=1.0)])
    assert greedy.run() and sampled.run()
    assert all(law is None for bet in greedy.bets for law in bet.laws)
    assert {len(law[0]) for bet in sampled.bets for law in bet.laws} == {20}
    assert_greedy(greedy, context_logits, 0.0)


# ---- fair shares of the KV cache ----


def test_shares_of_the_pool() -> None:
    """A target takes more than its share, or keeps slots that another is due."""
    pool = SharedPool(100)
    first = pool.open_share()
    slots = first.take(80)
    assert first.num_free == 20 and first.take(21) is None
    second = pool.open_share()
    assert (first.num_slots, first.excess, first.num_free) == (50, 30, 0)
    assert second.num_free == 20, "what the other still holds cannot be had"
    first.give_back(slots[:30])
    assert first.excess == 0 and second.num_free == 50 and len(second.take(50)) == 50
    with pytest.raises(ValueError):
        first.give_back(slots[:1])
    second.close()
    assert first.num_slots == 100 and pool.slots.num_free == 50


def test_a_newcomer_gets_its_share_of_the_kv_cache() -> None:
    """A target that fills the KV cache leaves none to those that come after it."""
    shared = Shared(num_slots=400, names="a")
    first = shared.targets["a"]
    first.tell([first.start(s, prompt(s, 90)) for s in range(4)])
    assert first.run()
    second = shared.admit("b")
    second.tell([second.start(s, prompt(9 + s, 60)) for s in range(2)])
    assert second.run()
    assert sorted({bet.seq_id for bet in second.bets}) == [0, 1]
    for _ in range(6):  # the first goes on within its share
        first.tell(outcomes=[first.outcome(s, [s]) for s in range(2)])
        assert first.run()
    for target in (first, second):
        assert_greedy(target, context_logits, 0.0)
    shared.engine.dismiss("a")
    second.tell([second.start(7, prompt(5, 200))])
    assert second.run() and any(bet.seq_id == 7 for bet in second.bets), "the dead target's slots are lost"


# ---- fair turns ----


def large_and_small() -> tuple[Shared, Target, Target]:
    """20 requests with 32 branches each, in the middle of their trees; a target with next to nothing."""
    shared = Shared(num_slots=60_000, names="", tree_budget=32)
    large, small = shared.admit("large", max_num_seqs=64), shared.admit("small")
    large.tell([large.start(s, prompt(s)) for s in range(20)])
    assert large.run()
    large.tell(outcomes=[large.outcome(s, [s % 7]) for s in range(20)])
    large.run(2)
    return shared, large, small


def test_a_small_target_does_not_wait_for_a_large_one() -> None:
    """The trees of many requests hold up the one request of another target."""
    shared, large, small = large_and_small()
    small.tell([small.start(0, prompt(99))])
    begin = shared.forwards()
    while not (small.branches(0) and len(small.branches(0)[0].chain) >= 5):
        small.run(1)
    sizes = [len(batch.token_ids) for batch in shared.model.batches[begin:]]
    assert sum(size > 256 for size in sizes) <= 1, "the small target waited for more than one large forward"
    assert large.run() and small.run()
    assert_greedy(small, context_logits, 0.0)


def test_a_large_target_is_not_starved() -> None:
    """A target that always has a little to do takes all turns."""
    shared, large, small = large_and_small()
    small.tell([small.start(s, prompt(50 + s)) for s in range(3)])
    begin = shared.forwards()
    for round_ in range(60):
        small.run(1)
        small.tell(outcomes=[small.outcome(s, [round_ % 5]) for s in range(3)])
    sizes = [len(batch.token_ids) for batch in shared.model.batches[begin:]]
    served = sum(size for size in sizes if size > 256), sum(size for size in sizes if size <= 256)
    assert served[0] >= 0.5 * served[1], served
    assert large.run() and all(len(bet.chain) >= 5 for s in range(20) for bet in large.branches(s))
    assert_greedy(large, context_logits, 0.0)


# ---- nonsense ----

NONSENSE = [
    Round(9, [], [Outcome(0, 13, [-1], [], 0)], [], 4, 0.0),
    Round(9, [], [Outcome(0, 13, [1], [-5], 0)], [], 4, 0.0),
    Round(9, [], [Outcome(0, 13, [1], [], 100)], [], 4, 0.0),
    Round(9, [], [Outcome(0, 13, [1], [1] * 9, 0)], [], 4, 0.0),
    Round(9, [], [], [], 1000, 0.0),
    Round(9, [Start(7, b"", [], 0.0, 0, 1.0)], [], [], 4, 0.0),
    Round(9, [Start(7, b"abc", [], 0.0, 0, 1.0)], [], [], 4, 0.0),
    Round(9, [Start(7, pack_tokens([1, -2]), [], 0.0, 0, 1.0)], [], [], 4, 0.0),
    Round(9, [Start(s, pack_tokens([1]), [], 0.0, 0, 1.0) for s in range(1000)], [], [], 4, 0.0),
]


@pytest.mark.parametrize("message", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_refused_before_it_does_harm(message: Round) -> None:
    """Nonsense from one target ends the model's forward, and with it all targets."""
    shared = Shared()
    good, bad = shared.targets.values()
    for target in (good, bad):
        target.tell([target.start(0, prompt(3))])
        target.run()
    with pytest.raises(ValueError):
        shared.engine.begin_round("b", message)
    shared.engine.dismiss("b")
    good.tell(outcomes=[good.outcome(0, [4])])
    assert good.run()
    assert_greedy(good, context_logits, 0.0)


def test_token_ids_that_the_model_does_not_know_lose_their_request_only() -> None:
    """An id beyond the embedding ends the forward of all targets."""
    shared = Shared()
    good, bad = shared.targets.values()
    bad.tell([bad.start(0, [1, VOCABULARY + 5]), bad.start(1, prompt(4))])
    good.tell([good.start(0, prompt(3))])
    assert bad.run() and good.run()
    assert bad.lost == [0] and {bet.seq_id for bet in bad.bets} == {1} and good.bets


def test_an_engine_that_breaks_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the work for one target ends the work for the others, or its slots are lost."""
    shared = Shared(num_slots=600)
    good, bad = shared.targets.values()
    bad.tell([bad.start(0, prompt(4, 200))])
    assert bad.run()
    broken = shared.engine._members["b"].engine
    monkeypatch.setattr(broken._forecast, "outcomes", lambda *_: 1 / 0)
    bad.tell(outcomes=[bad.outcome(0, [4])])
    good.tell([good.start(0, prompt(3))])
    assert good.run(50) in (True, False)
    assert shared.failures("b") and "ZeroDivisionError" in shared.failures("b")[0]
    shared.engine.dismiss("b")
    assert good.run()
    good.tell([good.start(1, prompt(5, 400))])
    assert good.run() and any(bet.seq_id == 1 for bet in good.bets)
    assert_greedy(good, context_logits, 0.0)
