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
from vllm_ssd.draft.graph_buffers import Shape, Staging
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_forward import GraphForward
from vllm_ssd.draft.graph_round import GraphRound, Planting
from vllm_ssd.draft.graph_rows import host_rows
from vllm_ssd.draft.light_decoder import try_build

META = torch.device("meta")
DEPTH, NUM_SLOTS = 4, 1000


class NoWaits(TorchDispatchMode):
    """Refuses what waits on CUDA though "meta" takes it; lets copies to the host pass that nobody waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._sends = False
        send = Staging.send

        def staged(staging: Staging, array: np.ndarray, target: torch.Tensor) -> None:
            self._sends = True
            send(staging, array, target)
            self._sends = False

        monkeypatch.setattr(Staging, "send", staged)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if name == "copy_" and not tensors[0].is_meta and tensors[1].is_meta:
            target, source = tensors
            dense = target.is_contiguous() and source.is_contiguous() and target.dtype == source.dtype
            if not (dense and len(args) > 2 and args[2]):
                raise RuntimeError("a copy from the device meta that waits")
            return target
        made = func(*args, **kwargs)
        from_host = name in ("copy_", "_to_copy", "to") and made.is_meta and not tensors[-1].is_meta
        if from_host and not self._sends:
            raise RuntimeError("a copy to the device meta that is not staged")
        if name.startswith("index") and by_mask(args) or name.startswith("masked_s"):
            raise RuntimeError("a mask of the device meta is read")
        return made


def by_mask(args: tuple) -> bool:
    """Whether tensors are indexed by one of truth values, whose number must be known."""
    indices = [index for arg in args if isinstance(arg, (list, tuple)) for index in arg]
    return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)


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
def test_a_round_waits_for_nothing(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    tree = GraphRound(decoder, pools, shape, decoder.vocab_size, top_m=8)
    with NoWaits(monkeypatch):
        tree.set_trunks([group.columns for group in groups])
        tree.glue(host_rows(groups, DEPTH))
        tree.add_candidates(np.zeros((1, 16), dtype=np.int32), np.zeros((1, 16), dtype=np.float32))
        tree.plant_most_probable(plantings, [2, 6], [[4], []], [1.0, 1.0], [None, [0.5]], 0.9, [2] * DEPTH)
        tree.grow(DEPTH)
    assert {"_kv_write_kernel", "_trunk_kernel", "_tail_kernel", "_fork_kernel", "_draw_kernel"} <= set(launched)
    assert launched.count("_draw_kernel") == DEPTH
    assert launched.count("_kv_write_kernel") == (1 + DEPTH) * len(pools)


@torch.inference_mode()
def test_a_forward_waits_for_nothing(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of the forward that the engine flattens, within the buffers and beyond them."""
    decoder, pools = decoder_without_numbers()
    forward = GraphForward(decoder, max_length=64, depth=DEPTH, max_rows=8)
    slots = np.arange(NUM_SLOTS)
    for count in (3, 20):
        batch = flatten([causal_group([1] * count, 0, slots[:count], slots[:count])], META)
        with NoWaits(monkeypatch):
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
        lambda t: t.index_put_((t > 0,), torch.ones((), device=META)),
        lambda t: t.masked_scatter_(t > 0, t),
        lambda t: torch.zeros(3).copy_(t),
        lambda t: torch.zeros(3, dtype=torch.int32).copy_(t, non_blocking=True),
        lambda t: torch.zeros(3, 2)[:, 0].copy_(t, non_blocking=True),
        lambda t: t + torch.zeros(3).to(META),
        lambda t: t.copy_(torch.zeros(3)),
    ),
)
def test_what_waits_is_noticed(read: Callable[[torch.Tensor], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above cannot fail."""
    with torch.inference_mode(), NoWaits(monkeypatch), pytest.raises((RuntimeError, TypeError), match="meta"):
        read(torch.ones(3, device=META))
