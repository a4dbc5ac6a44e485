"""Proposer: the target's side of each round, with a scripted draft."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from vllm_ssd import proposer as proposer_module
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.launcher import State
from vllm_ssd.messages import Branches, Growth, Law, Push, Ready, Round, pack_law, unpack_tokens
from vllm_ssd.proposer import DraftSampling, Proposal, Proposer, Row

K = 3
PROMPT = [1, 2, 3, 4]


class FakeDraft:
    """Plays pushes and records rounds, with the part of DraftProcess that the proposer uses."""

    def __init__(self) -> None:
        self.state = State.UP
        self.incarnation = 1
        self.ready = Ready(1, 1000, 100, "cpu", "float32")
        self.restarts = 0
        self.rounds: list[Round] = []
        self.timeouts: list[float] = []  # of each call that would have waited
        self.on_wait: Callable[[], None] = lambda: None
        self._pushes: list[Push] = []
        self.given_up: list[str] = []

    def give_up(self, reason: str, part: int = 0) -> None:
        self.given_up.append(reason)
        self.go_down()

    @property
    def is_up(self) -> bool:
        return self.state is State.UP

    def send(self, message: Round) -> None:
        if self.state is State.UP:
            self.rounds.append(message)

    def receive(self, timeout: float = 0.0) -> Iterator[Push]:
        if timeout:
            self.timeouts.append(timeout)
            self.on_wait()
        pushes, self._pushes = self._pushes, []
        yield from pushes

    def push(self, *items: Branches | Growth, lost: Sequence[int] = (), declined: Sequence[int] = ()) -> None:
        """Have these ready at the next `receive`."""
        self._pushes.append(Push(0, list(items), list(lost), list(declined), 0.0, 0.0))

    def build(
        self,
        seq_id: int,
        length: int,
        trunk: list[int],
        branches: dict[tuple[int, int], list[int]],
        planned: int = K,
    ) -> None:
        """Push branches, (offset, first token) → chain, all chains of one length."""
        places, chains = list(branches), list(branches.values())
        growths = [Growth(seq_id, list(column), None) for column in zip(*chains, strict=True)]
        hang = Branches(seq_id, 0, length, trunk, [p[0] for p in places], [p[1] for p in places], planned)
        self.push(hang, *growths)

    def go_down(self) -> None:
        self.state, self.ready = State.DOWN, None

    def come_up(self) -> None:
        self.state, self.ready = State.UP, Ready(1, 1000, 100, "cpu", "float32")
        self.incarnation += 1
        self.restarts += 1


class Game:
    """A proposer, its fake draft, and the histories of the requests."""

    def __init__(self, **options) -> None:
        self.draft = FakeDraft()
        self.proposer = Proposer(SaguaroConfig("fake", K, **{"fallback": "ngram", **options}), self.draft, 1000)
        self.history: dict[str, list[int]] = {}
        self.looked_up: list[list[int]] = []  # rows whose n-grams were asked for
        self.ngrams: dict[int, list[int]] = {}

    def start(self, req_id: str, tokens: Sequence[int] = PROMPT, sampling: DraftSampling | None = None) -> None:
        self.history[req_id] = list(tokens)
        self.proposer.start(req_id, tokens, sampling or DraftSampling())
        self.proposer.send_news(1)

    def row(self, req_id: str, emitted: Sequence[int], verified: int = 0, limit: int = K) -> Row:
        tokens = self.history[req_id]
        tokens.extend(emitted)
        return Row(req_id, len(tokens), list(emitted), verified, limit, lambda: np.asarray(tokens, dtype=np.int32))

    def propose(self, *rows: Row) -> list[Proposal]:
        return self.proposer.propose(rows, self._look_up)

    def _look_up(self, rows: Sequence[int]) -> dict[int, list[int]]:
        self.looked_up.append(list(rows))
        return {i: self.ngrams[i] for i in rows if i in self.ngrams}

    def assert_totals(self, **expected: int) -> None:
        """These totals, and that all of them add up."""
        stats = self.proposer.stats()
        assert {key: stats[key] for key in expected} == expected
        assert stats["lookups"] == stats["hits"] + stats["part_hits"] + stats["misses"]
        fallbacks = stats["fallback_draft"] + stats["fallback_ngram"] + stats["fallback_none"]
        assert stats["misses"] == fallbacks


@pytest.fixture
def game() -> Game:
    return Game()


# ---- hits and misses ----


def test_a_new_prompt_is_told_before_the_target_reads_it(game: Game) -> None:
    """The draft begins to read a prompt only after the target has."""
    game.start("a", sampling=DraftSampling(0.7, 20, 0.9))
    [message] = game.draft.rounds
    [start] = message.starts
    assert unpack_tokens(start.token_ids).tolist() == PROMPT
    assert (start.temperature, start.top_k, start.top_p, start.drafts) == (0.7, 20, 0.9, [])
    assert not message.outcomes


def test_a_hit_hands_out_the_whole_branch_and_tells_the_draft(game: Game) -> None:
    """Drafts that lie ready are not handed out, or the draft is not told which ones are verified."""
    game.start("a")
    game.draft.build(0, 4, [], {(0, 5): [6, 7, 8], (0, 9): [1, 1, 1]})
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [6, 7, 8]
    assert proposal.laws == [None] * 3 and not proposal.late
    [outcome] = game.draft.rounds[-1].outcomes
    assert (outcome.seq_id, outcome.length, outcome.emitted, outcome.drafts) == (0, 5, [5], [6, 7, 8])
    assert outcome.wanted == 0
    assert not game.looked_up and not game.draft.timeouts
    game.assert_totals(rounds=1, lookups=1, hits=1, drafted_tokens=3, emitted_tokens=1, branches=2)


def test_hits_go_on_from_round_to_round(game: Game) -> None:
    """The second hit in a row looks below the wrong node."""
    game.start("a")
    game.draft.build(0, 4, [], {(0, 5): [6, 7, 8]})
    game.propose(game.row("a", [5]))
    game.draft.build(0, 5, [6, 7, 8], {(1, 4): [20, 21, 22], (3, 9): [30, 31, 32]})
    [proposal] = game.propose(game.row("a", [6, 4], verified=3))
    assert proposal.token_ids == [20, 21, 22]
    game.assert_totals(hits=2, accepted_tokens=1, emitted_tokens=3)


def test_sampled_drafts_come_with_their_laws(game: Game) -> None:
    """The verifier gets no law, or that of another token."""
    game.start("a", sampling=DraftSampling(1.0))
    laws = pack_law(np.array([[6, 16], [1, 11]]), np.array([[0.75, 0.25], [0.5, 0.5]]))
    game.draft.push(Branches(0, 0, 4, [], [0, 0], [5, 9]), Growth(0, [6, 1], laws))
    [proposal] = game.propose(game.row("a", [9]))
    assert proposal.token_ids == [1]
    [law] = proposal.laws
    assert law.token_ids.tolist() == [1, 11] and law.probs.tolist() == [0.5, 0.5]


def test_a_half_built_branch_is_a_part_hit_and_late(game: Game) -> None:
    """A row whose branch is half built gets nothing, or waits."""
    game.start("a")
    game.draft.build(0, 4, [], {(0, 5): [6]})
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [6] and proposal.late
    game.assert_totals(part_hits=1, hits=0, late_rounds=1)


def test_a_tree_that_was_to_be_shallow_is_not_late(game: Game) -> None:
    """More drafts are wanted than there was time for, and the draft seems to be behind its plan."""
    game.start("a")
    game.draft.build(0, 4, [], {(0, 5): [6]}, planned=1)
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [6] and not proposal.late
    game.assert_totals(part_hits=1, late_rounds=0)


def test_a_foreseen_outcome_without_drafts_is_late_and_a_miss(game: Game) -> None:
    """A branch that did not grow in time is not counted as late."""
    game.start("a")
    game.draft.push(Branches(0, 0, 4, [], [0], [5], depth=1))
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == []
    game.assert_totals(misses=1, late_rounds=1)


def test_what_an_earlier_tree_left_below_a_draft_is_not_late(game: Game) -> None:
    """An outcome that no branch bet on, but that an earlier branch had as a further token, seems a slow draft's."""
    game.start("a")
    game.draft.build(0, 4, [], {(0, 5): [6, 7, 8, 9]})  # one step more than is handed out
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [6, 7, 8]
    game.draft.build(0, 5, [6, 7, 8], {(3, 20): [21, 22, 23]})
    [proposal] = game.propose(game.row("a", [6, 7, 8, 9], K))
    assert not proposal.token_ids and not proposal.late
    game.assert_totals(misses=1, late_rounds=0)


