"""The forward of the draft on a GPU for batches that the engine flattens: ragged, in graphs.

Takes the place of the light decoder on CUDA. The rows of a batch's groups travel in static buffers, padded
to a bucket. Batches larger than the buffers run through the same calls without a graph. On a CPU (the tests)
the same code calls the kernels' twins.
"""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np
import torch

from vllm_ssd.draft import graph_buffers
from vllm_ssd.draft.batch import FlatBatch
from vllm_ssd.draft.graph_buffers import RowBuffers, Shape
from vllm_ssd.draft.graph_decoder import GraphDecoder, Rows
from vllm_ssd.draft.graph_rows import HostRows, aligned, host_rows, joined
from vllm_ssd.draft.graph_runner import GraphRunner, bucket_of, buckets, check_device
from vllm_ssd.draft.kernel_trial import forward_difference
from vllm_ssd.draft.light_decoder import LightDecoder
from vllm_ssd.kernels.tree_layout import rows_per_block

logger = logging.getLogger("vllm_ssd.draft")

_MAX_SEQUENCES, _LEAST_SEQUENCES = 256, 64
_TRUNK_BYTES = 64 << 20  # for fewer sequences where they are long
_MAX_TAIL = 64
_LEAST_DEPTH = 16  # what the kernels work on at least


def ready(light: LightDecoder, pools: Sequence[torch.Tensor], max_length: int, depth: int):
    """The forward over ragged rows with its graphs captured; `light` itself if that does not work here.

    Kernels and graphs must agree with the kernels' twins (`kernel_trial.py`). Raises `RuntimeError` if one of them
    broke the device for this process.
    """
    try:
        with torch.inference_mode():
            graphs = GraphForward(GraphDecoder(light), max_length, depth)
            graphs.warm_up(pools)
            reason = forward_difference(graphs, pools, max_length)
            if reason is None:
                return graphs
    except Exception as error:  # whatever it is, the plain forward needs none of it
        reason = f"{type(error).__name__}: {error}"
        check_device(pools[0].device)
    logger.warning("the draft runs without kernels and CUDA graphs, and slower: %s", reason)
    return light


class GraphForward:
    """Logits of flat batches."""

    def __init__(self, decoder: GraphDecoder, max_length: int, depth: int, max_rows: int | None = None) -> None:
        """`max_length`: of a sequence; `depth`: longest tail of a branch (longer ones run without kernels)."""
        max_rows = max_rows or graph_buffers.MAX_FORWARD_ROWS
        self.graph_decoder = decoder
        longest = aligned(max_length + _MAX_TAIL)
        self._shape = Shape(
            max_rows=max_rows,
            max_sequences=min(_MAX_SEQUENCES, max(_LEAST_SEQUENCES, _TRUNK_BYTES // (4 * longest))),
            max_length=longest,
            depth=max(depth, _LEAST_DEPTH),
            width=1,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_size=decoder.head_size,
            vocab_size=1,
            dtype=decoder.dtype,
        )
        self._buffers = RowBuffers(self._shape, decoder.device)
        self._hidden = torch.zeros(max_rows, decoder.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._runner = GraphRunner(decoder.device)

    @property
    def shape(self) -> Shape:
        """The sizes of its buffers; no logits are in them."""
        return self._shape

    def forward(self, batch: FlatBatch, pools: Sequence[torch.Tensor]) -> torch.Tensor:
        """Write the tokens' KV to their slots; logits of the wanted rows, [R, padded vocabulary]."""
        if max(group.tails.shape[1] for group in batch.groups) > self._shape.depth:
            return self.graph_decoder.light.forward(batch, pools)
        rows = host_rows(batch.groups, self._shape.depth)
        count = len(rows.token_ids)
        if count <= self._shape.max_rows and len(rows.trunks) <= self._shape.max_sequences:
            bucket = bucket_of(count, self._shape.max_rows)
            per_block = self._per_block(int(np.bincount(rows.row_sequence).max()))
            hidden = self._replay(rows, bucket, per_block, pools)
        else:
            hidden = self.graph_decoder.hidden(self._own_rows(rows), pools)
        return self.graph_decoder.logits(_wanted(hidden, batch))

    def forward_in(self, batch: FlatBatch, bucket: int, per_block: int, pools: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `forward`, in the graph that is named."""
        rows = host_rows(batch.groups, self._shape.depth)
        return self.graph_decoder.logits(_wanted(self._replay(rows, bucket, per_block, pools), batch))

    def graphs(self) -> list[tuple[int, int]]:
        """Bucket and rows of a block of each."""
        return [(b, per_block) for b in buckets(self._shape.max_rows) for per_block in sorted({1, self._per_block(b)})]

    def warm_up(self, pools: Sequence[torch.Tensor]) -> None:
        """Capture the graphs of all buckets, over rows that are all padding."""
        for bucket, per_block in self.graphs():
            self._buffers.clear()
            self._run(bucket, per_block, pools)

    def _replay(self, rows: HostRows, bucket: int, per_block: int, pools: Sequence[torch.Tensor]) -> torch.Tensor:
        self._buffers.fill(rows, bucket, per_block)
        self._buffers.fill_trunks(joined(rows.trunks))
        self._run(bucket, per_block, pools)
        return self._hidden[: len(rows.token_ids)]

    def _run(self, bucket: int, per_block: int, pools: Sequence[torch.Tensor]) -> None:
        static = self._buffers.rows(bucket, per_block)

        def body() -> None:
            self._hidden[:bucket] = self.graph_decoder.hidden(static, pools)

        self._runner.run((bucket, per_block), body)

    def _per_block(self, rows_per_sequence: int) -> int:
        """One of two: shared trunks, or (no sequence with several rows) none."""
        heads = self._shape.num_heads // self._shape.num_kv_heads
        return 1 if rows_per_sequence == 1 else rows_per_block(heads, self._shape.max_rows)

    def without_kernels(self, batch: FlatBatch, pools: Sequence[torch.Tensor]) -> torch.Tensor:
        """As `forward`, by the kernels' twins, which need memory for rows times columns."""
        rows = self._own_rows(host_rows(batch.groups, self._shape.depth))
        hidden = self.graph_decoder.hidden(rows, pools, backend="torch")
        return self.graph_decoder.light.logits(_wanted(hidden, batch))

    def _own_rows(self, rows: HostRows) -> Rows:
        """A batch beyond the buffers (a prompt's chunk), in buffers of its own."""
        count, trunks = len(rows.token_ids), joined(rows.trunks)
        size = {
            "max_rows": aligned(count),
            "max_sequences": len(trunks),
            "max_length": aligned(max(trunks.shape[1], 1)),
        }
        own = RowBuffers(dataclasses.replace(self._shape, **size), self.graph_decoder.device)
        per_block = self._per_block(count)
        own.fill(rows, count, per_block)
        own.fill_trunks(trunks)
        return own.rows(count, per_block)


def _wanted(hidden: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
    """The rows whose logits are wanted."""
    return hidden if batch.logit_rows is None else hidden.index_select(0, batch.logit_rows)
