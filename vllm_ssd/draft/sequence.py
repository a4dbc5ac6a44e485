"""What the draft knows of one request: its tokens, their KV slots, and where the tree stands."""

from dataclasses import dataclass, field

import numpy as np

from vllm_ssd.draft.batch import Group
from vllm_ssd.draft.kv_cache import SlotList, SlotPool


@dataclass
class Candidates:
    """The most probable next tokens after one token, best first."""

    token_ids: np.ndarray  # [m] int64
    logits: np.ndarray  # [m] float32


@dataclass
class Branch:
    """A bet: the verification stops after `offset` drafts and emits the first of `tokens`."""

    offset: int
    tokens: list[int]
    slots: list[int] = field(default_factory=list)  # one for each token but the last
    candidates: list[Candidates] = field(default_factory=list)  # after each token that has a slot


class Sequence:
    """Tokens, slots and branches of one request.

    `tokens` are committed; `trunk` are the drafts in flight. Slots exist for a prefix of
    tokens + trunk. `candidates[j]` are the next tokens after the committed ones and
    `trunk[:j]`, for as many j as were computed.
    """

    def __init__(self, seq_id: int, tokens: list[int], temperature: float, top_k: int, top_p: float, pool: SlotPool):
        self.seq_id = seq_id
        self.tokens = tokens
        self.trunk: list[int] = []
        self.slots = SlotList(pool)
        self.candidates: list[Candidates] = []
        self.branches: list[Branch] = []  # all that hang on the trunk, in waves
        self.wave: list[Branch] = []  # those that grow: all of one length, the most probable first
        self.is_exhausted = False  # no outcome is left to bet on, or no KV slot
        self.wanted = 0  # JIT drafts still to build before the tree
        self.fork_due = False
        self.steps_left = 0  # tree steps until the branches are full
        self.optional_steps = 0  # the last so many of them are taken only if there is time
        self.saguaro_c = 1.0  # C that the tree, and what is drafted for a waiting target, is drawn with
        self.trunk_c: float | None = None  # C that the trunk was drawn with; None: it was not drawn
        self.temperature = temperature
        self.top_k = top_k
        self.top_p = top_p
        self.last_round = -1
        self._pool = pool

    @property
    def samples(self) -> bool:
        """Whether drafts are drawn (or taken by argmax)."""
        return self.temperature > 0

    @property
    def num_slots(self) -> int:
        """Slots in use, those of the branches included."""
        return len(self.slots) + sum(len(branch.slots) for branch in self.branches)

    @property
    def pending(self) -> list[int]:
        """Tokens without KV: to be prefilled or glued."""
        known = len(self.slots)
        if known >= len(self.tokens):
            return self.trunk[known - len(self.tokens) :]
        return self.tokens[known:] + self.trunk

    @property
    def steps_due(self) -> int:
        """Tree steps until the branches are as deep as was planned."""
        return max(self.steps_left - self.optional_steps, 0)

    @property
    def num_unfinished(self) -> int:
        """Branches that lack drafts."""
        return len(self.wave) if self.steps_due else 0

    def drop_branches(self) -> None:
        """Give up what was built below the trunk."""
        for branch in self.branches:
            self._pool.give_back(np.asarray(branch.slots, dtype=np.int64))
        self.branches = []
        self.wave = []
        self.is_exhausted = False
        self.steps_left = 0

    def hang(self, outcomes: list[tuple[int, int]], steps: int, optional_steps: int) -> None:
        """A wave of branches, to be grown by so many tokens: (drafts accepted, token that follows)."""
        self.wave = [Branch(offset, [token_id]) for offset, token_id in outcomes]
        self.branches += self.wave
        self.steps_left = steps if self.wave else 0
        self.optional_steps = optional_steps
        self.is_exhausted = not self.wave

    def short_branches(self, num_drafts: int) -> list[Branch]:
        """Branches that have fewer drafts, the same number each; those of the first wave that has such."""
        short = [branch for branch in self.branches if len(branch.tokens) <= num_drafts]
        return [branch for branch in short if len(branch.tokens) == len(short[0].tokens)]

    def resume(self, branches: list[Branch], steps: int) -> None:
        """Let branches of one length that had rested grow again, to so many tokens in all; the last is optional."""
        self.wave = branches
        self.steps_left = steps - (len(branches[0].tokens) - 1)
        self.optional_steps = 1

    def rest(self) -> None:
        """Nothing is to be built until the next outcome; what was built stays."""
        self.fork_due = False
        self.wanted = 0
        self.steps_left = 0

    def drop_kv(self) -> None:
        """Give all slots back; the sequence is prefilled anew when it is needed."""
        self.drop_branches()
        self.rest()
        self.slots.cut(0)
        self.candidates = []

    def foresaw(self, emitted: list[int]) -> bool:
        """Whether a branch, or the trunk, holds what a verification emitted."""
        accepted = _common_prefix(emitted, self.trunk)
        if len(emitted) == accepted:
            return True
        return len(emitted) == accepted + 1 and self._pick(accepted, emitted[accepted]) is not None

    def advance(self, emitted: list[int], drafts: list[int]) -> None:
        """Take an outcome: commit `emitted`, keep what it left standing, go on with `drafts`."""
        accepted = _common_prefix(emitted, self.trunk)
        kept_trunk = self.trunk[accepted:] if accepted == len(emitted) else []
        won = None
        if len(emitted) == accepted + 1:
            won = self._pick(accepted, emitted[accepted])
        base = len(self.tokens)
        self.tokens.extend(emitted)
        if accepted == len(emitted):
            # The walk ended inside the trunk: the target verified fewer drafts than we knew of.
            self.candidates = self.candidates[accepted:]
            self.drop_branches()
        else:
            self.slots.cut(base + accepted)
            self.candidates = []
            if won is not None:
                self.branches.remove(won)
                self.slots.extend(np.asarray(won.slots, dtype=np.int64))
                self.candidates = won.candidates
                kept_trunk = won.tokens[1:]
            self.drop_branches()
        kept = _common_prefix(drafts, kept_trunk)
        self.trunk = list(drafts)
        self.slots.cut(len(self.tokens) + kept)
        del self.candidates[kept + 1 :]

    def branch_group(self, slots: np.ndarray) -> Group:
        """The tips of the wave, whose KV goes to `slots` ([num_branches]).

        Each tip attends to the trunk above it and to its own tail.
        """
        branches = self.wave
        tails = np.asarray([branch.slots for branch in branches], dtype=np.int64)  # [n, depth]
        above = len(self.tokens) + np.asarray([branch.offset for branch in branches])  # [n]
        tips = [branch.tokens[-1] for branch in branches]
        return Group(tips, above + tails.shape[1] - 1, slots, self.slots.view().copy(), above, tails)

    def _pick(self, offset: int, token_id: int) -> Branch | None:
        return next((b for b in self.branches if b.offset == offset and b.tokens[0] == token_id), None)


def _common_prefix(a: list[int], b: list[int]) -> int:
    count = 0
    for x, y in zip(a, b):
        if x != y:
            break
        count += 1
    return count
