"""The socket of a shared draft: one end for many targets.

Each connection is known by an id that ZeroMQ gives it, so no target can speak for another. Sending
never blocks; a target that is gone is noticed when it is sent something. Messages of all targets
are taken in turns, so that a flood from one does not hold up the others.
"""

import contextlib
import fcntl
import logging
import os
from pathlib import Path

import zmq

from vllm_ssd.addresses import Keys
from vllm_ssd.draft.rare_log import RareLog

_QUEUED_FROM_TARGET, _QUEUED_TO_TARGET = 1000, 64  # messages of one target
_LARGEST_MESSAGE = 1 << 25  # bytes; twice what a target puts into a round
_HANDSHAKE_TIMEOUT = 5000  # ms: whoever is not admitted by then is hung up on
_HEARTBEAT, _HEARTBEAT_TIMEOUT = 2000, 10_000  # ms: how a machine that vanished is noticed

_log_refusal = RareLog(logging.getLogger("vllm_ssd.draft"))


class PeerGone(Exception):
    """The target at the other end is not there any more."""


class Hub:
    """A bound socket."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        """Raises `ValueError` for an address that cannot be had. `keys`: of the draft; None admits everyone."""
        self._lock: int | None = None
        self._authenticator = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, _QUEUED_TO_TARGET),
            (zmq.RCVHWM, _QUEUED_FROM_TARGET),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, _LARGEST_MESSAGE),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_TIMEOUT),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        try:
            if keys is not None:
                self._admit_only(keys)
            self._bind(address)
        except Exception:
            self.close()
            raise
        self.address: str = self._socket.last_endpoint.decode().rstrip("\0")

    def _admit_only(self, keys: Keys) -> None:
        """Targets must hold the target's secret key, and see that they talk to who holds the draft's."""
        from zmq.auth.thread import ThreadAuthenticator

        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_Admitted(keys.target))
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.draft, keys.draft_secret

    def _bind(self, address: str) -> None:
        path = address.removeprefix("ipc://") if address.startswith("ipc://") else None
        if path is not None:
            self._lock = _take_lock(Path(path))
        before = os.umask(0o077)  # others on this machine cannot connect
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"cannot listen at {address} ({error.strerror}); choose another address") from None
        finally:
            os.umask(before)
        self._path = path

    def receive(self, timeout: float = 0.0) -> tuple[bytes, bytes] | None:
        """The next message and the id of its target, or None if none came within `timeout` seconds."""
        if timeout > 0 and not self._socket.poll(timeout * 1000):
            return None
        try:
            peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return peer, b"".join(parts)

    def send(self, peer: bytes, data: bytes) -> bool:
        """Queue a message; False if the target does not read. Raises `PeerGone`."""
        try:
            self._socket.send_multipart([peer, data], zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone from None
            raise

    def close(self) -> None:
        """Close after giving queued messages a moment to leave; removes the socket's file."""
        self._socket.close(500)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError, AttributeError):
                os.unlink(self._path)
            os.close(self._lock)
            self._lock = None


class _Admitted:
    """What pyzmq asks whether a client's key is known."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, _domain: str, key: bytes) -> bool:
        """`key`: Z85 text, as key files have it."""
        if key != self._public_key:
            _log_refusal("a target with a key that is not the target.key of this draft's keys is hung up on")
        return key == self._public_key


def _take_lock(path: Path) -> int:
    """ZeroMQ would take a living server's socket file away without a word: hold a lock beside it."""
    if not path.parent.is_dir():
        raise ValueError(f"cannot listen at ipc://{path}: the folder {path.parent} does not exist")
    if path.exists() and not path.is_socket():
        raise ValueError(f"cannot listen at ipc://{path}: there is a file, which would be lost; choose another address")
    try:
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"cannot listen at ipc://{path} ({error.strerror}); choose another address") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"another draft listens at ipc://{path} already; choose another address") from None
    return lock
