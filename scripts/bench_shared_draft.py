#!/usr/bin/env python3
"""Two engines at work at a time, each with a draft of its own or both with one: tokens/s of each.

    python scripts/bench_shared_draft.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl --k 5

For two CPU cores: both targets run on the first, all drafts on the second. Each engine answers its
half of the prompts one by one. The ways take turns; medians over the repeats are reported.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = ("none", "own", "shared")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/draft"
        command = [sys.executable, "-m", "vllm_ssd.cli", "serve-draft", args.draft, "--listen", address]
        with subprocess.Popen([*command, "--device", "cpu:1", "--dtype", args.dtype]) as server:
            try:
                results = measure(args, address)
            finally:
                server.terminate()
    print("| drafts | tokens/s of each engine | hit rate | texts as without speculation |\n| --- | --- | --- | --- |")
    for way in args.ways:
        speeds = [statistics.median(run["speed"] for run in runs) for runs in results[way]]
        hits = [f"{runs[-1]['hit_rate']:.2f}" for runs in results[way]]
        equal = sum(
            a == b for i in (0, 1) for a, b in zip(results[way][i][0]["tokens"], results["none"][i][0]["tokens"])
        )
        print(f"| {way} | {speeds[0]:.1f}, {speeds[1]:.1f} | {', '.join(hits)} | {equal} of {args.limit} |")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=8, help="prompts in all")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.set_defaults(ways=WAYS)
    return parser.parse_args()


def measure(args: argparse.Namespace, address: str) -> dict[str, list[list[dict]]]:
    """Way → engine → what it found in each repeat."""
    with args.prompts.open() as file:
        prompts = [json.loads(line)["prompt"] for line in file][: args.limit]
    engines = {way: [EngineProcess(args, way, address, prompts[i::2]) for i in (0, 1)] for way in args.ways}
    print("the engines are loaded", file=sys.stderr, flush=True)
    found: dict[str, list[list[dict]]] = {way: [[], []] for way in args.ways}
    for repeat in range(-1, args.repeats):  # the first warms up
        for way in args.ways if repeat % 2 else args.ways[::-1]:
            for engine in engines[way]:
                engine.begin()
            for place, engine in enumerate(engines[way]):
                answer = engine.answer()
                if repeat >= 0:
                    found[way][place].append(answer)
    for pair in engines.values():
        for engine in pair:
            engine.close()
    return found


class EngineProcess:
    """An engine pinned to the first core."""

    def __init__(self, args: argparse.Namespace, way: str, address: str, prompts: list[str]) -> None:
        speculative = {"method": "saguaro", "model": args.draft, "num_speculative_tokens": args.k}
        speculative |= {"draft_dtype": args.dtype}
        speculative |= {"draft_device": "cpu:1"} if way == "own" else {"draft_address": address}
        options = {
            "model": args.target,
            "dtype": args.dtype,
            "max_model_len": 1024,
            "enforce_eager": True,
            "max_num_seqs": 4,
            "enable_prefix_caching": False,
            "speculative_config": None if way == "none" else speculative,
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--inside"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        self._say({"options": options, "prompts": prompts, "max_tokens": args.max_tokens})
        self.answer()

    def _say(self, message: dict) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def begin(self) -> None:
        self._say({})

    def answer(self) -> dict:
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def inside() -> None:
    """Make the engine of the first line; answer the prompts once for each further line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from vllm import LLM, SamplingParams

    import vllm_ssd

    setup = json.loads(sys.stdin.readline())
    llm = LLM(**setup["options"])
    speculates = setup["options"]["speculative_config"] is not None
    params = SamplingParams(temperature=0, max_tokens=setup["max_tokens"], ignore_eos=True)

    def say(message: dict) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    say({})
    for _ in sys.stdin:
        before = vllm_ssd.get_stats(llm) if speculates else {"hits": 0, "lookups": 0}
        began = time.perf_counter()
        tokens = [list(llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids) for p in setup["prompts"]]
        seconds = time.perf_counter() - began
        after = vllm_ssd.get_stats(llm) if speculates else {"hits": 0, "lookups": 1}
        rate = (after["hits"] - before["hits"]) / max(after["lookups"] - before["lookups"], 1)
        say({"tokens": tokens, "speed": sum(map(len, tokens)) / seconds, "hit_rate": rate})


if __name__ == "__main__":
    inside() if sys.argv[1:] == ["--inside"] else main()
