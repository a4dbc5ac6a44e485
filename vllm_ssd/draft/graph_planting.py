"""What the host says of a round on the device, and what it hears of its steps.

Shapes: R rows (branches of all sequences), D steps, W candidates of a row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Planting:
    """One sequence that gets branches."""

    place: int  # its row in the table of trunks
    length: int  # committed tokens
    tail_slots: np.ndarray  # [n, D] int32, slots that its n branches may use
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
    above: np.ndarray  # [R] int32, tokens above the branch; 0: the row is no branch
    bets: np.ndarray  # [R] int32, the branches' first tokens


def law_columns(plantings: Sequence[Planting], bucket: int, depth: int, top_m: int) -> dict[str, np.ndarray]:
    """The fields of `vllm_ssd.kernels.draw.Laws` that stay the same in all steps: [bucket], 0 beyond the rows."""
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
