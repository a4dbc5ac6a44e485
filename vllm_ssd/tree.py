"""The speculation tree: what the draft has built for one sequence, and the walk through it.

A node is a token after a prefix; the root is the last committed token. Branches hang where
the draft expects the target to leave the trunk (the drafts in flight), and grow downwards as
the draft pushes tokens. An outcome is a walk: go down by the emitted tokens, and what lies
below is the next draft. Nodes point down only. A branch that grew too late for its round
therefore still reaches the right place if the target went its way, and costs nothing if not.

Knows nothing about messages, models or vLLM.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_REMEMBERED_ROUNDS = 8


class Node:
    """A token after the prefix that leads to it."""

    __slots__ = ("children", "draft", "law", "token_id")

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id
        self.children: dict[int, Node] = {}
        self.draft: Node | None = None
        """The child to hand out as a draft: the first one drawn here, whatever it came out as."""
        self.law: TokenLaw | None = None
        """What this token was drawn from; None: verified one-hot."""

    def child(self, token_id: int) -> "Node":
        """The child with this token, made if it is not there."""
        node = self.children.get(token_id)
        if node is None:
            node = self.children[token_id] = Node(token_id)
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
        self._tips: list[Node] = []

    def commit(self, emitted: Sequence[int]) -> bool:
        """Walk down by the tokens that a verification emitted; True if the walk stayed in the tree."""
        stayed = True
        for token_id in emitted:
            stayed = stayed and token_id in self._root.children
            self._root = self._root.child(token_id)
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

    def hang(self, length: int, trunk: Sequence[int], offsets: Sequence[int], token_ids: Sequence[int]) -> None:
        """Begin new branches; the earlier ones grow no more.

        Branch i hangs below the first `length` committed tokens and `trunk[:offsets[i]]`, and
        begins with `token_ids[i]`. Without token_ids, one branch begins at the trunk's end.
        """
        start = next((node for at, node in reversed(self._starts) if at == length), None)
        if start is None:  # too old to matter, or never known: grow it beside the tree
            start = Node(-1)
        path = [start]
        for token_id in trunk:
            path.append(path[-1].child(token_id))
        if token_ids:
            self._tips = [path[offset].child(token_id) for offset, token_id in zip(offsets, token_ids, strict=True)]
        else:
            self._tips = [path[-1]]

    def grow(self, token_ids: Sequence[int], law: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Append one token to each branch. `law`: [num_branches, m] token ids and probabilities."""
        for i, token_id in enumerate(token_ids):
            parent = self._tips[i]
            node = parent.child(token_id)
            if parent.draft is None:
                parent.draft = node
                if law is not None:
                    node.law = TokenLaw(law[0][i], law[1][i])
            self._tips[i] = node
