"""The formulas of speculation, and the simulator that plays them: each must give the other's figures."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd import simulator, theory
from vllm_ssd.presets import PRESETS
from vllm_ssd.simulator import Scenario
from vllm_ssd.theory import Source, StepTime

RATES = st.floats(0.0, 1.0)
DRAFTS = st.integers(0, 12)


@given(st.floats(0.0, 0.99), DRAFTS)
def test_expected_tokens_are_the_geometric_sum(acceptance: float, drafts: int) -> None:
    closed = (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
    assert theory.expected_tokens(acceptance, drafts) == pytest.approx(closed)


@given(st.lists(RATES, min_size=1, max_size=8), DRAFTS)
def test_stop_probabilities_sum_to_one_and_give_the_expected_tokens(acceptance: list[float], drafts: int) -> None:
    stops = theory.stop_probabilities(acceptance, drafts)
    assert sum(stops) == pytest.approx(1.0)
    mean = sum(k * p for k, p in enumerate(stops)) + 1
    assert mean == pytest.approx(theory.expected_tokens(acceptance, drafts))


@given(RATES, st.integers(1, 12))
def test_acceptance_from_tokens_is_the_inverse(acceptance: float, drafts: int) -> None:
    tokens = theory.expected_tokens(acceptance, drafts)
    found = theory.acceptance_from_tokens(tokens, drafts)
    assert theory.expected_tokens(found, drafts) == pytest.approx(tokens)


def test_measured_positions_count_one_by_one() -> None:
    assert theory.expected_tokens([0.5, 0.2], 2) == pytest.approx(1 + 0.5 + 0.1)
    assert theory.expected_tokens([0.5, 0.2], 3) == pytest.approx(1 + 0.5 + 0.1 + 0.02)  # the last rate holds on


@pytest.mark.parametrize("acceptance", [-0.1, 1.1, [0.5, 2.0], []])
def test_rates_outside_their_range_are_refused(acceptance) -> None:
    with pytest.raises(ValueError, match="acceptance"):
        theory.expected_tokens(acceptance, 3)


@pytest.mark.parametrize(("tokens", "drafts"), [(0.5, 3), (4.5, 3), (1.0, 0)])
def test_impossible_token_counts_are_refused(tokens: float, drafts: int) -> None:
    with pytest.raises(ValueError, match="tokens"):
        theory.acceptance_from_tokens(tokens, drafts)


def test_ssd_that_always_hits_wins_the_drafting_time_over_sd() -> None:
    for draft_time in (0.0, 0.3, 1.0, 1.5):
        ssd = theory.ssd_speedup(1.0, 4.0, 1.0, draft_time, 0.0)
        assert ssd / theory.sd_speedup(4.0, draft_time) == pytest.approx(theory.most_over_sd(draft_time))
    assert theory.most_over_sd(0.4) == pytest.approx(1.4)
    assert theory.most_over_sd(3.0) < theory.most_over_sd(1.0)  # a late draft loses it again


def test_ssd_that_never_hits_is_its_fallback() -> None:
    assert theory.ssd_speedup(0.0, 4.0, 2.0, 0.5, 0.25) == pytest.approx(2.0 / 1.25)


# ---- fan-out ----


def test_fan_out_is_the_papers_theorem() -> None:
    a, r, drafts, budget = 0.8, 0.8, 4, 20.0
    shape = [a ** (k / (1 + r)) for k in range(drafts)]
    shape.append(a ** (drafts / (1 + r)) * (1 - a) ** (-1 / (1 + r)))
    expected = [budget * weight / sum(shape) for weight in shape]
    found = theory.optimal_fan_out(theory.stop_probabilities(a, drafts), budget, r)
    assert found == pytest.approx(expected)
    assert found[-1] == max(found)  # all accepted is the likeliest stop here


@given(st.floats(0.05, 0.95), st.floats(0.3, 2.0), st.integers(0, 4), st.integers(0, 4))
def test_no_shift_between_two_positions_hits_more_often(a: float, r: float, giver: int, taker: int) -> None:
    stops = theory.stop_probabilities(a, 4)
    best = theory.optimal_fan_out(stops, 60.0, r)
    moved = list(best)
    shift = min(0.2, 0.5 * best[giver])
    moved[giver] -= shift
    moved[taker] += shift
    if min(*best, *moved) >= 1.0:  # below one candidate the law of misses does not hold
        assert theory.hit_rate(moved, stops, r) <= theory.hit_rate(best, stops, r) + 1e-12


def test_whole_fan_out_spends_the_budget() -> None:
    counts = theory.whole_fan_out(theory.stop_probabilities(0.8, 5), 24, 1.0)
    assert sum(counts) == 24 and all(isinstance(count, int) for count in counts)


def test_no_candidates_never_hit() -> None:
    assert theory.miss_probability(0, 1.0) == 1.0
    assert theory.miss_probability(4, 0.5, at_one=0.6) == pytest.approx(0.3)


# ---- waiting ----


def test_break_even_batch_is_where_both_fallbacks_give_the_same() -> None:
    p, slow, fast, wait = 0.8, 3.0, 2.7, 0.5
    batch = theory.break_even_batch(p, slow, fast, wait)
    assert slow / (1 + wait * (1 - p**batch)) == pytest.approx(fast)


def test_break_even_batch_at_its_ends() -> None:
    assert theory.break_even_batch(0.9, 3.0, 1.0, 0.5) == math.inf  # the gain exceeds any wait
    assert theory.break_even_batch(1.0, 3.0, 2.9, 0.5) == math.inf  # nobody ever waits
    assert theory.break_even_batch(0.9, 2.0, 2.0, 0.5) == 0.0
    assert theory.break_even_batch(0.0, 2.2, 2.0, 0.5) == 0.0


def test_waiting_rules_differ_where_hits_are_frequent() -> None:
    # A miss at batch 1: waiting triples the round's tokens for 0.7 of a verify ...
    assert theory.waiting_pays(0.0, 2.7, 1.0, verify=1.0, jit=0.7)
    # ... but at 2.5 tokens a verify in the long run those 0.7 are worth 1.75 tokens, and 1.7 are won.
    assert not theory.waiting_pays_in_the_long_run(2.7, 1.0, jit=0.7, rate=2.5)


# ---- depth and throughput ----


def test_best_number_of_drafts_balances_tokens_and_time() -> None:
    found, rate = theory.best_num_drafts(lambda k: theory.expected_tokens(0.6, k), lambda k: 1.0 + 0.2 * k, 10)
    assert found == 2 and rate == pytest.approx((1 + 0.6 + 0.36) / 1.4)
    assert theory.best_num_drafts(lambda k: 1.0, lambda k: 1.0 + k, 5)[0] == 0  # drafts that are never right


def test_ssd_round_hides_the_tree_until_it_is_late() -> None:
    verify, quick, slow = StepTime(0.010), StepTime(0.001), StepTime(0.004)
    assert theory.ssd_round_seconds(verify, quick, 0.001, 1, 4, 16) == pytest.approx(0.011)
    assert theory.ssd_round_seconds(verify, slow, 0.001, 1, 4, 16) == pytest.approx(0.020)


def test_prediction_is_tokens_over_time() -> None:
    sources = [Source(0.8, 2, 0.5), Source(0.2, 0, 0.5)]
    found = theory.predict_tokens_per_second(4, sources, 0.02, 0.004, 0.001)
    assert found == pytest.approx(4 * (0.8 * 1.75 + 0.2) / 0.025)


def test_broken_numbers_of_drafts_lie_between_whole_ones() -> None:
    assert Source(1.0, 1.5, 0.5).tokens() == pytest.approx((1.5 + 1.75) / 2)


def test_prediction_refuses_shares_that_leave_rows_out() -> None:
    with pytest.raises(ValueError, match="shares"):
        theory.predict_tokens_per_second(1, [Source(0.8, 2, 0.5)], 0.02, 0.0)


# ---- the simulator ----

PLAIN = Scenario(StepTime(0.020), StepTime(0.002), acceptance=0.7, num_drafts=4, sd_num_drafts=4, branches=20)


def test_simulated_sd_meets_its_formula() -> None:
    figures = simulator.simulate(PLAIN, batch=4, rounds=4000)
    predicted = theory.sd_speedup(theory.expected_tokens(0.7, 4), 4 * 0.002 / 0.020)
    assert figures.sd / figures.none == pytest.approx(predicted, rel=0.02)


def test_simulated_ssd_meets_its_formula() -> None:
    scenario = dataclasses.replace(PLAIN, fallback="draft")
    figures = simulator.simulate(scenario, batch=1, rounds=20000)
    tokens = theory.expected_tokens(0.7, 4)
    predicted = theory.ssd_speedup(figures.hit_rate, tokens, tokens, 0.5, 4 * 0.002 / 0.020)
    assert figures.over_none == pytest.approx(predicted, rel=0.02)


def test_simulated_hits_meet_the_law_of_misses() -> None:
    figures = simulator.simulate(dataclasses.replace(PLAIN, fallback="draft"), batch=1, rounds=20000)
    stops = theory.stop_probabilities(0.7, 4)
    predicted = theory.hit_rate(theory.whole_fan_out(stops, 20, 1.0), stops, 1.0)
    assert figures.hit_rate == pytest.approx(predicted, abs=0.01)


def test_a_late_tree_gives_part_or_is_waited_for() -> None:
    slow = dataclasses.replace(PLAIN, draft=StepTime(0.008), fallback="fast")
    part = simulator.simulate(slow, 1)
    whole = simulator.simulate(dataclasses.replace(slow, waits_for_tree=True), 1)
    assert part.late_share == whole.late_share == 1.0
    assert part.none == whole.none and part.ssd != whole.ssd
    assert simulator.simulate(dataclasses.replace(slow, draft=StepTime(0.004)), 1).late_share == 0.0


def test_more_draft_devices_make_wide_batches_faster() -> None:
    loaded = dataclasses.replace(PLAIN, draft=StepTime(0.002, 0.00005), waits_for_tree=True)
    one = simulator.simulate(loaded, 16)
    four = simulator.simulate(dataclasses.replace(loaded, draft_devices=4), 16)
    assert four.ssd > 1.5 * one.ssd


def test_a_tree_on_two_devices_is_twice_as_wide_in_the_time_of_one() -> None:
    loaded = dataclasses.replace(PLAIN, draft=StepTime(0.002, 0.0001), branches=12)
    split = simulator.simulate(dataclasses.replace(loaded, tree_devices=2), 1)
    wide = simulator.simulate(dataclasses.replace(loaded, branches=24), 1)
    one = simulator.simulate(loaded, 1)
    assert split.hit_rate > one.hit_rate + 0.02
    assert split.late_share == one.late_share == 0.0 < wide.late_share
    assert split.ssd > max(one.ssd, wide.ssd)


def test_break_even_batch_comes_out_where_the_formula_says() -> None:
    scenario = dataclasses.replace(PLAIN, acceptance=0.85, fast_acceptance=0.7, num_drafts=5, branches=30)
    hits = simulator.simulate(dataclasses.replace(scenario, fallback="draft"), 1, 8000).hit_rate
    predicted = simulator.paper_break_even(scenario, hits)
    found = simulator.break_even_batch(scenario, rounds=4000)
    assert predicted == pytest.approx(found, abs=max(1.5, 0.5 * found))


def test_long_run_rule_is_never_worse_than_both_fixed_rules() -> None:
    for batch in (1, 2, 4):
        figures = simulator.simulate(dataclasses.replace(PLAIN, fallback="long-run"), batch, rounds=6000)
        assert figures.ssd > 0.99 * max(figures.ssd_waiting, figures.ssd_fast)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_come_near_what_was_published(name: str) -> None:
    preset = PRESETS[name]
    figures = simulator.simulate(preset.scenario, 1)
    assert figures.over_sd == pytest.approx(preset.over_sd, rel=0.03)
    assert figures.over_none == pytest.approx(preset.over_none, rel=0.03)


def test_the_same_seed_gives_the_same_figures() -> None:
    assert simulator.simulate(PLAIN, 2, 200, seed=3) == simulator.simulate(PLAIN, 2, 200, seed=3)
    assert simulator.simulate(PLAIN, 2, 200, seed=3) != simulator.simulate(PLAIN, 2, 200, seed=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("acceptance", 1.5), ("num_drafts", 0), ("branches", 0), ("exponent", 0), ("overhead", -1), ("fallback", "x")],
)
def test_scenarios_refuse_nonsense(field: str, value) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(PLAIN, **{field: value})
