"""The laws that drafts are drawn from, and what they are for: verification stays exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from vllm_ssd.sampling import draw, saguaro_law, top_tokens

ALPHA = 1e-4  # a fixed seed decides once whether these tests pass


def reference_law(
    logits: np.ndarray, m: int, temperature: float, top_k: int, top_p: float, fan_out: int, saguaro_c: float
) -> np.ndarray:
    """σ_{F,C} over the whole vocabulary, by loops."""
    order = np.argsort(-logits, kind="stable")[:m]
    order = order[:top_k] if top_k else order
    weights = np.exp((logits[order] - logits[order[0]]).astype(np.float64) / temperature)
    law, mass = np.zeros(len(logits)), 0.0
    for rank, p in enumerate(weights / weights.sum()):
        if mass <= top_p:
            law[order[rank]] = p * (saguaro_c if rank < fan_out else 1.0)
        mass += p
    law /= law.sum()
    return law


def law_of(
    logits: np.ndarray,
    m: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    fan_out: int = 1,
    saguaro_c: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The package's law of one row: probabilities [1, m] and token ids [1, m]."""
    values, token_ids = top_tokens(torch.from_numpy(logits)[None], m, len(logits))
    row = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "fan_out": fan_out}
    return saguaro_law(values, **{k: torch.tensor([v]) for k, v in row.items()}, saguaro_c=saguaro_c), token_ids


def spread(probs: torch.Tensor, token_ids: torch.Tensor, size: int) -> np.ndarray:
    """The law over the whole vocabulary."""
    return torch.zeros(1, size).scatter_(1, token_ids, probs)[0].double().numpy()


def some_logits(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size, scale=2.0).astype(np.float32)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 40),
    m=st.integers(1, 50),
    temperature=st.sampled_from((0.05, 0.7, 1.0, 3.0)),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1.0),
    fan_out=st.integers(0, 12),
    saguaro_c=st.floats(0.01, 1.0),
)
def test_the_law_is_the_slow_reference(
    seed: int, size: int, m: int, temperature: float, top_k: int, top_p: float, fan_out: int, saguaro_c: float
) -> None:
    """Some setting yields another law than its formula."""
    logits = some_logits(seed, size)
    probs, token_ids = law_of(logits, m, temperature, top_k, top_p, fan_out, saguaro_c)
    expected = reference_law(logits, m, temperature, top_k, top_p, fan_out, saguaro_c)
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
    assert np.allclose(spread(probs, token_ids, size), expected, atol=1e-5)


def test_rows_have_their_own_settings() -> None:
    """The settings of one request reach another row of the batch."""
    logits = torch.from_numpy(np.stack([some_logits(seed, 30) for seed in range(4)]))
    rows = {
        "temperature": [0.5, 1.0, 2.0, 1.0],
        "top_k": [0, 3, 0, 5],
        "top_p": [1, 0.9, 0.4, 1],
        "fan_out": [1, 2, 0, 9],
    }
    values, token_ids = top_tokens(logits, 16, 30)
    probs = saguaro_law(values, **{k: torch.tensor(v) for k, v in rows.items()}, saguaro_c=0.3)
    for i in range(4):
        expected = reference_law(logits[i].numpy(), 16, *(rows[k][i] for k in rows), 0.3)
        assert np.allclose(spread(probs[i : i + 1], token_ids[i : i + 1], 30), expected, atol=1e-5)


@given(fan_out=st.integers(0, 64))
def test_c_of_one_is_off(fan_out: int) -> None:
    """C = 1 changes the law."""
    logits = some_logits(3, 50)
    assert torch.equal(law_of(logits, fan_out=fan_out)[0], law_of(logits, fan_out=0)[0])


def test_lower_c_moves_mass_from_the_first_tokens_to_the_others() -> None:
    """C < 1 does not make the residual lean to the tokens that the tree holds."""
    logits = some_logits(5, 50)
    off, token_ids = law_of(logits, fan_out=4)
    on, _ = law_of(logits, fan_out=4, saguaro_c=0.3)
    assert (on[0, :4] < off[0, :4]).all()
    assert (on[0, 4:] > off[0, 4:]).all()


def test_c_with_nothing_beyond_the_first_tokens_changes_nothing() -> None:
    """Where top-k leaves only the F, all mass is scaled away."""
    logits = some_logits(5, 50)
    assert torch.allclose(law_of(logits, top_k=2, fan_out=4, saguaro_c=0.01)[0], law_of(logits, top_k=2)[0], atol=1e-6)


