#!/usr/bin/env python3
"""Hold the scaling laws of `vllm_ssd.sdsl` against drafts of several sizes, trained here for one target.

    validate_scaling_law.py train      distil the drafts (about a quarter of an hour on one core)
    validate_scaling_law.py measure    their perplexity and acceptance
    validate_scaling_law.py clock      times of forwards, and the speed of speculation; wants an idle core
    validate_scaling_law.py report     fit the law; table, JSON and plot

Everything comes from this repository (the target and the prompts in `tests/data`) and from the
standard library of the Python that runs it; seeds are fixed. What is made stays in --work.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
SEED = 0


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    {"train": train, "measure": measure, "clock": clock, "report": report}[args.stage](args)


def train(args: argparse.Namespace) -> None:
    from scaling_law import corpus, students

    path = args.work / "corpus.npz"
    if path.exists():
        text = corpus.load(path)
    else:
        text = corpus.make(args.target, args.prompts, args.tokens, SEED)
        corpus.save(text, path)
    students.train_all(text, args.target, args.work, SEED, log)


def measure(args: argparse.Namespace) -> None:
    from scaling_law import measurements

    drafts = sorted(args.work.glob("draft-*[0-9]"), key=lambda folder: int(folder.name.split("-")[1]))
    if not drafts:
        raise SystemExit(f"{args.work} holds no drafts: run the stage 'train' first")
    figures = measurements.judge(args.target, [*drafts, *args.draft], args.prompts, log)
    figures.save(args.work / "figures.json")


def clock(args: argparse.Namespace) -> None:
    import models
    from scaling_law import measurements

    figures = _figures(args)
    slower = args.work / f"target-{args.layers}"
    if not slower.exists():
        models.grow(args.target, slower, args.layers)
    measurements.clock(figures, slower, args.prompts, log)
    figures.save(args.work / "figures.json")


def _figures(args: argparse.Namespace) -> Any:
    from scaling_law.measurements import Figures

    path = args.work / "figures.json"
    if not path.exists():
        raise SystemExit(f"{path} is not there: run the stage 'measure' first")
    return Figures.load(path)


def report(args: argparse.Namespace) -> None:
    from scaling_law import report

    figures = _figures(args)
    if not figures.plain_speed:
        raise SystemExit("no speeds were measured: run the stage 'clock' first")
    found = report.make(figures)
    print(report.table(found))
    for field in ("fit", "greedy_fit", "loss_law", "loss_r_squared", "log_fit_r_squared", "published_r_squared"):
        print(f"{field}: {getattr(found, field)}")
    for field in ("speed_r_squared", "speed_bias", "order", "flops_r_squared", "flops_order"):
        print(f"{field}: {getattr(found, field):.3f}")
    print(f"peak: measured {found.best_measured}, from parts {found.best_predicted}, by FLOPs {found.best_by_flops}")
    print(f"target: perplexity {figures.target_perplexity:.1f}, {figures.plain_speed:.0f} tokens/s without speculation")
    report.save(found, args.work / "report.json")
    report.plot(found, figures, args.plot)


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stage", choices=["train", "measure", "clock", "report"])
    add("--work", type=Path, default=REPOSITORY / ".models" / "scaling_law", help="where corpus and drafts are kept")
    add("--target", type=Path, default=REPOSITORY / "tests" / "data" / "models" / "target")
    add("--prompts", type=Path, default=REPOSITORY / "tests" / "data" / "prompts")
    add("--tokens", type=int, default=480_000, help="tokens to train on")
    add("--draft", type=Path, nargs="*", default=[], help="measure: further drafts of the same target")
    add("--layers", type=int, default=32, help="clock: layers of the target whose speed is measured; it says the same")
    add("--plot", type=Path, default=Path("scaling_law.png"), help="report: where the plot goes")
    add("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
