"""The fork against its twin, and the twin against the order it promises."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.kernels.fork import fork

from .examples import few_examples

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def logits_with_ties(seed: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Few different values, so that ties are common; some NaN, infinities and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-6, 6, (rows, width), generator=generator).to(dtype) / 4
    logits[torch.rand(rows, width, generator=generator) < 0.1] = torch.nan
    logits[torch.rand(rows, width, generator=generator) < 0.05] = -torch.inf
    logits[torch.rand(rows, width, generator=generator) < 0.02] = torch.inf
    logits[torch.rand(rows, width, generator=generator) < 0.1] = -0.0
    return logits.to(device)


@few_examples
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 3),
    vocab_size=st.sampled_from((1, 3, 31, 64, 100)),
    padding=st.sampled_from((0, 7)),
    width=st.sampled_from((1, 3, 8)),
    dtype=st.sampled_from(DTYPES),
)
def test_the_kernel_equals_its_twin(device, seed, rows, vocab_size, padding, width, dtype) -> None:
    """Ties, NaN, padding, counts or the excluded token are taken otherwise; small blocks make three rounds."""
    generator = torch.Generator().manual_seed(seed)
    logits = logits_with_ties(seed, rows, vocab_size + padding, dtype, device)
    excluded = torch.randint(-1, vocab_size, (rows,), generator=generator, dtype=torch.int32).to(device)
    counts = torch.randint(0, width + 1, (rows,), generator=generator, dtype=torch.int32).to(device)
    kernel = fork(logits, excluded, counts, width, vocab_size, backend="triton", block=16)
    twin = fork(logits, excluded, counts, width, vocab_size, backend="torch")
    for mine, expected in zip(kernel, twin):
        assert torch.equal(mine, expected)


def test_the_twin_is_the_order_promised(device: torch.device) -> None:
    """The oracle itself is wrong."""
    logits = logits_with_ties(3, 4, 50, torch.float32, device)
    excluded = torch.tensor([-1, 0, 7, 49], dtype=torch.int32, device=device)
    counts = torch.tensor([60, 10, 0, 60], dtype=torch.int32, device=device)
    values, token_ids = fork(logits, excluded, counts, 60, 48, backend="torch")
    for row in range(4):
        known = [-math.inf if math.isnan(v) else v for v in logits[row, :48].tolist()]
        order = sorted((i for i in range(48) if i != int(excluded[row])), key=lambda i: (-known[i], i))
        order = order[: int(counts[row])]
        assert token_ids[row].tolist() == order + [-1] * (60 - len(order))
        assert values[row].tolist() == [known[i] for i in order] + [-math.inf] * (60 - len(order))


def test_a_vocabulary_of_many_blocks(device: torch.device) -> None:
    """The best tokens of the last block, or of a block that is not full, are lost."""
    logits = torch.zeros(1, 1500, device=device)
    logits[0, [0, 511, 512, 1499]] = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device)
    none, all_of_them = (torch.tensor([n], dtype=torch.int32, device=device) for n in (-1, 4))
    _, token_ids = fork(logits, none, all_of_them, 4, backend="triton", block=512)
    assert token_ids.tolist() == [[1499, 512, 511, 0]]


def test_the_largest_vocabularies(device: torch.device) -> None:
    """Ids of more than 16 bits are lost, or the tournament ends a round too early."""
    rows, widths = (5, (1, 33, 1024)) if device.type == "cuda" else (1, (4,))  # half a minute in the interpreter
    logits = torch.randn(rows, 262_144, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:, [65_536, 262_143]] = 9.0  # above all others, and equal
    excluded = torch.full((rows,), 65_536, dtype=torch.int32, device=device)
    counts = torch.full((rows,), max(widths), dtype=torch.int32, device=device)
    for width in widths:
        kernel = fork(logits, excluded, counts, width, backend="triton")
        for mine, expected in zip(kernel, fork(logits, excluded, counts, width, backend="torch")):
            assert torch.equal(mine, expected)
        assert kernel[1][:, 0].tolist() == [262_143] * rows


@pytest.mark.parametrize(
    ("logits", "excluded", "counts", "width", "vocab_size", "message"),
    (
        (torch.zeros(9, 2).T, None, None, 1, 9, "last dimension must be dense"),
        (torch.zeros(2, 9).double(), None, None, 1, 9, "logits is float64"),
        (torch.zeros(2, 9), torch.zeros(2).long(), None, 1, 9, "excluded is int64"),
        (torch.zeros(2, 9), None, torch.zeros(4, dtype=torch.int32)[::2], 1, 9, "counts has strides"),
        (torch.zeros(2, 9), None, None, 0, 9, "width is 0"),
        (torch.zeros(2, 9), None, None, 1, 10, "vocab_size is 10"),
        (torch.zeros(9), None, None, 1, 9, "logits has shape"),
    ),
)
def test_wrong_inputs_are_refused(logits, excluded, counts, width, vocab_size, message: str) -> None:
    """A wrong stride or dtype reads foreign memory."""
    fine = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        fork(logits, fine if excluded is None else excluded, fine if counts is None else counts, width, vocab_size)
