"""The target's handle on its draft process: start, watch, restart, end.

Nothing here blocks a step of the target, except the wait for readiness at start-up. Knows
nothing about trees; messages pass through.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
import weakref

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import DraftDevice
from vllm_ssd.draft.link import DraftLink, State
from vllm_ssd.draft.server import ServerSettings
from vllm_ssd.transport import Channel, Endpoint

__all__ = ["DraftProcess", "State"]

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


class DraftProcess(DraftLink):
    """One draft server, restarted with back-off when it dies or hangs."""

    def __init__(self, config: SaguaroConfig, device: DraftDevice, **settings) -> None:
        """`settings`: vocab_size, max_num_seqs, max_model_len and, if need be, others of `ServerSettings`."""
        super().__init__(config)
        self._device = device
        self._settings = settings
        if (num_parts := settings.get("num_parts", 1)) > 1:
            self.name = f"draft {settings['part'] + 1} of {num_parts} on {self.describe()}"
        self._process: subprocess.Popen | None = None
        self._endpoint: Endpoint | None = None

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

    def _death(self) -> str | None:
        status = self._process.poll()
        return None if status is None else f"its process ended with status {status}"

    def _failure(self, reason: str) -> str:
        return f"saguaro: {self.name} {self._config.model!r} did not load: {reason}"

    def _too_late(self, seconds: float) -> str:
        return (
            f"saguaro: {self.name} {self._config.model!r} was not ready after {seconds:.0f} s; "
            "raise speculative_config['draft_start_timeout'] if it only needs longer"
        )

    def describe(self) -> str:
        """Its device, and its cores on a CPU."""
        return f"CPU cores {','.join(map(str, self._device.cores))}" if self._device.cores else self._device.name

    def _after_goodbye(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)


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
