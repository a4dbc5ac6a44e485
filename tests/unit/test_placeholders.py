"""Placeholder drafts are taken out of a step, with the grammar's rows that belong to them."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from vllm_ssd.integration.placeholders import without_placeholder_rows, without_placeholders


@dataclass
class Step:
    """The fields of vLLM's SchedulerOutput that matter here."""

    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    total_num_scheduled_tokens: int = field(default=0)

    def __post_init__(self) -> None:
        self.total_num_scheduled_tokens = self.total_num_scheduled_tokens or sum(self.num_scheduled_tokens.values())


@dataclass
class Grammars:
    """The same of its GrammarOutput."""

    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray


def test_a_step_without_placeholders_is_handed_on() -> None:
    """Every step pays for a copy."""
    step = Step({"a": 3, "b": 1}, {"a": [5, 6]})
    assert without_placeholders(step) is step
    grammars = Grammars(["a"], np.zeros((3, 1), np.int32))
    assert without_placeholder_rows(grammars, {"a": [5, 6]}, {"a": [5, 6]}) is grammars
    assert without_placeholder_rows(None, {"a": [-1]}, {}) is None


def test_placeholders_go_and_the_scheduler_keeps_its_own() -> None:
    """Tokens that do not exist are computed, or the scheduler miscounts what was refused."""
    step = Step({"a": 3, "b": 4, "c": 7}, {"a": [5, 6], "b": [-1, -1, -1]})
    ours = without_placeholders(step)
    assert ours.num_scheduled_tokens == {"a": 3, "b": 1, "c": 7} and ours.total_num_scheduled_tokens == 11
    assert ours.scheduled_spec_decode_tokens == {"a": [5, 6]}
    assert step.num_scheduled_tokens["b"] == 4 and step.total_num_scheduled_tokens == 14
    assert step.scheduled_spec_decode_tokens["b"] == [-1, -1, -1]


@pytest.mark.parametrize("order", (["a", "b", "c"], ["b", "a", "c"], ["c", "b"]))
def test_each_row_keeps_its_own_mask(order: list[str]) -> None:
    """Requests after a placeholder get the masks of others."""
    scheduled = {"a": [5, 6], "b": [-1, -1, -1]}
    names = [f"{req_id}{i}" for req_id in order for i in range(1 + len(scheduled.get(req_id, ())))]
    masks = np.array([[hash(name) % 1000] for name in names], dtype=np.int32)
    found = without_placeholder_rows(Grammars(order, masks), scheduled, {"a": [5, 6]}).grammar_bitmask
    wanted = [name for name in names if name not in ("b1", "b2", "b3")]
    assert found.tolist() == [[hash(name) % 1000] for name in wanted]
