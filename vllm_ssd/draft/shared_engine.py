"""One model for the trees of several targets.

Each target has a `DraftEngine` of its own: its sequences, statistics and random numbers meet those
of no other target. They share the model, whose forwards are joined, and the KV cache, of which each
has a fair share. Knows nothing about processes or sockets.
"""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.batch import Group, flatten
from vllm_ssd.draft.engine import DraftEngine, Forwards, Top
from vllm_ssd.draft.kv_shares import SharedPool, SlotShare
from vllm_ssd.messages import Failed, Push, Round, unpack_tokens
from vllm_ssd.sampling import top_tokens

_ALONE_PREFILL_SECONDS = 0.25  # a prompt's chunk while no other target has requests
_SHARED_PREFILL_SECONDS = 0.02  # the same while others have: they may be about to need the draft
_FORWARD_TOKENS = 64  # what a forward costs beside its tokens, in tokens
_JOINED_TOKENS = 256  # a forward takes no more targets in once it has so many tokens


@dataclass
class _Member:
    """A target, as the engine knows it."""

    engine: DraftEngine
    share: SlotShare
    num_drafts: int  # K
    most_sequences: int
    served: float = 0.0  # its virtual time: tokens that went through the model for it
    size: int = 1  # tokens that its next forward is thought to have
    failed: str | None = None


@dataclass
class _Asked:
    """A forward that a member waits for."""

    member: _Member
    forwards: Forwards
    groups: list[Group]
    logit_rows: np.ndarray | None
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = sum(len(group.token_ids) for group in self.groups)

    @property
    def rows(self) -> np.ndarray:
        """Places within its tokens whose logits are wanted."""
        return np.arange(self.num_tokens) if self.logit_rows is None else self.logit_rows


