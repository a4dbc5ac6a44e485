"""Two engines on one draft: exact text on both, whoever dies meanwhile."""

import threading
import time

import pytest

from .draft_server import DraftServer
from .engine import DRAFT, EngineFailed, EngineProcess, check_same_tokens, prompts, requests_for, saguaro

GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
REQUESTS = [
    requests_for(prompts("docs")[:3] + prompts("chat")[:3], GREEDY),
    requests_for(prompts("code")[:3] + prompts("humaneval")[:3], GREEDY),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = DraftServer(DRAFT, f"ipc://{tmp_path_factory.mktemp('shared')}/draft", 1, "--dtype", "float32")
    yield server
    assert server.close() == 0


@pytest.fixture(scope="module")
def address(server, tmp_path_factory):
    return f"ipc://{server._log_path.with_suffix('')}"


def start(address, slow_target) -> EngineProcess:
    return EngineProcess(saguaro(DRAFT, 4, draft_address=address, prompt_lookup_min=2), model=slow_target)


@pytest.fixture(scope="module")
def engines(address, slow_target):
    with start(address, slow_target) as first, start(address, slow_target) as second:
        yield [first, second]


def both(engines, work) -> list:
    """Do `work(place, engine)` for both engines at a time."""
    results: list = [None, None]

    def run(place: int) -> None:
        results[place] = work(place, engines[place])

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def check(engines, baseline, what: str, **options) -> None:
    expected = [baseline.generate(requests) for requests in REQUESTS]
    found = both(engines, lambda place, engine: engine.generate(REQUESTS[place], **options))
    for place in range(len(engines)):
        check_same_tokens(found[place], expected[place], f"{what}, engine {place}")


def until(condition, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def hits(engines) -> list[float]:
    return [engine.stats()["hits"] for engine in engines]


def work_until_hits(engines, baseline, what: str) -> None:
    """Both engines get drafts from their trees again, with the right text all the time."""
    before = hits(engines)
    for _ in range(40):
        check(engines, baseline, what, sequential=True)
        if all(now > then + 10 for now, then in zip(hits(engines), before)):
            return
    raise AssertionError(f"{what}: no trees; {[engine.stats() for engine in engines]}")


def test_text_is_exact_and_trees_come_from_the_shared_draft(engines, server, baseline):
    check(engines, baseline, "two engines")
    work_until_hits(engines, baseline, "two engines")
    for engine in engines:
        assert engine.stats()["draft_up"] and not engine.warnings()
        assert engine.draft_pids() == [] and engine.leftovers() == [], "it has a draft of its own besides"
    assert server.log().count("is admitted") == 2


def test_the_draft_is_killed_and_comes_back(engines, server, baseline):
    restarts = [engine.stats()["draft_restarts"] for engine in engines]
    killer = threading.Timer(0.5, server.kill)
    killer.start()
    check(engines, baseline, "while the draft is killed")
    killer.join()
    for engine in engines:
        until(lambda engine=engine: engine.generate(REQUESTS[0][:1]) and engine.warnings(), "it did not notice")
    check(engines, baseline, "without a draft")
    server.start()
    for place, engine in enumerate(engines):
        until(
            lambda engine=engine: engine.generate(REQUESTS[0][:1]) and engine.stats()["draft_up"],
            "it did not greet the draft again",
        )
        assert engine.stats()["draft_restarts"] > restarts[place]
    work_until_hits(engines, baseline, "after the draft came back")


def test_a_target_is_killed(engines, server, baseline, address, slow_target):
    before = engines[0].stats()["draft_restarts"]
    third = start(address, slow_target)
    assert "; 3 now" in server.log()
    third._send({"op": "generate", "requests": REQUESTS[1]})
    check(engines, baseline, "beside a third engine")
    third.kill()
    check(engines, baseline, "after the third engine was killed")
    until(lambda: "is not there any more; 2 left" in server.log(), "the draft did not notice")
    assert engines[0].stats()["draft_restarts"] == before
    work_until_hits(engines, baseline, "after a target was killed")


def test_a_target_with_another_model_is_refused(address, random_draft, server):
    (random_draft / "config.json").write_text((random_draft / "config.json").read_text().replace("{", '{"x": 1,', 1))
    with pytest.raises(EngineFailed, match="serves another model"):
        EngineProcess(saguaro(random_draft, 4, draft_address=address))
    assert "is refused: it serves another model" in server.log()
