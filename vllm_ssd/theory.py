"""What speculation brings, by formula: plain speculative decoding (SD) and SSD.

Pure functions of measured or assumed inputs; `simulator.py` plays the same inputs round by round.
Knows no engine, no model and no clock.

Symbols, as in the paper of SSD (arXiv 2603.03251): K drafts a round; a, the chance that a draft is
accepted if those before it were; P_k, the chance that a verification stops after k drafts; E, the
tokens a row emits in a round, the bonus or recovery token included; p, the hit rate; T_p, the time
to draft and T_b, the time of the fallback, both in units of one verify. Seconds where it says so.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_ssd import fanout

Acceptance = float | Sequence[float]
"""a, the same at every position, or a_1, a_2, … by position (the last one holds for all further)."""

Seconds = Callable[[float], float]
"""Seconds of a forward by its load: tokens or branches. A `StepTime`, or any curve."""

# ---- tokens ----


def acceptance_at(acceptance: Acceptance, position: int) -> float:
    """a_i of the draft at `position` (from 0). Raises `ValueError` outside [0, 1] or for an empty list."""
    if isinstance(acceptance, (int, float)):
        value = acceptance
    elif len(acceptance):
        value = acceptance[min(position, len(acceptance) - 1)]
    else:
        raise ValueError("acceptance is an empty list; give one rate in [0, 1] for each position")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"acceptance is {value}; it must be within [0, 1]")
    return float(value)


def stop_probabilities(acceptance: Acceptance, num_drafts: int) -> list[float]:
    """P_k for k = 0..num_drafts: the first k drafts are accepted and the next is not. They sum to 1."""
    stops, reached = [], 1.0
    for k in range(num_drafts):
        rate = acceptance_at(acceptance, k)
        stops.append(reached * (1.0 - rate))
        reached *= rate
    return [*stops, reached]


def expected_tokens(acceptance: Acceptance, num_drafts: int) -> float:
    """E = 1 + a_1 + a_1·a_2 + …; with one rate a it is (1 − a^(K+1)) / (1 − a) (arXiv 2211.17192, eq. 1)."""
    tokens, reached = 1.0, 1.0
    for k in range(num_drafts):
        reached *= acceptance_at(acceptance, k)
        tokens += reached
    return tokens


def acceptance_from_tokens(tokens: float, num_drafts: int) -> float:
    """The rate a that gives E = `tokens` with `num_drafts` drafts: the inverse of `expected_tokens`.

    Raises `ValueError` unless 1 ≤ tokens ≤ num_drafts + 1.
    """
    if num_drafts < 1 or not 1.0 <= tokens <= num_drafts + 1:
        raise ValueError(f"{num_drafts} drafts cannot give {tokens} tokens a round; it is within [1, drafts + 1]")
    low, high = 0.0, 1.0
    for _ in range(60):  # halvings: exact to the last bit of a float
        middle = 0.5 * (low + high)
        low, high = (middle, high) if expected_tokens(middle, num_drafts) < tokens else (low, middle)
    return 0.5 * (low + high)


# ---- speed-ups; times in units of one verify ----


def sd_speedup(tokens: float, draft_time: float) -> float:
    """SD over no speculation: E / (1 + T_p), T_p the time of all K draft steps."""
    return tokens / (1.0 + draft_time)


def ssd_speedup(
    hit_rate: float, tokens_hit: float, tokens_miss: float, draft_time: float, fallback_time: float
) -> float:
    """SSD over no speculation: [p·E_hit + (1−p)·E_miss] / [p·max(1, T_p) + (1−p)·(1 + T_b)]."""
    miss_rate = 1.0 - hit_rate
    tokens = hit_rate * tokens_hit + miss_rate * tokens_miss
    return tokens / (hit_rate * max(1.0, draft_time) + miss_rate * (1.0 + fallback_time))


def most_over_sd(draft_time: float) -> float:
    """The most SSD can win over SD, when it always hits: 1 + T_p while drafting takes no longer than a verify."""
    return (1.0 + draft_time) / max(1.0, draft_time)


# ---- fan-out ----


def miss_probability(fan_out: float, exponent: float, at_one: float = 1.0) -> float:
    """Chance that t* is not among the F = `fan_out` candidates: c·F^(−r), never above 1.

    `exponent`: r. `at_one`: c, the miss rate of a single candidate; the paper's law has c = 1.
    """
    return 1.0 if fan_out <= 0 else min(1.0, at_one * fan_out**-exponent)


def optimal_fan_out(stops: Sequence[float], budget: float, exponent: float) -> list[float]:
    """F_k ∝ P_k^(1/(1+r)) with ΣF_k = `budget`: the fan-out theorem, for any P_k = `stops`.

    It maximises Σ P_k (1 − F_k^(−r)) (Lagrange: P_k·r·F_k^(−r−1) is the same at every k). With one
    rate a it is the paper's: F_k ∝ a^(k/(1+r)) for k < K, F_K ∝ a^(K/(1+r))·(1−a)^(−1/(1+r)).
    Real numbers: `whole_fan_out` rounds them.
    """
    weights = [p ** (1.0 / (1.0 + exponent)) for p in stops]
    total = sum(weights)
    if total <= 0.0:
        raise ValueError(f"stop probabilities must hold one above 0, got {list(stops)}")
    return [budget * weight / total for weight in weights]


def whole_fan_out(stops: Sequence[float], budget: int, exponent: float) -> list[int]:
    """`optimal_fan_out` in whole branches that sum to `budget`."""
    return fanout.apportion(optimal_fan_out(stops, 1.0, exponent), budget)


def hit_rate(fan_out: Sequence[float], stops: Sequence[float], exponent: float, at_one: float = 1.0) -> float:
    """p = Σ P_k (1 − miss(F_k))."""
    return sum(stop * (1.0 - miss_probability(count, exponent, at_one)) for stop, count in zip(stops, fan_out))


# ---- fallback ----


def waiting_pays(tokens_hit: float, tokens_jit: float, tokens_fast: float, verify: float, jit: float) -> bool:
    """Whether the rows that missed should wait, by this round alone: (N_hit+N_jit)/(T_v+T_jit) > (N_hit+N_fast)/T_v.

    N: expected tokens of all rows of a kind this round; T: seconds, or any one unit.
    """
    return (tokens_hit + tokens_jit) / (verify + jit) > (tokens_hit + tokens_fast) / verify


def waiting_pays_in_the_long_run(tokens_jit: float, tokens_fast: float, jit: float, rate: float) -> bool:
    """Whether they should wait, by what the time is worth: N_jit − N_fast > R·T_jit.

    `rate`: R, tokens a second of the whole batch over many rounds, misses included. A round with a
    miss is worse than the average one, so `waiting_pays`, which compares it with itself, waits too
    often. This is the rule that maximises tokens over time (renewal reward); `break_even_batch` is
    the batch where it turns.
    """
    return tokens_jit - tokens_fast > rate * jit


def break_even_batch(hit_rate: float, tokens_slow: float, tokens_fast: float, slow_time: float) -> float:
    """b* = ln(1 − (N_s/N_f − 1)/T_slow) / ln p: batches above it should not wait for the draft.

    N_s, N_f: tokens a row emits a round, *averaged over hits and misses*, if misses take the slow
    (waiting) and the fast fallback. `slow_time`: T_slow, the wait in units of a verify, which the
    batch pays if any of its b rows misses, so with probability 1 − p^b. Infinite where waiting
    always pays; 0 where it never does.
    """
    gain = tokens_slow / tokens_fast - 1.0
    if gain <= 0.0:
        return 0.0
    if gain >= slow_time or hit_rate >= 1.0:
        return math.inf
    return math.log(1.0 - gain / slow_time) / math.log(hit_rate) if hit_rate > 0.0 else 0.0


# ---- depth and throughput ----


@dataclass(frozen=True)
class StepTime:
    """Seconds of a forward as a line over its load (tokens or branches)."""

    base: float
    per_unit: float = 0.0

    def __call__(self, load: float) -> float:
        return self.base + self.per_unit * load


def sd_round_seconds(verify: Seconds, draft: Seconds, overhead: float, batch: int, num_drafts: int) -> float:
    """A round of SD: K draft steps over the batch, then the verify of b·(1+K) tokens, one after the other."""
    return num_drafts * draft(batch) + verify(batch * (1 + num_drafts)) + overhead


def ssd_round_seconds(
    verify: Seconds, draft: Seconds, overhead: float, batch: int, num_drafts: int, branches: int
) -> float:
    """A round of SSD that hits: the verify, or the tree if it takes longer.

    The tree: one forward over the new tokens of the trunk (glue), then K steps over b·B branches.
    """
    tree = draft(batch * (1 + num_drafts)) + num_drafts * draft(batch * branches)
    return max(verify(batch * (1 + num_drafts)) + overhead, tree)


def best_num_drafts(
    tokens: Callable[[int], float], round_seconds: Callable[[int], float], most: int
) -> tuple[int, float]:
    """(K, tokens a second of a row) at the K in 0..most that maximises E(K) / T(K)."""
    rates = [tokens(k) / round_seconds(k) for k in range(most + 1)]
    best = max(range(most + 1), key=rates.__getitem__)
    return best, rates[best]


@dataclass(frozen=True)
class Source:
    """A kind of draft in a round: from the tree, part of one, waited for, n-grams, none."""

    share: float  # of the rows
    num_drafts: float  # that such a row has verified
    acceptance: Acceptance

    def tokens(self) -> float:
        """E of such a row; a broken number of drafts is taken between its whole neighbours."""
        whole = int(self.num_drafts)
        low = expected_tokens(self.acceptance, whole)
        return low + (self.num_drafts - whole) * (expected_tokens(self.acceptance, whole + 1) - low)


def predict_tokens_per_second(
    rows: float, sources: Sequence[Source], verify_seconds: float, overhead_seconds: float, wait_seconds: float = 0.0
) -> float:
    """Tokens a second of a running batch: rows · Σ share·E / (verify + overhead + wait), seconds a round.

    Raises `ValueError` if the shares do not sum to 1, or if a round takes no time.
    """
    total = sum(source.share for source in sources)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ValueError(f"the shares of the sources sum to {total:.4f}; they must sum to 1")
    seconds = verify_seconds + overhead_seconds + wait_seconds
    if seconds <= 0.0:
        raise ValueError("a round takes no time; verify_seconds must be above 0")
    return rows * sum(source.share * source.tokens() for source in sources) / seconds
