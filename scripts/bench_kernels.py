#!/usr/bin/env python3
"""Time each kernel of the draft engine against its floor and against its PyTorch twin.

    python scripts/bench_kernels.py --json kernels.json

Needs one CUDA GPU, PyTorch, Triton and this package; no vLLM, no weights. The floor is the bytes that
the kernel must move at least, over the bandwidth that a copy of 1 GiB reaches on the same device;
the cache of the device is flushed before each run. `share` is floor / time: 1 is as fast as memory.

    python scripts/bench_kernels.py --device cpu --small    # the twins only, to try the script
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from benchmark import arguments, device_report

from vllm_ssd.devices import use_device
from vllm_ssd.draft.graph_buffers import trunk_splits
from vllm_ssd.kernels.draw import Laws, draw
from vllm_ssd.kernels.fork import fork
from vllm_ssd.kernels.kv_write import kv_write
from vllm_ssd.kernels.sparse_q import dense_rows, subtract_laws
from vllm_ssd.kernels.tree_attention import tree_attention
from vllm_ssd.kernels.tree_layout import Tree, Workspace, row_blocks, rows_per_block
from vllm_ssd.kernels.tree_walk import Trees, tree_walk

_FLUSH_BYTES = 256 << 20
_HEAD_START = 2_000_000  # cycles that the GPU idles before a call, so that its launches are not timed
_TAIL = 8
_TOP_M = 64
_MAX_ROWS = 2048  # of a round


@dataclass(frozen=True)
class Case:
    """One call to be timed."""

    kernel: str
    what: str
    bytes: int  # that must be moved at least
    call: Callable[[str], object]  # takes the backend


@dataclass
class Result:
    """Median seconds of the runs; None for what was not run."""

    kernel: str
    what: str
    seconds: float | None
    twin_seconds: float | None
    floor_seconds: float

    @property
    def share(self) -> float | None:
        return None if self.seconds is None else self.floor_seconds / self.seconds


class Clock:
    """Median time of a call, with a cold cache."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats
        size = _FLUSH_BYTES if device.type == "cuda" else 1
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Runs the call three times more, to warm up."""
        for _ in range(3):
            call()
        times = [self._on_gpu(call) if self._device.type == "cuda" else _on_cpu(call) for _ in range(self._repeats)]
        return statistics.median(times)

    def _on_gpu(self, call: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(_HEAD_START)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _on_cpu(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> int:
    args = parse_args()
    device = args.device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_kernels.py: no CUDA device was found; --device cpu --small tries the script.")
    use_device(str(device))
    clock = Clock(device, args.repeats)
    bandwidth = measured_bandwidth(clock, device, 1 << (20 if args.small else 30))
    setup = device_report.setup(device, bandwidth)
    results = []
    for case in cases(device, args.small):
        if args.only and case.kernel not in args.only:
            continue
        twin = None if args.no_twins else twin_seconds(clock, case)
        kernel = clock.seconds(lambda case=case: case.call("triton")) if device.type == "cuda" else None
        results.append(Result(case.kernel, case.what, kernel, twin, case.bytes / bandwidth))
        print(line(results[-1]), flush=True)
        device_report.write(args.json, setup, [{**asdict(result), "share": result.share} for result in results])
    if not results:
        names = ", ".join(sorted({case.kernel for case in cases(device, args.small)}))
        raise SystemExit(f"bench_kernels.py: --only is {' '.join(args.only)}; it must name some of {names}.")
    print(json.dumps(setup))
    return 0


def twin_seconds(clock: Clock, case: Case) -> float | None:
    """None where the twin, which gathers what it attends to, needs more memory than there is."""
    try:
        return clock.seconds(lambda: case.call("torch"))
    except torch.OutOfMemoryError:
        return None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=arguments.device, default="cuda", help="cuda (default), cuda:1 or cpu")
    parser.add_argument("--only", nargs="*", help="kernels to time, by the name in the first column")
    parser.add_argument("--repeats", type=arguments.positive, default=30)
    parser.add_argument("--no-twins", action="store_true", help="leave the twins out; they take most of the time")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", type=arguments.file_to_write, help="file for the results")
    return parser.parse_args()


def line(result: Result) -> str:
    kernel, twin, floor = map(microseconds, (result.seconds, result.twin_seconds, result.floor_seconds))
    share = "-" if result.share is None else f"{result.share:.2f}"
    return f"{result.kernel:16}{result.what:52} {kernel}  twin {twin}  floor {floor}  share {share}"


def microseconds(seconds: float | None) -> str:
    return f"{'-':>13}" if seconds is None else f"{1e6 * seconds:10.1f} us"


def measured_bandwidth(clock: Clock, device: torch.device, size: int) -> float:
    """Bytes a second of a copy, reading and writing counted."""
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds(lambda: target.copy_(source))


# ---- the cases ----


def cases(device: torch.device, small: bool):
    """All kernels, over the shapes that a round has."""
    contexts = (64,) if small else (1024, 8192, 32_768, 131_072)
    branches = (1, 8) if small else (1, 8, 24, 96, 256)
    for heads, groups, size in ((32, 8, 64), (14, 2, 64)):  # as Llama 3.2 1B and Qwen2.5 0.5B
        for context in contexts:
            for count in branches:
                yield attention_case(device, 1, count, context, heads, groups, size)
        yield attention_case(device, 8, 24 if not small else 2, contexts[0], heads, groups, size)
        yield kv_write_case(device, 24, heads, groups, size)
    for vocab_size in (1000,) if small else (32_000, 128_256, 262_144):
        for rows in (2,) if small else (6, 24, 192):
            yield from logits_cases(device, rows, vocab_size)
    for rows in (1, 64):
        yield walk_case(device, rows)


def attention_case(
    device: torch.device, sequences: int, branches: int, context: int, heads: int, groups: int, size: int
) -> Case:
    rows = sequences * branches
    num_slots = sequences * context + rows * _TAIL
    slots = torch.randperm(num_slots, device=device).to(torch.int32)
    per_block = rows_per_block(heads // groups, _MAX_ROWS) if branches > 1 else 1
    row_sequence = np.repeat(np.arange(sequences, dtype=np.int32), branches)
    blocks = torch.from_numpy(row_blocks(row_sequence, per_block)).to(device)
    integers = {"dtype": torch.int32, "device": device}
    tree = Tree(
        trunk_slots=slots[: sequences * context].view(sequences, context),
        row_sequence=torch.from_numpy(row_sequence).to(device),
        trunk_lengths=torch.full((rows,), context, **integers),
        tail_slots=slots[sequences * context :].view(rows, _TAIL),
        tail_lengths=torch.full((rows,), _TAIL, **integers),
        blocks=blocks,
        per_block=per_block,
    )
    dtype = torch.bfloat16
    queries = torch.randn(rows, heads, size, device=device, dtype=dtype)
    pool = torch.randn(2 * groups, num_slots, size, device=device, dtype=dtype)
    splits = trunk_splits(rows, heads, groups)
    workspace = Workspace.empty(rows, heads, splits, size, device)
    moved = num_slots * 2 * groups * size * 2 + 2 * queries.nbytes  # each trunk once
    return Case(
        "tree_attention",
        f"{sequences} x {branches} branches, {context} tokens, heads {heads}/{groups}x{size}",
        moved,
        lambda backend: tree_attention(queries, pool, tree, size**-0.5, workspace, backend=backend),
    )


def kv_write_case(device: torch.device, tokens: int, heads: int, groups: int, size: int) -> Case:
    qkv = torch.randn(tokens, heads + 2 * groups, size, device=device, dtype=torch.bfloat16)
    numbers = torch.arange(tokens, dtype=torch.int32, device=device)
    table = torch.randn(2048, 2, size, device=device, dtype=torch.bfloat16)
    pool = torch.zeros(2 * groups, 4096, size, device=device, dtype=torch.bfloat16)
    return Case(
        "kv_write",
        f"{tokens} tokens, heads {heads}/{groups}x{size}",
        2 * qkv.nbytes + tokens * table[0].nbytes,
        lambda backend: kv_write(qkv, numbers, numbers, table, pool, backend=backend),
    )


def logits_cases(device: torch.device, rows: int, vocab_size: int):
    logits = torch.randn(rows, vocab_size, device=device, dtype=torch.bfloat16)
    integers = {"dtype": torch.int32, "device": device}
    none, counts = torch.full((rows,), -1, **integers), torch.full((rows,), 33, **integers)
    what = f"{rows} rows, vocabulary {vocab_size}"
    yield Case("fork", what, logits.nbytes, lambda backend: fork(logits, none, counts, 33, backend=backend))
    ones, zeros = torch.ones(rows, device=device), torch.zeros(rows, **integers)
    laws = Laws(ones, zeros, ones, zeros, 0.7 * ones, torch.zeros(rows, dtype=torch.int64, device=device), zeros)
    yield Case("draw", what, logits.nbytes, lambda backend: draw(logits, laws, _TOP_M, backend=backend))
    drawn = draw(logits, laws, _TOP_M, backend="torch")
    dense = torch.rand(rows, vocab_size, device=device)
    yield Case(
        "dense_rows",
        what,
        dense.nbytes,
        lambda backend: dense_rows(drawn.token_ids, drawn.probs, dense, backend=backend),
    )
    yield Case(
        "subtract_laws",
        what,
        4 * drawn.probs.nbytes,
        lambda backend: subtract_laws(dense, drawn.token_ids, drawn.probs, backend=backend),
    )


def walk_case(device: torch.device, rows: int) -> Case:
    depth, branches, drafts = 9, 24, 7

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    trees = Trees(
        trunk=zeros(rows, drafts),
        trunk_lengths=zeros(rows) + drafts,
        trunk_law_ids=zeros(rows, drafts, _TOP_M),
        trunk_law_probs=zeros(rows, drafts, _TOP_M, dtype=torch.float32),
        offsets=zeros(rows, branches) + 3,
        chains=zeros(rows, branches, depth) + torch.arange(branches, dtype=torch.int32, device=device)[:, None] + 1,
        chain_lengths=zeros(rows, branches) + depth,
        law_ids=zeros(rows, branches, depth, _TOP_M),
        law_probs=zeros(rows, branches, depth, _TOP_M, dtype=torch.float32),
    )
    emitted = torch.tensor([0, 0, 0, branches, 0, 0, 0, 0], dtype=torch.int32, device=device).repeat(rows, 1)
    places = torch.arange(rows, dtype=torch.int32, device=device)
    lengths, limits = zeros(rows) + 4, zeros(rows) + drafts
    moved = rows * (2 * drafts * _TOP_M * 8 + 4 * 3 * branches)
    return Case(
        "tree_walk",
        f"{rows} rows, {branches} branches, {drafts} drafts",
        moved,
        lambda backend: tree_walk(trees, places, emitted, lengths, limits, drafts, backend=backend),
    )


if __name__ == "__main__":
    sys.exit(main())
