"""The example of Ray Serve LLM, on a CPU: started as a user starts it, asked over HTTP."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from .engine import DRAFT, TESTS, prompts, requests_for, saguaro
from .engine_worker import draft_pids
from .ray_cluster import RayCluster, actors, until

pytest.importorskip(
    "ray.serve.llm",
    reason="Ray Serve LLM is not installed: docs/many_devices.md says what it needs",
    exc_type=ImportError,
)
pytestmark = [pytest.mark.ray, pytest.mark.slow]

EXAMPLE = TESTS.parent / "docs" / "examples" / "ray_serve.py"
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
REQUESTS = requests_for(prompts("docs")[:3] + prompts("chat")[:3], GREEDY)
LLM_SERVER = "ServeReplica:saguaro:LLMServer"  # the replica with the engine

# The way that docs/many_devices.md gives.
ASK = """
import json, ray
from ray import serve
ray.init()
server = serve.get_deployment_handle("LLMServer:target", app_name="saguaro")
print(json.dumps(server.collective_rpc.remote("get_saguaro_stats").result()))
"""


@pytest.fixture(scope="module")
def cluster():
    cluster = RayCluster(2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def server(cluster, tmp_path_factory, slow_target):
    with start(cluster, tmp_path_factory.mktemp("serve"), slow_target) as process:
        yield process


@contextlib.contextmanager
def start(cluster: RayCluster, folder: Path, target: Path) -> Iterator[subprocess.Popen]:
    """The example, serving; killed at the end if it still lives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = {
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "speculative_config": saguaro(DRAFT, 4, draft_device="cpu:1", draft_dtype="float32", prompt_lookup_min=2),
    }
    environment = {
        **os.environ,
        **cluster.environment(),
        "RAY_ADDRESS": cluster.address,
        "VLLM_CPU_OMP_THREADS_BIND": "0",
    }
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), str(target), str(DRAFT)]
            + ["--port", str(port), "--engine", json.dumps(engine)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    process.url, process.environment, process.log_path = f"http://127.0.0.1:{port}/v1", environment, log
    try:
        until(
            lambda: process.poll() is not None or "OpenAI's routes are at" in log.read_text(errors="replace"),
            "it does not start",
            tries=2000,
        )
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def complete(server: subprocess.Popen, request: dict) -> list[int]:
    """Tokens of the answer."""
    body = {"model": "target", "prompt": request["prompt"], **request["params"], "return_token_ids": True}
    response = httpx.post(f"{server.url}/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def stats(server: subprocess.Popen) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=300, env=server.environment
    )
    assert run.returncode == 0, run.stderr[-3000:]
    [answer] = json.loads(run.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def expected(baseline) -> list[list[int]]:
    """vLLM's tokens without speculation."""
    return [result["outputs"][0]["token_ids"] for result in baseline.generate(REQUESTS)]


def test_text_over_http(server, expected):
    assert [complete(server, request) for request in REQUESTS] == expected
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        assert list(pool.map(lambda request: complete(server, request), REQUESTS)) == expected
    found = stats(server)
    assert found["draft_up"] and found["hits"] > 10 and found["accepted_tokens"] > 20, found
    [draft], [worker] = actors("DraftActor"), actors("RayWorkerProc")
    assert {1} in [os.sched_getaffinity(thread.id) for thread in draft.threads()]
    assert draft_pids(worker.pid) == [], "the target has a draft of its own besides"


@pytest.mark.parametrize("value, status", ((False, 200), ("off", 400)))
def test_a_request_opts_out(server, value, status):
    body = {"model": "target", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    response = httpx.post(
        f"{server.url}/chat/completions", json={**body, "vllm_xargs": {"saguaro": value}}, timeout=300
    )
    assert response.status_code == status, response.text
    assert status == 200 or "must be true or false" in response.text


def test_the_death_of_the_draft(server, expected):
    [draft] = actors("DraftActor")
    draft.kill()
    assert [complete(server, request) for request in REQUESTS] == expected
    until(lambda: complete(server, REQUESTS[0]) and actors("DraftActor"), "no new actor")
    until(lambda: complete(server, REQUESTS[0]) and stats(server)["draft_up"], "the new actor is not used")
    assert stats(server)["draft_restarts"] >= 1
    assert [complete(server, request) for request in REQUESTS] == expected


def test_the_death_of_the_replica(server, expected):
    """Serve starts another one, with a placement group and a draft of its own."""
    [replica], [draft] = actors(LLM_SERVER), actors("DraftActor")
    replica.kill()
    psutil.wait_procs([replica, draft], timeout=120)
    assert not draft.is_running(), "the draft outlives its replica"

    def answers() -> bool:
        with contextlib.suppress(AssertionError, httpx.HTTPError):
            return complete(server, REQUESTS[0]) == expected[0]
        return False

    until(answers, "no new replica", tries=600)
    assert [complete(server, request) for request in REQUESTS] == expected
    assert len(actors("DraftActor")) == len(actors("RayWorkerProc")) == 1
    assert stats(server)["accepted_tokens"] > 10


def test_the_end_leaves_nothing(server):
    """Last of the tests of this server."""
    server.send_signal(signal.SIGTERM)
    assert server.wait(180) == 0, server.log_path.read_text(errors="replace")[-3000:]
    for kind in ("DraftActor", "RayWorkerProc", "ServeReplica"):
        until(lambda kind=kind: not actors(kind), f"{kind} is left behind")


def test_options_of_serve_run_are_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve run ray_serve:build max_model_len=512` hands a text to vLLM, which ends with a TypeError."""
    spec = importlib.util.spec_from_file_location("ray_serve_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    built = []
    monkeypatch.setattr(example, "build_openai_app", built.append)
    example.build(
        {"target": "a/b", "draft": "c/d", "tensor_parallel_size": "2", "max_model_len": "512", "dtype": "float32"}
    )
    [config] = built[0]["llm_configs"]
    assert config.engine_kwargs["max_model_len"] == 512 and config.engine_kwargs["dtype"] == "float32"
    assert len(config.placement_group_config["bundles"]) == 3 and config.model_loading_config.model_source == "a/b"
