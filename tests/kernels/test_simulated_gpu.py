"""The draft on a GPU that is simulated: its process, its engines, graphs, staging and events, as they stand.

Fails where a kernel or a graph goes to another device, where what is captured depends on more than its static
buffers or reads something back, where pinned memory is read too early or written too soon, and where a round waits.
"""

import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from unit.test_model import GENERAL, assert_equals_plain, tiny

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.devices import DraftDevice, use_device
from vllm_ssd.draft import graph_buffers, kernel_trial, shared_server
from vllm_ssd.draft.batch import causal_group, flatten
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.draft.engine_choice import make_engine
from vllm_ssd.draft.forecast import Part
from vllm_ssd.draft.graph_engine import GraphEngine
from vllm_ssd.draft.graph_forward import GraphForward
from vllm_ssd.draft.graph_round import GraphRound
from vllm_ssd.draft.graph_runner import GraphRunner
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.draft.pool_attention import PoolDecoder
from vllm_ssd.draft.server import ServerSettings, _load
from vllm_ssd.draft.shared_engine import SharedEngine
from vllm_ssd.integration import dense_laws
from vllm_ssd.kernels import sparse_q
from vllm_ssd.messages import Outcome, Push, Ready, decode_to_target
from vllm_ssd.tree import TokenLaw

from . import test_graph_engine, test_graph_round
from . import test_random_courses as random_courses
from .simulated_gpu import SimulatedGpu
from .simulated_tensor import DEVICE, GpuError, GpuTensor
from .test_graph_engine import DRAFT, FAN_OUTS, WHOLE, Side, start
from .test_graph_forward import check_replays
from .test_graph_round import BUDGET, DEPTH, PROMPTS, chosen, feed, planted

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU is here")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGpu]:
    """A machine with GPUs; the thread uses the first, as any does that was told nothing."""
    gpu = SimulatedGpu()
    gpu.install(monkeypatch)
    monkeypatch.setattr(graph_buffers, "MAX_FORWARD_ROWS", 96)  # to be quick
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # its operations are small
    with gpu:
        yield gpu
    torch.set_num_threads(threads)


