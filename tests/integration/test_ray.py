"""The target on Ray, on a CPU: the draft is an actor with a bundle of its own."""

import json
import os
import signal
import subprocess
import sys

import pytest

from .engine import DRAFT, TARGET, EngineFailed, EngineProcess, check_same_tokens, prompts, requests_for, saguaro
from .ray_cluster import RayCluster, actors, until

pytest.importorskip("ray", reason='Ray is not installed: pip install -e ".[ray]"')
pytestmark = [pytest.mark.ray, pytest.mark.slow]

GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
REQUESTS = requests_for(prompts("docs")[:3] + prompts("chat")[:3], GREEDY)


def start(cluster: RayCluster, ranks: int = 1, **options) -> EngineProcess:
    # The small model as target of two ranks: its heads can be split in two.
    target, draft = (TARGET, DRAFT) if ranks == 1 else (DRAFT, TARGET)
    config = saguaro(draft, 4, draft_device="cpu:1", prompt_lookup_min=2, draft_dtype="float32")
    return EngineProcess(
        None if options.pop("plain", False) else {**config, **options.pop("config", {})},
        model=options.pop("model", target),
        core=None,
        tensor_parallel_size=ranks,
        distributed_executor_backend="ray",
        environment={
            **cluster.environment(),
            "RAY_ADDRESS": cluster.address,
            "VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[:ranks]),
        },
        **options,
    )


def work_until_hits(engine: EngineProcess, expected: list[dict], what: str) -> None:
    before = engine.stats()["hits"]
    for _ in range(30):
        check_same_tokens(engine.generate(REQUESTS, sequential=True), expected, what)
        if engine.stats()["hits"] > before + 10:
            return
    raise AssertionError(f"{what}: no trees; {engine.stats()}")


# ---- clusters of their own, one at a time ----


def test_draft_on_another_node(baseline, slow_target):
    """Two raylets with a device each."""
    cluster = RayCluster(1, 1)
    try:
        with start(cluster, model=slow_target) as engine:
            check_same_tokens(engine.generate(REQUESTS), baseline.generate(REQUESTS), "draft on another node")
            work_until_hits(engine, baseline.generate(REQUESTS), "draft on another node")
            [draft], [worker] = actors("DraftActor"), actors("RayWorkerProc")
            assert draft.ppid() != worker.ppid(), "one raylet started both"
    finally:
        cluster.close()


def test_a_cluster_without_a_device_for_the_draft():
    cluster = RayCluster(1)
    try:
        with pytest.raises(EngineFailed, match="no placement group of 2 bundles .* the cluster at .* has 1"):
            start(cluster, config={"draft_start_timeout": 3.0})
    finally:
        cluster.close()


# ---- one cluster of one node ----


@pytest.fixture(scope="module")
def cluster():
    cluster = RayCluster(3)
    yield cluster
    cluster.close()


def test_one_rank(cluster, baseline, slow_target):
    expected = baseline.generate(REQUESTS)
    engine = start(cluster, model=slow_target)
    check_same_tokens(engine.generate(REQUESTS), expected, "one rank on Ray")
    work_until_hits(engine, expected, "one rank on Ray")
    [draft] = actors("DraftActor")
    cores = [os.sched_getaffinity(thread.id) for thread in draft.threads()]
    assert {1} in cores, "no thread of the draft is on the core that it was given"
    assert engine.draft_pids() == [], "it has a draft of its own besides"

    draft.kill()
    check_same_tokens(engine.generate(REQUESTS), expected, "while the actor dies")
    until(lambda: engine.generate(REQUESTS[:1]) and engine.warnings(), "the death was not noticed")
    until(lambda: engine.generate(REQUESTS[:1]) and engine.stats()["draft_up"], "no new actor")
    [new] = actors("DraftActor")
    assert new.pid != draft.pid and engine.stats()["draft_restarts"] >= 1
    work_until_hits(engine, expected, "with a new actor")

    assert engine.close() == 0
    until(lambda: not actors("DraftActor"), "the actor outlives the engine")


