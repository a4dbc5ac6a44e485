"""A light forward for Llama-shaped decoders (Llama, Mistral, Qwen2, Qwen3) over the slot pool.

It reads the weights of a model that `transformers` loaded, joins q|k|v and gate|up, and on CPUs
lays them out once for oneDNN. Where the model is not exactly pre-norm RMSNorm, rotary GQA and
SwiGLU, `try_build` returns None and the general path is taken.

Shapes: T tokens, P >= T rows that the projections run on, B groups of at most N tokens, S columns,
V vocabulary, D hidden size, H query heads, G key/value heads, E head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from vllm_ssd.draft.batch import FlatBatch, usual_rows
from vllm_ssd.draft.pool_attention import pad_rows

_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")

Projection = Callable[[Tensor], Tensor]


def try_build(model: PreTrainedModel) -> "LightDecoder | None":
    """A light decoder with the model's weights, or None if its shape is not known."""
    if not _is_recognised(model):
        return None
    with torch.inference_mode():
        return LightDecoder(model)


class LightDecoder:
    """The forward of a recognised model."""

    def __init__(self, model: PreTrainedModel) -> None:
        config, body = model.config, model.model
        self._num_heads: int = config.num_attention_heads
        self._num_kv_heads: int = config.num_key_value_heads
        self._embedding = body.embed_tokens.weight.detach()
        self._rotary = _rotary_table(body.rotary_emb, self._embedding, config.max_position_embeddings)
        self._layers = [_Layer(layer, self._num_heads, self._num_kv_heads) for layer in body.layers]
        self._norm = _RmsNorm.of(body.norm)
        self._head = _join([model.lm_head])

    def forward(self, batch: FlatBatch, pools: Sequence[Tensor]) -> Tensor:
        """Logits of the wanted rows, [R, V]. `pools`: [2 * G, num_slots, E] for each layer, written."""
        cos, sin = self._rotary.index_select(0, _padded(batch.positions)).unsqueeze(2).unbind(1)
        attend = _Attend(batch, cos, sin, self._bias(batch.mask))
        hidden = F.embedding(_padded(batch.token_ids), self._embedding)
        for layer, pool in zip(self._layers, pools):
            hidden = layer(hidden, pool, attend)
        if batch.logit_rows is None:
            return self._head(self._norm(hidden))[: len(batch.token_ids)]
        hidden = hidden.index_select(0, _padded(batch.logit_rows))
        return self._head(self._norm(hidden))[: len(batch.logit_rows)]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._embedding.dtype

    def logits(self, hidden: Tensor) -> Tensor:
        """Normalised hidden states [R, D] → [R, V]."""
        return self._head(hidden)

    def warm_up_attention(self, batch: FlatBatch, pool: Tensor) -> None:
        """Run what is compiled for each shape of a batch beside the projections. `pool`: that of any layer, read."""
        queries = pool.new_zeros(len(batch.token_ids), self._num_heads, pool.shape[2])
        self._layers[0].mix(queries, pool, batch, self._bias(batch.mask))

    def _bias(self, mask: Tensor) -> Tensor:
        """bool [B, N, S] → additive [G * B, (H / G) * N, S]; its floor is finite, so no row is NaN."""
        size, tokens, columns = mask.shape
        heads = self._num_heads // self._num_kv_heads
        dtype = self._embedding.dtype
        bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        bias.masked_fill_(~mask, torch.finfo(dtype).min)
        bias = bias[:, None].expand(-1, heads, -1, -1).reshape(size, heads * tokens, columns)
        return bias.expand(self._num_kv_heads, -1, -1, -1).reshape(-1, heads * tokens, columns)


@dataclass(frozen=True)
class _Attend:
    """What every layer needs of one forward."""

    batch: FlatBatch
    cos: Tensor  # [P, 1, E]
    sin: Tensor  # [P, 1, E], the first half negated
    bias: Tensor  # [G * B, (H / G) * N, S], additive


