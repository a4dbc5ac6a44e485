"""Several drafts behind one handle: real engines over a scripted model, in links that tests can break."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.forecast import Forecast, Part
from vllm_ssd.draft.group import DraftGroup
from vllm_ssd.draft.link import DraftLink, State
from vllm_ssd.draft.sequence import Candidates
from vllm_ssd.messages import (
    ELSEWHERE,
    Branches,
    Growth,
    Outcome,
    Push,
    Ready,
    Report,
    Round,
    decode_to_draft,
    decode_to_target,
    encode,
    unpack_tokens,
)
from vllm_ssd.proposer import DraftSampling, Proposer, Row

from .scripted import VOCABULARY, ContextModel, context_logits
from .test_tree import law_of

K = 3
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
DEVICES = ("cpu:0", "cpu:0")


class Member:
    """A link with a real engine behind it, in this process."""

    def __init__(self, part: int = 0, count: int = 2, slots: int = 4096, **options) -> None:
        self.part, self.count, self.slots, self.options = part, count, slots, {"tree_budget": 6, **options}
        self.state, self.ready, self.incarnation = State.DOWN, None, 0
        self.rounds: list[Round] = []
        self.timeouts: list[float] = []
        self.steps = 2000  # of the engine at each look
        self.comes_up = False  # at the next look
        self.starts = self.closed = 0
        self.fails: str | None = None  # of its start
        self._queue: list[Push] = []

    restarts, is_up, pid = DraftLink.restarts, DraftLink.is_up, DraftLink.pid

    def describe(self) -> str:
        return f"member {self.part}"

    def start(self) -> None:
        if self.fails == "start":
            raise OSError("no memory")
        self.state, self.starts = State.STARTING, self.starts + 1
        self.incarnation += 1

    def wait_until_ready(self, timeout: float) -> None:
        self.timeouts.append(timeout)
        if self.fails == "load":
            raise RuntimeError(f"member {self.part} did not load")
        self.load()

    def load(self) -> None:
        config = SaguaroConfig("scripted", K, **self.options)
        model = ContextModel(self.slots)
        self.engine = DraftEngine(model, config, self.slots, seed=self.part, part=Part(self.part, self.count))
        self.state, self.ready = State.UP, Ready(1, self.slots, 1000 - self.part, "cpu", "float32")

    def die(self) -> None:
        self.state, self.ready, self._queue = State.DOWN, None, []

    def send(self, message: Round) -> None:
        if self.state is State.UP:
            self.rounds.append(message)
            self.engine.begin_round(decode_to_draft(encode(message)))

    def receive(self, timeout: float = 0.0) -> Iterator[Push]:
        self.timeouts.append(timeout)
        if self.comes_up:
            self.comes_up = False
            self.start()
            self.load()
        for _ in range(self.steps if self.state is State.UP else 0):
            went_on = self.engine.step()
            if (push := self.engine.take_push()) is not None:
                yield decode_to_target(encode(push))
            if not went_on:
                return

    def close(self) -> None:
        self.state, self.closed = State.DOWN, self.closed + 1


class Play:
    """A proposer over a group, and the histories of its requests."""

    def __init__(self, count: int = 2, **options) -> None:
        self.members = [Member(part, count, **options) for part in range(count)]
        self.group = DraftGroup(self.members)
        self.group.start()
        self.group.wait_until_ready(60.0)
        config = SaguaroConfig("scripted", K, draft_devices=["cpu:0"] * count, **{"fallback": "draft", **options})
        self.proposer = Proposer(config, self.group)
        self.history: dict[str, list[int]] = {}
        self.in_flight: dict[str, list[int]] = {}

    def start(self, req_id: str, tokens: Sequence[int] = PROMPT, sampling: DraftSampling | None = None) -> None:
        self.history[req_id], self.in_flight[req_id] = list(tokens), []
        self.proposer.start(req_id, tokens, sampling or DraftSampling())
        self.proposer.send_news(1)

    def look(self) -> None:
        """Let the drafts build, and take it in."""
        self.proposer.send_news(1)

    def round(self, **emitted: Sequence[int]) -> dict[str, list[int]]:
        """Each request emits these tokens; returns the drafts they get."""
        rows = []
        for req_id, tokens in emitted.items():
            self.history[req_id] += tokens
            seen = np.asarray(self.history[req_id], dtype=np.int32)
            verified = len(self.in_flight[req_id])
            rows.append(Row(req_id, len(seen), list(tokens), verified, K, lambda seen=seen: seen))
        proposals = self.proposer.propose(rows, lambda _: {})
        self.in_flight.update({row.req_id: p.token_ids for row, p in zip(rows, proposals)})
        return {row.req_id: p.token_ids for row, p in zip(rows, proposals)}

    def bets(self, member: Member) -> list[tuple[int, ...]]:
        """Outcomes of the first request that a member's latest tree holds: (offset, token)."""
        return [(branch.offset, branch.tokens[0]) for branch in member.engine.sequence(0).branches]


