"""The scaling laws of speculative decoding: which draft size gives a target the most throughput.

SDSL (arXiv 2603.11053) joins three laws. Acceptance α is affine in the perplexities x of the draft
and y of the target; perplexity follows from size and data (Chinchilla's form, arXiv 2203.15556);
throughput follows from α, the drafts a round γ and the sizes N of the draft and M of the target.
The best N that comes out is close to linear in M.

It prices FLOPs. SSD hides the draft's time instead: there a larger draft can be right as long as
its tree is not late (`vllm_ssd.theory`). Pure functions; sizes in parameters, data in tokens,
losses in nats a token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special, stats

_MOST_ACCEPTANCE = 0.999
"""What an affine law may predict at most: 1 is the target itself."""
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float


# ---- acceptance from perplexities ----


@dataclass(frozen=True)
class AcceptanceLaw:
    """α = A·x + B·y + C."""

    draft: float  # A, a unit of the draft's perplexity
    target: float  # B, a unit of the target's perplexity
    constant: float  # C

    def __call__(self, draft_perplexity: float, target_perplexity: float) -> float:
        """α, kept within [0, 0.999]. Raises `ValueError` for a perplexity below 1."""
        for name, value in (("draft", draft_perplexity), ("target", target_perplexity)):
            if not value >= 1.0:
                raise ValueError(f"the perplexity of the {name} is {value}; it must be at least 1")
        value = self.draft * draft_perplexity + self.target * target_perplexity + self.constant
        return min(max(value, 0.0), _MOST_ACCEPTANCE)


PUBLISHED_ACCEPTANCE = AcceptanceLaw(draft=-0.0067, target=0.01297, constant=0.642)
"""Fitted to pairs of OPT, Qwen and Llama models on HellaSwag; R² 0.602, mean squared error 0.00128.
On other text it is an extrapolation."""


def within_reach(acceptance: float) -> bool:
    """Whether an affine law gave this α, rather than an end of what it may say."""
    return 0.0 < acceptance < _MOST_ACCEPTANCE


@dataclass(frozen=True)
class AcceptanceFit:
    """An acceptance law fitted to measured pairs, and how well it fits."""

    law: AcceptanceLaw
    draft: Interval
    target: Interval | None  # None: all pairs have one target, whose term is part of the constant
    constant: Interval
    r_squared: float
    mean_squared_error: float


def fit_acceptance(
    draft_perplexities: Sequence[float], target_perplexities: Sequence[float], acceptances: Sequence[float]
) -> AcceptanceFit:
    """Ordinary least squares of α on x and y, with intervals from Student's t.

    Raises `ValueError` if there are too few pairs, if all drafts are alike or if a value is impossible.
    """
    x, y, alpha = (np.asarray(v, dtype=float) for v in (draft_perplexities, target_perplexities, acceptances))
    if not len(x) == len(y) == len(alpha):
        raise ValueError(f"{len(x)} draft perplexities, {len(y)} target perplexities and {len(alpha)} acceptance rates")
    if (x < 1).any() or (y < 1).any():
        raise ValueError("a perplexity is below 1")
    if (alpha < 0).any() or (alpha > 1).any():
        raise ValueError("an acceptance rate is outside [0, 1]")
    if np.ptp(x) == 0:
        raise ValueError("all drafts have the same perplexity; the law needs different ones")
    one_target = np.ptp(y) == 0
    columns = [x, np.ones_like(x)] if one_target else [x, np.ones_like(x), y]
    fit = _least_squares(np.stack(columns, axis=1), alpha)
    target = None if one_target else fit.intervals[2]
    draft, constant = fit.intervals[:2]
    law = AcceptanceLaw(draft.value, 0.0 if target is None else target.value, constant.value)
    return AcceptanceFit(law, draft, target, constant, fit.r_squared, fit.mean_squared_error)


@dataclass(frozen=True)
class _Fit:
    intervals: list[Interval]
    r_squared: float
    mean_squared_error: float


def _least_squares(design: np.ndarray, observed: np.ndarray) -> _Fit:
    """design [n, p], observed [n]."""
    count, width = design.shape
    if count <= width:
        raise ValueError(f"{count} pairs cannot give {width} coefficients and their intervals; measure more")
    coefficients, _, rank, _ = np.linalg.lstsq(design, observed, rcond=None)
    if rank < width:
        raise ValueError("the perplexities of drafts and targets move together; the law needs independent ones")
    residuals = observed - design @ coefficients
    variance = float(residuals @ residuals) / (count - width)
    errors = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    reach = stats.t.ppf(0.5 + _CONFIDENCE / 2, count - width) * errors
    total = float(((observed - observed.mean()) ** 2).sum())
    unexplained = float(residuals @ residuals)
    return _Fit(
        [Interval(float(c), float(c - r), float(c + r)) for c, r in zip(coefficients, reach)],
        1.0 - unexplained / total if total > 0 else 0.0,
        unexplained / count,
    )


# ---- perplexity from size and data ----


@dataclass(frozen=True)
class LossLaw:
    """L(N, D) = E + A/N^α + B/D^β, nats a token."""

    irreducible: float  # E
    size: float  # A
    size_exponent: float  # α
    data: float  # B
    data_exponent: float  # β

    def loss(self, params: float, tokens: float) -> float:
        """Raises `ValueError` unless both are above 0."""
        _check_positive(params=params, tokens=tokens)
        return self.irreducible + self.size * params**-self.size_exponent + self.data * tokens**-self.data_exponent

    def perplexity(self, params: float, tokens: float) -> float:
        return math.exp(self.loss(params, tokens))


CHINCHILLA = LossLaw(irreducible=1.69, size=406.4, size_exponent=0.34, data=410.7, data_exponent=0.28)
"""Hoffmann et al. (arXiv 2203.15556), their third approach, on MassiveText."""


def fit_loss(params: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> tuple[LossLaw, float]:
    """A loss law and its R², by least squares on the logarithm of the loss.

    Where all models saw the same amount of data, its term is part of E. Raises `ValueError` if
    there are fewer models than constants, or a value is not above 0.
    """
    n, d, observed = (np.asarray(v, dtype=float) for v in (params, tokens, losses))
    if (n <= 0).any() or (d <= 0).any() or (observed <= 0).any():
        raise ValueError("sizes, data and losses must be above 0")
    same_data = np.ptp(d) == 0
    width = 3 if same_data else 5
    if len(n) < width or np.ptp(n) == 0:
        raise ValueError(f"{len(n)} models cannot give the {width} constants of the law; measure more sizes")

    def law(z: np.ndarray) -> LossLaw:  # logarithms of the constants: all stay above 0
        data = (0.0, 1.0) if same_data else (math.exp(z[3]), math.exp(z[4]))
        return LossLaw(math.exp(z[0]), math.exp(z[1]), math.exp(z[2]), *data)

    def residuals(z: np.ndarray) -> np.ndarray:
        found = law(z)
        return np.log([found.loss(*pair) for pair in zip(n, d)]) - np.log(observed)

    best = None
    for exponent in (0.1, 0.3, 0.6):  # the surface has several hollows
        start = [math.log(0.5 * observed.min()), math.log(np.ptp(observed) + 0.1) + exponent * math.log(n.min())]
        start += [math.log(exponent)] + ([] if same_data else [math.log(d.min() ** 0.3), math.log(0.3)])
        found = optimize.least_squares(residuals, start, bounds=(-20.0, 40.0), max_nfev=4000)
        best = found if best is None or found.cost < best.cost else best
    total = float(((np.log(observed) - np.log(observed).mean()) ** 2).sum())
    return law(best.x), 1.0 - 2.0 * float(best.cost) / total


# ---- throughput ----


def throughput(acceptance: float, gamma: float, draft_params: float, target_params: float) -> float:
    """Tokens for the price of one target forward: (1 − α^(γ+1)) / [(1 − α)(γ·N/M + 1)].

    The verify of γ+1 tokens is priced as one forward, as where memory bandwidth is the limit.
    Raises `ValueError` for α outside [0, 1), γ below 0 or a size not above 0.
    """
    _check_acceptance(acceptance)
    _check_positive(draft_params=draft_params, target_params=target_params)
    if not gamma >= 0:
        raise ValueError(f"gamma is {gamma}; it must be at least 0")
    tokens = (1.0 - acceptance ** (gamma + 1.0)) / (1.0 - acceptance)
    return tokens / (gamma * draft_params / target_params + 1.0)


def optimal_gamma(acceptance: float, draft_params: float, target_params: float) -> float:
    """The real γ ≥ 0 that maximises `throughput`.

    With c = N/M and L = −ln α the derivative vanishes where u·e^(−u) = e^(L − 1 − L/c) for
    u = L·γ + L/c + 1. So u = −W₋₁(−e^(L−1−L/c)), W₋₁ the lower branch of Lambert's function.
    """
    _check_acceptance(acceptance)
    _check_positive(draft_params=draft_params, target_params=target_params)
    ratio = draft_params / target_params
    if acceptance == 0.0 or ratio >= 1.0:
        return 0.0
    rate = -math.log(acceptance)
    exponent = rate - 1.0 - rate / ratio
    if exponent > -700.0:
        u = -float(special.lambertw(-math.exp(exponent), k=-1).real)
    else:  # e^exponent underflows: the same equation, u − ln u = −exponent, by iteration
        u = -exponent
        for _ in range(50):
            u = -exponent + math.log(u)
    return max(0.0, (u - 1.0) / rate - 1.0 / ratio)


def best_gamma(acceptance: float, draft_params: float, target_params: float) -> int:
    """The whole γ with the highest throughput: a neighbour of the real one, for the curve has one peak."""
    low = math.floor(optimal_gamma(acceptance, draft_params, target_params))
    return max((low, low + 1), key=lambda gamma: throughput(acceptance, gamma, draft_params, target_params))


# ---- the best size ----

LINEAR_SLOPE = Interval(2.71e-3, 2.67e-3, 2.75e-3)
"""μ of N_opt = M_0 + μ·M."""
LINEAR_START = Interval(8.71e7, 8.50e7, 8.93e7)
"""M_0, parameters."""


def linear_rule(target_params: float) -> Interval:
    """N_opt = M_0 + μ·M with the published constants; the interval takes both at their ends."""
    _check_positive(target_params=target_params)
    return Interval(
        LINEAR_START.value + LINEAR_SLOPE.value * target_params,
        LINEAR_START.low + LINEAR_SLOPE.low * target_params,
        LINEAR_START.high + LINEAR_SLOPE.high * target_params,
    )


def optimal_draft_size(
    target_params: float,
    draft_tokens: float,
    target_tokens: float,
    acceptance: AcceptanceLaw = PUBLISHED_ACCEPTANCE,
    loss: LossLaw = CHINCHILLA,
) -> float:
    """N*: the size below the target's that maximises throughput at its best γ, found numerically.

    `draft_tokens`, `target_tokens`: what they are trained on. Raises `ValueError` for values not above 0.
    """
    _check_positive(target_params=target_params, draft_tokens=draft_tokens, target_tokens=target_tokens)
    target_perplexity = loss.perplexity(target_params, target_tokens)

    def cost(log_params: float) -> float:
        params = math.exp(log_params)
        alpha = acceptance(loss.perplexity(params, draft_tokens), target_perplexity)
        gamma = optimal_gamma(alpha, params, target_params)
        return -throughput(alpha, gamma, params, target_params)

    # A coarse look first: α is flat at 0 for the smallest drafts, where a slope shows nothing.
    grid = np.linspace(math.log(1e-5 * target_params), math.log(target_params), 200)
    best = int(np.argmin([cost(point) for point in grid]))
    bounds = (grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)])
    return math.exp(optimize.minimize_scalar(cost, bounds=bounds, method="bounded").x)


def _check_acceptance(acceptance: float) -> None:
    if not 0.0 <= acceptance < 1.0:
        raise ValueError(f"the acceptance rate is {acceptance}; it must be within [0, 1)")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0 or not math.isfinite(value):
            raise ValueError(f"{name} is {value}; it must be above 0")
