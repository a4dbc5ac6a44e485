"""DraftEngine: every tree is what plain decoding of the draft gives, whatever happened before.

Most tests run a scripted model whose logits depend on exactly the tokens attended to; the last
ones run the small real draft and compare it with full forwards without a cache.
"""

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft import engine as engine_module
from vllm_ssd.draft.bandit import SaguaroBandit
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.pace import Pace
from vllm_ssd.messages import Branches, Outcome

from .scripted import VOCABULARY, ContextModel, Target, assert_greedy, context_logits, play_round
from .test_sampling import reference_law

DRAFT = str(Path(__file__).parents[1] / "data" / "models" / "draft")
K = 4
DEPTH = K + 1  # of a branch that has time for the optional step
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def make(num_slots: int = 4096, max_length: int = 100_000, seed: int = 0, **options) -> tuple[Target, ContextModel]:
    """A target that talks to an engine over the scripted model."""
    model = ContextModel(num_slots, max_length)
    config = SaguaroConfig("scripted", K, **{"tree_budget": 10, **options})
    return Target(DraftEngine(model, config, num_slots, seed=seed)), model


def usage(target: Target) -> float:
    """Share of KV slots in use, as the last push said it after one more round."""
    target.tell(outcomes=[Outcome(-1, 0, [], [], 0)])  # unknown: reported lost, so that there is a push
    target.run()
    return target.pushes[-1].kv_usage


def assert_greedy_chains(target: Target) -> None:
    """As `assert_greedy`, for trees of several waves: only the first wave's forks hold the very best."""
    target.forks.clear()
    assert_greedy(target, context_logits, 0.0)


def greedy(context: list[int], count: int) -> list[int]:
    """Plain greedy decoding of the scripted model."""
    tokens = list(context)
    for _ in range(count):
        tokens.append(int(context_logits(tuple(tokens)).argmax()))
    return tokens[len(context) :]


# ---- one round after the other ----


def test_a_prompt_seeds_branches_for_its_first_token() -> None:
    """The first token of an answer can never hit."""
    target, _ = make()
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    assert len(target.branches(0)) == 10
    assert {len(bet.chain) for bet in target.branches(0)} == {DEPTH}
    assert greedy(PROMPT, 1)[0] in {bet.prefix[-1] for bet in target.branches(0)}
    assert_greedy(target, context_logits, 0.0)


def test_branches_hang_at_every_position_of_the_trunk() -> None:
    """A position where the verification may stop has no branches, or bets on the trunk's own next token."""
    target, _ = make(fan_out="uniform")
    trunk = greedy(PROMPT, K)
    target.tell([target.start(0, PROMPT, drafts=trunk)])
    assert target.run()
    assert [len(fork.context) - len(PROMPT) for fork in target.forks] == list(range(K + 1))
    assert all(fork.excluded not in fork.token_ids for fork in target.forks)
    assert_greedy(target, context_logits, 0.0)


def test_a_user_list_says_how_many_branches_hang_where() -> None:
    """The option fan_out is not what is built."""
    target, _ = make(fan_out=[1, 0, 3, 2, 4])
    target.tell([target.start(0, PROMPT, drafts=greedy(PROMPT, K))])
    assert target.run()
    assert {len(f.context) - len(PROMPT): len(f.token_ids) for f in target.forks} == {0: 1, 2: 3, 3: 2, 4: 4}


def test_a_won_branch_is_adopted_without_computing_it_again() -> None:
    """A hit feeds tokens to the model whose KV is there already."""
    target, model = make()
    target.tell([target.start(0, PROMPT, drafts=greedy(PROMPT, K))])
    assert target.run()
    won = target.branches(0)[-1]
    model.batches.clear()
    target.tell(outcomes=[target.outcome(0, won.prefix[len(PROMPT) :], won.chain)])
    assert target.run()
    glue = model.batches[0]
    assert glue.token_ids.tolist() == won.chain[-1:]  # the only token that was never fed
    assert_greedy(target, context_logits, 0.0)


def test_a_branch_never_writes_into_the_trunk() -> None:
    """A tree step overwrites the KV of committed tokens or of drafts in flight."""
    target, model = make()
    target.tell([target.start(0, PROMPT, drafts=greedy(PROMPT, K))])
    assert target.run()
    trunk_slots = set(model.batches[0].slots.tolist())
    assert len(trunk_slots) == len(PROMPT) + K
    assert len(model.batches) == 1 + DEPTH
    for tree_step in model.batches[1:]:
        assert trunk_slots.isdisjoint(tree_step.slots.tolist())