def greedy(context: Sequence[int], count: int = K) -> list[int]:
    tokens = list(context)
    for _ in range(count):
        tokens.append(int(context_logits(tuple(tokens)).argmax()))
    return tokens[len(context) :]


def ranked(context: Sequence[int]) -> list[int]:
    """Tokens after a context, the most probable first."""
    return np.argsort(-context_logits(tuple(context)), kind="stable").tolist()


# ---- the parts of a tree ----


class Known:
    """A sequence as a forecast sees it."""

    samples = False
    temperature = 0.0

    def __init__(self, rng: np.random.Generator, num_drafts: int, vocabulary: int) -> None:
        self.trunk = rng.integers(0, vocabulary, num_drafts).tolist()
        self.candidates = []
        for _ in range(num_drafts + 1):
            logits = np.sort(rng.normal(size=vocabulary, scale=3.0).astype(np.float32))[::-1]
            self.candidates.append(Candidates(rng.permutation(vocabulary).astype(np.int64), logits.copy()))


@given(
    seed=st.integers(0, 1000),
    count=st.integers(2, 4),
    num_drafts=st.integers(0, K),
    width=st.integers(1, 12),
    fan_out=st.sampled_from(("measured", "geometric", "uniform", (3, 0, 1, 8))),
)
def test_parts_are_disjoint_and_together_the_best(seed, count, num_drafts, width, fan_out) -> None:
    """Two drafts build the same branch, or nobody the most probable one."""
    known = Known(np.random.default_rng(seed), num_drafts, 40)
    config = SaguaroConfig("scripted", K, tree_budget=width, fan_out=fan_out)
    parts = [Forecast(config, Part(index, count)).outcomes(known, width) for index in range(count)]
    together = [outcome for part in parts for outcome in part]
    assert len(together) == len(set(together))
    assert all(len(part) <= width for part in parts)
    assert not any(offset < num_drafts and known.trunk[offset] == token for offset, token in together)
    if fan_out == "measured":
        alone = Forecast(SaguaroConfig("scripted", K, tree_budget=count * width), None).outcomes(known, count * width)
        assert set(alone[:width]) <= set(together), "one of the best is nobody's"
        assert len(set(alone) & set(together)) >= min(len(alone), width)


@pytest.mark.parametrize("count", (2, 3))
def test_later_waves_stay_apart(count: int) -> None:
    """While a verify is overdue two drafts come to the same branches."""
    play = Play(count, tree_budget="auto")
    play.start("a")
    for member in play.members:
        first, second, third = greedy([*PROMPT, 5], 3)
        outcome = Outcome(0, len(PROMPT) + 1, [5], [first, second, third], 0)
        member.engine.begin_round(Round(1, [], [outcome], [], K, verify_seconds=1e-6))  # overdue at once
    play.look()
    bets = [bet for member in play.members for bet in play.bets(member)]
    assert len(bets) == len(set(bets)) == 4 * VOCABULARY - K, "not all outcomes, or some twice"


# ---- rounds ----


