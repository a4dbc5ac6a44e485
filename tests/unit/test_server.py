"""The draft process: the real server with the small draft, watched by the real launcher."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import DraftDevice
from vllm_ssd.draft import link
from vllm_ssd.draft.launcher import DraftProcess, State
from vllm_ssd.messages import Branches, Growth, Outcome, Push, Round, Start, pack_tokens

DRAFT = str(Path(__file__).parents[1] / "data" / "models" / "draft")
CORE = max(os.sched_getaffinity(0))
LIMITS = {"vocab_size": 4096, "max_num_seqs": 2, "max_model_len": 256}
PATIENCE = 180.0  # seconds; nothing here takes so long unless it never happens
TARGETS_OWN = {"OMP_PLACES": "{0}", "KMP_AFFINITY": "none", "OMP_NUM_THREADS": "77", "GOMP_CPU_AFFINITY": "0"}

# A target in a process of its own: starts a draft, says where it is, and waits to be killed.
TARGET_SCRIPT = """
import json, sys, time
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import DraftDevice
from vllm_ssd.draft.launcher import DraftProcess
draft = DraftProcess(SaguaroConfig(sys.argv[1], 3), DraftDevice("cpu"), **json.loads(sys.argv[2]))
draft.start()
print(json.dumps([draft.pid, draft._endpoint.directory]), flush=True)
time.sleep(600)
"""


def wait_for(what: Callable[[], object]) -> None:
    """Fail if it does not become true."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def process(**options) -> DraftProcess:
    """A draft process that is not started yet."""
    config = SaguaroConfig(**{"model": DRAFT, "num_speculative_tokens": 3, "tree_budget": 4, **options})
    return DraftProcess(config, DraftDevice("cpu", (CORE,)), **LIMITS)


def state_of(pid: int) -> str:
    """A letter as in `ps`: "T" is stopped, "X" gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its remains."""
    return state_of(pid) not in "ZX"


def pushed(draft: DraftProcess, enough: Callable[[list[Push]], bool]) -> list[Push]:
    """Pushes until there are enough."""
    pushes: list[Push] = []

    def receive() -> bool:
        pushes.extend(draft.receive(0.05))
        return enough(pushes)

    wait_for(receive)
    return pushes


def seen_state(draft: DraftProcess, state: State) -> bool:
    """Whether the draft is in this state, after a look at it as in each round of the target."""
    list(draft.receive(0.02))
    return draft.state is state


def tell_a_prompt(draft: DraftProcess) -> list[Branches | Growth]:
    """Have a tree built for a prompt; what was pushed, whole."""
    start = Start(0, pack_tokens([5, 6, 7, 8]), [], 0.0, 0, 1.0)
    draft.send(Round(1, [start], [], [], 3, 0.0))
    pushes = pushed(draft, lambda all_: sum(len(push.items) for push in all_) >= 4)
    return [item for push in pushes for item in push.items]


@pytest.fixture(scope="module")
def draft() -> Iterator[DraftProcess]:
    """One draft for the tests of this module, in their order; each leaves it up."""
    draft = process()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in TARGETS_OWN.items():
            patch.setenv(key, value)
        try:
            draft.start()
            draft.wait_until_ready(PATIENCE)
            yield draft
        finally:
            draft.close()


@pytest.fixture
def hushed(draft: DraftProcess, monkeypatch: pytest.MonkeyPatch) -> DraftProcess:
    """The draft, with a short first back-off."""
    monkeypatch.setattr(link, "_FIRST_BACKOFF", 0.1)
    assert draft.state is State.UP
    return draft


def test_it_becomes_ready_and_builds_a_tree(draft: DraftProcess) -> None:
    """The server does not load, does not say what it has, or answers a prompt with nothing."""
    assert draft.state is State.UP and draft.incarnation == 1 and draft.restarts == 0
    assert draft.ready.max_length == 2048 and draft.ready.device == "cpu"
    assert draft.ready.num_kv_slots >= LIMITS["max_num_seqs"] * LIMITS["max_model_len"]
    branches, *growths = tell_a_prompt(draft)
    assert isinstance(branches, Branches)
    assert (branches.length, branches.trunk, branches.offsets) == (4, [], [0] * 4)
    assert [len(growth.token_ids) for growth in growths][:3] == [4, 4, 4]


def test_the_rounds_go_on(draft: DraftProcess) -> None:
    """The server reads one round and no more, or does not tell that it lost a sequence."""
    draft.send(Round(2, [], [Outcome(0, 5, [9], [10, 11], 0), Outcome(99, 7, [1], [], 0)], [], 2, 0.0))
    pushes = pushed(draft, lambda all_: sum(len(push.items) for push in all_) >= 3)
    assert [seq_id for push in pushes for seq_id in push.lost] == [99]
    [branches, *_] = [item for push in pushes for item in push.items]
    assert branches.trunk == [10, 11] and {push.round_id for push in pushes} == {2}
    assert pushes[-1].busy_seconds > 0 and 0 < pushes[-1].kv_usage < 1


def test_the_environment_and_cores_are_the_drafts_own(draft: DraftProcess) -> None:
    """The draft inherits the target's OpenMP settings or its cores, and both get slow."""
    entries = Path(f"/proc/{draft.pid}/environ").read_bytes().split(b"\0")
    environment = dict(entry.decode().split("=", 1) for entry in entries if entry)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert not set(environment) & ({*TARGETS_OWN, "LD_PRELOAD"} - {"OMP_NUM_THREADS"})
    assert os.sched_getaffinity(draft.pid) == {CORE}