def test_a_miss_computes_only_what_is_new() -> None:
    """A miss prefills the whole sequence again, or builds on the refused drafts."""
    target, model = make()
    drafts = greedy(PROMPT, K)
    target.tell([target.start(0, PROMPT, drafts=drafts)])
    assert target.run()
    model.batches.clear()
    refused = next(t for t in range(VOCABULARY) if t not in {bet.prefix[-1] for bet in target.bets} | set(drafts))
    target.tell(outcomes=[target.outcome(0, [*drafts[:2], refused], [7, 8])])
    assert target.run()
    assert model.batches[0].token_ids.tolist() == [refused, 7, 8]
    assert_greedy(target, context_logits, 0.0)


def test_a_full_hit_needs_no_glue() -> None:
    """The last draft of a branch is computed only after the outcome, on the critical path."""
    target, model = make()
    target.tell([target.start(0, PROMPT, drafts=greedy(PROMPT, K))])
    assert target.run()
    bet = target.branches(0)[0]
    model.batches.clear()
    target.tell(outcomes=[target.outcome(0, bet.prefix[len(PROMPT) :], bet.chain[:K])])
    assert target.run()
    assert [len(batch.token_ids) for batch in model.batches] == [10] * DEPTH  # tree steps only
    assert_greedy(target, context_logits, 0.0)


def test_no_prompt_is_read_while_a_target_waits() -> None:
    """A chunk of another request's prompt comes between the drafts that it waits for, or in front of them."""
    target, model = make()
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    model.batches.clear()
    prompt = [token % 7 for token in range(200)]
    target.tell([target.start(1, prompt)], [target.outcome(0, [5], wanted=3)])
    assert target.run()
    assert [len(batch.token_ids) for batch in model.batches[:3]] == [1] * 3
    assert sum(len(batch.token_ids) for batch in model.batches if batch.token_ids[0] < 7) > 150  # then it is
    assert_greedy(target, context_logits, 0.0)


def test_the_optional_step_is_left_out_when_time_is_short() -> None:
    """It runs into the next outcome, and holds it up."""
    target, _ = make()
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    target.tell(outcomes=[target.outcome(0, [5])], verify_seconds=1e-9)
    assert target.run()
    assert {len(bet.chain) for bet in target.branches(0)} == {K}


def test_the_optional_step_takes_as_many_branches_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes all or none; the less probable branches go first."""
    monkeypatch.setattr(Pace, "branches_of_one_more_step", lambda pace, num_branches: num_branches - 7)
    target, _ = make()
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    assert [len(bet.chain) for bet in target.branches(0)] == [DEPTH] * 3 + [K] * 7
    assert_greedy(target, context_logits, 0.0)
    bet = target.branches(0)[5]
    target.tell(outcomes=[target.outcome(0, [bet.prefix[-1]], bet.chain[:K])])  # its last draft has no KV yet
    assert target.run()
    assert_greedy(target, context_logits, 0.0)


class OfThisShape(Pace):
    """There is time for trees of these shapes only, and for steps beyond them only if so said."""

    planned = ((2, 3),)
    more = False

    def shapes(self, sequences: int, depth: int) -> list[tuple[int, int]]:
        return list(self.planned)

    def branches_of_one_more_step(self, num_branches: int) -> int:
        return num_branches if self.more else 0

    def lets_step(self, sequences: int) -> bool:
        return True


@pytest.mark.parametrize("more", (False, True))
def test_a_tree_is_planned_no_deeper_than_there_is_time_for(more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target takes a tree for late that could not be deeper, or time that is left over is not used."""
    monkeypatch.setattr(engine_module, "Pace", OfThisShape)
    monkeypatch.setattr(OfThisShape, "more", more)
    target, _ = make(tree_budget="auto")
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    hung = [item for push in target.pushes for item in push.items if isinstance(item, Branches)]
    assert [(item.depth, len(item.token_ids)) for item in hung] == [(2, 3)]
    assert {len(bet.chain) for bet in target.branches(0)} == {DEPTH if more else 2}
    assert_greedy(target, context_logits, 0.0)


