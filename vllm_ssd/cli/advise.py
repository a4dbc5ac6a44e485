"""`vllm-ssd advise`: which draft, how many drafts a round, and what it would bring."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_ssd.cli import advice_files, text
from vllm_ssd.sdsl import advisor
from vllm_ssd.sdsl.advisor import Advice, Assessment, Candidate, Choice, Setting, Target
from vllm_ssd.sdsl.sizes import show_size

Progress = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", help="folder or hub name of the target")
    add("--draft", nargs="+", default=[], help="folders or hub names of drafts to choose from")
    add("--target-params", type=text.read_size, help="size of the target instead, for example 70B")
    add("--draft-params", type=text.read_size, nargs="+", default=[], help="sizes of drafts instead, for example 350M")
    add("--text", type=Path, help="what the target will write, in kind (default: a short text that ships)")
    add("--measure", action="store_true", help="measure acceptance on the text, and the time of forwards here")
    add("--temperature", type=float, default=0.0, help="of the requests; 0 is greedy")
    add("--batch", type=text.read_batches, default=[1], help="requests in flight, for example 1,8")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of timed forwards")
    add("--overhead-ms", type=float, default=1.0, help="vLLM's share of a step that is no forward (default: 1)")
    add("--target-devices", type=text.read_positive, default=1, help="devices the target is spread over (sizes only)")
    add("--json", type=Path, help="write all figures there")
    add("--plot", type=Path, help="draw tokens/s over draft sizes there, as an image")


def run(args: argparse.Namespace) -> int:
    _check(args)
    progress = _Progress()
    advices = _from_sizes(args) if args.target is None else _from_models(args, progress)
    print(describe(advices))
    if args.json:
        args.json.write_text(
            json.dumps([advice_files.as_json(advice) for advice in advices], indent=1) + "\n", encoding="utf-8"
        )
    if args.plot:
        advice_files.plot(advices, args.plot)
    return 0


def _check(args: argparse.Namespace) -> None:
    if (args.target is None) == (args.target_params is None):
        raise ValueError("give either --target, a model, or --target-params, its size.")
    if args.target_params is not None and (args.draft or not args.draft_params):
        raise ValueError("--target-params goes with --draft-params, the sizes of the drafts.")
    if args.target is not None and (args.draft_params or not args.draft):
        raise ValueError("--target goes with --draft, the models to choose from.")
    if args.target_params is not None and args.measure:
        raise ValueError("--measure needs models: give --target and --draft.")
    if args.temperature < 0 or args.overhead_ms < 0:
        raise ValueError("--temperature and --overhead-ms must be at least 0.")
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"{option} is {str(path)!r}, whose folder does not exist.")


class _Progress:
    """Lines on stderr that say what is being done and since when."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {what}", file=sys.stderr, flush=True)


# ---- what is known of the models ----


def _from_sizes(args: argparse.Namespace) -> list[Advice]:
    target = Target(f"a target of {show_size(args.target_params)}", args.target_params)
    candidates = [Candidate(show_size(params), params) for params in args.draft_params]
    setting = Setting(target_devices=args.target_devices)
    return [advisor.advise(target, candidates, setting)]


def _from_models(args: argparse.Namespace, progress: Progress) -> list[Advice]:
    """One advice for each batch size."""
    from transformers.utils import logging

    from vllm_ssd.sdsl import measuring, timing
    from vllm_ssd.sdsl.models import ModelFiles

    logging.disable_progress_bar()
    target_files, draft_files = ModelFiles(args.target), [ModelFiles(name) for name in args.draft]
    target = Target(target_files.label, target_files.num_params)
    candidates = [
        Candidate(files.label, files.num_params, files.shares_tokenizer(target_files)) for files in draft_files
    ]
    words = measuring.default_text() if args.text is None else args.text.read_text(encoding="utf-8")
    texts = {"read": measuring.windows_of(words, target_files)}
    progress(f"perplexity of {target.name} on {texts['read'].numel()} tokens")
    target_model = measuring.load(target_files)
    target = dataclasses.replace(target, perplexity=measuring.perplexity(target_model, texts["read"]))
    if args.measure:
        progress(f"{target.name} goes on with pieces of the text")
        texts["written"] = measuring.continuations(target_model, texts["read"], args.temperature)
    for place, files in enumerate(draft_files):
        if candidates[place].same_tokenizer:
            progress(f"{candidates[place].name}: perplexity" + (" and acceptance" if args.measure else ""))
            candidates[place] = _judged(candidates[place], files, target_files, target_model, texts, args)
    del target_model
    if args.measure:
        device, loads = measuring.device(), _loads(args.batch)
        progress(f"times of {target.name} on {device}")
        target = dataclasses.replace(
            target, verify_seconds=timing.measure(args.target, device, args.dtype, loads["verify"])
        )
        for place, files in enumerate(draft_files):
            if candidates[place].same_tokenizer:
                progress(f"times of {candidates[place].name} on {device}")
                curve = timing.measure(files.name, device, args.dtype, loads["draft"])
                candidates[place] = dataclasses.replace(candidates[place], step_seconds=curve)
    temperature = args.temperature if args.measure else None
    settings = [Setting(batch, 1e-3 * args.overhead_ms, temperature=temperature) for batch in args.batch]
    advices = [advisor.advise(target, candidates, setting) for setting in settings]
    if any(curve is not None and curve.disturbed for curve in _curves(advices[0])):
        progress("other work on this machine disturbs the timing: repeat it on an idle one")
    return advices


