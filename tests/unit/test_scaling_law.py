"""The laws of SDSL: published values, limits, fits that find what they were given, nonsense refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.sdsl import scaling_law
from vllm_ssd.sdsl.scaling_law import CHINCHILLA, PUBLISHED_ACCEPTANCE, AcceptanceLaw, LossLaw

# ---- published values ----


@pytest.mark.parametrize(
    ("target", "best"),
    [(7e9, 106e6), (13e9, 122e6), (32e9, 174e6), (70e9, 277e6), (110e9, 385e6), (405e9, 1.18e9)],
)
def test_linear_rule_gives_the_published_sizes(target: float, best: float) -> None:
    found = scaling_law.linear_rule(target)
    assert found.value == pytest.approx(best, rel=0.005)
    assert found.low < best < found.high


@pytest.mark.parametrize(
    ("draft", "target", "alpha"), [(20.0, 10.0, 0.6377), (10.0, 5.0, 0.63985), (40.0, 8.0, 0.47776)]
)
def test_acceptance_from_given_perplexities(draft: float, target: float, alpha: float) -> None:
    assert PUBLISHED_ACCEPTANCE(draft, target) == pytest.approx(alpha, abs=1e-9)


@pytest.mark.parametrize(("target", "tokens", "best"), [(13e9, 180e9, 117e6), (30e9, 180e9, 189e6)])
def test_numerical_optimum_meets_the_papers_for_opt(target: float, tokens: float, best: float) -> None:
    """OPT models were trained on 180B tokens; their optima stand in the paper's fifth table."""
    assert scaling_law.optimal_draft_size(target, tokens, tokens) == pytest.approx(best, rel=0.10)


@pytest.mark.parametrize("target", [13e9, 32e9, 70e9, 110e9])
def test_numerical_optimum_is_near_the_linear_rule(target: float) -> None:
    rule = scaling_law.linear_rule(target).value
    assert scaling_law.optimal_draft_size(target, 2e12, 2e12) == pytest.approx(rule, rel=0.20)


def test_data_hardly_moves_the_optimum() -> None:
    sizes = [scaling_law.optimal_draft_size(70e9, tokens, 2e12) for tokens in (1e12, 4e12, 16e12)]
    assert sizes == sorted(sizes, reverse=True)  # better trained drafts may be smaller ...
    assert sizes[0] < 1.2 * sizes[-1]  # ... a little


# ---- throughput and γ ----

ALPHAS = st.floats(0.01, 0.98)
RATIOS = st.floats(1e-4, 0.9)


@given(ALPHAS, RATIOS)
def test_optimal_gamma_is_the_peak_of_a_grid(alpha: float, ratio: float) -> None:
    closed = scaling_law.optimal_gamma(alpha, ratio, 1.0)
    best = scaling_law.throughput(alpha, closed, ratio, 1.0)
    grid = np.linspace(0.0, 3 * closed + 10.0, 500)
    assert max(scaling_law.throughput(alpha, gamma, ratio, 1.0) for gamma in grid) <= best * (1 + 1e-9)


@given(ALPHAS, RATIOS)
def test_best_whole_gamma_beats_every_other(alpha: float, ratio: float) -> None:
    rates = [scaling_law.throughput(alpha, gamma, ratio, 1.0) for gamma in range(60)]
    found = scaling_law.throughput(alpha, scaling_law.best_gamma(alpha, ratio, 1.0), ratio, 1.0)
    assert found >= max(rates) * (1 - 1e-12)


def test_lambert_and_iteration_meet_where_one_takes_over_from_the_other() -> None:
    rate = -math.log(0.5)
    above, below = rate / (701.0 + rate - 1.0), rate / (699.0 + rate - 1.0)  # e^(-701) and e^(-699)
    difference = scaling_law.optimal_gamma(0.5, above, 1.0) - scaling_law.optimal_gamma(0.5, below, 1.0)
    assert abs(difference) < 0.01


def test_limits_of_the_throughput() -> None:
    assert scaling_law.throughput(0.0, 5, 1.0, 10.0) == pytest.approx(1 / 1.5)  # all drafts refused
    assert scaling_law.throughput(1 - 1e-9, 5, 1e-9, 1.0) == pytest.approx(6.0)  # all accepted, for nothing
    assert scaling_law.throughput(0.7, 0, 1.0, 10.0) == 1.0  # no drafts


def test_limits_of_gamma() -> None:
    assert scaling_law.optimal_gamma(0.0, 1.0, 100.0) == 0.0
    assert scaling_law.optimal_gamma(1e-12, 1.0, 2.0) == 0.0
    assert scaling_law.optimal_gamma(1 - 1e-6, 1.0, 100.0) > 1000
    assert scaling_law.optimal_gamma(0.9, 5.0, 5.0) == 0.0  # a draft as large as the target never pays
    assert scaling_law.best_gamma(0.9, 5.0, 5.0) == 0


# ---- fits ----


def test_acceptance_fit_finds_the_law_it_was_given() -> None:
    draws = np.random.default_rng(0)
    x, y = draws.uniform(8, 40, 60), draws.uniform(5, 15, 60)
    alpha = -0.006 * x + 0.012 * y + 0.6 + draws.normal(0, 0.01, 60)
    fit = scaling_law.fit_acceptance(x, y, alpha)
    for interval, truth in ((fit.draft, -0.006), (fit.target, 0.012), (fit.constant, 0.6)):
        assert interval.low < truth < interval.high
        assert interval.high - interval.low < 0.05
    assert fit.r_squared > 0.95
    assert fit.mean_squared_error == pytest.approx(1e-4, rel=0.5)
    assert fit.law(20.0, 10.0) == pytest.approx(0.6, abs=0.01)


