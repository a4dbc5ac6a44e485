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
    """The tokens of one sequence in a forward; each attends to a prefix of a trunk, and to a tail of its own."""

    token_ids: Seq[int]  # [n]
    positions: np.ndarray  # [n] int64
    slots: np.ndarray  # [n] int64, where their KV goes
    trunk: np.ndarray  # [S] int64, slots of the sequence's tokens from the first on
    prefix: np.ndarray  # [n] int64: how many of them a token attends to
    tails: np.ndarray  # [n, D] int64, slots of the D tokens after its prefix

    @property
    def num_columns(self) -> int:
        """Slots that any of its tokens attends to, S + n * D: the trunk's, then the tails'."""
        return len(self.trunk) + self.tails.size


def causal_group(token_ids: Seq[int], known: int, columns: np.ndarray, slots: np.ndarray) -> Group:
    """Tokens that follow `known` earlier ones, each attending to all before it and to itself.

    `columns`: [known + n] slots of the earlier ones and of these.
    """
    positions = np.arange(known, known + len(token_ids))
    return Group(token_ids, positions, slots, columns.copy(), positions + 1, np.empty((len(token_ids), 0), np.int64))


@dataclass
class FlatBatch:
    """The tensors of one forward, on the model's device, made when they are asked for; T tokens, B groups."""

    groups: Seq[Group]
    device: torch.device
    wanted: np.ndarray | None  # [R] int64: tokens whose logits are wanted; None: all

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """[T] int64."""
        return self._joined([np.asarray(group.token_ids, dtype=np.int64) for group in self.groups])

    @cached_property
    def positions(self) -> torch.Tensor:
        """[T] int64."""
        return self._joined([group.positions for group in self.groups])

    @cached_property
    def slots(self) -> torch.Tensor:
        """[T] int64."""
        return self._joined([group.slots for group in self.groups])

    @cached_property
    def logit_rows(self) -> torch.Tensor | None:
        """`wanted` on the device."""
        return None if self.wanted is None else to_device(self.wanted, self.device)

    @cached_property
    def columns(self) -> torch.Tensor:
        """[B, S] int64 slots, padded with slot 0."""
        return to_device(self._padded[0], self.device)

    @cached_property
    def column_positions(self) -> torch.Tensor:
        """[B, S] int64."""
        return to_device(self._padded[1], self.device)

    @cached_property
    def mask(self) -> torch.Tensor:
        """[B, N, S] bool, True: attend; padded rows attend to column 0."""
        return to_device(self._padded[2], self.device)

    @cached_property
    def padded_rows(self) -> torch.Tensor | None:
        """[T] int64: token -> b * N + n; None for one group of N tokens."""
        places = self._padded[3]
        return None if places is None else to_device(places, self.device)

    @cached_property
    def _padded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """The padded form, which a forward over ragged rows (`graph_forward.py`) never asks for."""
        return _padded(self.groups)

    def _joined(self, arrays: Seq[np.ndarray]) -> torch.Tensor:
        return to_device(np.concatenate(arrays), self.device)


def flatten(groups: Seq[Group], device: torch.device, wanted: np.ndarray | None = None) -> FlatBatch:
    """Join groups into one batch. `wanted`: [R] int64, tokens whose logits are wanted; None: all."""
    return FlatBatch(groups, device, wanted)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on a GPU, which nobody waits for; on a CPU the array.

    It goes through pinned memory, which PyTorch gives to nobody else before it was read.
    """
    source = torch.from_numpy(np.ascontiguousarray(array))
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source


def _padded(groups: Seq[Group]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    most = max(len(group.token_ids) for group in groups)
    rows = usual_rows(most)
    width = padded_columns(max(group.num_columns for group in groups))
    columns = np.zeros((len(groups), width), dtype=np.int64)
    column_positions = np.zeros((len(groups), width), dtype=np.int64)
    mask = np.zeros((len(groups), rows, width), dtype=bool)
    places = []
    for b, group in enumerate(groups):
        count, depth = group.tails.shape
        length, size = len(group.trunk), group.num_columns
        columns[b, :length], columns[b, length:size] = group.trunk, group.tails.reshape(-1)
        column_positions[b, :length] = np.arange(length)
        column_positions[b, length:size] = (group.prefix[:, None] + np.arange(depth)).reshape(-1)
        mask[b, :count, :length] = np.arange(length) < group.prefix[:, None]
        mask[b, :count, length:size] = np.repeat(np.eye(count, dtype=bool), depth, axis=1)
        mask[b, count:, 0] = True  # a row that attends to nothing would be NaN
        places.append(np.arange(b * rows, b * rows + count))
    return columns, column_positions, mask, None if len(groups) == 1 and rows == most else np.concatenate(places)
