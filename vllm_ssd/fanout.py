"""How a budget of branches is spread over the positions where a verification may stop.

The paper's fan-out theorem (arXiv 2603.03251): if the chance that t* is not among the F most
probable candidates falls as F^(-r), the expected hits are maximal for F_k ∝ P_k^(1/(1+r)), P_k
being the chance to stop at position k. With acceptance rate a, P_k = a^k (1-a) for k < K and
P_K = a^K: the last position, where everything was accepted, often gets the most.

The theorem knows only averages. A row knows more: the draft's own probabilities say where this
verification is likely to stop and with which token. An outcome (k, t*) has the probability
q(d_1)···q(d_k)·q(t*), and the budget goes to the most probable ones. How far q can be taken at
its word is measured: it is sharpened (or flattened) until what the target emitted is most likely.
"""

from collections.abc import Sequence

import numpy as np

IMPOSSIBLE = -60.0  # relative logit of a candidate that cannot be; finite, so that no sum is NaN
MOST_CERTAIN = 0.999  # of an acceptance
_LARGEST_LOGIT = float(np.finfo(np.float32).max)
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

    @property
    def by_row(self) -> bool:
        """Whether each row spreads its budget by its own probabilities (`most_probable_outcomes`)."""
        return self._setting == "measured"

    def counts(self, num_drafts: int, budget: int, acceptance: float) -> list[int]:
        """F_0..F_num_drafts for a trunk of `num_drafts` drafts, at most `budget` in sum.

        A list given by the user is meant for K drafts; of a shorter trunk the last position
        takes the list's last count (its greatest if no other branch were left, after a miss say), and a smaller
        budget scales it.
        """
        if self._setting == "uniform":
            return apportion([1.0] * (num_drafts + 1), budget)
        if self._setting in ("geometric", "measured"):
            return apportion(geometric_weights(acceptance, num_drafts), budget)
        counts = [*self._setting[:num_drafts], self._setting[-1]]
        if not any(counts):
            counts[-1] = max(self._setting)
        return counts if sum(counts) <= budget else apportion(counts, budget)


class Sharpness:
    """The exponent α that makes the draft's law ∝ q^α fit what the target emits.

    Maximum likelihood by a Newton step for each observed token, with the past forgotten slowly.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._curvature = 1.0

    def observe(self, logits: np.ndarray, emitted: int) -> None:
        """The target emitted the candidate at index `emitted` of `logits` ([m])."""
        if not np.isfinite(logits).all():
            logits = np.nan_to_num(logits.astype(np.float64), nan=-np.inf).clip(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        centred = np.maximum(logits - logits.max(), IMPOSSIBLE)
        probs = np.exp(self.value * centred)
        probs /= probs.sum()
        mean = float(probs @ centred)
        self._curvature = 0.98 * self._curvature + 0.02 * float(probs @ (centred - mean) ** 2)
        # d/dα log p(emitted) = x_emitted − E[x];  −d²/dα² = Var[x]
        step = 0.02 * (float(centred[emitted]) - mean) / max(self._curvature, 0.05)
        self.value = min(max(self.value + step, 0.25), 4.0)


def most_probable_outcomes(
    token_ids: np.ndarray,
    logits: np.ndarray,
    trunk: Sequence[int],
    budget: int,
    sharpness: float,
    acceptance: Sequence[float] | None = None,
    recovered: float = 1.0,
) -> list[tuple[int, int]]:
    """The `budget` most probable outcomes (k, t*), best first.

    `token_ids`, `logits`: [len(trunk) + 1, m], the candidates after the committed tokens and
    trunk[:k]. The trunk's own next token is no outcome at its row: were it right, the
    verification would go on.

    An argmax draft, or one from n-grams, is accepted with the probability that the target gives it, for which
    the draft's own stands. A drawn one is accepted with min(1, p / q), however improbable it was: its chance is
    what is measured, `acceptance` ([len(trunk)], given those before). What is left goes to the other candidates, times
    `recovered`, for they hold the token less often there than at the end (`statistics.Recovery`).
    """
    logits = np.clip(logits, -_LARGEST_LOGIT, _LARGEST_LOGIT)  # infinite ones would be NaN
    scaled = sharpness * np.maximum(logits - logits[:, :1], IMPOSSIBLE)
    log_probs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    own = token_ids[:-1] == np.asarray(trunk, dtype=token_ids.dtype)[:, None]  # [len(trunk), m]
    floor = log_probs[:-1].min(axis=1) if len(trunk) else np.zeros(0)
    accepted = np.where(own.any(axis=1), np.where(own, log_probs[:-1], 0.0).sum(axis=1), floor)
    if acceptance is not None:
        others = np.log1p(-np.minimum(np.where(own, np.exp(log_probs[:-1]), 0.0).sum(axis=1), MOST_CERTAIN))
        rates = np.clip(np.asarray(acceptance, dtype=np.float64), 1.0 - MOST_CERTAIN, MOST_CERTAIN)
        log_probs[:-1] += (np.log(recovered) + np.log1p(-rates) - others)[:, None]
        accepted = np.log(rates)
    log_probs[1:] += np.cumsum(accepted)[:, None]
    log_probs[:-1][own] = -np.inf
    best = np.argsort(-log_probs, axis=None, kind="stable")[:budget]
    rows, columns = np.unravel_index(best, log_probs.shape)
    possible = np.isfinite(log_probs[rows, columns])
    return list(zip(rows[possible].tolist(), token_ids[rows, columns][possible].tolist()))