def test_intervals_hold_the_truth_nineteen_times_of_twenty() -> None:
    draws = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        x = draws.uniform(8, 40, 8)
        fit = scaling_law.fit_acceptance(x, [9.0] * 8, 0.7 - 0.006 * x + draws.normal(0, 0.02, 8))
        held += fit.draft.low < -0.006 < fit.draft.high
    assert 0.92 < held / 400 < 0.98


def test_one_target_leaves_its_term_in_the_constant() -> None:
    fit = scaling_law.fit_acceptance([10, 20, 30, 40], [9, 9, 9, 9], [0.7, 0.6, 0.5, 0.4])
    assert fit.target is None and fit.law.target == 0.0
    assert fit.draft.value == pytest.approx(-0.01) and fit.constant.value == pytest.approx(0.8)
    assert fit.r_squared == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("x", "y", "alpha", "problem"),
    [
        ([10, 20], [9, 9], [0.7, 0.6], "measure more"),
        ([10, 10, 10, 10], [9, 9, 9, 9], [0.7, 0.6, 0.5, 0.5], "same perplexity"),
        ([10, 20, 30, 40], [5, 10, 15, 20], [0.7, 0.6, 0.5, 0.5], "move together"),
        ([0.5, 20, 30], [9, 9, 9], [0.7, 0.6, 0.5], "perplexity"),
        ([10, 20, 30], [9, 9, 9], [0.7, 1.6, 0.5], "outside"),
        ([10, 20, 30], [9, 9], [0.7, 0.6, 0.5], "2 target"),
    ],
)
def test_fits_that_cannot_be_are_refused(x, y, alpha, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        scaling_law.fit_acceptance(x, y, alpha)


def test_loss_fit_predicts_a_size_it_has_not_seen() -> None:
    truth = LossLaw(2.0, 60.0, 0.3, 0.0, 1.0)
    sizes = [3e5, 6e5, 1.2e6, 2.5e6, 5e6]
    law, r_squared = scaling_law.fit_loss(sizes, [1e6] * 5, [truth.loss(n, 1e6) for n in sizes])
    assert r_squared > 0.999
    assert law.loss(1e7, 1e6) == pytest.approx(truth.loss(1e7, 1e6), rel=0.01)


def test_loss_fit_separates_size_and_data() -> None:
    pairs = [(n, d) for n in (1e8, 4e8, 1.6e9, 6.4e9) for d in (2e9, 2e10, 2e11)]
    losses = [CHINCHILLA.loss(*pair) for pair in pairs]
    law, r_squared = scaling_law.fit_loss([n for n, _ in pairs], [d for _, d in pairs], losses)
    assert r_squared > 0.999
    assert law.loss(3e9, 6e10) == pytest.approx(CHINCHILLA.loss(3e9, 6e10), rel=0.005)


def test_loss_fit_needs_as_many_sizes_as_constants() -> None:
    with pytest.raises(ValueError, match="measure more"):
        scaling_law.fit_loss([1e6, 2e6], [1e6, 1e6], [3.0, 2.9])


def test_chinchilla_loses_with_size_and_data() -> None:
    assert CHINCHILLA.loss(1e9, 1e11) > CHINCHILLA.loss(1e10, 1e11) > CHINCHILLA.loss(1e10, 1e12) > 1.69
    assert CHINCHILLA.perplexity(1e9, 1e11) == pytest.approx(math.exp(CHINCHILLA.loss(1e9, 1e11)))


# ---- nonsense ----


def test_predicted_acceptance_stays_a_probability() -> None:
    assert PUBLISHED_ACCEPTANCE(1000.0, 5.0) == 0.0
    assert AcceptanceLaw(-0.01, 0.0, 1.2)(2.0, 2.0) == 0.999
    with pytest.raises(ValueError, match="perplexity of the target"):
        PUBLISHED_ACCEPTANCE(10.0, 0.9)
    with pytest.raises(ValueError, match="perplexity of the draft"):
        PUBLISHED_ACCEPTANCE(math.nan, 5.0)


@pytest.mark.parametrize("alpha", [-0.1, 1.0, 1.5, math.nan])
def test_acceptance_outside_its_range_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="acceptance"):
        scaling_law.throughput(alpha, 4, 1.0, 10.0)
    with pytest.raises(ValueError, match="acceptance"):
        scaling_law.optimal_gamma(alpha, 1.0, 10.0)


@pytest.mark.parametrize("size", [-7e9, 0.0, math.inf, math.nan])
def test_sizes_not_above_zero_are_refused(size: float) -> None:
    for call in (
        lambda: scaling_law.linear_rule(size),
        lambda: scaling_law.throughput(0.5, 4, size, 1.0),
        lambda: scaling_law.optimal_gamma(0.5, 1.0, size),
        lambda: scaling_law.optimal_draft_size(size, 1e12, 1e12),
        lambda: CHINCHILLA.loss(1e9, size),
    ):
        with pytest.raises(ValueError, match="above 0"):
            call()