@pytest.fixture
def gpu(machine: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    """The thread uses the draft's GPU, and so do tests that other files hold."""
    use_device(str(DEVICE))
    make, on_device = test_graph_round.make, test_graph_engine.on_device

    def warmed_up(*args, **options) -> GraphRound:
        graph_round = make(*args, **options)
        with torch.inference_mode():
            graph_round.warm_up()
        return graph_round

    monkeypatch.setattr(test_graph_round, "DEVICE", DEVICE)
    monkeypatch.setattr(test_graph_round, "make", warmed_up)
    monkeypatch.setattr(test_graph_engine, "on_device", functools.partial(on_device, device=DEVICE))
    return machine


@pytest.fixture
def model(gpu: SimulatedGpu) -> DraftModel:
    config = SaguaroConfig(DRAFT, 3, tree_budget=BUDGET, draft_dtype="float32")
    model = DraftModel(config, DEVICE, vocab_size=4000)
    model.allocate_kv_cache(None, most_useful=1024)
    return model


# ---- the process and its engines ----


class Sent(list):
    """A channel that keeps what it is told."""

    def send(self, data: bytes) -> None:
        self.append(decode_to_target(data))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_the_process_works_on_its_own_device(
    machine: SimulatedGpu, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels, graphs and events go to the first GPU, the target's, unless the thread is told otherwise."""
    options = {"tree_budget": 5, "draft_dtype": dtype, "draft_top_m": 8}
    settings = ServerSettings(
        config=dataclasses.asdict(SaguaroConfig(DRAFT, 3, **options)),
        address="",
        directory="",
        device=str(DEVICE),
        cores=[],
        vocab_size=4000,
        max_num_seqs=4,
        max_model_len=64,
        parent=0,
    )
    sent = Sent()
    with caplog.at_level(logging.INFO, "vllm_ssd.draft"):
        engine = _load(settings, sent)
    assert machine.current_device == DEVICE.index
    assert isinstance(engine, GraphEngine) and "trees grow on the device" in caplog.text
    assert [(type(message), message.device) for message in sent] == [(Ready, str(DEVICE))]
    compiled = len(machine.compiled)
    sides = [Side(test_graph_engine.plain()), Side(engine)]
    for number, outcomes in enumerate(([], [Outcome(0, 59, [3999], [], 0)]), 1):
        starts = [start(0, [*range(5, 60), 308, 907, 12])] if number == 1 else []
        expected, mine = (side.play(number, starts, outcomes) for side in sides)
        assert mine[0] and (mine == expected or dtype == "bfloat16")  # the other side has float32
    assert machine.replays > 10
    assert len(machine.compiled) == compiled  # nothing while requests wait


def test_where_the_thread_uses_another_device_the_plain_forward_is_taken(
    machine: SimulatedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """The simulation takes any device, and the test above cannot fail."""
    model, config = test_graph_engine.model_and_config(DEVICE)
    assert "without kernels and CUDA graphs, and slower: GpuError: _kv_write_kernel goes to cuda:0" in caplog.text
    assert type(make_engine(model, config, 600, WHOLE, 4, 64)) is DraftEngine


@pytest.mark.parametrize("part", (WHOLE, Part(1, 2)), ids=("a whole tree", "a part of it"))
def test_rounds_of_the_engine(gpu: SimulatedGpu, part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round reads what moved since the capture, or has not come yet, or was drawn with the numbers of another."""
    test_graph_engine.test_rounds_are_those_of_the_plain_engine(part, monkeypatch)
    assert gpu.replays > 10


def test_other_rounds_of_the_engine(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that stop and go on, outcomes in the middle of one, more sequences than the buffers hold, laws."""
    test_graph_engine.test_an_outcome_in_the_middle_of_a_tree_costs_no_slot()
    test_graph_engine.test_more_sequences_than_the_buffers_hold_take_the_plain_step()
    test_graph_engine.test_sampled_tokens_come_with_laws_that_hold_them()
    test_graph_engine.test_fewer_outcomes_than_rows_leave_no_slots_behind(monkeypatch)
    test_graph_engine.test_branches_of_a_shallow_plan_grow_when_the_verification_is_overdue(monkeypatch)
    assert gpu.replays > 50  # by graphs, not by the plain step


@pytest.mark.parametrize("seed", range(2))
def test_random_courses(gpu: SimulatedGpu, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes that come while steps are under way."""
    monkeypatch.setattr(random_courses, "DEVICE", DEVICE)
    random_courses.test_random_courses(seed, 600, monkeypatch)
    assert gpu.replays > 50


def test_trees_step_by_step(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that steps from the host draws from tensors of the host."""
    monkeypatch.setenv("VLLM_SSD_DEVICE_ROUNDS", "off")
    model, config = test_graph_engine.model_and_config(DEVICE)
    sides = [Side(test_graph_engine.plain()), Side(make_engine(model, config, 600, WHOLE, 4, 64))]
    starts = [start(0, [308, 907, 12, 44]), start(1, [55, 2, 3001])]
    trees = [side.play(1, starts) for side in sides]
    assert trees[0] == trees[1] and trees[0][1]
    assert gpu.replays > 10
    for side in sides:
        side.play(2, starts=[start(2, [7, 8, 9], temperature=1.0)], finished=[0, 1])
    assert len(sides[1].laws) == len(sides[0].laws) > 3


def test_the_process_of_a_shared_draft(machine: SimulatedGpu) -> None:
    """The same of a draft that several targets share."""
    config, hub = SaguaroConfig(DRAFT, 1, draft_dtype="float32"), types.SimpleNamespace(address="here")
    server = shared_server.load(config, DraftDevice(str(DEVICE)), hub, max_targets=2)
    assert machine.current_device == DEVICE.index
    assert isinstance(server._engine._model._decoder, GraphForward) and machine.launches


@pytest.mark.parametrize("num_drafts", (3, 20))
def test_a_draft_for_several_targets(gpu: SimulatedGpu, num_drafts: int) -> None:
    """It was loaded before it knew how far they draft: a deeper tree ends it for all."""
    model = test_graph_engine.loaded(SaguaroConfig(DRAFT, 1, draft_dtype="float32"), DEVICE)
    options = {"tree_budget": 5, "draft_dtype": "float32", "draft_top_m": 8}
    config = SaguaroConfig(DRAFT, num_drafts, **options)
    shared, pushes = SharedEngine(model, 600), []
    shared.admit("a", config, 4)

    class Port:
        def begin_round(self, message) -> None:
            shared.begin_round("a", message)

        def step(self) -> bool:
            worked = shared.step()
            pushes.extend(push for _, push in shared.take_pushes())
            return worked or bool(pushes)

        def take_push(self) -> Push | None:
            return pushes.pop(0) if pushes else None

    plain = DraftEngine(test_graph_engine.loaded(config, torch.device("cpu")), config, 600)
    expected, mine = (
        side.play(1, [start(0, [308, 907, 12, 44])], depth=num_drafts) for side in map(Side, (plain, Port()))
    )
    assert mine == expected and {len(chain) for chain in mine[0].values()} == {num_drafts + 1}
    assert gpu.replays > 3


def test_without_kernels(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever meets a kernel that breaks the GPU cannot do without."""
    monkeypatch.setenv("VLLM_SSD_KERNELS", "off")
    model, config = test_graph_engine.model_and_config(DEVICE)
    engine = make_engine(model, config, 600, WHOLE, 4, 64)
    sides = [Side(test_graph_engine.plain()), Side(engine)]
    expected, mine = (side.play(1, [start(0, [308, 907, 12, 44])]) for side in sides)
    assert mine == expected and mine[0]
    assert type(engine) is DraftEngine and not gpu.launches and not gpu.replays
    monkeypatch.setenv("VLLM_SSD_KERNELS", "none")
    with pytest.raises(ValueError, match="VLLM_SSD_KERNELS is 'none'; it must be auto or off"):
        model.warm_up()


@pytest.mark.parametrize("kernel", ("trunk", "draw"))
def test_a_kernel_that_breaks_the_device_ends_the_start(gpu: SimulatedGpu, kernel: str) -> None:
    """The plain forward is taken, which cannot run either, or the draft says that it is ready and dies."""
    gpu.faulty = kernel
    with pytest.raises(RuntimeError, match="cuda:1 is lost to this process: an illegal .* VLLM_SSD_KERNELS=off"):
        model, config = test_graph_engine.model_and_config(DEVICE)
        make_engine(model, config, 600, WHOLE, 4, 64)


def test_a_fault_that_nobody_waited_for_ends_the_start(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft says that it is ready, and dies of the first request."""
    model, config = test_graph_engine.model_and_config(DEVICE)
    monkeypatch.setattr(kernel_trial, "round_difference", lambda *_: setattr(gpu, "lost", True))
    with pytest.raises(RuntimeError, match="cuda:1 is lost"):
        make_engine(model, config, 600, WHOLE, 4, 64)


def test_a_capture_that_fails_leaves_the_stream(gpu: SimulatedGpu) -> None:
    """All that follows goes on on the capture's stream, beside what is on the usual one."""
    numbers = torch.ones(3, device=DEVICE)
    with pytest.raises(GpuError, match="not permitted"):
        GraphRunner(DEVICE).run("read", lambda: numbers.cpu())
    assert torch.cuda.current_stream() == "default"


@pytest.mark.parametrize("name", GENERAL)
def test_drafts_of_other_shapes(gpu: SimulatedGpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The general path makes tensors on the host, or mixes devices."""
    model, reference = tiny(name).to(DEVICE), tiny(name)
    forward, decoder = PoolDecoder.forward, PoolDecoder(model)
    pools: list[torch.Tensor] = []

    def on_device(self: PoolDecoder, batch, host_pools) -> torch.Tensor:
        pools[:] = pools or [pool.to(DEVICE) for pool in host_pools]
        return forward(self, flatten(batch.groups, DEVICE, batch.wanted), pools).cpu()

    monkeypatch.setattr(PoolDecoder, "forward", on_device)
    assert_equals_plain(decoder, reference)


def test_the_pool_is_a_share_of_what_is_free(machine: SimulatedGpu) -> None:
    """The KV pool takes all, or the memory of the host."""
    config = SaguaroConfig(DRAFT, 3, draft_dtype="float32")
    model = DraftModel(config, DEVICE, vocab_size=4000)
    slot = 2 * 2 * 2 * 64 * 4  # layers, keys and values, heads, head size, float32
    machine.free_bytes, machine.cached_bytes = 1000 * slot, 500 * slot
    assert model.allocate_kv_cache(None, most_useful=10_000) == 850
    assert model.allocate_kv_cache(None, most_useful=700) == 700
    assert all(isinstance(pool, GpuTensor) and pool.shape == (4, 700, 64) for pool in model.pools)
    assert model.allocate_kv_cache(900 * slot, most_useful=700) == 900
    with pytest.raises(ValueError, match=f"draft_kv_cache_memory_bytes={1001 * slot} is more than the {1000 * slot}"):
        model.allocate_kv_cache(1001 * slot, most_useful=700)


# ---- trees, laws and forwards ----


@pytest.mark.parametrize("changes", ({}, {"vocab_size": 8 << 20}), ids=("at once", "logits in parts"))
def test_trees(gpu: SimulatedGpu, model: DraftModel, changes: dict) -> None:
    """The same of one tree."""
    test_graph_round.test_the_tree_is_the_engines(model, changes)
    assert gpu.replays > 3


def test_sampled_rows(gpu: SimulatedGpu, model: DraftModel) -> None:
    """Each replay draws with the same number, or from the law of the capture."""
    test_graph_round.test_sampled_rows_carry_the_law_they_were_drawn_from(model)
    test_graph_round.test_branches_of_a_sequence_draw_independently(model)
    test_graph_round.test_steps_of_a_branch_draw_independently(model)
    assert gpu.replays > 3


def test_forwards(gpu: SimulatedGpu) -> None:
    """The forward that the engine flattens, likewise."""
    check_replays(DEVICE)
    assert gpu.replays == 3


# ---- what the host waits for ----


@pytest.mark.parametrize("warm", (True, False), ids=("graphs", "launches"))
def test_a_round_waits_for_nothing(gpu: SimulatedGpu, model: DraftModel, warm: bool) -> None:
    """Some step reads a token, a count or a mask back: the GPU idles while the host makes up its mind."""
    graph_round = test_graph_round.make(model)
    graph_round._runner = graph_round._runner if warm else GraphRunner(DEVICE, enabled=False)
    with torch.inference_mode():
        gpu.waits.clear(), gpu.launches.clear()
        first_rows, left = feed(graph_round, PROMPTS)
        known = np.zeros((1, 16), dtype=np.int32), np.zeros((1, 16), dtype=np.float32)
        graph_round.add_candidates(*known)
        for counts in (None, [2, 1, 1, 2]):
            by_device = chosen(PROMPTS, left, first_rows, acceptance=None)
            for place, (planting, rates) in enumerate(zip(by_device, ([0.5] * 3, None, None))):
                own = counts and counts[: len(planting.choice.rows)]
                choice = dataclasses.replace(planting.choice, acceptance=rates, counts=own)
                by_device[place] = dataclasses.replace(planting, choice=choice, temperature=float(place))
            graph_round.plant(by_device, [2] * DEPTH, 0.9)
            graph_round.grow(DEPTH)
        bets = [[(0, 7)] * BUDGET] * 2
        by_host = [dataclasses.replace(planting, begun=1) for planting in planted(PROMPTS, left, bets)]
        graph_round.plant([*by_host, by_device[2]], [1])
        graph_round.grow()
    assert not gpu.waits
    assert gpu.launches.count("draw") == (0 if warm else 2 * DEPTH + 1)


def test_a_forward_waits_for_nothing(gpu: SimulatedGpu) -> None:
    """The same of the forward that the engine flattens, within the buffers and beyond them."""
    model = test_graph_engine.loaded(SaguaroConfig(DRAFT, 3, draft_dtype="float32"), DEVICE, num_slots=2000)
    compiled = len(gpu.compiled)
    for lengths in ([3], [97], [333], [120, 121], [2] * 40, [1] * 300, [5] * 301):
        ends = np.cumsum([0, *lengths])
        slots = [np.arange(begin, end) for begin, end in zip(ends, ends[1:])]
        groups = [causal_group([1] * len(own), 0, own, own) for own in slots]
        gpu.waits.clear()
        with torch.inference_mode():
            assert model.forward(flatten(groups, DEVICE)).shape == (sum(lengths), 4096)
        assert not gpu.waits
        assert len(gpu.compiled) == compiled, f"kernels are compiled for {lengths}"
    assert isinstance(model._decoder, GraphForward)


@pytest.fixture
def waits(gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What waits while trees are built, but for the events of their steps."""
    found, step = [], GraphEngine.step

    def watched(self: GraphEngine) -> bool:
        gpu.waits.clear()
        works = step(self)
        found.extend(gpu.waits)
        return works

    monkeypatch.setattr(GraphEngine, "step", watched)
    return found


@pytest.mark.parametrize("fan_out", FAN_OUTS, ids=str)
@pytest.mark.parametrize("part", (WHOLE, Part(1, 2)), ids=("a whole tree", "a part of it"))
def test_the_engine_waits_for_its_steps_alone(
    waits: list[str], fan_out: str | list[int], part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A glue is read back before the branches are chosen, or a draft before the next one."""
    test_graph_engine.test_no_candidates_are_waited_for(fan_out, part, monkeypatch)
    assert not waits


def test_the_engine_waits_for_no_glue_beside_trees(waits: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same while other trees grow."""
    test_graph_engine.test_a_request_that_comes_while_trees_grow(monkeypatch)
    assert not waits


def test_what_does_not_fit_a_round_waits(waits: list[str]) -> None:
    """The tests above cannot fail."""
    test_graph_engine.test_more_sequences_than_the_buffers_hold_take_the_plain_step()
    assert waits


@torch.inference_mode()
def test_laws_at_the_target_wait_for_nothing(gpu: SimulatedGpu) -> None:
    """The target waits for its forward before it has verified."""
    laws = [TokenLaw(np.array([3, 7]), np.array([0.25, 0.75], dtype=np.float32)), dense_laws.one_hot(5)]
    kernel = dense_laws.tried_dense(10, DEVICE)
    gpu.waits.clear()
    gpu.launches.clear()
    dense = kernel(*dense_laws.sparse(laws, DEVICE), 10)
    assert not gpu.waits and gpu.launches == ["dense"]
    assert dense.tolist() == [[0, 0, 0, 0.25, 0, 0, 0, 0.75, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]]


@torch.inference_mode()
@pytest.mark.parametrize("fault", ("wrong", "raises"))
def test_a_kernel_of_laws_that_goes_wrong_is_not_taken(
    gpu: SimulatedGpu, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The target verifies with another law than drafts were drawn from."""
    right = sparse_q.dense_rows

    def broken(token_ids: torch.Tensor, probs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no such instruction")
        return right(token_ids[:, :63].contiguous(), probs[:, :63].contiguous(), out)

    monkeypatch.setattr(sparse_q, "dense_rows", broken)
    assert dense_laws.tried_dense(4096, DEVICE) is dense_laws.dense_torch
    reason = {"wrong": "its rows differ", "raises": "RuntimeError: no such instruction"}[fault]
    assert f"without a Triton kernel: {reason}" in caplog.text


def test_a_kernel_of_laws_that_breaks_the_device_ends_the_start(
    gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target goes on with a GPU that it cannot use, and whoever knows of it cannot do without the kernel."""
    gpu.faulty = "dense"
    with pytest.raises(RuntimeError, match="cuda:1 is lost to this process: .* VLLM_SSD_KERNELS=off"):
        dense_laws.tried_dense(4096, DEVICE)
    monkeypatch.setenv("VLLM_SSD_KERNELS", "off")
    assert dense_laws.tried_dense(4096, DEVICE) is dense_laws.dense_torch


# ---- the simulation notices ----


@pytest.mark.parametrize(
    "read",
    (
        lambda t: t[0].item(),
        lambda t: t.cpu(),
        lambda t: bool(t.any()),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: t.index_put_((t > 0,), torch.ones((), device=DEVICE)),
        lambda t: t.masked_scatter_(t > 0, t),
        lambda t: torch.zeros(3).copy_(t),
        lambda t: torch.zeros(3).copy_(t, non_blocking=True),
        lambda t: torch.zeros(3, pin_memory=True).copy_(t),
        lambda t: torch.zeros(3, dtype=torch.int32, pin_memory=True).copy_(t, non_blocking=True),
        lambda t: torch.zeros(3, 2, pin_memory=True)[:, 0].copy_(t, non_blocking=True),
        lambda t: torch.zeros(3).to(DEVICE),
        lambda t: torch.zeros(3).to(DEVICE, non_blocking=True),
        lambda t: torch.zeros(3, pin_memory=True).to(DEVICE),
        lambda t: t.copy_(torch.zeros(3)),
    ),
)
@torch.inference_mode()
def test_what_waits_is_noticed(gpu: SimulatedGpu, read: Callable[[torch.Tensor], object]) -> None:
    """The tests above cannot fail."""
    tensor = torch.ones(3, device=DEVICE)
    assert not gpu.waits
    read(tensor)
    assert len(gpu.waits) == 1
    with pytest.raises(GpuError, match="not permitted while a graph is captured"):
        GraphRunner(DEVICE).run("read", lambda: read(tensor))
    with pytest.raises(RuntimeError):  # a wait, too, but PyTorch itself refuses it here
        torch.tensor([1.0], device=DEVICE)


@torch.inference_mode()
def test_numbers_are_late(gpu: SimulatedGpu) -> None:
    """What is read before its event has passed looks right."""
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query() and host.tolist() != [1.0] * 3
    assert event.query() and host.tolist() == [1.0] * 3
    assert not gpu.waits


@torch.inference_mode()
def test_an_event_of_another_device_has_passed(gpu: SimulatedGpu) -> None:
    """Who waits for it waits for nothing."""
    use_device("cuda:0")
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert event.query() and host.tolist() != [1.0] * 3


@torch.inference_mode()
def test_memory_that_is_written_while_it_is_read_is_noticed(gpu: SimulatedGpu) -> None:
    """A staging buffer whose turn comes too soon carries the numbers of the next copy."""
    pinned, event = torch.zeros(3, pin_memory=True), torch.cuda.Event()
    pinned.to(DEVICE, non_blocking=True)
    event.record()
    pinned.numpy()[0] = 1.0
    with pytest.raises(GpuError, match="could still read it"):
        event.synchronize()


@torch.inference_mode()
def test_what_a_graph_cannot_follow_is_noticed(gpu: SimulatedGpu) -> None:
    """Numbers of the host, tensors that take the place of others, or what a graph leaves behind, pass for static."""
    runner = GraphRunner(DEVICE)
    buffer, out, count = (torch.zeros(3, device=DEVICE) for _ in range(3))
    numbers = iter((2.0, 3.0, 4.0))
    for _ in range(2):
        runner.run("host", lambda: out.copy_(buffer + next(numbers)))
    assert out.cpu().tolist() == [3.0] * 3
    tensors = [torch.full((3,), value, device=DEVICE) for value in (5.0, 6.0)]
    for moved in tensors:
        runner.run("moved", lambda moved=moved: out.copy_(moved))
    assert out.cpu().tolist() == [5.0] * 3
    del tensors, moved
    with pytest.raises(GpuError, match="memory that was freed"):
        runner.run("moved", lambda: None)
    kept = []
    runner.run("kept", lambda: kept.append(buffer + 1.0))
    runner.run("kept", lambda: kept.append(buffer + 1.0))
    assert kept[0].cpu().tolist() == [1.0] * 3 != kept[1].cpu().tolist()
    for _ in range(3):
        runner.run("count", lambda: count.add_(1.0))
    assert count.cpu().tolist() == [3.0] * 3  # a capture runs nothing
