"""The laws of drafts as rows that vLLM's rejection sampler reads, on the target's device."""

import logging
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_ssd.draft.batch import to_device
from vllm_ssd.draft.graph_runner import KERNELS_VARIABLE, check_device
from vllm_ssd.tree import TokenLaw

logger = logging.getLogger("vllm.saguaro")


def one_hot(token_id: int) -> TokenLaw:
    """The law of a token that was not drawn."""
    return TokenLaw(np.array([token_id]), np.ones(1, dtype=np.float32))


def sparse(laws: Sequence[TokenLaw], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and probabilities, [len(laws), most entries] int32 and float32; -1 and 0 beyond a law's entries."""
    shape = (len(laws), max(len(law.token_ids) for law in laws))
    token_ids, probs = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.float32)
    for row, law in enumerate(laws):
        token_ids[row, : len(law.token_ids)] = law.token_ids
        probs[row, : len(law.probs)] = law.probs
    return to_device(token_ids, device), to_device(probs, device)


def dense_torch(token_ids: torch.Tensor, probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[laws, vocab_size] float32."""
    dense = torch.zeros((len(probs), vocab_size), dtype=torch.float32, device=probs.device)
    return dense.scatter_add_(1, token_ids.clamp(min=0).long(), probs)


def _dense_kernel(token_ids: torch.Tensor, probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """As `dense_torch`."""
    from vllm_ssd.kernels.sparse_q import dense_rows  # needs Triton, which CPU builds of torch come without

    return dense_rows(token_ids, probs, torch.empty((len(probs), vocab_size), dtype=torch.float32, device=probs.device))


def tried_dense(vocab_size: int, device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]:
    """The kernel, compiled, if it gives what PyTorch gives: the target's law depends on it.

    PyTorch, too, if `VLLM_SSD_KERNELS` is "off". Raises `RuntimeError` if the kernel broke the device.
    """
    if os.environ.get(KERNELS_VARIABLE) == "off":
        return dense_torch
    spread = np.arange(min(64, vocab_size)) * (vocab_size - 1) // 63
    laws = [one_hot(vocab_size - 1), TokenLaw(spread, np.arange(1, len(spread) + 1, dtype=np.float32) / 4096)]
    try:
        token_ids, probs = sparse(laws * 16, device)
        if torch.equal(_dense_kernel(token_ids, probs, vocab_size), dense_torch(token_ids, probs, vocab_size)):
            return _dense_kernel
        reason = "its rows differ from PyTorch's"
    except Exception as error:  # whatever it is, PyTorch needs none of it
        reason = f"{type(error).__name__}: {error}"
        check_device(device)
    logger.warning("saguaro: the laws of drafts are made dense without a Triton kernel: %s", reason)
    return dense_torch
