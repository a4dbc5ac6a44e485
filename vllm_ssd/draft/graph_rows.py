"""The ragged form of a batch: what each row attends to, as a prefix of a trunk and a tail of its own.

What the kernels read (`vllm_ssd.kernels.tree_attention`), made on the host of the engine's groups.
Shapes: R rows, D longest tail.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vllm_ssd.draft.batch import Group

TRIAL_TOKENS = 8  # before a form over ragged rows is trusted it is held against the plain one, on so many
TRIAL_TOLERANCE = 0.05  # of the largest logit: roundings of bfloat16, not another result


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
    trunks: list[np.ndarray]  # a group's columns, as far as a prefix of them is attended to


def host_rows(groups: Sequence[Group], depth: int) -> HostRows:
    """Rows of all groups, with tails of at most `depth` slots.

    Raises `ValueError` if a row attends to more columns than that beyond its prefix.
    """
    prefixes, tails, tail_lengths = [], [], []
    for group in groups:
        mask = group.mask
        prefix = np.where(mask.all(axis=1), mask.shape[1], mask.argmin(axis=1))
        beyond = mask & (np.arange(mask.shape[1]) >= prefix[:, None])
        lengths = beyond.sum(axis=1)
        if len(lengths) and lengths.max() > depth:
            raise ValueError(f"a row attends to {lengths.max()} columns beyond its prefix; it may to {depth}.")
        rows, columns = np.nonzero(beyond)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tail = np.zeros((len(mask), depth), dtype=np.int32)
        tail[rows, place] = group.columns[columns]
        prefixes.append(prefix)
        tails.append(tail)
        tail_lengths.append(lengths)
    counts = [len(group.token_ids) for group in groups]

    def join(arrays) -> np.ndarray:
        return np.concatenate([np.asarray(array) for array in arrays]).astype(np.int32)

    return HostRows(
        token_ids=join(group.token_ids for group in groups),
        positions=join(group.positions for group in groups),
        slots=join(group.slots for group in groups),
        row_sequence=np.repeat(np.arange(len(groups), dtype=np.int32), counts),
        trunk_lengths=join(prefixes),
        tail_slots=join(tails),
        tail_lengths=join(tail_lengths),
        trunks=[group.columns[: prefix.max(initial=0)] for group, prefix in zip(groups, prefixes)],
    )


def joined(trunks: Sequence[np.ndarray]) -> np.ndarray:
    """[groups, longest] int32, padded with slot 0."""
    table = np.zeros((len(trunks), max(map(len, trunks))), dtype=np.int32)
    for row, trunk in zip(table, trunks):
        row[: len(trunk)] = trunk
    return table
