#!/usr/bin/env python3
"""Compare saguaro with no speculation and with vLLM's own speculation, on the same prompts.

    python scripts/bench.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl \\
        --methods none,draft_model,ngram,saguaro --batch 1 8 --k 3 5 --repeats 3 \\
        --json bench.json --plot bench.png

Each engine lives in a process of its own and stays loaded; for each workload the methods
take turns, in reverse order in every second repeat. Medians over the repeats are reported.

Without a GPU the engine runs inside its pinned process: cores "target" is the first core,
"all" is every core this process may use. Saguaro has its target on the first core and its
draft on the others, so it counts as "all". With GPUs nothing is pinned, vLLM and saguaro
choose their devices (see `draft_device` in --options), and "all" means that the draft's
device is used too.

Latencies are defined in `benchmark/measurement.py`. Column `equal` counts the requests whose
greedy tokens are those of no speculation in every repeat. In bfloat16 a near tie between two
tokens may fall the other way in another batch shape: judge equality in float32.

Column `predicted` is what `vllm_ssd.theory` makes of measured parts (see `benchmark/prediction.py`).
"""

import argparse
import dataclasses
import functools
import itertools
import json
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark import arguments, machine, plan, prediction, report
from benchmark.plan import Engine, Run, StartEngine, Workload
from benchmark.pool import EnginePool
from benchmark.session import Session

_WARM_UP_TOKENS = 32
_GPU_MEMORY_SHARE = 0.9  # of a device, for all engines that are loaded at a time


def main() -> int:
    args = parse_args()
    cpu = not machine.has_gpu()
    engines = plan.engines(args.methods, args.cores if cpu else ("target",), args.k, list(args.variant))
    size = min(args.max_engines, len(engines))
    run = Run(read_prompts(args.prompts, args.limit), max(args.batch), 0.0, args.max_tokens, not args.stop_at_eos)
    if len(run.prompts) < run.batch:
        raise SystemExit(f"--batch {run.batch} needs as many prompts; {args.prompts} gave {len(run.prompts)}")
    warm_up = dataclasses.replace(run, prompts=run.prompts[: run.batch], max_tokens=_WARM_UP_TOKENS)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines end, figures are kept
    with EnginePool(size, args.timeout, functools.partial(start_message, args, cpu, size), warm_up) as pool:
        session = Session(pool, run, args.repeats, skip_wrong=cpu and not args.force)
        try:
            for temperature, batch in itertools.product(args.temperature, args.batch):
                session.measure(engines, Workload(batch, temperature))
        finally:
            tell(args, session)
    return 1 if session.failed else 0


def tell(args: argparse.Namespace, session: Session) -> None:
    """Print and write what was measured so far."""
    rows = report.rows(session.results, prediction.predicted_tok_s)
    print(report.table(rows) if rows else "nothing was measured", *session.notes, sep="\n", flush=True)
    if not rows:
        return
    report.save(rows, setup(args, session), args.json)
    if args.plot:
        report.plot(rows, f"{args.target} + {args.draft}\n{args.prompts}", args.plot)


def start_message(args: argparse.Namespace, cpu: bool, engines_at_a_time: int, engine: Engine) -> StartEngine:
    """How an engine of this benchmark is started on this machine."""
    common = {
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(args.batch),
        "enable_prefix_caching": False,  # repeats bring the same prompts
        "disable_log_stats": False,  # else vLLM counts no drafts
    }
    options = {**args.options, **args.variant.get(engine.variant, {})}
    if cpu:
        common |= {"enforce_eager": True}
        saguaro = {"draft_device": machine.draft_device(), **options} if engine.method == "saguaro" else {}
        cores = machine.cpu_cores("target" if engine.method == "saguaro" else engine.cores)
    else:
        common |= {"gpu_memory_utilization": _GPU_MEMORY_SHARE / engines_at_a_time}
        saguaro, cores = options, None
    common |= args.engine_options
    return StartEngine(plan.llm_options(engine, args.target, args.draft, common, saguaro), cores)


