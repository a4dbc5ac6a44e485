"""SSD, SD and no speculation played round by round, for devices that are not at hand.

A Monte-Carlo simulation over the inputs of `theory.py`: rows accept drafts, outcomes hit or miss,
trees are in time or late, rows that missed wait or take the fast fallback. Times are given, not
measured. Knows no model and no engine.

Draft devices may be used in two ways: each drafts for a part of the rows, or each builds a part of every
tree (the option `draft_devices`), with the whole trunk to glue at each of them, and one that builds what
missed rows wait for.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from vllm_ssd import theory
from vllm_ssd.theory import StepTime

FALLBACKS = ("auto", "long-run", "draft", "fast")
"""Wait as the round's own rate says, as the long-run rate says, always, never: see `theory`."""


@dataclass(frozen=True)
class Scenario:
    """A pair of models on their devices. Raises `ValueError` naming the field that is wrong."""

    verify: StepTime  # seconds of a target forward by tokens
    draft: StepTime  # seconds of a draft forward by branches, on one draft device
    acceptance: float  # a of the draft model
    num_drafts: int  # K of SSD
    sd_num_drafts: int  # K of SD, tuned apart
    sd_draft: StepTime | None = None  # as `draft`, where SD drafts on the target's devices; None: the same
    fast_acceptance: float = 0.0  # a of the fast fallback (n-grams); 0: it has no drafts
    overhead: float = 0.0  # seconds a round that are no forward: scheduling, sampling, messages
    branches: int = 24  # of the tree, a row; of each part, if the tree has several
    exponent: float = 1.0  # r of the miss law c·F^(−r)
    miss_at_one: float = 1.0  # c
    draft_devices: int = 1  # rows are split over them
    tree_devices: int = 1  # each row's tree is split over them: so many times the branches in the same time
    fallback: str = "auto"  # of rows that missed
    waits_for_tree: bool = False  # a late tree is waited for (the paper's engine), else taken in part (ours)

    def __post_init__(self) -> None:
        for name in ("acceptance", "fast_acceptance", "miss_at_one"):
            _check(0.0 <= getattr(self, name) <= 1.0, name, getattr(self, name), "within [0, 1]")
        for name in ("num_drafts", "sd_num_drafts", "branches", "draft_devices", "tree_devices"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _check(self.exponent > 0, "exponent", self.exponent, "above 0")
        _check(self.overhead >= 0, "overhead", self.overhead, "at least 0")
        _check(self.fallback in FALLBACKS, "fallback", self.fallback, "one of " + ", ".join(FALLBACKS))


@dataclass(frozen=True)
class Figures:
    """What came out for one batch size; tokens a second are those of the whole batch."""

    batch: int
    none: float  # tokens a second
    sd: float
    ssd: float
    hit_rate: float  # share of the rows whose tree held their outcome
    late_share: float  # share of the rounds whose tree was not all built
    waited_share: float  # share of the rounds that waited for JIT drafts
    ssd_waiting: float  # SSD's tokens a second if misses always wait
    ssd_fast: float  # and if they never do

    @property
    def over_sd(self) -> float:
        return self.ssd / self.sd

    @property
    def over_none(self) -> float:
        return self.ssd / self.none


def simulate(scenario: Scenario, batch: int, rounds: int = 3000, seed: int = 0) -> Figures:
    """Play `rounds` rounds of `batch` rows with each method, from one seed."""
    _check(batch >= 1, "batch", batch, "at least 1")
    fixed = {
        rule: _SsdRounds(dataclasses.replace(scenario, fallback=rule), batch, seed).run(rounds)
        for rule in {"draft", "fast", scenario.fallback}
    }
    own = fixed[scenario.fallback]
    return Figures(
        batch=batch,
        none=batch / (scenario.verify(batch) + scenario.overhead),
        sd=_sd_tokens_per_second(scenario, batch, rounds, seed),
        ssd=own.rate,
        hit_rate=own.hits / own.rows,
        late_share=own.late / rounds,
        waited_share=own.waited / rounds,
        ssd_waiting=fixed["draft"].rate,
        ssd_fast=fixed["fast"].rate,
    )


def break_even_batch(scenario: Scenario, most: int = 256, rounds: int = 800, seed: int = 0) -> int | None:
    """b*, as it comes out: the smallest batch for which never waiting beats always waiting; None up to `most`.

    Searched over powers of two, then between the last two by halving.
    """

    def fast_wins(batch: int) -> bool:
        figures = simulate(scenario, batch, rounds, seed)
        return figures.ssd_fast > figures.ssd_waiting

    batch = 1
    while not fast_wins(batch):
        batch *= 2
        if batch > most:
            return None
    low, high = batch // 2, batch  # waiting wins at low (or low is 0), not at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fast_wins(middle) else (middle, high)
    return high


def paper_break_even(scenario: Scenario, hit_rate: float) -> float:
    """b* by the paper's formula, at one row: verify and wait without the batch's own growth."""
    verify = scenario.verify(1 + scenario.num_drafts) + scenario.overhead
    slow = theory.expected_tokens(scenario.acceptance, scenario.num_drafts)
    missed = theory.expected_tokens(scenario.fast_acceptance, scenario.num_drafts)
    fast = hit_rate * slow + (1.0 - hit_rate) * missed
    return theory.break_even_batch(hit_rate, slow, fast, scenario.num_drafts * scenario.draft(1) / verify)


def _sd_tokens_per_second(scenario: Scenario, batch: int, rounds: int, seed: int) -> float:
    draws = np.random.default_rng(seed)
    drafts = np.full((rounds, batch), scenario.sd_num_drafts)
    accepted = _accepted(draws, np.full(drafts.shape, scenario.acceptance), drafts)
    draft = scenario.sd_draft or scenario.draft
    seconds = theory.sd_round_seconds(scenario.verify, draft, scenario.overhead, batch, scenario.sd_num_drafts)
    return float((accepted + 1).sum() / (rounds * seconds))


@dataclass
class _Tally:
    tokens: int = 0
    seconds: float = 0.0
    rows: int = 0
    hits: int = 0
    late: int = 0
    waited: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class _SsdRounds:
    """The rounds of SSD for one batch."""

    def __init__(self, scenario: Scenario, batch: int, seed: int) -> None:
        self._scenario, self._batch = scenario, batch
        self._draws = np.random.default_rng(seed)
        most = scenario.num_drafts
        # Miss probability of an outcome that stops after k of m drafts: [m, k].
        self._miss = np.ones((most + 1, most + 1))
        for drafts in range(most + 1):
            stops = theory.stop_probabilities(scenario.acceptance, drafts)
            counts = theory.whole_fan_out(stops, scenario.tree_devices * scenario.branches, scenario.exponent)
            self._miss[drafts, : drafts + 1] = [
                theory.miss_probability(count, scenario.exponent, scenario.miss_at_one) for count in counts
            ]
        self._tokens = [theory.expected_tokens(scenario.acceptance, m) for m in range(most + 1)]
        self._fast_tokens = theory.expected_tokens(scenario.fast_acceptance, most)
        self._fast_drafts = most if scenario.fast_acceptance > 0 else 0
        self._rows_a_device = math.ceil(batch / scenario.draft_devices)

    def run(self, rounds: int) -> _Tally:
        scenario, tally = self._scenario, _Tally()
        drafts = np.full(self._batch, scenario.num_drafts)
        rates = np.full(self._batch, scenario.acceptance)
        for _ in range(rounds):
            verify = scenario.verify(self._batch + int(drafts.sum())) + scenario.overhead
            accepted = _accepted(self._draws, rates, drafts)
            held = self._draws.random(self._batch) >= self._miss[drafts, accepted]
            depth, tree_wait = self._tree(drafts, verify)
            wanted, jit_wait = self._fall_back(held, depth, tally.rate if tally.seconds else 0.0)
            tally.tokens += int(accepted.sum()) + self._batch
            tally.seconds += verify + tree_wait + jit_wait
            tally.rows += self._batch
            tally.hits += int(held.sum())
            tally.late += depth < scenario.num_drafts or tree_wait > 0
            tally.waited += wanted > 0
            misses = ~held if depth else np.ones(self._batch, dtype=bool)
            takes_fast = misses & (wanted == 0)
            drafts = np.where(misses, wanted or self._fast_drafts, depth)
            rates = np.where(takes_fast, scenario.fast_acceptance, scenario.acceptance)
        return tally

    def _tree(self, drafts: np.ndarray, verify: float) -> tuple[int, float]:
        """How deep the trees are when the outcome is known, and what the target waits for them."""
        scenario = self._scenario
        glue = scenario.draft(self._rows_a_device * (1.0 + drafts.mean()))
        step = scenario.draft(self._rows_a_device * scenario.branches)
        if scenario.waits_for_tree:
            return scenario.num_drafts, max(0.0, glue + scenario.num_drafts * step - verify)
        return int(min(max((verify - glue) / step, 0.0), scenario.num_drafts)), 0.0

    def _fall_back(self, held: np.ndarray, depth: int, so_far: float) -> tuple[int, float]:
        """Drafts that the misses wait for (0: the fast fallback), and the seconds it takes."""
        scenario = self._scenario
        misses = int(self._batch - held.sum()) if depth else self._batch
        if misses == 0 or scenario.fallback == "fast":
            return 0, 0.0
        step = scenario.draft(math.ceil(misses / scenario.draft_devices))
        if scenario.fallback == "draft":
            return scenario.num_drafts, scenario.num_drafts * step
        hits = self._batch - misses

        def worth(wanted: int) -> float:  # the rules of `theory`, for each number of drafts
            tokens = hits * self._tokens[depth] + misses * (self._tokens[wanted] if wanted else self._fast_tokens)
            load = self._batch + hits * depth + misses * (wanted or self._fast_drafts)
            seconds = scenario.verify(load) + scenario.overhead + wanted * step
            return tokens / seconds if scenario.fallback == "auto" else tokens - so_far * seconds

        wanted = max(range(scenario.num_drafts + 1), key=worth)
        return wanted, wanted * step


def _accepted(draws: np.random.Generator, rates: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """How many of `drafts` are accepted before the first refusal, each with its rate; any one shape."""
    uniform = 1.0 - draws.random(rates.shape)  # in (0, 1]
    with np.errstate(divide="ignore"):
        # P(k ≥ n) = a^n  ⇔  k = ⌊ln U / ln a⌋
        runs = np.log(uniform) / np.log(rates)
    runs = np.where(rates >= 1.0, np.inf, np.where(rates <= 0.0, 0.0, runs))
    return np.minimum(np.floor(runs), drafts).astype(np.int64)


def _check(holds: bool, name: str, value: object, right: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; it must be {right}.")
