"""SpeculationTree against a naive model: a dictionary of prefixes."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssd.tree import SpeculationTree

COMMITTED = (7, 7, 7)  # tokens before the tests begin
token = st.integers(0, 3)
tokens = st.lists(token, max_size=4)


class NaiveTree:
    """What was pushed, by absolute prefix; `first` holds the first draft drawn after a prefix."""

    def __init__(self) -> None:
        self.history = list(COMMITTED)
        self.known: set[tuple[int, ...]] = {COMMITTED}
        self.first: dict[tuple[int, ...], int] = {}
        self.tips: list[tuple[int, ...]] = []

    def hang(self, length: int, trunk: Sequence[int], offsets: Sequence[int], token_ids: Sequence[int]) -> None:
        base = tuple(self.history[:length])
        self._know(base, trunk)
        if not token_ids:
            self.tips = [base + tuple(trunk)]
        else:
            self.tips = [base + tuple(trunk[:offset]) + (t,) for offset, t in zip(offsets, token_ids, strict=True)]
        self.known.update(self.tips)

    def grow(self, token_ids: Sequence[int]) -> None:
        for i, t in enumerate(token_ids):
            self.first.setdefault(self.tips[i], t)
            self.tips[i] += (t,)
            self.known.add(self.tips[i])

    def commit(self, emitted: Sequence[int]) -> bool:
        path = tuple(self.history)
        stayed = all(path + tuple(emitted[: i + 1]) in self.known for i in range(len(emitted)))
        self._know(path, emitted)
        self.history.extend(emitted)
        return stayed

    def drafts(self, limit: int) -> list[int]:
        path, chain = tuple(self.history), []
        while path in self.first and len(chain) < limit:
            chain.append(self.first[path])
            path += (chain[-1],)
        return chain

    def _know(self, base: tuple[int, ...], more: Sequence[int]) -> None:
        self.known.update(base + tuple(more[: i + 1]) for i in range(len(more)))


def chain_of(tree: SpeculationTree, limit: int = 100) -> list[int]:
    return [node.token_id for node in tree.drafts(limit)]


def law(*token_ids: int) -> tuple[np.ndarray, np.ndarray]:
    """A law for one branch over these tokens, told apart by its ids."""
    return np.array([token_ids], dtype=np.int32), np.full((1, len(token_ids)), 1 / len(token_ids), dtype=np.float32)


@settings(max_examples=200)
@given(data=st.data())
def test_any_order_of_events_agrees_with_the_naive_tree(data: st.DataObject) -> None:
    """Some order of pushes and outcomes puts a draft below the wrong prefix, or loses one."""
    tree, naive = SpeculationTree(len(COMMITTED)), NaiveTree()
    lengths = [tree.length]  # the roots that the tree still has to remember
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(("hang", "late hang", "grow", "grow", "commit")))
        if event == "commit":
            emitted = data.draw(st.lists(token, min_size=1, max_size=4))
            assert tree.commit(emitted) == naive.commit(emitted)
            lengths = [*lengths, tree.length][-8:]
        elif event == "grow":
            grown = data.draw(st.lists(token, min_size=len(naive.tips), max_size=len(naive.tips)))
            tree.grow(grown, None)
            naive.grow(grown)
        else:
            length = tree.length if event == "hang" else data.draw(st.sampled_from(lengths))
            trunk = data.draw(tokens)
            branches = data.draw(st.lists(st.tuples(st.integers(0, len(trunk)), token), max_size=4))
            offsets, token_ids = [b[0] for b in branches], [b[1] for b in branches]
            tree.hang(length, trunk, offsets, token_ids)
            naive.hang(length, trunk, offsets, token_ids)
        limit = data.draw(st.integers(0, 6))
        assert chain_of(tree, limit) == naive.drafts(limit)
        assert tree.length == len(naive.history)


@given(trunk=st.lists(token, max_size=5), data=st.data())
def test_every_outcome_finds_its_branch(trunk: list[int], data: st.DataObject) -> None:
    """For some number of accepted drafts and some t*, the walk ends beside the branch that was built for it."""
    accepted = data.draw(st.integers(0, len(trunk)))
    offsets = [offset for offset in range(len(trunk) + 1) for _ in range(2)]
    token_ids = [10 + i for i in range(len(offsets))]  # t* that no trunk holds
    chains = [[100 + i, 200 + i] for i in range(len(offsets))]
    tree = SpeculationTree(5)
    tree.hang(5, trunk, offsets, token_ids)
    for depth in range(2):
        tree.grow([chain[depth] for chain in chains], None)
    branch = 2 * accepted + data.draw(st.integers(0, 1))
    assert tree.commit([*trunk[:accepted], token_ids[branch]])
    assert chain_of(tree) == chains[branch]


def test_a_part_built_branch_gives_its_part_and_grows_on() -> None:
    """A row whose branch is half built gets nothing, or the late half is lost."""
    tree = SpeculationTree(3)
    tree.hang(3, [1, 2], [1, 2], [8, 9])
    tree.grow([20, 30], None)
    assert tree.commit([1, 8])
    assert chain_of(tree) == [20]
    tree.grow([21, 31], None)  # pushed before the draft heard of the outcome
    assert chain_of(tree) == [20, 21]


def test_a_branch_hung_for_an_older_length_lands_where_it_was_meant() -> None:
    """A `Branches` that crossed an outcome on the wire hangs below the new root."""
    tree = SpeculationTree(3)
    assert not tree.commit([5, 6])
    tree.hang(3, [5], [1, 1], [6, 7])
    tree.grow([40, 50], None)
    assert chain_of(tree) == [40]


def test_a_length_that_was_never_reached_changes_nothing() -> None:
    """A push for an unknown or forgotten length shows up in the drafts or raises."""
    tree = SpeculationTree(3)
    tree.hang(99, [5], [1], [6])
    tree.grow([40], None)
    assert chain_of(tree) == []
    for _ in range(20):
        tree.commit([1])
    tree.hang(3, [], [0], [1])
    tree.grow([2], None)
    assert chain_of(tree) == []


def test_a_walk_that_ends_inside_the_trunk_keeps_the_rest_of_it() -> None:
    """The scheduler cut the drafts, t* is the next trunk token, and what was built is thrown away."""
    tree = SpeculationTree(3)
    tree.hang(3, [], [], [])
    for draft in (1, 2, 3):
        tree.grow([draft], None)
    tree.hang(3, [1, 2, 3], [2, 3], [8, 9])
    tree.grow([20, 30], None)
    assert tree.commit([1, 2])  # one draft verified; the next token came out as the second
    assert chain_of(tree) == [3]
    assert tree.commit([3, 9])
    assert chain_of(tree) == [30]


def test_a_miss_leaves_no_drafts() -> None:
    """After an outcome that nobody bet on, drafts of another prefix are handed out."""
    tree = SpeculationTree(3)
    tree.hang(3, [1], [0, 1], [8, 9])
    tree.grow([20, 30], None)
    assert not tree.commit([1, 7])
    assert chain_of(tree) == []
    tree.grow([21, 31], None)
    assert chain_of(tree) == []


def test_the_first_draft_drawn_at_a_node_stays_with_its_law() -> None:
    """A second build replaces a sampled draft or its law: the verifier would use another q than was drawn from."""
    tree = SpeculationTree(3)
    tree.hang(3, [], [0], [8])
    tree.grow([20], law(20, 21))
    tree.hang(3, [], [0], [8])
    tree.grow([21], law(21, 22))  # another token, drawn later
    tree.hang(3, [], [0], [8])
    tree.grow([20], law(20, 29))  # the same token from another law
    tree.commit([8])
    [draft] = tree.drafts(5)
    assert draft.token_id == 20
    assert draft.law is not None and draft.law.token_ids.tolist() == [20, 21]
    tree.commit([21])
    assert chain_of(tree) == []


def test_each_branch_gets_its_own_row_of_the_laws() -> None:
    """Laws of branches grown together are mixed up."""
    tree = SpeculationTree(0)
    tree.hang(0, [], [0, 0], [1, 2])
    token_ids, probs = np.array([[5, 9], [6, 8]]), np.array([[0.9, 0.1], [0.6, 0.4]])
    tree.grow([5, 6], (token_ids, probs))
    tree.commit([2])
    [draft] = tree.drafts(1)
    assert draft.law.token_ids.tolist() == [6, 8]
    assert draft.law.probs == pytest.approx([0.6, 0.4])


@given(chain=st.lists(token, max_size=6), limit=st.integers(0, 8))
def test_drafts_are_a_prefix_of_the_chain(chain: list[int], limit: int) -> None:
    """More drafts than allowed are handed out, or fewer than there are."""
    tree = SpeculationTree(1)
    tree.hang(1, [], [], [])
    for draft in chain:
        tree.grow([draft], None)
    assert chain_of(tree, limit) == chain[:limit]
