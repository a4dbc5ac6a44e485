"""Runs functions over static buffers: as replayed CUDA graphs on a GPU, as plain calls elsewhere.

A graph replays one shape only. Rows are therefore padded to a bucket, and there is one graph for
each function and bucket. No real GPU was at hand: the tests capture and replay on a simulated one.
"""

from collections.abc import Callable, Hashable

import torch

KERNELS_VARIABLE = "VLLM_SSD_KERNELS"  # "off": neither kernels nor graphs
_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def bucket_of(rows: int, most: int) -> int:
    """The smallest bucket that holds `rows`, itself at most `most`. Raises `ValueError` if none does."""
    if rows > most:
        raise ValueError(f"{rows} rows were asked for; the buffers hold {most}.")
    return min(next((bucket for bucket in _BUCKETS if bucket >= rows), most), most)


def buckets(most: int) -> list[int]:
    """All buckets of buffers that hold `most` rows."""
    return sorted({bucket_of(rows, most) for rows in (*(b for b in _BUCKETS if b <= most), most)})


class GraphRunner:
    """Captures each function once a key."""

    def __init__(self, device: torch.device, enabled: bool = True) -> None:
        """`enabled` False calls directly on a GPU too, to compare."""
        self._captures = enabled and device.type == "cuda"
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._captures else None

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Do what `function` does.

        It must read and write static buffers only, and do the same work at every call with this key.
        The first call runs it, and records it for the calls that follow.
        """
        if not self._captures:
            function()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        function()  # this call's work; it also compiles the kernels, which must not happen in a capture
        torch.cuda.synchronize(self._device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # All graphs share their temporary memory: they are replayed one after the other.
            with torch.cuda.graph(graph, pool=self._memory):
                function()  # records, runs nothing
        except BaseException:
            torch.cuda.set_stream(stream)  # where a capture fails, PyTorch may stay on its own
            raise
        self._graphs[key] = graph


def check_device(device: torch.device) -> None:
    """Wait for all that was enqueued. Raises `RuntimeError` if the process cannot use the device any more."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        raise RuntimeError(
            f"{device} is lost to this process: {error}; if it happens again, {KERNELS_VARIABLE}=off in the "
            "environment of vLLM has the draft compute without kernels and CUDA graphs"
        ) from error
