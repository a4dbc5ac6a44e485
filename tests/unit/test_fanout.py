"""How the budget of branches is spread."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.fanout import (
    FanOut,
    Sharpness,
    apportion,
    geometric_weights,
    most_probable_outcomes,
    stop_probabilities,
)

weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=33).filter(lambda w: sum(w) > 1e-6)


@given(acceptance=st.floats(0, 1), num_drafts=st.integers(0, 32))
def test_stop_probabilities_are_a_law(acceptance: float, num_drafts: int) -> None:
    """The chances to stop at each position do not add up to 1."""
    stops = stop_probabilities(acceptance, num_drafts)
    assert len(stops) == num_drafts + 1
    assert sum(stops) == pytest.approx(1.0)
    assert stops[-1] == pytest.approx(acceptance**num_drafts)


@given(acceptance=st.floats(0.05, 0.95), num_drafts=st.integers(1, 16), exponent=st.floats(0.2, 3.0))
def test_weights_are_those_of_the_theorem(acceptance: float, num_drafts: int, exponent: float) -> None:
    """F_k is not ∝ a^(k/(1+r)) for k < K with a last position of (1-a)^(-1/(1+r)) times that."""
    found = geometric_weights(acceptance, num_drafts, exponent)
    theorem = [acceptance ** (k / (1 + exponent)) for k in range(num_drafts + 1)]
    theorem[-1] *= (1 - acceptance) ** (-1 / (1 + exponent))
    assert [f / found[0] for f in found] == pytest.approx([t / theorem[0] for t in theorem], rel=1e-6)


@pytest.mark.parametrize("acceptance", (0.0, 1.0))
def test_extreme_acceptance_starves_no_position(acceptance: float) -> None:
    """A measured acceptance of 0 or 1 leaves positions without any weight."""
    assert min(geometric_weights(acceptance, 5)) > 0


@given(weights=weights, budget=st.integers(0, 1024))
def test_apportion_splits_all_and_rounds_by_less_than_one(weights: list[float], budget: int) -> None:
    """Branches are lost or made up, or a position is off its share by a whole branch."""
    counts = apportion(weights, budget)
    assert sum(counts) == budget
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - budget * weight / sum(weights)) < 1 + 1e-6
        assert count >= 0


def test_apportion_refuses_weights_that_are_all_zero() -> None:
    """A division by zero instead of a sentence."""
    with pytest.raises(ValueError, match="above 0"):
        apportion([0.0, 0.0], 3)


@given(num_drafts=st.integers(0, 8), budget=st.integers(1, 64), acceptance=st.floats(0, 1))
@pytest.mark.parametrize("setting", ("measured", "geometric", "uniform"))
def test_named_settings_spend_the_whole_budget(setting: str, num_drafts: int, budget: int, acceptance: float) -> None:
    """A named setting builds another number of branches than it may."""
    counts = FanOut(setting).counts(num_drafts, budget, acceptance)
    assert len(counts) == num_drafts + 1
    assert sum(counts) == budget


def test_uniform_spreads_evenly() -> None:
    """`uniform` favours a position."""
    counts = FanOut("uniform").counts(4, 12, acceptance=0.9)
    assert max(counts) - min(counts) <= 1


def test_the_last_position_gets_most_at_high_acceptance() -> None:
    """The bonus position, the likeliest stop of a good draft, is starved."""
    counts = FanOut("geometric").counts(4, 24, acceptance=0.9)
    assert max(counts) == counts[-1]


def test_a_list_is_taken_as_it_is_where_it_fits() -> None:
    """The user's own counts are changed though the budget holds them."""
    assert FanOut((5, 3, 0, 1)).counts(3, 9, acceptance=0.5) == [5, 3, 0, 1]


def test_a_shorter_trunk_keeps_the_last_count_for_its_end() -> None:
    """Where fewer drafts are in flight, the end of the trunk loses the branches meant for the bonus token."""
    assert FanOut((5, 3, 2, 7)).counts(1, 24, acceptance=0.5) == [5, 7]
    assert FanOut((5, 3, 2, 7)).counts(0, 24, acceptance=0.5) == [7]
    assert FanOut((5, 3, 2, 0)).counts(1, 24, acceptance=0.5) == [5, 0]


def test_a_row_without_drafts_gets_branches_whatever_the_list_ends_with() -> None:
    """After a miss nothing is in flight: a list that ends with 0 then builds no tree, and misses for ever."""
    assert FanOut((5, 3, 2, 0)).counts(0, 24, acceptance=0.5) == [5]
    assert FanOut((0, 3, 7, 0)).counts(0, 4, acceptance=0.5) == [4]


@given(setting=st.lists(st.integers(0, 40), min_size=2, max_size=9).filter(any), budget=st.integers(1, 64))
def test_a_small_budget_scales_a_list(setting: list[int], budget: int) -> None:
    """A list asks for more branches than there is time for, or loses its proportions."""
    counts = FanOut(tuple(setting)).counts(len(setting) - 1, budget, acceptance=0.5)
    assert sum(counts) == min(budget, sum(setting))
    assert all(count == 0 for count, wish in zip(counts, setting, strict=True) if wish == 0)


# ---- the measured fan-out ----


