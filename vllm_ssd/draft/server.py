"""The draft process: `python -m vllm_ssd.draft.server`, started by `launcher.py`.

Reads its settings as one JSON line from standard input, which then stays open: when it ends,
the target is gone and so is this process. Standard output is not used.
"""

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque

import msgspec

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import use_device
from vllm_ssd.draft import heap
from vllm_ssd.messages import PROTOCOL_VERSION, Failed, Idle, Ready, Round, decode_to_draft, encode
from vllm_ssd.transport import Channel

logger = logging.getLogger("vllm_ssd.draft")

_IDLE_SIGN_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
_LOG_FORMAT = "(saguaro draft pid=%(process)d) %(levelname)s %(asctime)s %(message)s"
_NICE = 5  # on a CPU the engine's scheduler may share our cores, and goes first


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """What the launcher tells the process."""

    config: dict  # fields of SaguaroConfig
    address: str
    directory: str  # of the socket; removed if the target dies
    device: str  # "cpu" or "cuda:1"
    cores: list[int]  # CPU cores to run on; empty: any
    vocab_size: int  # of the tokenizer: ids from here on are padding
    max_num_seqs: int
    max_model_len: int
    parent: int  # process id
    part: int = 0  # of each tree, that this draft builds ...
    num_parts: int = 1  # ... of so many
    leftovers: list[str] = dataclasses.field(default_factory=list)  # files and empty folders to remove as well


def main() -> int:
    """Run until the target goes; returns the exit status."""
    settings = ServerSettings(**json.loads(sys.stdin.readline()))
    _end_with_parent(settings)
    logging.basicConfig(
        level=os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper(), format=_LOG_FORMAT, datefmt="%m-%d %H:%M:%S"
    )
    channel = Channel(settings.address, bind=False, cores=settings.cores)
    try:
        engine = _load(settings, channel)
        _serve(channel, engine)
        return 0
    except Exception as error:  # the target must hear of it, whatever it is
        logger.exception("the draft server fails")
        channel.send(encode(Failed(f"{type(error).__name__}: {error}")))
        return 1
    finally:
        channel.flush_and_close()


def _end_with_parent(settings: ServerSettings) -> None:
    """End when the target does, even inside a long forward or while stopped (SIGSTOP).

    Standard input ends with the target, however it ends. A stopped process does not notice that:
    the kernel is asked to wake it when its parent goes (and may wake it when only the thread that
    started it goes, which does no harm). Ctrl-C at a terminal is the target's to handle, and does
    not reach a process group of our own.
    """

    def end(*_: object) -> None:
        shutil.rmtree(settings.directory, ignore_errors=True)
        for path in settings.leftovers:
            with contextlib.suppress(OSError):
                os.rmdir(path) if os.path.isdir(path) else os.remove(path)
        os._exit(0)

    def watch() -> None:
        while os.getppid() == settings.parent and os.read(0, 4096):
            pass
        end()

    os.setpgid(0, 0)
    signal.signal(signal.SIGHUP, end)
    with contextlib.suppress(AttributeError, OSError):  # not Linux: a stopped draft stays
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=watch, daemon=True).start()


def _load(settings: ServerSettings, channel: Channel):
    """Pin the process, load the model, say that it is ready."""
    if settings.cores:
        os.sched_setaffinity(0, settings.cores)
        os.nice(_NICE)
    import torch

    from vllm_ssd.draft.engine_choice import make_engine
    from vllm_ssd.draft.forecast import Part
    from vllm_ssd.draft.model import DraftModel

    if settings.cores:
        torch.set_num_threads(len(settings.cores))
    use_device(settings.device)
    config = SaguaroConfig(**settings.config)
    model = DraftModel(config, torch.device(settings.device), settings.vocab_size)
    most_useful = settings.max_num_seqs * (
        settings.max_model_len + (config.most_branches + 1) * (config.num_speculative_tokens + 1)
    )
    num_slots = model.allocate_kv_cache(config.draft_kv_cache_memory_bytes, most_useful)
    model.warm_up()
    part = Part(settings.part, settings.num_parts)
    engine = make_engine(model, config, num_slots, part, settings.max_num_seqs, settings.max_model_len)
    dtype = str(model.dtype).removeprefix("torch.")
    heap.freeze()
    channel.send(encode(Ready(PROTOCOL_VERSION, num_slots, model.max_length, settings.device, dtype)))
    return engine


def _serve(channel: Channel, engine) -> None:
    """The loop: take in what came, do one step, push what it built."""
    busy = False
    polled_at = 0.0
    round_id = -1
    last_sign = time.monotonic()
    outbox: deque[bytes] = deque()  # a target that is idle for long reads nothing; no push may be left out
    while True:
        data = channel.receive(0.0 if busy else min(_IDLE_SIGN_SECONDS, engine.seconds_until_overdue()))
        while data is not None:
            message = _decode(data)
            if message.closing:
                return
            engine.begin_round(message, polled_at if busy else None)
            round_id = message.round_id
            data = channel.receive()
        polled_at = time.perf_counter()
        busy = engine.step()
        push = engine.take_push()
        if push is None and not outbox and time.monotonic() - last_sign > _IDLE_SIGN_SECONDS:
            channel.send(encode(Idle(round_id)))
            last_sign = time.monotonic()
        if push is not None:
            outbox.append(encode(push))
        while outbox and channel.send(outbox[0]):
            outbox.popleft()
            last_sign = time.monotonic()


def _decode(data: bytes) -> Round:
    try:
        return decode_to_draft(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the target sent what this version cannot read: {error}") from error


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # worker threads of torch must not hold the process back