def test_each_member_hears_of_everything_and_builds_its_part() -> None:
    """A draft knows only some requests, or all build the same."""
    play = Play()
    play.start("a")
    play.look()
    bets = [play.bets(member) for member in play.members]
    assert [len(own) for own in bets] == [6, 6] and not set(bets[0]) & set(bets[1])
    best = ranked(PROMPT)
    assert {token for own in bets for _, token in own} >= set(best[:6])
    for first in (bets[0][2][1], bets[1][3][1]):  # one of each member's bets comes true
        play.start("b")
        assert play.round(b=[first])["b"] == greedy([*PROMPT, first])
    stats = play.proposer.stats()
    assert (stats["hits"], stats["hits_draft_1"], stats["hits_draft_2"], stats["misses"]) == (2, 1, 1, 0)
    assert stats["branches"] == 12 * 3
    assert stats["draft_seconds"] >= sum(member.engine.busy_seconds for member in play.members) * 0.999


def test_one_member_builds_what_is_waited_for_and_the_others_hear_of_it() -> None:
    """All members build JIT drafts, or the others bet on a trunk that is not verified."""
    play = Play(3)
    play.start("a")
    missed = ranked(PROMPT)[-1]
    drafts = play.round(a=[missed])["a"]
    assert drafts == greedy([*PROMPT, missed])
    first, *others = play.members
    assert [outcome.wanted for outcome in first.rounds[-1].outcomes] == [K]
    for member in others:
        told, late = member.rounds[-2].outcomes[0], member.rounds[-1].outcomes[0]
        assert (told.emitted, told.drafts, told.wanted) == ([missed], [], ELSEWHERE)
        assert (late.emitted, late.drafts, late.wanted, late.length) == ([], drafts, 0, len(PROMPT) + 1)
    assert len(first.rounds) == len(others[0].rounds) - 1
    play.look()
    bets = [play.bets(member) for member in play.members]
    assert len({bet for own in bets for bet in own}) == sum(map(len, bets)) == 18
    assert {offset for own in bets for offset, _ in own} > {0}, "nobody bets beyond the first draft"
    assert all(member.engine.sequence(0).trunk == drafts for member in others)


