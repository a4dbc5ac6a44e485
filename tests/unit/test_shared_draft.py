"""A shared draft at the other end of real sockets: handshake, refusals, deaths, floods, keys."""

import contextlib
import dataclasses
import gc
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq

from vllm_ssd.addresses import check_address, drafts_keys, load_key, make_keys
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import DraftDevice
from vllm_ssd.draft import link, shared_server
from vllm_ssd.draft import remote as remote_module
from vllm_ssd.draft.hub import Hub
from vllm_ssd.draft.identity import Identity, identify
from vllm_ssd.draft.link import State
from vllm_ssd.draft.remote import RemoteDraft
from vllm_ssd.draft.shared_engine import SharedEngine
from vllm_ssd.draft.shared_server import Served, SharedServer
from vllm_ssd.messages import PROTOCOL_VERSION, Failed, Growth, Hello, Outcome, Push, Round, Start, encode, pack_tokens

from .scripted import VOCABULARY, ContextModel

MODELS = Path(__file__).parents[1] / "data" / "models"
IDENTITY = Identity("a model", "a vocabulary", VOCABULARY)
SERVED = Served(IDENTITY, VOCABULARY, 1000, "cpu", "float32", max_targets=3)
PATIENCE = 120.0  # seconds; nothing here takes so long unless it never happens


def wait_for(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


class Server:
    """The real server and engine over a scripted model, in a thread."""

    def __init__(self, address: str, keys: Path | None = None, served: Served = SERVED) -> None:
        self.hub = Hub(address, None if keys is None else drafts_keys(keys))
        self.model = ContextModel(2000)
        self.server = SharedServer(self.hub, SharedEngine(self.model, 2000), config(), served)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.server.run, args=(self._stop,))
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self.hub.close()


def config(**options) -> SaguaroConfig:
    return SaguaroConfig(**{"model": "scripted", "num_speculative_tokens": 3, "tree_budget": 4, **options})


def remote(address: str, identity: Identity = IDENTITY, vocab_size: int = VOCABULARY, **options) -> RemoteDraft:
    return RemoteDraft(config(draft_address=address, **options), identity, vocab_size, max_num_seqs=4)


def connected(address: str, **options) -> RemoteDraft:
    draft = remote(address, **options)
    draft.start()
    draft.wait_until_ready(PATIENCE)
    return draft


def tree(draft: RemoteDraft, seq_id: int, tokens: list[int]) -> list[list[int]]:
    """Have a tree built for a prompt: the chains of drafts, as deep as each draft server must build them."""
    draft.send(Round(1, [Start(seq_id, pack_tokens(tokens), [], 0.0, 0, 1.0)], [], [], 3, 0.0))
    waves: list[list[list[int]]] = []  # more branches come while the target does not go on

    def grown() -> bool:
        for push in draft.receive(0.05):
            for item in (item for item in push.items if item.seq_id == seq_id):
                if not isinstance(item, Growth):
                    waves.append([[token_id] for token_id in item.token_ids])
                elif waves:
                    for chain, token_id in zip(waves[-1], item.token_ids):
                        chain.append(token_id)
        return bool(waves) and len(waves[0][0]) >= 4

    wait_for(grown)
    return [chain[:4] for chain in waves[0]]  # a last step may have come along, or not


def is_up(draft: RemoteDraft) -> bool:
    """After a look at it, as in each round of the target."""
    list(draft.receive(0.02))
    return draft.state is State.UP


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/draft"


@pytest.fixture
def server(address: str) -> Iterator[Server]:
    server = Server(address)
    yield server
    server.close()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_FIRST_BACKOFF", 0.1)
    monkeypatch.setattr(link, "_HUNG_SECONDS", 1.5)


