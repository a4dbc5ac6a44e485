"""The next token of each branch: drawn from σ_{F,C}, cut to its top m, or the argmax of greedy rows.

σ_{F,C} (Saguaro sampling, arXiv 2603.03251): the F most probable tokens of the draft are
multiplied by C ≤ 1 and the law is renormalised. The law written here, m pairs a row, is the very
one the token was drawn from: the verifier uses these numbers.

A draw inverts the law's running sum at a uniform number of Philox 4x32-10 (Salmon et al., SC'11)
whose key is the row's seed and whose counter is the row's `counter`: the same row draws the same
number whatever else is in the launch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_ssd.kernels.fork import check_logits
from vllm_ssd.kernels.launch import check_tensor, power_of_two, runs_kernel
from vllm_ssd.kernels.selection import NO_TOKEN, best_keys, best_tokens_torch, candidates_of, kept_of

_LARGEST_LOGIT = 3.4028234663852886e38  # infinite logits give a law too, not NaN; a row without others a uniform one


class Drawn(NamedTuple):
    """What a draw gives, for R rows."""

    tokens: torch.Tensor  # [R] int32
    q: torch.Tensor  # [R] float32, the token's own probability
    token_ids: torch.Tensor  # [R, m] int32, best first; -1 where the vocabulary ends
    probs: torch.Tensor  # [R, m] float32, each row sums to 1
    values: torch.Tensor  # [R, m] float32, the logits of token_ids


class Laws(NamedTuple):
    """How each of R rows draws."""

    temperature: torch.Tensor  # [R] float32; 0: argmax
    top_k: torch.Tensor  # [R] int32; 0 is off
    top_p: torch.Tensor  # [R] float32; 1 is off
    fan_out: torch.Tensor  # [R] int32, F of the row's position
    saguaro_c: torch.Tensor  # [R] float32, C in (0, 1]; 1 is off
    seed: torch.Tensor  # [R] int64
    counter: torch.Tensor  # [R] int32


@triton.jit
def _draw_kernel(
    keys,
    temperature,
    top_k,
    top_p,
    fan_out,
    saguaro_c,
    seed,
    counter,
    tokens,
    q,
    token_ids,
    probs,
    values,
    num_keys,
    width,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """The last round of the tournament of one row, its law, and the draw from it."""
    row = tl.program_id(0)
    place = tl.arange(0, N)
    mine = tl.load(keys + row.to(tl.int64) * num_keys + place, mask=place < num_keys, other=-(2**63))
    logits, ids = candidates_of(tl.topk(mine, M))
    rank = tl.arange(0, M)
    known = (rank < width) & (ids >= 0)

    heat = tl.load(temperature + row)
    cut = tl.load(top_k + row)
    law = tl.clamp(logits / tl.where(heat > 0, heat, 1.0), -3.4028234663852886e38, 3.4028234663852886e38)
    law = tl.where(known & ((cut <= 0) | (rank < cut)), law, float("-inf"))
    law = tl.exp(law - tl.max(law, axis=0))
    law = law / tl.sum(law, axis=0)
    before = tl.cumsum(law, axis=0) - law
    law = tl.where(before > tl.load(top_p + row), 0.0, law)
    # σ_{F,C}(v) ∝ C·q(v) for the F most probable v, q(v) for the others.
    law = tl.where(rank < tl.load(fan_out + row), law * tl.load(saguaro_c + row), law)
    law = law / tl.sum(law, axis=0)
    law = tl.where(heat > 0, law, tl.where(rank == 0, 1.0, 0.0))

    # The first rank whose running sum is above u, among those with a probability.
    u = tl.rand(tl.load(seed + row), tl.load(counter + row))
    below = (tl.cumsum(law, axis=0) <= u) & (rank < width)
    chosen = tl.sum(below.to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, tl.max(tl.where(law > 0, rank, 0), axis=0))
    picked = rank == chosen
    tl.store(tokens + row, tl.sum(tl.where(picked, ids, 0), axis=0))
    tl.store(q + row, tl.sum(tl.where(picked, law, 0.0), axis=0))
    at = row.to(tl.int64) * width + rank
    tl.store(token_ids + at, ids, mask=rank < width)
    tl.store(probs + at, law, mask=rank < width)
    tl.store(values + at, logits, mask=rank < width)


def draw(
    logits: torch.Tensor,
    laws: Laws,
    top_m: int,
    vocab_size: int | None = None,
    *,
    backend: str | None = None,
    block: int | None = None,
) -> Drawn:
    """Draw one token for each row.

    `logits`: [R, padded vocabulary] float16, bfloat16 or float32, its last dimension dense; ids from
    `vocab_size` (default: all are real) on are never drawn. NaN logits count as -inf.
    Raises `ValueError` for other shapes, dtypes, strides or devices.
    """
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    check_logits(logits, vocab_size)
    rows, device = logits.shape[0], logits.device
    dtypes = Laws(torch.float32, torch.int32, torch.float32, torch.int32, torch.float32, torch.int64, torch.int32)
    for name, tensor, dtype in zip(Laws._fields, laws, dtypes):
        check_tensor(name, tensor, (rows,), dtype, device)
    if not 1 <= top_m <= 1024:
        raise ValueError(f"top_m is {top_m}; it must be from 1 to 1024.")
    if not runs_kernel(backend, logits):
        return draw_torch(logits, laws, top_m, vocab_size)
    drawn = _empty(rows, top_m, device)
    if rows:
        keys = best_keys(
            logits, torch.full((rows,), NO_TOKEN, dtype=torch.int32, device=device), vocab_size, top_m, block
        )
        size = kept_of(top_m)
        count = keys.shape[1]
        _draw_kernel[(rows,)](keys, *laws, *drawn, count, top_m, N=power_of_two(count, size), M=size)
    return drawn


def _empty(rows: int, top_m: int, device: torch.device) -> Drawn:
    integers = {"dtype": torch.int32, "device": device}
    floats = {"dtype": torch.float32, "device": device}
    return Drawn(
        tokens=torch.empty(rows, **integers),
        q=torch.empty(rows, **floats),
        token_ids=torch.empty(rows, top_m, **integers),
        probs=torch.empty(rows, top_m, **floats),
        values=torch.empty(rows, top_m, **floats),
    )


def draw_torch(logits: torch.Tensor, laws: Laws, top_m: int, vocab_size: int) -> Drawn:
    """The twin of `draw`, which says what it takes and returns."""
    excluded = torch.full((logits.shape[0],), NO_TOKEN, dtype=torch.int32, device=logits.device)
    values, token_ids = best_tokens_torch(logits, excluded, vocab_size, top_m)
    ranks = torch.arange(top_m, device=logits.device)
    heat, greedy = laws.temperature[:, None], ~(laws.temperature > 0)
    top_k = laws.top_k[:, None]
    possible = (token_ids >= 0) & ((top_k <= 0) | (ranks < top_k))
    scaled = (values / torch.where(heat > 0, heat, 1.0)).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
    probs = torch.softmax(scaled.masked_fill(~possible, -torch.inf), dim=-1)
    before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(before > laws.top_p[:, None], 0.0)
    probs = torch.where(ranks < laws.fan_out[:, None], probs * laws.saguaro_c[:, None], probs)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    probs = torch.where(greedy[:, None], (ranks == 0).float(), probs)

    chosen = (probs.cumsum(dim=-1) <= uniform(laws.seed, laws.counter)[:, None]).sum(dim=-1)
    last = torch.where(probs > 0, ranks, 0).amax(dim=-1)
    chosen = torch.minimum(chosen, last)[:, None]
    return Drawn(token_ids.gather(1, chosen)[:, 0], probs.gather(1, chosen)[:, 0], token_ids, probs, values)


def uniform(seed: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """The number in [0, 1) that Triton's `tl.rand` gives: Philox 4x32-10. seed [R] int64, counter [R] int32."""
    low = 0xFFFFFFFF
    key0, key1 = seed & low, (seed >> 32) & low
    c0 = counter.to(torch.int64) & low
    c1, c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # [R], modulo 2^64
        c0, c2 = ((second >> 32) & low) ^ c1 ^ key0, ((first >> 32) & low) ^ c3 ^ key1
        c1, c3 = second & low, first & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    signed = torch.where(c0 >= 2**31, c0 - 2**32, c0)
    return torch.where(signed < 0, -signed - 1, signed).to(torch.float32) * 4.6566127342e-10