def test_a_second_wave_that_the_outcome_interrupts_is_not_late(game: Game) -> None:
    """What is built while a verification is overdue, and could not have been planned, seems a slow draft's."""
    game.start("a")
    game.draft.build(0, 4, [], {(0, 5): [6, 7, 8]})
    game.draft.build(0, 4, [], {(0, 15): [16]})
    [proposal] = game.propose(game.row("a", [15]))
    assert proposal.token_ids == [16] and not proposal.late
    game.assert_totals(part_hits=1, late_rounds=0)


def test_a_branch_that_grows_after_the_outcome_counts_in_the_next_round(game: Game) -> None:
    """What crossed the outcome on the wire is lost."""
    game.start("a")
    game.propose(game.row("a", [5]))
    game.draft.build(0, 4, [], {(0, 5): [6, 7, 8]})
    [proposal] = game.propose(game.row("a", [6]))
    assert proposal.token_ids == [7, 8]


def test_a_miss_takes_ngrams_and_the_draft_is_told(game: Game) -> None:
    """A missed row goes without, its n-grams are longer than allowed, or the draft builds on other drafts."""
    game.start("a")
    game.start("b")
    game.draft.build(1, 4, [], {(0, 5): [6, 7, 8]})
    game.ngrams = {0: [40, 41, 42]}
    missed, hit = game.propose(game.row("a", [5], limit=2), game.row("b", [5]))
    assert game.looked_up == [[0]]
    assert missed.token_ids == [40, 41] and missed.laws == [None, None]
    assert hit.token_ids == [6, 7, 8]
    assert [outcome.drafts for outcome in game.draft.rounds[-1].outcomes] == [[40, 41], [6, 7, 8]]
    game.assert_totals(misses=1, hits=1, fallback_ngram=1)


