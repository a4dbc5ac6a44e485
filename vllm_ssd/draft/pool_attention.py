"""The general path: any decoder of `transformers`, with attention over the slot pool.

The model runs on a flat batch [1, T]; our attention function gets the batch by a keyword
argument, writes keys and values to their slots and attends to what the mask allows.
"""

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from vllm_ssd.draft.batch import FlatBatch

NAME = "saguaro"


class PoolDecoder:
    """Runs a loaded `transformers` model over the pools."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def forward(self, batch: FlatBatch, pools: list[torch.Tensor]) -> torch.Tensor:
        """Logits of the wanted rows, [R, V]. `pools`: [2 * KV heads, num_slots, E] for each layer."""
        rows = 0 if batch.logit_rows is None else batch.logit_rows
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            saguaro_batch=batch,
            saguaro_pools=pools,
        )
        return output.logits[0]


def pool_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    saguaro_batch: FlatBatch | None = None,
    saguaro_pools: list[torch.Tensor] | None = None,
    **_kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer. query [1, H, T, E], key and value [1, G, T, E] → [1, T, H, E].

    Raises `NotImplementedError` for attention sinks (`s_aux`).
    """
    if s_aux is not None:
        raise NotImplementedError(f"{type(module).__name__} has attention sinks, which the draft server lacks")
    pool = saguaro_pools[module.layer_idx]
    pool.index_copy_(1, saguaro_batch.slots, torch.cat((key[0], value[0])))
    groups, (size, width) = key.shape[1], saguaro_batch.columns.shape
    gathered = pool.index_select(1, saguaro_batch.columns.flatten())
    keys, values = gathered.view(2, groups, size, width, -1).transpose(1, 2).unbind(0)  # [B, G, S, E]
    rows = saguaro_batch.padded_rows
    queries = pad_rows(query[0].transpose(0, 1), saguaro_batch).transpose(1, 2)  # [B, H, N, E]
    mask = saguaro_batch.mask if sliding_window is None else _within(saguaro_batch, sliding_window)
    if softcap is None:
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask[:, None], scale=scaling, enable_gqa=True
        )
    else:
        mixed = _soft_capped(queries, keys, values, mask, scaling, softcap)
    mixed = mixed.transpose(1, 2).flatten(0, 1)  # [B * N, H, E]
    return (mixed if rows is None else mixed[rows])[None], None


def _within(batch: FlatBatch, window: int) -> torch.Tensor:
    """The mask [B, N, S] without columns that lie `window` or more tokens back."""
    positions = pad_rows(batch.positions[:, None, None], batch)[:, :, 0]  # [B, N, 1]
    return batch.mask & (positions - batch.column_positions[:, None] < window)


def _soft_capped(queries, keys, values, mask, scaling, softcap) -> torch.Tensor:
    """Attention whose scores are capped by tanh. [B, H, N, E] × [B, G, S, E] → [B, H, N, E]."""
    heads = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(heads, dim=1), values.repeat_interleave(heads, dim=1)
    scores = softcap * torch.tanh(queries @ keys.transpose(2, 3) * scaling / softcap)
    scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1) @ values


def pad_rows(tokens: torch.Tensor, batch: FlatBatch) -> torch.Tensor:
    """[T, H, E] → [B, N, H, E], zeros where a group has fewer than N tokens."""
    size, count = batch.mask.shape[:2]
    if batch.padded_rows is None:
        return tokens[None]
    padded = tokens.new_zeros(size * count, *tokens.shape[1:])
    padded[batch.padded_rows] = tokens
    return padded.unflatten(0, (size, count))


AttentionInterface.register(NAME, pool_attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
