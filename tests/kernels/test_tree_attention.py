"""Tree attention against its twin, and the twin against plain attention."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.kernels.tree_attention import tree_attention
from vllm_ssd.kernels.tree_layout import Tree, Workspace, row_blocks, rows_per_block

from .examples import few_examples

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
NUM_SLOTS = 512


def random_tree(seed: int, rows_of: list[int], longest: int, depth: int, per_block: int, device: torch.device) -> Tree:
    """A row of each kind may come: with and without trunk and tail, in sequences of `rows_of` rows."""
    generator = np.random.default_rng(seed)
    rows = sum(rows_of)
    sequences = np.repeat(np.arange(len(rows_of), dtype=np.int32), rows_of)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.integers(0, high, shape).astype(np.int32)).to(device)

    return Tree(
        trunk_slots=integers(NUM_SLOTS, max(len(rows_of), 1), longest),
        row_sequence=torch.from_numpy(sequences).to(device),
        trunk_lengths=integers(longest + 1, rows),
        tail_slots=integers(NUM_SLOTS, rows, depth),
        tail_lengths=integers(depth + 1, rows),
        blocks=torch.from_numpy(row_blocks(sequences, per_block)).to(device),
        per_block=per_block,
    )


def random_inputs(seed: int, rows: int, heads: int, groups: int, size: int, dtype: torch.dtype, device: torch.device):
    generator = torch.Generator().manual_seed(seed)
    # As a layer has them: a part of its joint projection.
    queries = torch.randn(rows, heads + 2 * groups, size, generator=generator).to(device, dtype)[:, :heads]
    return queries, torch.randn(2 * groups, NUM_SLOTS, size, generator=generator).to(device, dtype)


@few_examples
@given(
    seed=st.integers(0, 1000),
    rows_of=st.lists(st.integers(0, 5), max_size=3),
    longest=st.sampled_from((1, 5, 64, 150)),
    depth=st.integers(0, 5),
    heads=st.sampled_from(((1, 1), (4, 2), (7, 1), (6, 3))),
    size=st.sampled_from((32, 64, 80, 96, 128, 256)),
    splits=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
    shared=st.booleans(),
)
def test_the_kernel_equals_its_twin(device, seed, rows_of, longest, depth, heads, size, splits, dtype, shared) -> None:
    """Some shape, dtype, split or sharing gives another mix than the formula."""
    heads, groups = heads
    per_block = rows_per_block(heads // groups, max(rows_of, default=1)) if shared else 1
    tree = random_tree(seed, rows_of, longest, depth, per_block, device)
    rows = len(tree.row_sequence)
    queries, pool = random_inputs(seed, rows, heads, groups, size, dtype, device)
    workspace = Workspace.empty(rows + 1, heads, splits, size, device)
    workspace.mixed.fill_(torch.nan)  # what was never written must not matter
    workspace.sums.fill_(torch.nan)
    mixed = tree_attention(queries, pool, tree, size**-0.5, workspace, backend="triton")
    expected = tree_attention(queries, pool, tree, size**-0.5, backend="torch")
    torch.testing.assert_close(mixed, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_unused_blocks_and_rows_beyond_them_give_zeros(device: torch.device) -> None:
    """A graph's padding reads memory that nobody wrote."""
    tree = random_tree(0, [3], 20, 2, 4, device)
    blocks = torch.cat((tree.blocks, torch.zeros(2, 2, dtype=torch.int32, device=device)))
    lengths = torch.tensor([20, 3, 0], dtype=torch.int32, device=device)
    tails = torch.tensor([2, 0, 0], dtype=torch.int32, device=device)
    tree = dataclasses.replace(tree, blocks=blocks, trunk_lengths=lengths, tail_lengths=tails)
    queries, pool = random_inputs(0, 3, 4, 2, 32, torch.float32, device)
    mixed = tree_attention(queries, pool, tree, 1.0, backend="triton")
    assert torch.equal(mixed[2], torch.zeros_like(mixed[2]))
    torch.testing.assert_close(mixed, tree_attention(queries, pool, tree, 1.0, backend="torch"))