def _curves(advice: Advice) -> list[Any]:
    return [advice.target.verify_seconds, *(each.candidate.step_seconds for each in advice.assessments)]


def _judged(candidate: Candidate, files: Any, target_files: Any, target_model: Any, texts: Any, args: Any) -> Candidate:
    """The candidate with its perplexity and, with --measure, its agreement with the target.

    `texts`: windows of the text as "read", and what the target wrote after pieces of it as "written".
    """
    from vllm_ssd.sdsl import measuring

    model = measuring.load(files)
    candidate = dataclasses.replace(candidate, perplexity=measuring.perplexity(model, texts["read"]))
    if not args.measure:
        return candidate
    vocab_size = min(len(target_files.tokenizer), int(target_files.config.vocab_size), int(files.config.vocab_size))
    read = measuring.agreement(target_model, model, texts["read"], vocab_size, args.temperature)
    written = measuring.agreement(
        target_model, model, texts["written"], vocab_size, args.temperature, skip=measuring.CONTEXT
    )
    return dataclasses.replace(
        candidate,
        measured_acceptance=read.acceptance,
        by_position=written.by_position,
        refused_misses=written.refused_misses,
        bonus_misses=written.bonus_misses,
    )


def _loads(batches: Sequence[int]) -> dict[str, list[int]]:
    """Tokens of the forwards to time: from one row without drafts to the widest that is asked about."""
    most = max(batches)
    verify = {1, most, *(batch * (1 + k) for batch in batches for k in (1, 3, advisor.MOST_DRAFTS))}
    draft = {1, most, *(batch * branches for batch in batches for branches in advisor.BRANCHES)}
    return {"verify": sorted(verify), "draft": sorted(draft)}


# ---- the report ----


def describe(advices: Sequence[Advice]) -> str:
    """Tables and sentences for the terminal."""
    first = advices[0]
    lines = [_about_size(first)]
    for advice in advices:
        timed = advice.target.verify_seconds is not None
        if timed:
            lines.append(f"\nbatch {advice.setting.batch}, none: {advice.assessments[0].none:.1f} tokens/s")
        unit = "tokens/s" if timed else "gain"
        heading = [
            "draft",
            "params",
            "N/N_opt",
            "tokenizer",
            "perplexity",
            "α law",
            _acceptance_heading(advice),
            "step ms",
            "SDSL gain",
        ]
        heading += [f"SD {unit} (K)", f"SSD {unit} (K, branches)", "hits"]
        lines.append(text.table(heading, [_row(each) for each in advice.assessments]))
        lines.append(advice.sentence)
    return "\n".join(lines)


def _about_size(advice: Advice) -> str:
    best = advice.best_size
    about = f"{advice.target.name}: {show_size(advice.target.params)} parameters"
    if advice.target.perplexity is not None:
        about += f", perplexity {advice.target.perplexity:.1f}"
    about += f"; N_opt by SDSL's linear rule {show_size(best.value)} ({show_size(best.low)} to {show_size(best.high)})"
    if not advice.rule_applies:
        about += (
            "\nThe rule was fitted to targets of 13B to 110B and α's law to HellaSwag; for so small a target the rule "
            "says nothing, and the law is an extrapolation."
        )
    return about


def _acceptance_heading(advice: Advice) -> str:
    return "α" if advice.setting.temperature is None else f"α (T={advice.setting.temperature:g})"


def _row(each: Assessment) -> list[str]:
    candidate = each.candidate
    fits = {True: "fits", False: "differs", None: "-"}[candidate.same_tokenizer]
    step = candidate.step_seconds
    return [
        candidate.name,
        show_size(candidate.params),
        f"{each.ratio_to_best_size:.2g}",
        fits,
        _shown(candidate.perplexity, ".1f"),
        _shown(each.law_acceptance, ".2f"),
        _shown(candidate.measured_acceptance, ".2f"),
        _shown(candidate.by_position and candidate.by_position[0], ".2f"),
        _shown(step and 1e3 * step(1), ".2f"),
        "-" if each.sdsl is None else f"{each.sdsl:.2f}x (γ {each.sdsl_gamma})",
        _choice(each.sd, each, ssd=False),
        _choice(each.ssd, each, ssd=True),
        _shown(each.ssd and each.ssd.hit_rate, ".2f"),
    ]


def _choice(choice: Choice | None, each: Assessment, ssd: bool) -> str:
    if choice is None:
        return "-"
    timed = each.candidate.step_seconds is not None
    value = f"{choice.rate:.1f}" if timed else f"{choice.rate / each.none:.2f}x"
    return f"{value} ({choice.num_drafts}, {choice.branches})" if ssd else f"{value} ({choice.num_drafts})"


def _shown(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
