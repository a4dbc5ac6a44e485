"""A draft that serves several targets: `vllm-ssd serve-draft`.

Admits targets that mean the same model and vocabulary, works for all of them, and forgets those
that go. Runs until it is told to end (SIGTERM, Ctrl-C).
"""

import dataclasses
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import DraftDevice, use_device
from vllm_ssd.draft import heap
from vllm_ssd.draft.hub import Hub, PeerGone
from vllm_ssd.draft.identity import Identity, identify
from vllm_ssd.draft.rare_log import RareLog
from vllm_ssd.messages import PROTOCOL_VERSION, Failed, Hello, Idle, Ready, Round, decode_to_shared_draft, encode

logger = logging.getLogger("vllm_ssd.draft")
_log_refusal = RareLog(logger)

_SIGN_SECONDS = 0.5  # how often each target hears something
_TURNS = 4  # messages taken in for each target before the next step
_MOST_UNREAD = 1 << 28  # bytes of pushes kept for a target that reads nothing, besides the latest
_RETRY_SECONDS = 0.01  # until a target that did not read is tried again
_LONGEST_NAME = 80  # characters
_MOST_NUM_SEQS = 4096
_MOST_SLOTS = 1 << 22  # of the KV cache, unless its size is given


@dataclass(frozen=True)
class Served:
    """What the draft has to offer."""

    identity: Identity
    vocab_size: int  # ids from here on are padding
    max_length: int
    device: str
    dtype: str  # without "torch."
    max_targets: int


@dataclass
class _Target:
    """A target that was admitted."""

    name: str
    round_id: int = -1
    outbox: deque[bytes] = field(default_factory=deque)  # an idle target reads nothing; no push may be left out
    unread: int = 0  # bytes in it
    last_sign: float = 0.0

    def put(self, data: bytes) -> None:
        """To be sent, after what waits."""
        self.outbox.append(data)
        self.unread += len(data)

    def sent(self) -> None:
        """The first has left."""
        self.unread -= len(self.outbox.popleft())

    @property
    def is_deaf(self) -> bool:
        """Whether too much waits for it."""
        return self.unread > _MOST_UNREAD and len(self.outbox) > 1


