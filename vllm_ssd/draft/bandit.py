"""Which C of Saguaro sampling to draw with: a bandit over a few values.

A lower C makes the verifications more foreseeable (more hits) and accepts fewer drafts. What counts
is tokens a second: E(C) / (T_v + (1 - h(C)) · T_miss), with E the tokens a verification emits, h the
hit rate, and T_miss the time that a miss costs, all measured. Each tree is drawn with one C, chosen
before its first draw from what earlier rounds brought, so the law of every draft is known. Knows
nothing about models or sequences.
"""

import random

_VALUES = (1.0, 0.6, 0.35)  # few: neighbours differ by less than what telling them apart would cost
_CURIOSITY = 0.5  # times the uncertainty: half of it finds the best as surely here, and tries less of the rest
_FORGET = 0.9997  # weight of the past at each outcome, of whatever value: what is not tried becomes uncertain
_PRIOR_WEIGHT = 4.0


class _Arm:
    """What came of drafts drawn with one C."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._emitted = self._squares = self._hits = 0.0

    def fade(self) -> None:
        """Some time has passed."""
        self.weight *= _FORGET
        self._emitted *= _FORGET
        self._squares *= _FORGET
        self._hits *= _FORGET

    def observe(self, emitted: int, hit: bool) -> None:
        """What one verification brought."""
        self.weight += 1.0
        self._emitted += emitted
        self._squares += emitted * emitted
        self._hits += hit

    def mean(self, emitted: float, hits: float) -> tuple[float, float]:
        """E and h, where `emitted` and `hits` are assumed while little was observed."""
        weight = self.weight + _PRIOR_WEIGHT
        return (self._emitted + _PRIOR_WEIGHT * emitted) / weight, (self._hits + _PRIOR_WEIGHT * hits) / weight

    def variance(self) -> float:
        """Of the emitted tokens; 1 while little was observed."""
        weight = self.weight + _PRIOR_WEIGHT
        mean = self._emitted / max(self.weight, 1e-9)
        return (max(self._squares - self.weight * mean * mean, 0.0) + _PRIOR_WEIGHT) / weight


class SaguaroBandit:
    """Chooses C for each tree; a fixed C is always chosen."""

    def __init__(self, saguaro_c: float | str, seed: int | None = None) -> None:
        """`saguaro_c`: a number in (0, 1], or "auto"."""
        self._arms = {value: _Arm() for value in (_VALUES if saguaro_c == "auto" else (float(saguaro_c),))}
        self._all = _Arm()
        self._generator = random.Random(seed)
        self._miss_ratio = 0.3  # T_miss / T_v

    @property
    def values(self) -> tuple[float, ...]:
        """What there is to choose from."""
        return tuple(self._arms)

    def observe_miss_cost(self, seconds: float, verify_seconds: float) -> None:
        """A miss costs `seconds` where a verification takes `verify_seconds`."""
        if verify_seconds > 0.0:
            self._miss_ratio += 0.05 * (seconds / verify_seconds - self._miss_ratio)

    def observe(self, saguaro_c: float, emitted: int, hit: bool) -> None:
        """A verification of drafts drawn with this C emitted so many tokens, and was foreseen or not."""
        for arm in (self._all, *self._arms.values()):
            arm.fade()
        for arm in (self._all, self._arms[saguaro_c]):
            arm.observe(emitted, hit)

    def choose(self) -> float:
        """C for the next tree: Thompson sampling, so that what may yet be best is tried now and then."""
        if len(self._arms) == 1:
            return self.best
        return max(self._arms, key=lambda value: self._rate(self._arms[value], sample=True))

    @property
    def best(self) -> float:
        """The C that looks best now; the larger one of two alike."""
        return max(self._arms, key=lambda value: self._rate(self._arms[value], sample=False))

    def _rate(self, arm: _Arm, sample: bool) -> float:
        """Tokens per verify time, by the means or by a draw from what they may be."""
        emitted, hits = arm.mean(*self._all.mean(2.0, 0.5))
        if sample:
            weight = arm.weight + _PRIOR_WEIGHT
            emitted += _CURIOSITY * self._generator.gauss(0.0, (arm.variance() / weight) ** 0.5)
            hits += _CURIOSITY * self._generator.gauss(0.0, (hits * (1.0 - hits) / weight) ** 0.5)
        return emitted / (1.0 + (1.0 - min(max(hits, 0.0), 1.0)) * self._miss_ratio)