def test_the_socket_is_in_a_private_directory(draft: DraftProcess) -> None:
    """Other users of the machine can reach the socket."""
    assert os.stat(draft._endpoint.directory).st_mode & 0o777 == 0o700


def test_garbage_brings_the_draft_down_and_it_comes_back(hushed: DraftProcess) -> None:
    """A message that cannot be read leaves both sides waiting, or is swallowed."""
    first, directory = hushed.pid, hushed._endpoint.directory
    hushed._channel.send(b"\xffgarbage")
    wait_for(lambda: seen_state(hushed, State.DOWN))
    assert hushed.ready is None and not runs(first)
    assert not os.path.exists(directory)
    hushed.send(Round(3, [], [], [], 3, 0.0))  # dropped, no error
    wait_for(lambda: seen_state(hushed, State.UP))
    assert hushed.pid != first and hushed.incarnation == 2 and hushed.restarts == 1
    assert len(tell_a_prompt(hushed)) >= 4


def test_a_killed_draft_comes_back(hushed: DraftProcess) -> None:
    """A crash of the draft (out of memory, say) ends speculation or the target."""
    os.kill(hushed.pid, signal.SIGKILL)
    wait_for(lambda: seen_state(hushed, State.DOWN))
    wait_for(lambda: seen_state(hushed, State.UP))
    assert hushed.incarnation == 3
    assert len(tell_a_prompt(hushed)) >= 4


def test_a_silent_draft_is_given_up_and_close_leaves_nothing(
    hushed: DraftProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that hangs is waited for, or is still there after the end."""
    pid, directory = hushed.pid, hushed._endpoint.directory
    monkeypatch.setattr(link, "_FIRST_BACKOFF", 600.0)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(link, "_HUNG_SECONDS", 1.5)
    wait_for(lambda: seen_state(hushed, State.DOWN))
    wait_for(lambda: not runs(pid))  # killed; on a busy machine it takes a moment to go
    assert not os.path.exists(directory)
    hushed.close()
    assert hushed.pid is None or not runs(hushed.pid)
    assert not seen_state(hushed, State.UP)
    hushed.close()  # twice does no harm


# ---- drafts of their own ----


def test_a_draft_that_goes_on_living_is_closed_while_it_loads() -> None:
    """A target that ends during its start leaves the draft behind."""
    draft = process()
    draft.start()
    pid, directory = draft.pid, draft._endpoint.directory
    assert runs(pid) and os.path.isdir(directory)
    draft.close()
    assert not runs(pid) and not os.path.exists(directory)
    assert list(draft.receive()) == []
    assert draft.state is State.DOWN


def test_a_draft_outlives_the_thread_that_started_it() -> None:
    """A draft started or restarted from a thread of the target ends with that thread."""
    draft = process()

    def start() -> None:
        draft.start()
        wait_for(lambda: "libtorch" in Path(f"/proc/{draft.pid}/maps").read_text())  # it watches its parent by now

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    try:
        draft.wait_until_ready(PATIENCE)
        assert draft.state is State.UP and draft.incarnation == 1
    finally:
        draft.close()


def test_a_handle_that_is_dropped_takes_its_process_along() -> None:
    """An engine that is garbage-collected without `close` leaves the draft behind."""
    draft = process()
    draft.start()
    pid, directory = draft.pid, draft._endpoint.directory
    del draft
    wait_for(lambda: not runs(pid))
    assert not os.path.exists(directory)


@pytest.mark.parametrize("where", ("nowhere", "empty"))
def test_a_model_that_does_not_load_is_refused_with_the_reason(where: str, tmp_path: Path) -> None:
    """The start hangs, or fails without saying which model and why."""
    (tmp_path / "empty").mkdir()
    draft = process(model=str(tmp_path / where))
    draft.start()
    pid, directory = draft.pid, draft._endpoint.directory
    with pytest.raises(RuntimeError) as caught:
        draft.wait_until_ready(PATIENCE)
    assert f"{tmp_path / where}' did not load: " in str(caught.value)
    assert "Error" in str(caught.value)
    assert not runs(pid) and not os.path.exists(directory)


def test_a_draft_that_does_not_get_ready_in_time_is_refused() -> None:
    """A start waits for ever, or the user is not told which option is too small."""
    draft = process()
    draft.start()
    pid = draft.pid
    with pytest.raises(RuntimeError, match="draft_start_timeout"):
        draft.wait_until_ready(0.0)
    assert not runs(pid)


@pytest.mark.parametrize("stopped", (False, True), ids=("running", "stopped"))
def test_a_target_that_is_killed_leaves_nothing(stopped: bool) -> None:
    """After SIGKILL of the target the draft lives on, or its directory stays."""
    arguments = [sys.executable, "-c", TARGET_SCRIPT, DRAFT, json.dumps(LIMITS)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as target:
        try:
            pid, directory = json.loads(target.stdout.readline())
            wait_for(lambda: "libtorch" in Path(f"/proc/{pid}/maps").read_text())  # it watches its parent by now
            if stopped:
                os.kill(pid, signal.SIGSTOP)
                wait_for(lambda: state_of(pid) == "T")
            assert runs(pid) and os.path.isdir(directory)
        finally:
            target.kill()
    try:
        wait_for(lambda: not runs(pid))
        wait_for(lambda: not os.path.exists(directory))
    finally:
        if runs(pid):
            os.kill(pid, signal.SIGKILL)
