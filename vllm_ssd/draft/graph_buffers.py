"""Static buffers of the draft on a GPU: what rows attend to, what they draw, and how it travels.

Everything that a step reads or writes lies at a fixed address, so that the step can be a graph. A
bucket's tensors are the first rows of these. Made on the device "meta", the buffers tell their size
without taking it.

Shapes: R rows, S sequences, L longest sequence, D steps of a tree, W candidates of a row.
"""

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from vllm_ssd.draft.batch import to_device
from vllm_ssd.draft.graph_decoder import Rows
from vllm_ssd.draft.graph_rows import HostRows
from vllm_ssd.kernels.draw import Laws
from vllm_ssd.kernels.tree_layout import Tree, Workspace, row_blocks, rows_per_block

_PROGRAMS = 264  # that keep a GPU busy: two for each multiprocessor of an H100 or H200
_MOST_SPLITS = 16
MAX_FORWARD_ROWS = 1024  # of the forward that the engine flattens (`graph_forward.py`), in graphs
_LOGITS_BYTES = 64 << 20  # logits of more rows than fit this are made and drawn from in parts


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of all buffers."""

    max_rows: int  # R
    max_sequences: int  # S
    max_length: int  # L, tokens of a sequence and its trunk
    depth: int  # D
    width: int  # W
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int  # padded: columns of the logits
    dtype: torch.dtype  # of the model

    def splits(self, rows: int) -> int:
        """Parts that a trunk is cut into."""
        return trunk_splits(rows, self.num_heads, self.num_kv_heads)

    @property
    def logit_rows(self) -> int:
        """Rows whose logits are in memory at a time."""
        return max(1, min(self.max_rows, _LOGITS_BYTES // (self.vocab_size * self.dtype.itemsize)))


def trunk_splits(rows: int, num_heads: int, num_kv_heads: int) -> int:
    """Parts that a trunk is cut into, so that few rows keep the device busy too; a power of two."""
    rows = min(rows, MAX_FORWARD_ROWS)  # more are in no graph: they shall need no kernel that was not met before
    per_block = rows_per_block(num_heads // num_kv_heads, rows)
    programs = math.ceil(rows / per_block) * num_kv_heads
    parts = min(max(1, _PROGRAMS // programs), _MOST_SPLITS)
    return 1 << (parts.bit_length() - 1)


def send(array: np.ndarray, target: Tensor) -> None:
    """Enqueue the copy of `array` to `target`, of the same shape and dtype."""
    # Through contiguous memory of the device: a strided copy would not be asynchronous.
    target.copy_(to_device(array, target.device))


class RowBuffers:
    """The inputs of a forward."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.trunk_slots = torch.zeros(shape.max_sequences, shape.max_length, dtype=torch.int32, device=device)
        # What has one number a row lies in one array, so that it comes with one copy.
        self._columns = torch.zeros(6, shape.max_rows, dtype=torch.int32, device=device)
        most = max(rows * self.shape.splits(rows) for rows in range(1, shape.max_rows + 1))
        heads = shape.num_heads
        floats = {"dtype": torch.float32, "device": device}
        self._mixed = torch.empty(most * heads * shape.head_size, **floats)
        self._sums = torch.empty(most * heads * 2, **floats)
        self.tail_slots = torch.zeros(shape.max_rows, shape.depth, dtype=torch.int32, device=device)
        self.blocks = torch.zeros(shape.max_rows, 2, dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.slots, self.row_sequence, self.trunk_lengths, self.tail_lengths = (
            self._columns.unbind(0)
        )

    def rows(self, count: int, per_block: int) -> Rows:
        """The first `count` rows; blocks of at most `per_block` rows."""
        shape, splits = self.shape, self.shape.splits(count)
        tree = Tree(
            trunk_slots=self.trunk_slots,
            row_sequence=self.row_sequence[:count],
            trunk_lengths=self.trunk_lengths[:count],
            tail_slots=self.tail_slots[:count],
            tail_lengths=self.tail_lengths[:count],
            blocks=self.blocks[:count],
            per_block=per_block,
        )
        workspace = Workspace(
            mixed=_view(self._mixed, count, shape.num_heads, splits, shape.head_size),
            sums=_view(self._sums, count, shape.num_heads, splits, 2),
        )
        return Rows(self.token_ids[:count], self.positions[:count], self.slots[:count], tree, workspace)

    def fill(self, rows: HostRows, bucket: int, per_block: int) -> None:
        """Send the rows, trunks aside; what is beyond them, up to `bucket`, reads and writes nothing."""
        count = len(rows.token_ids)
        columns = np.zeros((6, bucket), dtype=np.int32)
        columns[2] = -1
        fields = (
            rows.token_ids,
            rows.positions,
            rows.slots,
            rows.row_sequence,
            rows.trunk_lengths,
            rows.tail_lengths,
        )
        for column, field in zip(columns, fields):
            column[:count] = field
        send(columns, self._columns[:, :bucket])
        send(rows.tail_slots, self.tail_slots[:count])
        blocks = np.zeros((bucket, 2), dtype=np.int32)
        used = row_blocks(rows.row_sequence, per_block)
        blocks[: len(used)] = used
        send(blocks, self.blocks[:bucket])

    def fill_trunks(self, trunks: np.ndarray) -> None:
        """Send the slots of the first sequences: [sequences, longest] int32."""
        send(trunks, self.trunk_slots[: trunks.shape[0], : trunks.shape[1]])

    def change_trunks(self, cells: np.ndarray, slots: np.ndarray) -> None:
        """Send some slots: [n] int64 places in the flat table, [n] int32."""
        device = self.trunk_slots.device
        self.trunk_slots.view(-1).index_copy_(0, to_device(cells, device), to_device(slots, device))

    def clear(self) -> None:
        """Make all rows padding."""
        self._columns.zero_()
        self.slots.fill_(-1)
        self.blocks.zero_()


class TreeBuffers:
    """What a round bets on, what its steps draw, and from which laws."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        rows, depth, width = shape.max_rows, shape.depth, shape.width
        integers = {"dtype": torch.int32, "device": device}
        floats = {"dtype": torch.float32, "device": device}
        self.glue_ids = torch.zeros(rows, width, **integers)  # candidates of glue rows
        self.glue_values = torch.zeros(rows, width, **floats)  # their logits
        self.bets = torch.zeros(2, rows, **integers)  # tokens above; first token
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        # Slots of a row's tail that hold KV when the round begins, slots it has (0 if it is padding), and the
        # position of the first draft that it draws.
        self.sizes = torch.zeros(3, rows, **integers)
        self.begun, self.limits, self.first_positions = self.sizes.unbind(0)
        self.fan_out = torch.zeros(depth, **integers)  # F of each step's position
        self.laws = Laws(
            temperature=torch.zeros(rows, **floats),
            top_k=torch.zeros(rows, **integers),
            top_p=torch.ones(rows, **floats),
            fan_out=torch.zeros(rows, **integers),
            saguaro_c=torch.ones(rows, **floats),
            seed=torch.zeros(rows, dtype=torch.int64, device=device),
            counter=torch.zeros(rows, **integers),
        )
        self.tokens = torch.zeros(depth, rows, **integers)  # drawn in each step
        self.law_ids = torch.zeros(depth, rows, width, **integers)
        self.law_probs = torch.zeros(depth, rows, width, **floats)
        self.law_values = torch.zeros(depth, rows, width, **floats)  # logits: the candidates of the next fork


def tree_bytes(shape: Shape) -> int:
    """Bytes of all buffers and of the logits that are in memory at a time (not the KV pool, not the model)."""
    meta = torch.device("meta")
    tensors = [*vars(RowBuffers(shape, meta)).values(), *_flat(vars(TreeBuffers(shape, meta)).values())]
    storages = {id(t._base if t._base is not None else t): t for t in tensors if isinstance(t, Tensor)}
    static = sum((t if t._base is None else t._base).nbytes for t in storages.values())
    return static + shape.logit_rows * shape.vocab_size * shape.dtype.itemsize


def _flat(values) -> list[Tensor]:
    return [tensor for value in values for tensor in (value if isinstance(value, Laws) else (value,))]


def _view(flat: Tensor, *shape: int) -> Tensor:
    return flat[: math.prod(shape)].view(shape)
