"""What travels between the target and its draft server.

The target sends one `Round` a step, and never waits for an answer. The draft pushes
`Branches` and `Growth` as it builds. Token ids and probabilities travel as raw little-endian
arrays, not as pickles. Knows nothing about how bytes are moved (`transport.py`).
"""

import msgspec
import numpy as np

PROTOCOL_VERSION = 4


ELSEWHERE = -1
"""`Outcome.wanted` of a row that waits for another draft: what it gets is told as soon as it has come."""


class Law(msgspec.Struct, array_like=True, frozen=True):
    """The sparse distributions that sampled tokens were drawn from, one row a token."""

    token_ids: bytes  # [num_tokens, m] int32
    probs: bytes  # [num_tokens, m] float32, each row sums to 1; 0 pads


class Start(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A sequence the draft does not know: a new prompt, or a history after a restart."""

    seq_id: int
    token_ids: bytes  # [num_tokens] int32, prompt and what was generated so far
    drafts: list[int]  # in flight already (a history), usually empty
    temperature: float  # 0 for rows drafted by argmax
    top_k: int  # 0 is off
    top_p: float  # 1 is off


class Outcome(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """What a verification emitted, and the drafts that the target verifies next."""

    seq_id: int
    length: int  # committed tokens after `emitted`: a check that both sides agree
    emitted: list[int]  # empty: the drafts have come that ELSEWHERE spoke of
    drafts: list[int]
    wanted: int  # > 0: the row missed and waits for up to so many drafts (JIT); or ELSEWHERE


class Round(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """All that one step of the target has to say to the draft."""

    round_id: int
    starts: list[Start]
    outcomes: list[Outcome]
    finished: list[int]  # seq_ids to free
    depth: int  # drafts a row will take in the next round; 0: speculation does not pay now
    verify_seconds: float  # expected time until the next round
    closing: bool = False  # the target goes away
    sent_at: float = 0.0  # time.perf_counter() of the target; comparable on the same machine


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """A target asks a shared draft to work for it; new fields are added at the end only."""

    version: int
    model: str  # digests: see `draft/identity.py`
    vocabulary: str
    vocab_size: int  # token ids from here on are padding
    max_num_seqs: int
    name: str  # for the draft's log
    draft_dtype: str
    num_speculative_tokens: int
    tree_budget: int | str
    fan_out: str | list[int]
    saguaro_c: float | str
    draft_top_m: int


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=10):
    """The draft is loaded."""

    version: int
    num_kv_slots: int
    max_length: int  # tokens, the draft's context
    device: str
    dtype: str


class Failed(msgspec.Struct, array_like=True, frozen=True, tag=11):
    """The draft gives up; its process ends after this."""

    reason: str


class Branches(msgspec.Struct, array_like=True, frozen=True, tag=12):
    """Branches of one sequence that grow from now on: where they hang and which token each begins with.

    A branch hangs below the committed tokens up to `length`, then `trunk[:offset]`. Those that had rested
    bring the drafts that were built before.
    """

    seq_id: int
    round_id: int
    length: int
    trunk: list[int]
    offsets: list[int]  # [num_branches]
    token_ids: list[int]  # [num_branches]; empty: one branch that begins at the trunk's end
    depth: int = 0  # drafts that are planned for each: there should be time for them
    drafts: list[list[int]] = []  # [num_branches], of those that had rested; empty: they are new


class Growth(msgspec.Struct, array_like=True, frozen=True, tag=13):
    """One more token for every branch of the latest `Branches` of the sequence and the push's part."""

    seq_id: int
    token_ids: list[int]  # [num_branches]
    law: Law | None  # None: argmax tokens, their q is one-hot


class Report(msgspec.Struct, frozen=True):
    """What the draft has measured and decided, now and then: for whoever asks why."""

    outcomes: dict[str, list[list[float]]]  # "greedy", "sampled" -> P(position, rank of t*), [K + 1][ranks]
    acceptance: float  # of trunk drafts, all rows
    sharpness: dict[str, float]  # "greedy", "sampled" -> how far the draft's probabilities are taken at their word
    fan_out: list[int]  # branches by position, of the latest tree
    branches: int  # of the latest trees, each
    depth: int  # drafts of each branch
    share: float  # part of an expected verify that a tree may take
    step_seconds: list[float]  # expected for a step over 1, 8 and 32 tokens
    saguaro_c: float  # C that looks best


class Push(msgspec.Struct, array_like=True, frozen=True, tag=14):
    """What one step of the draft built, for all sequences, and what the draft has spent."""

    round_id: int  # the last round taken into account
    items: list[Branches | Growth]
    lost: list[int]  # seq_ids the draft cannot draft for; a `Start` may bring them back
    declined: list[int]  # seq_ids that wait for drafts which will not come in this round
    busy_seconds: float  # since its start: forwards of the model
    kv_usage: float  # share of KV slots in use, 0 to 1
    tree_seconds: list[float] = []  # of each tree step since the last push
    cancelled: int = 0  # branches given up since the last push before all their drafts were built
    report: Report | None = None
    part: int = 0  # of several drafts that share a tree, which one this is


class Idle(msgspec.Struct, array_like=True, frozen=True, tag=15):
    """Sign of life while there is nothing to build."""

    round_id: int


ToDraft = Round
ToTarget = Ready | Failed | Push | Idle

_encoder = msgspec.msgpack.Encoder()
_to_draft = msgspec.msgpack.Decoder(ToDraft)
_to_shared_draft = msgspec.msgpack.Decoder(Round | Hello)
_to_target = msgspec.msgpack.Decoder(ToTarget)


def encode(message: ToDraft | Hello | ToTarget) -> bytes:
    """Serialise a message."""
    return _encoder.encode(message)


def decode_to_draft(data: bytes) -> ToDraft:
    """Parse a message for the draft; raises `msgspec.MsgspecError` on anything else."""
    return _to_draft.decode(data)


def decode_to_shared_draft(data: bytes) -> Round | Hello:
    """Parse a message for a shared draft; raises `msgspec.MsgspecError` on anything else."""
    return _to_shared_draft.decode(data)


def decode_to_target(data: bytes) -> ToTarget:
    """Parse a message for the target; raises `msgspec.MsgspecError` on anything else."""
    return _to_target.decode(data)


def pack_tokens(token_ids) -> bytes:
    """int32 little-endian bytes of a sequence of token ids."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_tokens(data: bytes) -> np.ndarray:
    """The inverse of `pack_tokens`: [num_tokens] int32, read-only."""
    return np.frombuffer(data, dtype="<i4")


def pack_law(token_ids: np.ndarray, probs: np.ndarray) -> Law:
    """Make a `Law` of [num_tokens, m] token ids and probabilities."""
    return Law(token_ids.astype("<i4").tobytes(), probs.astype("<f4").tobytes())


def unpack_law(law: Law, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and probabilities of a `Law`, each [num_tokens, m]."""
    token_ids = np.frombuffer(law.token_ids, dtype="<i4").reshape(num_tokens, -1)
    probs = np.frombuffer(law.probs, dtype="<f4").reshape(num_tokens, -1)
    return token_ids, probs
