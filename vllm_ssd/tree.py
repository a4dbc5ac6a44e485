"""The speculation tree: what the draft has built for one sequence, and the walk through it.

A node is a token after a prefix; the root is the last committed token. Branches hang where
the draft expects the target to leave the trunk (the drafts in flight), and grow downwards as
the draft pushes tokens. An outcome is a walk: go down by the emitted tokens, and what lies
below is the next draft. Nodes point down only. A branch that grew too late for its round
therefore still reaches the right place if the target went its way, and costs nothing if not.

Several drafts may build parts of one tree. Each part has a frontier of its own, and where two of them
draw after one prefix, the first that came stays the draft, with the law that it was drawn from: which
one that is depends on when they came, never on what they drew. So does what is drafted for a row that waits:
it takes the place of a draft that came while it was asked for.

Knows nothing about messages, models or vLLM.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_REMEMBERED_ROUNDS = 8


class Node:
    """A token after the prefix that leads to it."""

    __slots__ = ("_others", "draft", "law", "part", "token_id")
    part: int
    """Which of several drafts drew this token; only of nodes that are their parent's draft."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.draft: Node | None = None
        """The child to hand out as a draft: the first one drawn here, whatever it came out as."""
        self.law: TokenLaw | None = None
        """What this token was drawn from; None: verified one-hot."""
        self._others: dict[int, Node] | None = None  # children by token; most nodes have none but the draft

    def find(self, token_id: int) -> "Node | None":
        """The child with this token, if there is one."""
        if self.draft is not None and self.draft.token_id == token_id:
            return self.draft
        return None if self._others is None else self._others.get(token_id)

    def child(self, token_id: int) -> "Node":
        """The child with this token, made if it is not there."""
        node = self.find(token_id)
        if node is None:
            node = Node(token_id)
            if self._others is None:
                self._others = {}
            self._others[token_id] = node
        return node

    def free_draft(self) -> None:
        """What is drawn here next is the draft; the one that was stays a child."""
        if self.draft is not None:
            self._others = {**(self._others or {}), self.draft.token_id: self.draft}
            self.draft = None

    def add_draft(self, token_id: int, law: "TokenLaw | None", part: int = 0) -> "Node":
        """The child that was drawn here; the first one stays the draft, with its law."""
        if self.draft is not None:
            return self.child(token_id)
        node = self.find(token_id)
        self.draft = Node(token_id) if node is None else node
        self.draft.law, self.draft.part = law, part
        return self.draft


def _descend(node: Node, token_ids: Sequence[int]) -> Node:
    for token_id in token_ids:
        node = node.child(token_id)
    return node


@dataclass(frozen=True)
class TokenLaw:
    """Sparse distribution of one token."""

    token_ids: np.ndarray  # [m] int32
    probs: np.ndarray  # [m] float32


class SpeculationTree:
    """The tree of one sequence."""

    def __init__(self, length: int) -> None:
        """`length`: number of committed tokens."""
        self.length = length
        self._root = Node(-1)
        self._starts = deque([(length, self._root)], maxlen=_REMEMBERED_ROUNDS)
        self._tips: dict[int, list[Node]] = {}  # part -> ends of its latest branches
        self._bets: dict[int, tuple[list[Node], int]] = {}  # part -> first branches of the latest round, their depth
        self._bets_below = 0  # so many committed tokens
        self.planned = 0
        """Drafts that were planned for the last outcome, if the first branches of its round bet on it; else 0.

        More are begun while a verification is overdue: they grow as long as it lasts, and are never late.
        """

    def commit(self, emitted: Sequence[int]) -> bool:
        """Walk down by the tokens that a verification emitted; True if the walk stayed in the tree."""
        stayed = True
        for token_id in emitted:
            stayed = stayed and self._root.find(token_id) is not None
            self._root = self._root.child(token_id)
        bets = self._bets.values() if self._bets_below == self.length else ()
        self.planned = max((depth for nodes, depth in bets if any(node is self._root for node in nodes)), default=0)
        self.length += len(emitted)
        self._starts.append((self.length, self._root))
        return stayed

    def drafts(self, limit: int) -> list[Node]:
        """The chain of at most `limit` drafts below the root, as far as it is built."""
        chain = []
        node = self._root.draft
        while node is not None and len(chain) < limit:
            chain.append(node)
            node = node.draft
        return chain

    def hang(
        self,
        length: int,
        trunk: Sequence[int],
        offsets: Sequence[int],
        token_ids: Sequence[int],
        part: int = 0,
        depth: int = 0,
        drafts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Begin new branches, or go on with earlier ones; the others of this part grow no more.

        Branch i hangs below the first `length` committed tokens and `trunk[:offsets[i]]`, and
        begins with `token_ids[i]`. Without token_ids, one branch begins at the trunk's end, for a row that
        waits: it takes the place of what a step that was under way may have drawn there.
        `depth`: drafts that are planned for each. `drafts`: what was built of each before.
        """
        start = next((node for at, node in reversed(self._starts) if at == length), None)
        if start is None:  # too old to matter, or never known: grow it beside the tree
            start = Node(-1)
        path = [start]
        for token_id in trunk:
            path.append(path[-1].child(token_id))
        if token_ids:
            tips = [path[offset].child(token_id) for offset, token_id in zip(offsets, token_ids, strict=True)]
            if drafts:
                tips = [_descend(tip, built) for tip, built in zip(tips, drafts, strict=True)]
            else:
                self._bet(length, tips, part, depth)
        else:
            tips = [path[-1]]
            tips[0].free_draft()
        self._tips[part] = tips

    def _bet(self, length: int, nodes: list[Node], part: int, depth: int) -> None:
        if length > self._bets_below:
            self._bets_below, self._bets = length, {}
        if length == self._bets_below:
            self._bets.setdefault(part, (nodes, depth))

    def grow(self, token_ids: Sequence[int], law: tuple[np.ndarray, np.ndarray] | None, part: int = 0) -> None:
        """Append one token to each of the part's branches. `law`: [num_branches, m] token ids and probabilities."""
        laws = [None] * len(token_ids) if law is None else [TokenLaw(*pair) for pair in zip(*law)]
        tips = self._tips.get(part, ())
        self._tips[part] = [tip.add_draft(token_id, own, part) for tip, token_id, own in zip(tips, token_ids, laws)]
