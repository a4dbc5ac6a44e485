"""The laws that drafts are drawn from.

A sampled draft is drawn from σ_{F,C} (Saguaro sampling, arXiv 2603.03251): the F most probable
tokens of the draft are multiplied by C ≤ 1 and the law is renormalised, so that the residual
(p − q)+ of a refused draft leans to exactly these tokens, which the tree holds. The law is cut
to the top m tokens first. It travels with the token: the verifier uses the very same numbers.
"""

import torch


def top_tokens(logits: torch.Tensor, count: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable tokens of each row, best first.

    `logits`: [num_rows, padded vocabulary]; ids from `vocab_size` on are padding, never drafted.
    Returns logits ([num_rows, count] float32) and token ids ([num_rows, count] int64).
    NaN logits count as impossible.
    """
    logits = logits[:, :vocab_size]
    count = min(count, logits.shape[1])
    if count == 1:
        values, token_ids = logits.max(dim=-1, keepdim=True)
    else:
        values, token_ids = torch.topk(logits, count, dim=-1)
    if torch.isnan(values).any():
        values, token_ids = torch.topk(torch.nan_to_num(logits.float(), nan=-torch.inf), count, dim=-1)
    return values.float(), token_ids


def saguaro_law(
    values: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    fan_out: torch.Tensor,
    saguaro_c: float,
) -> torch.Tensor:
    """σ_{F,C} over the top tokens of each row.

    `values`: [num_rows, m] logits, best first. `temperature` (> 0), `top_k` (0 is off), `top_p`
    (1 is off) and `fan_out` (F): [num_rows]. Returns probabilities, [num_rows, m] float32.
    """
    ranks = torch.arange(values.shape[1], device=values.device)
    # The clamp makes a row without finite logits uniform, and infinite ones certain.
    largest = torch.finfo(torch.float32).max
    scaled = (values / temperature[:, None]).clamp(-largest, largest)
    scaled = scaled.masked_fill((top_k[:, None] > 0) & (ranks >= top_k[:, None]), -torch.inf)
    probs = torch.softmax(scaled, dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(mass_before > top_p[:, None], 0.0)
    if saguaro_c < 1.0:
        # σ_{F,C}(v) ∝ C·q(v) for the F most probable v, q(v) for the others. Where nothing is
        # left beyond the F, the factor would cancel out: the law stays what it was.
        probs = torch.where(ranks < fan_out[:, None], probs * saguaro_c, probs)
    return probs / probs.sum(dim=-1, keepdim=True)


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one column a row. `probs`: [num_rows, m]. Returns [num_rows] int64 column indices."""
    return torch.multinomial(probs, 1, generator=generator)[:, 0]
