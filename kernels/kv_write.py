"""What stands between the projection of a layer and its attention: head norms, rotation, KV write.

One small launch takes the joint projection q|k|v of each token, normalises the query and key heads
where the model does (Qwen3), rotates them (RoPE, Su et al. 2021), leaves the queries in place and
writes keys and values to the token's slot of the pool.

Shapes: T tokens, H query heads, G key/value heads, E head size.
"""

import torch
import triton
import triton.language as tl

from vllm_ssd.kernels.launch import FLOATS, check_rows_apart, check_tensor, power_of_two, runs_kernel


@triton.jit
def _kv_write_kernel(
    qkv,
    positions,
    slots,
    table,
    norm,
    pool,
    eps,
    token_stride,
    pool_stride,
    heads,
    groups,
    NORMED: tl.constexpr,
    E: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """One head of one token; the two halves of the head are two registers' worth."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    dim = tl.arange(0, HALF_PAD)
    inside = dim < HALF
    mine = qkv + token * token_stride + head * E + dim
    low = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(mine + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < heads + groups:
        if NORMED:
            root = tl.rsqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / E + eps)
            low = low * root * tl.load(norm + head * E + dim, mask=inside, other=0.0).to(tl.float32)
            high = high * root * tl.load(norm + head * E + HALF + dim, mask=inside, other=0.0).to(tl.float32)
        # The table's sines have their first half negated: both halves are x·cos + swapped·sin.
        turn = table + tl.load(positions + token).to(tl.int64) * 2 * E + dim
        cos_low = tl.load(turn, mask=inside, other=0.0).to(tl.float32)
        cos_high = tl.load(turn + HALF, mask=inside, other=0.0).to(tl.float32)
        sin_low = tl.load(turn + E, mask=inside, other=0.0).to(tl.float32)
        sin_high = tl.load(turn + E + HALF, mask=inside, other=0.0).to(tl.float32)
        low, high = low * cos_low + high * sin_low, high * cos_high + low * sin_high
    if head < heads:
        tl.store(mine, low.to(qkv.dtype.element_ty), mask=inside)
        tl.store(mine + HALF, high.to(qkv.dtype.element_ty), mask=inside)
    else:
        there = pool + (head - heads).to(tl.int64) * pool_stride + slot * E + dim
        tl.store(there, low.to(pool.dtype.element_ty), mask=inside)
        tl.store(there + HALF, high.to(pool.dtype.element_ty), mask=inside)


def kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    pool: torch.Tensor,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    backend: str | None = None,
) -> None:
    """Rotate the queries in `qkv` in place; write rotated keys and the values to `pool`.

    `qkv`: [T, H + 2 * G, E], E even and at most 256, dense in its last two dimensions. `positions`, `slots`: [T]
    int32; a token with a negative slot is left out. `table`: [max_positions, 2, E], cosines, and sines with
    their first half negated. `pool`: [2 * G, num_slots, E], of the dtype of `qkv`. `norm`: [H + G, E]
    weights of the RMS norm of query and key heads, with `eps`; None: the model has none.

    Raises `ValueError` for other shapes, dtypes, strides or devices.
    """
    heads, groups = _check(qkv, positions, slots, table, pool, norm)
    if not runs_kernel(backend, qkv):
        return kv_write_torch(qkv, positions, slots, table, pool, norm, eps)
    tokens, size = qkv.shape[0], qkv.shape[2]
    if tokens:
        _kv_write_kernel[(tokens, heads + 2 * groups)](
            qkv,
            positions,
            slots,
            table,
            table if norm is None else norm,
            pool,
            eps,
            qkv.stride(0),
            pool.stride(0),
            heads,
            groups,
            NORMED=norm is not None,
            E=size,
            HALF=size // 2,
            HALF_PAD=power_of_two(size // 2),
            num_warps=1,
        )


def kv_write_torch(qkv, positions, slots, table, pool, norm=None, eps: float = 0.0) -> None:
    """The twin of `kv_write`, which says what it takes; it rounds once, as the kernel does."""
    groups = pool.shape[0] // 2
    rotary = qkv[:, : qkv.shape[1] - groups].float()
    if norm is not None:
        rotary = rotary * torch.rsqrt(rotary.square().mean(dim=-1, keepdim=True) + eps) * norm.float()
    written = slots >= 0
    cos, sin = table[torch.where(written, positions, 0).long()].float()[:, :, None].unbind(1)  # [T, 1, E]
    rotary = (rotary * cos + rotary.roll(qkv.shape[2] // 2, dims=-1) * sin).to(qkv.dtype)
    heads = qkv.shape[1] - 2 * groups
    qkv[:, :heads] = torch.where(written[:, None, None], rotary[:, :heads], qkv[:, :heads])
    fresh = torch.cat((rotary[:, heads:], qkv[:, heads + groups :]), dim=1)
    pool[:, slots[written].long()] = fresh[written].transpose(0, 1)


def _check(qkv, positions, slots, table, pool, norm) -> tuple[int, int]:
    """Query heads and KV heads, if everything fits together."""
    device = qkv.device
    check_tensor("qkv", qkv, (None, None, None), FLOATS, device, contiguous=False)
    tokens, all_heads, size = qkv.shape
    if size % 2 or not 2 <= size <= 256:
        raise ValueError(f"qkv has head size {size}; it must be even and at most 256.")
    if tokens and qkv.stride(1) != size:
        raise ValueError(f"qkv has strides {qkv.stride()}; its heads must lie one after the other.")
    check_rows_apart("qkv", qkv)
    check_tensor("positions", positions, (tokens,), torch.int32, device)
    check_tensor("slots", slots, (tokens,), torch.int32, device)
    check_tensor("table", table, (None, 2, size), FLOATS, device)
    check_tensor("pool", pool, (None, None, size), qkv.dtype, device)
    groups = pool.shape[0] // 2
    heads = all_heads - 2 * groups
    if pool.shape[0] % 2 or groups == 0 or heads < groups or heads % groups:
        raise ValueError(f"qkv has {all_heads} heads, which does not fit the {pool.shape[0]} of pool.")
    if norm is not None:
        check_tensor("norm", norm, (heads + groups, size), FLOATS, device)
    return heads, groups
