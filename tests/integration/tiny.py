"""A pair of models with 16 tokens, whose law of the next tokens can be computed to the end."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from scipy import stats

VOCAB = 16
LENGTH = 4  # generated tokens whose law is computed: VOCAB ** LENGTH continuations
PROMPT = [3, 7, 1, 12, 5, 9, 2]
ONE_TOKEN_PROMPT = [5]
REPETITIVE_PROMPT = [3, 7, 1, 12] * 5 + [3, 7]
DOUBTFUL = 1e-2  # p-value of a sample below which another is drawn
P_VALUE = 1e-5  # of both, below which they do not follow a law
NO_CHANCE = 1e-7  # of one, below which no other is asked for


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Write `target` and `draft` (the target's weights and noise) below `folder`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t15", pad_token="t15")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the least that vLLM's CPU attention takes
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=15,
        initializer_range=0.15,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    generator = torch.Generator().manual_seed(2)
    for name in ("target", "draft"):
        if name == "draft":
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.2 * weight.std())
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


class Law:
    """The exact law of the first tokens after a prompt."""

    def __init__(self, model: Path, prompt: list[int]) -> None:
        """Compute the logits after every continuation of up to LENGTH - 1 tokens."""
        from transformers import LlamaForCausalLM

        network = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._logits = []  # [VOCAB ** length, VOCAB] for length 0..LENGTH-1
        for length in range(LENGTH):
            tails = torch.tensor(list(itertools.product(range(VOCAB), repeat=length)), dtype=torch.long)
            tokens = torch.cat([torch.tensor(prompt).expand(len(tails), -1), tails], dim=1)
            with torch.inference_mode():
                self._logits.append(network(tokens).logits[:, -1].double())

    def joint(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
        """Probability of each continuation, [VOCAB] * LENGTH."""
        probs = torch.ones(1, dtype=torch.double)
        for logits in self._logits:
            probs = (probs[:, None] * _processed(logits, temperature, top_k, top_p)).reshape(-1)
        return probs.reshape([VOCAB] * LENGTH).numpy()

    def greedy(self) -> list[int]:
        """The most probable token, again and again."""
        tokens, index = [], 0
        for logits in self._logits:
            tokens.append(int(logits[index].argmax()))
            index = index * VOCAB + tokens[-1]
        return tokens


def _processed(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Softmax after temperature, top-k and top-p. `logits`: [n, VOCAB]."""
    logits = logits / temperature
    if top_k:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = torch.softmax(logits, dim=-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= top_p, 0.0)
    probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs / probs.sum(dim=-1, keepdim=True)


def p_values(continuations: list[list[int]], joint: np.ndarray) -> list[float]:
    """Chi-squared tests of the pairs (1, 2), (2, 3), (3, 4) of generated tokens; 0 for an impossible one."""
    found = []
    for first in range(LENGTH - 1):
        others = tuple(axis for axis in range(LENGTH) if axis not in (first, first + 1))
        expected = joint.sum(axis=others).reshape(-1) * len(continuations)
        counts = Counter(tokens[first] * VOCAB + tokens[first + 1] for tokens in continuations)
        observed = np.array([counts[cell] for cell in range(VOCAB * VOCAB)], dtype=float)
        if observed[expected == 0].sum():
            found.append(0.0)
            continue
        rare = expected < 5
        expected = np.append(expected[~rare], expected[rare].sum())
        observed = np.append(observed[~rare], observed[rare].sum())
        if expected[-1] < 5:  # join what is left over to the next smallest cell
            smallest = int(expected[:-1].argmin())
            expected[smallest] += expected[-1]
            observed[smallest] += observed[-1]
            expected, observed = expected[:-1], observed[:-1]
        statistic = float(((observed - expected) ** 2 / expected).sum())
        found.append(float(stats.chi2.sf(statistic, len(expected) - 1)))
    return found