class SharedServer:
    """Moves messages between the targets and the engine."""

    def __init__(self, hub: Hub, engine, config: SaguaroConfig, served: Served) -> None:
        """`engine`: a `SharedEngine`. `config`: of the draft; each target brings its own tree options."""
        self._hub = hub
        self._engine = engine
        self._config = config
        self._served = served
        self._targets: dict[bytes, _Target] = {}
        self._busy = False
        self._polled_at = 0.0  # when there was nothing to take in any more

    @property
    def num_targets(self) -> int:
        """Targets it works for."""
        return len(self._targets)

    def run(self, stop: threading.Event) -> None:
        """Take in what came, do one step, send what it built; again, until `stop` is set."""
        use_device(self._served.device)  # this thread may be another than the one that loaded the model
        while not stop.is_set():
            self._take_in(0.0 if self._busy else self._pause())
            self._polled_at = time.perf_counter()
            self._busy = self._engine.step()
            for peer, push in list(self._engine.take_pushes()):
                if isinstance(push, Failed):
                    self._refuse(peer, f"its messages make no sense: {push.reason}")
                else:
                    self._targets[peer].put(encode(push))
            self._send()

    def _pause(self) -> float:
        """Seconds until there is something to do, if nothing comes."""
        waits = any(target.outbox for target in self._targets.values())
        return min(_RETRY_SECONDS if waits else _SIGN_SECONDS, self._engine.seconds_until_overdue())

    def _take_in(self, timeout: float) -> None:
        """A bounded number of messages: the hub takes them from the targets in turns."""
        for _ in range(_TURNS * (len(self._targets) + 1)):
            found = self._hub.receive(timeout)
            if found is None:
                return
            timeout = 0.0
            self._take(*found)

    def _take(self, peer: bytes, data: bytes) -> None:
        known = peer in self._targets
        try:
            message = decode_to_shared_draft(data)
        except msgspec.MsgspecError as error:
            reason = f"it cannot read this ({error}); it speaks protocol {PROTOCOL_VERSION} of vllm-ssd"
            self._refuse(peer, reason)
            return
        if isinstance(message, Hello):
            if not known:
                self._greet(peer, message)
        elif message.closing:
            self._forget(peer, "has gone")
        elif not known:
            self._refuse(peer, "it does not know this target (it was restarted, or lost the connection)")
        else:
            self._begin_round(peer, message)

    def _begin_round(self, peer: bytes, message: Round) -> None:
        try:
            self._engine.begin_round(peer, message, self._polled_at if self._busy else None)
            self._targets[peer].round_id = message.round_id
        except Exception as error:  # whatever a target sends must not harm the others
            logger.exception("target %s sent nonsense", self._targets[peer].name)
            self._refuse(peer, f"its messages make no sense: {error}")

    # ---- targets come and go ----

    def _greet(self, peer: bytes, hello: Hello) -> None:
        reason = self._objection(hello)
        if reason is None:
            try:
                config = self._config_for(hello)
            except ValueError as error:
                reason = str(error).removesuffix(".")
        if reason is not None:
            _log_refusal(f"target {_readable(hello.name)} is refused: {reason}")
            self._refuse(peer, reason)
            return
        num_slots = self._engine.admit(peer, config, hello.max_num_seqs)
        self._targets[peer] = _Target(_readable(hello.name))
        served = self._served
        ready = Ready(PROTOCOL_VERSION, num_slots, served.max_length, served.device, served.dtype)
        self._targets[peer].put(encode(ready))
        logger.info("target %s is admitted; %d now", self._targets[peer].name, len(self._targets))

    def _objection(self, hello: Hello) -> str | None:
        """Why a target cannot be served, and what would be right; None if it can."""
        served = self._served
        if hello.version != PROTOCOL_VERSION:
            return (
                f"it speaks protocol {PROTOCOL_VERSION}, this target {hello.version}; "
                "install the same version of vllm-ssd on both sides"
            )
        if hello.model != served.identity.model:
            return (
                "it serves another model than speculative_config['model'] names; "
                f"it was started with {self._config.model!r}, and their config.json differ"
            )
        if hello.vocabulary != served.identity.vocabulary:
            return (
                "its tokenizer is not that of speculative_config['model']; "
                f"take the same files of {self._config.model!r} on both sides"
            )
        if hello.vocab_size != served.vocab_size:
            return (
                f"the target knows {hello.vocab_size} token ids and the draft {served.vocab_size}; "
                "choose a pair in which every token of the tokenizer is known to both"
            )
        if hello.draft_dtype not in ("auto", served.dtype):
            return (
                f"it computes in {served.dtype}, speculative_config['draft_dtype'] is {hello.draft_dtype!r}; "
                "set that to 'auto' or start the draft with this --dtype"
            )
        if not 1 <= hello.max_num_seqs <= _MOST_NUM_SEQS:
            return f"max_num_seqs is {hello.max_num_seqs}; a shared draft takes 1 to {_MOST_NUM_SEQS}"
        if len(self._targets) >= served.max_targets:
            most = served.max_targets
            return f"it serves as many targets as it may ({most}); raise its --max-targets or start another draft"
        return None

    def _config_for(self, hello: Hello) -> SaguaroConfig:
        """The draft's options with those of the target's trees; raises `ValueError` as at any start."""
        return dataclasses.replace(
            self._config,
            num_speculative_tokens=hello.num_speculative_tokens,
            tree_budget=hello.tree_budget,
            fan_out=hello.fan_out if isinstance(hello.fan_out, str) else tuple(hello.fan_out),
            saguaro_c=hello.saguaro_c,
            draft_top_m=hello.draft_top_m,
        )

    def _refuse(self, peer: bytes, reason: str) -> None:
        """Tell a target why there is no more for it."""
        try:
            self._hub.send(peer, encode(Failed(reason)))
        except PeerGone:
            pass
        self._forget(peer, f"is given up: {reason}")

    def _forget(self, peer: bytes, why: str) -> None:
        if (target := self._targets.pop(peer, None)) is not None:
            self._engine.dismiss(peer)
            logger.info("target %s %s; %d left", target.name, why, len(self._targets))

    # ---- sending ----

    def _send(self) -> None:
        now = time.monotonic()
        for peer, target in list(self._targets.items()):
            try:
                self._send_to(peer, target, now)
            except PeerGone:
                self._forget(peer, "is not there any more")
            else:
                if target.is_deaf:
                    self._refuse(peer, "it does not read its messages")

    def _send_to(self, peer: bytes, target: _Target, now: float) -> None:
        while target.outbox and self._hub.send(peer, target.outbox[0]):
            target.sent()
            target.last_sign = now
        if not target.outbox and now - target.last_sign > _SIGN_SECONDS:
            self._hub.send(peer, encode(Idle(target.round_id)))
            target.last_sign = now


def _readable(name: str) -> str:
    """A target's name as one short line of a log."""
    return "".join(character if character.isprintable() else "?" for character in name[:_LONGEST_NAME])


def load(
    config: SaguaroConfig, device: DraftDevice, hub: Hub, max_targets: int, vocab_size: int | None = None
) -> SharedServer:
    """Load the model and join it to a hub. `vocab_size`: token ids from here on are padding; None: of the tokenizer."""
    import torch

    from vllm_ssd.draft.model import DraftModel
    from vllm_ssd.draft.shared_engine import SharedEngine

    if device.cores:
        torch.set_num_threads(len(device.cores))
    use_device(device.name)
    identity = identify(config)
    model = DraftModel(config, torch.device(device.name), vocab_size or identity.num_tokens)
    model.vocab_size = min(model.vocab_size, model.num_embeddings)
    num_slots = model.allocate_kv_cache(config.draft_kv_cache_memory_bytes, _MOST_SLOTS)
    model.warm_up()
    dtype = str(model.dtype).removeprefix("torch.")
    served = Served(identity, model.vocab_size, model.max_length, device.name, dtype, max_targets)
    logger.info("draft %s listens at %s (%s, %s, %d KV slots)", config.model, hub.address, device, dtype, num_slots)
    heap.freeze()
    return SharedServer(hub, SharedEngine(model, num_slots), config, served)