@given(m=st.integers(1, 12), seed=st.integers(0, 50))
def test_padding_ids_are_never_candidates(m: int, seed: int) -> None:
    """Ids past the real vocabulary, with whatever logits, are drafted."""
    logits = torch.from_numpy(some_logits(seed, 12))[None].repeat(3, 1)
    logits[:, 8:] = 1000.0
    logits[0, 9] = float("nan")
    values, token_ids = top_tokens(logits, m, vocab_size=8)
    assert token_ids.shape == values.shape == (3, min(m, 8))
    assert (token_ids < 8).all()
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("m", (1, 3, 8))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_top_tokens_come_best_first_and_nan_is_impossible(m: int, dtype: torch.dtype) -> None:
    """A NaN logit wins, or the best tokens come in another order."""
    nan = float("nan")
    logits = torch.tensor([[0.0, nan, 3.0, 1.0, 2.0, -1.0, nan, -2.0, -3.0, -4.0], [9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0]])
    values, token_ids = top_tokens(logits.to(dtype), m, 10)
    assert token_ids[0].tolist() == [2, 4, 3, 0, 5, 7, 8, 9][:m]
    assert token_ids[1].tolist() == list(range(10))[:m]
    assert values.dtype == torch.float32
    assert not torch.isnan(values).any()


def test_nan_tokens_have_no_probability() -> None:
    """A token with a NaN logit is drawn, or makes the whole law NaN."""
    logits = some_logits(1, 12)
    logits[[2, 5]] = np.nan
    probs, token_ids = law_of(logits, m=12, saguaro_c=0.5, fan_out=2)
    law = spread(probs, token_ids, 12)
    assert law.sum() == pytest.approx(1.0)
    assert law[2] == law[5] == 0.0


def test_a_row_without_any_finite_logit_still_has_a_law() -> None:
    """One row of NaN (an overflow in float16) makes `draw` raise, and ends the draft for all rows."""
    probs, _ = law_of(np.full(12, np.nan, dtype=np.float32), m=4)
    assert probs.tolist() == [[0.25] * 4]


def test_infinite_logits_have_all_probability() -> None:
    """An overflow in float16 makes the law NaN."""
    logits = some_logits(8, 12)
    logits[[2, 5]] = np.inf
    probs, token_ids = law_of(logits, m=4)
    assert spread(probs, token_ids, 12)[[2, 5]].tolist() == [0.5, 0.5]


def test_draws_follow_the_law() -> None:
    """The token does not come from the law that is sent along."""
    probs, _ = law_of(some_logits(8, 12), m=8, temperature=1.5, saguaro_c=0.5, fan_out=2)
    columns = draw(probs.repeat(20_000, 1), torch.Generator().manual_seed(0))
    expected = 20_000 * probs[0].double() / probs.double().sum()
    assert chisquare(torch.bincount(columns, minlength=8), expected).pvalue > ALPHA


def test_columns_without_probability_are_never_drawn() -> None:
    """A token that top-k or top-p cut off is drafted."""
    probs, _ = law_of(some_logits(8, 12), m=8, top_k=3)
    columns = draw(probs.repeat(5000, 1), torch.Generator().manual_seed(0))
    assert int(columns.max()) == 2


def verified(p: np.ndarray, drawn: np.ndarray, q: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Speculative verification: accept d with min(1, p/q), else draw from (p − q)+. [n] emitted tokens."""
    accepted = generator.random(len(drawn)) < np.minimum(1.0, p[drawn] / np.maximum(q[drawn], 1e-30))
    residual = np.maximum(p - q, 0.0)
    recovered = generator.choice(len(p), len(drawn), p=residual / residual.sum())
    return np.where(accepted, drawn, recovered)


def emitted_pvalue(p: np.ndarray, fan_out: int, saguaro_c: float, verify_with_c: float) -> float:
    """p-value that tokens drafted with C and verified with the law of `verify_with_c` come from p."""
    rounds, logits = 40_000, some_logits(12, 10)
    drafted, token_ids = law_of(logits, m=8, fan_out=fan_out, saguaro_c=saguaro_c)
    verifying, _ = law_of(logits, m=8, fan_out=fan_out, saguaro_c=verify_with_c)
    columns = draw(drafted.repeat(rounds, 1), torch.Generator().manual_seed(1))
    emitted = verified(p, token_ids[0, columns].numpy(), spread(verifying, token_ids, 10), np.random.default_rng(2))
    return chisquare(np.bincount(emitted, minlength=10), rounds * p).pvalue


TARGET_LAW = np.random.default_rng(4).dirichlet(np.ones(10))


@pytest.mark.parametrize("saguaro_c", (1.0, 0.5, 0.05))
@pytest.mark.parametrize("fan_out", (1, 3, 7, 8))
def test_verification_with_the_drawn_law_yields_the_target_law(fan_out: int, saguaro_c: float) -> None:
    """Speculation changes what the target says."""
    assert emitted_pvalue(TARGET_LAW, fan_out, saguaro_c, verify_with_c=saguaro_c) > ALPHA


@pytest.mark.parametrize(("saguaro_c", "verify_with_c"), ((0.3, 1.0), (1.0, 0.3)))
def test_verification_with_another_law_is_noticed(saguaro_c: float, verify_with_c: float) -> None:
    """The test above could not fail."""
    assert emitted_pvalue(TARGET_LAW, 3, saguaro_c, verify_with_c) < 1e-9
