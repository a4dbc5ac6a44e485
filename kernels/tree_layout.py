"""What `tree_attention` works on: which slots each row attends to, and rows that share a block.

Shapes: R rows, H query heads, E head size, S sequences, L longest trunk, D longest tail.
"""

from dataclasses import dataclass

import numpy as np
import torch

_TILE_ROWS = 64  # queries times heads of a tile that is worth a block of its own


@dataclass(frozen=True)
class Tree:
    """Which slots each row attends to. All tensors int32 and contiguous."""

    trunk_slots: torch.Tensor  # [S, L], slots of each sequence in token order
    row_sequence: torch.Tensor  # [R], index into trunk_slots; rows of a block have the same one
    trunk_lengths: torch.Tensor  # [R], attended prefix of the trunk; 0 for none
    tail_slots: torch.Tensor  # [R, D], slots of the row's own branch
    tail_lengths: torch.Tensor  # [R], how many of them; a row with neither gives zeros
    blocks: torch.Tensor  # [num_blocks, 2], first row and number of rows of each block; 0 rows: unused
    per_block: int = 1  # most rows of a block: what is beyond them in a larger one gets no answer


@dataclass(frozen=True)
class Workspace:
    """Where the splits leave their parts."""

    mixed: torch.Tensor  # [R, H, splits, E] float32
    sums: torch.Tensor  # [R, H, splits, 2] float32: running maximum (base 2) and sum

    @classmethod
    def empty(cls, rows: int, heads: int, splits: int, head_size: int, device: torch.device) -> "Workspace":
        """For up to `rows` rows."""
        floats = {"dtype": torch.float32, "device": device}
        return cls(torch.empty(rows, heads, splits, head_size, **floats), torch.empty(rows, heads, splits, 2, **floats))


def rows_per_block(heads_per_group: int, rows_per_sequence: int) -> int:
    """Rows that share one reading of the trunk: as many as a sequence has, or as fill a tile."""
    return max(1, min(_TILE_ROWS // heads_per_group, rows_per_sequence))


def row_blocks(row_sequence: np.ndarray, per_block: int) -> np.ndarray:
    """Cut adjacent rows of the same sequence into blocks: [num_blocks, 2] int32 (first row, number of rows)."""
    blocks = []
    begin = 0
    for row in range(1, len(row_sequence) + 1):
        over = row == len(row_sequence) or row_sequence[row] != row_sequence[begin] or row - begin == per_block
        if over:
            blocks.append((begin, row - begin))
            begin = row
    return np.asarray(blocks, dtype=np.int32).reshape(-1, 2)