def test_the_twin_is_softmax_over_the_slots_named(device: torch.device) -> None:
    """The oracle itself is wrong, or the NaN of another sequence's overflow gets in."""
    tree = random_tree(1, [2, 1], 9, 3, 1, device)
    queries, pool = random_inputs(1, 3, 4, 2, 16, torch.float32, device)
    parts = ((tree.trunk_slots[tree.row_sequence.long()], tree.trunk_lengths), (tree.tail_slots, tree.tail_lengths))
    named = {
        slot for slots, counts in parts for row, count in zip(slots.tolist(), counts.tolist()) for slot in row[:count]
    }
    others = [slot for slot in range(NUM_SLOTS) if slot not in named]
    assert 0 in others  # what padding names
    pool[:, others] = torch.nan
    mixed = tree_attention(queries, pool, tree, 0.25, backend="torch")
    for row in range(3):
        sequence = int(tree.row_sequence[row])
        trunk = tree.trunk_slots[sequence, : int(tree.trunk_lengths[row])]
        slots = torch.cat((trunk, tree.tail_slots[row, : int(tree.tail_lengths[row])])).long()
        for head in range(4):
            keys, values = pool[head // 2, slots], pool[2 + head // 2, slots]
            expected = torch.softmax(keys @ queries[row, head] * 0.25, dim=0) @ values
            torch.testing.assert_close(mixed[row, head], expected)


@pytest.mark.parametrize(("context", "splits"), ((1, 16), (8192, 4), (131_072, 16)))
def test_long_contexts_are_split_and_merged(device: torch.device, context: int, splits: int) -> None:
    """A split of a long context is lost, or counted twice; most splits of a short one are empty."""
    generator = torch.Generator().manual_seed(context)
    integers = {"dtype": torch.int32, "device": device}
    lengths = [context, max(context // 3, 1)]
    tree = Tree(
        trunk_slots=torch.randperm(context, generator=generator).to(torch.int32)[None].to(device),
        row_sequence=torch.zeros(2, **integers),
        trunk_lengths=torch.tensor(lengths, **integers),
        tail_slots=torch.tensor([[context, context + 1]] * 2, **integers),
        tail_lengths=torch.tensor([2, 0], **integers),
        blocks=torch.tensor([[0, 2]], **integers),
        per_block=2,
    )
    queries = torch.randn(2, 2, 32, generator=generator).to(device)
    pool = torch.randn(2, context + 2, 32, generator=generator).to(device)
    workspace = Workspace.empty(2, 2, splits, 32, device)
    mixed = tree_attention(queries, pool, tree, 32**-0.5, workspace, backend="triton")
    torch.testing.assert_close(mixed, tree_attention(queries, pool, tree, 32**-0.5, backend="torch"))


def test_scores_far_apart_do_not_overflow(device: torch.device) -> None:
    """A softmax that is not kept relative to its maximum."""
    tree = random_tree(2, [2], 40, 3, 2, device)
    queries, pool = random_inputs(2, 2, 2, 1, 32, torch.float32, device)
    mixed = tree_attention(100 * queries, pool, tree, 1.0, backend="triton")
    torch.testing.assert_close(mixed, tree_attention(100 * queries, pool, tree, 1.0, backend="torch"))


def test_row_blocks_end_with_their_sequence() -> None:
    """A block with rows of two sequences reads the wrong trunk."""
    blocks = row_blocks(np.array([0, 0, 0, 2, 2, 1]), 2)
    assert blocks.tolist() == [[0, 2], [2, 1], [3, 2], [5, 1]]
    assert row_blocks(np.array([], dtype=np.int32), 2).shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"trunk_slots": torch.zeros(9, 1, dtype=torch.int32).T.expand(2, 9)}, "trunk_slots has strides"),
        ({"trunk_lengths": torch.zeros(2, dtype=torch.int64)}, "trunk_lengths is int64"),
        ({"row_sequence": torch.zeros(3, dtype=torch.int32)}, "row_sequence has shape"),
        ({"tail_slots": torch.zeros(2, 65, dtype=torch.int32)}, "at most 64"),
        ({"blocks": torch.zeros(2, 3, dtype=torch.int32)}, "blocks has shape"),
        ({"per_block": 0}, "per_block is 0"),
    ),
)
def test_a_wrong_tree_is_refused(change: dict, message: str) -> None:
    """A wrong stride or dtype reads foreign memory."""
    tree = random_tree(0, [2], 9, 3, 1, CPU)
    queries, pool = random_inputs(0, 2, 2, 1, 16, torch.float32, CPU)
    with pytest.raises(ValueError, match=message):
        tree_attention(queries, pool, dataclasses.replace(tree, **change), 1.0)


@pytest.mark.parametrize(
    ("queries", "pool", "message"),
    (
        (torch.zeros(2, 16, 2).transpose(1, 2), torch.zeros(2, 8, 16), "last dimension must be dense"),
        (torch.zeros(2, 2, 16), torch.zeros(2, 16, 8).transpose(1, 2), "pool has strides"),
        (torch.zeros(2, 2, 16), torch.zeros(2, 8, 16).half(), "pool is float16"),
        (torch.zeros(2, 2, 16), torch.zeros(3, 8, 16), "pool has 3 heads"),
        (torch.zeros(2, 3, 16), torch.zeros(4, 8, 16), "pool has 4 heads"),
        (torch.zeros(2, 2, 512), torch.zeros(2, 8, 512), "head size 512"),
        (torch.zeros(2, 2, 16).int(), torch.zeros(2, 8, 16), "queries is int32"),
    ),
)
def test_wrong_queries_or_pools_are_refused(queries: torch.Tensor, pool: torch.Tensor, message: str) -> None:
    """The same for the tensors of the model."""
    with pytest.raises(ValueError, match=message):
        tree_attention(queries, pool, random_tree(0, [2], 9, 3, 1, CPU), 1.0)


def test_a_workspace_that_is_too_small_is_refused() -> None:
    """Splits are written past its end."""
    queries, pool = random_inputs(0, 2, 2, 1, 16, torch.float32, CPU)
    with pytest.raises(ValueError, match="workspace holds 1 rows"):
        tree_attention(queries, pool, random_tree(0, [2], 9, 3, 1, CPU), 1.0, Workspace.empty(1, 2, 2, 16, CPU))
    with pytest.raises(ValueError, match="at least one split"):
        tree_attention(queries, pool, random_tree(0, [2], 9, 3, 1, CPU), 1.0, Workspace.empty(2, 2, 0, 16, CPU))
    with pytest.raises(ValueError, match="backend is 'cuda'"):
        tree_attention(queries, pool, random_tree(0, [2], 9, 3, 1, CPU), 1.0, backend="cuda")
