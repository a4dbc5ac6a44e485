"""Sparse laws as dense rows, and subtracted in place, against their twins."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.kernels.sparse_q import dense_rows, subtract_laws

from .examples import few_examples


def random_laws(seed: int, drafts: int, entries: int, vocab_size: int, device: torch.device):
    """Ids without repetition, some of them padding; probabilities, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    entries = min(entries, vocab_size)
    ids = torch.rand(drafts, vocab_size, generator=generator).argsort(dim=1)[:, :entries].to(torch.int32)
    probs = torch.rand(drafts, entries, generator=generator)
    ids[torch.rand(drafts, entries, generator=generator) < 0.2] = -1
    probs[torch.rand(drafts, entries, generator=generator) < 0.2] = 0.0
    return ids.to(device), probs.to(device)


@few_examples
@given(
    seed=st.integers(0, 1000),
    drafts=st.integers(0, 4),
    entries=st.integers(1, 9),
    vocab_size=st.sampled_from((1, 7, 64, 1500)),
    wide=st.booleans(),
)
def test_the_kernels_equal_their_twins(device, seed, drafts, entries, vocab_size, wide) -> None:
    """An entry is lost, lands elsewhere, or something else of the row changes."""
    ids, probs = random_laws(seed, drafts, entries, vocab_size, device)
    target = torch.rand(drafts, vocab_size + 3 * wide, device=device)[:, :vocab_size]
    target[:, ::3] = 0.1
    dense = dense_rows(ids, probs, torch.full_like(target, torch.nan), backend="triton")
    assert torch.equal(dense, dense_rows(ids, probs, torch.full_like(target, torch.nan), backend="torch"))
    residual = subtract_laws(target.clone(), ids, probs, backend="triton")
    torch.testing.assert_close(residual, (target - dense).clamp(min=0.0))
    torch.testing.assert_close(subtract_laws(target.clone(), ids, probs, backend="torch"), residual)


@pytest.mark.parametrize("backend", ("triton", "torch"))
def test_an_id_that_occurs_twice_gets_the_sum(device: torch.device, backend: str) -> None:
    """One of the two is lost."""
    ids = torch.tensor([[2, 2, 5]], dtype=torch.int32, device=device)
    dense = dense_rows(
        ids, torch.tensor([[0.25, 0.5, 1.0]], device=device), torch.empty(1, 4, device=device), backend=backend
    )
    assert dense.tolist() == [[0.0, 0.0, 0.75, 0.0]]


@pytest.mark.parametrize(
    ("ids", "probs", "out", "message"),
    (
        (torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2, 9), "token_ids is int64"),
        (torch.zeros(2, 3).int(), torch.zeros(3, 2).T, torch.zeros(2, 9), "probs has strides"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 4), torch.zeros(2, 9), "probs has shape"),
        (torch.zeros(3, 3).int(), torch.zeros(3, 3), torch.zeros(2, 9), "token_ids has shape"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 3), torch.zeros(9, 2).T, "last dimension must be dense"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 3), torch.zeros(9).expand(2, 9), "must not share memory"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 3), torch.zeros(10).as_strided((2, 9), (1, 1)), "not share memory"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 3), torch.zeros(2, 9).half(), "is float16"),
        (torch.zeros(2, 0).int(), torch.zeros(2, 0), torch.zeros(2, 9), "0 entries"),
        (torch.zeros(2, 3).int(), torch.zeros(2, 3), torch.zeros(2, 0), "of length 0"),
    ),
)
def test_wrong_inputs_are_refused(ids, probs, out, message: str) -> None:
    """A wrong stride or dtype writes into foreign memory."""
    with pytest.raises(ValueError, match=message):
        dense_rows(ids, probs, out)
    with pytest.raises(ValueError, match=message):
        subtract_laws(out, ids, probs)
