"""SaguaroBandit: finds the C that brings the most tokens a second."""

import random

import pytest

from vllm_ssd.draft.bandit import SaguaroBandit


def play(
    bandit: SaguaroBandit, emitted: dict[float, float], hits: dict[float, float], miss: float, rounds: int
) -> list[float]:
    """So many rounds of a target with these mean tokens and hit rates by C; the values chosen."""
    generator, chosen = random.Random(1), []
    for _ in range(rounds):
        value = bandit.choose()
        chosen.append(value)
        bandit.observe_miss_cost(miss * 20e-3, 20e-3)
        tokens = 1 + sum(generator.random() < (emitted[value] - 1) / 3 for _ in range(3))
        bandit.observe(value, tokens, generator.random() < hits[value])
    return chosen


LESS_ACCEPTED = {1.0: 2.2, 0.6: 2.05, 0.35: 1.85}
MORE_HITS = {1.0: 0.4, 0.6: 0.75, 0.35: 0.87}


def rate(value: float, emitted: dict[float, float], hits: dict[float, float], miss: float) -> float:
    return emitted[value] / (1 + (1 - hits[value]) * miss)


@pytest.mark.parametrize("miss", (0.05, 0.5, 1.5))
def test_it_comes_close_to_the_best_fixed_value(miss: float) -> None:
    """It sticks to a poor C, or goes on trying poor ones."""
    chosen = play(SaguaroBandit("auto", seed=0), LESS_ACCEPTED, MORE_HITS, miss, 8000)[2000:]
    rates = {value: rate(value, LESS_ACCEPTED, MORE_HITS, miss) for value in LESS_ACCEPTED}
    assert sum(rates[value] for value in chosen) / len(chosen) > 0.97 * max(rates.values())


def test_the_best_depends_on_the_cost_of_a_miss() -> None:
    """C follows acceptance alone, or hits alone."""
    cheap, dear = SaguaroBandit("auto", seed=0), SaguaroBandit("auto", seed=0)
    play(cheap, LESS_ACCEPTED, MORE_HITS, 0.0, 6000)
    play(dear, LESS_ACCEPTED, MORE_HITS, 1.5, 6000)
    assert cheap.best == 1.0
    assert dear.best <= 0.6


def test_it_notices_a_change() -> None:
    """What once was best stays chosen for ever."""
    bandit = SaguaroBandit("auto", seed=0)
    play(bandit, LESS_ACCEPTED, MORE_HITS, 1.5, 4000)
    alike = dict.fromkeys(MORE_HITS, 0.9)
    chosen = play(bandit, LESS_ACCEPTED, alike, 1.5, 12000)[-2000:]
    assert sum(value == 1.0 for value in chosen) > 1400


@pytest.mark.parametrize("fixed", (1.0, 0.5, 1))
def test_a_fixed_value_stays(fixed: float) -> None:
    """Experiments with a fixed C are disturbed."""
    bandit = SaguaroBandit(fixed)
    for _ in range(50):
        assert bandit.choose() == fixed
        bandit.observe(float(fixed), 1, False)
