"""The target side of a round: walk the tree, fall back where it missed, tell the draft.

Knows nothing about vLLM: rows come in as `Row`, drafts go out as `Proposal`. Runs on rank 0
of the target only.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_ssd.config import OVERDUE, SaguaroConfig
from vllm_ssd.depth import DepthControl
from vllm_ssd.draft.group import DraftGroup
from vllm_ssd.draft.link import DraftLink, State
from vllm_ssd.fallback import FallbackRule
from vllm_ssd.messages import Branches, Outcome, Push, Report, Round, Start, pack_tokens, unpack_law
from vllm_ssd.metrics import Totals
from vllm_ssd.tree import SpeculationTree, TokenLaw

logger = logging.getLogger("vllm.saguaro")

_MOST_LOSSES = 2  # a sequence that each draft lost so often is not begun again
_MOST_TOLD = 1 << 24  # bytes of prompts in a round; a shared draft takes no message of twice that
_LONGEST_WAIT = 1.0  # seconds a step may wait for JIT drafts, whatever was expected


@dataclass(frozen=True)
class DraftSampling:
    """How the drafts of a request are chosen."""

    temperature: float = 0.0  # 0: argmax, verified one-hot
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1 is off


@dataclass(frozen=True)
class Row:
    """A request in the batch, after a verification."""

    req_id: str
    length: int  # committed tokens, the emitted ones included
    emitted: list[int]
    num_verified: int  # drafts that this verification looked at
    limit: int  # drafts it may take next
    history: Callable[[], np.ndarray]  # [length] int32 token ids


@dataclass
class Proposal:
    """The drafts of one row."""

    token_ids: list[int] = field(default_factory=list)
    laws: list[TokenLaw | None] = field(default_factory=list)  # None: verified one-hot
    late: bool = False  # the outcome was foreseen, but not all drafts that were planned were built in time
    part: int = 0  # of several drafts that share the tree, the one that built this


@dataclass
class _Request:
    """A request the draft works for."""

    seq_id: int
    sampling: DraftSampling
    tree: SpeculationTree
    known_to: int  # incarnation of the draft that has its tokens; 0: none
    source: str = "tree"  # of the drafts in flight: "tree", "part" (of a branch), "draft" (waited for), "ngram"
    declined: bool = False  # the drafts it waits for will not come
    times_lost: int = 0  # the draft could not go on with it


@dataclass
class _Turn:
    """One selection of drafts; lists by place in the batch."""

    rows: Sequence[Row]
    limits: list[int]  # drafts each may take now
    proposals: list[Proposal]
    missed: list[int]  # rows that found nothing in their tree
    waiting: dict[int, int] = field(default_factory=dict)  # of these, who waits for the draft, and for how many


NgramProposer = Callable[[Sequence[int]], dict[int, list[int]]]
"""Rows (by place in the batch) → their n-gram drafts, already cut to the row's limit."""