def test_a_miss_without_ngrams_goes_on_without_drafts(game: Game) -> None:
    """A row for which nothing is found is lost or counted twice."""
    game.start("a")
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == proposal.laws == []
    game.assert_totals(misses=1, fallback_none=1, drafted_tokens=0)


def test_the_setting_none_looks_up_nothing() -> None:
    """fallback "none" takes n-grams."""
    game = Game(fallback="none")
    game.start("a")
    game.ngrams = {0: [40]}
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [] and not game.looked_up
    game.assert_totals(misses=1, fallback_none=1)


def test_drafts_are_cut_to_the_rows_limit(game: Game) -> None:
    """A row gets more drafts than it may take, and vLLM's assertions fail."""
    game.start("a")
    game.start("b")
    for seq_id in (0, 1):
        game.draft.build(seq_id, 4, [], {(0, 5): [6, 7, 8]})
    two, none = game.propose(game.row("a", [5], limit=2), game.row("b", [5], limit=0))
    assert two.token_ids == [6, 7] and none.token_ids == []
    assert not game.looked_up
    game.assert_totals(lookups=1, hits=1, late_rounds=0)
    [proposal] = game.propose(game.row("b", [6]))  # what was not taken is still there
    assert proposal.token_ids == [7, 8]


def test_a_row_that_was_never_started_gets_nothing_but_ngrams(game: Game) -> None:
    """A request the proposer never saw raises, or is told to the draft."""
    game.history["stranger"] = list(PROMPT)
    game.ngrams = {0: [40]}
    [proposal] = game.propose(game.row("stranger", [5]))
    assert proposal.token_ids == [40]
    assert not any(message.outcomes or message.starts for message in game.draft.rounds)
    game.assert_totals(misses=1, fallback_ngram=1)


def test_tokens_that_went_by_unseen_begin_the_tree_anew(game: Game) -> None:
    """After steps without a proposal (preemption, a stop and resume) drafts hang below the wrong tokens."""
    game.start("a")
    game.draft.build(0, 4, [], {(0, 5): [6, 7, 8]})
    game.history["a"] += [9, 9]
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == []
    message = game.draft.rounds[-1]
    assert not message.outcomes
    assert unpack_tokens(message.starts[0].token_ids).tolist() == [*PROMPT, 9, 9, 5]
    game.draft.build(0, 7, [], {(0, 6): [7, 8, 9]})
    [proposal] = game.propose(game.row("a", [6]))
    assert proposal.token_ids == [7, 8, 9]