def setup(args: argparse.Namespace, session: Session) -> dict[str, Any]:
    """What all rows share, and what gives them again."""
    arguments = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return {
        "command": shlex.join(["python", *sys.argv]),
        "arguments": arguments,
        "environment": machine.inherited_settings(),
        "hardware": machine.hardware(),
        "versions": session.pool.versions,
        "idle_core_share": session.idle_shares,
        "notes": session.notes,
    }


def read_prompts(path: Path, limit: int | None) -> tuple[str, ...]:
    """The `prompt` of each line of a JSON-lines file."""
    with path.open(encoding="utf-8") as lines:
        return tuple(json.loads(line)["prompt"] for line in itertools.islice(lines, limit))


def parse_args() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True, help="target model")
    add("--draft", help="draft model, for draft_model and saguaro")
    add("--prompts", type=arguments.file_to_read, required=True, help='JSON lines with a key "prompt"')
    add("--limit", type=positive, help="use the first N prompts")
    add("--methods", type=choices_of(plan.METHODS), default=list(plan.METHODS), help="of " + ",".join(plan.METHODS))
    add("--batch", type=positive, nargs="+", default=[1], help="requests in flight")
    add("--temperature", type=float, nargs="+", default=[0.0])
    add("--k", type=positive, nargs="+", default=[5], help="speculative tokens")
    add("--cores", type=choices_of(plan.CORES), default=list(plan.CORES), help="of target,all (without a GPU)")
    add("--options", type=json_object, default={}, help="further options of saguaro, as a JSON object")
    add(
        "--variant",
        type=named_json_object,
        action="append",
        default=[],
        help="NAME=JSON: a setting of saguaro to compare with others, on top of --options; may be repeated",
    )
    add("--engine-options", type=json_object, default={}, help="further options of every vllm.LLM, as a JSON object")
    add("--dtype", default="bfloat16")
    add("--max-model-len", type=positive)
    add("--max-tokens", type=positive, default=128, help="tokens to generate for each prompt")
    add("--stop-at-eos", action="store_true", help="let requests end early (methods may then emit unequal counts)")
    add("--repeats", type=positive, default=3)
    add("--max-engines", type=positive, default=8, help="engines kept loaded at a time, as memory allows")
    add("--timeout", type=float, default=1200.0, help="seconds to wait for an engine to start, or for one run")
    add("--force", action="store_true", help="run stock speculation with sampling on a CPU, though it is wrong there")
    add(
        "--json",
        type=arguments.file_to_write,
        required=True,
        help="list of rows; what they share goes to *.setup.json beside it",
    )
    add("--plot", type=arguments.image_to_write, help="bars of tokens/s, as an image")
    args = parser.parse_args()
    args.variant = dict(args.variant) or {"": {}}
    if args.draft is None and {"draft_model", "saguaro"} & set(args.methods):
        parser.error("--draft is needed for the methods draft_model and saguaro")
    try:
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Raise `ValueError` for models and options that no engine takes: before the first is started."""
    from vllm_ssd.config import SaguaroConfig
    from vllm_ssd.sdsl.models import ModelFiles

    for name in filter(None, (args.target, args.draft)):
        _ = ModelFiles(name, args.engine_options.get("trust_remote_code", False)).config
    if "saguaro" in args.methods:
        for k, variant in itertools.product(args.k, args.variant.values()):
            SaguaroConfig.from_mapping({"model": args.draft, "num_speculative_tokens": k, **args.options, **variant})


def positive(text: str) -> int:
    """A whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a whole number above 0")
    return value


def choices_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A reader of comma-separated lists of these words."""

    def read(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words

    return read


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def named_json_object(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=JSON object."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=JSON, such as wide={{"tree_budget": 64}}')
    return name, json_object(value)


if __name__ == "__main__":
    sys.exit(main())
