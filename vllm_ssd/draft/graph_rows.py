"""The ragged form of a batch, which the kernels read (`vllm_ssd.kernels.tree_attention`): groups as rows.

Shapes: R rows, D longest tail.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vllm_ssd.draft.batch import Group


@dataclasses.dataclass
class HostRows:
    """The ragged form of a batch; int32."""

    token_ids: np.ndarray  # [R]
    positions: np.ndarray  # [R]
    slots: np.ndarray  # [R]
    row_sequence: np.ndarray  # [R]
    trunk_lengths: np.ndarray  # [R]
    tail_slots: np.ndarray  # [R, depth]
    tail_lengths: np.ndarray  # [R]
    trunks: list[np.ndarray]  # a group's trunk, as far as it is attended to


def host_rows(groups: Sequence[Group], depth: int) -> HostRows:
    """Rows of all groups, with tails of at most `depth` slots. Raises `ValueError` if a tail is longer."""
    counts = [len(group.token_ids) for group in groups]
    longest = [group.tails.shape[1] for group in groups]
    if max(longest, default=0) > depth:
        raise ValueError(f"a row has a tail of {max(longest)} slots; it may have {depth}.")
    tails = np.zeros((sum(counts), depth), dtype=np.int32)
    begin = 0
    for group, count, length in zip(groups, counts, longest):
        tails[begin : begin + count, :length] = group.tails
        begin += count

    def join(arrays) -> np.ndarray:
        return np.concatenate([np.asarray(array) for array in arrays]).astype(np.int32)

    return HostRows(
        token_ids=join(group.token_ids for group in groups),
        positions=join(group.positions for group in groups),
        slots=join(group.slots for group in groups),
        row_sequence=np.repeat(np.arange(len(groups), dtype=np.int32), counts),
        trunk_lengths=join(group.prefix for group in groups),
        tail_slots=tails,
        tail_lengths=np.repeat(np.asarray(longest, dtype=np.int32), counts),
        trunks=[group.trunk[: group.prefix.max(initial=0)] for group in groups],
    )


def aligned(size: int) -> int:
    """The least multiple of 16 that holds `size`: Triton compiles a kernel for these, and others for what is none."""
    return -(-size // 16) * 16


def joined(trunks: Sequence[np.ndarray]) -> np.ndarray:
    """[groups, longest] int32, padded with slot 0."""
    table = np.zeros((len(trunks), max(map(len, trunks))), dtype=np.int32)
    for row, trunk in zip(table, trunks):
        row[: len(trunk)] = trunk
    return table
