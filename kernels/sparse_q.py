"""The sparse laws of drafts at the target: as dense rows, or straight into the residual (p − q)+.

A draft's law has at most m entries. vLLM's rejection sampler reads dense rows; the residual needs
none: only m entries of a row of p change, the others stay p.

Shapes: T drafts, m entries a law, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from vllm_ssd.kernels.launch import check_rows_apart, check_tensor, power_of_two, runs_kernel

_BLOCK = 1024  # columns of one program


@triton.jit(do_not_specialize=["m"])  # which changes from step to step
def _dense_kernel(token_ids, probs, out, m, vocab_size, out_stride, BLOCK: tl.constexpr):
    """One block of columns of one row: every column looks for itself among the m entries."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    law = tl.zeros((BLOCK,), tl.float32)
    for entry in range(m):
        law += tl.where(column == tl.load(token_ids + row * m + entry), tl.load(probs + row * m + entry), 0.0)
    tl.store(out + row * out_stride + column, law, mask=column < vocab_size)


@triton.jit
def _residual_kernel(target, token_ids, probs, m, vocab_size, stride, M: tl.constexpr):
    """p ← max(p − q, 0) at the m entries of one row."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, M)
    ids = tl.load(token_ids + row * m + entry, mask=entry < m, other=-1)
    law = tl.load(probs + row * m + entry, mask=entry < m, other=0.0)
    touched = (ids >= 0) & (ids < vocab_size) & (law > 0)
    at = target + row * stride + ids
    p = tl.load(at, mask=touched, other=0.0)
    tl.store(at, tl.maximum(p - law, 0.0), mask=touched)


def dense_rows(
    token_ids: torch.Tensor, probs: torch.Tensor, out: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Write each law as a dense row of `out`, and return it.

    `token_ids`: [T, m] int32, ids outside the vocabulary are left out; `probs`: [T, m] float32; an
    id that occurs twice gets the sum. `out`: [T, V] float32, its last dimension dense.
    Raises `ValueError` for other shapes, dtypes, strides or devices.
    """
    drafts, entries, vocab_size = _check(token_ids, probs, out, "out")
    if not runs_kernel(backend, out):
        return dense_rows_torch(token_ids, probs, out)
    if drafts:
        block = min(_BLOCK, power_of_two(vocab_size))
        grid = (drafts, triton.cdiv(vocab_size, block))
        _dense_kernel[grid](token_ids, probs, out, entries, vocab_size, out.stride(0), BLOCK=block)
    return out


def subtract_laws(
    target: torch.Tensor, token_ids: torch.Tensor, probs: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """`target` [T, V] float32 ← (target − q)+ in place, not normalised; returns it.

    As `dense_rows`, but an id with a probability above 0 must not occur twice in a row.
    """
    drafts, entries, vocab_size = _check(token_ids, probs, target, "target")
    if not runs_kernel(backend, target):
        return subtract_laws_torch(target, token_ids, probs)
    if drafts:
        _residual_kernel[(drafts,)](
            target, token_ids, probs, entries, vocab_size, target.stride(0), M=power_of_two(entries), num_warps=1
        )
    return target


def dense_rows_torch(token_ids: torch.Tensor, probs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The twin of `dense_rows`."""
    known = (token_ids >= 0) & (token_ids < out.shape[1])
    return out.zero_().scatter_add_(1, torch.where(known, token_ids, 0).long(), torch.where(known, probs, 0.0))


def subtract_laws_torch(target: torch.Tensor, token_ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """The twin of `subtract_laws`."""
    dense = dense_rows_torch(token_ids, probs, torch.empty_like(target))
    return target.copy_(torch.where(dense > 0, (target - dense).clamp(min=0.0), target))


def _check(token_ids: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor, name: str) -> tuple[int, int, int]:
    check_tensor(name, rows, (None, None), torch.float32, rows.device, contiguous=False)
    check_rows_apart(name, rows)
    if not rows.shape[1]:
        raise ValueError(f"{name} has rows of length 0; a law needs a token at least.")
    check_tensor("token_ids", token_ids, (rows.shape[0], None), torch.int32, rows.device)
    check_tensor("probs", probs, tuple(token_ids.shape), torch.float32, rows.device)
    if not 1 <= token_ids.shape[1] <= 1024:
        raise ValueError(f"token_ids holds {token_ids.shape[1]} entries a row; it must hold 1 to 1024.")
    return rows.shape[0], token_ids.shape[1], rows.shape[1]
