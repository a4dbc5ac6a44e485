"""The forward of a recognised draft over ragged rows, made of the kernels and of matrix products.

No shape in it depends on what a row attends to, and nothing is read back: the same calls can be
captured once and replayed (`graph_runner.py`). Runs on a CPU too, with the twins of the kernels.

Shapes: R rows, D hidden size, V padded vocabulary, H query heads, E head size.
"""

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_ssd.draft.light_decoder import LightDecoder
from vllm_ssd.kernels.kv_write import kv_write
from vllm_ssd.kernels.tree_attention import tree_attention
from vllm_ssd.kernels.tree_layout import Tree, Workspace


@dataclasses.dataclass(frozen=True)
class Rows:
    """The tokens of one forward; int32."""

    token_ids: Tensor  # [R]
    positions: Tensor  # [R]
    slots: Tensor  # [R], where their KV goes; -1: the row is padding
    tree: Tree  # what each attends to, its own slot included
    workspace: Workspace


class GraphDecoder:
    """Hidden states and logits of rows."""

    def __init__(self, light: LightDecoder, compiled: bool = False) -> None:
        """`compiled`: fuse what lies between the matrix products with `torch.compile`."""
        self.light = light
        self._table = light._rotary.contiguous()
        first = light._layers[0]
        self.num_heads: int = light._num_heads
        self.num_kv_heads: int = light._num_kv_heads
        self.head_size: int = first._head_dim
        self.vocab_size: int = light._embedding.shape[0]  # padded
        self.hidden_size: int = light._embedding.shape[1]
        self.dtype: torch.dtype = light._embedding.dtype
        self.device: torch.device = light._embedding.device
        self._gated = torch.compile(_gated) if compiled else _gated
        self._normed = torch.compile(_normed) if compiled else _normed

    def hidden(self, rows: Rows, pools: Sequence[Tensor], backend: str | None = None) -> Tensor:
        """Normalised hidden states, [R, D]. `pools`: [2 * KV heads, num_slots, E] a layer, written.

        `backend`: of the kernels.
        """
        light = self.light
        hidden = F.embedding(rows.token_ids, light._embedding)
        for layer, pool in zip(light._layers, pools):
            normed = self._normed(hidden, layer._attention_norm.weight, layer._attention_norm.eps)
            qkv = layer._qkv(normed).unflatten(-1, (-1, self.head_size))
            norm = layer._head_norm
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            kv_write(qkv, rows.positions, rows.slots, self._table, pool, weight, eps, backend=backend)
            queries = qkv[:, : self.num_heads]
            mixed = tree_attention(queries, pool, rows.tree, layer._scaling, rows.workspace, backend=backend)
            hidden = hidden + layer._out(mixed.flatten(1))
            normed = self._normed(hidden, layer._mlp_norm.weight, layer._mlp_norm.eps)
            hidden = hidden + layer._down(self._gated(layer._gate_up(normed)))
        return self._normed(hidden, light._norm.weight, light._norm.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] → [R, V]."""
        return self.light.logits(hidden)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _normed(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden, weight.shape, weight, eps)
