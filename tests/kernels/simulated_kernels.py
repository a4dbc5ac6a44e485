"""Kernels of a simulated CUDA device (`simulated_gpu.py`): their wrappers run as they stand, their twins compute."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from vllm_ssd.draft import graph_decoder, graph_round, kernel_trial
from vllm_ssd.kernels import sparse_q

from .simulated_tensor import GpuError, GpuTensor, address_of, tensors_of

if TYPE_CHECKING:
    from .simulated_gpu import SimulatedGpu

_CALLERS = (
    (graph_decoder, ("kv_write", "tree_attention")),
    (graph_round, ("draw", "fork")),
    (kernel_trial, ("draw", "fork")),
    (sparse_q, ("dense_rows",)),
)
_MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)


def install_kernels(gpu: "SimulatedGpu", monkeypatch: pytest.MonkeyPatch) -> None:
    """Let whoever calls a wrapper call it on the device as well."""
    for module, names in _CALLERS:
        for name in names:
            wrapper = getattr(module, name)
            monkeypatch.setattr(module, name, _computed(gpu, wrapper))
            parts = [part.__globals__ for part in (wrapper, wrapper.__globals__.get("best_keys", wrapper))]
            for known in {id(part): part for part in parts}.values():
                _replace_kernels(gpu, known, monkeypatch)


def _replace_kernels(gpu: "SimulatedGpu", known: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a module that were not replaced before."""
    for name, found in list(known.items()):
        if name.endswith("_kernel") and name != "runs_kernel" and not isinstance(found, Launcher):
            monkeypatch.setitem(known, name, Launcher(gpu, name, found))


def _computed(gpu: "SimulatedGpu", wrapper: Callable) -> Callable:
    """A wrapper that launches its kernels, and gets its numbers from the twin."""

    def numbers(*args: Any, **kwargs: Any) -> Any:
        if wrapper.__name__ == "tree_attention":
            check_layout(args[2], args[4])
        return wrapper(*args, **{**kwargs, "backend": "torch"})

    def call(*args: Any, **kwargs: Any) -> Any:
        on_device = any(isinstance(tensor, GpuTensor) for tensor in tensors_of((args, kwargs)))
        if not on_device or kwargs.get("backend") == "torch":
            return wrapper(*args, **kwargs)
        wrapper(*args, **kwargs)  # its checks, its own memory and its launches
        return gpu.run(numbers, args, kwargs)

    return call


class Launcher:
    """Stands for a kernel; on tensors of the CPU it is the kernel."""

    def __init__(self, gpu: "SimulatedGpu", name: str, kernel: Any) -> None:
        self._gpu, self._name, self._kernel = gpu, name, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*args: Any, **options: Any) -> None:
            if any(isinstance(arg, GpuTensor) for arg in args):
                self._launch(grid, args, options)
            else:
                self._kernel[grid](*args, **options)

        return launch

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
        """Nothing is computed. Raises `GpuError` where a GPU would not take it."""
        self._gpu.check_current(self._name)
        if any(not isinstance(tensor, GpuTensor) for tensor in tensors_of(args)):
            raise GpuError(f"{self._name} gets memory of the host")
        if any(not 1 <= size <= most for size, most in zip(grid, _MOST_PROGRAMS)):
            raise GpuError(f"{self._name} has a grid of {grid}")
        compiled = (self._name, *map(_specialised, args), *sorted(options.items()))
        if compiled not in self._gpu.compiled:
            self._gpu.refuse_in_capture(f"the compilation of {self._name}")
            self._gpu.compiled.add(compiled)
        self._gpu.launched(self._name.strip("_").removesuffix("_kernel"))


def check_layout(tree: Any, workspace: Any) -> None:
    """What the twin does not look at: blocks of rows, and where splits leave their parts."""
    seen: list[int] = []
    for first, count in tree.blocks.tolist():
        rows = list(range(first, first + count))
        assert count <= tree.per_block, f"a block of {count} rows in a launch for {tree.per_block}"
        assert len(set(tree.row_sequence[rows].tolist())) <= 1, "a block of several sequences"
        seen += rows
    assert len(set(seen)) == len(seen), "a row in two blocks"
    assert set(tree.trunk_lengths.nonzero()[:, 0].tolist()) <= set(seen), "a row with a trunk in no block"
    assert address_of(workspace.mixed) != address_of(workspace.sums), "the parts of splits meet"


def _specialised(argument: Any) -> Any:
    """What of an argument Triton compiles a kernel for."""
    if isinstance(argument, GpuTensor):
        return argument.dtype, argument.on_cpu.data_ptr() % 16 == 0
    return (argument == 1, argument % 16 == 0) if type(argument) is int else type(argument)