@pytest.mark.parametrize(("first_of_ranking", "expected"), ((True, (3, 1)), (False, (1, 6))))
def test_of_the_shapes_that_fit_the_most_promising_is_built(
    first_of_ranking: bool, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One deep branch where the outcome is seldom the most probable one, or many shallow ones where it always is."""
    monkeypatch.setattr(engine_module, "Pace", OfThisShape)
    monkeypatch.setattr(OfThisShape, "planned", ((3, 1), (1, 6)))
    target, _ = make(tree_budget="auto", fan_out="uniform")
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    for _ in range(40):
        best = np.argsort(-context_logits(tuple(target.history[0])), kind="stable")
        token_id = int(best[0] if first_of_ranking else best[5])
        target.tell(outcomes=[target.outcome(0, [token_id])])
        assert target.run()
    hung = [item for push in target.pushes for item in push.items if isinstance(item, Branches)]
    assert (hung[-1].depth, len(hung[-1].token_ids)) == expected


@pytest.mark.parametrize("temperature", (0.0, 0.9))
def test_branches_that_were_cut_short_grow_while_the_verification_is_overdue(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less probable outcomes are bet on instead, or the draft idles; or a branch goes on with the KV of another."""
    monkeypatch.setattr(engine_module, "Pace", OfThisShape)
    overdue = iter((True, True))
    monkeypatch.setattr(OfThisShape, "overdue", property(lambda pace: next(overdue, False)))
    monkeypatch.setattr(OfThisShape, "branches_of_one_more_step", lambda pace, num_branches: min(num_branches, 1))
    target, _ = make(tree_budget="auto")
    target.tell([target.start(0, PROMPT, temperature=temperature)])
    assert target.run()
    hung = [item for push in target.pushes for item in push.items if isinstance(item, Branches)]
    assert [(len(item.token_ids), list(map(len, item.drafts))) for item in hung] == [(3, []), (2, [2, 2]), (3, [])]
    assert sorted(len(bet.chain) for bet in target.bets) == [2, 2, K, K + 1, K + 1, K + 1]
    for bet in target.bets:
        for i, (token, law) in enumerate(zip(bet.chain, bet.laws, strict=True)):
            logits = context_logits(bet.prefix + tuple(bet.chain[:i]))
            assert law is not None or token == logits.argmax()
            if law is not None:
                reference = reference_law(logits, VOCABULARY, temperature, 0, 1.0, 1, 1.0)
                assert np.allclose(law[1], reference[law[0]], atol=1e-5)
    bet = max(target.bets[1:3], key=lambda bet: len(bet.chain))  # one that had been cut short wins
    target.tell(outcomes=[target.outcome(0, bet.prefix[len(PROMPT) :], bet.chain[:K])])
    assert target.run()
    assert all(b.prefix[: len(bet.prefix)] == bet.prefix for b in target.branches(0))


def test_a_full_pool_does_not_make_the_draft_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches that get no KV slot are taken up again and again."""
    monkeypatch.setattr(Pace, "overdue", property(lambda pace: True))
    target, _ = make(num_slots=len(PROMPT) + 4, tree_budget="auto")
    target.tell([target.start(0, PROMPT)], verify_seconds=1e-6)
    assert target.run(200)
    assert len(target.pushes) < 20


def test_a_tree_that_joins_growing_ones_takes_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned as if it grew alone, and all are late."""
    asked = []
    monkeypatch.setattr(Pace, "shapes", lambda pace, sequences, depth: asked.append(sequences) or [(depth, 5)])
    target, _ = make()
    target.tell([target.start(0, PROMPT), target.start(1, PROMPT[::-1])])
    assert not target.run(4)  # one prompt and the next, the fork of both, a step
    target.tell([target.start(2, PROMPT[1:])])
    assert target.run()
    assert asked == [2, 3]


def test_news_of_a_delay_brings_more_branches() -> None:
    """The draft idles until the verification is overdue, though it could know better."""
    target, _ = make(tree_budget="auto")
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    target.tell(outcomes=[target.outcome(0, [5], greedy([*PROMPT, 5], 2))], verify_seconds=0.5)
    assert target.run()
    planned = len(target.bets)
    target.tell(verify_seconds=60.0)
    assert target.run()
    bets = [bet.prefix for bet in target.bets if len(bet.prefix) > len(PROMPT) + 1]
    assert len(target.bets) > planned and len(bets) == len(set(bets)) > 50
    assert not target.engine._pace.overdue
    assert_greedy_chains(target)


def test_an_overdue_verify_brings_more_branches() -> None:
    """The draft idles while the prompts of others are prefilled, or bets twice on the same."""
    target, _ = make(tree_budget="auto")
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    target.tell(outcomes=[target.outcome(0, [5], greedy([*PROMPT, 5], 2))], verify_seconds=1e-6)
    assert target.run()
    bets = [bet.prefix for bet in target.bets if len(bet.prefix) > len(PROMPT) + 1]
    assert len(bets) == len(set(bets)) > 50
    assert_greedy_chains(target)
    bet = target.bets[-1]  # of the last wave: it can win as well
    target.tell(outcomes=[target.outcome(0, bet.prefix[len(PROMPT) + 1 :], bet.chain[:K])])
    assert target.run()
    assert_greedy_chains(target)
    assert target.branches(0)[0].prefix[: len(bet.prefix)] == bet.prefix


def test_the_draft_reports_what_it_measures() -> None:
    """Nobody can see why it builds what it builds."""
    target, _ = make(tree_budget=12)
    target.tell([target.start(0, PROMPT), target.start(1, PROMPT[::-1], temperature=0.9)])
    generator = random.Random(3)
    for _ in range(30):
        assert target.run()
        play_round(target, generator, K, VOCABULARY, wait=False)
    before = [push.report for push in target.pushes if push.report]
    assert len(before) < 4, "it reports all the time"
    target.engine._outbox._report_at = 0.0  # a second has gone by
    assert target.run()
    last = [push.report for push in target.pushes if push.report][-1]
    assert last not in before
    assert before[0].branches == last.branches == 12
    assert before[0].fan_out == [12]
    assert 0 < sum(last.fan_out) <= 12
    assert len(last.outcomes["greedy"]) == K + 1
    assert last.sharpness["greedy"] != 1.0
    assert last.step_seconds[0] > 0
    assert sum(map(sum, last.outcomes["greedy"])) == pytest.approx(1.0)


def test_a_fixed_number_of_branches_stays_what_it_is() -> None:
    """An experiment's width depends on the load of the machine."""
    target, _ = make(tree_budget=7)
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    target.tell(outcomes=[target.outcome(0, [5])], verify_seconds=1e-6)
    assert target.run()
    assert len([bet for bet in target.bets if len(bet.prefix) == len(PROMPT) + 2]) == 7


def test_drafts_cut_by_the_scheduler_keep_the_trunk() -> None:
    """The walk ended inside the trunk, and the rest of it is computed again."""
    target, model = make()
    drafts = greedy(PROMPT, K)
    target.tell([target.start(0, PROMPT, drafts=drafts)])
    assert target.run()
    model.batches.clear()
    target.tell(outcomes=[target.outcome(0, drafts[:2], drafts[2:])])
    assert target.run()
    assert len(model.batches) == DEPTH  # tree steps only
    assert_greedy(target, context_logits, 0.0)


@pytest.mark.parametrize("wanted", (1, K))
def test_jit_drafts_are_greedy_and_come_before_the_tree(wanted: int) -> None:
    """A row that waits gets other drafts than plain decoding gives, or gets them late."""
    target, _ = make()
    target.tell([target.start(0, PROMPT), target.start(1, PROMPT[::-1])])
    assert target.run()
    target.pushes.clear()
    target.tell(outcomes=[target.outcome(0, [11], wanted=wanted), target.outcome(1, [12])])
    assert target.run()
    jit = next(bet for bet in target.bets if bet.prefix == (*PROMPT, 11))
    assert jit.chain == greedy([*PROMPT, 11], wanted)
    pushed = [item.seq_id for push in target.pushes for item in push.items]
    assert pushed[: 1 + wanted] == [0] * (1 + wanted)
    assert len(target.branches(0)) == 10  # the tree comes after
    assert all(bet.prefix[: len(PROMPT) + 1] == jit.prefix for bet in target.branches(0))
    assert_greedy(target, context_logits, 0.0)


def test_depth_says_how_deep_the_branches_grow() -> None:
    """Branches grow deeper than a row may take drafts, or not deep enough."""
    target, _ = make()
    target.tell([target.start(0, PROMPT)], depth=2)
    assert target.run()
    assert {len(bet.chain) for bet in target.bets} == {2 + 1}


def test_depth_zero_idles() -> None:
    """The draft works although speculation does not pay."""
    target, model = make()
    target.tell([target.start(0, PROMPT)], depth=0)
    assert target.run(1)
    target.tell(outcomes=[target.outcome(0, [5])], depth=0)
    assert target.run(1)
    assert not model.batches
    target.tell(outcomes=[target.outcome(0, [6])])  # it pays again
    assert target.run()
    assert_greedy(target, context_logits, 0.0)
    assert target.branches(0)[0].prefix[:-1] == (*PROMPT, 5, 6)


def test_a_verify_too_short_for_the_tree_gets_a_narrower_one() -> None:
    """A tree that cannot be ready in time is built all the same."""
    target, _ = make(tree_budget="auto")
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    before = len(target.bets)
    target.tell(outcomes=[target.outcome(0, [5])], verify_seconds=1e-6)
    target.run(3)  # glue, fork, one step
    [bet] = target.bets[before:]
    assert len(bet.chain) == 1
    target.tell(outcomes=[target.outcome(0, [6])], verify_seconds=1e3)
    assert target.run()
    assert len(target.branches(0)) == VOCABULARY
    assert {len(bet.chain) for bet in target.branches(0)} == {DEPTH}


# ---- whatever happens, in any order ----


@pytest.mark.parametrize("num_sequences", (1, 2, 8))
@pytest.mark.parametrize("seed", range(4))
def test_any_course_of_rounds_builds_greedy_trees(num_sequences: int, seed: int) -> None:
    """After some course of hits, misses, n-grams, cuts, waits and cancelled trees, KV or masks are wrong."""
    generator = random.Random(seed)
    target, _ = make(num_slots=8192)
    prompts = [[generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 90))] for _ in range(num_sequences)]
    target.tell([target.start(i, prompt) for i, prompt in enumerate(prompts)])
    for _ in range(25):
        target.run(generator.choice((0, 1, 2, 3, 5, 2000)))
        play_round(target, generator, K, VOCABULARY)
    assert target.run()
    assert not target.lost
    assert len(target.bets) > 50
    assert_greedy(target, context_logits, 0.0)
    target.tell(finished=list(target.history))
    assert usage(target) == 0.0


