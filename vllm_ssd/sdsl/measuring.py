"""How well a draft foretells a target, measured on a text: perplexity, acceptance, ranks.

Both models run as transformers wrote them, on one device; nothing is timed here. The scaling law
speaks of a text as it is; what speculation wins depends on what the target writes itself, so that
can be had too (`continuations`). The text decides the figures: it should be of the kind to come.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from vllm_ssd.sdsl.models import ModelFiles

WINDOW = 256  # tokens
CONTEXT = 64  # tokens before the drafts of a chain, and before what the target goes on with
MOST_DRAFTS = 8  # positions whose acceptance is measured
MOST_BRANCHES = 32  # candidates whose ranks are counted
_LEAST_TOKENS = 2 * WINDOW
_MOST_WINDOWS = 64
_CHAINS_PER_WINDOW = 8
_ENOUGH_CHAINS = 20.0  # that must arrive at a position for a rate of its own
_WINDOWS_AT_A_TIME = 4
_MOST_CONTINUED = 24  # windows
_CONTINUED_BY = 128  # tokens

Progress = Callable[[str], None]


def default_text() -> str:
    """The text that comes with the package."""
    return resources.files("vllm_ssd.sdsl").joinpath("default_text.txt").read_text(encoding="utf-8")


def windows_of(text: str, target: ModelFiles, called: str = "the text") -> torch.Tensor:
    """The text in the target's tokens: [n, WINDOW] int64, evenly spread where there are many.

    Raises `ValueError` if it is too short, which names it as it is `called`.
    """
    ids = target.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < _LEAST_TOKENS:
        raise ValueError(f"{called} has {len(ids)} tokens; at least {_LEAST_TOKENS} are needed, better 5000.")
    limit = int(target.config.max_position_embeddings)
    if limit < WINDOW + MOST_DRAFTS:
        raise ValueError(f"{target.name!r} has a context of {limit} tokens; {WINDOW + MOST_DRAFTS} are needed.")
    windows = torch.tensor(ids[: len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)
    chosen = np.unique(np.linspace(0, len(windows) - 1, min(len(windows), _MOST_WINDOWS)).astype(int))
    return windows[chosen]


def device() -> torch.device:
    """An accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(files: ModelFiles) -> Any:
    """The model, in its own dtype. Raises `ValueError` if it does not load."""
    from transformers import AutoModelForCausalLM

    _ = files.num_params  # a folder without weights gets its own sentence
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            files.name, dtype="auto", trust_remote_code=files.trust_remote_code
        )
        return loaded.to(device()).eval()
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{files.name!r} cannot be loaded ({reason}).") from error


@torch.inference_mode()
def continuations(target: Any, windows: torch.Tensor, temperature: float, seed: int = 0) -> torch.Tensor:
    """Beginnings of windows, gone on with by the target: [n, CONTEXT + tokens].

    It does not end its texts: the token for that is kept from it.
    """
    torch.manual_seed(seed)
    count = min(len(windows), _MOST_CONTINUED)
    chosen = windows[np.unique(np.linspace(0, len(windows) - 1, count).astype(int)), :CONTEXT]
    return _go_on(target, chosen, _CONTINUED_BY, temperature).cpu()


def _go_on(model: Any, contexts: torch.Tensor, count: int, temperature: float) -> torch.Tensor:
    """[n, C] → [n, C + count]."""
    contexts = contexts.to(model.device)
    law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return model.generate(
        contexts,
        attention_mask=torch.ones_like(contexts),
        max_new_tokens=count,
        min_new_tokens=count,
        pad_token_id=0,
        **(law if temperature else greedy),
    )


@dataclass(frozen=True)
class Agreement:
    """What a draft's drafts are worth to a target. Rates within [0, 1]."""

    acceptance: float
    """α: chance that a token sampled from the draft is accepted, at positions of the text."""
    by_position: list[float]
    """The same for the i-th draft of a chain, given that those before were accepted; [MOST_DRAFTS]."""
    refused_misses: list[float]
    """Chance that the recovery token is not among the draft's F best other ones; F = 0..MOST_BRANCHES."""
    bonus_misses: list[float]
    """The same for the bonus token, among the F best."""