def test_an_actor_that_hangs_is_replaced(cluster, baseline, slow_target):
    expected = baseline.generate(REQUESTS)
    with start(cluster, model=slow_target) as engine:
        [draft] = actors("DraftActor")
        draft.suspend()
        try:
            until(lambda: engine.generate(REQUESTS[:1]) and engine.warnings(), "the silence was not noticed")
            check_same_tokens(engine.generate(REQUESTS), expected, "while the actor hangs")
            until(lambda: engine.generate(REQUESTS[:1]) and engine.stats()["draft_up"], "no new actor", 600)
        finally:
            if draft.is_running():
                draft.kill()
        assert actors("DraftActor")[0].pid != draft.pid
        work_until_hits(engine, expected, "with a new actor")


def test_two_ranks_and_the_death_of_one(cluster):
    with start(cluster, ranks=2, plain=True) as engine:
        expected = engine.generate(REQUESTS)
    engine = start(cluster, ranks=2)
    check_same_tokens(engine.generate(REQUESTS), expected, "two ranks on Ray")
    assert engine.stats()["accepted_tokens"] > 20
    assert len(actors("RayWorkerProc")) == 2
    actors("RayWorkerProc")[1].kill()
    with pytest.raises(EngineFailed):
        for _ in range(100):
            engine.generate(REQUESTS[:1])
    until(lambda: not actors("DraftActor"), "the actor outlives the target's worker")
    engine.kill()


def test_a_killed_engine_takes_its_draft_along(cluster):
    engine = start(cluster)
    assert len(actors("DraftActor")) == 1
    engine.kill(signal.SIGKILL)
    until(lambda: not actors("DraftActor") and not actors("RayWorkerProc"), "actors outlive the engine")


LOSSES = """
import dataclasses, json, os, socket, sys, time
import psutil, ray
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.identity import identify
from vllm_ssd.draft.link import State
from vllm_ssd.draft.ray_actor import RayDraft, start_actor
ray.init(log_to_driver=False)
config = SaguaroConfig(sys.argv[1], 4, draft_start_timeout=60.0)
actor = start_actor(
    "losing", {"num_gpus": 1}, config=dataclasses.asdict(config), vocab_size=4096, device="cpu:1", environment={}
)


def break_connection(port):
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as broken:
                broken.shutdown(socket.SHUT_RDWR)


draft = RayDraft(config, identify(config), 4096, 8, "losing")
draft.start()
draft.wait_until_ready(120)
for loss in range(1, 7):
    incarnation = draft.incarnation
    break_connection(int(draft._address.rpartition(":")[2]))
    deadline = time.monotonic() + 30
    while (draft.incarnation == incarnation or draft.state is not State.UP) and time.monotonic() < deadline:
        list(draft.receive(0.05))
    draft._backoff = 0.1
    print(json.dumps([loss, draft.state.value, ray.get(actor.where.remote())[1]]), flush=True)
draft.close()
ray.kill(actor)
"""


