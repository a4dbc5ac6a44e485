"""Tensors of a simulated CUDA device (`simulated_gpu.py`), and what lies in them."""

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda", 1)  # not 0, which is what a thread uses unless it is told
GARBAGE = 0xFF  # NaN, and -1


class GpuError(RuntimeError):
    """A GPU would not do this."""


class GpuTensor(torch.Tensor):
    """Numbers on the device, kept in a tensor of the CPU: `on_cpu`."""

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> "GpuTensor":
        """For PyTorch's own checks it lies on "meta", whose numbers nothing can read behind our back."""
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls, on_cpu.shape, on_cpu.stride(), on_cpu.storage_offset(), dtype=on_cpu.dtype, device="meta"
            )

    def __init__(self, on_cpu: torch.Tensor) -> None:
        self.on_cpu = on_cpu

    device = property(lambda _self: DEVICE)
    is_cuda = property(lambda _self: True)
    is_meta = property(lambda _self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> list:
        """Which PyTorch refuses to subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise GpuError(f"{func}: the simulated device is gone")


def address_of(tensor: torch.Tensor) -> int:
    """Of the memory that a tensor is part of."""
    return tensor.untyped_storage().data_ptr()


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a tensor of the CPU is part of."""
    with _disable_current_modes():
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor of the CPU, which does not keep its memory alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    alias = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    size, stride = tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(alias, tensor.storage_offset(), size, stride)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with all its tensors replaced: in tuples, lists, dictionaries and dataclasses."""
    return tree_map(functools.partial(_replaced, function), value)


def _replaced(function: Callable[[torch.Tensor], Any], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return dataclasses.replace(leaf, **{key: _replaced(function, field) for key, field in vars(leaf).items()})
    return leaf


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors there."""
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


def on_cpu(value: Any) -> Any:
    """`value` with the numbers instead of the device's tensors."""
    return map_tensors(lambda tensor: tensor.on_cpu if isinstance(tensor, GpuTensor) else tensor, value)
