"""What is measured, and what is decided from it: depth, and what a row does that missed."""

import random
import statistics
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.depth import DepthControl
from vllm_ssd.fallback import FallbackRule
from vllm_ssd.statistics import Acceptance, DriftingTime, OutcomeCounts

K = 4
seconds = st.floats(1e-6, 10.0)


def line(base: float, slope: float, loads: Iterable[int] = range(1, 60)) -> DriftingTime:
    time = DriftingTime()
    for load in loads:
        time.observe(load, base + slope * load)
    return time


# ---- DriftingTime ----


@given(base=st.floats(0.001, 1.0), slope=st.floats(0.0, 0.1))
def test_a_line_is_recovered(base: float, slope: float) -> None:
    """The time of a batch of another size is estimated wrongly though all measurements agree."""
    time = line(base, slope, [1 + 7 * i % 60 for i in range(300)])
    for load in (2, 10, 30, 50):
        assert time.seconds(load) == pytest.approx(base + load * slope, rel=1e-3)


def test_a_line_is_recovered_from_noise() -> None:
    """A little noise drowns what a load costs."""
    generator, time = random.Random(0), DriftingTime()
    for _ in range(300):
        load = generator.randint(1, 40)
        time.observe(load, (0.01 + 0.002 * load) * generator.gauss(1.0, 0.05))
    assert time.seconds(40) / time.seconds(10) == pytest.approx(0.09 / 0.03, rel=0.1)
    assert time.slope() == pytest.approx(0.002, rel=0.25)


def test_a_time_that_grows_only_beyond_a_load_is_recovered() -> None:
    """What a token costs in a full batch is taken for what it costs in a small one."""
    generator, time = random.Random(0), DriftingTime()
    for _ in range(600):
        load = generator.randint(8, 400)
        time.observe(load, max(0.010, 0.0001 * load) * generator.gauss(1.0, 0.03))
    assert time.seconds(64) / time.seconds(16) == pytest.approx(1.0, abs=0.1)
    assert time.seconds(400) / time.seconds(200) == pytest.approx(2.0, rel=0.1)


def test_the_recent_past_counts_more() -> None:
    """The estimate stays with a speed that is long gone."""
    time = line(0.01, 0.001)
    for i in range(600):
        load = 1 + 7 * i % 60
        time.observe(load, 0.02 + 0.002 * load)
    assert time.seconds(30) == pytest.approx(0.08, rel=0.05)


def test_a_stall_hardly_moves_the_estimate() -> None:
    """One step of a minute (a swap, a debugger) turns speculation off for good."""
    time = line(0.01, 0.001)
    before = time.seconds(30)
    time.observe(30, 60.0)
    assert time.seconds(30) < 1.2 * before


@given(measured=st.lists(st.tuples(st.integers(1, 100), seconds), max_size=30), load=st.integers(0, 1000))
def test_no_measurements_make_an_estimate_negative(measured: list[tuple[int, float]], load: int) -> None:
    """A negative time or slope makes a rate negative, and the decision absurd."""
    time = DriftingTime()
    for at, took in measured:
        time.observe(at, took)
    assert time.known == bool(measured)
    assert 0 <= time.slope() < float("inf")
    assert 0 < time.seconds(load) < float("inf") if measured else time.seconds(load) == 0


def test_a_clock_that_stands_still_is_no_error() -> None:
    """Drafting ends with a division by zero."""
    time = DriftingTime()
    for load in (8, 16, 8, 16, 32, 8, 4):
        time.observe(load, 0.0)
    assert time.seconds(8) > 0


def test_loads_all_alike_say_nothing_of_others() -> None:
    """A slope is made up from noise."""
    time, in_proportion = DriftingTime(), DriftingTime(in_proportion=True)
    for took in (0.01, 0.02, 0.03):
        time.observe(7, took)
        in_proportion.observe(7, took)
    assert time.slope() == 0 and not time.trusted
    assert time.seconds(1000) == time.seconds(7)
    assert in_proportion.seconds(14) == pytest.approx(2 * in_proportion.seconds(7))


