"""Engines as long-lived subprocesses: started when first used, stopped when memory asks for it."""

import contextlib
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from benchmark import machine
from benchmark.measurement import Measurement
from benchmark.plan import Engine, Run, StartEngine

_STOP_SECONDS = 30


class EngineFailed(Exception):
    """An engine did not start, ended, or gave no answer in time."""


class Worker:
    """The parent's end of one engine subprocess."""

    def __init__(self, engine: Engine, start: StartEngine, timeout: float) -> None:
        self._engine, self._timeout = engine, timeout
        self._channel, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmark.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=machine.environment(start.cpu_cores),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,  # vLLM logs there; ours is for the table
        )
        theirs.close()
        self._channel.send(start)
        try:
            self.versions: dict[str, str] = self._receive()
        except BaseException:  # the benchmark may be ended while it waits
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, run: Run) -> tuple[Measurement, list[list[int]]]:
        """Raises `EngineFailed` when the engine dies or takes longer than the timeout."""
        self._channel.send(run)
        return self._receive()

    def stop(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> Any:
        if not self._channel.poll(self._timeout):
            raise EngineFailed(f"{self._engine}: no answer in {self._timeout:.0f} s")
        try:
            return self._channel.recv()
        except (EOFError, ConnectionError) as error:
            raise EngineFailed(f"{self._engine}: its process ended; its log is on stderr") from error


class EnginePool(contextlib.AbstractContextManager["EnginePool"]):
    """At most `size` engines at a time; the one unused for longest makes room.

    `message` says how to start an engine; `warm_up` is run on each once it has started.
    """

    def __init__(self, size: int, timeout: float, message: Callable[[Engine], StartEngine], warm_up: Run) -> None:
        self._size, self._timeout, self._message, self._warm_up = size, timeout, message, warm_up
        self._workers: OrderedDict[Engine, Worker] = OrderedDict()
        self.versions: dict[str, str] = {}

    def start(self, engine: Engine) -> None:
        """Have the engine loaded and warm. Raises `EngineFailed`."""
        if engine not in self._workers:
            while len(self._workers) >= self._size:
                self._workers.popitem(last=False)[1].stop()
            worker = self._workers[engine] = Worker(engine, self._message(engine), self._timeout)
            self.versions |= worker.versions
            self.run(engine, self._warm_up)

    def run(self, engine: Engine, run: Run) -> tuple[Measurement, list[list[int]]]:
        """Run the prompts on a started engine. An engine that fails is stopped and `EngineFailed` raised."""
        self._workers.move_to_end(engine)
        try:
            return self._workers[engine].run(run)
        except (EngineFailed, OSError) as error:
            self._workers.pop(engine).stop()
            raise EngineFailed(str(error)) from error

    def idle_shares(self, seconds: float) -> dict[str, float]:
        """Share of a core taken by each engine with its draft, and by "others", while no engine has work."""
        shares, others = machine.busy_shares([worker.pid for worker in self._workers.values()], seconds)
        named = {str(engine): shares[worker.pid] for engine, worker in self._workers.items()}
        return {**named, "others": others}

    def __exit__(self, *_: object) -> None:
        while self._workers:
            self._workers.popitem()[1].stop()
