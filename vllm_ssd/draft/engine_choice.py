"""Which engine a draft process runs: trees that grow on the device, or step by step from the host.

On CUDA the first, if the draft's forward is in graphs there and a tree on the device is the one that
the plain forward gives; on a CPU the second. The environment variable `VLLM_SSD_DEVICE_ROUNDS` decides
otherwise: "off" anywhere, or "on" on a CPU as well, where it is slow (the tests run it).
"""

import logging
import os
from typing import TYPE_CHECKING

import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.engine import GLUE_LIMIT, DraftEngine
from vllm_ssd.draft.forecast import Part, candidates_wanted
from vllm_ssd.draft.graph_rows import aligned
from vllm_ssd.draft.graph_runner import check_device
from vllm_ssd.draft.model import DraftModel

if TYPE_CHECKING:
    from vllm_ssd.draft.graph_round import GraphRound

logger = logging.getLogger("vllm_ssd.draft")

VARIABLE = "VLLM_SSD_DEVICE_ROUNDS"
_CHOICES = ("auto", "on", "off")
_MAX_ROWS = 2048


def make_engine(
    model: DraftModel, config: SaguaroConfig, num_slots: int, part: Part, max_sequences: int, max_length: int
) -> DraftEngine:
    """The engine for a target of so many sequences of so many tokens, over a model that is warmed up.

    Raises `ValueError` if the environment variable holds something else.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"{VARIABLE} is {choice!r}; it must be one of {', '.join(_CHOICES)}.")
    device_round = None
    if choice == "on" or (choice == "auto" and model.device.type == "cuda"):
        device_round = _ready_round(model, config, num_slots, part, max_sequences, max_length)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # what the trial took, which the target may need
    check_device(model.device)  # a fault that nobody waited for yet would be the first request's
    logger.info("trees grow %s", "step by step" if device_round is None else "on the device")
    if device_round is None:
        return DraftEngine(model, config, num_slots, part=part)
    from vllm_ssd.draft.graph_engine import GraphEngine

    return GraphEngine(model, config, num_slots, device_round, part=part)


def _ready_round(
    model: DraftModel, config: SaguaroConfig, num_slots: int, part: Part, max_sequences: int, max_length: int
) -> "GraphRound | None":
    """Buffers and graphs for trees on the device; None, with a warning, where they do not work."""
    try:
        device_round = make_round(model, config, part, max_sequences, max_length)
        if device_round is None:
            return None  # no Llama-shaped draft, or its forward is not in graphs, which has been said
        from vllm_ssd.draft.kernel_trial import has_room, round_difference  # needs Triton, as above

        if not has_room(device_round, num_slots, model.max_length):
            reason = "its KV cache or its context is too small to try them"
        elif (reason := round_difference(device_round, model)) is None:
            return device_round
    except Exception as error:  # whatever it is, the engine that steps from the host needs none of it
        reason = f"{type(error).__name__}: {error}"
        check_device(model.device)
    logger.warning("the draft's trees do not grow on the device, and are slower: %s", reason)
    return None


def make_round(
    model: DraftModel, config: SaguaroConfig, part: Part, max_sequences: int, max_length: int
) -> "GraphRound | None":
    """A round for up to `max_sequences` trees over sequences of `max_length` tokens, its graphs captured.

    None if the draft's forward cannot be in graphs.
    """
    decoder = model.graph_decoder()
    if decoder is None:
        return None
    # They need Triton, which CPU builds of torch come without.
    from vllm_ssd.draft.graph_buffers import Shape
    from vllm_ssd.draft.graph_round import GraphRound

    depth = config.num_speculative_tokens + 1
    candidates = candidates_wanted(config, part)
    vocab_size = min(model.vocab_size, decoder.vocab_size)
    shape = Shape(
        max_rows=min(max(max_sequences * max(config.most_branches, depth), GLUE_LIMIT), _MAX_ROWS),
        max_sequences=max_sequences,
        max_length=aligned(max_length + depth),
        depth=depth,
        width=min(max(candidates, config.draft_top_m), vocab_size),
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_size,
        vocab_size=decoder.vocab_size,
        dtype=decoder.dtype,
    )
    with torch.inference_mode():
        device_round = GraphRound(decoder, model.pools, shape, vocab_size, config.draft_top_m, candidates)
        device_round.warm_up()
    return device_round