def test_the_thread_that_serves_uses_the_device(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one loaded the model (as in a Ray actor), and kernels are launched on the first GPU."""
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda name: told.append((name, threading.get_ident())))
    server = Server(address, served=dataclasses.replace(SERVED, device="cuda:3"))
    try:
        assert connected(address).ready.device == "cuda:3"
        assert told == [("cuda:3", server._thread.ident)]
    finally:
        server.close()


def test_two_targets_get_trees_of_their_own(server: Server, address: str) -> None:
    """The second target is not admitted, or gets the answers of the first."""
    first, second = connected(address), connected(address)
    assert first.ready.max_length == 1000 and first.ready.dtype == "float32"
    assert (first.ready.num_kv_slots, second.ready.num_kv_slots) == (2000, 1000)
    ours = tree(first, 0, [1, 2, 3])
    assert len(ours) == 4 and ours == tree(second, 0, [1, 2, 3]) != tree(second, 1, [4, 5, 6])
    first.close()
    wait_for(lambda: server.server.num_targets == 1)
    assert tree(second, 2, [1, 2, 3]) == ours
    second.close()
    wait_for(lambda: server.server.num_targets == 0)


def test_a_target_may_come_before_its_draft(address: str) -> None:
    """Whoever starts first fails."""
    draft = remote(address)
    draft.start()
    assert not is_up(draft)
    server = Server(address)
    try:
        draft.wait_until_ready(PATIENCE)
        draft.close()
    finally:
        server.close()


def test_a_draft_that_is_not_there_is_named(address: str) -> None:
    """The start waits for ever, or does not say what is missing."""
    draft = remote(address)
    draft.start()
    with pytest.raises(RuntimeError, match="no draft answered at ipc:.*draft_start_timeout.*vllm-ssd serve-draft"):
        draft.wait_until_ready(0.3)


# ---- refusals ----

REFUSALS = {
    "another model": (dict(identity=dataclasses.replace(IDENTITY, model="x")), "serves another model"),
    "another tokenizer": (dict(identity=dataclasses.replace(IDENTITY, vocabulary="x")), "its tokenizer is not that"),
    "another vocabulary": (dict(vocab_size=VOCABULARY - 1), f"knows {VOCABULARY - 1} token ids"),
    "another dtype": (dict(draft_dtype="bfloat16"), "computes in float32"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(server: Server, address: str, case: str) -> None:
    """A target that means something else is served, or hears no reason that it can act on."""
    options, words = REFUSALS[case]
    draft = remote(address, **options)
    draft.start()
    with pytest.raises(RuntimeError) as caught:
        draft.wait_until_ready(PATIENCE)
    message = str(caught.value)
    assert words in message and address in message and "\n" not in message and len(message) < 400
    assert server.server.num_targets == 0


def test_another_protocol_is_refused(server: Server, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions of this package misunderstand each other."""
    from vllm_ssd.draft import remote as module

    monkeypatch.setattr(module, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    draft = remote(address)
    draft.start()
    with pytest.raises(RuntimeError, match="speaks protocol .*; install the same version"):
        draft.wait_until_ready(PATIENCE)


def test_options_are_checked_as_at_any_start(server: Server, address: str) -> None:
    """Options that this version would refuse reach the engine by the wire."""
    draft = remote(address)
    hello = Hello(PROTOCOL_VERSION, "a model", "a vocabulary", VOCABULARY, 4, "x", "auto", 99, 4, "uniform", 1.0, 8)
    draft._hello = encode(hello)
    draft.start()
    with pytest.raises(RuntimeError, match="num_speculative_tokens.*from 1 to 32"):
        draft.wait_until_ready(PATIENCE)


def test_options_may_be_left_to_the_draft(server: Server, address: str) -> None:
    """Options that are not numbers cannot be said to a shared draft."""
    draft = connected(address, tree_budget="auto", saguaro_c="auto", fan_out=[1, 2, 3, 4])
    assert tree(draft, 0, [1, 2, 3])
    draft.close()


def test_no_more_targets_than_allowed(server: Server, address: str) -> None:
    """Targets beyond the limit are admitted, or a place is not free again after one went."""
    drafts = [connected(address) for _ in range(3)]
    fourth = remote(address)
    fourth.start()
    with pytest.raises(RuntimeError, match="serves as many targets as it may \\(3\\); raise its --max-targets"):
        fourth.wait_until_ready(PATIENCE)
    drafts.pop().close()
    wait_for(lambda: len(server.server._targets) == 2)
    drafts.append(connected(address))
    for draft in drafts:
        draft.close()


# ---- deaths and floods ----

TARGET_SCRIPT = """
import json, sys, time
sys.path.insert(0, sys.argv[2])
from tests.unit.test_shared_draft import connected, tree
draft = connected(sys.argv[1])
print(json.dumps(tree(draft, 0, [1, 2, 3])), flush=True)
time.sleep(600)
"""


def target_process(address: str) -> subprocess.Popen:
    """A target in a process of its own, connected and with a tree."""
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen([sys.executable, "-c", TARGET_SCRIPT, address, root], stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"[[")
    return process


def test_a_killed_target_is_forgotten_and_harms_no_other(server: Server, address: str) -> None:
    """What a dead target held is held for ever, or its end disturbs the others."""
    draft = connected(address)
    with target_process(address) as process:
        wait_for(lambda: server.server.num_targets == 2)
        process.kill()
    wait_for(lambda: server.server.num_targets == 1)
    assert is_up(draft) and len(tree(draft, 0, list(range(20)))) == 4
    free = server.server._engine._pool.slots.num_free
    assert free > 1800, "the dead target's slots are lost"
    assert draft.restarts == 0
    draft.close()


def test_reconnect_after_the_draft_was_restarted(address: str, short_pauses: None) -> None:
    """A target never speaks to the new server, or speaks to it as if it knew its requests."""
    server = Server(address)
    draft = connected(address)
    before = tree(draft, 0, [1, 2, 3])
    server.close()
    wait_for(lambda: not is_up(draft))
    draft.send(Round(2, [], [], [], 3, 0.0))  # dropped, no error
    server = Server(address)
    try:
        wait_for(lambda: is_up(draft))
        assert draft.incarnation >= 2 and draft.restarts >= 1
        assert tree(draft, 0, [1, 2, 3]) == before
    finally:
        draft.close()
        server.close()


def test_a_lost_draft_is_seen_without_a_look(address: str) -> None:
    """An idle target shows a draft that has gone as one that is up."""
    server = Server(address)
    draft = connected(address)
    assert draft.is_up
    server.close()
    wait_for(lambda: not draft.is_up)
    assert draft.state is State.UP  # the rounds have not seen it yet
    draft.close()


def test_a_lost_connection_is_not_waited_for(address: str) -> None:
    """The silence of a draft that has gone is taken for work, for seconds."""
    server = Server(address)
    draft = connected(address)
    server.close()
    wait_for(lambda: not draft.is_up)
    assert not is_up(draft)
    draft.close()


def test_a_restart_that_nobody_noticed(address: str, short_pauses: None) -> None:
    """A draft that was back within the silence that is allowed gets rounds of a target it does not know."""
    server = Server(address)
    draft = connected(address)
    tree(draft, 0, [1, 2, 3])
    server.close()
    server = Server(address)
    try:
        draft.send(Round(2, [], [Outcome(0, 4, [1], [], 0)], [], 3, 0.0))
        wait_for(lambda: not is_up(draft))
        wait_for(lambda: is_up(draft))
        assert len(tree(draft, 0, [1, 2, 3])) == 4
    finally:
        draft.close()
        server.close()


def test_a_flood_does_not_hold_up_the_others(server: Server, address: str) -> None:
    """The rounds of one target are read before anyone else's, as fast as it sends them."""
    flooding, quiet = connected(address), connected(address)
    flood = encode(Round(1, [Start(0, pack_tokens([1] * 500), [], 0.0, 0, 1.0)], [], [], 3, 0.0))
    stop = threading.Event()
    sent = 0

    def send() -> None:
        nonlocal sent
        while not stop.is_set():
            sent += flooding._channel.send(flood)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        wait_for(lambda: sent > 500)
        for seq_id in range(5):
            began = time.monotonic()
            assert len(tree(quiet, seq_id, [seq_id, 2, 3])) == 4
            assert time.monotonic() - began < 10.0
    finally:
        stop.set()
        thread.join()
        flooding.close()
        quiet.close()


@pytest.mark.parametrize("data", (b"\xffgarbage", encode(Round(1, [], [Outcome(0, 1, [-1], [], 0)], [], 3, 0.0))))
def test_garbage_costs_its_sender_only(server: Server, address: str, data: bytes, short_pauses: None) -> None:
    """A message that cannot be read ends the server."""
    bad, good = connected(address), connected(address)
    bad._channel.send(data)
    wait_for(lambda: not is_up(bad))
    assert is_up(good) and good.restarts == 0
    wait_for(lambda: is_up(bad))
    assert len(tree(bad, 0, [1, 2, 3])) == len(tree(good, 0, [1, 2, 3])) == 4
    bad.close()
    good.close()


def test_a_stranger_is_told_so(server: Server, address: str, short_pauses: None) -> None:
    """Rounds without a greeting are worked on."""
    draft = remote(address)
    draft._hello = encode(Round(1, [], [], [], 3, 0.0))
    draft.start()
    with pytest.raises(RuntimeError, match="does not know this target"):
        draft.wait_until_ready(PATIENCE)


def test_a_target_that_reads_nothing_is_given_up(server: Server, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for it fills the memory, of which there is a limit in messages only."""
    monkeypatch.setattr(shared_server, "_MOST_UNREAD", 20_000)
    deaf, good = connected(address), connected(address)
    deaf._channel._socket.setsockopt(zmq.RCVHWM, 1)
    number = 0

    def told() -> bool:
        nonlocal number
        number += 1
        start = Start(number, pack_tokens([1, 2, number % 50]), [], 0.0, 0, 1.0)
        deaf._channel.send(encode(Round(number, [start], [], [number - 1], 3, 0.0)))
        return server.server.num_targets == 1

    wait_for(told)
    assert is_up(good) and len(tree(good, 0, [1, 2, 3])) == 4
    good.close()
    deaf.close()


def test_refusals_do_not_fill_the_log(server: Server, address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reaches the port can fill the disk."""
    for _ in range(20):
        draft = remote(address, vocab_size=VOCABULARY + 1)
        draft.start()
        with pytest.raises(RuntimeError, match="token ids"):
            draft.wait_until_ready(PATIENCE)
    assert 1 <= sum("is refused" in record.getMessage() for record in caplog.records) < 20


# ---- addresses and keys ----


def test_the_socket_is_its_owners_only(server: Server, address: str) -> None:
    """Other users of the machine can reach the draft."""
    mode = stat.S_IMODE(os.stat(address.removeprefix("ipc://")).st_mode)
    assert mode & 0o077 == 0


def test_a_taken_address_is_refused_and_a_stale_one_is_not(address: str) -> None:
    """A second draft takes the socket of the first away, or a killed draft's file blocks the next."""
    first = Hub(address)
    with pytest.raises(ValueError, match="another draft listens at"):
        Hub(address)
    first.close()
    path = address.removeprefix("ipc://")
    assert not os.path.exists(path)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    Hub(address).close()


def test_a_file_is_not_taken_for_a_socket(tmp_path: Path) -> None:
    """A wrong path costs the user what lies there."""
    file = tmp_path / "precious"
    file.write_text("data")
    with pytest.raises(ValueError, match="there is a file, which would be lost"):
        Hub(f"ipc://{file}")
    assert file.read_text() == "data" and list(tmp_path.iterdir()) == [file]


WRONG = {
    "http://x": "kind ipc or tcp",
    "ipc://relative": "absolute path",
    "ipc:///": "absolute path",
    "ipc:///tmp": "absolute path",
    "ipc:///tmp/\0x": "absolute path",
    "tcp://127.0.0.1:²": "a host and a port",
    "ipc://" + "/x" * 60: "longer than",
    "tcp://127.0.0.1": "a host and a port",
    "tcp://127.0.0.1:0": "a host and a port",
    "tcp://*:5555": "needs keys",
    "tcp://0.0.0.0:5555": "needs keys",
    "tcp://192.168.0.1:5555": "needs keys",
    "tcp://no-such-host.invalid:5555": "needs keys",
}


@pytest.mark.parametrize("address", WRONG)
def test_wrong_addresses(address: str) -> None:
    """A draft can be reached over the network by anyone, or a typing error shows as a silence."""
    with pytest.raises(ValueError, match=WRONG[address]):
        check_address(address, has_keys=False)
    with pytest.raises(ValueError, match=f"draft_address.*{WRONG[address]}"):
        config(draft_address=address)


@pytest.mark.parametrize("address", ("ipc:///tmp/x", "tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://localhost:1"))
def test_right_addresses(address: str) -> None:
    """This machine only: no keys are needed."""
    check_address(address, has_keys=False)


def test_options_that_do_not_go_with_an_address() -> None:
    """Options of the draft's own process are taken and change nothing."""
    for options in ({"draft_device": "cpu:1"}, {"draft_kv_cache_memory_bytes": 1 << 21}):
        with pytest.raises(ValueError, match=next(iter(options))):
            config(draft_address="ipc:///tmp/x", **options)
    with pytest.raises(ValueError, match="draft_keys"):
        config(draft_keys="/tmp/keys")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_keys_are_private_and_not_overwritten(tmp_path: Path) -> None:
    """Others can read the secrets, or a second call locks everyone out."""
    folder = tmp_path / "keys"
    files = make_keys(folder)
    assert sorted(file.name for file in files) == ["draft.key", "draft.key_secret", "target.key", "target.key_secret"]
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in (folder, *files))
    with pytest.raises(ValueError, match="holds keys already"):
        make_keys(folder)
    with pytest.raises(ValueError, match="target.key_secret does not exist; `vllm-ssd keygen`"):
        load_key(tmp_path, "target", secret=True)


def test_only_holders_of_the_keys_are_served(tmp_path: Path) -> None:
    """A draft that is open to the network serves whoever comes, or cannot be reached with the right keys."""
    ours, others = tmp_path / "ours", tmp_path / "others"
    make_keys(ours)
    make_keys(others)
    mixed = tmp_path / "mixed"  # knows the draft's public key, and has no secret that the draft admits
    mixed.mkdir()
    (mixed / "draft.key").write_bytes((ours / "draft.key").read_bytes())
    (mixed / "target.key_secret").write_bytes((others / "target.key_secret").read_bytes())
    address = f"tcp://127.0.0.1:{free_port()}"
    server = Server(address, ours)
    try:
        (ours / "draft.key_secret").unlink()  # targets do without
        draft = connected(address, draft_keys=str(ours))
        assert len(tree(draft, 0, [1, 2, 3])) == 4
        for keys in (None, others, mixed):
            stranger = remote(address, draft_keys=None if keys is None else str(keys))
            stranger.start()
            with pytest.raises(RuntimeError, match="breaks off the handshake: .* its keys are others .*keys"):
                stranger.wait_until_ready(PATIENCE)
        assert server.server.num_targets == 1 and is_up(draft)
        draft.close()
    finally:
        server.close()


def test_a_draft_without_keys_is_not_asked_with_keys(tmp_path: Path) -> None:
    """A target with keys waits for ever for a draft that was started without."""
    make_keys(tmp_path / "keys")
    address = f"tcp://127.0.0.1:{free_port()}"
    server = Server(address)
    try:
        draft = remote(address, draft_keys=str(tmp_path / "keys"))
        draft.start()
        with pytest.raises(RuntimeError, match=f"its keys are others .*here they are those of {tmp_path}/keys"):
            draft.wait_until_ready(PATIENCE)
    finally:
        server.close()


def test_a_port_that_something_else_held_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ gives a connection up for good after a greeting that it cannot read, and the target waits for ever."""
    monkeypatch.setattr(remote_module, "_CONNECT_EVERY", 0.5)
    make_keys(tmp_path / "keys")
    port = free_port()
    draft = remote(f"tcp://127.0.0.1:{port}", draft_keys=str(tmp_path / "keys"))
    with socket.create_server(("127.0.0.1", port)) as other:
        draft.start()
        connection, _ = other.accept()
        with connection, contextlib.suppress(ConnectionError):  # ZeroMQ may hang up at once
            connection.sendall(b"\0garbage that is no greeting of ZeroMQ " * 10)
            connection.recv(1)
        time.sleep(0.2)  # ZeroMQ reads it
    server = Server(f"tcp://127.0.0.1:{port}", tmp_path / "keys")
    try:
        wait_for(lambda: is_up(draft))
        assert len(tree(draft, 0, [1, 2, 3])) == 4
        draft.close()
    finally:
        server.close()


@pytest.mark.parametrize("damage", ("short", "other characters", "of another pair"))
def test_a_damaged_key_is_named(tmp_path: Path, damage: str) -> None:
    """ZeroMQ answers with "Invalid argument", or both sides wait."""
    make_keys(tmp_path / "keys")
    file = tmp_path / "keys" / "draft.key_secret"
    text = file.read_text()
    key = text.split('secret-key = "')[1].split('"')[0]
    wrong = {"short": key[:-1], "other characters": "~" * 40, "of another pair": zmq.curve_keypair()[1].decode()}[
        damage
    ]
    file.write_text(text.replace(key, wrong))
    with pytest.raises(ValueError, match="draft.key_secret is damaged"):
        drafts_keys(tmp_path / "keys")


# ---- who is meant ----


def test_identity_is_of_the_content(tmp_path: Path) -> None:
    """The same model in another folder is another one, or another model passes for it."""
    import shutil

    copy = tmp_path / "elsewhere"
    shutil.copytree(MODELS / "draft", copy)
    draft = identify(config(model=str(MODELS / "draft")))
    assert identify(config(model=str(copy))) == draft
    target = identify(config(model=str(MODELS / "target")))
    assert target.model != draft.model and target.vocabulary == draft.vocabulary and draft.num_tokens == 4096


def test_failed_is_the_only_answer_to_a_stranger() -> None:
    """Types of the answers that this file relies on."""
    assert {Failed, Push} <= set(link.decode_to_target.__globals__["ToTarget"].__args__)


# ---- the command ----

WRONG_COMMANDS = {
    "--device auto --listen ipc:///tmp/x": "--device is 'auto'",
    "--device cpu:999 --listen ipc:///tmp/x": "no core 999",
    "--device cpu:0 --listen tcp://0.0.0.0:5555": "needs keys",
    "--device cpu:0 --listen ipc:///tmp/x --keys /no/such": "draft.key_secret does not exist",
    "--device cpu:0 --listen foo": "--listen is 'foo'; it must be of kind ipc or tcp",
    "--device cpu:0 --listen ipc:///tmp/x --dtype int8": "--dtype is 'int8'",
    "--device cpu:0 --listen ipc:///tmp/x --max-targets 0": "--max-targets is 0",
}


def test_a_folder_that_does_not_exist_is_named() -> None:
    """The user reads what a hub name may consist of."""
    options = ["--device", "cpu:0", "--listen", "ipc:///tmp/x"]
    command = [sys.executable, "-m", "vllm_ssd.cli", "serve-draft", "/no/such", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and run.stderr == "vllm-ssd serve-draft: MODEL is '/no/such'; there is no such folder\n"


def test_serve_draft_names_a_model_that_the_hub_does_not_give(tmp_path: Path) -> None:
    """A mistyped name of the hub ends with a sentence about a connection."""
    options = ["--device", "cpu:0", "--listen", f"ipc://{tmp_path}/draft"]
    command = [sys.executable, "-m", "vllm_ssd.cli", "serve-draft", "no-such-draft", *options]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith(
        "vllm-ssd serve-draft: MODEL is 'no-such-draft', which cannot be read ("
    )


@pytest.mark.parametrize("options", WRONG_COMMANDS)
def test_wrong_options_of_the_command(options: str) -> None:
    """The command ends with a traceback, or starts."""
    command = [sys.executable, "-m", "vllm_ssd.cli", "serve-draft", str(MODELS / "draft"), *options.split()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and WRONG_COMMANDS[options] in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_what_is_loaded_is_no_work_for_the_garbage_collector(address: str) -> None:
    """A full collection, of all that torch and transformers made, comes while requests run: 0.2 s without a tree."""
    hub = Hub(address, None)
    try:
        shared_server.load(config(model=str(MODELS / "draft"), draft_dtype="float32"), DraftDevice("cpu"), hub, 1)
        assert gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
        hub.close()
