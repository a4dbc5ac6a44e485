"""Two data parallel ranks behind one server, with drafts of their own or a shared one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from .draft_server import DraftServer
from .engine import DRAFT, TARGET, prompts, requests_for, saguaro
from .engine_worker import draft_pids

pytestmark = pytest.mark.slow

TEXTS = prompts("docs")[:4] + prompts("chat")[:4]
# Long and short ones: the ranks finish at different times.
LENGTHS = [48, 6, 30, 3, 24, 40, 5, 12]


class Server:
    """`vllm serve --data-parallel-size 2` over both cores' worth of this machine."""

    def __init__(self, tmp_path, speculative_config: dict) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.temp_dir = tmp_path / "t"
        self.temp_dir.mkdir()
        self.url, self._log_path = f"http://127.0.0.1:{port}", tmp_path / "log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET)]
                + ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512"]
                + ["--max-num-seqs", "8", "--enforce-eager", "--served-model-name", "target"]
                + ["--data-parallel-size", "2", "--speculative-config", json.dumps(speculative_config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_CPU_OMP_THREADS_BIND": "0|0",
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self.temp_dir),
                },
            )

    def wait(self) -> None:
        deadline = time.monotonic() + 400
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()[-4000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def complete(self, place: int, rank: int | None = None) -> str:
        body = {"model": "target", "prompt": TEXTS[place], "max_tokens": LENGTHS[place], "temperature": 0}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer = httpx.post(
            f"{self.url}/v1/completions", json={**body, "ignore_eos": True}, headers=headers, timeout=300
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def accepted(self) -> dict[str, float]:
        """Accepted drafts by rank."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith("vllm:spec_decode_num_accepted_tokens_total"):
                found[line.partition('engine="')[2].partition('"')[0]] = float(line.rpartition(" ")[2])
        return found

    def end(self) -> None:
        """As its user would; no process stays.

        The server kills its ranks and their drafts at the same moment, so that none can remove the
        drafts' folders: the next start does.
        """
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive, f"left behind: {[process.cmdline() for process in alive]}"

    def kill(self) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def expected(baseline) -> list[str]:
    each = [{"temperature": 0, "max_tokens": length, "ignore_eos": True} for length in LENGTHS]
    return [result["outputs"][0]["text"] for result in baseline.generate(requests_for(TEXTS, each))]


def exercise(server: Server, expected: list[str]) -> None:
    """Both ranks at work, then one alone while the other is idle, then the other way round."""
    everything = range(len(TEXTS))
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        assert list(pool.map(server.complete, everything)) == expected, "spread over both ranks"
        assert list(pool.map(lambda i: server.complete(i, i % 2), everything)) == expected, "every second"
        for rank in (0, 1):
            assert list(pool.map(lambda i, rank=rank: server.complete(i, rank), everything)) == expected, f"rank {rank}"
    accepted = server.accepted()
    assert set(accepted) == {"0", "1"} and min(accepted.values()) > 10, accepted


def test_each_rank_with_its_own_draft(tmp_path, expected):
    server = Server(tmp_path, saguaro(DRAFT, 3, draft_device="cpu:1|cpu:1", fallback="draft"))
    try:
        server.wait()
        drafts = draft_pids(server.process.pid)
        assert len(drafts) == 2
        exercise(server, expected)
        os.kill(drafts[0], signal.SIGKILL)
        exercise(server, expected)
        server.end()
    finally:
        server.kill()


def test_ranks_share_a_draft(tmp_path, expected):
    draft = DraftServer(DRAFT, f"ipc://{tmp_path}/draft", 1, "--dtype", "float32")
    server = Server(tmp_path, saguaro(DRAFT, 3, draft_address=f"ipc://{tmp_path}/draft", fallback="draft"))
    try:
        server.wait()
        assert draft_pids(server.process.pid) == [] and "; 2 now" in draft.log()
        exercise(server, expected)
        server.end()
        assert draft.process.poll() is None
    finally:
        server.kill()
        assert draft.close() == 0
