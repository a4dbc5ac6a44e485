"""The report that holds the scaling law against measurements, on figures whose truth is known."""

import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("scipy")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from scaling_law import report  # noqa: E402
from scaling_law.measurements import DEPTHS, Decoder, DraftFigures, Figures, speculate  # noqa: E402

from vllm_ssd import theory  # noqa: E402

MODELS = Path(__file__).parent.parent / "data" / "models"


def figures() -> Figures:
    """Drafts that obey the laws to the letter: loss from size, α from perplexity, speed from both."""
    verify = {load: 0.010 + 0.0002 * load for load in (1, *(k + 1 for k in DEPTHS))}
    drafts = []
    for params in (2e5, 4e5, 8e5, 1.6e6, 3.2e6, 6.4e6):
        perplexity = math.exp(2.0 + 60.0 * params**-0.3)
        alpha, step = 0.8 - 0.01 * perplexity, 0.0002 + 2e-10 * params
        speed = {k: theory.expected_tokens(alpha, k) / (k * step + verify[k + 1]) for k in DEPTHS}
        drafts.append(
            DraftFigures(
                name=f"draft-{params:.0f}",
                folder="",
                params=int(params),
                perplexity=perplexity,
                sampled_acceptance=alpha,
                greedy_acceptance=alpha,
                greedy_by_position=[alpha],
                step_seconds=step,
                speed=speed,
                own_acceptance=dict.fromkeys(DEPTHS, alpha),
            )
        )
    return Figures(16_000_000, 8.0, 1.0, drafts, 16_000_000, verify, 1 / verify[1])


def test_drafts_that_obey_the_law_are_predicted_exactly() -> None:
    found = report.make(figures())
    assert found.fit.law.draft == pytest.approx(-0.01)
    assert found.fit.r_squared == pytest.approx(1.0)
    assert found.loss_r_squared > 0.999
    assert found.speed_r_squared == pytest.approx(1.0) and found.speed_bias == pytest.approx(1.0)
    assert found.best_predicted == found.best_measured
    for row in found.rows:
        assert row.alpha_fitted == pytest.approx(row.alpha)
        assert row.speed_by_law == pytest.approx(row.speed)
        assert row.name in report.table(found)


def test_what_does_not_obey_is_not_praised() -> None:
    measured = figures()
    for draft, alpha in zip(measured.drafts, (0.7, 0.2, 0.6, 0.3, 0.65, 0.25)):
        draft.sampled_acceptance = alpha
    found = report.make(measured)
    assert found.fit.r_squared < 0.5
    assert found.published_r_squared < 0.5


def test_figures_survive_being_saved(tmp_path: Path) -> None:
    measured = figures()
    measured.save(tmp_path / "figures.json")
    assert Figures.load(tmp_path / "figures.json") == measured


def test_speculation_really_runs() -> None:
    """A target that drafts for itself has every draft accepted; the small draft has some."""
    target, prompts = str(MODELS / "target"), [list(range(300, 332))]
    own_rate, own = speculate(Decoder(target), Decoder(target), prompts, 3)
    rate, accepted = speculate(Decoder(target), Decoder(str(MODELS / "draft")), prompts, 3)
    assert own > 0.9 and 0.0 < accepted < own
    assert own_rate > 0 and rate > 0
