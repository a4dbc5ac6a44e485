"""One forward of the draft: a flat batch of tokens of several sequences."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

# oneDNN compiles a kernel for every new shape, for milliseconds: rows and columns come in few numbers.
USUAL_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_COLUMN_STEP = 64


def usual_rows(count: int) -> int:
    """The least usual number of rows that holds `count`."""
    most = USUAL_ROWS[-1]
    return next((rows for rows in USUAL_ROWS if rows >= count), -(-count // most) * most)


def padded_columns(count: int) -> int:
    """The least usual number of columns that holds `count`: at least eight of them to a power of two."""
    step = max(_COLUMN_STEP, 1 << max((count - 1).bit_length() - 4, 0))
    return -(-count // step) * step


def usual_columns(most: int) -> Iterator[int]:
    """All usual numbers of columns up to the one that holds `most`."""
    columns = 0
    while columns < most:
        columns = padded_columns(columns + 1)
        yield columns


@dataclass
class Group:
    """The tokens of one sequence in a forward, and what each may attend to."""

    token_ids: list[int]  # [n]
    positions: np.ndarray  # [n] int64
    slots: np.ndarray  # [n] int64, where their KV goes
    columns: np.ndarray  # [S] int64 slots, those of the n tokens included
    column_positions: np.ndarray  # [S] int64
    mask: np.ndarray  # [n, S] bool, True: attend


def causal_group(token_ids: list[int], known: int, columns: np.ndarray, slots: np.ndarray) -> Group:
    """Tokens that follow `known` earlier ones, each attending to all before it.

    `columns`: [known + n] slots of the earlier ones and of these.
    """
    count = len(token_ids)
    positions = np.arange(known, known + count)
    mask = np.arange(known + count)[None, :] <= positions[:, None]
    return Group(token_ids, positions, slots, columns.copy(), np.arange(known + count), mask)


@dataclass
class FlatBatch:
    """The tensors of one forward, on the model's device; T tokens, B groups."""

    groups: Seq[Group]
    device: torch.device
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64
    logit_rows: torch.Tensor | None  # [R] int64: tokens whose logits are wanted; None: all

    @cached_property
    def columns(self) -> torch.Tensor:
        """[B, S] int64 slots, padded with slot 0."""
        return _send(self._host[0], self.device)

    @cached_property
    def column_positions(self) -> torch.Tensor:
        """[B, S] int64."""
        return _send(self._host[1], self.device)

    @cached_property
    def mask(self) -> torch.Tensor:
        """[B, N, S] bool; padded rows attend to column 0."""
        return _send(self._host[2], self.device)

    @cached_property
    def padded_rows(self) -> torch.Tensor | None:
        """[T] int64: token -> b * N + n; None for one group of N tokens."""
        return _send(self._host[3], self.device)

    @cached_property
    def _host(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """The padded form, which a forward over ragged rows (`graph_forward.py`) never asks for."""
        return _padded(self.groups)


def flatten(groups: Seq[Group], device: torch.device, logit_rows: np.ndarray | None = None) -> FlatBatch:
    """Join groups into one batch."""
    token_ids = np.concatenate([np.asarray(g.token_ids, dtype=np.int64) for g in groups])
    return FlatBatch(
        groups=groups,
        device=device,
        token_ids=_send(token_ids, device),
        positions=_send(np.concatenate([g.positions for g in groups]), device),
        slots=_send(np.concatenate([g.slots for g in groups]), device),
        logit_rows=_send(logit_rows, device),
    )


def _send(array: np.ndarray | None, device: torch.device) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array).to(device, non_blocking=True)


def _padded(groups: Seq[Group]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    most = max(len(g.token_ids) for g in groups)
    rows = usual_rows(most)
    width = padded_columns(max(len(g.columns) for g in groups))
    columns = np.zeros((len(groups), width), dtype=np.int64)
    column_positions = np.zeros((len(groups), width), dtype=np.int64)
    mask = np.zeros((len(groups), rows, width), dtype=bool)
    places = []
    for b, group in enumerate(groups):
        count, size = group.mask.shape
        columns[b, :size] = group.columns
        column_positions[b, :size] = group.column_positions
        mask[b, :count, :size] = group.mask
        mask[b, count:, 0] = True  # a row that attends to nothing would be NaN
        places.append(np.arange(b * rows, b * rows + count))
    return columns, column_positions, mask, None if len(groups) == 1 and rows == most else np.concatenate(places)
