"""The fork: the most probable next tokens of each row, one token left out, a count for each row.

At row j of a trunk the candidates are bets on where the verification stops: the trunk's own next
token is none of them (were it right, the verification would go on).
"""

import torch
import triton
import triton.language as tl

from vllm_ssd.kernels.launch import FLOATS, check_tensor, power_of_two, runs_kernel
from vllm_ssd.kernels.selection import NO_TOKEN, best_keys, best_tokens_torch, candidates_of, kept_of


@triton.jit
def _fork_kernel(keys, counts, values, token_ids, num_keys, width, N: tl.constexpr, M: tl.constexpr):
    """The last round of the tournament of one row, cut to the row's count."""
    row = tl.program_id(0)
    place = tl.arange(0, N)
    mine = tl.load(keys + row.to(tl.int64) * num_keys + place, mask=place < num_keys, other=-(2**63))
    best_values, best_ids = candidates_of(tl.topk(mine, M))
    rank = tl.arange(0, M)
    taken = rank < tl.load(counts + row)
    at = row.to(tl.int64) * width + rank
    tl.store(values + at, tl.where(taken, best_values, float("-inf")), mask=rank < width)
    tl.store(token_ids + at, tl.where(taken, best_ids, -1), mask=rank < width)


def fork(
    logits: torch.Tensor,
    excluded: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    vocab_size: int | None = None,
    *,
    backend: str | None = None,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `counts[r]` most probable tokens of row r, best first; equal logits by the lower token id.

    `logits`: [R, padded vocabulary] float16, bfloat16 or float32, its last dimension dense; ids from
    `vocab_size` (default: all are real) on are padding. `excluded`: [R] int32, a token id or -1.
    `counts`: [R] int32, at most `width` (more counts as `width`: they stay on the device). NaN logits count as -inf.

    Returns logits [R, width] float32 and token ids [R, width] int32; -inf and -1 beyond the count,
    and where the vocabulary ends. Raises `ValueError` for other shapes, dtypes, strides or devices.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    check_logits(logits, vocab_size)
    rows = logits.shape[0]
    check_tensor("excluded", excluded, (rows,), torch.int32, logits.device)
    check_tensor("counts", counts, (rows,), torch.int32, logits.device)
    if not 1 <= width <= 4096:
        raise ValueError(f"width is {width}; it must be from 1 to 4096.")
    if not runs_kernel(backend, logits):
        return fork_torch(logits, excluded, counts, width, vocab_size)
    values = torch.empty(rows, width, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(rows, width, dtype=torch.int32, device=logits.device)
    if rows:
        keys = best_keys(logits, excluded, vocab_size, width, block)
        size = kept_of(width)
        _fork_kernel[(rows,)](
            keys, counts, values, token_ids, keys.shape[1], width, N=power_of_two(keys.shape[1], size), M=size
        )
    return values, token_ids


def fork_torch(
    logits: torch.Tensor, excluded: torch.Tensor, counts: torch.Tensor, width: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `fork`, which says what it takes and returns."""
    values, token_ids = best_tokens_torch(logits, excluded, vocab_size, width)
    beyond = torch.arange(width, device=logits.device) >= counts[:, None]
    return values.masked_fill(beyond, -torch.inf), token_ids.masked_fill(beyond, NO_TOKEN)


def check_logits(logits: torch.Tensor, vocab_size: int) -> None:
    """Raise `ValueError` unless these are rows of logits over a vocabulary that the kernels take."""
    check_tensor("logits", logits, (None, None), FLOATS, logits.device, contiguous=False)
    if not 1 <= vocab_size <= logits.shape[1]:
        raise ValueError(f"vocab_size is {vocab_size}; it must be from 1 to {logits.shape[1]}, the width of logits.")
