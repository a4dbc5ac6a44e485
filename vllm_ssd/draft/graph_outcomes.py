"""The outcomes of verifications that are bet on, chosen on the device for all sequences at once.

The same choices as the host's (`vllm_ssd.fanout`, which says why, and `forecast.py`); here no host waits for
them. Shapes: S sequences, P positions where a verification may stop, C candidates, N bets a sequence.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from vllm_ssd.draft.batch import to_device
from vllm_ssd.draft.forecast import Part
from vllm_ssd.draft.graph_planting import Choice
from vllm_ssd.fanout import IMPOSSIBLE, MOST_CERTAIN

UNKNOWN = -1.0
"""An acceptance that the draft's own probability stands for."""

Outcomes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""k and t*, [S, N] int32, and whether there is such an outcome, [S, N] bool."""


def chosen_outcomes(
    values: torch.Tensor,
    token_ids: torch.Tensor,
    choices: Sequence[Choice],
    recovered: float,
    budget: int,
    part: Part | None = None,
    num_candidates: int | None = None,
) -> Outcomes:
    """Of each sequence `budget` bets.

    `values`, `token_ids` [rows, W]: the candidates that `choices` speak of. All of these have counts, or none.
    `num_candidates`: of a row, among which the most probable ones are looked for; None: all. Others as below.
    """
    positions = max(len(choice.rows) for choice in choices)
    numbers = np.full((len(choices), 3 * positions), -1, dtype=np.int32)  # length and drafts, rows, counts
    rates = np.full((len(choices), positions), UNKNOWN, dtype=np.float32)  # sharpness and acceptance
    for row, own, choice in zip(numbers, rates, choices):
        length = len(choice.trunk)
        row[0], own[0] = length, choice.sharpness
        row[1 : 1 + length] = choice.trunk
        row[positions : positions + length + 1] = choice.rows
        row[2 * positions : 2 * positions + length + 1] = 0 if choice.counts is None else choice.counts
        own[1 : 1 + length] = UNKNOWN if choice.acceptance is None else choice.acceptance
    sent, sent_rates = to_device(numbers, values.device), to_device(rates, values.device)
    lengths, trunks = sent[:, 0], sent[:, 1:positions]
    at = sent[:, positions : 2 * positions].long().clamp(min=0)
    if choices[0].counts is not None:
        return counted_outcomes(token_ids[at], trunks, lengths, sent[:, 2 * positions :], budget, part)
    found = values[at][..., :num_candidates], token_ids[at][..., :num_candidates]
    return most_probable_outcomes(*found, trunks, lengths, sent_rates[:, 0], sent_rates[:, 1:], recovered, budget, part)


def most_probable_outcomes(
    values: torch.Tensor,
    token_ids: torch.Tensor,
    trunks: torch.Tensor,
    lengths: torch.Tensor,
    sharpness: torch.Tensor,
    acceptance: torch.Tensor,
    recovered: float,
    budget: int,
    part: Part | None = None,
) -> Outcomes:
    """The `budget` most probable outcomes (k, t*) of each sequence, best first.

    `values` [S, P, C] float32 logits, `token_ids` [S, P, C] int32: candidates after the committed tokens and
    trunk[:k], best first. `trunks` [S, P - 1] int32, `lengths` [S] int32: how many of them are drafts.
    `sharpness` [S] float32, divided by the temperature where rows sample. `acceptance` [S, P - 1] float32 of
    drawn drafts, UNKNOWN for others, and `recovered`, as on the host. `part`: the class of outcomes to choose from,
    if other drafts build the rest.
    """
    size, positions, width = values.shape
    largest = torch.finfo(torch.float32).max
    values = values.clamp(-largest, largest)
    scaled = sharpness[:, None, None] * (values - values[..., :1]).clamp(min=IMPOSSIBLE)
    log_probs = scaled.log_softmax(dim=-1)  # [S, P, C]
    own, barred = _own_and_barred(token_ids, trunks, lengths, part)
    # A draft that is not among the candidates is taken for as probable as the last of them.
    likely = torch.where(own, log_probs[:, :-1], 0.0).sum(dim=-1)
    accepted = torch.where(own.any(dim=-1), likely, log_probs[:, :-1].amin(dim=-1))
    position = torch.arange(positions - 1, device=values.device)
    drawn = (acceptance > UNKNOWN) & (position < lengths[:, None])
    rates = acceptance.clamp(1.0 - MOST_CERTAIN, MOST_CERTAIN)
    others = torch.log1p(-torch.where(own, log_probs[:, :-1].exp(), 0.0).sum(dim=-1).clamp(max=MOST_CERTAIN))
    left = torch.where(drawn, math.log(recovered) + torch.log1p(-rates) - others, 0.0)
    log_probs = log_probs + torch.nn.functional.pad(left, (0, 1))[..., None]
    accepted = torch.where(drawn, rates.log(), accepted)
    reached = torch.nn.functional.pad(accepted.cumsum(dim=-1), (1, 0))  # [S, P]
    log_probs = log_probs + reached[..., None]
    flat = log_probs.masked_fill(barred, -torch.inf).flatten(1)
    best, at = torch.sort(flat, dim=-1, descending=True, stable=True)
    return _outcomes(token_ids, at, best.isfinite(), budget)


def counted_outcomes(
    token_ids: torch.Tensor,
    trunks: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    budget: int,
    part: Part | None = None,
) -> Outcomes:
    """At each position so many of the most probable tokens, `counts` [S, P] int32; `budget` at most, the first ones.

    Others as above.
    """
    _, barred = _own_and_barred(token_ids, trunks, lengths, part)
    taken = ~barred & ((~barred).int().cumsum(dim=-1) <= counts[..., None])
    order, at = torch.sort(taken.flatten(1).int(), dim=-1, descending=True, stable=True)
    return _outcomes(token_ids, at, order > 0, budget)


def _own_and_barred(
    token_ids: torch.Tensor, trunks: torch.Tensor, lengths: torch.Tensor, part: Part | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which candidates are the trunk's own next tokens, [S, P - 1, C], and which are no outcomes, [S, P, C]."""
    position = torch.arange(token_ids.shape[1], device=token_ids.device)
    own = (token_ids[:, :-1] == trunks[..., None]) & (position[:-1] < lengths[:, None])[..., None]
    # Were the trunk's own next token right, the verification would go on; and there is no row beyond the trunk.
    barred = torch.nn.functional.pad(own, (0, 0, 0, 1)) | (position > lengths[:, None])[..., None] | (token_ids < 0)
    return own, barred | ~(part or Part()).holds(position[:, None], token_ids)


def _outcomes(token_ids: torch.Tensor, at: torch.Tensor, possible: torch.Tensor, budget: int) -> Outcomes:
    """The first `budget` of all candidates in this order; there may be fewer than that."""
    missing, width = max(budget - at.shape[1], 0), token_ids.shape[2]
    at = torch.nn.functional.pad(at, (0, missing))[:, :budget]
    possible = torch.nn.functional.pad(possible, (0, missing))[:, :budget]
    tokens = token_ids.reshape(len(at), -1).gather(1, at)
    return (at // width).to(torch.int32), tokens.to(torch.int32), possible
