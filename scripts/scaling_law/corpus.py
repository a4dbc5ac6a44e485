"""Text to distil drafts on, with the target's probabilities for every next token.

Half is pure-Python code of the running interpreter's standard library, half is written by the
target itself, which starts from its separator and so writes what it was trained on. Files of the
standard library that hold a prompt of `tests/data/prompts` are left out: those are for evaluation.
"""

import json
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WINDOW = 256  # tokens a training sequence holds
TOP = 32  # next tokens whose probabilities are kept
_WRITERS = 96  # texts that the target writes at a time
_SEPARATOR = 0  # <|endoftext|> of the tokenizer in tests/data/models
_SAMPLE_CHARS = 20  # of a prompt, to be looked for in a file


@dataclass
class Corpus:
    """Windows of tokens and what the target expects after each."""

    token_ids: np.ndarray  # [num_windows, WINDOW] int64
    top_ids: np.ndarray  # [num_windows, WINDOW, TOP] int16, the target's most probable next tokens
    top_probs: np.ndarray  # [num_windows, WINDOW, TOP] float16, summing to 1


def make(target: Path, prompts: Path, num_tokens: int, seed: int) -> Corpus:
    """About `num_tokens` tokens, half code and half written by the target; the windows shuffled."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    code = _library_windows(tokenizer, prompts, num_tokens // 2, seed)
    written = _written_windows(model, num_tokens // 2, seed)
    windows = np.concatenate([code, written])
    np.random.default_rng(seed).shuffle(windows)
    return Corpus(windows, *_probabilities(model, windows))


def load(path: Path) -> Corpus:
    with np.load(path) as arrays:
        return Corpus(arrays["token_ids"], arrays["top_ids"], arrays["top_probs"])


def save(corpus: Corpus, path: Path) -> None:
    np.savez(path, token_ids=corpus.token_ids, top_ids=corpus.top_ids, top_probs=corpus.top_probs)


def evaluation_text(prompts: Path) -> str:
    """The documentation, code and chat prompts, which neither the target nor the drafts were trained on."""
    texts = []
    for name in ("docs", "code", "chat"):
        lines = (prompts / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts += [json.loads(line)["prompt"] for line in lines]
    return "\n\n".join(texts)


def _library_windows(tokenizer, prompts: Path, num_tokens: int, seed: int) -> np.ndarray:
    """[n, WINDOW] tokens of the standard library's files, in an order drawn by `seed`."""
    lines = (prompts / "code.jsonl").read_text(encoding="utf-8").splitlines()
    # A prompt is dedented code: look for the longest line of each.
    marks = [max(json.loads(line)["prompt"].splitlines(), key=len).strip() for line in lines]
    marks = [mark for mark in marks if len(mark) > _SAMPLE_CHARS]
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(seed).shuffle(files)
    token_ids: list[int] = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if not any(mark in text for mark in marks):
            token_ids += [_SEPARATOR, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]
        if len(token_ids) >= num_tokens:
            break
    count = min(len(token_ids), num_tokens) // WINDOW
    return np.array(token_ids[: count * WINDOW], dtype=np.int64).reshape(count, WINDOW)


@torch.inference_mode()
def _written_windows(model, num_tokens: int, seed: int) -> np.ndarray:
    """[n, WINDOW] tokens that the target samples at temperature 1, each from a separator on."""
    torch.manual_seed(seed)
    windows: list[np.ndarray] = []
    while len(windows) * WINDOW * _WRITERS < num_tokens:
        start = torch.full((_WRITERS, 1), _SEPARATOR)
        written = model.generate(
            start,
            attention_mask=torch.ones_like(start),
            do_sample=True,
            top_k=0,
            max_new_tokens=WINDOW - 1,
            min_new_tokens=WINDOW - 1,  # a text that ended would be padded
            pad_token_id=_SEPARATOR,
        )
        windows.append(written.numpy())
    return np.concatenate(windows)


@torch.inference_mode()
def _probabilities(model, windows: np.ndarray, batch: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """The target's TOP next tokens after each, and their probabilities made to sum to 1."""
    ids, probs = [], []
    for start in range(0, len(windows), batch):
        logits = model(torch.from_numpy(windows[start : start + batch])).logits.float()
        values, tokens = logits.topk(TOP, dim=-1)
        ids.append(tokens.to(torch.int16).numpy())
        probs.append(values.softmax(-1).to(torch.float16).numpy())
    return np.concatenate(ids), np.concatenate(probs)