def outcome_probabilities(
    token_ids: np.ndarray,
    logits: np.ndarray,
    trunk: list[int],
    sharpness: float,
    acceptance: list[float] | None,
    recovered: float,
) -> dict[tuple[int, int], float]:
    """Every outcome (k, t*), by loops: q(d_1)···q(d_k)·q(t*), or a_1···a_k·(1 - a_k+1)·recovered·q(t* | not d_k+1)."""
    found, reached = {}, 1.0
    for k in range(len(trunk) + 1):
        weights = np.exp(sharpness * (logits[k].astype(float) - logits[k].max()))
        law = dict(zip(token_ids[k].tolist(), (weights / weights.sum()).tolist(), strict=True))
        own = trunk[k] if k < len(trunk) else None
        if acceptance is not None and own is not None:
            left = recovered * (1.0 - acceptance[k]) / (1.0 - min(law.get(own, 0.0), 0.999))
            found.update({(k, token): reached * left * p for token, p in law.items() if token != own})
            reached *= acceptance[k]
            continue
        found.update({(k, token): reached * p for token, p in law.items() if token != own})
        reached *= law.get(own, min(law.values()))  # a draft that the model did not think of, an n-gram say
    return found


@given(
    num_drafts=st.integers(0, 5),
    m=st.integers(1, 8),
    budget=st.integers(1, 60),
    sharpness=st.floats(0.25, 4.0),
    drawn=st.booleans(),
    recovered=st.floats(0.01, 100.0),
    seed=st.integers(0, 1000),
)
def test_the_most_probable_outcomes_are_bet_on(
    num_drafts: int, m: int, budget: int, sharpness: float, drawn: bool, recovered: float, seed: int
) -> None:
    """A branch is spent on an outcome though a likelier one has none, or on the trunk's own next token."""
    generator = np.random.default_rng(seed)
    token_ids = np.stack([generator.permutation(12)[:m] for _ in range(num_drafts + 1)])
    logits = -np.sort(-generator.normal(size=(num_drafts + 1, m), scale=2.0).astype(np.float32), axis=1)
    trunk = generator.integers(0, 12, num_drafts).tolist()
    acceptance = generator.uniform(0.05, 0.95, num_drafts).tolist() if drawn else None
    probabilities = outcome_probabilities(token_ids, logits, trunk, sharpness, acceptance, recovered)
    bets = most_probable_outcomes(token_ids, logits, trunk, budget, sharpness, acceptance, recovered)
    assert len(set(bets)) == len(bets) == min(budget, len(probabilities))
    best = sorted(probabilities.values(), reverse=True)[: len(bets)]
    assert [probabilities[bet] for bet in bets] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("exponent", (0.5, 1.0, 2.0))
def test_sharpness_finds_how_sure_the_draft_should_be(exponent: float) -> None:
    """A draft that is too sure, or not sure enough, is taken at its word."""
    generator, sharpness = np.random.default_rng(0), Sharpness()
    for _ in range(4000):
        logits = generator.normal(size=16, scale=1.5)
        truth = np.exp(exponent * logits)
        sharpness.observe(logits, int(generator.choice(16, p=truth / truth.sum())))
    assert sharpness.value == pytest.approx(exponent, rel=0.25)


@given(outcomes=st.lists(st.integers(0, 3), max_size=200), scale=st.floats(0.0, 100.0))
def test_sharpness_stays_within_bounds(outcomes: list[int], scale: float) -> None:
    """A run of odd outcomes makes the exponent useless, or not a number."""
    sharpness = Sharpness()
    for emitted in outcomes:
        sharpness.observe(scale * np.array([3.0, 2.0, 1.0, -1.0]), emitted)
    assert 0.25 <= sharpness.value <= 4.0


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
def test_sharpness_outlives_logits_that_are_no_numbers(bad: float) -> None:
    """One row of a draft that overflowed makes the exponent NaN for ever, and no branch is ever chosen again."""
    sharpness = Sharpness()
    for row in ([bad] * 4, [bad, 2.0, 1.0, 0.0], [2.0, 1.0, 0.0, bad]):
        for emitted in range(4):
            sharpness.observe(np.array(row, dtype=np.float32), emitted)
            assert 0.25 <= sharpness.value <= 4.0


# ---- the theorem is right ----


@pytest.mark.parametrize("acceptance", (0.3, 0.7, 0.9))
@pytest.mark.parametrize("exponent", (0.5, 1.0, 2.0))
def test_geometric_weights_beat_any_other_split(acceptance: float, exponent: float) -> None:
    """Under the miss law F^(-r), some other split of the same budget misses less often."""
    num_drafts, budget, generator = 5, 24.0, random.Random(0)
    stops = stop_probabilities(acceptance, num_drafts)

    def misses(split: list[float]) -> float:
        scale = budget / sum(split)
        return math.fsum(p * (scale * f) ** -exponent for p, f in zip(stops, split, strict=True))

    best = geometric_weights(acceptance, num_drafts, exponent)
    for _ in range(500):
        nearby = [weight * generator.uniform(0.8, 1.25) for weight in best]
        anywhere = [generator.uniform(0.01, 1.0) for _ in best]
        assert misses(best) <= min(misses(nearby), misses(anywhere)) * (1 + 1e-12)