def test_a_new_round_in_the_middle_of_a_tree_drops_what_lost() -> None:
    """Branches that lost go on growing, and the next tree comes late."""
    target, model = make()
    target.tell([target.start(0, PROMPT, drafts=greedy(PROMPT, K))])
    target.run(3)  # glue, fork, one tree step
    half_built = target.branches(0)
    assert {len(bet.chain) for bet in half_built} == {1}
    won = half_built[0]
    model.batches.clear()
    target.tell(outcomes=[target.outcome(0, won.prefix[len(PROMPT) :], won.chain)])
    assert target.run()
    assert {len(bet.chain) for bet in half_built} == {1}
    assert model.batches[0].token_ids.tolist() == won.chain
    assert_greedy(target, context_logits, 0.0)


def test_a_request_that_ends_in_the_middle_of_its_tree_leaves_nothing() -> None:
    """An aborted request keeps KV slots or goes on growing."""
    target, model = make()
    target.tell([target.start(0, PROMPT, drafts=greedy(PROMPT, K)), target.start(1, PROMPT[:3])])
    target.run(3)
    model.batches.clear()
    target.tell(finished=[0])
    assert target.run()
    assert all(batch.columns.shape[0] == 1 for batch in model.batches)
    target.tell(finished=[1])
    assert usage(target) == 0.0