def test_late_news_is_no_second_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts that did not build JIT drafts learn from each miss twice, or take the wait for a verification."""
    play = Play(saguaro_c="auto")
    play.start("a", sampling=DraftSampling(1.0))
    first, second = play.members
    observed: list[float] = []
    monkeypatch.setattr(second.engine._pace._verify_ratio, "observe", observed.append)
    chosen: list[int] = []
    choose = second.engine._bandit.choose
    monkeypatch.setattr(second.engine._bandit, "choose", lambda: chosen.append(len(second.rounds)) or choose())
    for tokens in range(1, 20):
        play.proposer.observe_verify(tokens, 0.02)
    play.round(a=[ranked(PROMPT)[-1]])
    play.round(a=[*play.in_flight["a"], 5])
    late = [bool(r.outcomes) and not r.outcomes[0].emitted for r in second.rounds]
    told = [bool(r.outcomes) and bool(r.outcomes[0].emitted) for r in second.rounds]
    assert sum(late) >= 1 and sum(told) == 2
    assert len(chosen) == 2, "C is chosen once for each verification"
    assert len(observed) == 1, "the one verification between the two outcomes"


def test_rows_that_hit_are_told_to_all_alike() -> None:
    """A row that does not wait is held back with one that does."""
    play = Play()
    play.start("a")
    play.start("b", PROMPT[::-1])
    play.look()
    token = play.bets(play.members[0])[0][1]
    missed = ranked(PROMPT[::-1])[-1]
    play.round(a=[token], b=[missed])
    told = play.members[1].rounds[-2].outcomes
    assert [outcome.wanted for outcome in told] == [0, ELSEWHERE]
    assert told[0].drafts == greedy([*PROMPT, token])
    assert [outcome.seq_id for outcome in play.members[1].rounds[-1].outcomes] == [1]


@pytest.mark.parametrize("victim", (0, 1))
def test_a_member_dies_and_comes_back(victim: int) -> None:
    """One dead draft ends the trees of all, or the one that comes back is told nothing."""
    play = Play()
    play.start("a")
    play.look()
    other = play.members[1 - victim]
    play.members[victim].die()
    assert play.group.state is State.UP
    incarnation = play.group.incarnation
    token = play.bets(other)[0][1]
    assert play.round(a=[token])["a"] == greedy([*PROMPT, token])
    context = [*PROMPT, token]
    missed = ranked(context)[-1]
    assert play.round(a=[missed])["a"] == greedy([*context, missed]), "nobody builds what is waited for"
    assert play.group.incarnation == incarnation
    play.members[victim].comes_up = True
    context = play.history["a"] + play.in_flight["a"]
    play.round(a=[*play.in_flight["a"], ranked(context)[0]])
    assert play.group.incarnation != incarnation and play.group.restarts == 1
    for member in play.members:
        start = member.rounds[-1].starts[0]
        assert unpack_tokens(start.token_ids).tolist() == play.history["a"]
    play.look()
    assert all(len(play.bets(member)) == 6 for member in play.members)


def test_a_member_that_dies_while_it_is_waited_for_is_not_waited_for() -> None:
    """The target stands still until its patience ends, though it is known that nothing will come."""
    play = Play()
    play.start("a")
    first, second = play.members
    first.send = lambda message: first.die()
    second.steps = 0
    missed = ranked(PROMPT)[-1]
    assert play.round(a=[missed])["a"] == []
    assert max(second.timeouts[1:]) == 0.0, "it waits for one that has nothing to build"
    assert play.proposer.stats()["wait_seconds"] < 0.5
    assert second.rounds[-1].outcomes[0].drafts == [], "it is not told that nothing came"


def test_all_down_is_down() -> None:
    """A group without a living member is taken for one that builds."""
    play = Play()
    assert play.group.ready == Ready(1, 4096, 999, "cpu", "float32")
    play.start("a")
    for member in play.members:
        member.die()
    assert play.group.state is State.DOWN and play.group.ready is None and not play.group.is_up
    assert play.round(a=[5])["a"] == []
    assert play.proposer.stats()["draft_up"] is False
    play.members[1].comes_up = True
    play.round(a=[5])
    play.round(a=[5])
    assert play.group.state is State.UP and play.group.ready.max_length == 999
    assert not play.members[0].rounds[1:] and play.members[1].rounds[-1].outcomes


@pytest.mark.parametrize("how", ("start", "load"))
def test_a_member_that_cannot_start_ends_the_start(how: str) -> None:
    """Half a group goes on unnoticed, or the other half is left behind."""
    members = [Member(0), Member(1)]
    members[1].fails = how
    group = DraftGroup(members)
    with pytest.raises((OSError, RuntimeError), match="no memory|member 1 did not load"):
        group.start()
        group.wait_until_ready(5.0)
    assert all(member.closed for member in members)


def test_the_start_has_one_limit_for_all() -> None:
    """Each member gets the whole time, one after the other."""
    play = Play()
    assert play.members[0].timeouts[0] <= 60.0 and play.members[1].timeouts[0] <= play.members[0].timeouts[0]


def test_totals_add_up_and_a_report_is_kept() -> None:
    """Figures of one draft hide the other's, or a restart counts its seconds again."""
    play = Play()
    report = Report({}, 0.5, {}, [], 6, 3, 0.9, [], 1.0)
    for part, seconds, usage in ((0, 1.0, 0.5), (1, 2.0, 0.25), (0, 1.5, 0.125), (1, 0.5, 0.25)):
        play.proposer._take(Push(0, [], [], [], seconds, usage, [0.01], 2, report if part else None, part))
    stats = play.proposer.stats()
    assert stats["draft_seconds"] == pytest.approx(1.5 + 2.0 + 0.5)
    assert stats["draft_kv_usage"] == 0.25 and stats["branches_cancelled"] == 8
    assert play.proposer.totals.tree_steps.sum == pytest.approx(0.04)
    assert play.proposer.report is report


def test_a_sequence_that_all_lose_at_once_is_begun_again() -> None:
    """Two drafts that report one loss count as two, and the request gets no trees any more."""
    play = Play()
    play.start("a")
    for part in (0, 1):
        play.proposer._take(Push(0, [], [0], [], 0.0, 0.0, part=part))
    play.round(a=[5])
    assert all(len([r for r in member.rounds if r.starts]) == 2 for member in play.members)