class SharedEngine:
    """The engines of all targets, and the turns they take."""

    def __init__(self, model, num_slots: int) -> None:
        """`model`: as for `DraftEngine`."""
        self._model = model
        self._pool = SharedPool(num_slots)
        self._members: dict[Hashable, _Member] = {}
        self._virtual_time = 0.0  # of the engine that was least served when it last had its turn

    def __len__(self) -> int:
        return len(self._members)

    def admit(self, target: Hashable, config: SaguaroConfig, max_num_seqs: int) -> int:
        """Begin to work for a target; returns the KV slots it may have now."""
        share = self._pool.open_share()
        # Requests that are preempted stay known: more of them than run at a time.
        engine = DraftEngine(self._model, config, 0, pool=share)
        self._members[target] = _Member(engine, share, config.num_speculative_tokens, 4 * max_num_seqs + 16)
        for other in self._members.values():
            other.engine.release(other.share.excess)
        return share.num_slots

    def dismiss(self, target: Hashable) -> None:
        """Forget a target and all that was built for it."""
        if (member := self._members.pop(target, None)) is not None:
            member.share.close()

    def begin_round(self, target: Hashable, message: Round, earliest: float | None = None) -> None:
        """Take in what a step of a target brought. Raises what its engine makes of nonsense.

        `earliest`: as for `DraftEngine.begin_round`.
        """
        member = self._members[target]
        _check(message, member)
        member.engine.begin_round(message, earliest)

    def step(self) -> bool:
        """One step of the targets whose turn it is. Returns False when nobody has anything to do."""
        self._limit_prefills()
        asked, worked = self._begin()
        while asked:
            asked = self._continue(asked)
        return worked

    def seconds_until_overdue(self) -> float:
        """How long to wait for an outcome before there is work again; infinite if there will be none."""
        return min((member.engine.seconds_until_overdue() for member in self._members.values()), default=math.inf)

    def take_pushes(self) -> Iterator[tuple[Hashable, Push | Failed]]:
        """What was built since the last call; `Failed` for a target whose own messages broke its engine."""
        for target, member in self._members.items():
            if member.failed is not None:
                yield target, Failed(member.failed)
            elif (push := member.engine.take_push()) is not None:
                yield target, push

    # ---- turns ----

    def _begin(self) -> tuple[list[_Asked], bool]:
        """Start a step of some engines, the least served first (start-time fair queueing).

        A target that needs little joins the forward of one that needs much, and the other way round
        only while the forward is small: else the large one takes a turn of its own.
        """
        asked: list[_Asked] = []
        worked, tokens = False, 0
        for member in self._members.values():
            member.served = max(member.served, self._virtual_time)  # idle time is not saved up
        for member in sorted(self._members.values(), key=lambda m: m.served):
            if member.failed is not None or (asked and tokens + member.size > _JOINED_TOKENS):
                continue
            request = self._advance(member, member.engine.forwards(), None)
            if isinstance(request, _Asked):
                if not asked:
                    self._virtual_time = member.served
                asked.append(request)
                tokens += request.num_tokens
                worked = True
            else:
                worked = worked or request
        return asked, worked

    def _continue(self, asked: list[_Asked]) -> list[_Asked]:
        """Run one joined forward; returns what the engines ask for next within their steps."""
        answers = self._forward(asked)
        for request in asked:
            request.member.served += request.num_tokens + _FORWARD_TOKENS / len(asked)
            request.member.size = max(request.num_tokens, request.member.size // 2)
        found = [self._advance(r.member, r.forwards, answer) for r, answer in zip(asked, answers)]
        return [request for request in found if isinstance(request, _Asked)]

    def _advance(self, member: _Member, forwards: Forwards, top: Top | None) -> _Asked | bool:
        """Let an engine go on to its next forward, or to the end of its step: then, whether it did anything."""
        try:
            groups, logit_rows = forwards.send(top)
        except StopIteration as end:
            return bool(end.value)
        except Exception as error:  # nonsense that only shows now; the others must not suffer from it
            member.failed = f"{type(error).__name__}: {error}"
            return True
        return _Asked(member, forwards, groups, logit_rows)

    def _limit_prefills(self) -> None:
        """While others have requests a prompt is read in small chunks."""
        busy = [member for member in self._members.values() if member.engine.num_sequences]
        for member in busy:
            alone = len(busy) == 1
            member.engine.prefill_seconds = _ALONE_PREFILL_SECONDS if alone else _SHARED_PREFILL_SECONDS

    # ---- the model ----

    @torch.inference_mode()
    def _forward(self, asked: list[_Asked]) -> list[Top]:
        """One forward for all that was asked for; each gets the candidates of its own rows."""
        offsets = np.cumsum([0, *(request.num_tokens for request in asked)])
        rows = [offset + request.rows for offset, request in zip(offsets, asked)]
        every = len(asked) == 1 and asked[0].logit_rows is None
        groups = [group for request in asked for group in request.groups]
        logits = self._model.forward(
            flatten(groups, self._model.device, None if every else np.concatenate(rows).astype(np.int64))
        )
        widths = [request.member.engine.width for request in asked]
        values, token_ids = top_tokens(logits, max(widths), self._model.vocab_size)
        values, token_ids = values.cpu().numpy(), token_ids.cpu().numpy()
        ends = np.cumsum([0, *(len(own) for own in rows)])
        return [
            (values[begin:end, :width], token_ids[begin:end, :width])
            for begin, end, width in zip(ends, ends[1:], widths)
        ]


def _check(message: Round, member: _Member) -> None:
    """Raise `ValueError` for a round that no target in its right mind sends, before it does harm."""
    known = sum(member.engine.knows(seq_id) for seq_id in set(message.finished))
    room = member.most_sequences - member.engine.num_sequences + known
    if len(message.starts) > max(room, 0):
        raise ValueError(f"it has more than {member.most_sequences} requests at a time")
    if not 0 <= message.depth <= member.num_drafts:
        raise ValueError(f"it asks for {message.depth} drafts a round, and said {member.num_drafts} at most")
    for outcome in message.outcomes:
        if not 0 <= outcome.wanted <= member.num_drafts or len(outcome.drafts) > member.num_drafts:
            raise ValueError(f"a request has more than {member.num_drafts} drafts")
        if min((*outcome.emitted, *outcome.drafts), default=0) < 0:
            raise ValueError("a token id is negative")
    for start in message.starts:
        token_ids = unpack_tokens(start.token_ids)
        if not len(token_ids) or token_ids.min() < 0 or min(start.drafts, default=0) < 0:
            raise ValueError("a request has no tokens, or a token id is negative")
        if len(start.drafts) > member.num_drafts:
            raise ValueError(f"a request has more than {member.num_drafts} drafts")
