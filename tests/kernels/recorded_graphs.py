"""What a CUDA graph does, on a CPU: operations are recorded with the very tensors they had, and replayed.

A replay runs no Python of the function. Tensors that it made stay where they are, as in a graph's own memory; numbers
that were on the host are those of the recording. What reads back from the device cannot be recorded.
"""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from vllm_ssd.draft import graph_decoder, graph_round
from vllm_ssd.draft.graph_runner import GraphRunner
from vllm_ssd.kernels.tree_attention import Tree

_LAUNCHES = (
    (graph_decoder, ("kv_write", "tree_attention")),
    (graph_round, ("draw", "fork")),
)
_READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "masked_scatter_",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_dim",
    "lift_fresh",
}


class Recording(TorchDispatchMode):
    """The operations of one call of a function."""

    current: "Recording | None" = None

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Callable, tuple, dict, Any]] = []

    def __enter__(self) -> "Recording":
        Recording.current = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        Recording.current = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _READS or (name.startswith("index") and any(t.dtype == torch.bool for t in _tensors(args[1:]))):
            raise RuntimeError(f"{name} in a recording: a capture on a GPU would fail")
        return self.note(func, args, kwargs or {})

    def note(self, function: Callable, args: tuple, kwargs: dict) -> Any:
        """Run it, and keep it."""
        found = function(*args, **kwargs)
        self._operations.append((function, args, kwargs, found))
        return found

    def replay(self) -> None:
        """Run the operations again, their results where they were."""
        for function, args, kwargs, found in self._operations:
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(found), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class RecordedGraphs:
    """`GraphRunner.run` for all runners while `install`ed."""

    def __init__(self) -> None:
        self.replays = 0
        self._recordings: dict[Hashable, Recording] = {}

    def install(self, monkeypatch) -> None:
        """Replace it, and let a kernel be one operation, as its launch is."""
        monkeypatch.setattr(graph_decoder, "tree_attention", _within_blocks(graph_decoder.tree_attention))
        monkeypatch.setattr(GraphRunner, "run", lambda runner, key, function: self._run((runner, key), function))
        for module, names in _LAUNCHES:
            for name in names:
                monkeypatch.setattr(module, name, _launch(getattr(module, name)))

    def _run(self, key: Hashable, function: Callable[[], None]) -> None:
        recording = self._recordings.get(key)
        if recording is not None:
            recording.replay()
            self.replays += 1
            return
        with Recording() as self._recordings[key]:
            function()


def _within_blocks(attention: Callable) -> Callable:
    """The twin looks at rows alone; the kernel does no more rows of a block than it was captured for."""

    def checked(queries: torch.Tensor, pool: torch.Tensor, tree: Tree, *args) -> torch.Tensor:
        most = int(tree.blocks[:, 1].max())
        assert most <= tree.per_block, f"a block of {most} rows in a graph for {tree.per_block}"
        return attention(queries, pool, tree, *args)

    return checked


def _launch(kernel: Callable) -> Callable:
    def launch(*args, **kwargs):
        recording = Recording.current
        if recording is None:
            return kernel(*args, **kwargs)
        with _disable_current_modes():
            return recording.note(kernel, args, kwargs)

    return launch


def _tensors(found: Any) -> list[torch.Tensor]:
    """Of a result: one, none, or several in a tuple or dataclass."""
    leaves = tree_leaves(vars(found) if dataclasses.is_dataclass(found) else found)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
