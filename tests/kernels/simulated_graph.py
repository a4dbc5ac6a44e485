"""CUDA graphs of a simulated device (`simulated_gpu.py`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from .simulated_tensor import GARBAGE, GpuError, address_of, borrowed, map_tensors, memory_of, tensors_of


class Graph:
    """Operations, with the tensors they had; those that were there before the capture are not kept alive."""

    def __init__(self) -> None:
        self._operations: list[tuple[Callable, tuple, dict, Any]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what the capture found, by address
        self._outside: list[StorageWeakRef] = []
        self._own: dict[int, torch.Tensor] = {}  # memory of its own, by address

    def begin_replay(self) -> None:
        """For the device to know of."""

    def note(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Run an operation, and keep it."""
        for tensor in tensors_of((args, kwargs)):
            at = address_of(tensor)
            if at not in self._own and at not in self._before:
                memory = memory_of(tensor)
                self._before[at] = memory, memory.clone()
                self._outside.append(StorageWeakRef(tensor.untyped_storage()))
        found = function(*args, **kwargs)
        for tensor in tensors_of(found):
            if address_of(tensor) not in self._before:
                self._own.setdefault(address_of(tensor), memory_of(tensor))
        if not _leaves_garbage(function):
            self._operations.append((function, *(map_tensors(self._kept, value) for value in (args, kwargs, found))))
        return found

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if address_of(tensor) in self._own else borrowed(tensor)

    def end(self) -> None:
        """A capture runs nothing: all is as before."""
        for memory, before in self._before.values():
            memory.copy_(before)
        self._before.clear()
        self._forget()

    @_disable_current_modes()
    def replay(self) -> None:
        """Run the operations again, their results where they were. Raises `GpuError` if memory was freed."""
        self.begin_replay()
        if any(memory.expired() for memory in self._outside):
            raise GpuError("a graph uses memory that was freed")
        for function, args, kwargs, found in self._operations:
            again = function(*args, **kwargs)
            for old, new in zip(tensors_of(found), tensors_of(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        self._forget()

    def _forget(self) -> None:
        """Other graphs use its memory, too."""
        for memory in self._own.values():
            memory.fill_(GARBAGE)


def _leaves_garbage(function: Callable) -> bool:
    """Memory that is taken, and not written."""
    return getattr(function, "__name__", "").startswith(("empty", "new_empty"))