def test_a_sequence_that_is_not_in_the_batch_for_a_while_comes_back() -> None:
    """A preempted request is drafted for from a stale state."""
    target, _ = make()
    target.tell([target.start(0, PROMPT), target.start(1, PROMPT[::-1])])
    assert target.run()
    for token in range(5):
        target.tell(outcomes=[target.outcome(1, [token])])
        assert target.run()
    target.tell(outcomes=[target.outcome(0, [9, 9])])
    assert target.run()
    assert target.branches(0)[0].prefix[:-1] == (*PROMPT, 9, 9)
    assert_greedy(target, context_logits, 0.0)


def test_a_start_for_a_known_sequence_begins_anew() -> None:
    """A history told again after a mismatch is joined to the old one, or leaks its slots."""
    target, _ = make()
    target.tell([target.start(0, PROMPT)])
    target.run(2)
    target.tell([target.start(0, PROMPT[::-1], drafts=[1, 2])])
    assert target.run()
    assert all(bet.prefix[: len(PROMPT)] == tuple(PROMPT[::-1]) for bet in target.branches(0))
    assert_greedy(target, context_logits, 0.0)
    target.tell(finished=[0])
    assert usage(target) == 0.0


# ---- prompts, limits, loss ----


@pytest.mark.parametrize("length", (64, 65, 200, 3000))
def test_long_prompts_are_read_in_chunks(length: int) -> None:
    """A prompt longer than a chunk is read with gaps, or in one forward that holds up all outcomes."""
    target, model = make()
    prompt = [i * i % VOCABULARY for i in range(length)]
    target.tell([target.start(0, prompt)])
    assert target.run()
    reading = [len(batch.token_ids) for batch in model.batches[:-DEPTH]]
    assert sum(reading) == length
    assert max(reading) <= 512
    assert (len(reading) > 1) == (length > 64)
    assert_greedy(target, context_logits, 0.0)


