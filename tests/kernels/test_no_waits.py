"""Between what the host says and what it fetches, a round never waits for the device.

Shown without one: on PyTorch's device "meta", whose tensors hold no numbers, whatever would read one back raises.
Kernels are launched by their real wrappers, and run nothing.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from unit.test_model import tiny

from vllm_ssd.draft import graph_decoder, graph_round
from vllm_ssd.draft.batch import causal_group, flatten
from vllm_ssd.draft.graph_buffers import Shape
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_forward import GraphForward
from vllm_ssd.draft.graph_round import GraphRound, Planting
from vllm_ssd.draft.graph_rows import host_rows
from vllm_ssd.draft.light_decoder import try_build

META = torch.device("meta")
DEPTH, NUM_SLOTS = 4, 1000


class CopiesWithoutWaiting(TorchDispatchMode):
    """Lets copies to the host pass that nobody waits for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "copy_" and args[0].device.type == "cpu" and args[1].is_meta:
            if len(args) > 2 and args[2]:  # non_blocking
                return args[0]
        return func(*args, **(kwargs or {}))


class Launches:
    """Stands for a kernel."""

    def __init__(self, name: str, launched: list[str]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return lambda *_args, **_options: self._launched.append(self._name)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels launched, in their order."""
    names: list[str] = []
    wrappers = (graph_round.draw, graph_round.fork, graph_decoder.kv_write, graph_decoder.tree_attention)
    modules = [wrapper.__globals__ for wrapper in (*wrappers, graph_round.fork.__globals__["best_keys"])]
    for module in modules:
        for name in [name for name in module if name.endswith("_kernel")]:
            stand_in = Launches(name, names) if name != "runs_kernel" else lambda _backend, _tensor: True
            monkeypatch.setitem(module, name, stand_in)
    return names


def decoder_without_numbers() -> tuple[GraphDecoder, list[torch.Tensor]]:
    decoder = GraphDecoder(try_build(tiny("llama").to(META)))
    shape = (2 * decoder.num_kv_heads, NUM_SLOTS, decoder.head_size)
    return decoder, [torch.zeros(shape, device=META, dtype=decoder.dtype) for _ in decoder._light._layers]


@torch.inference_mode()
def test_a_round_waits_for_nothing(launched: list[str]) -> None:
    """Some step reads a token, a count or a mask back: the GPU idles while the host makes up its mind."""
    decoder, pools = decoder_without_numbers()
    shape = Shape(
        max_rows=40,
        max_sequences=4,
        max_length=64,
        depth=DEPTH,
        width=16,
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_size,
        vocab_size=decoder.vocab_size,
        dtype=decoder.dtype,
    )
    slots = np.arange(NUM_SLOTS)
    groups = [causal_group([1, 2, 3, 4], 0, slots[:4], slots[:4]), causal_group([1, 2, 3], 0, slots[4:7], slots[4:7])]
    tails = slots[100 : 100 + 2 * 6 * DEPTH].reshape(2, 6, DEPTH).astype(np.int32)
    plantings = [Planting(place, 3, tails[place], seed=place, temperature=float(place)) for place in range(2)]
    with CopiesWithoutWaiting():
        tree = GraphRound(decoder, pools, shape, decoder.vocab_size, top_m=8)
        tree.set_trunks([group.columns for group in groups])
        tree.glue(host_rows(groups, DEPTH))
        tree.add_candidates(np.zeros((1, 16), dtype=np.int32), np.zeros((1, 16), dtype=np.float32))
        tree.plant_most_probable(plantings, [2, 6], [[4], []], [1.0, 1.0], [None, [0.5]], 0.9, [2] * DEPTH)
        tree.grow(DEPTH)
    assert {"_kv_write_kernel", "_trunk_kernel", "_tail_kernel", "_fork_kernel", "_draw_kernel"} <= set(launched)
    assert launched.count("_draw_kernel") == DEPTH
    assert launched.count("_kv_write_kernel") == (1 + DEPTH) * len(pools)


@torch.inference_mode()
def test_a_forward_waits_for_nothing(launched: list[str]) -> None:
    """The same of the forward that the engine flattens, within the buffers and beyond them."""
    decoder, pools = decoder_without_numbers()
    forward = GraphForward(decoder, max_length=64, depth=DEPTH, max_rows=8)
    slots = np.arange(NUM_SLOTS)
    for count in (3, 20):
        batch = flatten([causal_group([1] * count, 0, slots[:count], slots[:count])], META)
        with CopiesWithoutWaiting():
            logits = forward.forward(batch, pools)
        assert logits.shape == (count, decoder.vocab_size)
    assert launched.count("_kv_write_kernel") == 2 * len(pools)


@pytest.mark.parametrize(
    "read",
    (
        lambda t: t[0].item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: bool(t.any()),
        lambda t: t[t > 0],
        lambda t: torch.zeros(3).copy_(t),
    ),
)
def test_what_waits_is_noticed(read: Callable[[torch.Tensor], object]) -> None:
    """The tests above cannot fail."""
    with CopiesWithoutWaiting(), pytest.raises((RuntimeError, TypeError), match="meta"):
        read(torch.ones(3, device=META))