def test_the_largest_load_within_a_time() -> None:
    """Trees are wider than there is time for, or much narrower."""
    time = line(0.01, 0.001, [1 + 7 * i % 60 for i in range(300)])
    most = time.most_within(0.04, 1000)
    assert time.seconds(most) <= 0.04 < time.seconds(most + 1)
    assert most == pytest.approx(30, rel=0.15)
    assert time.most_within(0.005, 1000) == 0 and time.most_within(1e9, 50) == 50


@pytest.mark.parametrize("factor", (0.3, 1.5, 3.0, 12.0))
@pytest.mark.parametrize("phase", (range(30), range(200), range(500, 800)), ids=str)
def test_a_slow_phase_is_not_taken_for_what_a_load_costs(factor: float, phase: range) -> None:
    """The device was slow while batches were large by chance, and every draft looks too expensive for a long time."""
    generator, time = random.Random(0), DriftingTime()
    for step in range(1000):
        slow = step in phase
        load = generator.randint(28, 36) if slow else generator.randint(8, 36)
        seconds = (0.020 + 0.0004 * load) * generator.gauss(1.0, 0.03) * (factor if slow else 1.0)
        time.observe(load, seconds)
    assert time.seconds(32) / time.seconds(8) == pytest.approx(0.0328 / 0.0232, rel=0.1)


# ---- Acceptance ----


@given(outcomes=st.lists(st.tuples(st.integers(0, K), st.integers(0, K)), max_size=50), num_drafts=st.integers(0, K))
def test_expected_tokens_stay_within_what_is_possible(outcomes: list[tuple[int, int]], num_drafts: int) -> None:
    """More tokens are expected than were drafted, or fewer with more drafts."""
    acceptance = Acceptance(K)
    for drafts, accepted in outcomes:
        acceptance.observe(drafts, min(accepted, drafts))
    expected = [acceptance.expected_tokens(n) for n in range(num_drafts + 1)]
    assert expected == sorted(expected)
    assert all(1 <= e <= n + 1 for n, e in enumerate(expected))
    assert 0 <= acceptance.rate <= 1


def test_acceptance_follows_what_is_observed() -> None:
    """The measured acceptance of each position does not reach the estimate."""
    acceptance = Acceptance(3)
    for i in range(2000):
        acceptance.observe(3, (0, 1, 1, 3)[i % 4])  # A_1 = 3/4, A_2 = A_3 = 1/4
    assert acceptance.expected_tokens(1) == pytest.approx(1.75, abs=0.1)
    assert acceptance.expected_tokens(3) == pytest.approx(1 + 0.75 + 0.25 + 0.25, abs=0.15)


def test_drafts_after_the_first_refused_one_say_nothing() -> None:
    """Positions that were never judged count as refused."""
    acceptance = Acceptance(3)
    before = acceptance.expected_tokens(3) / acceptance.expected_tokens(1)
    for _ in range(500):
        acceptance.observe(1, 1)
    assert acceptance.expected_tokens(3) / acceptance.expected_tokens(1) > before


# ---- DepthControl ----


def usual_depth(control: DepthControl, rows: int) -> int:
    """What it chooses in most rounds; now and then it tries something else."""
    return statistics.mode(control.choose(rows) for _ in range(65))


def measured_depth(base: float, slope: float, accepted: int) -> DepthControl:
    """Control that has seen verify times base + slope · tokens and rows with `accepted` of K drafts right."""
    control = DepthControl(K)
    for tokens in range(1, 60):
        control.observe_verify(tokens, base + slope * tokens)
        control.observe_outcome(K, accepted)
    return control


def test_full_depth_while_nothing_is_known() -> None:
    """Speculation does not start."""
    assert DepthControl(K).choose(rows=8) == K


def test_full_depth_where_tokens_are_free() -> None:
    """Drafts are held back on an idle device."""
    assert measured_depth(0.03, 0.0, accepted=2).choose(rows=1) == K