class _Layer:
    """One decoder layer: attention over the pool, then a SwiGLU MLP."""

    def __init__(self, layer: nn.Module, num_heads: int, num_kv_heads: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._num_heads, self._num_kv_heads = num_heads, num_kv_heads
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._attention_norm = _RmsNorm.of(layer.input_layernorm)
        self._mlp_norm = _RmsNorm.of(layer.post_attention_layernorm)
        self._head_norm = _head_norm(attention, num_heads, num_kv_heads)
        self._qkv = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self._out = _join([attention.o_proj])
        self._gate_up = _join([mlp.gate_proj, mlp.up_proj])
        self._down = _join([mlp.down_proj])

    def __call__(self, hidden: Tensor, pool: Tensor, attend: _Attend) -> Tensor:
        """hidden [P, D], updated in place; pool [2 * G, num_slots, E], written."""
        qkv = self._project(self._attention_norm(hidden), attend)
        tokens = qkv[: len(attend.batch.token_ids)]
        pool.index_copy_(1, attend.batch.slots, tokens[:, self._num_heads :].transpose(0, 1))
        hidden.add_(self._out(_padded(self.mix(tokens[:, : self._num_heads], pool, attend.batch, attend.bias))))
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden.add_(self._down(F.silu(gate).mul_(up)))

    def _project(self, normed: Tensor, attend: _Attend) -> Tensor:
        """[P, D] → [P, H + 2 * G, E]; queries and keys are rotated."""
        qkv = self._qkv(normed).unflatten(-1, (-1, self._head_dim))
        rotary = qkv[:, : self._num_heads + self._num_kv_heads]
        if self._head_norm is not None:
            rotary.copy_(self._head_norm(rotary))
        swapped = rotary.roll(self._head_dim // 2, dims=-1)
        rotary.mul_(attend.cos).addcmul_(swapped, attend.sin)
        return qkv

    def mix(self, queries: Tensor, pool: Tensor, batch: FlatBatch, bias: Tensor) -> Tensor:
        """[T, H, E] → [T, H * E]. Query heads that share a KV head are rows of one matmul."""
        groups = self._num_kv_heads
        size, tokens = batch.mask.shape[:2]
        gathered = pool.index_select(1, batch.columns.flatten())
        keys, values = gathered.view(2, groups * size, -1, self._head_dim).unbind(0)
        stacked = pad_rows(queries * self._scaling, batch).unflatten(2, (groups, -1))
        stacked = stacked.permute(2, 0, 3, 1, 4).reshape(groups * size, -1, self._head_dim)
        scores = torch.baddbmm(bias, stacked, keys.transpose(1, 2))
        mixed = torch.bmm(scores.softmax(-1), values)
        mixed = mixed.view(groups, size, -1, tokens, self._head_dim).permute(1, 3, 0, 2, 4)
        mixed = mixed.reshape(size * tokens, -1)
        return mixed if batch.padded_rows is None else mixed.index_select(0, batch.padded_rows)


def _padded(rows: Tensor) -> Tensor:
    """[T, ...] → [P, ...], the rest zeros."""
    missing = usual_rows(len(rows)) - len(rows)
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


@dataclass(frozen=True)
class _RmsNorm:
    """RMS normalisation over the last dimension, with a weight that may be per head."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> "_RmsNorm":
        return cls(module.weight.detach(), module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 1:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


def _head_norm(attention: nn.Module, num_heads: int, num_kv_heads: int) -> _RmsNorm | None:
    """The q and k norms as one, of weight [H + G, E]; None where the model has none."""
    if not hasattr(attention, "q_norm"):
        return None
    query = attention.q_norm.weight.detach().expand(num_heads, -1)
    key = attention.k_norm.weight.detach().expand(num_kv_heads, -1)
    return _RmsNorm(torch.cat((query, key)), attention.q_norm.variance_epsilon)


def _join(linears: Sequence[nn.Linear]) -> Projection:
    """One projection whose output is the concatenation of those of `linears`."""
    weights = [linear.weight.detach() for linear in linears]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    biases = [linear.bias for linear in linears]
    if all(bias is None for bias in biases):
        return _projection(weight, None)
    filled = [
        linear.weight.new_zeros(linear.out_features) if bias is None else bias.detach()
        for linear, bias in zip(linears, biases)
    ]
    return _projection(weight, torch.cat(filled))


def _projection(weight: Tensor, bias: Tensor | None) -> Projection:
    """[rows, in] → [rows, out], over a copy packed for oneDNN where that is possible."""
    if not _can_prepack(weight):
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: linear(x, packed, bias, "none", [], "")


def _can_prepack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def _rotary_table(rotary: nn.Module, like: Tensor, max_positions: int) -> Tensor:
    """[max_positions, 2, E]: cosines, and sines with their first half negated."""
    positions = torch.arange(max_positions, device=like.device)
    cos, sin = rotary(like, positions[None])
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return torch.stack((cos[0], signed[0]), dim=1)


def _is_recognised(model: PreTrainedModel) -> bool:
    config = model.config
    if config.model_type not in _MODEL_TYPES or config.hidden_act not in ("silu", "swish"):
        return False
    rope = config.rope_parameters
    if rope["rope_type"] in _LENGTH_DEPENDENT_ROPE or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    return _sees_all(config) and all(map(_is_plain_layer, model.model.layers))


def _sees_all(config) -> bool:
    """True where no layer's sliding window is shorter than the context."""
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    window = getattr(config, "sliding_window", None)
    if not kinds <= {"full_attention", "sliding_attention"}:
        return False
    return kinds == {"full_attention"} or window is None or window >= config.max_position_embeddings


def _is_plain_layer(layer: nn.Module) -> bool:
    """True where every projection is an unmodified `nn.Linear` (not quantised, no adapter)."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    )
    return all(type(linear) is nn.Linear for linear in linears)
