"""The most probable tokens of each row of logits: the part that `fork` and `draw` share.

A candidate is one int64 key: its logit, mapped so that keys are ordered as logits are, above its
token id, complemented. The order is therefore total: higher logits first, and among equal ones
the lower token id. NaN counts as -inf (impossible), and 0.0 equals -0.0. The selection is a
tournament: every program keeps the best of one block, until one block is left.

Shapes: R rows, V vocabulary, N keys, M candidates that are kept (a power of two).
"""

import torch
import triton
import triton.language as tl

from vllm_ssd.kernels.launch import power_of_two

NO_TOKEN = -1
_BLOCK = 4096  # elements that one program sorts


@triton.jit
def keys_of(logits, token_ids, possible):
    """float32 logits and int32 token ids → int64 keys; the least key where not `possible`."""
    logits = tl.where(logits != logits, float("-inf"), logits)
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - token_ids.to(tl.int64))
    return tl.where(possible, keys, -(2**63))


@triton.jit
def candidates_of(keys):
    """The inverse of `keys_of`: float32 logits and int32 token ids, -inf and -1 for the least key."""
    ordered = (keys >> 32).to(tl.int32)
    logits = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    token_ids = (0xFFFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32)
    known = keys != -(2**63)
    return tl.where(known, logits, float("-inf")), tl.where(known, token_ids, -1)


@triton.jit
def _first_kernel(logits, excluded, keys, vocab_size, stride, num_blocks, BLOCK: tl.constexpr, M: tl.constexpr):
    """Block `program_id(1)` of a row of logits → its M best keys."""
    row, block = tl.program_id(0), tl.program_id(1)
    token_ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < vocab_size
    values = tl.load(logits + row.to(tl.int64) * stride + token_ids, mask=inside, other=0.0).to(tl.float32)
    possible = inside & (token_ids != tl.load(excluded + row))
    best = tl.topk(keys_of(values, token_ids, possible), M)
    tl.store(keys + (row.to(tl.int64) * num_blocks + block) * M + tl.arange(0, M), best)


@triton.jit
def _next_kernel(keys, best, num_keys, num_blocks, BLOCK: tl.constexpr, M: tl.constexpr):
    """Block `program_id(1)` of a row of keys → its M best keys."""
    row, block = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(keys + row.to(tl.int64) * num_keys + place, mask=place < num_keys, other=-(2**63))
    tl.store(best + (row.to(tl.int64) * num_blocks + block) * M + tl.arange(0, M), tl.topk(mine, M))


def kept_of(count: int) -> int:
    """Candidates that each block keeps: a power of two, and not 1, which Triton 3.6 does not sort for."""
    return power_of_two(count, 2)


def best_keys(
    logits: torch.Tensor, excluded: torch.Tensor, vocab_size: int, count: int, block: int | None = None
) -> torch.Tensor:
    """Keys among which are the `count` best of each row: [R, N] int64, N at most a block.

    `logits`: [R, padded vocabulary]; `excluded`: [R] int32, -1 for none. `block`: elements one
    program sorts, a power of two above twice `count`.
    """
    rows, kept = logits.shape[0], kept_of(count)
    block = max(block or min(_BLOCK, power_of_two(vocab_size)), 2 * kept)
    blocks = triton.cdiv(vocab_size, block)
    keys = torch.empty(rows, blocks * kept, dtype=torch.int64, device=logits.device)
    warps = 8 if block >= 2048 else 4
    _first_kernel[(rows, blocks)](
        logits, excluded, keys, vocab_size, logits.stride(0), blocks, BLOCK=block, M=kept, num_warps=warps
    )
    while keys.shape[1] > block:
        blocks = triton.cdiv(keys.shape[1], block)
        best = torch.empty(rows, blocks * kept, dtype=torch.int64, device=logits.device)
        _next_kernel[(rows, blocks)](keys, best, keys.shape[1], blocks, BLOCK=block, M=kept, num_warps=warps)
        keys = best
    return keys


def best_tokens_torch(
    logits: torch.Tensor, excluded: torch.Tensor, vocab_size: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin: logits [R, count] float32 and token ids [R, count] int32, best first; -inf and -1 beyond."""
    values = logits[:, :vocab_size].float()
    values = torch.where(values.isnan(), -torch.inf, values)
    values, token_ids = torch.sort(values, dim=-1, descending=True, stable=True)
    # The excluded token goes to the end; the order of the others stays.
    own = token_ids == excluded[:, None]
    order = torch.sort(own.to(torch.int8), dim=-1, stable=True).indices
    values = values.masked_fill(own, -torch.inf).gather(1, order)
    token_ids = token_ids.masked_fill(own, NO_TOKEN).gather(1, order)
    missing = max(count - vocab_size, 0)
    values = torch.nn.functional.pad(values[:, :count], (0, missing), value=-torch.inf)
    token_ids = torch.nn.functional.pad(token_ids[:, :count], (0, missing), value=NO_TOKEN)
    return values, token_ids.to(torch.int32)
