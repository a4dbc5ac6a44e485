"""A vLLM engine in a process of its own, for tests: start it, feed it, look at what it left behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .engine_worker import draft_pids

TESTS = Path(__file__).resolve().parent.parent
MODELS = TESTS / "data" / "models"
PROMPTS = TESTS / "data" / "prompts"
TARGET, DRAFT = MODELS / "target", MODELS / "draft"

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


class EngineFailed(Exception):
    """The engine raised; the message says what."""


class EngineProcess:
    """One engine. With saguaro, its draft takes the core that the process is not pinned to."""

    def __init__(
        self,
        speculative_config: dict[str, Any] | None = None,
        *,
        model: Path | str = TARGET,
        patches: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        core: int | None = 0,
        **options: Any,
    ) -> None:
        """`options`: of `vllm.LLM`. `patches`: names in `engine_worker.PATCHES`."""
        engine = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 512,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": 0,
            "speculative_config": speculative_config,
            **options,
        }
        self._scratch = tempfile.TemporaryDirectory(prefix="engine-")
        self.temp_dir = Path(self._scratch.name) / "t"  # short: Unix sockets lie in it
        self.temp_dir.mkdir()
        self._log_path = Path(self._scratch.name) / "log"
        self._log = self._log_path.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **_ENVIRONMENT, "TMPDIR": str(self.temp_dir), **(environment or {})},
        )
        self._send({"engine": engine, "core": core, "patches": list(patches)})
        try:
            self._answer()
        except EngineFailed:
            self.kill()
            raise

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # ---- work ----

    def generate(self, requests: list[dict], **options: Any) -> list[dict]:
        """Results in the order of `requests`; see `Engine.generate` in engine_worker.py."""
        return self.call("generate", requests=requests, **options)["results"]

    def stats(self) -> dict[str, float]:
        """`vllm_ssd.get_stats`."""
        return self.call("stats")

    def metrics(self) -> dict[str, Any]:
        """vLLM's own metrics: name → value."""
        return self.call("metrics")

    def call(self, op: str, **arguments: Any) -> Any:
        """Any method of `Engine`. Raises `EngineFailed` with what the engine raised."""
        self._send({"op": op, **arguments})
        return self._answer()

    def _send(self, message: dict) -> None:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise EngineFailed(f"the engine's process ended with status {status}; its log ends:\n{self.log()[-4000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{reply['error']}\n{self.log()[-2000:]}")
        return reply["answer"]

    # ---- what can be seen from outside ----

    def log(self) -> str:
        """All that the engine and its draft logged so far."""
        return self._log_path.read_text(errors="replace")

    def warnings(self) -> list[str]:
        """Lines of the log in which the target says that its draft is down."""
        return [line for line in self.log().splitlines() if "the draft is down" in line]

    def draft_pids(self) -> list[int]:
        """Process ids of its draft, normally one."""
        return draft_pids(self.process.pid)

    def leftovers(self) -> list[str]:
        """Directories of sockets that stand in its temporary folder."""
        return sorted(path.name for path in self.temp_dir.glob("vllm-ssd-*") if "-metrics-" not in path.name)

    def metrics_folders(self) -> list[str]:
        """Directories of Prometheus files that stand there."""
        return sorted(path.name for path in self.temp_dir.glob("vllm-ssd-*-metrics-*"))

    # ---- the end ----

    def close(self, timeout: float = 180.0) -> int:
        """End it as a program ends that has nothing more to do; returns the exit status."""
        if self.process.poll() is None:
            try:
                self._send({"op": "close"})
                self.process.wait(timeout)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self.kill()
                raise
        self._log.close()
        return self.process.returncode

    def kill(self, number: int = signal.SIGKILL) -> None:
        """End it by a signal."""
        self.process.send_signal(number)
        self.process.wait(60)


def saguaro(model: Path | str = DRAFT, num_speculative_tokens: int = 5, **options: Any) -> dict[str, Any]:
    """A speculative_config for method `saguaro`."""
    return {"method": "saguaro", "model": str(model), "num_speculative_tokens": num_speculative_tokens, **options}


def prompts(name: str) -> list[str]:
    """The prompts of one set."""
    with (PROMPTS / f"{name}.jsonl").open() as file:
        return [json.loads(line)["prompt"] for line in file]


PROMPT_SETS = ("chat", "code", "docs", "general_chat", "humaneval")


def requests_for(texts: list, params: dict | list[dict], **more: Any) -> list[dict]:
    """One request a prompt; `params` for all, or a list of as many."""
    each = params if isinstance(params, list) else [params] * len(texts)
    return [
        {"id": f"r{i}", "prompt": text, "params": own, **more}
        for i, (text, own) in enumerate(zip(texts, each, strict=True))
    ]


def check_same_tokens(found: list[dict], expected: list[dict], what: str) -> None:
    """Fail with the position and both tokens of the first difference of each request."""
    differences = []
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        for index, (x, y) in enumerate(zip(a["outputs"], b["outputs"], strict=True)):
            ours, theirs = x["token_ids"], y["token_ids"]
            if ours == theirs:
                continue
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((i for i, (s, t) in pairs if s != t), min(len(ours), len(theirs)))
            differences.append(
                f"request {place} output {index} at token {at}: {ours[at : at + 1]} instead of {theirs[at : at + 1]} "
                f"(lengths {len(ours)}, {len(theirs)})"
            )
    assert not differences, f"{what}: {len(differences)} of {len(found)} differ\n" + "\n".join(differences[:10])
