"""The walk on the device against its twin, and the twin against `vllm_ssd.tree`."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.kernels.tree_walk import IN_TRUNK, MISSED, Trees, tree_walk
from vllm_ssd.tree import SpeculationTree

from .examples import few_examples

CPU = torch.device("cpu")


def random_trees(seed: int, longest: int, chains: int, depth: int, entries: int, device: torch.device) -> Trees:
    """Three trees over two tokens, so that many walks stay inside."""
    generator = np.random.default_rng(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.integers(low, high, shape).astype(np.int32)).to(device)

    def floats(*shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.random(shape, dtype=np.float32)).to(device)

    return Trees(
        trunk=integers(0, 2, 3, longest),
        trunk_lengths=integers(0, longest + 1, 3),
        trunk_law_ids=integers(0, 99, 3, longest, entries),
        trunk_law_probs=floats(3, longest, entries),
        offsets=integers(-1, longest + 1, 3, chains),
        chains=integers(0, 2, 3, chains, depth),
        chain_lengths=integers(0, depth + 1, 3, chains),
        law_ids=integers(0, 99, 3, chains, depth, entries),
        law_probs=floats(3, chains, depth, entries),
    )


def rows_of(seed: int, rows: int, most: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """row_tree, emitted, emitted_lengths, limits."""
    generator = np.random.default_rng(seed + 1)
    shapes = ((-1, 3, (rows,)), (0, 2, (rows, most)), (0, most + 1, (rows,)), (-1, 7, (rows,)))
    return tuple(torch.from_numpy(generator.integers(*s).astype(np.int32)).to(device) for s in shapes)


@few_examples
@given(
    seed=st.integers(0, 10_000),
    longest=st.integers(0, 4),
    chains=st.integers(0, 6),
    depth=st.integers(1, 5),
    entries=st.integers(1, 5),
    rows=st.integers(0, 6),
    most=st.integers(1, 6),
)
def test_the_kernel_equals_its_twin(device, seed, longest, chains, depth, entries, rows, most) -> None:
    """A walk ends elsewhere, or its drafts or laws are those of another place."""
    trees = random_trees(seed, longest, chains, depth, entries, device)
    arguments = rows_of(seed, rows, most, device)
    kernel = tree_walk(trees, *arguments, 4, backend="triton")
    for mine, expected in zip(kernel, tree_walk(trees, *arguments, 4, backend="torch")):
        assert torch.equal(mine, expected)


def test_rows_without_a_tree_read_none(device: torch.device) -> None:
    """The lengths of a tree that is not there are read past the end of an empty tensor."""
    none = Trees(*(tensor[:0] for tensor in dataclasses.astuple(random_trees(0, 2, 2, 2, 2, device))))
    _, *row = rows_of(0, 2, 3, device)
    walked = tree_walk(none, torch.full((2,), -1, dtype=torch.int32, device=device), *row, 4, backend="triton")
    assert walked.branch.tolist() == [-1, -1] and walked.counts.tolist() == [0, 0]


def test_the_twin_walks_as_the_speculation_tree_does() -> None:
    """The two trees of the project disagree about what a walk finds."""
    found = 0
    for seed in range(200):
        trees = random_trees(seed, 3, 5, 4, 2, CPU)
        # The host's tree knows no two chains that begin alike: keep the first of each.
        for tree in range(3):
            begun = set()
            for chain in range(5):
                start = (int(trees.offsets[tree, chain]), int(trees.chains[tree, chain, 0]))
                trunk = trees.trunk[tree, : int(trees.trunk_lengths[tree])].tolist()
                on_trunk = 0 <= start[0] < len(trunk) and start[1] == trunk[start[0]]
                if start in begun or on_trunk or start[0] > len(trunk) or not trees.chain_lengths[tree, chain]:
                    trees.offsets[tree, chain] = -1
                begun.add(start)
        arguments = rows_of(seed, 6, 5, CPU)
        walked = tree_walk(trees, *arguments, 4, backend="torch")
        for row, (tree, count) in enumerate(zip(arguments[0].tolist(), arguments[2].tolist())):
            if tree < 0 or count == 0:
                assert walked.branch[row] == MISSED
                continue
            host = host_tree(trees, tree)
            stayed = host.commit(arguments[1][row, :count].tolist())
            expected = [node.token_id for node in host.drafts(min(int(arguments[3][row]), 4))]
            assert stayed == (walked.branch[row] != MISSED)
            assert walked.drafts[row, : int(walked.counts[row])].tolist() == expected
            found += len(expected)
    assert found > 100


def host_tree(trees: Trees, index: int) -> SpeculationTree:
    """The same tree as `vllm_ssd.tree` holds it."""
    tree = SpeculationTree(10)
    trunk = trees.trunk[index, : int(trees.trunk_lengths[index])].tolist()
    tree.hang(10, [], [], [])
    for token_id in trunk:
        tree.grow([token_id], None)
    chains = [c for c, offset in enumerate(trees.offsets[index].tolist()) if offset >= 0]
    for chain in chains:
        tokens = trees.chains[index, chain, : int(trees.chain_lengths[index, chain])].tolist()
        tree.hang(10, trunk, [int(trees.offsets[index, chain])], tokens[:1])
        for token_id in tokens[1:]:
            tree.grow([token_id], None)
    return tree


def test_a_walk_inside_the_trunk_hands_out_the_rest_of_it(device: torch.device) -> None:
    """Drafts that the scheduler cut are lost, or come with the laws of others."""
    trees = random_trees(5, 4, 2, 3, 2, device)
    trees.trunk[0] = torch.tensor([1, 0, 1, 1], device=device)
    trees.trunk_lengths[0] = 4
    row = (torch.tensor([v], dtype=torch.int32, device=device) for v in (0, [1, 0, 0], 2, 9))
    walked = tree_walk(trees, *row, 3, backend="triton")
    assert walked.branch.tolist() == [IN_TRUNK]
    assert walked.counts.tolist() == [2]
    assert walked.drafts.tolist() == [[1, 1, 0]]
    assert torch.equal(walked.law_ids[0, :2], trees.trunk_law_ids[0, 2:])
    assert walked.law_ids[0, 2].tolist() == [-1, -1]
    assert walked.law_probs[0, 2].tolist() == [0.0, 0.0]


def test_wrong_inputs_are_refused() -> None:
    """A wrong stride or dtype reads foreign memory."""
    trees, arguments = random_trees(0, 2, 3, 3, 2, CPU), rows_of(0, 2, 3, CPU)
    wrong = dataclasses.replace(trees, offsets=trees.offsets.T.contiguous().T)
    with pytest.raises(ValueError, match="offsets has strides"):
        tree_walk(wrong, *arguments, 2)
    with pytest.raises(ValueError, match="chains is int64"):
        tree_walk(dataclasses.replace(trees, chains=trees.chains.long()), *arguments, 2)
    with pytest.raises(ValueError, match="law_probs has shape"):
        tree_walk(dataclasses.replace(trees, law_probs=trees.law_probs[:, :2]), *arguments, 2)
    with pytest.raises(ValueError, match="emitted has shape"):
        tree_walk(trees, arguments[0], arguments[1][:1], *arguments[2:], 2)
    with pytest.raises(ValueError, match="max_drafts is 0"):
        tree_walk(trees, *arguments, 0)