def test_lost_connections_cost_the_actor_nothing(cluster):
    """Each of them keeps a thread of the actor, until there is none left that answers."""
    run = subprocess.run(
        [sys.executable, "-c", LOSSES, str(DRAFT)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, **cluster.environment(), "RAY_ADDRESS": cluster.address},
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert [state for _, state, _ in found] == ["up"] * 6, f"{found}\n{run.stderr[-3000:]}"
    assert len({pid for _, _, pid in found}) == 1, "a draft that is alive was replaced"


def engine_options() -> dict:
    """Of `vllm.LLM`."""
    return {
        "model": str(TARGET),
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "ray",
        "speculative_config": saguaro(DRAFT, 4, draft_device="cpu:1", fallback="draft"),
    }


ENGINES = """
import gc, json, sys, time
import ray
from ray.util.placement_group import PlacementGroup
from vllm import LLM, SamplingParams
from vllm_ssd.integration.ray_executor import _wait_for_the_users

def free():
    deadline = time.monotonic() + 30
    while ray.available_resources().get("GPU", 0) < ray.cluster_resources()["GPU"] and time.monotonic() < deadline:
        time.sleep(0.2)
    return ray.available_resources().get("GPU", 0)

engine, prompt = json.loads(sys.argv[1])
ray.init(log_to_driver=False)
for memory in (1 << 49, None, None):
    engine["speculative_config"]["draft_kv_cache_memory_bytes"] = memory
    try:
        llm = LLM(**engine)
        [output] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        found = list(output.outputs[0].token_ids)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    except Exception as error:
        found = str(error)
    print(json.dumps([found, free()]), flush=True)
try:
    _wait_for_the_users(PlacementGroup(ray.PlacementGroupID.from_random()), 5.0)
except RuntimeError as error:
    print(json.dumps([str(error), 0]), flush=True)
"""


def test_engines_one_after_the_other_in_a_job(cluster, baseline):
    """What the first one reserved is not given back, and the next finds no place."""
    request = {**REQUESTS[0], "params": {**GREEDY, "max_tokens": 8}}
    run = subprocess.run(
        [sys.executable, "-c", ENGINES, json.dumps([engine_options(), request["prompt"]])],
        capture_output=True,
        text=True,
        timeout=500,
        env={
            **os.environ,
            **cluster.environment(),
            "RAY_ADDRESS": cluster.address,
            "VLLM_CPU_OMP_THREADS_BIND": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
    )
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 4, run.stdout[-2000:] + run.stderr[-3000:]
    [(refused, first), *working, (unknown, _)] = found
    assert "draft_kv_cache_memory_bytes" in refused and first == 3
    [expected] = [result["outputs"][0]["token_ids"] for result in baseline.generate([request])]
    assert working == [[expected, 3]] * 2
    assert cluster.address in unknown and "does not know the placement group; set RAY_ADDRESS" in unknown


# ---- placement groups of the user's, inside an actor ----

INSIDE = """
import json, os, sys
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
options = json.loads(sys.argv[1])
ray.init(log_to_driver=True)
group = ray.util.placement_group([{"GPU": gpus, "CPU": 0.1} for gpus in options["bundles"]], strategy="PACK")
ray.get(group.ready(), timeout=60)
place = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)

@ray.remote(num_cpus=0, num_gpus=1)
class Occupier:
    def here(self):
        return True

@ray.remote(num_cpus=0, scheduling_strategy=place)
class Owner:
    def run(self, options, prompts):
        from vllm import LLM, SamplingParams
        llm = LLM(**options)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True), use_tqdm=False)
        import vllm_ssd
        return [list(o.outputs[0].token_ids) for o in outputs], vllm_ssd.get_stats(llm)["accepted_tokens"]

if options["occupied"]:
    occupier = Occupier.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, 1)).remote()
    ray.get(occupier.here.remote())
try:
    tokens, accepted = ray.get(Owner.remote().run.remote(options["engine"], options["prompts"]))
    print(json.dumps({"tokens": tokens, "accepted": accepted}))
except Exception as error:
    print(json.dumps({"error": str(error)}))
"""


def inside_an_actor(cluster: RayCluster, bundles: list[float], occupied: bool = False) -> dict:
    """`bundles`: GPUs of each."""

    options = {
        "bundles": bundles,
        "occupied": occupied,
        "engine": engine_options(),
        "prompts": [request["prompt"] for request in REQUESTS],
    }
    run = subprocess.run(
        [sys.executable, "-c", INSIDE, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, **cluster.environment(), "RAY_ADDRESS": cluster.address, "VLLM_CPU_OMP_THREADS_BIND": "0"},
    )
    answers = [line for line in run.stdout.splitlines() if line.startswith("{")]
    assert answers, run.stdout[-2000:] + run.stderr[-2000:]
    return {**json.loads(answers[-1]), "log": run.stdout + run.stderr}


@pytest.mark.parametrize("bundles", ([1, 1], [0.5, 1, 1]), ids=("", "and half a device"))
def test_inside_an_actor_with_a_spare_bundle(cluster, baseline, bundles):
    found = inside_an_actor(cluster, bundles)
    assert "error" not in found, found["log"][-9000:]
    expected = [result["outputs"][0]["token_ids"] for result in baseline.generate(REQUESTS)]
    assert found["tokens"] == expected and found["accepted"] > 10


def test_inside_an_actor_without_a_spare_bundle(cluster):
    found = inside_an_actor(cluster, [1])
    assert "add one more bundle for the draft" in found["error"] + found["log"]


def test_inside_an_actor_with_an_occupied_bundle(cluster):
    found = inside_an_actor(cluster, [1, 1], occupied=True)
    assert "bundle 1 of the placement group" in found["error"] + found["log"]
