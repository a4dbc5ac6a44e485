#!/usr/bin/env python3
"""Time tree steps of Llama-shaped drafts with random weights: graphs, launches, and plain PyTorch.

    python scripts/bench_draft_step.py --json steps.json

Needs one CUDA GPU, PyTorch, Triton, transformers and this package; no vLLM, no weights. For each
draft and number of branches it prints the time of a step (forward, head and draw) four ways: as
replayed CUDA graphs, with every kernel launched, and by the light decoder in plain PyTorch with the
candidates read back, as on a CPU; then as `transformers` wrote the model, with the same attention. The
floor is the time to read the weights once, at the bandwidth that a copy reaches; the target for the 1B
draft with 24 branches is 1.3 times that.

    OMP_NUM_THREADS=1 taskset -c 0 python scripts/bench_draft_step.py --device cpu --drafts 4x256 \\
        --branches 24 --context 500    # the step of a small draft on one core
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers
from benchmark import arguments, device_report
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_ssd.devices import use_device
from vllm_ssd.draft import light_decoder, pool_attention
from vllm_ssd.draft.batch import Group, flatten
from vllm_ssd.draft.graph_buffers import Shape, tree_bytes
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_planting import Planting
from vllm_ssd.draft.graph_round import GraphRound
from vllm_ssd.draft.graph_rows import aligned
from vllm_ssd.sampling import top_tokens

DRAFTS = {  # vocabulary, hidden, intermediate, layers, heads, KV heads
    "1b": (128_256, 2048, 8192, 16, 32, 8),  # as Llama 3.2 1B
    "0.5b": (151_936, 896, 4864, 24, 14, 2),  # as Qwen2.5 0.5B, without its biases
    "4x256": (4096, 256, 512, 4, 4, 2),  # for a CPU
    "tiny": (1000, 64, 128, 2, 4, 2),
}
WAYS = ("graphs", "launches", "plain", "transformers")
_TOP_M = 64
_DEPTH = 8


def main() -> int:
    args = parse_args()
    device = args.device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("bench_draft_step.py: no CUDA device was found; --device cpu --drafts tiny tries the script.")
    use_device(str(device))
    bandwidth = measured_bandwidth(device)
    setup = {**device_report.setup(device, bandwidth), "transformers": transformers.__version__}
    rows = []
    with torch.inference_mode():
        for name in args.drafts:
            model = random_draft(name, device, getattr(torch, args.dtype))
            floor = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values()) / bandwidth
            for branches in args.branches:
                times = step_times(model, branches, args, device)
                rows.append({"draft": name, "branches": branches, "floor": floor, **times})
                print(line(rows[-1]), flush=True)
                device_report.write(args.json, setup, rows)
            del model
    print(json.dumps(setup))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=arguments.device, default="cuda", help="cuda (default), cuda:1 or cpu")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=["0.5b", "1b"])
    parser.add_argument("--branches", nargs="+", type=arguments.positive, default=[1, 8, 24, 96, 256])
    parser.add_argument(
        "--context", type=arguments.positive, default=1024, help="tokens of the sequence, the trunk included"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the rows; 0 drafts by argmax")
    parser.add_argument("--compile", action="store_true", help="fuse what lies between the products: torch.compile")
    parser.add_argument("--repeats", type=arguments.positive, default=20, help="trees of 8 steps each")
    parser.add_argument("--json", type=arguments.file_to_write, help="file for the results")
    return parser.parse_args()


def line(row: dict) -> str:
    ways = "  ".join(f"{way} {1e3 * row[way]:8.3f} ms" for way in WAYS if way in row)
    return (
        f"{row['draft']:6}{row['branches']:5} branches  {ways}  floor {1e3 * row['floor']:.3f} ms  "
        f"x{row.get('graphs', row['launches']) / row['floor']:.2f}  tree {row['tree_bytes'] / 1e6:.0f} MB"
    )


def random_draft(name: str, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A draft of this shape; its weights are random, its time is not."""
    vocab_size, hidden, intermediate, layers, heads, kv_heads = DRAFTS[name]
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        attn_implementation=pool_attention.NAME,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def step_times(model: LlamaForCausalLM, branches: int, args: argparse.Namespace, device: torch.device) -> dict:
    """Seconds of a step, each way, and the bytes of the buffers."""
    light = light_decoder.try_build(model)
    decoder = GraphDecoder(light, compiled=args.compile)
    vocab_size = model.config.vocab_size
    shape = Shape(
        max_rows=branches,
        max_sequences=1,
        max_length=aligned(args.context + 1),
        depth=_DEPTH,
        width=_TOP_M,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_size,
        vocab_size=vocab_size,
        dtype=decoder.dtype,
    )
    num_slots = args.context + branches * _DEPTH
    size = (2 * decoder.num_kv_heads, num_slots, decoder.head_size)
    pools = [torch.randn(size, device=device).to(decoder.dtype) for _ in range(model.config.num_hidden_layers)]
    slots = np.random.default_rng(0).permutation(num_slots)
    trunk, tails = slots[: args.context], slots[args.context :].reshape(branches, _DEPTH)
    times = {"tree_bytes": tree_bytes(shape)}
    for way in ("graphs", "launches") if device.type == "cuda" else ("launches",):
        graph_round = GraphRound(decoder, pools, shape, vocab_size, _TOP_M, graphs=way == "graphs")
        graph_round.warm_up()
        graph_round.set_trunks([trunk])
        bets = [(0, token) for token in range(branches)]
        planting = Planting(0, args.context, tails, bets, temperature=args.temperature)

        def tree(graph_round: GraphRound = graph_round, planting: Planting = planting) -> Callable[[], None]:
            graph_round.plant([planting], [1])
            return lambda: graph_round.grow(_DEPTH)

        times[way] = median_seconds(tree, device, args.repeats) / _DEPTH
    for way, plain in (("plain", light), ("transformers", pool_attention.PoolDecoder(model))):
        times[way] = plain_seconds(plain, pools, trunk, tails, vocab_size, device, args.repeats)
    return times


def plain_seconds(
    decoder: light_decoder.LightDecoder | pool_attention.PoolDecoder,
    pools: list[torch.Tensor],
    trunk: np.ndarray,
    tails: np.ndarray,
    vocab_size: int,
    device: torch.device,
    repeats: int,
) -> float:
    """A step over a padded mask, its candidates read back."""
    above = np.full(len(tails), len(trunk))
    group = Group(range(len(tails)), above, tails[:, 0], trunk, above, tails[:, :1])

    def step() -> None:
        values, token_ids = top_tokens(decoder.forward(flatten([group], device), pools), _TOP_M, vocab_size)
        values.cpu(), token_ids.cpu()

    return median_seconds(lambda: step, device, repeats)


def median_seconds(prepare: Callable[[], Callable[[], None]], device: torch.device, repeats: int) -> float:
    """Median time of what `prepare` returns, from an idle device to an idle device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(repeats + 3):
        work = prepare()
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


def measured_bandwidth(device: torch.device) -> float:
    """Bytes a second of a copy, reading and writing counted."""
    size = 1 << (30 if device.type == "cuda" else 24)
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: lambda: target.copy_(source), device, 20)


if __name__ == "__main__":
    sys.exit(main())
