"""The next token of each branch: argmax for greedy rows, a draw from σ_{F,C} for the others."""

from collections.abc import Iterator

import numpy as np
import torch

from vllm_ssd.draft.sequence import Candidates, Sequence
from vllm_ssd.messages import Law, pack_law
from vllm_ssd.sampling import draw, saguaro_law


class Drawer:
    """Draws drafts, and says from which law."""

    def __init__(self, top_m: int, seed: int | None = None) -> None:
        """`top_m`: tokens a law keeps. Without `seed` the draws differ from run to run."""
        self._top_m = top_m
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def next_tokens(
        self, owners: list[Sequence], candidates: list[Candidates], depths: list[int], fan_out: list[int]
    ) -> tuple[list[int], dict[int, Law]]:
        """The next token of each row, and the laws by owner's index, of owners that sample.

        The rows of an owner are adjacent. `depths`: drafts that precede the token in its chain;
        `fan_out`: F of that position, for as many positions as there may be drafts.
        """
        token_ids = [int(c.token_ids[0]) for c in candidates]
        laws: dict[int, Law] = {}
        for index, (sequence, rows) in enumerate(_runs(owners)):
            if sequence.samples:
                factors = [fan_out[min(depths[row], len(fan_out) - 1)] for row in rows]
                columns, ids, probs = self._draw(sequence, candidates[rows.start : rows.stop], factors)
                for row, column, row_ids in zip(rows, columns, ids):
                    token_ids[row] = int(row_ids[column])
                laws[index] = pack_law(ids, probs)
        return token_ids, laws

    def _draw(
        self, sequence: Sequence, candidates: list[Candidates], fan_out: list[int]
    ) -> tuple[list[int], np.ndarray, np.ndarray]:
        """A draw for each row: column indices [n], token ids and probabilities [n, m]."""
        width = min(self._top_m, min(len(c.token_ids) for c in candidates))
        ids = np.stack([c.token_ids[:width] for c in candidates])
        rows = len(candidates)
        probs = saguaro_law(
            torch.from_numpy(np.stack([c.logits[:width] for c in candidates])),
            temperature=torch.full((rows,), sequence.temperature),
            top_k=torch.full((rows,), sequence.top_k),
            top_p=torch.full((rows,), sequence.top_p),
            fan_out=torch.tensor(fan_out),
            saguaro_c=sequence.saguaro_c,
        )
        return draw(probs, self._generator).tolist(), ids, probs.numpy()


def _runs(owners: list[Sequence]) -> Iterator[tuple[Sequence, range]]:
    """Each owner with the rows it owns."""
    begin = 0
    for row in range(1, len(owners) + 1):
        if row == len(owners) or owners[row] is not owners[begin]:
            yield owners[begin], range(begin, row)
            begin = row