# ---- whatever happens, in any order ----


@pytest.mark.parametrize("count", (2, 3))
@pytest.mark.parametrize("seed", range(6))
def test_any_course_of_rounds_hands_out_greedy_drafts(seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some course of hits, misses, half-built trees, deaths and returns a draft is below another prefix."""
    monkeypatch.setattr("vllm_ssd.proposer._LONGEST_WAIT", 0.01)
    generator = random.Random(seed)
    play = Play(count)
    handed_out = 0
    for req_id in ("a", "b", "c"):
        play.start(req_id, [generator.randrange(VOCABULARY) for _ in range(generator.randint(1, 90))])
    for _ in range(60):
        for member in play.members:
            member.steps = generator.choice((0, 1, 2, 3, 5, 2000))
            if generator.random() < 0.04:
                member.die()
            elif member.state is State.DOWN:
                member.comes_up = generator.random() < 0.3
        emitted = {}
        for req_id in generator.sample(sorted(play.history), generator.randint(1, 3)):
            drafts = play.in_flight[req_id]
            kept = drafts[: generator.randint(0, len(drafts))]
            rank = min(int(generator.expovariate(0.5)), VOCABULARY - 1)
            emitted[req_id] = [*kept, ranked([*play.history[req_id], *kept])[rank]]
        for req_id, drafts in play.round(**emitted).items():
            assert drafts == greedy(play.history[req_id], len(drafts))
            handed_out += len(drafts)
    assert handed_out > 50
    stats = play.proposer.stats()
    assert sum(stats[f"hits_draft_{i + 1}"] for i in range(count)) == stats["hits"] + stats["part_hits"]
    assert all(stats[f"hits_draft_{i + 1}"] > 0 for i in range(count))


@pytest.mark.parametrize("seed", range(3))
def test_sampled_drafts_keep_the_law_they_were_drawn_from(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of one draft is handed out with the law of another."""
    monkeypatch.setattr("vllm_ssd.proposer._LONGEST_WAIT", 0.01)
    generator = random.Random(seed)
    play = Play(saguaro_c=0.5, draft_top_m=8)
    pushed: set[tuple[int, bytes, bytes]] = set()
    take = play.proposer._take

    def record(push: Push) -> None:
        for item in push.items:
            if isinstance(item, Growth) and item.law is not None:
                pushed.update(law_of(item))
        take(push)

    play.proposer._take = record
    proposals = []
    propose = play.proposer.propose
    play.proposer.propose = lambda *args: proposals.append(propose(*args)) or proposals[-1]
    for req_id in ("a", "b"):
        play.start(req_id, [generator.randrange(VOCABULARY) for _ in range(9)], DraftSampling(1.0))
    for _ in range(40):
        for member in play.members:
            member.steps = generator.choice((1, 2, 3, 2000))
        emitted = {}
        for req_id, drafts in play.in_flight.items():
            kept = drafts[: generator.randint(0, len(drafts))]
            emitted[req_id] = [*kept, ranked([*play.history[req_id], *kept])[generator.randrange(8)]]
        play.round(**emitted)
    drafts = [pair for found in proposals for p in found for pair in zip(p.token_ids, p.laws)]
    assert len(drafts) > 50
    for token_id, law in drafts:
        assert (token_id, law.token_ids.tobytes(), law.probs.tobytes()) in pushed


def test_pushes_say_whose_they_are() -> None:
    """Growth of one draft goes to the branches of another."""
    play = Play()
    play.start("a")
    pushes = []
    take = play.proposer._take
    play.proposer._take = lambda push: pushes.append(push) or take(push)
    play.look()
    assert {push.part for push in pushes} == {0, 1}
    for part in (0, 1):
        bets = [bet for p in pushes if p.part == part for item in p.items if isinstance(item, Branches) for bet in
                zip(item.offsets, item.token_ids)]  # fmt: skip
        assert bets and all(Part(part, 2).holds(*bet) for bet in bets)