def test_trees_grow_while_a_prompt_is_read() -> None:
    """A long prompt of one request holds up the trees of another."""
    target, _ = make(num_slots=16_384)
    target.tell([target.start(0, PROMPT), target.start(1, [1] * 8000)])
    target.run(8)
    assert {len(bet.chain) for bet in target.branches(0)} == {DEPTH}
    assert not target.branches(1)
    assert target.run()
    assert target.branches(1)
    assert_greedy(target, context_logits, 0.0)


@pytest.mark.parametrize(("length", "lost"), ((91, []), (92, [0])))
def test_a_prompt_longer_than_the_context_is_reported_lost(length: int, lost: list[int]) -> None:
    """A forward runs past the draft's context, or a prompt that still fits is refused."""
    target, model = make(max_length=100)
    target.tell([target.start(0, [1] * length)])
    assert target.run()
    assert target.lost == lost
    assert max((int(batch.positions.max()) for batch in model.batches), default=0) < 100


def test_a_sequence_that_outgrows_the_context_is_reported_lost_once() -> None:
    """A sequence is drafted for beyond the draft's context, or keeps its slots."""
    target, model = make(max_length=100)
    target.tell([target.start(0, [1] * 88)])
    for token in range(6):
        assert target.run()
        if not target.lost:
            target.tell(outcomes=[target.outcome(0, [token])])
    assert target.lost == [0]
    assert int(max(batch.positions.max() for batch in model.batches)) < 100
    assert usage(target) == 0.0


def test_an_unknown_sequence_is_reported_lost() -> None:
    """The target is not told that the draft does not know a sequence, and waits for its trees for ever."""
    target, _ = make()
    target.history[5] = [1, 2]
    target.tell(outcomes=[target.outcome(5, [3])])
    assert target.run()
    assert target.lost == [5]


@pytest.mark.parametrize("length", (len(PROMPT), len(PROMPT) + 2))
def test_a_length_that_does_not_agree_is_reported_lost(length: int) -> None:
    """Drafts are built on a history that is not the target's."""
    target, model = make()
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    model.batches.clear()
    target.tell(outcomes=[Outcome(0, length, [5], [], 0)])
    assert target.run()
    assert target.lost == [0]
    assert not model.batches
    assert usage(target) == 0.0


def test_a_token_that_the_draft_has_no_embedding_for_is_reported_lost() -> None:
    """The target's padded vocabulary is larger, and one such token ends the draft for all requests."""
    target, _ = make()
    target.tell([target.start(0, [1, 2, VOCABULARY]), target.start(1, PROMPT)])
    assert target.run()
    target.tell(outcomes=[target.outcome(1, [VOCABULARY + 5])])
    assert target.run()
    assert target.lost == [0, 1]
    assert usage(target) == 0.0


def test_a_row_whose_prompt_is_still_read_declines() -> None:
    """The target waits in vain for JIT drafts of a prompt that the draft has not read yet."""
    target, _ = make()
    target.tell([target.start(0, [1] * 500)])
    target.tell(outcomes=[target.outcome(0, [5], wanted=K)])
    target.run(1)
    assert target.declined == [0]


# ---- the KV cache is nearly full ----


def test_idle_sequences_are_evicted_and_read_again() -> None:
    """A full KV cache ends drafting, or an evicted sequence comes back with wrong KV."""
    target, _ = make(num_slots=260)
    for seq_id in range(3):
        target.tell([target.start(seq_id, [seq_id] * 50)])
        assert target.run()
        for token in range(8):
            target.tell(outcomes=[target.outcome(seq_id, [token])])
            assert target.run()
        assert target.branches(seq_id)[0].prefix[:-1] == tuple(target.history[seq_id])
    assert min(push.kv_usage for push in target.pushes[-5:]) > 0.5
    target.tell(outcomes=[target.outcome(0, [4])])
    assert target.run()
    assert target.branches(0)[0].prefix[:-1] == tuple(target.history[0])
    assert not target.lost
    assert_greedy(target, context_logits, 0.0)
    target.tell(finished=[0, 1, 2])
    assert usage(target) == 0.0


def test_a_tree_that_does_not_fit_stays_shallow() -> None:
    """Where the slots do not reach for all tree steps, what is built is lost or the engine stops."""
    target, _ = make(num_slots=len(PROMPT) + 25)  # for two tree steps of ten branches
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    assert {len(bet.chain) for bet in target.branches(0)} == {2}
    target.tell(outcomes=[target.outcome(0, target.branches(0)[0].prefix[len(PROMPT) :], target.branches(0)[0].chain)])
    assert target.run()
    assert_greedy(target, context_logits, 0.0)
    target.tell(finished=[0])
    assert usage(target) == 0.0


