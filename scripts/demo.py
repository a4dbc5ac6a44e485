#!/usr/bin/env python3
"""A 135M chat model answers on the CPU: without speculation, then with saguaro; then the two compared.

The target is SmolLM2-135M-Instruct on one core, the draft a model of 2.2M parameters on another. Each
engine has a process of its own, so that neither disturbs the other's figures. Greedy, in float32.
"""

import argparse
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import models
from demonstration.answering import MAX_MODEL_LEN, answer_all
from demonstration.comparison import print_comparison
from demonstration.screen import line_width, print_heading

# A vocabulary of 4096 tokens, chosen from Python's documentation, leaves this model one subject.
PROMPTS = (
    "How do I read a file line by line in Python?",
    "Write a Python function that returns the largest number in a list.",
    "Explain how to use a for loop in Python.",
)
ENGINES = {
    "plain": "without speculation",
    "draft_model": "vLLM's draft_model",
    "saguaro": "saguaro",
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.answer_with:
        answer_all(arguments)
        return
    try:
        target = models.find("smollm2")
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"demo: the target could not be made: {error}")
    cores = core_pair()
    print(f"target  SmolLM2-135M-Instruct, 108.6M parameters, on core {cores[0]}")
    print(f"draft   2.2M parameters, same tokenizer, on core {cores[1]}")
    print(f"        greedy, float32, one request at a time, up to {arguments.tokens} tokens each")
    if cores[0] == cores[1]:
        print("\nOnly one core may be used here: target and draft must take turns on it.")
    results = {engine: run_engine(engine, arguments, target, cores) for engine in arguments.engines}
    print_comparison(results, ENGINES, one_core=cores[0] == cores[1])
    print_serving(arguments, target, cores)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=list(PROMPTS), metavar="PROMPT", help="your own questions")
    parser.add_argument("-k", type=int, default=4, help="speculative tokens (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer (default: %(default)s)")
    parser.add_argument(
        "--engines",
        type=lambda text: text.split(","),
        default=["plain", "saguaro"],
        metavar="LIST",
        help=f"which engines, of {', '.join(ENGINES)} (default: plain,saguaro)",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one more speculative-config key for saguaro, for example tree_budget=16",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show vLLM's log")
    # For the processes that this script starts itself.
    parser.add_argument("--answer-with", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = [engine for engine in arguments.engines if engine not in ENGINES]
    if unknown:
        parser.error(f"--engines: no engine {unknown[0]!r}; known are {', '.join(ENGINES)}")
    if not all("=" in option for option in arguments.option):
        parser.error("--option: write KEY=VALUE, for example --option tree_budget=16")
    return arguments


def core_pair() -> tuple[int, int]:
    """Return the cores of the target and the draft: the first two that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[min(1, len(cores) - 1)]


# --- one engine, in its own process -------------------------------------------------------------


def run_engine(engine: str, arguments: argparse.Namespace, target: Path, cores: tuple[int, int]) -> dict[str, Any]:
    """Let one engine answer in a process of its own and return its result."""
    print_heading(ENGINES[engine])
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        config = {
            "model": str(target),
            "speculative_config": speculative_config(engine, arguments, cores[1]),
            "core": cores[0],
            "result": str(result),
        }
        command = [sys.executable, __file__, *arguments.prompts, "--tokens", str(arguments.tokens)]
        command += ["--answer-with", engine, "--config", json.dumps(config)]
        environment = os.environ | {
            # The whole engine in one process on one core; the draft has its own.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": str(cores[0]),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "INFO" if arguments.verbose else "WARNING",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output is for the answers
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "COLUMNS": str(line_width()),
        }
        log = Path(scratch) / "log.txt"
        with log.open("w") as file:
            status = subprocess.run(command, env=environment, stderr=None if arguments.verbose else file).returncode
        if status or not result.exists():
            print(*log.read_text(errors="replace").splitlines()[-30:], sep="\n", file=sys.stderr)
            sys.exit(f"demo: {ENGINES[engine]} ended with status {status}; -v shows its whole log")
        return json.loads(result.read_text())


def speculative_config(engine: str, arguments: argparse.Namespace, draft_core: int) -> dict[str, Any] | None:
    if engine == "plain":
        return None
    config: dict[str, Any] = {
        "method": engine,
        "model": str(models.find("small-draft")),
        "num_speculative_tokens": arguments.k,
    }
    if engine == "saguaro":
        config |= {"draft_device": f"cpu:{draft_core}", "draft_dtype": "float32"}
        config |= {key: parse_value(value) for key, value in (option.split("=", 1) for option in arguments.option)}
    return config


def parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


# --- the same as a server -----------------------------------------------------------------------


def print_serving(arguments: argparse.Namespace, target: Path, cores: tuple[int, int]) -> None:
    name = "smollm2"
    config = json.dumps(speculative_config("saguaro", arguments, cores[1]))
    body = {
        "model": name,
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "max_tokens": arguments.tokens,
        "temperature": 0,
        "stream": True,
    }
    print_heading("the same over HTTP")
    print(f"""
  VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND={cores[0]} \\
  {serve_command()} {shlex.quote(str(target))} --served-model-name {name} \\
      --dtype float32 --max-model-len {MAX_MODEL_LEN} --enforce-eager --port 8000 \\
      --speculative-config {shlex.quote(config)}

  curl -N http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d {shlex.quote(json.dumps(body))}
""")


def serve_command() -> str:
    """Return what starts vLLM's server, up to the model's name."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # The command `vllm` of vllm-cpu 0.32.0 ends with this very error: there the package has another name.
        return f"{shlex.quote(sys.executable)} -m vllm.entrypoints.openai.api_server --model"
    return f"{shlex.quote(str(Path(sys.executable).parent / 'vllm'))} serve"


if __name__ == "__main__":
    main()
