"""What the host says of a round on the device, and what it hears of its steps.

Shapes: R rows (branches of all sequences), D steps, W candidates of a row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Choice:
    """By what the device chooses the bets of a sequence."""

    trunk: Sequence[int]  # drafts in flight
    rows: Sequence[int]  # of the candidates after the committed tokens, and after each draft: [len(trunk) + 1]
    sharpness: float = 1.0  # by what logits are multiplied before they are probabilities
    acceptance: Sequence[float] | None = None  # of each draft, if they were drawn: [len(trunk)]
    counts: Sequence[int] | None = None  # of bets at each position, [len(trunk) + 1]; None: the most probable ones


@dataclasses.dataclass(frozen=True)
class Planting:
    """One sequence whose branches grow."""

    place: int  # its row in the table of trunks
    length: int  # committed tokens
    tail_slots: (
        np.ndarray
    )  # [n, at most D] integers, slots of its n branches: those that hold KV, and those they may use
    bets: Sequence[tuple[int, int]] = ()  # of each branch: tokens above it beyond `length`, its latest token
    choice: Choice | None = None  # instead of bets
    begun: int = 0  # slots of a branch that hold KV
    position: int = 0  # of the first draft that is drawn, among the drafts of a chain
    temperature: float = 0.0  # 0: argmax
    top_k: int = 0
    top_p: float = 1.0
    saguaro_c: float = 1.0
    seed: int = 0  # of the draws; another one for each sequence and round


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step of a round drew; rows in the order they were planted."""

    number: int  # 0 for the first
    tokens: np.ndarray  # [R] int32
    token_ids: np.ndarray  # [R, W] int32, best first
    probs: np.ndarray  # [R, W] float32, the law of `tokens`; one-hot at rank 0 for greedy rows
    values: np.ndarray  # [R, W] float32, logits: the candidates after the row's previous token
    above: np.ndarray  # [R] int32, tokens above the branch; 0 where the device found no bet
    bets: np.ndarray  # [R] int32, the tokens that the branches began with in this round


def tail_columns(plantings: Sequence[Planting], depth: int) -> tuple[np.ndarray, np.ndarray]:
    """The slots of all rows, [R, depth] int32; of each how many hold KV, how many there are, and its draft's position.

    The latter are [3, R] int32.
    """
    counts = [len(planting.tail_slots) for planting in plantings]
    slots, first = np.zeros((sum(counts), depth), dtype=np.int32), 0
    for planting, count in zip(plantings, counts):
        slots[first : first + count, : planting.tail_slots.shape[1]] = planting.tail_slots
        first += count
    sizes = [(planting.begun, planting.tail_slots.shape[1], planting.position) for planting in plantings]
    return slots, np.repeat(np.asarray(sizes, dtype=np.int32).T, counts, axis=1)


def bet_columns(plantings: Sequence[Planting], bucket: int) -> np.ndarray:
    """Tokens above each row and its latest token, [2, bucket] int32; 0 where the device chooses, and beyond."""
    columns, first = np.zeros((2, bucket), dtype=np.int32), 0
    for planting in plantings:
        rows = slice(first, first + len(planting.tail_slots))
        if planting.choice is None:
            columns[:, rows] = np.asarray(planting.bets, dtype=np.int32).T
            columns[0, rows] += planting.length
        first = rows.stop
    return columns


def law_columns(plantings: Sequence[Planting], bucket: int, depth: int, top_m: int) -> dict[str, np.ndarray]:
    """The fields of `vllm_ssd.kernels.draw.Laws` in the first step, but for F: [bucket], 0 beyond the rows."""
    counts = [len(planting.tail_slots) for planting in plantings]

    def spread(values: Sequence, dtype: type) -> np.ndarray:
        column = np.zeros(bucket, dtype=dtype)
        column[: sum(counts)] = np.repeat(np.asarray(values, dtype=dtype), counts)
        return column

    # The branches of a sequence have one key: their counters must not meet.
    counter = np.zeros(bucket, dtype=np.int32)
    counter[: sum(counts)] = depth * np.concatenate([np.arange(count) for count in counts])
    return {
        "temperature": spread([planting.temperature for planting in plantings], np.float32),
        # A law is cut to its top m: that is a top-k of m.
        "top_k": spread([min(planting.top_k or top_m, top_m) for planting in plantings], np.int32),
        "top_p": spread([planting.top_p for planting in plantings], np.float32),
        "saguaro_c": spread([planting.saguaro_c for planting in plantings], np.float32),
        "seed": spread([planting.seed for planting in plantings], np.int64),
        "counter": counter,
    }
