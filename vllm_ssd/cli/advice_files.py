"""Advice as files: JSON with every figure, and a plot of speed over size."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_ssd.sdsl.advisor import Advice, Assessment
from vllm_ssd.sdsl.sizes import show_size


def as_json(advice: Advice) -> dict[str, Any]:
    """All figures, times in seconds; names as in `advisor`."""
    timed = advice.target.verify_seconds is not None
    return {
        "target": {
            "name": advice.target.name,
            "params": advice.target.params,
            "perplexity": advice.target.perplexity,
            "verify_seconds": _points(advice.target.verify_seconds),
        },
        "setting": dataclasses.asdict(advice.setting),
        "best_size": dataclasses.asdict(advice.best_size),
        "rule_applies": advice.rule_applies,
        "measured": advice.measured,
        "rates": "tokens a second" if timed else "tokens in the time of one verify",
        "drafts": [_assessment_as_json(each) for each in advice.assessments],
        "chosen": advice.chosen and advice.chosen.candidate.name,
        "recommendation": advice.sentence,
    }


def _assessment_as_json(each: Assessment) -> dict[str, Any]:
    candidate = {key: value for key, value in vars(each.candidate).items() if key != "step_seconds"}
    return {
        **candidate,
        "step_seconds": _points(each.candidate.step_seconds),
        "usable": each.usable,
        "ratio_to_best_size": each.ratio_to_best_size,
        "law_acceptance": each.law_acceptance,
        "acceptance_used": each.acceptance,
        "sdsl": {"gain": each.sdsl, "gamma": each.sdsl_gamma},
        "none": each.none,
        "sd": each.sd and dataclasses.asdict(each.sd),
        "ssd": each.ssd and dataclasses.asdict(each.ssd),
    }


def _points(curve: Any) -> dict[str, list[float]] | None:
    return None if curve is None else {"tokens": list(curve.loads), "seconds": list(curve.seconds)}


def plot(advices: Sequence[Advice], path: Path) -> None:
    """Expected speed over draft size, one panel a batch size; an image as `output.check_image` accepts it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(advices), squeeze=False, figsize=(5 * len(advices), 4), layout="constrained"
    )
    for panel, advice in zip(panels[0], advices):
        rows = sorted((each for each in advice.assessments if each.usable), key=lambda each: each.candidate.params)
        sizes = [each.candidate.params for each in rows]
        panel.plot(sizes, [each.sd.rate for each in rows], "o-", label="SD at its best K")
        panel.plot(sizes, [each.ssd.rate for each in rows], "s-", label="SSD at its best K and width")
        panel.axhline(advice.assessments[0].none, color="grey", linestyle=":", label="no speculation")
        if advice.rule_applies:
            panel.axvline(advice.best_size.value, color="tab:red", linestyle="--", label="N_opt (SDSL)")
        panel.set_xscale("log")
        panel.set_xlabel("draft parameters")
        timed = advice.target.verify_seconds is not None
        panel.set_ylabel("expected tokens/s" if timed else "tokens in the time of a verify")
        of = f"{advice.target.name}, {show_size(advice.target.params)}"
        panel.set_title(f"{of}, batch {advice.setting.batch}" if timed else of, fontsize="medium")
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)