# ---- waiting for the draft ----


def waiting_game() -> Game:
    game = Game(fallback="draft")
    game.start("a")
    return game


def jit(game: Game, *token_ids: int, new: bool = True) -> None:
    """Push JIT drafts of request 0 after [*PROMPT, 5]."""
    hang = [Branches(0, 0, 5, [], [], [])] if new else []
    game.draft.push(*hang, *(Growth(0, [t], None) for t in token_ids))


def test_a_row_waits_until_its_drafts_are_there() -> None:
    """A waiting row leaves with fewer drafts than were coming, or the draft is not asked for them."""
    game = waiting_game()
    parts = [lambda: jit(game, 60), lambda: jit(game, 61, 62, new=False)]
    game.draft.on_wait = lambda: parts.pop(0)()
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [60, 61, 62]
    assert not parts and not game.looked_up
    [outcome] = game.draft.rounds[-1].outcomes
    assert (outcome.wanted, outcome.drafts) == (K, [])
    game.assert_totals(misses=1, fallback_draft=1, fallback_none=0, drafted_tokens=3)


@pytest.mark.parametrize("late", (7, 60))
def test_a_step_that_was_under_way_does_not_hold_up_a_row_that_waits(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its draft comes after the outcome was sent and stays; what the row waits for hangs beside it, out of reach."""
    monkeypatch.setattr("vllm_ssd.fallback._UNKNOWN_PATIENCE", 600.0)
    game = waiting_game()
    game.draft.push(Branches(0, 0, 4, [], [0], [5], K))  # begun, but nothing drawn yet

    def answer() -> None:
        game.draft.push(Growth(0, [late], None))
        jit(game, 60, 61, 62)

    game.draft.on_wait = answer
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [60, 61, 62]
    assert len(game.draft.timeouts) == 1


def test_rows_wait_together_and_hits_do_not() -> None:
    """A row that hit is made to wait, or one that waits gets the drafts of another."""
    game = waiting_game()
    game.start("b")
    game.start("c")
    game.draft.build(1, 4, [], {(0, 5): [6, 7, 8]})

    def answer() -> None:
        for seq_id, first in ((2, 80), (0, 60)):
            growths = (Growth(seq_id, [first + i], None) for i in range(K))
            game.draft.push(Branches(seq_id, 0, 5, [], [], []), *growths)

    game.draft.on_wait = answer
    proposals = game.propose(game.row("a", [5]), game.row("b", [5]), game.row("c", [5], limit=1))
    assert [p.token_ids for p in proposals] == [[60, 61, 62], [6, 7, 8], [80]]
    assert [outcome.wanted for outcome in game.draft.rounds[-1].outcomes] == [K, 0, 1]
    game.assert_totals(misses=2, hits=1, fallback_draft=2)


def test_a_wait_that_takes_too_long_ends_with_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that hangs holds the target."""
    monkeypatch.setattr("vllm_ssd.proposer._LONGEST_WAIT", 0.05)
    game = waiting_game()
    parts = [lambda: jit(game, 60)]
    game.draft.on_wait = lambda: parts.pop(0)() if parts else None
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [60]
    assert max(game.draft.timeouts) <= 0.05
    game.draft.on_wait = lambda: None
    jit(game, 61, new=False)  # comes late, after 60 was handed out
    [proposal] = game.propose(game.row("a", [60, 61], verified=1))
    assert proposal.token_ids == []
    game.assert_totals(misses=2, fallback_draft=2, accepted_tokens=1)


@pytest.mark.parametrize("how", ("down", "lost", "declined"))
def test_a_wait_ends_when_nothing_will_come(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row waits for a draft that will not answer."""
    monkeypatch.setattr("vllm_ssd.proposer._LONGEST_WAIT", 600.0)
    monkeypatch.setattr("vllm_ssd.fallback._UNKNOWN_PATIENCE", 600.0)
    game = waiting_game()
    game.draft.on_wait = game.draft.go_down if how == "down" else lambda: game.draft.push(**{how: [0]})
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == []
    assert len(game.draft.timeouts) == 1
    game.assert_totals(misses=1, fallback_draft=1)


# ---- the draft goes down and comes back; requests come and go ----


def test_while_the_draft_is_down_rows_take_ngrams() -> None:
    """A dead draft stops generation or makes rows wait."""
    game = waiting_game()
    game.draft.go_down()
    game.ngrams = {0: [40]}
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == [40]
    assert not game.draft.timeouts
    assert game.proposer.stats()["draft_up"] is False
    game.start("b")
    game.propose(game.row("a", [6]), game.row("b", [5]))
    game.proposer.finish(["a", "b"])
    assert len(game.draft.rounds) == 1  # the Start from before


def test_a_draft_that_comes_back_is_told_everything_anew(game: Game) -> None:
    """After a restart the draft knows nothing of the running requests, for good."""
    game.start("a")
    game.start("b")
    game.propose(game.row("a", [5]), game.row("b", [5]))
    game.draft.go_down()
    game.propose(game.row("a", [6]), game.row("b", [6]))
    game.start("c")
    game.draft.come_up()
    game.ngrams = {1: [40, 41]}
    game.propose(game.row("a", [7]), game.row("b", [7]), game.row("c", [5]))
    message = game.draft.rounds[-1]
    assert not message.outcomes
    told = [(unpack_tokens(start.token_ids).tolist(), start.drafts) for start in message.starts]
    assert told == [([*PROMPT, 5, 6, 7], []), ([*PROMPT, 5, 6, 7], [40, 41]), ([*PROMPT, 5], [])]
    assert len({start.seq_id for start in message.starts}) == 3
    game.draft.build(message.starts[0].seq_id, 7, [], {(0, 8): [9, 9, 9]})
    assert game.propose(game.row("a", [8]))[0].token_ids == [9, 9, 9]
    assert [outcome.length for outcome in game.draft.rounds[-1].outcomes] == [8]
    assert game.proposer.stats()["draft_restarts"] == 1


NONSENSE = {
    "a token beyond the vocabulary": [Branches(0, 0, 4, [], [0], [1000])],
    "a negative token": [Branches(0, 0, 4, [], [0], [5]), Growth(0, [-1], None)],
    "a law over tokens beyond it": [
        Branches(0, 0, 4, [], [0], [5]),
        Growth(0, [6], pack_law(np.array([[6, 1000]], dtype=np.int32), np.array([[0.5, 0.5]], dtype=np.float32))),
    ],
    "a branch that hangs beyond the trunk": [Branches(0, 0, 4, [], [7], [5])],
    "half a law": [Branches(0, 0, 4, [], [0], [5]), Growth(0, [6], Law(b"\0\0\0", b""))],
}


@pytest.mark.parametrize("items", NONSENSE.values(), ids=NONSENSE)
def test_a_draft_that_sends_nonsense_is_given_up(game: Game, items: list) -> None:
    """vLLM gets tokens that it has no embedding for, or speculation is over until the engine's end."""
    game.start("a")
    game.draft.push(*items)
    [proposal] = game.propose(game.row("a", [5]))
    assert len(game.draft.given_up) == 1 and "makes no sense" in game.draft.given_up[0]
    assert all(0 <= token_id < 1000 for token_id in proposal.token_ids)
    game.draft.come_up()
    game.propose(game.row("a", [6]))
    assert [start.seq_id for start in game.draft.rounds[-1].starts] == [0]


def test_long_prompts_come_in_several_rounds(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart all prompts come in one message, which a shared draft does not take."""
    monkeypatch.setattr(proposer_module, "_MOST_TOLD", 40)  # bytes: ten tokens
    for req_id in "abc":
        game.start(req_id)
    game.draft.go_down()
    game.propose(*(game.row(req_id, [5]) for req_id in "abc"))
    game.draft.come_up()
    told = []
    for _ in range(3):
        game.propose(*(game.row(req_id, [6]) for req_id in "abc"))
        told.append([start.seq_id for start in game.draft.rounds[-1].starts])
        known = {outcome.seq_id for outcome in game.draft.rounds[-1].outcomes}
        assert known.isdisjoint(told[-1]) and known <= {i for seq_ids in told for i in seq_ids}
    assert told == [[0], [1], [2]]


def test_a_sequence_that_the_draft_lost_is_started_again(game: Game) -> None:
    """A sequence evicted or never known at the draft is not drafted for any more."""
    game.start("a")
    game.draft.push(lost=[0, 77])
    game.propose(game.row("a", [5]))
    message = game.draft.rounds[-1]
    assert [start.seq_id for start in message.starts] == [0] and not message.outcomes


def test_a_sequence_that_outgrew_the_drafts_context_is_left_alone(game: Game) -> None:
    """A sequence too long for the draft is told again each round, with its whole history."""
    game.start("a", [1] * 93)  # the draft holds 100: 93 and two rounds of 3, and one
    assert len(game.draft.rounds[-1].starts) == 1
    game.draft.push(lost=[0])
    for token in range(3):
        game.propose(game.row("a", [token]))
    game.start("b", [1] * 94)
    assert len(game.draft.rounds) == 1


def test_a_request_id_that_comes_again_is_a_new_request(game: Game) -> None:
    """A reused request id gets drafts of the earlier request, or the draft keeps that one for ever."""
    game.start("a")
    game.draft.build(0, 4, [], {(0, 5): [6, 7, 8]})
    game.start("a", [9, 9, 9, 9])
    message = game.draft.rounds[-1]
    assert message.finished == [0]
    assert [start.seq_id for start in message.starts] == [1]
    [proposal] = game.propose(game.row("a", [5]))
    assert proposal.token_ids == []


def test_a_request_that_ends_before_the_draft_heard_of_it_is_not_told(game: Game) -> None:
    """One message brings a sequence and its end, and the draft keeps it for ever."""
    for _ in range(2):
        game.proposer.start("a", PROMPT, DraftSampling())
    game.proposer.send_news(1)
    [message] = game.draft.rounds
    assert [start.seq_id for start in message.starts] == [1]


def test_a_request_that_outgrew_the_draft_unseen_is_freed(game: Game) -> None:
    """After unseen steps, too long to be started again, a request that ends keeps its KV at the draft."""
    game.start("a", [1] * 90)
    game.history["a"] += [2] * 5
    game.propose(game.row("a", [5]))
    game.proposer.finish(["a"])
    game.proposer.send_news(1)
    assert game.draft.rounds[-1].finished == [0]


def test_speculation_comes_back_after_it_did_not_pay(game: Game) -> None:
    """A look whether drafting pays again ends before the draft, idle until then, has a tree."""
    game.draft.ready = Ready(1, 1000, 10_000, "cpu", "float32")
    game.start("a")
    for tokens in range(1, 9):
        game.proposer.observe_verify(tokens, 0.02 + 0.01 * tokens)
    emitted, handed_out, depths = [7], 0, []
    for i in range(2500):
        [proposal] = game.propose(game.row("a", emitted, verified=handed_out))
        depths.append(depth := game.draft.rounds[-1].depth)
        handed_out = len(proposal.token_ids)
        useless = i < 300
        emitted = [7] if useless else [*proposal.token_ids, 7]
        if depth > 0:
            chain = [9 if useless else 7] * depth
            outcome = (handed_out, 7)
            game.draft.build(0, len(game.history["a"]), proposal.token_ids, {outcome: chain, (0, 7): chain})
    assert 0 in depths[:300]
    assert depths[-100:].count(0) < 50


def test_rounds_in_which_prompts_are_read_do_not_make_waiting_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch seems to emit little, and time to be worth little."""
    game, observed = Game(), []
    monkeypatch.setattr(game.proposer._fallback, "observe_round", lambda *args: observed.append(args))
    game.start("a")
    game.propose(game.row("a", [5]))
    game.propose(game.row("a", [6]))
    game.proposer.observe_verify(1, 0.02)
    game.propose(game.row("a", [7]))
    game.propose(game.row("a", [8]))
    assert [(count, reads_prompts) for count, _, reads_prompts in observed] == [(1, True), (1, False), (1, True)]


def test_a_draft_hears_of_a_long_verification(game: Game) -> None:
    """The draft builds no more than for a usual one, or is told each step what it knows."""
    game.start("a")
    for tokens in (1, 2, 3, 4) * 3:
        game.proposer.observe_verify(tokens, 0.020 + 0.001 * tokens)
    game.propose(game.row("a", [5]))
    sent = len(game.draft.rounds)
    game.proposer.send_news(1)  # what was expected
    game.proposer.send_news(8)
    assert len(game.draft.rounds) == sent
    game.proposer.send_news(180)  # the prompt of another, which is not for the draft
    assert [round_.verify_seconds for round_ in game.draft.rounds[sent:]] == [pytest.approx(0.2, rel=0.01)]
    game.propose(game.row("a", [6]))
    assert game.draft.rounds[-1].verify_seconds == pytest.approx(0.021, rel=0.01)


def test_finished_requests_are_freed_once(game: Game) -> None:
    """The draft keeps the KV of requests that are over."""
    game.start("a")
    game.start("b")
    game.proposer.finish(["a", "nobody"])
    game.proposer.finish(["a"])
    game.proposer.send_news(1)
    assert game.draft.rounds[-1].finished == [0]
    sent = len(game.draft.rounds)
    game.proposer.send_news(1)  # nothing to say
    assert len(game.draft.rounds) == sent
    game.draft.push(Branches(0, 0, 4, [], [0], [5]), Growth(0, [6], None), lost=[0])  # crossed on the wire
    [proposal] = game.propose(game.row("b", [5]))
    assert proposal.token_ids == []


def test_rounds_are_numbered_and_say_what_is_expected(game: Game) -> None:
    """The draft cannot tell which rounds its pushes took into account, or how long a verify takes."""
    game.start("a")
    for tokens in range(1, 20):
        game.proposer.observe_verify(tokens, 0.02)
    game.propose(game.row("a", [5]))
    game.propose(game.row("a", [6]))
    ids = [message.round_id for message in game.draft.rounds]
    assert ids == sorted(set(ids))
    assert game.draft.rounds[-1].depth == K
    assert game.draft.rounds[-1].verify_seconds == pytest.approx(0.02, rel=0.01)
    assert game.proposer.stats()["verify_seconds"] == pytest.approx(19 * 0.02)


def test_the_expected_verification_is_that_of_the_drafts_handed_out(game: Game) -> None:
    """After a miss the draft plans a tree for a long verification, and a short one comes: it is late."""
    for _ in range(20):
        for tokens in (1, 2, 4, 8, 16):
            game.proposer.observe_verify(tokens, 0.01 + 0.001 * tokens)
    game.start("a")
    game.start("b")
    game.draft.build(0, 4, [], {(0, 5): [6, 7, 8]})
    game.ngrams = {1: [4]}
    game.propose(game.row("a", [5]), game.row("b", [5]))
    assert game.draft.rounds[-1].verify_seconds == pytest.approx(0.01 + 0.001 * (4 + 2), rel=0.02)
    game.ngrams = {}
    game.propose(game.row("a", [9]), game.row("b", [9]))
    assert game.draft.rounds[-1].verify_seconds == pytest.approx(0.01 + 0.001 * 2, rel=0.02)


def test_totals_add_up_over_a_mixed_course() -> None:
    """Some kind of round is counted twice or not at all."""
    generator = np.random.default_rng(0)
    game = Game()
    for req_id in "abc":
        game.start(req_id)
    emitted_tokens = 0
    for _ in range(60):
        rows = []
        for seq_id, req_id in enumerate("abc"):
            first, depth = generator.integers(0, (3, K + 1)).tolist()
            game.draft.build(seq_id, len(game.history[req_id]), [], {(0, first): [1] * depth})
            rows.append(game.row(req_id, generator.integers(0, 3, 1).tolist(), limit=int(generator.integers(0, K + 1))))
            emitted_tokens += 1
        game.ngrams = {i: [1, 2, 3] for i in generator.integers(0, 3, 2).tolist()}
        game.propose(*rows)
    game.assert_totals(rounds=60, verified_rows=180, emitted_tokens=emitted_tokens)
    stats = game.proposer.stats()
    assert min(stats["hits"], stats["part_hits"], stats["misses"], stats["fallback_ngram"], stats["late_rounds"]) > 0
