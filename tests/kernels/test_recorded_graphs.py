"""What would be captured as CUDA graphs is recorded and replayed: trees and logits stay what they are.

Fails where a function that is captured depends on more than its static buffers, or reads the device back.
"""

import pytest
import torch

from vllm_ssd.draft.graph_engine import GraphEngine
from vllm_ssd.draft.graph_round import GraphRound
from vllm_ssd.draft.graph_runner import GraphRunner

from . import test_graph_engine, test_graph_round
from .recorded_graphs import RecordedGraphs
from .test_graph_engine import WHOLE, Part
from .test_graph_forward import CPU, check_replays

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="real graphs are captured here")
model = test_graph_round.model


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    """Every runner records, when it is warmed up over padding as on a GPU, and replays."""
    make, on_device = test_graph_round.make, test_graph_engine.on_device

    def warmed_round(*args, **options) -> GraphRound:
        graph_round = make(*args, **options)
        with torch.inference_mode():
            graph_round.warm_up()
        return graph_round

    def warmed_engine(*args, **options) -> GraphEngine:
        engine = on_device(*args, **options)
        with torch.inference_mode():
            engine._round.warm_up()
        return engine

    recorded = RecordedGraphs()
    recorded.install(monkeypatch)
    monkeypatch.setattr(test_graph_round, "make", warmed_round)
    monkeypatch.setattr(test_graph_engine, "on_device", warmed_engine)
    return recorded


@pytest.mark.parametrize("part", (WHOLE, Part(1, 2)), ids=("a whole tree", "a part of it"))
def test_rounds_of_the_engine(graphs: RecordedGraphs, part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round reads what moved since the capture, or draws with the numbers of an earlier one."""
    test_graph_engine.test_rounds_are_those_of_the_plain_engine(part, monkeypatch)
    assert graphs.replays > 10


@pytest.mark.parametrize("changes", ({}, {"vocab_size": 8 << 20}), ids=("at once", "logits in parts"))
def test_trees(graphs: RecordedGraphs, model, changes: dict) -> None:
    """The same of one tree."""
    test_graph_round.test_the_tree_is_the_engines(model, changes)
    assert graphs.replays > 3


def test_sampled_rows(graphs: RecordedGraphs, model) -> None:
    """Each replay draws with the same number, or from the law of the capture."""
    test_graph_round.test_sampled_rows_carry_the_law_they_were_drawn_from(model)
    test_graph_round.test_branches_of_a_sequence_draw_independently(model)
    test_graph_round.test_steps_of_a_branch_draw_independently(model)
    assert graphs.replays > 3


def test_forwards(graphs: RecordedGraphs) -> None:
    """The forward that the engine flattens, likewise."""
    check_replays(CPU)
    assert graphs.replays == 3


# ---- the recording notices ----


def test_what_a_graph_cannot_follow_is_noticed(graphs: RecordedGraphs) -> None:
    """Numbers of the host, or tensors that take the place of others, would pass for static."""
    runner, buffer, out = GraphRunner(CPU), torch.zeros(3), torch.zeros(3)
    numbers = iter((2.0, 3.0))
    for _ in range(2):
        runner.run("host", lambda: out.copy_(buffer + next(numbers)))
    assert out.tolist() == [2.0] * 3
    for value in (5.0, 6.0):
        moved = torch.full((3,), value)
        runner.run("moved", lambda moved=moved: out.copy_(moved))
    assert out.tolist() == [5.0] * 3


@pytest.mark.parametrize("read", (lambda t: t[0].item(), lambda t: t.nonzero(), lambda t: t + torch.tensor([1.0])))
def test_what_cannot_be_captured_is_refused(graphs: RecordedGraphs, read) -> None:
    """A step that waits for the device, or copies from the host, would pass."""
    with pytest.raises(RuntimeError, match="a capture on a GPU would fail"):
        GraphRunner(CPU).run("read", lambda: read(torch.ones(1)))
