"""Attention of a token tree over the slot pool.

A row (one query token) attends to a prefix of its sequence's slots, the trunk, and to a tail of its
own: the tokens of its branch. Glue and prefill rows have no tail, and a prefix that ends with
themselves; branches of one sequence share its trunk.

The trunk is cut into splits (flash decoding, Dao et al. 2023), and rows of one sequence that are
adjacent share a block: each program reads its part of the trunk once for all rows of its block and
all query heads of its KV head. A second launch adds the tail and merges the splits by their running
maximum and sum (online softmax, Milakov and Gimelshein 2018).

Shapes: R rows, H query heads, G key/value heads (G divides H), E head size, S sequences, L longest
trunk, D longest tail.
"""

import torch
import triton
import triton.language as tl

from vllm_ssd.kernels.launch import FLOATS, check_tensor, power_of_two, runs_kernel
from vllm_ssd.kernels.tree_layout import Tree, Workspace

_LOG2_E = 1.4426950408889634


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    """a · b, summed in float32. Triton's interpreter multiplies bfloat16 right only as float32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _trunk_kernel(
    queries,
    pool,
    trunk_slots,
    row_sequence,
    trunk_lengths,
    blocks,
    mixed,
    sums,
    scale,
    query_stride,
    head_stride,
    pool_stride,
    trunk_stride,
    groups,
    HEADS: tl.constexpr,  # query heads of a KV head
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    M: tl.constexpr,  # queries times heads of a block, padded
    N: tl.constexpr,  # slots of a tile
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One block, KV head and split."""
    block, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    if count == 0:
        return
    place = tl.arange(0, M)
    live = place // HEADS < count
    row = (first + place // HEADS).to(tl.int64)
    head = group * HEADS + place % HEADS
    lengths = tl.load(trunk_lengths + row, mask=live, other=0)
    longest = tl.max(lengths, axis=0)
    span = tl.cdiv(tl.cdiv(longest, SPLITS), N) * N
    begin = split * span
    end = tl.minimum(begin + span, longest)

    dim = tl.arange(0, E_PAD)
    inside = dim < E
    at = row[:, None] * query_stride + head[:, None] * head_stride + dim[None, :]
    query = tl.load(queries + at, mask=live[:, None] & inside[None, :], other=0.0)
    slots = trunk_slots + tl.load(row_sequence + first).to(tl.int64) * trunk_stride
    keys = pool + group.to(tl.int64) * pool_stride
    values = pool + (group + groups).to(tl.int64) * pool_stride

    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    mix = tl.zeros((M, E_PAD), tl.float32)
    for start in range(begin, end, N):
        column = start + tl.arange(0, N)
        known = column < end
        slot = tl.load(slots + column, mask=known, other=0).to(tl.int64)
        key = tl.load(keys + slot[None, :] * E + dim[:, None], mask=known[None, :] & inside[:, None], other=0.0)
        score = _dot(query, key, UPCAST) * scale
        score = tl.where((column[None, :] < lengths[:, None]) & known[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(top - base)
        value = tl.load(values + slot[:, None] * E + dim[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        mix = mix * fade[:, None] + _dot(weight.to(value.dtype), value, UPCAST)
        total = total * fade + tl.sum(weight, axis=1)
        top = higher

    part = (row * groups * HEADS + head) * SPLITS + split
    tl.store(mixed + part[:, None] * E + dim[None, :], mix, mask=live[:, None] & inside[None, :])
    tl.store(sums + 2 * part, top, mask=live)
    tl.store(sums + 2 * part + 1, total, mask=live)


@triton.jit
def _tail_kernel(
    queries,
    pool,
    trunk_lengths,
    tail_slots,
    tail_lengths,
    mixed,
    sums,
    out,
    scale,
    query_stride,
    head_stride,
    pool_stride,
    tail_stride,
    groups,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    M: tl.constexpr,  # heads of a group, padded
    N: tl.constexpr,  # slots of a tail, padded
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One row and KV head: its tail, then the merge with the splits of its trunk."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, dim, column = tl.arange(0, M), tl.arange(0, E_PAD), tl.arange(0, N)
    live, inside = place < HEADS, dim < E
    head = group * HEADS + place
    at = row * query_stride + head[:, None] * head_stride + dim[None, :]
    query = tl.load(queries + at, mask=live[:, None] & inside[None, :], other=0.0)
    known = column < tl.load(tail_lengths + row)
    slot = tl.load(tail_slots + row * tail_stride + column, mask=known, other=0).to(tl.int64)
    keys = pool + group.to(tl.int64) * pool_stride
    values = pool + (group + groups).to(tl.int64) * pool_stride

    key = tl.load(keys + slot[None, :] * E + dim[:, None], mask=known[None, :] & inside[:, None], other=0.0)
    score = tl.where(known[None, :], _dot(query, key, UPCAST) * scale, float("-inf"))
    top = tl.max(score, axis=1)
    weight = tl.exp2(score - tl.where(top == float("-inf"), 0.0, top)[:, None])
    value = tl.load(values + slot[:, None] * E + dim[None, :], mask=known[:, None] & inside[None, :], other=0.0)
    mix = _dot(weight.to(value.dtype), value, UPCAST)
    total = tl.sum(weight, axis=1)

    # A row without a trunk may be in no block: nobody wrote its parts.
    written = place < tl.where(tl.load(trunk_lengths + row) > 0, HEADS, 0)
    for split in range(SPLITS):
        part = (row * groups * HEADS + head) * SPLITS + split
        its_top = tl.load(sums + 2 * part, mask=written, other=float("-inf"))
        its_total = tl.load(sums + 2 * part + 1, mask=written, other=0.0)
        its_mix = tl.load(mixed + part[:, None] * E + dim[None, :], mask=written[:, None] & inside[None, :], other=0.0)
        higher = tl.maximum(top, its_top)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, its_fade = tl.exp2(top - base), tl.exp2(its_top - base)
        mix = mix * fade[:, None] + its_mix * its_fade[:, None]
        total = total * fade + its_total * its_fade
        top = higher

    mix = mix / tl.where(total == 0, 1.0, total)[:, None]
    at = (row * groups * HEADS + head[:, None]) * E + dim[None, :]
    tl.store(out + at, mix.to(out.dtype.element_ty), mask=live[:, None] & inside[None, :])


def tree_attention(
    queries: torch.Tensor,
    pool: torch.Tensor,
    tree: Tree,
    scale: float,
    workspace: Workspace | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(q · kᵀ · scale) · v of each row over its trunk and its tail: [R, H, E], contiguous.

    `queries`: [R, H, E] float16, bfloat16 or float32, its last dimension dense. `pool`: [2 * G, num_slots, E] of
    the same dtype, keys of all KV heads and then values, contiguous. Slots that the lengths name
    must lie in the pool; the others are not read, nor is what no row of a block attends to. (What another row of
    it does attend to must be finite: a NaN there reaches all of them.) `workspace` says into how many splits a
    trunk is cut (one without it). Rows with a trunk must be in exactly one block.

    Raises `ValueError` for other shapes, dtypes, strides or devices.
    """
    groups, head_size = _check(queries, pool, tree, workspace)
    if not runs_kernel(backend, queries):
        return tree_attention_torch(queries, pool, tree, scale)
    rows, heads, _ = queries.shape
    out = torch.empty(rows, heads, head_size, dtype=queries.dtype, device=queries.device)
    if rows == 0:
        return out
    if workspace is None:
        workspace = Workspace.empty(rows, heads, 1, head_size, queries.device)
    per_group, splits = heads // groups, workspace.sums.shape[2]
    fixed = {
        "HEADS": per_group,
        "E": head_size,
        "E_PAD": power_of_two(head_size, 32),
        "SPLITS": splits,
        "UPCAST": not isinstance(_trunk_kernel, triton.JITFunction),
    }
    if len(tree.blocks):
        _trunk_kernel[(len(tree.blocks), groups, splits)](
            queries,
            pool,
            tree.trunk_slots,
            tree.row_sequence,
            tree.trunk_lengths,
            tree.blocks,
            workspace.mixed,
            workspace.sums,
            scale * _LOG2_E,
            queries.stride(0),
            queries.stride(1),
            pool.stride(0),
            tree.trunk_slots.stride(0),
            groups,
            M=power_of_two(per_group * tree.per_block, 16),
            N=_tile_columns(head_size, queries.dtype),
            num_warps=8 if head_size > 128 else 4,
            num_stages=2 if head_size > 128 or queries.dtype == torch.float32 else 3,
            **fixed,
        )
    _tail_kernel[(rows, groups)](
        queries,
        pool,
        tree.trunk_lengths,
        tree.tail_slots,
        tree.tail_lengths,
        workspace.mixed,
        workspace.sums,
        out,
        scale * _LOG2_E,
        queries.stride(0),
        queries.stride(1),
        pool.stride(0),
        tree.tail_slots.stride(0),
        groups,
        M=power_of_two(per_group, 16),
        N=power_of_two(tree.tail_slots.shape[1], 16),
        num_warps=4,
        **fixed,
    )
    return out


def _tile_columns(head_size: int, dtype: torch.dtype) -> int:
    """Slots of a tile: its keys and values of several stages must fit the shared memory."""
    return max(16, 64 >> (head_size > 128) >> (dtype == torch.float32))


def tree_attention_torch(queries: torch.Tensor, pool: torch.Tensor, tree: Tree, scale: float) -> torch.Tensor:
    """The twin of `tree_attention`, in float32, which says what it takes and returns."""
    rows, heads, head_size = queries.shape
    groups = pool.shape[0] // 2
    device = queries.device
    width = min(int(tree.trunk_lengths.max()), tree.trunk_slots.shape[1]) if rows else 0
    trunk = tree.trunk_slots[tree.row_sequence.long(), :width]  # [R, width]
    slots = torch.cat((trunk, tree.tail_slots), dim=1)
    attends = torch.cat(
        (
            torch.arange(width, device=device) < tree.trunk_lengths[:, None],
            torch.arange(tree.tail_slots.shape[1], device=device) < tree.tail_lengths[:, None],
        ),
        dim=1,
    )  # [R, width + D]
    slots = torch.where(attends, slots, 0).long()
    keys, values = pool.view(2, groups, -1, head_size).unbind(0)
    query = queries.float().reshape(rows, groups, heads // groups, head_size)
    score = torch.einsum("rghe,grce->rghc", query, keys[:, slots].float()) * scale
    score = score.masked_fill(~attends[:, None, None], torch.finfo(torch.float32).min)
    weight = score.softmax(dim=-1).masked_fill(~attends[:, None, None], 0.0)
    read = values[:, slots].float().masked_fill(~attends[..., None], 0.0)  # what is not attended to may be NaN
    return torch.einsum("rghc,grce->rghe", weight, read).reshape(rows, heads, head_size).to(queries.dtype)


def _check(queries: torch.Tensor, pool: torch.Tensor, tree: Tree, workspace: Workspace | None) -> tuple[int, int]:
    """KV heads and head size, if everything fits together."""
    device = queries.device
    check_tensor("queries", queries, (None, None, None), FLOATS, device, contiguous=False)
    rows, heads, head_size = queries.shape
    check_tensor("pool", pool, (None, None, head_size), queries.dtype, device)
    groups = pool.shape[0] // 2
    if pool.shape[0] % 2 or groups == 0 or heads % groups:
        raise ValueError(f"pool has {pool.shape[0]} heads; it must have twice a divisor of the {heads} query heads.")
    if not 1 <= head_size <= 256:
        raise ValueError(f"queries have head size {head_size}; it must be from 1 to 256.")
    check_tensor("trunk_slots", tree.trunk_slots, (None, None), torch.int32, device)
    check_tensor("row_sequence", tree.row_sequence, (rows,), torch.int32, device)
    check_tensor("trunk_lengths", tree.trunk_lengths, (rows,), torch.int32, device)
    check_tensor("tail_slots", tree.tail_slots, (rows, None), torch.int32, device)
    check_tensor("tail_lengths", tree.tail_lengths, (rows,), torch.int32, device)
    check_tensor("blocks", tree.blocks, (None, 2), torch.int32, device)
    if tree.per_block < 1:
        raise ValueError(f"per_block is {tree.per_block}; it must be the most rows of a block, at least 1.")
    if tree.tail_slots.shape[1] > 64:
        raise ValueError(f"tail_slots holds {tree.tail_slots.shape[1]} slots a row; it must hold at most 64.")
    if workspace is not None:
        check_tensor("workspace.sums", workspace.sums, (None, heads, None, 2), torch.float32, device)
        splits = workspace.sums.shape[2]
        if not splits:
            raise ValueError("workspace.sums has 0 splits; it must hold at least one split.")
        check_tensor("workspace.mixed", workspace.mixed, (None, heads, splits, head_size), torch.float32, device)
        if (held := min(len(workspace.sums), len(workspace.mixed))) < rows:
            raise ValueError(f"workspace holds {held} rows; it must hold at least {rows}.")
    return groups, head_size
