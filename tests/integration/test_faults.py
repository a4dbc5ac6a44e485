"""The draft dies, hangs or raises; the target ends in one way or another."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from .engine import DRAFT, EngineProcess, check_same_tokens, prompts, requests_for, saguaro

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
REQUESTS = requests_for(prompts("docs")[:6] + prompts("chat")[:6], GREEDY)


@pytest.fixture(scope="module")
def engine(slow_target):
    with EngineProcess(saguaro(DRAFT, 4, prompt_lookup_min=2), model=slow_target) as process:
        process.generate(REQUESTS[:2])
        yield process


@pytest.mark.parametrize("harm", ("kill", "garbage", "stop"))
def test_generation_goes_on_and_the_draft_comes_back(engine, baseline, harm):
    expected = baseline.generate(REQUESTS)
    warnings = len(engine.warnings())
    before = engine.stats()
    assert before["draft_up"]
    check_same_tokens(engine.generate(REQUESTS, events={"6": harm}), expected, f"draft harmed ({harm}) at step 6")
    for _ in range(60):  # until the target has noticed: a stopped draft is given up after a silence
        if len(engine.warnings()) > warnings:
            break
        check_same_tokens(engine.generate(REQUESTS), expected, f"after {harm}")
    assert len(engine.warnings()) == warnings + 1
    for _ in range(100):  # until the next draft has loaded
        if engine.stats()["draft_restarts"] > before["draft_restarts"] and engine.stats()["draft_up"]:
            break
        check_same_tokens(engine.generate(REQUESTS), expected, f"without a draft after {harm}")
    while_down = engine.stats()
    assert while_down["draft_up"] and while_down["draft_restarts"] == before["draft_restarts"] + 1
    assert while_down["fallback_ngram"] > before["fallback_ngram"], "n-grams did not take over"
    for _ in range(20):  # what was measured meanwhile may first say that drafts do not pay
        found = engine.generate(REQUESTS, sequential=True, settled=True)
        check_same_tokens(found, expected, f"with a new draft after {harm}")
        if engine.stats()["hits"] > while_down["hits"] + 10:
            break
    assert engine.stats()["hits"] > while_down["hits"] + 10, "the new draft builds no trees"
    assert len(engine.warnings()) == warnings + 1, "one fault, one warning"
    assert len(engine.draft_pids()) == 1
    assert len(engine.leftovers()) == 1, "the dead draft's directory is still there"


def gone(condition, seconds: float = 20.0) -> bool:
    """Whether `condition` comes true before long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return condition()


@pytest.mark.parametrize("ending", ("close", "kill", "terminate", "exception", "kill while the draft is stopped"))
def test_nothing_is_left_behind(ending):
    engine = EngineProcess(saguaro(DRAFT, 3))
    engine.generate(REQUESTS[:2])
    [draft] = engine.draft_pids()
    assert len(engine.leftovers()) == len(engine.metrics_folders()) == 1
    pids = (str(engine.process.pid), str(draft))
    if ending == "close":
        assert engine.close() == 0
    elif ending == "kill":
        engine.kill()
    elif ending == "terminate":
        engine.kill(signal.SIGTERM)
    elif ending == "kill while the draft is stopped":
        engine.call("harm", event="stop")
        engine.kill()
    else:
        engine._send({"op": "fail"})
        assert engine.process.wait(60) not in (0, None)
        assert "the test asked for it" in engine.log()
    assert gone(lambda: not psutil.pid_exists(draft)), "the draft outlives its target"
    assert gone(lambda: not engine.leftovers()), f"left behind: {engine.leftovers()}"
    assert gone(lambda: not engine.metrics_folders()), f"left behind: {engine.metrics_folders()}"
    shared_memory = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared_memory if any(f"_{pid}_" in name or name.endswith(pid) for pid in pids)]


def test_a_draft_that_cannot_load_ends_the_start(made_models):
    """Weights are broken: the engine's start fails with the reason, and leaves nothing."""
    from .engine import EngineFailed

    broken = made_models / "broken-draft"
    broken.mkdir()
    for path in DRAFT.iterdir():
        if path.is_file():
            (broken / path.name).write_bytes(path.read_bytes()[: 1000 if path.suffix == ".safetensors" else None])
    with pytest.raises(EngineFailed, match="did not load"):
        EngineProcess(saguaro(broken, 3))
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(broken) in " ".join(p.info["cmdline"] or [])]