@pytest.mark.parametrize("num_slots", (8, 12, 20))
def test_a_jit_row_without_room_is_given_up(num_slots: int) -> None:
    """The engine fails or spins where a waiting row finds no slot."""
    target, _ = make(num_slots=num_slots)
    target.tell([target.start(0, PROMPT[:7])])
    target.run(50)
    target.tell(outcomes=[target.outcome(0, [5], wanted=K)])
    target.run(50)
    served = sum(len(bet.chain) for bet in target.bets if bet.prefix == (*PROMPT[:7], 5))
    assert served >= K or target.declined == [0], "the target waits for nothing"
    assert_greedy(target, context_logits, 0.0)
    target.tell(finished=[0])
    assert usage(target) == 0.0


def test_a_prompt_larger_than_the_cache_leaves_the_others_alone() -> None:
    """A prompt that will never fit stops the trees of the other requests."""
    target, _ = make(num_slots=120)
    target.tell([target.start(0, PROMPT), target.start(1, [1] * 300)])
    target.run(200)
    assert {len(bet.chain) for bet in target.branches(0)} == {DEPTH}
    assert not target.branches(1)
    assert_greedy(target, context_logits, 0.0)
    target.tell(finished=[0, 1])
    assert usage(target) == 0.0


def test_a_growing_sequence_is_not_evicted_by_another_of_its_batch() -> None:
    """A sequence of a tree step loses the slots that were just written into the batch."""
    target, _ = make(num_slots=2 * len(PROMPT) + 35)
    target.tell([target.start(0, PROMPT)])
    target.run(2)  # glue, fork
    for _ in range(8):
        target.tell()
    target.tell([target.start(1, PROMPT[::-1])])
    assert target.run()
    assert_greedy(target, context_logits, 0.0)


@pytest.mark.parametrize("num_slots", (60, 100, 140, 200))
def test_any_course_of_rounds_in_a_cache_too_small(num_slots: int) -> None:
    """Under eviction trees are wrong, the engine fails or spins, or slots leak."""
    for seed in range(8):
        generator = random.Random(seed)
        target, _ = make(num_slots=num_slots)
        target.tell([target.start(i, [i + 1] * generator.randint(5, 30)) for i in range(4)])
        for _ in range(30):
            target.run(generator.choice((0, 1, 2, 3, 5, 50)))
            play_round(target, generator, K, VOCABULARY)
        assert target.run()
        assert not target.lost
        assert_greedy(target, context_logits, 0.0)
        target.tell(finished=list(target.history))
        assert usage(target) == pytest.approx(0.0)


def test_a_sequence_that_finds_no_slots_rests() -> None:
    """The draft spins at full speed over a sequence that does not fit."""
    target, _ = make(num_slots=len(PROMPT) - 1)
    target.tell([target.start(0, PROMPT)])
    assert target.run()
    assert not target.bets


def test_a_sequence_that_finds_no_slots_leaves_the_others_alone() -> None:
    """Tokens of one row that find no room stand before the trees of all rows."""
    target, _ = make(num_slots=70)
    target.tell([target.start(0, PROMPT), target.start(1, [1] * 64)])
    assert target.run()
    assert target.branches(0) or target.branches(1)


# ---- sampled rows ----

FAN_OUT = [2, 3, 1, 0, 4]
SAMPLING = {"temperature": 0.7, "top_k": 12, "top_p": 0.9}


