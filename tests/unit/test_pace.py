"""Pace: trees fit the verify that they hide behind. Times are scripted."""

import random

import pytest

from vllm_ssd.config import AUTO_BRANCHES
from vllm_ssd.draft import pace as pace_module
from vllm_ssd.draft.pace import _WIDTHS, Pace

GLUE, BRANCH = 2e-3, 0.1e-3  # seconds of a step, and of each of its tokens


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace_module, "time", clock)
    return clock


def step_seconds(num_tokens: int) -> float:
    return GLUE + BRANCH * num_tokens


def measured(tree_budget: int | str = "auto") -> Pace:
    pace = Pace(tree_budget)
    for num_tokens in (1, 4, 20, 40) * 5:
        pace.observe_step(num_tokens, step_seconds(num_tokens))
    return pace


@pytest.mark.parametrize("sequences", (1, 2, 8))
@pytest.mark.parametrize("verify_ms", (3, 5, 12, 20, 60))
def test_the_widest_trees_that_fit(clock: Clock, sequences: int, verify_ms: int) -> None:
    """Trees are late, or leave time unused."""
    pace = measured()
    pace.begin_round(1e-3 * verify_ms, clock.now)
    shapes = pace.shapes(sequences, 4)
    left = pace.share * 1e-3 * verify_ms
    fits = {d: [w for w in _WIDTHS if d * step_seconds(w * sequences) <= left] for d in (1, 2, 3, 4)}
    assert shapes == sorted(shapes, reverse=True)
    for depth, width in shapes:
        assert [width] == fits[depth][-1:] or (shapes == [(1, 1)] and not fits[1])
    for depth, widths in fits.items():  # what is left out is not wider than a deeper one
        assert not widths or any(d >= depth and w >= widths[-1] for d, w in shapes)
    if verify_ms == 60 and sequences == 1:  # time enough
        assert shapes == [(4, AUTO_BRANCHES)]


def width(pace: Pace, sequences: int, depth: int) -> int:
    """Of the trees that are as deep as asked."""
    return dict(pace.shapes(sequences, depth))[depth]


def test_what_is_spent_counts(clock: Clock) -> None:
    """A late glue does not narrow the tree."""
    pace = measured()
    pace.begin_round(20e-3, clock.now)
    at_once = width(pace, 1, 4)
    clock.now += 4e-3
    later = width(pace, 1, 4)
    assert 1 < later < at_once
    pace.restart_clock()
    assert width(pace, 1, 4) == at_once
    pace.begin_round(20e-3, clock.now - 4e-3, observe=False)  # it came while a step was under way
    assert width(pace, 1, 4) == later


def test_a_fixed_width_is_kept(clock: Clock) -> None:
    """A number given by the user shrinks."""
    pace = measured(50)
    pace.begin_round(5e-3, clock.now)
    assert pace.shapes(8, 4) == [(4, 50)]
    clock.now += 1.0
    assert pace.branches_on_time(50, 3) == 50 and pace.lets_step(1)
    assert not pace.overdue
    pace.begin_round(5.0, clock.now, observe=False)  # news of a delay
    assert not pace.has_spare_time(1)


def test_nothing_known_takes_a_usual_width(clock: Clock) -> None:
    """Without measurements the tree is empty or huge."""
    pace = Pace("auto")
    pace.begin_round(0.0, clock.now)
    [(depth, width)] = pace.shapes(4, 3)
    assert depth == 3 and 8 <= width <= AUTO_BRANCHES
    assert pace.branches_on_time(9, 3) == 9 and pace.lets_step(1)
    assert pace.branches_of_one_more_step(9) == 9
    assert not pace.overdue


def test_one_more_step_takes_what_there_is_time_for(clock: Clock) -> None:
    """The optional step takes all or none, or runs into the next outcome."""
    pace = measured()
    pace.begin_round(20e-3, clock.now)
    assert pace.branches_of_one_more_step(30) == 30
    clock.now += 20e-3 - step_seconds(6) - 0.5 * BRANCH
    assert pace.branches_of_one_more_step(30) == 6
    clock.now += 2e-3
    assert pace.branches_of_one_more_step(30) == 0


