"""The law fitted to what was measured: predicted beside measured, R², the peak as a plot."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from scaling_law.measurements import DEPTHS, DraftFigures, Figures
from vllm_ssd import theory
from vllm_ssd.sdsl import scaling_law
from vllm_ssd.sdsl.scaling_law import PUBLISHED_ACCEPTANCE, AcceptanceFit


@dataclasses.dataclass
class Row:
    """One draft: what was predicted and what was measured."""

    name: str
    params: int
    perplexity: float
    alpha: float  # sampled, measured
    alpha_published: float  # by the published law
    alpha_fitted: float  # by the law fitted to the *other* drafts
    greedy: float  # share of equal argmaxes
    step_ms: float
    speed: float  # best K, tokens/s of plain SD
    speed_depth: int
    speed_predicted: float  # by times of forwards and acceptance measured apart, best K
    speed_predicted_depth: int
    speed_by_flops: float  # by SDSL's price: parameters, best γ, times the plain speed
    speed_by_law: float  # by times of forwards and the acceptance of the fitted law


@dataclasses.dataclass
class Report:
    """Everything that `docs/scaling_law.md` quotes."""

    rows: list[Row]
    fit: AcceptanceFit
    greedy_fit: AcceptanceFit  # the same law for the share of equal argmaxes
    log_fit_r_squared: float  # α against the logarithm of the perplexity
    published_r_squared: float  # of the published law on these drafts
    loss_r_squared: float
    loss_law: scaling_law.LossLaw
    speed_r_squared: float  # predicted speed against measured, all drafts and depths
    flops_r_squared: float
    speed_bias: float  # mean of predicted over measured
    order: float  # Spearman's rank correlation of predicted and measured best speeds
    flops_order: float  # the same for SDSL's price
    best_measured: str  # of the drafts that were trained alike: the peak over size
    best_predicted: str
    best_by_flops: str


def make(figures: Figures) -> Report:
    """Fit the laws to the measured drafts and hold them against each."""
    drafts = sorted(figures.drafts, key=lambda draft: draft.params)
    x, y = [draft.perplexity for draft in drafts], [figures.target_perplexity] * len(drafts)
    alpha, greedy = [d.sampled_acceptance for d in drafts], [d.greedy_acceptance for d in drafts]
    fit, greedy_fit = scaling_law.fit_acceptance(x, y, alpha), scaling_law.fit_acceptance(x, y, greedy)
    trained = [draft for draft in drafts if is_trained_here(draft.name)]
    loss_law, loss_r_squared = scaling_law.fit_loss(
        [d.params for d in trained], [1.0] * len(trained), [math.log(d.perplexity) for d in trained]
    )
    rows = [_row(figures, draft, drafts) for draft in drafts]
    pairs = [(_predicted(figures, d, k), d.speed[k]) for d in drafts for k in DEPTHS]
    speeds, alike = [row.speed for row in rows], [row for row in rows if is_trained_here(row.name)]
    return Report(
        rows=rows,
        fit=fit,
        greedy_fit=greedy_fit,
        log_fit_r_squared=float(np.corrcoef(np.log(x), alpha)[0, 1] ** 2),
        published_r_squared=r_squared([row.alpha_published for row in rows], alpha),
        loss_r_squared=loss_r_squared,
        loss_law=loss_law,
        speed_r_squared=r_squared(*zip(*pairs)),
        flops_r_squared=r_squared([row.speed_by_flops for row in rows], speeds),
        speed_bias=float(np.mean([predicted / measured for predicted, measured in pairs])),
        order=float(stats.spearmanr([row.speed_predicted for row in rows], speeds).statistic),
        flops_order=float(stats.spearmanr([row.speed_by_flops for row in rows], speeds).statistic),
        best_measured=max(alike, key=lambda row: row.speed).name,
        best_predicted=max(alike, key=lambda row: row.speed_predicted).name,
        best_by_flops=max(alike, key=lambda row: row.speed_by_flops).name,
    )


def is_trained_here(name: str) -> bool:
    """Whether a draft is one of those that differ in size only."""
    return name.startswith("draft-")


def r_squared(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """1 − residual over total sum of squares; below 0 where the mean would predict better."""
    p, m = np.asarray(predicted), np.asarray(measured)
    return 1.0 - float(((m - p) ** 2).sum() / ((m - m.mean()) ** 2).sum())


def _row(figures: Figures, draft: DraftFigures, drafts: Sequence[DraftFigures]) -> Row:
    others = [other for other in drafts if other is not draft]
    law = scaling_law.fit_acceptance(
        [other.perplexity for other in others],
        [figures.target_perplexity] * len(others),
        [other.sampled_acceptance for other in others],
    ).law
    greedy_law = scaling_law.fit_acceptance(
        [other.perplexity for other in others],
        [figures.target_perplexity] * len(others),
        [float(np.mean(list(other.own_acceptance.values()))) for other in others],
    ).law
    depth = max(DEPTHS, key=draft.speed.__getitem__)
    predicted_depth = max(DEPTHS, key=lambda k: _predicted(figures, draft, k))
    alpha = greedy_law(draft.perplexity, figures.target_perplexity)
    own = min(float(np.mean(list(draft.own_acceptance.values()))), 0.999)
    gamma = scaling_law.best_gamma(own, draft.params, figures.timed_params)
    return Row(
        name=draft.name,
        params=draft.params,
        perplexity=draft.perplexity,
        alpha=draft.sampled_acceptance,
        alpha_published=PUBLISHED_ACCEPTANCE(draft.perplexity, figures.target_perplexity),
        alpha_fitted=law(draft.perplexity, figures.target_perplexity),
        greedy=draft.greedy_acceptance,
        step_ms=1e3 * draft.step_seconds,
        speed=draft.speed[depth],
        speed_depth=depth,
        speed_predicted=_predicted(figures, draft, predicted_depth),
        speed_predicted_depth=predicted_depth,
        speed_by_flops=figures.plain_speed * scaling_law.throughput(own, gamma, draft.params, figures.timed_params),
        speed_by_law=max(_speed(figures, draft, alpha, k) for k in DEPTHS),
    )


def _predicted(figures: Figures, draft: DraftFigures, depth: int) -> float:
    """Tokens a second of SD from the times of forwards and the acceptance at the *other* depths."""
    others = [rate for k, rate in draft.own_acceptance.items() if k != depth]
    return _speed(figures, draft, float(np.mean(others)), depth)


def _speed(figures: Figures, draft: DraftFigures, acceptance: float, depth: int) -> float:
    seconds = depth * draft.step_seconds + figures.verify_seconds[depth + 1]
    return theory.expected_tokens(acceptance, depth) / seconds


def table(report: Report) -> str:
    """The rows in Markdown."""
    lines = [
        "| draft | parameters | perplexity | α measured | by the others' law | by the published law | equal argmax "
        "| step ms | SD tokens/s (K) | predicted (K) | by the law's α | by FLOPs |",
        "|" + " --- |" * 12,
    ]
    for row in report.rows:
        lines.append(
            f"| {row.name} | {row.params:,} | {row.perplexity:.1f} | {row.alpha:.3f} | {row.alpha_fitted:.3f} | "
            f"{row.alpha_published:.3f} | {row.greedy:.3f} | {row.step_ms:.2f} | {row.speed:.0f} ({row.speed_depth}) | "
            f"{row.speed_predicted:.0f} ({row.speed_predicted_depth}) | {row.speed_by_law:.0f} | "
            f"{row.speed_by_flops:.0f} |"
        )
    return "\n".join(lines)


def save(report: Report, path: Path) -> None:
    path.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")


def plot(report: Report, figures: Figures, path: Path) -> None:
    """α over perplexity with the fitted and the published law; speed over size with its peak."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _plot_acceptance(left, report, figures)
    _plot_speed(right, report, figures)
    figure.savefig(path, dpi=130)