def test_no_depth_where_every_token_costs_its_share() -> None:
    """Refused drafts slow a device down that is busy."""
    assert usual_depth(measured_depth(0.0, 0.01, accepted=0), rows=8) == 0


def test_fewer_drafts_where_tokens_cost_something() -> None:
    """Depth jumps from all to none though the middle is best."""
    control = DepthControl(K)
    for i in range(2000):
        control.observe_verify(1 + i % 40, 0.01 + 0.002 * (1 + i % 40))
        control.observe_outcome(K, (0, 1, 1, 1)[i % 4])
    assert 0 < usual_depth(control, rows=2) < K


def test_it_looks_again_whether_drafting_pays() -> None:
    """Once off, speculation stays off although the drafts became good."""
    control = measured_depth(0.0, 0.01, accepted=0)
    chosen = [control.choose(rows=8) for _ in range(300)]
    assert 0 < sum(depth > 0 for depth in chosen) < 30


def test_it_tries_another_depth_while_all_loads_were_alike() -> None:
    """The slope stays unknown because the depth never changes."""
    control = DepthControl(K)
    chosen = set()
    for _ in range(100):
        control.observe_verify(8 * (1 + K), 0.03)
        chosen.add(control.choose(rows=8))
    assert len(chosen) > 1 and K in chosen


def test_drafting_comes_back_when_the_probes_go_well() -> None:
    """Accepted probes do not bring speculation back."""
    control = measured_depth(0.06, 0.005, accepted=0)
    assert usual_depth(control, rows=4) == 0
    for _ in range(4000):
        if depth := control.choose(rows=4):
            control.observe_outcome(depth, depth)
    assert usual_depth(control, rows=4) > 0


@pytest.mark.parametrize("stalled", ({0}, {1}, {2}, {3}, {4}, {5}, {6}, {0, 1}, {0, 1, 2}), ids=str)
def test_a_stall_among_the_first_steps_does_not_end_speculation(stalled: set[int]) -> None:
    """Kernels are compiled or memory is touched for the first time, and nothing is drafted for a thousand rounds."""
    control, chosen = DepthControl(K), []
    for step in range(200):
        chosen.append(control.choose(rows=8))
        tokens = 8 * (1 + chosen[-1])
        control.observe_verify(tokens, 0.5 if step in stalled else 0.01 + 0.0001 * tokens)
        for _ in range(8):
            control.observe_outcome(chosen[-1], min(chosen[-1], 3))
    assert chosen.count(0) < 10


# ---- FallbackRule ----


def rule(depth: DepthControl | None = None, **options) -> FallbackRule:
    return FallbackRule(SaguaroConfig("draft", K, **options), depth or measured_depth(0.03, 0.0001, accepted=3))


def waited(rule: FallbackRule, per_draft: float) -> FallbackRule:
    for i in range(40):
        rule.observe_wait(1 + i % K, per_draft * (1 + i % K))
    return rule


@pytest.mark.parametrize(
    ("options", "hits", "misses", "wanted"),
    (
        ({"fallback": "draft"}, [4] * 50, 9, K),
        ({"fallback": "ngram"}, [], 1, 0),
        ({"fallback": "none"}, [], 1, 0),
        ({"fallback": "auto", "fallback_batch_threshold": 4}, [1, 2], 2, K),
        ({"fallback": "auto", "fallback_batch_threshold": 4}, [1, 2, 3], 2, 0),
        ({"fallback": "auto", "fallback_batch_threshold": 0}, [], 1, 0),
        ({"fallback": "draft"}, [1, 2], 0, 0),
    ),
)
def test_settings_decide(options: dict, hits: list[int], misses: int, wanted: int) -> None:
    """The user's setting is overruled by what was measured."""
    assert waited(rule(**options), 10.0).drafts_to_wait_for(hits, misses, K) == wanted


@pytest.mark.parametrize(("fallback", "takes"), (("auto", True), ("draft", True), ("ngram", True), ("none", False)))
def test_who_takes_ngrams(fallback: str, takes: bool) -> None:
    """Rows that cannot wait get no n-grams, or get them against the user's wish."""
    assert rule(fallback=fallback).takes_ngrams() is takes


