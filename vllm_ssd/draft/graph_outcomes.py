"""The most probable outcomes of verifications, chosen on the device for all sequences at once.

The same choice as `vllm_ssd.fanout.most_probable_outcomes`, which says why; here no host waits for it.
Shapes: S sequences, P positions where a verification may stop, C candidates, N bets a sequence.
"""

import math

import torch

from vllm_ssd.draft.forecast import Part
from vllm_ssd.fanout import IMPOSSIBLE, MOST_CERTAIN

UNKNOWN = -1.0
"""An acceptance that the draft's own probability stands for."""


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `budget` most probable outcomes (k, t*) of each sequence, best first.

    `values` [S, P, C] float32 logits, `token_ids` [S, P, C] int32: candidates after the committed tokens and
    trunk[:k], best first. `trunks` [S, P - 1] int32, `lengths` [S] int32: how many of them are drafts.
    `sharpness` [S] float32, divided by the temperature where rows sample. `acceptance` [S, P - 1] float32 of
    drawn drafts, UNKNOWN for others, and `recovered`, as on the host. `part`: the class of outcomes to choose from,
    if other drafts build the rest.

    Returns k and t*, [S, N] int32, and whether there is such an outcome, [S, N] bool.
    """
    size, positions, width = values.shape
    largest = torch.finfo(torch.float32).max
    values = values.clamp(-largest, largest)
    scaled = sharpness[:, None, None] * (values - values[..., :1]).clamp(min=IMPOSSIBLE)
    log_probs = scaled.log_softmax(dim=-1)  # [S, P, C]
    position = torch.arange(positions, device=values.device)
    in_trunk = position[:-1] < lengths[:, None]  # [S, P - 1]
    own = (token_ids[:, :-1] == trunks[..., None]) & in_trunk[..., None]  # [S, P - 1, C]
    # A draft that is not among the candidates is taken for as probable as the last of them.
    likely = torch.where(own, log_probs[:, :-1], 0.0).sum(dim=-1)
    accepted = torch.where(own.any(dim=-1), likely, log_probs[:, :-1].amin(dim=-1))
    drawn = (acceptance > UNKNOWN) & in_trunk
    rates = acceptance.clamp(1.0 - MOST_CERTAIN, MOST_CERTAIN)
    others = torch.log1p(-torch.where(own, log_probs[:, :-1].exp(), 0.0).sum(dim=-1).clamp(max=MOST_CERTAIN))
    left = torch.where(drawn, math.log(recovered) + torch.log1p(-rates) - others, 0.0)
    log_probs = log_probs + torch.nn.functional.pad(left, (0, 1))[..., None]
    accepted = torch.where(drawn, rates.log(), accepted)
    reached = torch.nn.functional.pad(accepted.cumsum(dim=-1), (1, 0))  # [S, P]
    log_probs = log_probs + reached[..., None]
    # The trunk's own next token is no outcome at its row, and there is no row beyond the trunk.
    barred = torch.nn.functional.pad(own, (0, 0, 0, 1)) | (position > lengths[:, None])[..., None] | (token_ids < 0)
    barred = barred | ~(part or Part()).holds(position[:, None], token_ids)
    flat = log_probs.masked_fill(barred, -torch.inf).flatten(1)
    flat = torch.nn.functional.pad(flat, (0, max(budget - positions * width, 0)), value=-torch.inf)
    best, at = torch.sort(flat, dim=-1, descending=True, stable=True)
    best, at = best[:, :budget], at[:, :budget].clamp(max=positions * width - 1)
    tokens = token_ids.reshape(size, -1).gather(1, at)
    return (at // width).to(torch.int32), tokens.to(torch.int32), best.isfinite()
