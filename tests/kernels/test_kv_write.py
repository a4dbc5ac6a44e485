"""Head norms, rotation and KV write against the twin, and the twin against the model's own steps."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.kernels.kv_write import kv_write

from .examples import few_examples

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
CONTEXT, NUM_SLOTS = 20, 40


def inputs(seed: int, tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype, device: torch.device):
    """qkv, positions, slots (some negative), table, pool, norm."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, heads + 2 * groups, size, generator=generator).to(dtype)
    positions = torch.randint(0, CONTEXT, (tokens,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:tokens].to(torch.int32)
    slots[1::3] = -1
    table = torch.randn(CONTEXT, 2, size, generator=generator)
    pool = torch.randn(2 * groups, NUM_SLOTS, size, generator=generator).to(dtype)
    norm = torch.randn(heads + groups, size, generator=generator).to(dtype)
    return [tensor.to(device) for tensor in (qkv, positions, slots, table, pool, norm)]


@few_examples
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(0, 5),
    heads=st.sampled_from(((1, 1), (4, 2), (7, 1))),
    size=st.sampled_from((32, 80, 96, 128, 256)),
    dtype=st.sampled_from(tuple(TOLERANCE)),
    normed=st.booleans(),
    wide=st.booleans(),
)
def test_the_kernel_equals_its_twin(device, seed, tokens, heads, size, dtype, normed, wide) -> None:
    """Rotation, norm or place of some head is wrong; or a token without a slot is written."""
    qkv, positions, slots, table, pool, norm = inputs(seed, tokens, *heads, size, dtype, device)
    results = []
    for backend in ("triton", "torch"):
        # A projection's rows may be longer than what is read of them.
        mine = torch.cat((qkv, qkv), dim=1)[:, : qkv.shape[1]] if wide else qkv.clone()
        mine_pool = pool.clone()
        kv_write(mine, positions, slots, table, mine_pool, norm if normed else None, 1e-5, backend=backend)
        results.append((mine, mine_pool))
    for kernel, twin in zip(*results):
        torch.testing.assert_close(kernel, twin, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_twin_does_what_a_layer_does(device: torch.device) -> None:
    """The oracle is wrong: norm, then rotation by halves, then keys and values side by side in the pool."""
    qkv, positions, slots, table, pool, norm = inputs(0, 4, 2, 1, 32, torch.float32, device)
    before, untouched = qkv.clone(), pool.clone()
    kv_write(qkv, positions, slots, table, pool, norm, 1e-5, backend="torch")
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.equal(qkv[token], before[token])
            continue
        cos, sin = table[positions[token].long()]
        heads = F.rms_norm(before[token, :3], (32,), None, 1e-5) * norm
        low, high = heads[:, :16], heads[:, 16:]
        turned = torch.cat((low * cos[:16] + high * sin[:16], high * cos[16:] + low * sin[16:]), dim=1)
        torch.testing.assert_close(qkv[token, :2], turned[:2])
        torch.testing.assert_close(pool[:, slot], torch.stack((turned[2], before[token, 3])))
        untouched[:, slot] = pool[:, slot]
    assert torch.equal(pool, untouched)


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    (
        (0, torch.zeros(4, 32, 4).transpose(1, 2), "qkv has strides"),
        (0, torch.zeros(4, 8, 32)[:, ::2], "heads must lie one after the other"),
        (0, torch.zeros(1, 4, 32).expand(4, 4, 32), "must not share memory"),
        (0, torch.zeros(4, 4, 33), "head size 33"),
        (0, torch.zeros(4, 2, 32), "qkv has 2 heads"),
        (1, torch.zeros(4, dtype=torch.int64), "positions is int64"),
        (2, torch.zeros(3, dtype=torch.int32), "slots has shape"),
        (3, torch.zeros(20, 1, 32), "table has shape"),
        (4, torch.zeros(2, 32, 40).transpose(1, 2), "pool has strides"),
        (5, torch.zeros(2, 32), "norm has shape"),
    ),
)
def test_wrong_inputs_are_refused(index: int, wrong: torch.Tensor, message: str) -> None:
    """A wrong stride or dtype writes into foreign memory."""
    arguments = inputs(0, 4, 2, 1, 32, torch.float32, torch.device("cpu"))
    arguments[index] = wrong
    with pytest.raises(ValueError, match=message):
        kv_write(*arguments)
