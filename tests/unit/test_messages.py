"""What travels between target and draft."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ssd import messages
from vllm_ssd.messages import Branches, Failed, Growth, Idle, Outcome, Push, Ready, Round, Start

LAW = messages.pack_law(np.array([[3, 1], [2, 0]]), np.array([[0.75, 0.25], [1.0, 0.0]]))
TO_DRAFT = [
    Round(0, [], [], [], 0, 0.0),
    Round(
        7,
        [Start(1, messages.pack_tokens([5, 6]), [9], 0.8, 40, 0.95)],
        [Outcome(2, 12, [4, 5], [6, 7], 0), Outcome(3, 5, [1], [], 4)],
        [8, 9],
        5,
        0.03,
    ),
    Round(8, [], [], [], 0, 0.0, closing=True),
]
TO_TARGET = [
    Ready(messages.PROTOCOL_VERSION, 1000, 2048, "cpu", "float32"),
    Failed("no such model"),
    Idle(3),
    Push(4, [], [], [], 0.0, 0.0),
    Push(5, [Branches(1, 5, 9, [2, 3], [0, 2], [8, 9]), Growth(1, [4, 5], None)], [3], [2], 1.5, 0.5, [0.25, 0.5], 7),
    Push(6, [Growth(2, [6, 7], LAW)], [], [], 1.5, 0.5),
]
small = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("message", TO_DRAFT, ids=repr)
def test_the_draft_reads_what_the_target_wrote(message: Round) -> None:
    """A field of a message to the draft is lost or changed on its way."""
    assert messages.decode_to_draft(messages.encode(message)) == message


@pytest.mark.parametrize("message", TO_TARGET, ids=lambda message: type(message).__name__)
def test_the_target_reads_what_the_draft_wrote(message: Any) -> None:
    """A message of the draft comes back as another type, or with other fields."""
    found = messages.decode_to_target(messages.encode(message))
    assert type(found) is type(message)
    assert found == message


@pytest.mark.parametrize("message", TO_TARGET, ids=lambda message: type(message).__name__)
def test_the_draft_refuses_messages_for_the_target(message: Any) -> None:
    """A message that came the wrong way round is taken for a round."""
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_to_draft(messages.encode(message))


@pytest.mark.parametrize("message", TO_DRAFT, ids=lambda message: str(message.round_id))
def test_the_target_refuses_messages_for_the_draft(message: Round) -> None:
    """A round that came back is taken for a push."""
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_to_target(messages.encode(message))


@pytest.mark.parametrize(
    "fields",
    (
        [99, 1],  # an unknown type
        [14, 1, [[11, "no item of a push"]], [], 0.0, 0.0],
        [14, "1", [], [], 0.0, 0.0],  # a word for a number
        [3, 1, [], [], [], 5],  # a field short
        {"round_id": 1},
    ),
)
def test_wrong_fields_are_refused(fields: Any) -> None:
    """A message of another version is half understood."""
    data = msgspec.msgpack.encode(fields)
    for decode in (messages.decode_to_draft, messages.decode_to_target):
        with pytest.raises(msgspec.MsgspecError):
            decode(data)


@given(data=st.binary(max_size=40))
def test_garbage_is_refused_in_one_way(data: bytes) -> None:
    """Bytes from elsewhere raise something that the callers do not catch."""
    for decode, known in ((messages.decode_to_draft, Round), (messages.decode_to_target, (Ready, Failed, Push, Idle))):
        try:
            assert isinstance(decode(data), known)
        except msgspec.MsgspecError:
            pass


@given(token_ids=st.lists(small, max_size=50))
def test_tokens_survive(token_ids: list[int]) -> None:
    """A token id is changed by packing."""
    assert messages.unpack_tokens(messages.pack_tokens(token_ids)).tolist() == token_ids


@given(shape=st.tuples(st.integers(1, 5), st.integers(1, 8)), seed=st.integers(0, 100))
def test_laws_survive_bit_by_bit(shape: tuple[int, int], seed: int) -> None:
    """The verifier gets other probabilities than the draft drew from."""
    generator = np.random.default_rng(seed)
    token_ids = generator.integers(0, 2**17, shape)
    probs = generator.dirichlet(np.ones(shape[1]), shape[0]).astype(np.float32)
    law = messages.pack_law(token_ids, probs)
    growth = messages.decode_to_target(messages.encode(Push(0, [Growth(0, [1], law)], [], [], 0.0, 0.0))).items[0]
    found_ids, found_probs = messages.unpack_law(growth.law, shape[0])
    assert found_ids.tolist() == token_ids.tolist()
    assert found_probs.tobytes() == probs.tobytes()


def test_messages_cannot_be_changed() -> None:
    """A message that two places hold is changed by one of them."""
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        TO_DRAFT[0].round_id = 3