def test_a_tree_that_gets_late_goes_on_narrower(clock: Clock) -> None:
    """After a slow step all branches come late, though some could be on time."""
    pace = measured()
    pace.begin_round(20e-3, clock.now)
    planned = width(pace, 1, 4)
    assert 1 < pace.branches_on_time(planned, 4) <= planned
    clock.now += step_seconds(planned)
    assert pace.branches_on_time(planned, 3) == planned  # all went as planned
    clock.now += 6e-3
    narrower = pace.branches_on_time(planned, 3)
    assert 1 <= narrower < planned
    clock.now += 8e-3
    assert pace.branches_on_time(planned, 3) == 1  # too late for any
    clock.now += 10e-3
    assert pace.branches_on_time(planned, 3) == planned  # nobody knows how long it still takes


def test_a_step_that_cannot_be_over_in_time_is_not_begun(clock: Clock) -> None:
    """The outcome finds the draft at work for nothing."""
    pace = measured()
    pace.begin_round(20e-3, clock.now)
    clock.now += 20e-3 - 1.1 * step_seconds(1)
    assert pace.lets_step(1) and not pace.lets_step(4)
    clock.now += 0.2 * step_seconds(1)
    assert not pace.lets_step(1)
    clock.now += 12e-3
    assert pace.overdue
    pace.extend()
    assert pace.lets_step(1)


def test_overdue(clock: Clock) -> None:
    """A delayed verify is not noticed, or every verify counts as one."""
    pace = measured()
    pace.begin_round(20e-3, clock.now)
    assert not pace.overdue
    clock.now += 20e-3
    assert not pace.overdue
    assert 0 < pace.seconds_until_overdue() < 11e-3
    clock.now += 11e-3
    assert pace.overdue
    pace.extend()
    assert not pace.overdue


def test_news_of_a_delay_leaves_time_for_more(clock: Clock) -> None:
    """While the prompts of others are read the draft idles, or what is known of a usual verification is spoilt."""
    pace = measured()
    for _ in range(50):
        pace.begin_round(20e-3, clock.now)
        clock.now += 20e-3
    pace.begin_round(20e-3, clock.now)
    share = pace.share
    assert not pace.has_spare_time(1)
    pace.begin_round(25e-3, clock.now, observe=False)  # a little more than was thought
    assert not pace.has_spare_time(1)
    pace.begin_round(100e-3, clock.now, observe=False)
    pace.begin_round(100e-3, clock.now, observe=False)  # the rest of a message in two
    clock.now += 40e-3
    assert pace.has_spare_time(1) and pace.branches_on_time(9, 3) == 9 and not pace.overdue
    clock.now += 50e-3
    assert not pace.has_spare_time(1)
    clock.now += 70e-3
    pace.begin_round(20e-3, clock.now)
    assert pace.share == share and not pace.has_spare_time(1)


@pytest.mark.parametrize(("verify_deviation", "step_deviation"), ((0.03, 0.02), (0.08, 0.02), (0.02, 0.1)))
def test_late_trees_are_rare_and_little_time_is_idle(
    clock: Clock, verify_deviation: float, step_deviation: float
) -> None:
    """Times that vary make many trees late, or make all trees small."""
    pace, generator = measured(), random.Random(0)
    late, used, kept = [], [], []
    for _ in range(3000):
        pace.begin_round(20e-3, clock.now)
        kept_width = planned = width(pace, 1, 4)
        for steps in (4, 3, 2, 1):
            kept_width = pace.branches_on_time(kept_width, steps)
            seconds = step_seconds(kept_width) * generator.gauss(1.0, step_deviation)
            clock.now += seconds
            pace.observe_step(kept_width, seconds)
        pace.observe_step(1, step_seconds(1))
        spent, verify = clock.now - pace._began, 20e-3 * generator.gauss(1.04, verify_deviation)
        late.append(spent > verify)
        used.append(spent / 20e-3)
        kept.append(kept_width / planned)
        clock.now += max(verify - spent, 0.0)
    assert sum(late[500:]) / 2500 < 0.1
    assert sum(kept[500:]) / 2500 > 0.75
    assert sum(used[500:]) / 2500 > 0.8 - 2 * max(verify_deviation, step_deviation)  # widths are coarse


def test_one_stall_does_not_make_all_trees_small(clock: Clock) -> None:
    """A machine that hung for a moment drafts little for long."""
    pace = measured()
    for _ in range(200):
        pace.begin_round(20e-3, clock.now)
        clock.now += 20e-3
    before = pace.share
    pace.begin_round(20e-3, clock.now)
    clock.now += 5.0
    for _ in range(100):
        pace.begin_round(20e-3, clock.now)
        clock.now += 20e-3
    assert pace.share > before - 0.1
