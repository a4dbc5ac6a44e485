"""The walk down the speculation tree on the device: emitted tokens → branch → drafts and their laws.

A tree is a trunk (the drafts that were in flight) and chains that leave it: chain b hangs below the
first `offsets[b]` tokens of the trunk. An outcome is a walk: along the trunk as far as the emitted
tokens agree with it, then down the chain that has the others. What lies below is the next draft.
The trees of vllm_ssd/tree.py, as arrays, for drafts that never touch the host.

Shapes: S trees, K longest trunk, B chains a tree, D longest chain, m entries a law, R rows, A most
emitted tokens, P most drafts to hand out.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_ssd.kernels.launch import check_tensor, power_of_two, runs_kernel

MISSED = -1
IN_TRUNK = -2


@dataclass(frozen=True)
class Trees:
    """Trees of S sequences. int32 but for the probabilities; all contiguous."""

    trunk: torch.Tensor  # [S, K]
    trunk_lengths: torch.Tensor  # [S]
    trunk_law_ids: torch.Tensor  # [S, K, m], what the trunk's tokens were drawn from
    trunk_law_probs: torch.Tensor  # [S, K, m] float32
    offsets: torch.Tensor  # [S, B], trunk tokens above the chain; -1: no chain
    chains: torch.Tensor  # [S, B, D]; the first token is the bet, the others are drafts
    chain_lengths: torch.Tensor  # [S, B], tokens that are built
    law_ids: torch.Tensor  # [S, B, D, m]; those of the bet are not used
    law_probs: torch.Tensor  # [S, B, D, m] float32


class Walked(NamedTuple):
    """What lies below each outcome."""

    branch: torch.Tensor  # [R] int32: chain; MISSED, or IN_TRUNK if the walk ended inside the trunk
    counts: torch.Tensor  # [R] int32, number of drafts
    drafts: torch.Tensor  # [R, P] int32, 0 beyond the count (never -1: they may index an embedding)
    law_ids: torch.Tensor  # [R, P, m] int32, -1 beyond the count
    law_probs: torch.Tensor  # [R, P, m] float32, 0 beyond the count


@triton.jit
def _walk_kernel(
    trunk,
    trunk_lengths,
    trunk_law_ids,
    trunk_law_probs,
    offsets,
    chains,
    chain_lengths,
    law_ids,
    law_probs,
    row_tree,
    emitted,
    emitted_lengths,
    limits,
    branch_out,
    counts_out,
    drafts_out,
    law_ids_out,
    law_probs_out,
    K,
    B,
    D,
    m,
    A,
    P,
    K_PAD: tl.constexpr,
    B_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    tree = tl.load(row_tree + row).to(tl.int64)
    count = tl.load(emitted_lengths + row)
    walks = (tree >= 0) & (count > 0)
    tree = tl.maximum(tree, 0)
    emitted += row * A

    # Along the trunk: the first place where it differs from what was emitted, or ends.
    place = tl.arange(0, K_PAD)
    trunk_length = tl.load(trunk_lengths + tree, mask=walks, other=0)
    within = (place < trunk_length) & (place < count) & (place < K)
    same = tl.load(trunk + tree * K + place, mask=within, other=-1) == tl.load(emitted + place, mask=within, other=-2)
    agreed = tl.min(tl.where(within & same, K_PAD, place), axis=0)
    in_trunk = walks & (agreed >= count)

    # Down the chain that has the rest.
    chain = tl.arange(0, B_PAD)
    real = chain < tl.where(walks, B, 0)
    lengths = tl.load(chain_lengths + tree * B + chain, mask=real, other=0)
    deep = count - agreed
    fits = real & (tl.load(offsets + tree * B + chain, mask=real, other=-1) == agreed) & (lengths >= deep)
    for step in range(0, deep):
        token = tl.load(chains + (tree * B + chain) * D + step, mask=fits, other=-1)
        fits = fits & (token == tl.load(emitted + agreed + step))
    winner = tl.min(tl.where(fits, chain, B_PAD), axis=0)
    in_chain = walks & (agreed < count) & (winner < B_PAD)
    winner = tl.where(in_chain, winner, 0)

    # What lies below is a piece of one array or the other.
    left = tl.where(in_trunk, trunk_length - count, 0)
    left = tl.where(in_chain, tl.load(chain_lengths + tree * B + winner, mask=in_chain, other=0) - deep, left)
    left = tl.minimum(left, tl.maximum(tl.minimum(tl.load(limits + row), P), 0))
    tl.store(branch_out + row, tl.where(in_trunk, -2, tl.where(in_chain, winner, -1)))
    tl.store(counts_out + row, left)
    from_trunk = tree * K + count
    from_chain = (tree * B + winner) * D + deep
    entry = tl.arange(0, M_PAD)
    for step in range(0, P):
        taken = step < left
        a, b = taken & in_trunk, taken & in_chain
        token = tl.load(trunk + from_trunk + step, mask=a, other=0) + tl.load(
            chains + from_chain + step, mask=b, other=0
        )
        tl.store(drafts_out + row * P + step, token)
        ids_a = tl.load(trunk_law_ids + (from_trunk + step) * m + entry, mask=entry < tl.where(a, m, 0), other=-1)
        ids_b = tl.load(law_ids + (from_chain + step) * m + entry, mask=entry < tl.where(b, m, 0), other=-1)
        probs_a = tl.load(trunk_law_probs + (from_trunk + step) * m + entry, mask=entry < tl.where(a, m, 0), other=0.0)
        probs_b = tl.load(law_probs + (from_chain + step) * m + entry, mask=entry < tl.where(b, m, 0), other=0.0)
        at = (row * P + step) * m + entry
        tl.store(law_ids_out + at, tl.where(in_trunk, ids_a, ids_b), mask=entry < m)
        tl.store(law_probs_out + at, tl.where(in_trunk, probs_a, probs_b), mask=entry < m)


def tree_walk(
    trees: Trees,
    row_tree: torch.Tensor,
    emitted: torch.Tensor,
    emitted_lengths: torch.Tensor,
    limits: torch.Tensor,
    max_drafts: int,
    *,
    backend: str | None = None,
) -> Walked:
    """Walk each row down its tree; of several chains that fit, the first one is taken.

    `row_tree`: [R] int32, a tree or -1 (the row misses); `emitted`: [R, A] int32; `emitted_lengths`,
    `limits` (most drafts of the row): [R] int32. `max_drafts` is P.
    Raises `ValueError` for other shapes, dtypes, strides or devices.
    """
    rows, sizes = _check(trees, row_tree, emitted, emitted_lengths, limits, max_drafts)
    if not runs_kernel(backend, emitted):
        return tree_walk_torch(trees, row_tree, emitted, emitted_lengths, limits, max_drafts)
    entries, device = sizes[3], emitted.device
    integers = {"dtype": torch.int32, "device": device}
    walked = Walked(
        branch=torch.empty(rows, **integers),
        counts=torch.empty(rows, **integers),
        drafts=torch.empty(rows, max_drafts, **integers),
        law_ids=torch.empty(rows, max_drafts, entries, **integers),
        law_probs=torch.empty(rows, max_drafts, entries, dtype=torch.float32, device=device),
    )
    if rows:
        _walk_kernel[(rows,)](
            *_tensors(trees),
            row_tree,
            emitted,
            emitted_lengths,
            limits,
            *walked,
            *sizes,
            emitted.shape[1],
            max_drafts,
            # One place more than the trunk: where a walk that agrees with all of it leaves it.
            K_PAD=power_of_two(sizes[0] + 1),
            B_PAD=power_of_two(sizes[1]),
            M_PAD=power_of_two(entries),
            num_warps=1,
        )
    return walked


def tree_walk_torch(
    trees: Trees,
    row_tree: torch.Tensor,
    emitted: torch.Tensor,
    emitted_lengths: torch.Tensor,
    limits: torch.Tensor,
    max_drafts: int,
) -> Walked:
    """The twin of `tree_walk`: a loop over the rows, on the host."""
    entries = trees.law_ids.shape[3]
    rows = len(row_tree)
    walked = Walked(
        branch=torch.full((rows,), MISSED, dtype=torch.int32),
        counts=torch.zeros(rows, dtype=torch.int32),
        drafts=torch.zeros(rows, max_drafts, dtype=torch.int32),
        law_ids=torch.full((rows, max_drafts, entries), -1, dtype=torch.int32),
        law_probs=torch.zeros(rows, max_drafts, entries),
    )
    for row, tree in enumerate(row_tree.tolist()):
        tokens = emitted[row, : int(emitted_lengths[row])].tolist()
        if tree < 0 or not tokens:
            continue
        branch, below = _descend(trees, tree, tokens)
        walked.branch[row] = branch
        if branch == MISSED:
            continue
        count = min(len(below), max(int(limits[row]), 0), max_drafts)
        walked.counts[row] = count
        if branch == IN_TRUNK:
            drafts, ids, probs = trees.trunk[tree], trees.trunk_law_ids[tree], trees.trunk_law_probs[tree]
        else:
            drafts, ids, probs = (a[tree, branch] for a in (trees.chains, trees.law_ids, trees.law_probs))
        taken = slice(below.start, below.start + count)
        walked.drafts[row, :count] = drafts[taken]
        walked.law_ids[row, :count] = ids[taken]
        walked.law_probs[row, :count] = probs[taken]
    return Walked(*(tensor.to(emitted.device) for tensor in walked))


def _descend(trees: Trees, tree: int, tokens: list[int]) -> tuple[int, range]:
    """The chain (or IN_TRUNK, MISSED) that the tokens lead to, and the places below them."""
    trunk = trees.trunk[tree, : int(trees.trunk_lengths[tree])].tolist()
    agreed = next((j for j, (a, b) in enumerate(zip(trunk, tokens)) if a != b), min(len(trunk), len(tokens)))
    if agreed == len(tokens):
        return IN_TRUNK, range(agreed, len(trunk))
    rest = tokens[agreed:]
    for chain, (offset, length) in enumerate(zip(trees.offsets[tree].tolist(), trees.chain_lengths[tree].tolist())):
        if offset == agreed and trees.chains[tree, chain, :length].tolist()[: len(rest)] == rest:
            return chain, range(len(rest), length)
    return MISSED, range(0)


def _tensors(trees: Trees) -> tuple[torch.Tensor, ...]:
    return (
        trees.trunk,
        trees.trunk_lengths,
        trees.trunk_law_ids,
        trees.trunk_law_probs,
        trees.offsets,
        trees.chains,
        trees.chain_lengths,
        trees.law_ids,
        trees.law_probs,
    )


def _check(trees, row_tree, emitted, emitted_lengths, limits, max_drafts) -> tuple[int, tuple[int, int, int, int]]:
    """Rows, and (K, B, D, m), if everything fits together."""
    device = emitted.device
    check_tensor("law_ids", trees.law_ids, (None, None, None, None), torch.int32, device)
    size, chains, depth, entries = trees.law_ids.shape
    check_tensor("trunk", trees.trunk, (size, None), torch.int32, device)
    longest = trees.trunk.shape[1]
    check_tensor("trunk_lengths", trees.trunk_lengths, (size,), torch.int32, device)
    check_tensor("trunk_law_ids", trees.trunk_law_ids, (size, longest, entries), torch.int32, device)
    check_tensor("trunk_law_probs", trees.trunk_law_probs, (size, longest, entries), torch.float32, device)
    check_tensor("offsets", trees.offsets, (size, chains), torch.int32, device)
    check_tensor("chains", trees.chains, (size, chains, depth), torch.int32, device)
    check_tensor("chain_lengths", trees.chain_lengths, (size, chains), torch.int32, device)
    check_tensor("law_probs", trees.law_probs, (size, chains, depth, entries), torch.float32, device)
    check_tensor("row_tree", row_tree, (None,), torch.int32, device)
    rows = row_tree.shape[0]
    check_tensor("emitted", emitted, (rows, None), torch.int32, device)
    check_tensor("emitted_lengths", emitted_lengths, (rows,), torch.int32, device)
    check_tensor("limits", limits, (rows,), torch.int32, device)
    if max_drafts < 1:
        raise ValueError(f"max_drafts is {max_drafts}; it must be at least 1.")
    return rows, (longest, chains, depth, entries)
