"""Drafts of several sizes, all distilled from the target in the same way on the same text.

Each is a Llama of two layers with the target's tokenizer. Its embedding starts as the target's,
projected on its main directions; the layers start at random. What differs is the width only, so
that size is what the law is fitted over.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scaling_law.corpus import Corpus

WIDTHS = (64, 96, 128, 192, 256, 384)
_LAYERS = 2
_HEAD_DIM = 32
_BATCH = 8  # windows
_LEARNING_RATE = 6e-3
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class Student:
    """A draft on disk."""

    folder: Path
    width: int


def train_all(corpus: Corpus, target: Path, out: Path, seed: int, log=print) -> list[Student]:
    """Train the sizes that `out` does not hold yet."""
    students = []
    for width in WIDTHS:
        folder = out / f"draft-{width}"
        if not (folder / "config.json").exists():
            model = train(corpus, target, width, seed, log)
            _save(model, target, folder)
        students.append(Student(folder, width))
    return students


def train(corpus: Corpus, target: Path, width: int, seed: int, log=print) -> LlamaForCausalLM:
    """One pass over the corpus: cross entropy against the target's most probable next tokens."""
    torch.manual_seed(seed)
    model = _initial(target, width)
    optimizers = _optimizers(model)
    order = np.random.default_rng(seed).permutation(len(corpus.token_ids))
    steps = len(order) // _BATCH
    average = 0.0
    for step in range(steps):
        chosen = order[step * _BATCH : (step + 1) * _BATCH]
        loss = _loss(model, corpus, chosen)
        loss.backward()
        _update(model, optimizers, _schedule(step / steps))
        average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            log(f"width {width}: step {step + 1} of {steps}, cross entropy {average:.3f}")
    return model.eval()


def _initial(target: Path, width: int) -> LlamaForCausalLM:
    teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config |= {
        "hidden_size": width,
        "intermediate_size": width * 8 // 3 // 32 * 32,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": width // _HEAD_DIM,
        "num_key_value_heads": max(1, width // _HEAD_DIM // 2) if width // _HEAD_DIM % 2 == 0 else width // _HEAD_DIM,
        "head_dim": _HEAD_DIM,
    }
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    embedding = teacher.get_input_embeddings().weight.detach()
    _, _, directions = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
    projected = embedding @ directions[:width].T  # [vocabulary, width]
    projected *= width**-0.5 / projected.std()  # logits of about unit size at the start
    model.get_input_embeddings().weight.data.copy_(projected)
    return model.train()


def _optimizers(model: LlamaForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices of the layers, AdamW for embedding and norms; each with its learning rate."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    muon = torch.optim.Muon(matrices, lr=_LEARNING_RATE, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, _LEARNING_RATE), (adam, _LEARNING_RATE)]


def _loss(model: LlamaForCausalLM, corpus: Corpus, chosen: np.ndarray) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.from_numpy(corpus.token_ids[chosen])).logits
    log_probs = F.log_softmax(logits.float(), dim=-1)
    expected = torch.from_numpy(corpus.top_probs[chosen].astype(np.float32))
    picked = log_probs.gather(-1, torch.from_numpy(corpus.top_ids[chosen].astype(np.int64)))
    return -(expected * picked).sum(-1).mean()


def _update(model: LlamaForCausalLM, optimizers: list[tuple[torch.optim.Optimizer, float]], scale: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, rate in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _schedule(progress: float, warm_up: float = 0.03) -> float:
    """A linear start, then a cosine down to 2 %."""
    if progress < warm_up:
        return max(progress / warm_up, 0.02)
    return 0.02 + 0.49 * (1.0 + math.cos(math.pi * progress))


def _save(model: LlamaForCausalLM, target: Path, folder: Path) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    model.to(torch.bfloat16).save_pretrained(unfinished)
    for name in _TOKENIZER_FILES:
        shutil.copy(target / name, unfinished / name)
    unfinished.rename(folder)
