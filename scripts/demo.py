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
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import models

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
MAX_MODEL_LEN = 2048  # the draft's context
MOST_SHARED = 0.03  # of the time; with more of it lost to other work, speeds say nothing


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
    print_comparison(results, one_core=cores[0] == cores[1])
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


def answer_all(arguments: argparse.Namespace) -> None:
    """Answer every prompt, one after the other, showing the text as it comes."""
    config = arguments.config
    os.sched_setaffinity(0, {config["core"]})
    show_progress("loading ...")
    from vllm import LLM

    llm = LLM(
        model=config["model"],
        speculative_config=config["speculative_config"],
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        enforce_eager=True,
        disable_log_stats=False,
    )
    stream_answer(llm, "Hello!", tokens=8, show=lambda text: None)  # warm up: first calls are slower
    show_progress("")
    before, answers = read_counts(llm, arguments.answer_with), []
    start, delay = time.perf_counter(), seconds_kept_waiting()
    for prompt in arguments.prompts:
        print(f"\n  > {prompt}\n")
        writer = WrappedWriter(indent="    ", width=line_width())
        tokens, seconds = stream_answer(llm, prompt, arguments.tokens, writer.write)
        writer.end()
        note = f"{len(tokens)} tokens in {seconds:.1f} s, {len(tokens) / seconds:.1f} tokens/s"
        print(f"{note:>{line_width()}}", flush=True)
        answers.append({"tokens": tokens, "seconds": seconds})
    after = read_counts(llm, arguments.answer_with)
    counts = {key: after[key] - before[key] for key in after}
    shared = (seconds_kept_waiting() - delay) / (time.perf_counter() - start)
    Path(config["result"]).write_text(json.dumps({"answers": answers, "counts": counts, "shared": shared}))


def seconds_kept_waiting() -> float:
    """Return how long this process's main thread was ready to run while its core ran something else."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # a kernel without these statistics
        return 0.0


def stream_answer(llm, prompt: str, tokens: int, show) -> tuple[list[int], float]:
    """Run one request to its end; return its token ids and how long it took, prompt included."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    chat = [{"role": "user", "content": prompt}]
    ids = llm.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    parameters = SamplingParams(temperature=0.0, max_tokens=tokens, output_kind=RequestOutputKind.DELTA)
    token_ids: list[int] = []
    start = time.perf_counter()
    llm.llm_engine.add_request(f"demo-{start}", {"prompt_token_ids": ids}, parameters)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            token_ids += output.outputs[0].token_ids
            show(output.outputs[0].text)
    return token_ids, time.perf_counter() - start


def read_counts(llm, engine: str) -> dict[str, float]:
    """Return the totals so far of what the comparison needs; empty without speculation."""
    if engine == "saguaro":
        from vllm_ssd import get_stats

        stats = get_stats(llm)
        return {key: stats[key] for key in ("lookups", "hits", "part_hits", "accepted_tokens", "draft_restarts")}
    if engine == "draft_model":
        names = {
            "vllm:spec_decode_num_drafts": "lookups",
            "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
        }
        return {names[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in names}
    return {}


# --- what is shown ------------------------------------------------------------------------------


def print_comparison(results: dict[str, dict[str, Any]], one_core: bool) -> None:
    first, rows = next(iter(results)), []
    base = speed(results[first])
    shares = {ENGINES[engine]: result["shared"] for engine, result in results.items()}
    comparable = not one_core and max(shares.values()) <= MOST_SHARED
    for engine, result in results.items():
        counts = result["counts"]
        lookups = counts.get("lookups")
        ratio = f"  ({speed(result) / base:.2f}x)" if comparable and engine != first else ""
        rows.append(
            (
                ENGINES[engine],
                f"{speed(result):.1f}{ratio}",
                f"{1 + counts['accepted_tokens'] / lookups:.2f}" if lookups else "1",
                hit_rate(counts),
                "-" if engine == first else same_text(results[first], result),
            )
        )
    print_heading("side by side")
    labels = ("", "tokens/s", "mean acceptance length", "hit rate", f"same text as {ENGINES[first]}")
    widths = [max(map(len, column)) for column in (labels, *rows)]
    print()
    for line in zip(labels, *rows, strict=True):
        print("  " + "   ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    if len(results) > 1:
        print("\n  In float32 the texts must be the same: the target verifies every token.")
    print("  Acceptance length: tokens that one forward of the target yields.")
    if "saguaro" in results:
        print("  Hit rate: rounds whose drafts were there when the target had verified the last ones.")
        if restarts := results["saguaro"]["counts"]["draft_restarts"]:
            print(f"  The draft process had to be restarted {restarts:g} times.")
    if one_core:
        print("\n  The speeds are not comparable: target and draft had to share one core.")
    elif not comparable:
        lost = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        print(f"\n  The speeds are not comparable: other work held the target's core ({lost} of the time).")
        print("  Run the demo again on an idle machine.")


def speed(result: dict[str, Any]) -> float:
    """Tokens per second over all answers, their prompts included."""
    return sum(len(a["tokens"]) for a in result["answers"]) / sum(a["seconds"] for a in result["answers"])


def hit_rate(counts: dict[str, float]) -> str:
    if "hits" not in counts or not counts["lookups"]:
        return "-"
    part = counts["part_hits"] / counts["lookups"]
    return f"{counts['hits'] / counts['lookups']:.0%}" + (f" (+ {part:.0%} in part)" if part >= 0.005 else "")


def same_text(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Say whether the answers are equal, token by token; if not, where they part."""
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(one["answers"], other["answers"], strict=True)]
    different = [number for number, (a, b) in enumerate(pairs) if a != b]
    if not different:
        return f"yes, all {len(pairs)}" if len(pairs) > 1 else "yes"
    a, b = pairs[different[0]]
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"NO: {len(different)} of {len(pairs)} differ; answer {different[0] + 1} from token {place + 1}"


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


def print_heading(text: str) -> None:
    print(f"\n--- {text} " + "-" * max(3, line_width() - len(text) - 5), flush=True)


def line_width() -> int:
    return max(60, min(100, shutil.get_terminal_size((88, 24)).columns))


def show_progress(text: str) -> None:
    """Show a line that the next one replaces; nothing where the output is not a terminal."""
    if sys.stdout.isatty():
        print(f"\r  {text:<20}\r", end="", flush=True)


class WrappedWriter:
    """Prints text as it comes, indented, and breaks lines between words."""

    def __init__(self, indent: str, width: int) -> None:
        self.indent, self.width = indent, width
        self.column = 0  # what stands on the line, the indent included; 0: nothing yet
        self.word = ""  # what may still grow

    def write(self, text: str) -> None:
        for character in text:
            if not character.isspace():
                self.word += character
                continue
            if character != "\n" and not self.column and not self.word.strip():
                self.word += character  # the indentation of code
                continue
            self._flush_word()
            if character == "\n":
                print(flush=True)
                self.column = 0
            else:
                self.word = " "
        sys.stdout.flush()

    def end(self) -> None:
        self._flush_word()
        print(flush=True)

    def _flush_word(self) -> None:
        if self.column and self.column + len(self.word) > self.width:
            print()
            self.column, self.word = 0, self.word.lstrip()
        if self.word.strip():
            if not self.column:
                print(self.indent, end="")
                self.column = len(self.indent)
            print(self.word, end="")
            self.column += len(self.word)
        self.word = ""


if __name__ == "__main__":
    main()
