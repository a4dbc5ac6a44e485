"""The draw against its twin, its law against `vllm_ssd.sampling`, its numbers against their distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from vllm_ssd.kernels.draw import Laws, draw, uniform
from vllm_ssd.sampling import saguaro_law, top_tokens

from .examples import few_examples


def laws_of(rows: int, seed: int, device: torch.device, greedy_share: float = 0.3) -> Laws:
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, (rows,), generator=generator, dtype=dtype).to(device)

    temperature = 0.2 + 1.5 * torch.rand(rows, generator=generator)
    temperature[torch.rand(rows, generator=generator) < greedy_share] = 0.0
    return Laws(
        temperature=temperature.to(device),
        top_k=integers(0, 6, torch.int32),
        top_p=(0.3 + 0.7 * torch.rand(rows, generator=generator)).to(device),
        fan_out=integers(0, 5, torch.int32),
        saguaro_c=(0.1 + 0.9 * torch.rand(rows, generator=generator)).to(device),
        seed=integers(-(2**62), 2**62, torch.int64),
        counter=integers(0, 2**31 - 1, torch.int32),
    )


def assert_same(kernel, twin, laws: Laws) -> None:
    """Equal, but for tokens whose uniform number falls on a border of the law within rounding."""
    assert torch.equal(kernel.token_ids, twin.token_ids)
    assert torch.equal(kernel.values, twin.values)
    torch.testing.assert_close(kernel.probs, twin.probs, atol=1e-6, rtol=1e-5)
    borders = twin.probs.cumsum(dim=1)
    close = ((borders - uniform(laws.seed, laws.counter)[:, None]).abs() < 1e-5).any(dim=1)
    assert torch.equal(kernel.tokens[~close], twin.tokens[~close])
    torch.testing.assert_close(kernel.q[~close], twin.q[~close], atol=1e-6, rtol=1e-5)


@few_examples
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(0, 4),
    vocab_size=st.sampled_from((1, 5, 60)),
    top_m=st.sampled_from((1, 4, 8)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    bad=st.booleans(),
)
def test_the_kernel_equals_its_twin(device, seed, rows, vocab_size, top_m, dtype, bad) -> None:
    """Law, draw or greedy rows differ; NaN and infinite logits included."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(rows, vocab_size + 4, generator=generator)).to(device, dtype)
    if bad:
        logits[torch.rand(logits.shape, generator=generator).to(device) < 0.5] = torch.nan
        logits[:1] = -torch.inf
        logits[1:2, :3] = torch.inf
    laws = laws_of(rows, seed, device)
    kernel = draw(logits, laws, top_m, vocab_size, backend="triton", block=16)
    assert_same(kernel, draw(logits, laws, top_m, vocab_size, backend="torch"), laws)
    torch.testing.assert_close(kernel.probs.sum(dim=1), torch.ones(rows, device=device))


@pytest.mark.parametrize(("vocab_size", "top_m", "block"), ((600, 40, 128), (3000, 64, 256), (2500, 200, 512)))
def test_a_tournament_of_several_rounds_keeps_the_best(device, vocab_size: int, top_m: int, block: int) -> None:
    """A large vocabulary or many candidates need a round between the first and the last, which loses some."""
    rows = 2
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(top_m)).to(device)
    laws = laws_of(rows, top_m, device)
    kernel = draw(logits, laws, top_m, backend="triton", block=block)
    assert_same(kernel, draw(logits, laws, top_m, backend="torch"), laws)


def test_the_largest_vocabularies(device: torch.device) -> None:
    """Ids of more than 16 bits are lost."""
    rows, top_m = (4, 64) if device.type == "cuda" else (1, 4)  # half a minute in the interpreter
    logits = 3 * torch.randn(rows, 262_144, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:, -1] = logits.amax(dim=1)  # a tie over the whole vocabulary
    laws = laws_of(rows, 0, device, greedy_share=0.0)
    kernel = draw(logits, laws, top_m, backend="triton")
    assert_same(kernel, draw(logits, laws, top_m, backend="torch"), laws)
    assert (kernel.token_ids == 262_143).any(dim=1).all()


def test_the_law_is_the_one_used_on_the_host(device: torch.device) -> None:
    """Drafts of the two paths are verified against different laws for the same request."""
    logits = 3 * torch.randn(200, 40, generator=torch.Generator().manual_seed(0)).to(device)
    laws = laws_of(200, 1, device, greedy_share=0.0)
    laws.saguaro_c.fill_(0.5)
    drawn = draw(logits, laws, 8, backend="torch")
    values, token_ids = top_tokens(logits, 8, 40)
    law = saguaro_law(values, laws.temperature, laws.top_k, laws.top_p, laws.fan_out, 0.5)
    assert torch.equal(drawn.token_ids.long(), token_ids)
    torch.testing.assert_close(drawn.probs, law)


@pytest.mark.parametrize("backend", ("torch", "triton"))
def test_tokens_come_with_the_frequency_that_the_law_says(device: torch.device, backend: str) -> None:
    """The token is not drawn from the law that is reported."""
    rows = 20_000 if backend == "torch" or device.type == "cuda" else 300
    logits = torch.tensor([[0.3, 2.0, -1.0, 1.1, 0.0, 1.0]], device=device).expand(rows, 6)
    ones, counter = torch.ones(rows, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    seed = torch.full((rows,), 12345, device=device)
    fan_out = torch.full_like(counter, 2)
    laws = Laws(ones, torch.zeros_like(counter), ones, fan_out, 0.5 * ones, seed, counter)
    drawn = draw(logits, laws, 4, backend=backend)
    law, token_ids = drawn.probs[0].cpu().double(), drawn.token_ids[0].tolist()
    counts = [(drawn.tokens == token_id).sum().item() for token_id in token_ids]
    assert sum(counts) == rows
    assert chisquare(counts, law / law.sum() * rows).pvalue > 1e-3
    reported = {token_id: prob for token_id, prob in zip(token_ids, law.tolist())}
    assert all(abs(reported[t] - q) < 1e-6 for t, q in zip(drawn.tokens.tolist(), drawn.q.tolist()))


def test_uniform_numbers_are_uniform_and_differ_between_seeds() -> None:
    """A seed or counter that makes rows draw alike, or numbers outside [0, 1)."""
    count = 20_000
    counter = torch.arange(count, dtype=torch.int32)
    numbers = uniform(torch.full((count,), 7), counter)
    assert 0 <= numbers.min() and numbers.max() < 1
    assert kstest(numbers.numpy(), "uniform").pvalue > 1e-3
    others = uniform(torch.full((count,), 8), counter)
    assert abs(torch.corrcoef(torch.stack((numbers, others)))[0, 1]) < 0.05


@pytest.mark.parametrize(
    ("change", "top_m", "message"),
    (
        ({"temperature": torch.zeros(2).double()}, 4, "temperature is float64"),
        ({"seed": torch.zeros(2, dtype=torch.int32)}, 4, "seed is int32"),
        ({"counter": torch.zeros(4, dtype=torch.int32)[::2]}, 4, "counter has strides"),
        ({"top_k": torch.zeros(3, dtype=torch.int32)}, 4, "top_k has shape"),
        ({"saguaro_c": torch.ones(2).half()}, 4, "saguaro_c is float16"),
        ({}, 2000, "top_m is 2000"),
    ),
)
def test_wrong_inputs_are_refused(change: dict, top_m: int, message: str) -> None:
    """A law of another length or dtype is read past its end."""
    laws = laws_of(2, 0, torch.device("cpu"))._replace(**change)
    with pytest.raises(ValueError, match=message):
        draw(torch.zeros(2, 9), laws, top_m)