def test_it_waits_where_waiting_is_cheap() -> None:
    """A small batch goes on with n-grams that bring nothing, while drafts would come at once."""
    assert waited(rule(), 0.0005).drafts_to_wait_for([], 1, K) > 0


def test_it_does_not_wait_where_waiting_is_dear() -> None:
    """A whole batch stands still for one row."""
    assert waited(rule(), 0.05).drafts_to_wait_for([K] * 31, 1, K) == 0


def test_good_ngrams_save_the_wait() -> None:
    """Waiting goes on although n-grams give just as much for nothing."""
    fallback = waited(rule(), 0.004)
    assert fallback.drafts_to_wait_for([], 1, K) > 0
    for _ in range(200):
        fallback.observe_ngrams(K + 1)
    assert fallback.drafts_to_wait_for([], 1, K) == 0


@pytest.mark.parametrize(
    ("wait", "rounds", "least", "most"), ((0.003, 320, 5, 10), (0.05, 5000, 5, 20), (1.0, 20_000, 1, 3))
)
def test_it_tries_to_wait_before_anything_is_known_and_now_and_then(
    wait: float, rounds: int, least: int, most: int
) -> None:
    """The cost of waiting is never measured, only once, or so often that a slow draft halves the throughput."""
    fallback = rule()
    assert fallback.drafts_to_wait_for([K] * 31, 1, K) == K
    waited(fallback, wait)
    tried = 0
    for _ in range(rounds):
        tried += fallback.drafts_to_wait_for([K] * 31, 1, K) > 0
        fallback.observe_round(80, 0.03)
    assert least <= tried <= most
    assert tried * K * wait <= 0.02 * rounds * 0.03 + K * wait


def test_waits_that_bring_nothing_are_soon_given_up() -> None:
    """While all rounds wait in vain their rate is poor, and waiting seems to cost nothing."""
    fallback, waits = rule(), 0
    for _ in range(20):
        waited_for = fallback.drafts_to_wait_for([], 2, K)
        if waited_for:
            waits += 1
            fallback.observe_wait(waited_for, 1.0, came=0.0)
        fallback.observe_round(2, 1.03 if waited_for else 0.03)
    assert waits <= 3


def test_a_wait_is_priced_by_what_other_rounds_bring() -> None:
    """A round after a miss is compared with itself: a poor one, and so it waits too long."""
    fallback = waited(rule(), 0.009)
    alone = fallback.drafts_to_wait_for([], 1, K)
    assert alone > 0
    for _ in range(50):
        fallback.observe_round(4, 0.020)  # most rounds hit: 200 tokens a second
        fallback.observe_round(1, 60.0)  # a pause says nothing
    assert fallback.drafts_to_wait_for([], 1, K) == 0
    for _ in range(200):
        fallback.observe_round(1, 0.040)
    assert fallback.drafts_to_wait_for([], 1, K) >= alone


def test_what_a_wait_does_to_the_next_round_counts() -> None:
    """It waits although a round without drafts would make the next one a hit."""
    fallback = waited(rule(), 0.003)
    for _ in range(50):
        fallback.observe_round(3, 0.030)
    assert fallback.drafts_to_wait_for([], 1, K) > 0
    for _ in range(100):
        fallback.observe_next(missed=True, waited=True, hit=0.2)
        fallback.observe_next(missed=True, waited=False, hit=1.0)
    assert fallback.drafts_to_wait_for([], 1, K) == 0
    for _ in range(100):
        fallback.observe_next(missed=True, waited=False, hit=0.2)
    assert fallback.drafts_to_wait_for([], 1, K) > 0


def test_what_a_wait_does_to_the_others_counts() -> None:
    """It waits although the trees of all other rows then stay small."""
    fallback = waited(rule(), 0.003)
    for _ in range(50):
        fallback.observe_round(9, 0.030)
    assert fallback.drafts_to_wait_for([K] * 6, 2, K) > 0
    for _ in range(100):
        fallback.observe_next(missed=False, waited=True, hit=0.2)
        fallback.observe_next(missed=False, waited=False, hit=0.8)
    assert fallback.drafts_to_wait_for([K] * 6, 2, K) == 0


