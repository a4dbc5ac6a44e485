"""The draft as a Ray actor, and the target's handle on it.

The actor runs the server of a shared draft for its one target, at a TCP port of its node, behind
keys that only the actor and its target know. Ray starts it again when it dies; the target greets it
anew. Imports Ray: only for targets that run on Ray.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from vllm_ssd.addresses import Keys, new_keys
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import DraftDevice, gpu_index, parse_cores
from vllm_ssd.draft.identity import Identity
from vllm_ssd.draft.remote import RemoteDraft
from vllm_ssd.messages import Failed

logger = logging.getLogger("vllm.saguaro")

_LOG_FORMAT = "(saguaro draft pid=%(process)d) %(levelname)s %(asctime)s %(message)s"
_LOOK_EVERY = 0.5  # seconds between looks at whether the actor lives


class DraftActor:
    """What runs on the draft's device; its methods answer while the server works in a thread."""

    def __init__(self, config: dict, vocab_size: int, device: str, environment: dict[str, str]) -> None:
        """`device`: "auto" (the GPU that Ray gave) or "cpu:CORES". `environment`: set where nothing is set."""
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        logging.basicConfig(
            level=os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper(), format=_LOG_FORMAT, datefmt="%m-%d %H:%M:%S"
        )
        self._config = SaguaroConfig(**config)
        self._vocab_size = vocab_size
        self._device = _device(device)
        self._lock = threading.Lock()
        self._endpoint: tuple[str, Keys] | None = None
        self._over = threading.Event()

    def where(self) -> tuple[str, int]:
        """Node id and process id: answers at once when the actor was placed."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def endpoint(self) -> tuple[Keys, str]:
        """Load the model, if that is still to be done; the target's keys and the address of the server."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = self._serve()
            return dataclasses.replace(self._endpoint[1], draft_secret=None), self._endpoint[0]

    def watch(self) -> None:
        """Returns when the server is over, which it is not while all is well."""
        self._over.wait()

    def _serve(self) -> tuple[str, Keys]:
        from vllm_ssd.draft.hub import Hub
        from vllm_ssd.draft.shared_server import load

        if self._device.cores:
            os.sched_setaffinity(0, self._device.cores)  # the thread that is started below inherits them
        keys = new_keys()
        hub = Hub(f"tcp://{ray.util.get_node_ip_address()}:*", keys)
        try:
            # A target that lost its connection may be back before the old one is forgotten.
            server = load(self._config, self._device, hub, max_targets=2, vocab_size=self._vocab_size)
        except BaseException:
            hub.close()
            raise
        threading.Thread(target=self._run, args=(server,), daemon=True).start()
        return hub.address, keys

    def _run(self, server: Any) -> None:
        try:
            server.run(threading.Event())
        except BaseException:
            logging.getLogger("vllm_ssd.draft").exception("the draft server fails")
        self._over.set()
        time.sleep(1.0)
        os._exit(1)  # Ray starts the actor again


def _device(setting: str) -> DraftDevice:
    if setting != "auto":
        return DraftDevice("cpu", parse_cores(setting.removeprefix("cpu:")))
    # Ray shows the actor its GPU only, unless it was told to leave CUDA_VISIBLE_DEVICES alone.
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "0") not in ("", "0"):
        gpu_id = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]  # as the node's variable names it
        return DraftDevice(f"cuda:{gpu_index(gpu_id, os.environ.get('CUDA_VISIBLE_DEVICES'))}")
    return DraftDevice("cuda:0")


def start_actor(name: str, options: dict[str, Any], **arguments: Any) -> Any:
    """Ask Ray for the actor; returns its handle at once. `options`: of `ray.remote`, where it is to be."""
    return (
        ray.remote(DraftActor)
        .options(name=name, num_cpus=0, max_restarts=-1, max_concurrency=4, **options)
        .remote(**arguments)
    )


class RayDraft(RemoteDraft):
    """The handle of the rank that talks to the draft."""

    def __init__(
        self,
        config: SaguaroConfig,
        identity: Identity,
        vocab_size: int,
        max_num_seqs: int,
        actor_name: str,
        cores: Sequence[int] = (),
    ) -> None:
        """`actor_name`: as it was given to `start_actor`, in the namespace of this Ray job."""
        super().__init__(config, identity, vocab_size, max_num_seqs, cores)
        self._actor_name = actor_name
        self._actor: Any = None
        self._alive: Any = None  # an answer of the actor's; Ray may still be starting it again
        self._asked_at = 0.0
        self._wanted: Any = None  # the endpoint that was asked for
        self._watch: Any = None
        self._looked_at = 0.0
        self._is_dead = False
        self._address = ""

    def start(self) -> None:
        """Ask the actor where it listens; the connection is made when it answers."""
        if self._is_dead:
            self._watch = None
        self._channel, self._wanted, self._is_dead = None, None, False
        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._actor_name)
            self._ask()
        except (ValueError, RayError) as error:
            raise OSError(f"its Ray actor is not there: {_reason(error)}") from None
        self._begin()

    def _ask(self) -> None:
        self._alive = self._actor.where.remote()
        self._asked_at = time.monotonic()

    def _read(self, timeout: float) -> Iterator[Any]:
        if self._channel is None:
            try:
                if not self._lives(timeout) or not ray.wait([self._wanted], timeout=timeout)[0]:
                    return
                keys, self._address = ray.get(self._wanted)
            except RayError as error:
                yield Failed(_reason(error))
                return
            self._last_heard = time.monotonic()
            self._connect(self._address, keys)
        yield from super()._read(timeout)

    def _lives(self, timeout: float) -> bool:
        """Whether the actor answers; then it is asked for its endpoint, else, after a while, again."""
        if self._wanted is not None:
            return True
        if not ray.wait([self._alive], timeout=timeout)[0]:
            return False
        try:
            ray.get(self._alive)
        except RayActorError:
            if time.monotonic() - self._asked_at > _LOOK_EVERY:
                self._ask()
            return False
        self._wanted = self._actor.endpoint.remote()
        if self._watch is None:  # it keeps a thread of the actor: one at a time
            self._watch = self._actor.watch.remote()
        return True

    def _death(self) -> str | None:
        if (reason := self._actors_death()) is not None:
            return reason
        return None if self._channel is None else super()._death()

    def _actors_death(self) -> str | None:
        now = time.monotonic()
        if self._watch is None or now - self._looked_at < _LOOK_EVERY:
            return None
        self._looked_at = now
        try:
            ended, _ = ray.wait([self._watch], timeout=0)
            if not ended:
                return None
            self._is_dead = True
            ray.get(ended[0])
            return "its server has ended"
        except RayError as error:
            return _reason(error)

    def _give_up_silent(self, reason: str) -> None:
        super()._give_up_silent(reason)
        self._watch = None
        with contextlib.suppress(RayError):  # Ray is to replace it
            ray.kill(self._actor, no_restart=False)

    def _failure(self, reason: str) -> str:
        return f"saguaro: the draft {self._config.model!r} did not load in its Ray actor: {reason}"

    def _too_late(self, seconds: float) -> str:
        return (
            f"saguaro: the draft {self._config.model!r} was not ready in its Ray actor after {seconds:.0f} s; "
            "raise speculative_config['draft_start_timeout'] if it only needs longer"
        )

    def describe(self) -> str:
        """Its address."""
        return f"Ray actor {self._actor_name}" + (f" at {self._address}" if self._address else "")


def _reason(error: Exception) -> str:
    """One line of what Ray says at length."""
    if isinstance(error, RayTaskError):
        error = error.cause or error
    elif isinstance(error, RayActorError):
        return "its Ray actor died"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
