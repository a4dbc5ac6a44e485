"""`vllm-ssd advise`: which draft, how many drafts a round, and what it would bring."""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm_ssd.cli import advice_files, advice_table, output, text
from vllm_ssd.sdsl import advisor
from vllm_ssd.sdsl.advisor import Advice, Candidate, Setting, Target
from vllm_ssd.sdsl.sizes import show_size

Progress = Callable[[str], None]

_MEASURED_ONLY = ("--batch", "--temperature", "--dtype", "--overhead-ms")
_MODELS_ONLY = ("--text", "--measure", "--trust-remote-code")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models that are here: they run on the text")
    add = models.add_argument
    add("--target", help="folder or hub name of the target; it must fit one device, else give sizes")
    add("--draft", nargs="+", default=[], help="folders or hub names of drafts to choose from")
    add("--text", type=Path, help="what the target will write, in kind (default: a short text that ships)")
    add("--trust-remote-code", action="store_true", help="let models run code from their repositories")
    add(
        "--measure",
        action="store_true",
        help="measure acceptance on the text, and the time of forwards here; without it both are guessed by laws",
    )
    add("--batch", type=text.read_batches, help="requests in flight, for example 1,8 (default: 1; with --measure)")
    add("--temperature", type=float, help="of the requests; 0 is greedy (default: 0; with --measure)")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], help="of timed forwards (with --measure)")
    add("--overhead-ms", type=float, help="vLLM's share of a step that is no forward (default: 1; with --measure)")
    sizes = parser.add_argument_group("sizes alone: nothing runs, laws say all")
    add = sizes.add_argument
    add("--target-params", type=text.read_size, help="size of the target, for example 70B")
    add("--draft-params", type=text.read_size, nargs="+", default=[], help="sizes of drafts, for example 350M 1B")
    add(
        "--target-devices",
        type=text.read_positive,
        help="devices the target is spread over (default: 1; without --measure)",
    )
    add = parser.add_argument_group("files").add_argument
    add("--json", type=Path, metavar="FILE", help="write all figures there as well; - prints them instead of the table")
    add("--plot", type=Path, metavar="FILE", help="draw speed over draft sizes there, as .png, .svg or .pdf")


def run(args: argparse.Namespace) -> int:
    """Status 1 if no draft fits the target."""
    _check(args)
    progress = _Progress()
    advices = _from_sizes(args) if args.target is None else _from_models(args, progress)
    found = json.dumps([advice_files.as_json(advice) for advice in advices], indent=1)
    print(found if args.json == output.STDOUT else advice_table.describe(advices))
    if args.json and args.json != output.STDOUT:
        args.json.write_text(found + "\n", encoding="utf-8")
    if args.plot:
        advice_files.plot(advices, args.plot)
    output.tell([args.json, args.plot])
    return 0 if advices[0].any_fits else 1


