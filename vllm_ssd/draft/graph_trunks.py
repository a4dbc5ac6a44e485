"""The table of trunks that lies on the device: which row is whose, and what of it the device does not know yet.

A round needs the slots of all its sequences, of which few change from one round to the next.
"""

from collections.abc import Sequence as Seq

import numpy as np

from vllm_ssd.draft.sequence import Sequence


class TrunkTable:
    """Rows for sequences, as long as no others need them."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._num_columns = num_columns
        self._free = list(range(num_rows - 1, -1, -1))
        self._places: dict[int, int] = {}  # by seq_id, the one used last at the end

    def place_of(self, sequence: Sequence) -> int:
        """The row of one that was there in the last `update`."""
        return self._places[sequence.seq_id]

    def update(self, sequences: Seq[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """Give each a row; what changed since the last call: cells of the flat table, [n] int64, and slots, [n] int32.

        There may be no more sequences than rows.
        """
        wanted = {sequence.seq_id for sequence in sequences}
        cells, slots = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for sequence in sequences:
            place, begin = self._places.pop(sequence.seq_id, None), sequence.slots.unchanged
            if place is None:
                place, begin = self._take(wanted), 0
            self._places[sequence.seq_id] = place
            cells.append(np.arange(begin, len(sequence.slots)) + place * self._num_columns)
            slots.append(sequence.slots.view()[begin:])
            sequence.slots.mark()
        return np.concatenate(cells), np.concatenate(slots).astype(np.int32)

    def _take(self, wanted: set[int]) -> int:
        """A free row, or that of the sequence that was not there for longest."""
        if self._free:
            return self._free.pop()
        return self._places.pop(next(seq_id for seq_id in self._places if seq_id not in wanted))
