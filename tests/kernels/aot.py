"""Compiles every kernel for a GPU that need not be there, as its wrapper launches it.

    python -m tests.kernels.aot 90

prints a JSON line for each kernel: its name, bytes of shared memory, and the size of its machine
code for that compute capability. Runs in a process of its own, in which Triton is not interpreted.
"""

import json
import sys

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from vllm_ssd.kernels.draw import Laws, draw
from vllm_ssd.kernels.fork import fork
from vllm_ssd.kernels.kv_write import kv_write
from vllm_ssd.kernels.sparse_q import dense_rows, subtract_laws
from vllm_ssd.kernels.tree_attention import tree_attention
from vllm_ssd.kernels.tree_layout import Tree, Workspace, row_blocks, rows_per_block
from vllm_ssd.kernels.tree_walk import Trees, tree_walk


class OfflineDriver:
    """Answers what Triton asks before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(capability: int) -> None:
    """From here on a launch compiles its kernel and prints what came out."""
    triton.runtime.driver.set_active(OfflineDriver(capability))
    launch = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        report = {"kernel": self.__name__, "shared": kernel.metadata.shared, "cubin": len(kernel.asm["cubin"])}
        print(json.dumps(report), flush=True)
        return kernel

    JITFunction.run = compile_only


def launch_attention(dtype: torch.dtype, heads: int, groups: int, head_size: int, shared: bool, depth: int = 8) -> None:
    """The attention over rows of two sequences, with blocks of many rows or of one."""
    integers = {"dtype": torch.int32}
    sequences = np.repeat(np.arange(2, dtype=np.int32), 24)
    rows = len(sequences)
    per_block = rows_per_block(heads // groups, 24) if shared else 1
    tree = Tree(
        trunk_slots=torch.zeros(2, 512, **integers),
        row_sequence=torch.from_numpy(sequences),
        trunk_lengths=torch.zeros(rows, **integers),
        tail_slots=torch.zeros(rows, depth, **integers),
        tail_lengths=torch.zeros(rows, **integers),
        blocks=torch.from_numpy(row_blocks(sequences, per_block)),
        per_block=per_block,
    )
    queries = torch.zeros(rows, heads, head_size, dtype=dtype)
    pool = torch.zeros(2 * groups, 64, head_size, dtype=dtype)
    workspace = Workspace.empty(rows, heads, 4, head_size, queries.device)
    tree_attention(queries, pool, tree, 1.0, workspace, backend="triton")


def launch_others(dtype: torch.dtype, heads: int, groups: int, head_size: int, vocab_size: int, top_m: int) -> None:
    """Every other kernel once, on 48 rows."""
    integers, rows = {"dtype": torch.int32}, 48
    qkv = torch.zeros(rows, heads + 2 * groups, head_size, dtype=dtype)
    pool = torch.zeros(2 * groups, 64, head_size, dtype=dtype)
    lengths = torch.zeros(rows, **integers)
    table = torch.zeros(64, 2, head_size)
    norm = torch.zeros(heads + groups, head_size)
    kv_write(qkv, lengths, lengths, table, pool, norm, 1e-6, backend="triton")
    kv_write(qkv, lengths, lengths, table, pool, backend="triton")

    logits = torch.zeros(rows, vocab_size, dtype=dtype)
    fork(logits, lengths, lengths, 33, backend="triton")
    floats = torch.zeros(rows)
    laws = Laws(floats, lengths, floats, lengths, floats, torch.zeros(rows, dtype=torch.int64), lengths)
    draw(logits, laws, 1024, backend="triton")  # so many candidates need a round more of the tournament
    drawn = draw(logits, laws, top_m, backend="triton")
    dense = torch.zeros(rows, vocab_size)
    dense_rows(drawn.token_ids, drawn.probs, dense, backend="triton")
    subtract_laws(dense, drawn.token_ids, drawn.probs, backend="triton")

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    trees = Trees(
        trunk=zeros(2, 7),
        trunk_lengths=zeros(2),
        trunk_law_ids=zeros(2, 7, top_m),
        trunk_law_probs=zeros(2, 7, top_m, dtype=torch.float32),
        offsets=zeros(2, 24),
        chains=zeros(2, 24, 9),
        chain_lengths=zeros(2, 24),
        law_ids=zeros(2, 24, 9, top_m),
        law_probs=zeros(2, 24, 9, top_m, dtype=torch.float32),
    )
    tree_walk(trees, zeros(4), zeros(4, 8), zeros(4), zeros(4), 7, backend="triton")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        raise SystemExit("usage: python -m tests.kernels.aot CAPABILITY, for example 90 for 9.0")
    compile_launches(int(sys.argv[1]))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for heads, groups, head_size in ((32, 8, 64), (14, 2, 80), (32, 8, 128), (8, 1, 256)):
            launch_attention(dtype, heads, groups, head_size, shared=True)
    launch_attention(torch.bfloat16, 32, 8, 128, shared=False)
    launch_attention(torch.float32, 8, 1, 256, shared=True, depth=64)
    launch_others(torch.bfloat16, 32, 8, 64, 128_256, 64)
    launch_others(torch.float16, 14, 2, 80, 151_936, 64)
    launch_others(torch.float32, 8, 1, 256, 50_000, 64)
