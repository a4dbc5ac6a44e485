"""The target's handle on its draft process: start, watch, restart, end.

Nothing here blocks a step of the target, except the wait for readiness at start-up. Knows
nothing about trees; messages pass through.
"""

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from enum import Enum

import msgspec
import zmq

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import DraftDevice
from vllm_ssd.draft.server import ServerSettings
from vllm_ssd.messages import PROTOCOL_VERSION, Failed, Idle, Push, Ready, Round, decode_to_target, encode
from vllm_ssd.transport import Channel, Endpoint

logger = logging.getLogger("vllm.saguaro")

_HUNG_SECONDS = 5.0  # silence after which a draft that should answer is given up
_FIRST_BACKOFF, _LAST_BACKOFF = 1.0, 60.0
_STEADY_SECONDS = 60.0  # a draft that was up for so long begins with the first back-off again
_REAP_SECONDS = 0.2  # a killed process that takes longer to go is waited for aside
# Set by vLLM for the target's own threads; the draft has other cores and its own runtime.
_TARGET_ONLY_ENVIRONMENT = (
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "KMP_TPAUSE",
)


class State(Enum):
    """Where the draft process stands."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"  # waiting to be started again


class DraftProcess:
    """One draft server, restarted with back-off when it dies or hangs."""

    def __init__(self, config: SaguaroConfig, device: DraftDevice, **settings) -> None:
        """`settings`: vocab_size, max_num_seqs, max_model_len of `ServerSettings`."""
        self.state = State.DOWN
        self.ready: Ready | None = None
        self.incarnation = 0
        """Counts starts: whoever sees it change must tell the draft everything anew."""
        self._config = config
        self._device = device
        self._settings = settings
        self._backoff = _FIRST_BACKOFF
        self._start_at = 0.0
        self._process: subprocess.Popen | None = None
        self._channel: Channel | None = None
        self._endpoint: Endpoint | None = None
        self._last_heard = 0.0
        self._up_since = 0.0
        self._finalizer: weakref.finalize | None = None

    @property
    def restarts(self) -> int:
        """How often the draft was started again."""
        return max(self.incarnation - 1, 0)

    @property
    def is_up(self) -> bool:
        """Whether the draft is loaded and its process lives. May be asked from any thread."""
        process = self._process
        return self.state is State.UP and process is not None and not _has_ended(process.pid)

    @property
    def pid(self) -> int | None:
        """Process id, while there is a process."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process; returns at once."""
        self._endpoint = Endpoint()
        # On a CPU the target's cores compute; moving messages is left to the draft's.
        self._channel = Channel(self._endpoint.address, bind=True, cores=self._device.cores)
        settings = ServerSettings(
            config=dataclasses.asdict(self._config),
            address=self._endpoint.address,
            directory=self._endpoint.directory,
            device=self._device.name,
            cores=list(self._device.cores),
            parent=os.getpid(),
            **self._settings,
        )
        environment = {k: v for k, v in os.environ.items() if k not in _TARGET_ONLY_ENVIRONMENT}
        if self._device.cores:
            environment["OMP_NUM_THREADS"] = str(len(self._device.cores))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_ssd.draft.server"], stdin=subprocess.PIPE, env=environment
            )
        except OSError:
            self._channel.close()
            self._endpoint.remove()
            raise
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._process, self._channel, self._endpoint)
        self._process.stdin.write(json.dumps(dataclasses.asdict(settings)).encode() + b"\n")
        self._process.stdin.flush()
        self.state = State.STARTING
        self.ready = None
        self.incarnation += 1
        self._last_heard = time.monotonic()

    def wait_until_ready(self, timeout: float) -> None:
        """Block until the draft is loaded. Raises `RuntimeError` if it fails or takes too long."""
        began = reported = time.monotonic()
        while self.state is State.STARTING:
            for message in self._read(0.2):
                if isinstance(message, Failed):
                    self.close()
                    raise RuntimeError(f"saguaro: the draft {self._config.model!r} did not load: {message.reason}")
            now = time.monotonic()
            if self.state is State.STARTING and self._process.poll() is not None:
                status = self._process.returncode
                self.close()
                raise RuntimeError(
                    f"saguaro: the draft process ended with status {status} while it loaded {self._config.model!r}; "
                    "its own messages stand above"
                )
            if now - began > timeout:
                self.close()
                raise RuntimeError(
                    f"saguaro: the draft {self._config.model!r} was not ready after {timeout:.0f} s; "
                    "raise speculative_config['draft_start_timeout'] if it only needs longer"
                )
            if now - reported > 10.0:
                reported = now
                logger.info("waiting for the draft %s to load (%.0f s)", self._config.model, now - began)
        logger.info(
            "draft %s is ready on %s (%s, %d KV slots) after %.1f s",
            self._config.model,
            _describe(self._device),
            self.ready.dtype,
            self.ready.num_kv_slots,
            time.monotonic() - began,
        )

    def send(self, message: Round) -> None:
        """Tell the draft; what a draft that is not up misses it will be told anew."""
        if self.state is State.UP and not self._channel.send(encode(message)):
            self._give_up("it does not read its messages")

    def receive(self, timeout: float = 0.0) -> Iterator[Push]:
        """What the draft pushed since the last call; waits for the first message if asked to."""
        if self.state is State.DOWN:
            self._restart_when_due()
            return
        for message in self._read(timeout):
            if isinstance(message, Push):
                yield message
            elif isinstance(message, Failed):
                self._give_up(message.reason)
                return
        self._check()

    def _read(self, timeout: float) -> Iterator[Push | Failed]:
        data = self._channel.receive(timeout)
        while data is not None:
            self._last_heard = time.monotonic()
            try:
                message = decode_to_target(data)
            except msgspec.MsgspecError as error:
                message = Failed(f"it sent what cannot be read: {error}")
            if isinstance(message, Ready):
                message = self._take_ready(message)
            if message is not None and not isinstance(message, Idle):
                yield message
                if self.state is State.DOWN:
                    return
            data = self._channel.receive()

    def _take_ready(self, message: Ready) -> Failed | None:
        if message.version != PROTOCOL_VERSION:
            return Failed(f"it speaks protocol {message.version}, this is {PROTOCOL_VERSION}: another vllm-ssd")
        self.ready = message
        self.state = State.UP
        self._up_since = time.monotonic()
        if self.incarnation > 1:
            logger.info("the draft is back after restart %d", self.restarts)
        return None

    def _check(self) -> None:
        """Notice death and silence. A draft that is up gives a sign of life twice a second."""
        if self._process.poll() is not None:
            self._give_up(f"its process ended with status {self._process.returncode}")
        elif self.state is State.UP and time.monotonic() - self._last_heard > _HUNG_SECONDS:
            self._give_up(f"it was silent for {_HUNG_SECONDS:.0f} s")
        elif self.state is State.STARTING and time.monotonic() - self._last_heard > self._config.draft_start_timeout:
            self._give_up("it did not load in time")

    def _give_up(self, reason: str) -> None:
        was_steady = self.ready is not None and time.monotonic() - self._up_since > _STEADY_SECONDS
        self._end()
        self.state = State.DOWN
        if was_steady:
            self._backoff = _FIRST_BACKOFF
        self._start_at = time.monotonic() + self._backoff
        logger.warning(
            "the draft is down: %s. Generation goes on without it; next try in %.0f s", reason, self._backoff
        )
        self._backoff = min(2 * self._backoff, _LAST_BACKOFF)

    def _restart_when_due(self) -> None:
        if time.monotonic() < self._start_at:
            return
        try:
            self.start()
        except (OSError, zmq.ZMQError) as error:  # no memory, no file handles, no temporary directory
            self._give_up(f"it cannot be started ({error})")

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        self.ready = None

    def close(self) -> None:
        """End the process for good, and remove what belongs to it."""
        if self.state is State.UP:
            self._channel.send(encode(Round(0, [], [], [], 0, 0.0, closing=True)))
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass
        self._end()
        self.state = State.DOWN
        self._start_at = float("inf")


def _end(owner: int, process: subprocess.Popen, channel: Channel, endpoint: Endpoint) -> None:
    """Leave nothing behind: process, socket, directory. A forked copy of the owner leaves them alone."""
    if os.getpid() != owner:
        return
    process.kill()
    try:
        process.wait(_REAP_SECONDS)
    except subprocess.TimeoutExpired:  # its device is slow to let go of it, or hangs
        threading.Thread(target=process.wait, daemon=True).start()
    with contextlib.suppress(OSError):
        process.stdin.close()
    channel.close()
    endpoint.remove()


def _has_ended(pid: int) -> bool:
    """Whether a child process is over, without taking its status from whoever waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _describe(device: DraftDevice) -> str:
    return f"CPU cores {','.join(map(str, device.cores))}" if device.cores else device.name
