"""The target's handle on a draft that it shares with other targets (`vllm-ssd serve-draft`).

Greets it, watches for its signs of life, and greets it again after either side was gone.
"""

import logging
import os
import socket
import time
import weakref
from collections.abc import Sequence

from vllm_ssd.addresses import Keys, targets_keys
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.connection import Connection
from vllm_ssd.draft.identity import Identity
from vllm_ssd.draft.link import DraftLink, State
from vllm_ssd.messages import PROTOCOL_VERSION, Hello, encode
from vllm_ssd.transport import Channel

logger = logging.getLogger("vllm.saguaro")

_CONNECT_EVERY = 5.0  # seconds: ZeroMQ does not come back to a port at which something else answered
_GREET_EVERY = 2.0  # seconds, until there is an answer: a draft that restarts loses what it had not read


class RemoteDraft(DraftLink):
    """A shared draft."""

    def __init__(
        self,
        config: SaguaroConfig,
        identity: Identity,
        vocab_size: int,
        max_num_seqs: int,
        cores: Sequence[int] = (),
    ) -> None:
        """`vocab_size`: token ids from here on are padding. `cores`: where ZeroMQ's own thread runs."""
        super().__init__(config)
        self._cores = cores
        self._greeted_at = self._connected_at = 0.0
        self._where: tuple[str, Keys | None] = ("", None)
        fan_out = config.fan_out
        self._hello = encode(
            Hello(
                version=PROTOCOL_VERSION,
                model=identity.model,
                vocabulary=identity.vocabulary,
                vocab_size=vocab_size,
                max_num_seqs=max_num_seqs,
                name=f"{socket.gethostname()}:{os.getpid()}",
                draft_dtype=config.draft_dtype,
                num_speculative_tokens=config.num_speculative_tokens,
                tree_budget=config.tree_budget,
                fan_out=fan_out if isinstance(fan_out, str) else list(fan_out),
                saguaro_c=config.saguaro_c,
                draft_top_m=config.draft_top_m,
            )
        )

    def start(self) -> None:
        """Connect anew and greet the draft; returns at once."""
        try:
            keys = None if self._config.draft_keys is None else targets_keys(self._config.draft_keys)
        except ValueError as error:  # they were there at the start
            raise OSError(str(error)) from None
        self._begin()
        self._connect(self._config.draft_address, keys)

    def _begin(self) -> None:
        self.state = State.STARTING
        self.ready = None
        self.incarnation += 1
        self._last_heard = time.monotonic()

    def _connect(self, address: str, keys: Keys | None) -> None:
        self._where = address, keys
        self._channel = Connection(address, keys, self._cores)
        self._connected_at = time.monotonic()
        self._finalizer = weakref.finalize(self, _close, os.getpid(), self._channel)
        self._greet()

    def _greet(self) -> None:
        self._channel.send(self._hello)
        self._greeted_at = time.monotonic()

    def _read(self, timeout: float):
        now = time.monotonic()
        if self.state is State.STARTING and not self._channel.stands and now - self._connected_at > _CONNECT_EVERY:
            self._finalizer()
            self._connect(*self._where)
        elif self.state is State.STARTING and now - self._greeted_at > _GREET_EVERY:
            self._greet()
        yield from super()._read(timeout)

    @property
    def is_up(self) -> bool:
        """Whether the draft has admitted this target and the connection stands. May be asked from any thread."""
        channel = self._channel
        return self.state is State.UP and channel is not None and not channel.is_lost

    def _death(self) -> str | None:
        if self._channel.is_refused:
            return (
                f"what answers at {self.describe()} breaks off the handshake: it is no draft, or its keys are "
                f"others ({self._describe_keys()}; the draft's are those of its --keys)"
            )
        if self.state is State.UP and self._channel.is_lost:
            return "the connection to it is lost"
        return None

    def _describe_keys(self) -> str:
        keys = self._config.draft_keys
        return "here speculative_config['draft_keys'] is not set" if keys is None else f"here they are those of {keys}"

    def _failure(self, reason: str) -> str:
        return f"saguaro: the draft at {self.describe()} refuses: {reason}"

    def _fate(self, reason: str) -> str:
        return f"saguaro: {reason}"

    def _too_late(self, seconds: float) -> str:
        keys = " with the keys of this draft_keys" if self._config.draft_keys else ""
        return (
            f"saguaro: no draft answered at {self.describe()} within {seconds:.0f} s (draft_start_timeout); "
            f"start one there{keys}: vllm-ssd serve-draft {self._config.model} --device DEVICE "
            f"--listen {self.describe()}"
        )

    def describe(self) -> str:
        """Its address."""
        return self._config.draft_address

    def _after_goodbye(self) -> None:
        self._channel.flush_and_close(0.5)


def _close(owner: int, channel: Channel) -> None:
    """A forked copy of the owner leaves the socket alone."""
    if os.getpid() == owner:
        channel.close()