@pytest.mark.parametrize(("saguaro_c", "top_m"), ((0.5, 16), ("auto", 16), (0.5, 8)))
def test_sampled_drafts_come_with_the_law_they_were_drawn_from(saguaro_c: float | str, top_m: int) -> None:
    """A law is not σ_{F,C} of its position, does not sum to 1, or does not hold its token: the output is wrong."""
    target, _ = make(fan_out=FAN_OUT, saguaro_c=saguaro_c, draft_top_m=top_m)
    possible = (0.5,) if saguaro_c == 0.5 else SaguaroBandit("auto").values
    sampled = [target.start(seq_id, PROMPT[seq_id:], **SAMPLING) for seq_id in (0, 2)]
    target.tell([*sampled, target.start(1, PROMPT[::-1])])
    generator = random.Random(1)
    for _ in range(12):
        assert target.run()
        play_round(target, generator, K, VOCABULARY)
    assert target.run()
    checked, values = 0, set()
    for bet in target.bets:
        for i, (token, law) in enumerate(zip(bet.chain, bet.laws, strict=True)):
            assert (law is None) == (bet.seq_id == 1)
            if law is None:
                continue
            token_ids, probs = law
            found = np.zeros(VOCABULARY)
            found[token_ids] += probs
            logits = context_logits(bet.prefix + tuple(bet.chain[:i]))
            expected = [
                reference_law(logits, top_m, *SAMPLING.values(), fan_out=FAN_OUT[i], saguaro_c=c) for c in possible
            ]
            assert len(token_ids) == top_m
            assert probs.sum() == pytest.approx(1.0, abs=1e-5)
            assert found[token] > 0
            used = [c for c, law in zip(possible, expected) if np.allclose(found, law, atol=1e-5)]
            assert used
            values.add(used[0])
            checked += 1
    assert checked > 200
    assert len(values) > (saguaro_c == "auto"), "only one C was tried"


@pytest.mark.parametrize("wanted", (0, 1))
def test_first_drafts_are_drawn_from_their_law(wanted: int) -> None:
    """Drafts of the tree, or those a row waits for, are drawn from another law than is sent along."""
    target, _ = make(num_slots=20_000, tree_budget=1, fan_out="uniform", saguaro_c=0.5)
    for _ in range(8):
        seq_ids = range(len(target.history), len(target.history) + 250)
        target.tell([target.start(i, PROMPT, temperature=1.5) for i in seq_ids], depth=0 if wanted else 1)
        if wanted:
            target.tell(outcomes=[target.outcome(i, [5], wanted=1) for i in seq_ids], depth=1)
        assert target.run()
        target.tell(finished=list(seq_ids))
        target.history.update((i, PROMPT) for i in seq_ids)  # so that ids go on
        target.in_flight.update((i, []) for i in seq_ids)
    bets = [bet for bet in target.bets if bet.prefix == target.bets[0].prefix]
    token_ids, probs = bets[0].laws[0]
    counts = np.bincount([bet.chain[0] for bet in bets], minlength=VOCABULARY)[token_ids]
    likely = probs * len(bets) > 5
    observed = [*counts[likely], counts[~likely].sum()]
    expected = [*probs[likely], 1 - probs[likely].astype(float).sum()]
    assert counts.sum() == len(bets) == 2000
    assert chisquare(observed, np.asarray(expected) / np.sum(expected) * 2000).pvalue > 1e-4


def test_the_seed_decides_the_draws() -> None:
    """A test of distributions cannot be repeated."""

    def chains(seed: int) -> list[list[int]]:
        target, _ = make(seed=seed)
        target.tell([target.start(0, PROMPT, temperature=2.0)])
        assert target.run()
        return [bet.chain for bet in target.bets]

    assert chains(1) == chains(1) != chains(2)


# ---- the real draft ----


@pytest.fixture(scope="module")
def draft() -> DraftModel:
    model = DraftModel(SaguaroConfig(DRAFT, K, draft_dtype="float32"), torch.device("cpu"), vocab_size=4096)
    model.allocate_kv_cache(None, most_useful=4096)
    return model


@pytest.fixture(scope="module")
def plain_logits():
    """Logits after a context, by a full forward of `transformers` without a cache."""
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32, attn_implementation="eager").eval()

    @functools.cache
    def logits_after(context: tuple[int, ...]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([context]), use_cache=False, logits_to_keep=1).logits[0, 0].numpy()

    return logits_after


@pytest.mark.parametrize("num_sequences", (1, 2, 8))
def test_trees_of_the_real_draft_are_its_greedy_decoding(num_sequences: int, draft: DraftModel, plain_logits) -> None:
    """KV, masks or padding of the real forward are wrong after some rounds."""
    generator = random.Random(num_sequences)
    config = SaguaroConfig(DRAFT, K, tree_budget=6)
    target = Target(DraftEngine(draft, config, num_slots=4096, seed=0))
    prompts = [[generator.randrange(4096) for _ in range(generator.randint(2, 100))] for _ in range(num_sequences)]
    target.tell([target.start(i, prompt) for i, prompt in enumerate(prompts)])
    for _ in range(12 // num_sequences + 2):
        target.run(generator.choice((2, 4, 2000)))
        play_round(target, generator, K, 4096)
    assert target.run()
    assert len(target.bets) > 30
    assert_greedy(target, plain_logits, 1e-3)
    target.tell(finished=list(target.history))
    assert usage(target) == 0.0
