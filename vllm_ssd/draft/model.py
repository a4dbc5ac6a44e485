"""The draft model: weights from `transformers`, KV in a pool of slots.

Llama-shaped models take a light forward (`light_decoder.py`), on a GPU over kernels and in graphs
(`graph_forward.py`); any other decoder runs as `transformers` wrote it, with our attention in it
(`pool_attention.py`).
"""

import gc
import logging
import os
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft import light_decoder, pool_attention
from vllm_ssd.draft.batch import USUAL_ROWS, FlatBatch, Group, flatten, usual_columns
from vllm_ssd.draft.graph_runner import KERNELS_VARIABLE, check_device

if TYPE_CHECKING:
    from vllm_ssd.draft.graph_decoder import GraphDecoder

logger = logging.getLogger("vllm_ssd.draft")

_FREE_MEMORY_SHARE = {"cpu": 0.1, "cuda": 0.85}
_WARM_UP_COLUMNS = 1024  # slots that a row attends to; more are met as they come


class DraftModel:
    """Runs flat batches over the slot pool."""

    def __init__(self, config: SaguaroConfig, device: torch.device, vocab_size: int) -> None:
        """Load the weights. `vocab_size`: token ids from here on are padding."""
        self.device = device
        self.vocab_size = vocab_size
        model = AutoModelForCausalLM.from_pretrained(
            config.model,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=_dtype(config.draft_dtype, device),
            attn_implementation=pool_attention.NAME,
        )
        model.to(device).eval()
        text_config = model.config.get_text_config()
        self.dtype = model.dtype
        self.max_length: int = text_config.max_position_embeddings
        self.num_embeddings: int = model.get_input_embeddings().weight.shape[0]
        self._num_layers: int = text_config.num_hidden_layers
        self._num_kv_heads: int = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
        self._head_dim: int = (
            getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
        )
        self._decoder = light_decoder.try_build(model) or pool_attention.PoolDecoder(model)
        self._depth = config.num_speculative_tokens + 1
        self._pools: list[torch.Tensor] = []

    def allocate_kv_cache(self, memory_bytes: int | None, most_useful: int) -> int:
        """Make the pools; returns the number of slots.

        `memory_bytes` None takes a share of the free memory, but no more than `most_useful` slots.
        Raises `ValueError` if not even one slot fits, or if there is less memory.
        """
        slot_bytes = 2 * self._num_layers * self._num_kv_heads * self._head_dim * self.dtype.itemsize
        if memory_bytes is None:
            memory_bytes = int(_FREE_MEMORY_SHARE[self.device.type] * _free_memory(self.device))
            memory_bytes = min(memory_bytes, most_useful * slot_bytes)
        elif memory_bytes > (free := _free_memory(self.device)):
            raise ValueError(f"draft_kv_cache_memory_bytes={memory_bytes} is more than the {free} bytes that are free")
        num_slots = memory_bytes // slot_bytes
        if num_slots < 1:
            raise ValueError(f"draft_kv_cache_memory_bytes={memory_bytes} does not hold one token ({slot_bytes} bytes)")
        # [keys of all KV heads, then values], slot, head size: one gather yields both.
        shape = (2 * self._num_kv_heads, num_slots, self._head_dim)
        self._pools = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self._num_layers)]
        return num_slots

    def warm_up(self) -> None:
        """Run a few forwards, so that the first real one finds libraries, caches and graphs ready.

        On a GPU the forward is in graphs from here on, if that works, and unless the environment variable
        `VLLM_SSD_KERNELS` is "off". Raises `ValueError` if it is anything but that or "auto".
        """
        wanted = os.environ.get(KERNELS_VARIABLE) or "auto"
        if wanted not in ("auto", "off"):
            raise ValueError(f"{KERNELS_VARIABLE} is {wanted!r}; it must be auto or off.")
        light = isinstance(self._decoder, light_decoder.LightDecoder)
        if self.device.type == "cuda" and light and wanted == "auto":
            from vllm_ssd.draft import graph_forward  # needs Triton, which CPU builds of torch come without

            self._decoder = graph_forward.ready(self._decoder, self._pools, self.max_length, self._depth)
            torch.cuda.empty_cache()  # what the trial took
        logger.info("draft forward: %s", type(self._decoder).__name__)
        self._meet_usual_shapes()
        check_device(self.device)

    @torch.inference_mode()
    def _meet_usual_shapes(self) -> None:
        """Run every shape that one sequence usually comes in: on a CPU, oneDNN compiles a kernel for each."""
        num_slots = self._pools[0].shape[1]
        for rows in filter(min(num_slots, self.max_length).__ge__, USUAL_ROWS):
            self.forward(_dummy_batch(rows, 1, self.device))
            if self.device.type == "cpu" and isinstance(self._decoder, light_decoder.LightDecoder):
                for columns in usual_columns(min(num_slots, _WARM_UP_COLUMNS)):
                    self._decoder.warm_up_attention(_dummy_batch(rows, columns, self.device), self._pools[0])

    def graph_decoder(self) -> "GraphDecoder | None":
        """The forward of a Llama-shaped draft over ragged rows, for graphs; None for other drafts.

        Call it after `warm_up`: None, too, on a GPU where that found that graphs do not work.
        """
        decoder = getattr(self._decoder, "graph_decoder", None)
        if decoder is None and self.device.type == "cpu" and isinstance(self._decoder, light_decoder.LightDecoder):
            from vllm_ssd.draft.graph_decoder import GraphDecoder  # needs Triton, as above

            return GraphDecoder(self._decoder)
        return decoder

    @property
    def pools(self) -> list[torch.Tensor]:
        """KV of each layer: [keys of all KV heads, then values; slot; head size]."""
        return self._pools

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        """Write the tokens' KV to their slots; returns logits of the wanted rows, [R, padded vocabulary]."""
        return self._decoder.forward(batch, self._pools)


def _dummy_batch(rows: int, columns: int, device: torch.device) -> FlatBatch:
    """So many tokens that write the first slots, and attend to slot 0."""
    slots, prefix = np.arange(rows), np.full(rows, columns)
    group = Group([0] * rows, slots, slots, np.zeros(columns, np.int64), prefix, np.empty((rows, 0), np.int64))
    return flatten([group], device)


def _dtype(setting: str, device: torch.device) -> torch.dtype | str:
    if setting != "auto":
        return getattr(torch, setting)
    if device.type == "cpu":
        return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
    return "auto"


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # the weights were there twice, as they came and joined
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024
