"""SpeculationTree against a naive model: a dictionary of prefixes."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ssd.messages import Growth, unpack_law
from vllm_ssd.tree import SpeculationTree

COMMITTED = (7, 7, 7)  # tokens before the tests begin
token = st.integers(0, 3)
tokens = st.lists(token, max_size=4)


class NaiveTree:
    """What was pushed, by absolute prefix; `first` holds the first draft drawn after a prefix, with its law."""

    def __init__(self) -> None:
        self.history = list(COMMITTED)
        self.known: set[tuple[int, ...]] = {COMMITTED}
        self.first: dict[tuple[int, ...], tuple[int, int, int]] = {}  # token, law, part
        self.tips: dict[int, list[tuple[int, ...]]] = {}  # by part
        self.bets: dict[tuple[int, int], tuple[list[tuple[int, ...]], int]] = {}  # by committed tokens and part
        self.planned = 0

    def hang(
        self,
        length: int,
        trunk: Sequence[int],
        offsets: Sequence[int],
        token_ids: Sequence[int],
        part: int,
        depth: int,
        drafts: Sequence[Sequence[int]],
    ) -> None:
        base = tuple(self.history[:length])
        self._know(base, trunk)
        tips = [base + tuple(trunk[:offset]) + (t,) for offset, t in zip(offsets, token_ids, strict=True)]
        self.known.update(tips)
        for tip, built in zip(tips, drafts):
            self._know(tip, built)
        self.tips[part] = [tip + tuple(built) for tip, built in zip(tips, drafts)] if drafts else list(tips)
        if not token_ids:  # for a row that waits
            self.tips[part] = [base + tuple(trunk)]
            self.first.pop(base + tuple(trunk), None)
        if tips and not drafts:
            self.bets.setdefault((length, part), (list(tips), depth))

    def grow(self, token_ids: Sequence[int], laws: Sequence[int], part: int) -> None:
        tips = self.tips.get(part, [])
        for i, drawn in enumerate(zip(token_ids, laws)):
            self.first.setdefault(tips[i], (*drawn, part))
            tips[i] += drawn[:1]
            self.known.add(tips[i])

    def commit(self, emitted: Sequence[int]) -> bool:
        path = tuple(self.history)
        stayed = all(path + tuple(emitted[: i + 1]) in self.known for i in range(len(emitted)))
        self._know(path, emitted)
        bets = [bets for (length, _), bets in self.bets.items() if length == len(path)]
        self.planned = max([0, *(depth for tips, depth in bets if path + tuple(emitted) in tips)])
        self.history.extend(emitted)
        return stayed

    def drafts(self, limit: int) -> list[tuple[int, int, int]]:
        path, chain = tuple(self.history), []
        while path in self.first and len(chain) < limit:
            chain.append(self.first[path])
            path += chain[-1][:1]
        return chain

    def _know(self, base: tuple[int, ...], more: Sequence[int]) -> None:
        self.known.update(base + tuple(more[: i + 1]) for i in range(len(more)))


def chain_of(tree: SpeculationTree, limit: int = 100) -> list[int]:
    return [node.token_id for node in tree.drafts(limit)]


def law_of(growth: Growth) -> Iterator[tuple[int, bytes, bytes]]:
    """Each token of a growth with the law that came with it."""
    for token_id, *row in zip(growth.token_ids, *unpack_law(growth.law, len(growth.token_ids))):
        yield (token_id, *(part.tobytes() for part in row))


def law(*token_ids: int) -> tuple[np.ndarray, np.ndarray]:
    """A law for one branch over these tokens, told apart by its ids."""
    return np.array([token_ids], dtype=np.int32), np.full((1, len(token_ids)), 1 / len(token_ids), dtype=np.float32)


@pytest.mark.parametrize("parts", (1, 3))
@settings(max_examples=200)
@given(data=st.data())
def test_any_order_of_events_agrees_with_the_naive_tree(parts: int, data: st.DataObject) -> None:
    """Some order of pushes and outcomes puts a draft below the wrong prefix, loses one, or mixes those of two parts."""
    tree, naive = SpeculationTree(len(COMMITTED)), NaiveTree()
    lengths = [tree.length]  # the roots that the tree still has to remember
    numbers = itertools.count()  # of laws
    for _ in range(data.draw(st.integers(1, 12))):
        part = data.draw(st.integers(0, parts - 1))
        event = data.draw(st.sampled_from(("hang", "late hang", "grow", "grow", "commit")))
        if event == "commit":
            emitted = data.draw(st.lists(token, min_size=1, max_size=4))
            assert tree.commit(emitted) == naive.commit(emitted)
            assert tree.planned == naive.planned
            lengths = [*lengths, tree.length][-8:]
        elif event == "grow":
            width = len(naive.tips.get(part, []))
            grown = data.draw(st.lists(token, min_size=width, max_size=width))
            laws = [next(numbers) for _ in grown]
            tree.grow(grown, (np.array(laws).reshape(-1, 1), np.ones((len(laws), 1))), part)
            naive.grow(grown, laws, part)
        else:
            length = tree.length if event == "hang" else data.draw(st.sampled_from(lengths))
            trunk = data.draw(tokens)
            branches = data.draw(st.lists(st.tuples(st.integers(0, len(trunk)), token), max_size=4))
            offsets, token_ids = [b[0] for b in branches], [b[1] for b in branches]
            depth = data.draw(st.integers(1, 3))
            built = data.draw(st.lists(tokens, min_size=len(token_ids), max_size=len(token_ids)) | st.just([]))
            tree.hang(length, trunk, offsets, token_ids, part, depth, built)
            naive.hang(length, trunk, offsets, token_ids, part, depth, built)
        limit = data.draw(st.integers(0, 6))
        chain = [(node.token_id, int(node.law.token_ids[0]), node.part) for node in tree.drafts(limit)]
        assert chain == naive.drafts(limit)
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


# ---- two drafts that draw after the same prefix ----

ORDERS = sorted(set(itertools.permutations((0, 0, 1, 1))))
P = {(): 0.3, (0,): 0.6, (1,): 0.1}  # the target's probability of token 1 after a prefix; of length 2 and more: 0.5
Q = ({(): 0.8, (0,): 0.2, (1,): 0.5}, {(): 0.4, (0,): 0.9, (1,): 0.7})  # the same of two drafts


def of_two(ones: dict[tuple[int, ...], float], prefix: tuple[int, ...]) -> list[float]:
    one = ones.get(prefix, 0.5)
    return [1.0 - one, one]


def emitted_law(chain: list, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """P of the first two tokens that a verification of `chain`, and what follows it, emit."""
    if len(prefix) == 2:
        return {prefix: 1.0}
    p = of_two(P, prefix)
    if not chain:
        parts = [(x, p[x], []) for x in (0, 1)]
    else:
        draft, q = chain[0].token_id, [0.0, 0.0]
        for token_id, prob in zip(chain[0].law.token_ids, chain[0].law.probs):
            q[token_id] += prob
        accept = min(1.0, p[draft] / q[draft])
        residual = [max(p[x] - q[x], 0.0) for x in (0, 1)]
        mass = sum(residual) or 1.0
        parts = [(draft, accept, chain[1:]), *((x, (1.0 - accept) * residual[x] / mass, []) for x in (0, 1))]
    law = dict.fromkeys(itertools.product((0, 1), repeat=2), 0.0)
    for token_id, weight, rest in parts:
        if weight:
            for tokens, share in emitted_law(rest, (*prefix, token_id)).items():
                law[tokens] += weight * share
    return law


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("after", range(5))
def test_two_drafts_of_one_outcome_leave_the_targets_law(order: tuple[int, ...], after: int) -> None:
    """Chains that meet are joined by what was drawn, and not by what came first: the law is the target's no more.

    All draws of both drafts, exactly; `order`: whose growth comes when; `after`: growths before the outcome.
    """
    found = dict.fromkeys(itertools.product((0, 1), repeat=2), 0.0)
    for draws in itertools.product((0, 1), repeat=4):
        tree, weight = SpeculationTree(1), 1.0
        chains = (draws[:2], draws[2:])
        for part, chain in enumerate(chains):
            tree.hang(1, [], [0], [5], part)
            for i in range(2):
                weight *= of_two(Q[part], chain[:i])[chain[i]]
        grown = [0, 0]
        for part in order[:after]:
            depth = grown[part]
            law = of_two(Q[part], chains[part][:depth])
            tree.grow([chains[part][depth]], (np.array([[0, 1]]), np.array([law])), part)
            grown[part] += 1
        tree.commit([5])
        for tokens, share in emitted_law(tree.drafts(2)).items():
            found[tokens] += weight * share
    for (first, second), share in found.items():
        assert share == pytest.approx(of_two(P, ())[first] * of_two(P, (first,))[second])
