"""A CUDA device on a CPU: what the draft does with one runs as it stands, and what is asynchronous is late.

Tensors of the device hold their numbers in tensors of the CPU, garbage at first. Operations run at once; copies that
nobody waits for come to the host when their event has passed and not before, and the pinned memory that they read
from must be the same then. A captured graph is the list of its operations with the very tensors they had: the capture
changes nothing, a replay runs no Python of the function, and its own memory holds garbage afterwards, for other
graphs share it. A wrapper of a kernel runs as it stands; a launch needs the thread's current device to be the
tensors', and the numbers are those of the twin.

What the host waits for is in `SimulatedGpu.waits`. What a GPU refuses raises `GpuError`. No time is simulated.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .simulated_graph import Graph
from .simulated_kernels import install_kernels
from .simulated_tensor import (
    DEVICE,
    GARBAGE,
    GpuError,
    GpuTensor,
    address_of,
    map_tensors,
    memory_of,
    on_cpu,
    tensors_of,
)

_READS = {"_local_scalar_dense", "nonzero", "masked_select", "masked_scatter_", "equal", "is_nonzero", "unique_dim"}
_READS |= {"_unique2", "unique_consecutive", "repeat_interleave", "item", "bincount"}


class Event:
    """Stands for `torch.cuda.Event`; late: asked for the first time, it has not passed."""

    gpu: "SimulatedGpu"

    def __init__(self) -> None:
        self._end, self._asked = 0, False

    def record(self) -> None:
        """On the stream of the current device: that of another one is empty."""
        self.gpu.refuse_in_capture("an event")
        self._end = self.gpu.num_late if self.gpu.current_device == DEVICE.index else 0

    def query(self) -> bool:
        self._asked, asked = True, self._asked
        if asked:
            self.gpu.finish(self._end)
        return self.gpu.num_done >= self._end

    def synchronize(self) -> None:
        self.gpu.finish(self._end)


class SimulatedGpu(TorchDispatchMode):
    """The device, while it is entered. `install` first."""

    def __init__(self, free_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.free_bytes = free_bytes
        self.cached_bytes = free_bytes // 2  # of them, that PyTorch keeps
        self.current_device = 0
        self.current_stream: object = "default"
        self.waits: list[str] = []  # what the host waited for
        self.launches: list[str] = []  # kernels, replays aside
        self.faulty: str | None = None  # a kernel that breaks the device
        self.lost = False
        self.replays = 0
        self.compiled: set[tuple] = set()  # kernels, by what Triton compiles anew for
        self._capture: Graph | None = None
        self._pinned: dict[int, torch.Tensor] = {}  # by address; kept, lest another tensor take its place
        self._late: list[Callable[[], None]] = []  # copies in their order
        self.num_done = 0  # of them

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let `torch.cuda` and the wrappers of kernels work with it."""
        for name, stand_in in {
            "_lazy_init": lambda: None,
            "set_device": self._set_device,
            "mem_get_info": self._memory,
            "synchronize": lambda _device=None: self._wait("synchronize"),
            "empty_cache": lambda: setattr(self, "cached_bytes", 0),
            "current_stream": lambda _device=None: self.current_stream,
            "set_stream": lambda stream: setattr(self, "current_stream", stream),
            "Event": type("Event", (Event,), {"gpu": self}),
            "CUDAGraph": type("CUDAGraph", (Graph,), {"begin_replay": lambda _graph: self._begin_replay()}),
            "graph": self._captured,
            "graph_pool_handle": object,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        install_kernels(self, monkeypatch)

    # ---- operations ----

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        tensors = tensors_of((args, kwargs))
        on_device = any(isinstance(tensor, GpuTensor) for tensor in tensors)
        device = given.get("device")
        if name == "copy_" and on_device:
            return self._copy(args[0], args[1], given.get("non_blocking", False))
        if _is_cuda(device) and torch.device(device) != DEVICE:
            raise GpuError(f"{name} makes a tensor on {device}, not on {DEVICE}")
        if name in ("_pin_memory", "pin_memory"):
            return self._pin(args[0])
        if name in ("to", "_to_copy") and (on_device or _is_cuda(device)):
            return self._move(func, args, kwargs, given)
        if not on_device and not _is_cuda(device):
            return self._on_the_host(func, args, kwargs)
        if any(not isinstance(tensor, GpuTensor) and tensor.dim() for tensor in tensors):
            raise GpuError(f"{name}: expected all tensors to be on the same device")
        if name in _READS or name.startswith("index") and _by_mask(args):
            self._wait(name)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
        found = self.run(func, args, kwargs)
        if name.startswith(("empty", "new_empty")):
            with _disable_current_modes():
                memory_of(found.on_cpu).fill_(GARBAGE)
        return found

    def run(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """An operation of the device."""
        args, kwargs = on_cpu((args, kwargs))
        with _disable_current_modes():
            found = function(*args, **kwargs) if self._capture is None else self._capture.note(function, args, kwargs)
        return map_tensors(GpuTensor, found)

    def _on_the_host(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        found = func(*args, **kwargs)
        if pinned:
            self._pinned[address_of(found)] = found
        return found

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the host in pinned memory."""
        found = tensor.clone()
        self._pinned[address_of(found)] = found
        return found

    def _move(self, func: Callable, args: tuple, kwargs: dict, given: dict) -> torch.Tensor:
        """`to`, between devices or not."""
        source, device = args[0], given.get("device")
        target = source.device if device is None else torch.device(device)
        moved = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
        plain = tuple(torch.device("cpu") if isinstance(value, torch.device) else value for value in args)
        if target.type == source.device.type:
            return self.run(func, plain, moved)
        self.refuse_in_capture("a copy between host and device")
        if target.type == "cpu":
            self._wait("a copy to the host")
            return func(*on_cpu(plain), **moved).clone()
        self._send(source, given.get("non_blocking", False))
        with _disable_current_modes():
            return GpuTensor(func(*plain, **moved).clone())

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
            self.run(torch.ops.aten.copy_.default, (target, source), {})
            return target
        self.refuse_in_capture("a copy between host and device")
        if isinstance(target, GpuTensor):
            self._send(source, non_blocking and target.is_contiguous() and target.dtype == source.dtype)
            target.on_cpu.copy_(source)
            return target
        if non_blocking and _is_dense(target, source) and address_of(target) in self._pinned:
            now = source.on_cpu.clone()
            target.view(torch.uint8).fill_(GARBAGE) if target.dim() else target.zero_()  # it may come at any time
            self._late.append(lambda: target.copy_(now))
        else:
            self._wait("a copy to the host")
            target.copy_(source.on_cpu)
        return target

    def _send(self, source: torch.Tensor, non_blocking: bool) -> None:
        """A copy to the device begins."""
        if non_blocking and source.is_contiguous() and address_of(source) in self._pinned:
            now = source.clone()
            self._late.append(lambda: _check_same(source, now))
        elif source.dim() and source.numel():
            self._wait("a copy to the device")

    def launched(self, kernel: str) -> None:
        """A kernel is under way."""
        self.launches.append(kernel)
        self.lost = self.lost or kernel == self.faulty

    # ---- what is late, and who waits ----

    @property
    def num_late(self) -> int:
        """Copies that were begun, with those that are done."""
        return len(self._late)

    def finish(self, end: int) -> None:
        """Do the first copies, as many as that."""
        with _disable_current_modes(), torch.inference_mode():
            for copy in self._late[self.num_done : end]:
                copy()
        self.num_done = max(self.num_done, end)

    def _wait(self, what: str) -> None:
        self.refuse_in_capture(what)
        if self.lost:
            raise GpuError("an illegal memory access was encountered")
        self.waits.append(what)
        self.finish(self.num_late)

    def refuse_in_capture(self, what: str) -> None:
        """Raise `GpuError` while a graph is captured."""
        if self._capture is not None:
            raise GpuError(f"{what} is not permitted while a graph is captured")

    # ---- the current device, its memory, and graphs ----

    def _memory(self, device: torch.device | int | None = None) -> tuple[int, int]:
        index = device.index if isinstance(device, torch.device) else device
        if index != DEVICE.index:
            return 1 << 12, 2 * self.free_bytes
        return self.free_bytes - self.cached_bytes, 2 * self.free_bytes

    def _set_device(self, device: torch.device | str | int) -> None:
        self.current_device = device if isinstance(device, int) else torch.device(device).index

    def _begin_replay(self) -> None:
        self.check_current("a graph")
        self.replays += 1

    def check_current(self, what: str) -> None:
        """Raise `GpuError` if the thread uses another device."""
        if self.current_device != DEVICE.index:
            raise GpuError(f"{what} goes to cuda:{self.current_device}, its tensors lie on {DEVICE}")

    @contextlib.contextmanager
    def _captured(self, graph: Graph, pool: object = None) -> Iterator[None]:
        self.check_current("a graph")
        assert pool is not None, "every graph has memory of its own"
        stream, self.current_stream, self._capture = self.current_stream, "capture", graph
        try:
            yield
        finally:
            self._capture = None
            with _disable_current_modes():
                graph.end()
        self.current_stream = stream  # PyTorch leaves it where the capture fails


def _check_same(pinned: torch.Tensor, before: torch.Tensor) -> None:
    if not torch.equal(pinned, before):
        raise GpuError("pinned memory was written while a copy to the device could still read it")


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_dense(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy is one piece of memory."""
    return target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype


def _by_mask(args: tuple) -> bool:
    """Whether tensors are indexed by one of truth values, whose number must be known."""
    return any(tensor.dtype == torch.bool for tensor in tensors_of(args[1:2]))