@torch.inference_mode()
def perplexity(model: Any, windows: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window."""
    total, count = 0.0, 0
    for part in windows.split(_WINDOWS_AT_A_TIME):
        part = part.to(model.device)
        logits = model(part).logits[:, :-1].float()
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        count += part[:, 1:].numel()
    return float(np.exp(total / count))


@torch.inference_mode()
def agreement(
    target: Any,
    draft: Any,
    windows: torch.Tensor,
    vocab_size: int,
    temperature: float,
    skip: int = 0,
    seed: int = 0,
) -> Agreement:
    """Measure a draft on texts [n, T], from position `skip` on.

    `vocab_size`: ids from here on are padding. `temperature` 0: argmax drafts, accepted if they are
    the target's argmax; else both laws at that temperature and the usual rejection sampling.
    """
    torch.manual_seed(seed)
    parts = [
        _on_windows(target, draft, part, vocab_size, temperature, skip) for part in windows.split(_WINDOWS_AT_A_TIME)
    ]
    weights = np.array([part["count"] for part in parts], dtype=float)
    refused = np.array([part["refused"] for part in parts])  # [parts], positions' worth of refusals
    starts = np.linspace(max(CONTEXT, skip), windows.shape[1] - 1, _CHAINS_PER_WINDOW).astype(int)
    chains = torch.cat([windows[:, at - CONTEXT : at] for at in starts])
    return Agreement(
        acceptance=float(np.average([part["acceptance"] for part in parts], weights=weights)),
        by_position=_chain_acceptance(target, draft, chains, vocab_size, temperature),
        refused_misses=_weighted([part["refused_misses"] for part in parts], refused),
        bonus_misses=_weighted([part["bonus_misses"] for part in parts], weights),
    )


def _laws(model: Any, tokens: torch.Tensor, vocab_size: int, temperature: float) -> torch.Tensor:
    """[n, T] → next-token probabilities [n, T, V]."""
    return _law(model(tokens.to(model.device)).logits[..., :vocab_size].float(), temperature)


def _law(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[..., V] → probabilities [..., V]; one-hot argmax at temperature 0."""
    if temperature == 0.0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def _best(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[T, V] → ids of the best tokens [T, count], the argmax first.

    Logits in bfloat16 are often equal, and topk alone breaks ties in another way than argmax, by which greedy
    targets and drafts choose.
    """
    return logits.scatter(-1, logits.argmax(-1, keepdim=True), torch.inf).topk(count, dim=-1).indices


def _on_windows(
    target: Any, draft: Any, windows: torch.Tensor, vocab_size: int, temperature: float, skip: int = 0
) -> dict[str, Any]:
    p = _laws(target, windows, vocab_size, temperature)[:, skip:].flatten(0, 1)  # [T, V]
    logits = draft(windows.to(draft.device)).logits[:, skip:, :vocab_size].float().flatten(0, 1)
    best = _best(logits, min(MOST_BRANCHES + 1, vocab_size))  # [T, F + 1]
    q = _law(logits, temperature)
    # α = Σ min(p, q); what is left of p, (p − q)+, is the law of the recovery token.
    accepted = torch.minimum(p, q).sum(-1)
    residual = (p - q).clamp_(min=0.0)
    refused = residual.sum(-1).clamp_(min=1e-12)
    # The branches at a refused position leave out the refused draft, mostly the best candidate.
    recovered = residual.gather(-1, best[:, 1:]).cumsum(-1) / refused[:, None]  # [T, F]
    bonus = p.gather(-1, best[:, :-1]).cumsum(-1)
    by_refusal = (1.0 - accepted).clamp(min=0.0)
    refusals = float(by_refusal.sum())
    return {
        "count": len(accepted),
        "refused": refusals,
        "acceptance": float(accepted.mean()),
        "refused_misses": _misses((recovered * by_refusal[:, None]).sum(0) / max(refusals, 1e-12)),
        "bonus_misses": _misses(bonus.mean(0)),
    }


def _misses(hits: torch.Tensor) -> list[float]:
    """Hit rates for F = 1.. → miss rates for F = 0.."""
    return [1.0, *(min(max(1.0 - float(hit), 0.0), 1.0) for hit in hits)]


def _weighted(rates: Sequence[Sequence[float]], weights: np.ndarray) -> list[float]:
    if weights.sum() <= 0:  # nothing was ever refused
        weights = np.ones_like(weights)
    return [float(value) for value in np.average(np.array(rates), axis=0, weights=weights)]


def _chain_acceptance(
    target: Any, draft: Any, contexts: torch.Tensor, vocab_size: int, temperature: float
) -> list[float]:
    """Let the draft go on from contexts [n, C] by MOST_DRAFTS tokens; how often is the i-th accepted?

    Chains are followed as far as what was drafted is accepted; at each position reached counts α = Σ min(p, q),
    the chance that whatever the draft says there is accepted.
    """
    tokens = _go_on(draft, contexts, MOST_DRAFTS, temperature)
    chances, followed = [], []
    for part in tokens.split(16):
        drafted = part[:, contexts.shape[1] :].clamp(max=vocab_size - 1)[..., None]  # [n, K, 1]
        rows = slice(contexts.shape[1] - 1, -1)
        p = _laws(target, part, vocab_size, temperature)[:, rows]  # [n, K, V]
        q = _laws(draft, part, vocab_size, temperature)[:, rows]
        chances.append(torch.minimum(p, q).sum(-1))
        p, q = p.gather(-1, drafted)[..., 0], q.gather(-1, drafted)[..., 0]
        followed.append((p / q.clamp(min=1e-12)).clamp(max=1.0))
    accepted, followed = torch.cat(chances).cpu(), torch.cat(followed).cpu()  # [n, K]
    reached = torch.cat([torch.ones_like(followed[:, :1]), followed[:, :-1]], dim=1).cumprod(1)
    totals = reached.sum(0)
    rates = (reached * accepted).sum(0) / totals.clamp(min=1e-12)
    # Where hardly a chain arrives, the rate over all positions stands in.
    pooled = float((reached * accepted).sum() / totals.sum())
    return [float(rate) if float(total) >= _ENOUGH_CHAINS else pooled for rate, total in zip(rates, totals)]