def _check(args: argparse.Namespace) -> None:
    """Refuse what does not go together, and what would only fail after the work; fill in defaults."""
    if (args.target is None) == (args.target_params is None):
        raise ValueError("give either --target, a model, or --target-params, its size.")
    if args.target_params is not None and (args.draft or not args.draft_params):
        raise ValueError("--target-params goes with --draft-params, the sizes of the drafts.")
    if args.target is not None and (args.draft_params or not args.draft):
        raise ValueError("--target goes with --draft, the models to choose from.")
    if args.target_params is not None and (given := _given(args, _MODELS_ONLY)):
        raise ValueError(f"{given} needs models: give --target and --draft.")
    if not args.measure and (given := _given(args, _MEASURED_ONLY)):
        models = " and models: give --target and --draft" if args.target is None else ": without it nothing is timed"
        raise ValueError(f"{given} needs --measure{models}.")
    if args.measure and args.target_devices is not None:
        raise ValueError("--target-devices goes without --measure, whose times are those of one device here.")
    defaults = {"batch": [1], "temperature": 0.0, "dtype": "auto", "overhead_ms": 1.0, "target_devices": 1}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for option, value in (("--temperature", args.temperature), ("--overhead-ms", args.overhead_ms)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{option} is {value:g}; it must be a number from 0 on.")
    output.check("--json", args.json)
    output.check_image("--plot", args.plot)


def _given(args: argparse.Namespace, options: Sequence[str]) -> str | None:
    """The first of the options that was given."""
    values = {option: getattr(args, option[2:].replace("-", "_")) for option in options}
    return next((option for option, value in values.items() if value is not None and value is not False), None)


class _Progress:
    """Lines on stderr that say what is being done and since when."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began:4.0f} s] {what}", file=sys.stderr, flush=True)


# ---- what is known of the models ----


def _from_sizes(args: argparse.Namespace) -> list[Advice]:
    target = Target("the target", args.target_params)
    candidates = [Candidate(show_size(params), params) for params in args.draft_params]
    setting = Setting(target_devices=args.target_devices)
    return [advisor.advise(target, candidates, setting)]


def _from_models(args: argparse.Namespace, progress: Progress) -> list[Advice]:
    """One advice for each batch size."""
    from transformers.utils import logging

    from vllm_ssd.sdsl.models import ModelFiles, labels

    logging.disable_progress_bar()
    words = _text(args.text)
    target_files = ModelFiles(args.target, args.trust_remote_code)
    draft_files = [ModelFiles(name, args.trust_remote_code) for name in args.draft]
    names = labels(target_files, draft_files)
    target = Target(names[0], target_files.num_params)
    candidates = [
        Candidate(name, files.num_params, files.shares_tokenizer(target_files))
        for name, files in zip(names[1:], draft_files)
    ]
    if any(candidate.same_tokenizer for candidate in candidates):  # else there is nothing to find out
        target, candidates = _on_text(target, candidates, target_files, draft_files, words, args, progress)
        if args.measure:
            target, candidates = _timed(target, candidates, draft_files, args, progress)
    temperature = args.temperature if args.measure else None
    advices = [
        advisor.advise(
            target, candidates, Setting(batch, 1e-3 * args.overhead_ms, args.target_devices, temperature=temperature)
        )
        for batch in args.batch
    ]
    if any(curve is not None and curve.disturbed for curve in _curves(advices[0])):
        progress("other work on this machine disturbs the timing: repeat it on an idle one")
    return advices


def _text(path: Path | None) -> str:
    """Raises `ValueError` naming --text if it cannot be read."""
    if path is None:
        from vllm_ssd.sdsl import measuring

        return measuring.default_text()
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--text is {str(path)!r}, which is no text in UTF-8; give a text file.") from None
    except OSError as error:
        raise ValueError(
            f"--text is {str(path)!r}, which cannot be read ({error.strerror}); give a text file."
        ) from None


def _on_text(
    target: Target,
    candidates: Sequence[Candidate],
    target_files: Any,
    draft_files: Sequence[Any],
    words: str,
    args: argparse.Namespace,
    progress: Progress,
) -> tuple[Target, list[Candidate]]:
    """Both with their perplexities and, with --measure, the candidates with their agreement with the target."""
    from vllm_ssd.sdsl import measuring

    called = "the text" if args.text is None else f"--text {str(args.text)!r}"
    texts = {"read": measuring.windows_of(words, target_files, called)}
    progress(f"perplexity of {target.name} on {texts['read'].numel()} tokens")
    model = measuring.load(target_files)
    target = dataclasses.replace(target, perplexity=measuring.perplexity(model, texts["read"]))
    if args.measure:
        progress(f"{target.name} goes on with pieces of the text")
        texts["written"] = measuring.continuations(model, texts["read"], args.temperature)
    judged = []
    for candidate, files in zip(candidates, draft_files):
        if candidate.same_tokenizer:
            progress(f"{candidate.name}: perplexity" + (" and acceptance" if args.measure else ""))
            candidate = _judged(candidate, files, target_files, model, texts, args)
        judged.append(candidate)
    return target, judged


def _timed(
    target: Target,
    candidates: Sequence[Candidate],
    draft_files: Sequence[Any],
    args: argparse.Namespace,
    progress: Progress,
) -> tuple[Target, list[Candidate]]:
    """Both with the times of their forwards on this machine."""
    from vllm_ssd.sdsl import measuring, timing

    device, loads = measuring.device(), _loads(args.batch)

    def curve(called: str, name: str, kind: str) -> Any:
        progress(f"times of {called} on {device}")
        return timing.measure(name, device, args.dtype, loads[kind], args.trust_remote_code)

    target = dataclasses.replace(target, verify_seconds=curve(target.name, args.target, "verify"))
    timed = [
        dataclasses.replace(candidate, step_seconds=curve(candidate.name, files.name, "draft"))
        if candidate.same_tokenizer
        else candidate
        for candidate, files in zip(candidates, draft_files)
    ]
    return target, timed


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
