"""The forward of the draft on a GPU for batches that the engine flattens: ragged, in graphs.

Takes the place of the light decoder on CUDA. A batch's groups become rows that attend to a prefix of
their group's columns and to a tail of their own; they travel in static buffers, padded to a bucket.
Batches larger than the buffers run through the same calls without a graph. On a CPU (the tests) the
same code calls the kernels' twins; the capture has not been run, for lack of a GPU.
"""

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np
import torch

from vllm_ssd.draft.batch import FlatBatch, causal_group, flatten
from vllm_ssd.draft.graph_buffers import RowBuffers, Shape, Staging
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_rows import TRIAL_TOKENS, TRIAL_TOLERANCE, HostRows, host_rows, joined
from vllm_ssd.draft.graph_runner import GraphRunner, bucket_of, buckets
from vllm_ssd.draft.light_decoder import LightDecoder
from vllm_ssd.kernels.tree_attention import rows_per_block

logger = logging.getLogger("vllm_ssd.draft")

_MAX_ROWS = 512
_MAX_SEQUENCES = 64
_MAX_TAIL = 64


def ready(light: LightDecoder, pools: Sequence[torch.Tensor], max_length: int, depth: int):
    """The forward over ragged rows with its graphs captured; `light` itself if that does not work here.

    The two must agree about a few tokens: a kernel that a new compiler or device breaks then costs
    speed, and a warning, but no drafts.
    """
    try:
        with torch.inference_mode():
            graphs = GraphForward(GraphDecoder(light), max_length, depth)
            graphs.warm_up(pools)
            slots = np.arange(min(TRIAL_TOKENS, pools[0].shape[1]))
            group = causal_group(slots.tolist(), 0, slots, slots)
            batches = [flatten([group], pools[0].device) for _ in range(2)]
            mine, plain = graphs.forward(batches[0], pools).float(), light.forward(batches[1], pools).float()
            if (mine - plain).abs().max() <= TRIAL_TOLERANCE * plain.abs().max():
                return graphs
            reason = "its logits differ from those of the plain forward"
    except Exception as error:  # whatever it is, the plain forward needs none of it
        reason = f"{type(error).__name__}: {error}"
    logger.warning("the draft runs without kernels and CUDA graphs, and slower: %s", reason)
    return light


class GraphForward:
    """Logits of flat batches."""

    def __init__(self, decoder: GraphDecoder, max_length: int, depth: int, max_rows: int = _MAX_ROWS) -> None:
        """`max_length`: of a sequence; `depth`: longest tail of a branch."""
        self.graph_decoder = decoder
        self._shape = Shape(
            max_rows=max_rows,
            max_sequences=_MAX_SEQUENCES,
            max_length=max_length + _MAX_TAIL,
            depth=depth,
            width=1,
            num_heads=decoder.num_heads,
            num_kv_heads=decoder.num_kv_heads,
            head_size=decoder.head_size,
            vocab_size=1,
            dtype=decoder.dtype,
        )
        self._buffers = RowBuffers(self._shape, decoder.device)
        self._hidden = torch.zeros(max_rows, decoder.hidden_size, dtype=decoder.dtype, device=decoder.device)
        self._staging = Staging(decoder.device)
        self._runner = GraphRunner(decoder.device)

    def forward(self, batch: FlatBatch, pools: Sequence[torch.Tensor]) -> torch.Tensor:
        """Write the tokens' KV to their slots; logits of the wanted rows, [R, padded vocabulary]."""
        rows = host_rows(batch.groups, self._shape.depth)
        count = len(rows.token_ids)
        if count <= self._shape.max_rows and len(rows.trunks) <= self._shape.max_sequences:
            hidden = self._replay(rows, pools)[:count]
        else:
            hidden = self._run_large(rows, pools)
        if batch.logit_rows is not None:
            hidden = hidden.index_select(0, batch.logit_rows)
        return self.graph_decoder.logits(hidden)

    def warm_up(self, pools: Sequence[torch.Tensor]) -> None:
        """Capture the graphs of all buckets, over rows that are all padding."""
        for bucket in buckets(self._shape.max_rows):
            for per_block in {1, self._per_block(bucket)}:
                self._buffers.clear()
                self._run(bucket, per_block, pools)

    def _replay(self, rows: HostRows, pools: Sequence[torch.Tensor]) -> torch.Tensor:
        bucket = bucket_of(len(rows.token_ids), self._shape.max_rows)
        per_block = self._per_block(int(np.bincount(rows.row_sequence).max()))
        self._buffers.fill(rows, bucket, per_block, self._staging)
        self._buffers.fill_trunks(joined(rows.trunks), self._staging)
        self._run(bucket, per_block, pools)
        return self._hidden

    def _run(self, bucket: int, per_block: int, pools: Sequence[torch.Tensor]) -> None:
        static = self._buffers.rows(bucket, per_block)

        def body() -> None:
            self._hidden[:bucket] = self.graph_decoder.hidden(static, pools)

        self._runner.run((bucket, per_block), body)

    def _per_block(self, rows_per_sequence: int) -> int:
        """One of two: shared trunks, or (no sequence with several rows) none."""
        heads = self._shape.num_heads // self._shape.num_kv_heads
        return 1 if rows_per_sequence == 1 else rows_per_block(heads, self._shape.max_rows)

    def _run_large(self, rows: HostRows, pools: Sequence[torch.Tensor]) -> torch.Tensor:
        """A batch beyond the buffers (a prompt's chunk): the same calls on buffers of its own."""
        count, trunks = len(rows.token_ids), joined(rows.trunks)
        size = {"max_rows": count, "max_sequences": len(trunks), "max_length": max(trunks.shape[1], 1)}
        own = RowBuffers(dataclasses.replace(self._shape, **size), self.graph_decoder.device)
        per_block = self._per_block(count)
        own.fill(rows, count, per_block, self._staging)
        own.fill_trunks(trunks, self._staging)
        return self.graph_decoder.hidden(own.rows(count, per_block), pools)