class Proposer:
    """Hands out drafts each round."""

    def __init__(self, config: SaguaroConfig, draft: DraftLink | DraftGroup, vocab_size: int | None = None) -> None:
        """`vocab_size`: token ids from here on are no drafts; None takes what comes."""
        self._config = config
        self._vocab_size = vocab_size
        self._draft = draft
        self._has_parts = config.num_draft_devices > 1  # of each tree, built by as many drafts
        self._most_losses = _MOST_LOSSES * config.num_draft_devices
        self._requests: dict[str, _Request] = {}
        self._by_seq_id: dict[int, _Request] = {}
        self._next_seq_id = 0
        self._round_id = 0
        self._num_tokens = 1  # that the next verification is over
        self._finished: list[int] = []
        self._starts: list[Start] = []
        self._depth = DepthControl(config.num_speculative_tokens)
        self._fallback = FallbackRule(config, self._depth)
        self._selected_at = 0.0
        self._only_decoded = False  # since then, no prompt was read
        self._waited = False  # for the draft, in the last round
        self.totals = Totals(hits_per_part=[0] * config.num_draft_devices if self._has_parts else [])
        self.report: Report | None = None
        """What the draft said last of its measurements and decisions; of several, the one that spoke last."""

    # ---- requests come and go ----

    def start(self, req_id: str, token_ids: Sequence[int], sampling: DraftSampling) -> None:
        """A new prompt: the draft reads it while the target does."""
        self.finish([req_id])
        request = _Request(self._next_seq_id, sampling, SpeculationTree(len(token_ids)), known_to=0)
        self._next_seq_id += 1
        self._requests[req_id] = request
        self._by_seq_id[request.seq_id] = request
        self._queue_start(request, token_ids)

    def finish(self, req_ids: Sequence[str]) -> None:
        """These requests are over, however they ended."""
        for req_id in req_ids:
            if (request := self._requests.pop(req_id, None)) is not None:
                del self._by_seq_id[request.seq_id]
                self._starts = [start for start in self._starts if start.seq_id != request.seq_id]
                if self._draft.state is State.UP:
                    self._finished.append(request.seq_id)

    def send_news(self, num_tokens: int) -> None:
        """Tell the draft at once of new prompts, and of a delay: called before the target's forward.

        `num_tokens`: that the target is about to compute, prompts included.
        """
        self._receive()
        expected = self._depth.verify_seconds_of(self._num_tokens)
        self._num_tokens = max(num_tokens, 1)
        self._send([], delayed=self._depth.verify_seconds_of(self._num_tokens) > OVERDUE * expected > 0.0)

    def observe_verify(self, num_tokens: int, seconds: float) -> None:
        """A decoding step of the target over `num_tokens` tokens took so long."""
        self._only_decoded = True
        self._depth.observe_verify(num_tokens, seconds)
        self.totals.verify_seconds += seconds

    # ---- the round ----

    def propose(self, rows: Sequence[Row], ngrams: NgramProposer) -> list[Proposal]:
        """Drafts for the rows that just emitted tokens, in their order."""
        began = time.perf_counter()
        if self._selected_at:
            num_emitted = sum(len(row.emitted) for row in rows)
            self._fallback.observe_round(num_emitted, began - self._selected_at, not self._only_decoded)
        self._selected_at, self._only_decoded = began, False
        self._receive()
        depth = self._depth.choose(len(rows), sum(self._samples(row) for row in rows))
        limits = [min(row.limit, depth) for row in rows]
        proposals = [self._walk(row, limit) for row, limit in zip(rows, limits)]
        self.totals.late_rounds += any(proposal.late for proposal in proposals)
        missed = [i for i, proposal in enumerate(proposals) if not proposal.token_ids and limits[i] > 0]
        turn = _Turn(rows, limits, proposals, missed)
        if missed:
            self._fall_back(turn, ngrams)
        self._waited = bool(turn.waiting)
        self._num_tokens = len(rows) + sum(turn.waiting.get(i, len(p.token_ids)) for i, p in enumerate(proposals))
        self._send(self._outcomes(turn))
        selected = time.perf_counter()
        self.totals.select_seconds += selected - began
        if turn.waiting:
            self._wait(turn)
            if self._has_parts:
                self._tell_the_others(turn)
            self.totals.wait_seconds += time.perf_counter() - selected
        self._count(turn)
        return proposals

    def _samples(self, row: Row) -> bool:
        request = self._requests.get(row.req_id)
        return request is not None and request.sampling.temperature > 0

    def _walk(self, row: Row, limit: int) -> Proposal:
        """Go down the tree by what was emitted; what lies below is the next draft.

        A tree is late if the branch that was hit is not as deep as was planned: not if more is wanted, and
        not if no branch of its own was hit, only what an earlier tree had left below a draft.
        """
        request = self._requests.get(row.req_id)
        if request is None:
            return Proposal()
        accepted = len(row.emitted) - 1
        self.totals.observe_verified(request.source, row.num_verified, accepted)
        if request.source == "ngram":
            self._fallback.observe_ngrams(len(row.emitted))
        else:
            samples = request.sampling.temperature > 0
            self._depth.observe_outcome(row.num_verified, accepted, samples)
            if request.source == "draft":
                self._fallback.observe_waited(row.num_verified, accepted, samples)
        if request.tree.length + len(row.emitted) != row.length:
            # Steps went by that we did not see: begin anew from the token history.
            request.tree = SpeculationTree(row.length)
            request.known_to = 0
            return Proposal()
        request.tree.commit(row.emitted)
        proposal = _proposal(request, limit)
        proposal.late = len(proposal.token_ids) < min(limit, request.tree.planned)
        if limit > 0:
            missed = request.source in ("draft", "ngram")
            self._fallback.observe_next(missed, self._waited, len(proposal.token_ids) / limit)
        return proposal

    def _fall_back(self, turn: _Turn, ngrams: NgramProposer) -> None:
        """Give the rows that missed n-grams, or decide that they wait."""
        can_wait = [i for i in turn.missed if self._knows(turn.rows[i])]
        missed = set(turn.missed)
        hits = [len(proposal.token_ids) for i, proposal in enumerate(turn.proposals) if i not in missed]
        wanted = self._fallback.drafts_to_wait_for(hits, len(can_wait), max(turn.limits))
        if wanted:
            turn.waiting = {i: min(wanted, turn.limits[i]) for i in can_wait}
        others = [i for i in turn.missed if i not in turn.waiting]
        if others and self._fallback.takes_ngrams():
            for i, token_ids in ngrams(others).items():
                token_ids = token_ids[: turn.limits[i]]
                turn.proposals[i] = Proposal(token_ids, [None] * len(token_ids))
                self.totals.fallback_ngram += bool(token_ids)
        self.totals.fallback_draft += len(turn.waiting)

    def _knows(self, row: Row) -> bool:
        """Whether the draft is up and has this row's tokens (all but the newest)."""
        request = self._requests.get(row.req_id)
        up = self._draft.state is State.UP
        return up and request is not None and request.known_to == self._draft.incarnation

    def _outcomes(self, turn: _Turn) -> list[Outcome]:
        outcomes = []
        for i, (row, proposal) in enumerate(zip(turn.rows, turn.proposals)):
            request = self._requests.get(row.req_id)
            if request is None:
                continue
            if i in turn.missed:
                request.source = "draft" if i in turn.waiting else "ngram"
            else:
                request.source = "part" if len(proposal.token_ids) < turn.limits[i] else "tree"
            request.declined = False
            if self._knows(row):
                wanted = turn.waiting.get(i, 0)
                outcomes.append(Outcome(request.seq_id, row.length, row.emitted, proposal.token_ids, wanted))
            elif self._draft.state is State.UP and request.times_lost < self._most_losses:
                self._queue_start(request, row.history(), proposal.token_ids)
        return outcomes

    def _wait(self, turn: _Turn) -> None:
        """Take JIT drafts as they come, until all are there or it takes too long."""
        began = time.perf_counter()
        deadline = began + min(self._fallback.patience(max(turn.waiting.values())), _LONGEST_WAIT)
        open_rows = dict(turn.waiting)
        while open_rows and (left := deadline - time.perf_counter()) > 0:
            self._receive(left)
            for i, wanted in list(open_rows.items()):
                request = self._requests[turn.rows[i].req_id]
                turn.proposals[i] = _proposal(request, wanted)
                if len(turn.proposals[i].token_ids) >= wanted or request.declined or not self._knows(turn.rows[i]):
                    del open_rows[i]
        if self._draft.state is State.UP:
            came = sum(len(turn.proposals[i].token_ids) for i in turn.waiting) / sum(turn.waiting.values())
            self._fallback.observe_wait(max(turn.waiting.values()), time.perf_counter() - began, came)

    def _tell_the_others(self, turn: _Turn) -> None:
        """What the rows that waited go on with, for the drafts that did not build it."""
        outcomes = [
            Outcome(self._requests[turn.rows[i].req_id].seq_id, turn.rows[i].length, [], turn.proposals[i].token_ids, 0)
            for i in turn.waiting
            if self._knows(turn.rows[i])
        ]
        if outcomes:
            self._draft.send_late(self._round([], outcomes, []))

    # ---- talk with the draft ----

    def _receive(self, timeout: float = 0.0) -> None:
        for push in self._draft.receive(timeout):
            try:
                self._take(push)
            except (ValueError, IndexError) as error:
                self._draft.give_up(f"it sent what makes no sense: {error}", push.part)
                return

    def _take(self, push: Push) -> None:
        part = push.part
        self.totals.observe_draft(push.busy_seconds, push.kv_usage, part)
        self.totals.observe_tree(push.tree_seconds, push.cancelled)
        if push.report is not None:
            self.report = push.report
        for item in push.items:
            request = self._by_seq_id.get(item.seq_id)
            if request is None:
                continue
            self._check(item.token_ids)
            if isinstance(item, Branches):
                for drafts in item.drafts:
                    self._check(drafts)
                request.tree.hang(item.length, item.trunk, item.offsets, item.token_ids, part, item.depth, item.drafts)
                self.totals.branches += 0 if item.drafts else len(item.token_ids)
            else:
                law = None if item.law is None else unpack_law(item.law, len(item.token_ids))
                if law is not None and law[0].size:
                    self._check([law[0].max()])
                request.tree.grow(item.token_ids, law, part)
        for seq_id in push.lost:
            if (request := self._by_seq_id.get(seq_id)) is not None:
                request.known_to = 0
                request.times_lost += 1
        for seq_id in push.declined:
            if (request := self._by_seq_id.get(seq_id)) is not None:
                request.declined = True

    def _check(self, token_ids: Sequence[int]) -> None:
        """Raise `ValueError` for a token that the target does not know, and would fall over."""
        if self._vocab_size is not None and token_ids:
            if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
                raise ValueError(f"token ids {min(token_ids)} to {max(token_ids)} of {self._vocab_size}")

    def _queue_start(self, request: _Request, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        if self._draft.state is not State.UP or not self._fits(len(token_ids)):
            return
        packed = pack_tokens(token_ids)
        if self._starts and len(packed) + sum(len(start.token_ids) for start in self._starts) > _MOST_TOLD:
            return  # in a later round: until then the draft does not know it
        sampling = request.sampling
        self._starts.append(
            Start(
                request.seq_id,
                packed,
                list(drafts),
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
            )
        )
        request.known_to = self._draft.incarnation

    def _fits(self, length: int) -> bool:
        """Whether the draft's context holds the sequence and a round more."""
        return length + 2 * self._config.num_speculative_tokens + 1 <= self._draft.ready.max_length

    def _send(self, outcomes: list[Outcome], delayed: bool = False) -> None:
        if not (outcomes or self._starts or self._finished or delayed):
            return
        self._round_id += 1
        self._draft.send(self._round(self._starts, outcomes, self._finished))
        self._starts, self._finished = [], []

    def _round(self, starts: list[Start], outcomes: list[Outcome], finished: list[int]) -> Round:
        verify_seconds = self._depth.verify_seconds_of(self._num_tokens)
        sent_at = time.perf_counter()
        return Round(self._round_id, starts, outcomes, finished, self._depth.depth, verify_seconds, sent_at=sent_at)

    # ---- figures ----

    def _count(self, turn: _Turn) -> None:
        totals, missed = self.totals, set(turn.missed)
        totals.rounds += 1
        for i, (row, proposal) in enumerate(zip(turn.rows, turn.proposals)):
            num_drafts = len(proposal.token_ids)
            totals.observe_row(len(row.emitted), row.num_verified, num_drafts)
            if turn.limits[i] > 0:
                found = 0 if i in missed else num_drafts
                totals.observe_lookup(len(row.emitted) - 1, found, turn.limits[i], proposal.part)
                totals.fallback_none += not num_drafts and i not in turn.waiting

    def stats(self) -> dict[str, float | bool]:
        """All totals since the start, and the state of the draft."""
        return {
            **self.totals.as_dict(),
            **{f"hits_draft_{part + 1}": count for part, count in enumerate(self.totals.hits_per_part)},
            "draft_up": self._draft.is_up,
            "draft_restarts": self._draft.restarts,
        }


def _proposal(request: _Request, limit: int) -> Proposal:
    chain = request.tree.drafts(limit)
    part = chain[0].part if chain else 0
    return Proposal([node.token_id for node in chain], [node.law for node in chain], part=part)
