"""How messages travel: a pair of ZeroMQ sockets over `ipc://`, in a directory of mode 0700.

Sending never blocks. Knows nothing about what the bytes mean.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence

import zmq

_QUEUED_MESSAGES = 1000


class Endpoint:
    """A directory with one socket address; removed with the engine that made it."""

    def __init__(self) -> None:
        _remove_orphans()
        self.directory = tempfile.mkdtemp(prefix=directory_prefix())  # mode 0700
        self.address = f"ipc://{self.directory}/draft"

    def remove(self) -> None:
        """Delete the directory and the socket in it."""
        shutil.rmtree(self.directory, ignore_errors=True)


def directory_prefix() -> str:
    """How the names of this process's temporary directories begin; what is left of them goes at the next start."""
    return f"{_namespace_prefix()}{os.getpid()}-"


def _namespace_prefix() -> str:
    """Of processes that see each other: containers with one temporary directory have process ids of their own."""
    try:
        return f"vllm-ssd-{os.stat('/proc/self/ns/pid').st_ino}-"
    except OSError:
        return "vllm-ssd-0-"


def _remove_orphans() -> None:
    """Delete directories whose makers were killed together with their drafts."""
    root, prefix = tempfile.gettempdir(), _namespace_prefix()
    if not os.path.isdir("/proc/self"):
        return  # there is no telling who is alive
    for name in os.listdir(root):
        path = os.path.join(root, name)
        pid = name[len(prefix) :].partition("-")[0]
        if not name.startswith(prefix) or not pid.isdigit() or os.path.exists(f"/proc/{pid}"):
            continue
        with contextlib.suppress(FileNotFoundError):  # another engine that starts now was faster
            if os.lstat(path).st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


class Channel:
    """One end of the pair."""

    def __init__(self, address: str, bind: bool, cores: Sequence[int] = ()) -> None:
        """`cores`: where ZeroMQ's own thread runs; empty leaves it where this process runs."""
        self._open(zmq.PAIR, cores)
        if bind:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def _open(self, kind: int, cores: Sequence[int]) -> None:
        """A socket of this kind, not yet bound or connected."""
        self._context = zmq.Context()
        for core in cores:
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, _QUEUED_MESSAGES)

    def send(self, data: bytes) -> bool:
        """Queue a message; False if the other end is not there or does not read."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False

    def receive(self, timeout: float = 0.0) -> bytes | None:
        """The next message, or None if none came within `timeout` seconds."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            pass
        if timeout <= 0 or not self._socket.poll(timeout * 1000):
            return None
        return self._socket.recv(zmq.NOBLOCK)

    def flush_and_close(self, linger: float = 1.0) -> None:
        """Close after giving queued messages `linger` seconds to leave."""
        self._socket.close(int(linger * 1000))
        self._context.term()

    def close(self) -> None:
        """Close at once."""
        self.flush_and_close(0.0)
