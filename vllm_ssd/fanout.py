"""How a budget of branches is spread over the positions where a verification may stop.

The paper's fan-out theorem (arXiv 2603.03251): if the chance that t* is not among the F most
probable candidates falls as F^(-r), the expected hits are maximal for F_k ∝ P_k^(1/(1+r)), P_k
being the chance to stop at position k. With acceptance rate a, P_k = a^k (1-a) for k < K and
P_K = a^K: the last position, where everything was accepted, often gets the most.
"""

from collections.abc import Sequence

DEFAULT_EXPONENT = 1.0  # r; the miss rate of language models falls about as 1/F


def stop_probabilities(acceptance: float, num_drafts: int) -> list[float]:
    """P_k for k = 0..num_drafts, with `acceptance` in [0, 1] at every position."""
    stops = [acceptance**k * (1.0 - acceptance) for k in range(num_drafts)]
    return [*stops, acceptance**num_drafts]


def geometric_weights(acceptance: float, num_drafts: int, exponent: float = DEFAULT_EXPONENT) -> list[float]:
    """F_k up to a factor, k = 0..num_drafts. `acceptance` is kept off 0 and 1."""
    acceptance = min(max(acceptance, 0.05), 0.95)
    return [p ** (1.0 / (1.0 + exponent)) for p in stop_probabilities(acceptance, num_drafts)]


def apportion(weights: Sequence[float], budget: int) -> list[int]:
    """Split `budget` in whole numbers in proportion to `weights` (largest remainders).

    Raises `ValueError` if no weight is above 0.
    """
    total = sum(weights)
    if total <= 0:
        raise ValueError(f"weights must hold one above 0, got {list(weights)}")
    shares = [budget * weight / total for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k])
    for k in by_remainder[: budget - sum(counts)]:
        counts[k] += 1
    return counts


class FanOut:
    """Branch counts by position, for one setting of the option `fan_out`."""

    def __init__(self, setting: str | tuple[int, ...]) -> None:
        self._setting = setting

    def counts(self, num_drafts: int, budget: int, acceptance: float) -> list[int]:
        """F_0..F_num_drafts for a trunk of `num_drafts` drafts, at most `budget` in sum.

        A list given by the user is meant for K drafts; of a shorter trunk the last position
        takes the list's last count, and a smaller budget scales it.
        """
        if self._setting == "uniform":
            return apportion([1.0] * (num_drafts + 1), budget)
        if self._setting == "geometric":
            return apportion(geometric_weights(acceptance, num_drafts), budget)
        counts = [*self._setting[:num_drafts], self._setting[-1]]
        return counts if sum(counts) <= budget else apportion(counts, budget)