def test_drafts_that_were_waited_for_count_for_what_they_are() -> None:
    """After a miss fewer drafts are accepted than after a hit, and it waits for them as if they were as good."""
    fallback = waited(rule(), 0.003)
    for _ in range(50):
        fallback.observe_round(3, 0.030)
    assert fallback.drafts_to_wait_for([], 1, K) > 0
    for _ in range(400):
        fallback.observe_waited(K, 0, samples=False)
    assert fallback.drafts_to_wait_for([], 1, K) == 0


@pytest.mark.parametrize("loads", (range(8, 16), (8,)), ids=("many", "one"))
def test_a_level_follows_the_device(loads: Sequence[int]) -> None:
    """A device that became slower is expected to be as fast as ever."""
    time = DriftingTime()
    for factor in (1.0, 2.0):
        for i in range(100):
            load = loads[i % len(loads)]
            time.observe(load, factor * (0.020 + 0.001 * load))
    assert time.seconds(12) == pytest.approx(2.0 * (0.032 if len(loads) > 1 else 0.028), rel=0.05)


@pytest.mark.parametrize("per_draft", (0.0001, 0.01, 1.0))
@pytest.mark.parametrize("depth", (1, K))
def test_it_never_waits_for_more_than_the_depth(per_draft: float, depth: int) -> None:
    """A row waits for drafts that it may not take."""
    fallback = waited(rule(), per_draft)
    assert all(0 <= fallback.drafts_to_wait_for([1], 2, depth) <= depth for _ in range(40))


def test_patience_follows_the_measured_wait() -> None:
    """A draft that hangs holds the target for as long as it likes."""
    fallback = rule()
    assert fallback.patience(K) > 0
    assert waited(fallback, 0.01).patience(K) == pytest.approx(4 * 0.01 * K, rel=0.05)


# ---- where verifications stop ----


def test_outcome_counts_are_shares_that_forget() -> None:
    """A cell counts another's outcomes, or what was long ago counts as much as what is now."""
    counts = OutcomeCounts(3)
    assert sum(map(sum, counts.shares())) == 0
    for _ in range(3000):
        counts.observe(1, 0)
    for _ in range(300):
        counts.observe(3, 40)
        counts.observe(0, None)
        counts.observe(2, 5)
        counts.observe(2, 5)
    shares = counts.shares()
    assert sum(map(sum, shares)) == pytest.approx(1.0)
    assert shares[3][OutcomeCounts.RANKS] == pytest.approx(shares[0][OutcomeCounts.RANKS], rel=0.03)
    assert shares[2][5] == pytest.approx(2 * shares[3][OutcomeCounts.RANKS], rel=0.03)
    assert shares[1][0] < 0.01


def test_outcome_counts_never_overflow() -> None:
    """After a day of serving the weights are infinite."""
    counts = OutcomeCounts(1)
    for i in range(200_000):
        counts.observe(i % 2, 0)
    assert counts.shares()[0][0] == pytest.approx(0.5, abs=0.01)


def test_depth_follows_the_rows_in_the_batch() -> None:
    """Sampled rows that accept little take as many drafts as greedy ones, or the other way round."""
    control = DepthControl(K)
    for tokens in (4, 8, 16, 24) * 10:
        control.observe_verify(tokens, 0.01 + 0.004 * tokens)
    for _ in range(600):
        control.observe_outcome(K, K)
        control.observe_outcome(K, 0, samples=True)
    assert max(control.choose(4) for _ in range(20)) == K
    greedy_tokens = control.expected_tokens(K)
    sampled = [control.choose(4, sampled=4) for _ in range(20)]
    assert statistics.mode(sampled) == 0
    assert control.expected_tokens(K) < 1.2 < greedy_tokens
    control.choose(4, sampled=2)
    assert 1.2 < control.expected_tokens(K) < greedy_tokens
