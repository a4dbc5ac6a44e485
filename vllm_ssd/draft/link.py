"""What every handle on a draft has in common: messages, signs of life, giving up and coming back.

A draft is a process of the target's own (`launcher.py`), or a server that several targets share
(`remote.py`). Nothing here blocks a step of the target. Knows nothing about trees; messages pass
through.
"""

import abc
import contextlib
import logging
import time
import weakref
from collections.abc import Iterator
from enum import Enum

import msgspec
import zmq

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.messages import PROTOCOL_VERSION, Failed, Idle, Push, Ready, Round, decode_to_target, encode
from vllm_ssd.transport import Channel

logger = logging.getLogger("vllm.saguaro")

_HUNG_SECONDS = 5.0  # silence after which a draft that should answer is given up
_MOST_READ = 4096  # messages taken in at a time: a draft that floods its target does not hold it up
_FIRST_BACKOFF, _LAST_BACKOFF = 1.0, 60.0
_STEADY_SECONDS = 60.0  # a draft that was up for so long begins with the first back-off again


class State(Enum):
    """Where the draft stands."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"  # waiting to be started, or greeted, again


class DraftLink(abc.ABC):
    """One draft, brought back with growing pauses when it dies or hangs."""

    def __init__(self, config: SaguaroConfig) -> None:
        self.state = State.DOWN
        self.name = "the draft"  # in messages; of several, which one
        self.ready: Ready | None = None
        self.incarnation = 0
        """Counts starts: whoever sees it change must tell the draft everything anew."""
        self._config = config
        self._backoff = _FIRST_BACKOFF
        self._start_at = 0.0
        self._channel: Channel | None = None
        self._last_heard = 0.0
        self._up_since = 0.0
        self._finalizer: weakref.finalize | None = None

    @abc.abstractmethod
    def start(self) -> None:
        """Start the draft or greet it; returns at once. Raises `OSError` or `zmq.ZMQError`."""

    @abc.abstractmethod
    def _death(self) -> str | None:
        """Why the draft is known to be gone, beyond its silence."""

    @abc.abstractmethod
    def _failure(self, reason: str) -> str:
        """The sentence for a draft that says `reason` at its start."""

    def _fate(self, reason: str) -> str:
        """The sentence for a draft that is gone before it was ready."""
        return self._failure(f"{reason}; its own messages stand above")

    @abc.abstractmethod
    def _too_late(self, seconds: float) -> str:
        """The sentence for a draft that was not ready after so long."""

    @abc.abstractmethod
    def _after_goodbye(self) -> None:
        """Give the message that the target goes a moment to arrive."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Where it runs."""

    @property
    def restarts(self) -> int:
        """How often the draft was started again."""
        return max(self.incarnation - 1, 0)

    @property
    def is_up(self) -> bool:
        """Whether the draft is loaded and, as far as is known, alive. May be asked from any thread."""
        return self.state is State.UP

    @property
    def pid(self) -> int | None:
        """Process id, while there is a process of ours."""
        return None

    def wait_until_ready(self, timeout: float) -> None:
        """Block until the draft is loaded. Raises `RuntimeError` if it fails or takes too long."""
        began = reported = time.monotonic()
        while self.state is State.STARTING:
            for message in self._read(0.2):
                if isinstance(message, Failed):
                    self.close()
                    raise RuntimeError(self._failure(message.reason))
            now = time.monotonic()
            if self.state is State.STARTING and (reason := self._death()) is not None:
                self.close()
                raise RuntimeError(self._fate(reason))
            if self.state is State.STARTING and now - began > timeout:
                self.close()
                raise RuntimeError(self._too_late(timeout))
            if now - reported > 10.0:
                reported = now
                logger.info("waiting for the draft %s on %s (%.0f s)", self._config.model, self.describe(), now - began)
        logger.info(
            "draft %s is ready on %s (%s, %d KV slots) after %.1f s",
            self._config.model,
            self.describe(),
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
        for _ in range(_MOST_READ):
            data = self._channel.receive(timeout)
            if data is None:
                return
            timeout, self._last_heard = 0.0, time.monotonic()
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

    def _take_ready(self, message: Ready) -> Failed | None:
        if message.version != PROTOCOL_VERSION:
            return Failed(f"it speaks protocol {message.version}, this is {PROTOCOL_VERSION}: another vllm-ssd")
        self.ready = message
        self.state = State.UP
        self._up_since = time.monotonic()
        if self.incarnation > 1:
            logger.info("%s is back after restart %d", self.name, self.restarts)
        return None

    def _check(self) -> None:
        """Notice death and silence. A draft that is up gives a sign of life twice a second."""
        silence = time.monotonic() - self._last_heard
        if (reason := self._death()) is not None:
            self._give_up(reason)
        elif self.state is State.UP and silence > _HUNG_SECONDS:
            self._give_up_silent(f"it was silent for {_HUNG_SECONDS:.0f} s")
        elif self.state is State.STARTING and silence > self._config.draft_start_timeout:
            self._give_up_silent("it did not load in time")

    def _give_up_silent(self, reason: str) -> None:
        """It lives, as far as is known, and does not answer."""
        self._give_up(reason)

    def give_up(self, reason: str, part: int = 0) -> None:
        """What it sent is of no use: begin anew. `part`: which of several drafts, as its messages say."""
        if self.state is not State.DOWN:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        was_steady = self.ready is not None and time.monotonic() - self._up_since > _STEADY_SECONDS
        self._end()
        self.state = State.DOWN
        if was_steady:
            self._backoff = _FIRST_BACKOFF
        self._start_at = time.monotonic() + self._backoff
        logger.warning(
            "%s is down: %s. Generation goes on without it; next try in %.0f s", self.name, reason, self._backoff
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
        """Part from the draft for good, and remove what belongs to this side."""
        if self.state is State.UP:
            with contextlib.suppress(zmq.ZMQError):
                self._channel.send(encode(Round(0, [], [], [], 0, 0.0, closing=True)))
            self._after_goodbye()
        self._end()
        self.state = State.DOWN
        self._start_at = float("inf")