def _plot_acceptance(panel: Any, report: Report, figures: Figures) -> None:
    rows = sorted(report.rows, key=lambda row: row.perplexity)
    x = [row.perplexity for row in rows]
    panel.plot(x, [row.alpha for row in rows], "o", label="measured (T=1)")
    panel.plot(
        x, [report.fit.law(v, figures.target_perplexity) for v in x], label=f"fit, R² {report.fit.r_squared:.2f}"
    )
    panel.plot(x, [row.alpha_published for row in rows], "--", label="published law")
    panel.set_xlabel("perplexity of the draft")
    panel.set_ylabel("acceptance rate α")
    panel.legend()


def _plot_speed(panel: Any, report: Report, figures: Figures) -> None:
    alike = [row for row in report.rows if is_trained_here(row.name)]
    others = [row for row in report.rows if not is_trained_here(row.name)]
    for rows, lines, what in ((alike, ("o-", "s--", "^:"), ""), (others, ("o", "s", "^"), ", trained longer")):
        sizes = [row.params for row in rows]
        panel.plot(sizes, [row.speed for row in rows], lines[0], color="C0", label=f"SD measured, best K{what}")
        panel.plot(sizes, [row.speed_predicted for row in rows], lines[1], color="C1", label=f"from its parts{what}")
        panel.plot(sizes, [row.speed_by_flops for row in rows], lines[2], color="C2", label=f"by FLOPs{what}")
    panel.axhline(figures.plain_speed, color="grey", linestyle=":", label="no speculation")
    panel.set_xscale("log")
    panel.set_xlabel("draft parameters")
    panel.set_ylabel("tokens/s, batch 1, greedy")
    panel.legend(fontsize="small")
