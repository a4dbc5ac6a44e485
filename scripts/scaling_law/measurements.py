"""What the law is held against: perplexity, acceptance and speed of each draft.

Perplexity, acceptance and the times of forwards are measured as `vllm-ssd advise` does it. Speed is
that of plain speculative decoding really run, target and draft in the draft server's model code on
one core: the draft drafts K tokens, the target verifies them in one forward, the rest is thrown
away. The target of those runs says the same and takes longer (`scripts/models.py grow`), so that
there is something to win.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from scaling_law import corpus
from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.batch import causal_group, flatten
from vllm_ssd.draft.model import DraftModel
from vllm_ssd.sdsl import measuring, timing
from vllm_ssd.sdsl.models import ModelFiles

DEPTHS = (1, 2, 3, 4, 6)  # K whose speed is measured
NEW_TOKENS = 48
_PROMPTS = 4
_PROMPT_TOKENS = 48
_CONTEXT = 512  # slots of a KV cache


@dataclasses.dataclass
class DraftFigures:
    """Everything measured of one draft."""

    name: str
    folder: str
    params: int
    perplexity: float
    sampled_acceptance: float  # α at temperature 1, at positions of the text
    greedy_acceptance: float  # share of positions where both have the same argmax
    greedy_by_position: list[float]  # of chains of argmax drafts after the text
    step_seconds: float = 0.0  # of a forward over one token
    speed: dict[int, float] = dataclasses.field(default_factory=dict)  # K → tokens a second of plain SD, greedy
    own_acceptance: dict[int, float] = dataclasses.field(default_factory=dict)  # K → acceptance in those runs


@dataclasses.dataclass
class Figures:
    """Everything measured."""

    target_params: int
    target_perplexity: float
    target_as_draft: float  # α of the target as its own draft: 1 but for rounding
    drafts: list[DraftFigures]
    timed_params: int = 0  # of the target whose speed is measured
    verify_seconds: dict[int, float] = dataclasses.field(default_factory=dict)  # tokens → seconds
    plain_speed: float = 0.0  # tokens a second without speculation

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Figures":
        found = json.loads(path.read_text(encoding="utf-8"))
        found["verify_seconds"] = _whole_keys(found["verify_seconds"])
        for draft in found["drafts"]:
            draft["speed"], draft["own_acceptance"] = _whole_keys(draft["speed"]), _whole_keys(draft["own_acceptance"])
        found["drafts"] = [DraftFigures(**draft) for draft in found["drafts"]]
        return cls(**found)


def judge(target: Path, drafts: Sequence[Path], prompts: Path, log: Callable[[str], None]) -> Figures:
    """Perplexity and acceptance of every draft; what takes time is left open."""
    files = ModelFiles(str(target))
    windows = measuring.windows_of(corpus.evaluation_text(prompts), files)
    log(f"{windows.numel()} tokens of text")
    model, vocab_size = measuring.load(files), len(files.tokenizer)
    own = measuring.agreement(model, model, windows[:4], vocab_size, 1.0).acceptance
    found = []
    for folder in drafts:
        log(f"{folder.name}: perplexity and acceptance")
        draft_files = ModelFiles(str(folder))
        draft = measuring.load(draft_files)
        greedy = measuring.agreement(model, draft, windows, vocab_size, 0.0)
        found.append(
            DraftFigures(
                name=folder.name,
                folder=str(folder),
                params=draft_files.num_params,
                perplexity=measuring.perplexity(draft, windows),
                sampled_acceptance=measuring.agreement(model, draft, windows, vocab_size, 1.0).acceptance,
                greedy_acceptance=greedy.acceptance,
                greedy_by_position=greedy.by_position,
            )
        )
    return Figures(files.num_params, measuring.perplexity(model, windows), own, found)


def clock(figures: Figures, target: Path, prompts: Path, log: Callable[[str], None]) -> None:
    """Fill in times of forwards, and speeds of SD with `target`, which says what the judged target says."""
    device, files = torch.device("cpu"), ModelFiles(str(target))
    windows = measuring.windows_of(corpus.evaluation_text(prompts), files)
    starts = windows[:: len(windows) // _PROMPTS, :_PROMPT_TOKENS][:_PROMPTS].tolist()
    figures.timed_params = files.num_params
    verify = timing.measure(str(target), device, "auto", [1, *(k + 1 for k in DEPTHS)])
    figures.verify_seconds = {int(load): seconds for load, seconds in zip(verify.loads, verify.seconds)}
    big = Decoder(str(target))
    figures.plain_speed = speculate(big, None, starts, 0)[0]
    for draft in figures.drafts:
        draft.step_seconds = timing.measure(draft.folder, device, "auto", [1])(1)
        small = Decoder(draft.folder)
        for depth in DEPTHS:
            draft.speed[depth], draft.own_acceptance[depth] = speculate(big, small, starts, depth)
        log(f"{draft.name}: " + ", ".join(f"K={k} {rate:.0f} tokens/s" for k, rate in draft.speed.items()))


class Decoder:
    """A model with a KV cache for one sequence, whose last tokens can be taken back."""

    def __init__(self, folder: str) -> None:
        config = SaguaroConfig(model=folder, num_speculative_tokens=1)
        self._model = DraftModel(config, torch.device("cpu"), vocab_size=1 << 30)
        self._model.allocate_kv_cache(None, most_useful=_CONTEXT)
        self._slots = np.arange(_CONTEXT)
        self.known = 0  # tokens whose keys and values are there

    def forward(self, tokens: list[int]) -> list[int]:
        """Append tokens; returns the argmax after each."""
        end = self.known + len(tokens)
        group = causal_group(tokens, self.known, self._slots[:end], self._slots[self.known : end])
        with torch.inference_mode():
            logits = self._model.forward(flatten([group], self._model.device))
        self.known = end
        return logits.argmax(-1).tolist()


def speculate(target: Decoder, draft: Decoder | None, prompts: list[list[int]], depth: int) -> tuple[float, float]:
    """Greedy speculative decoding of every prompt, one at a time: (tokens a second, acceptance of a draft).

    Prefills are not timed. Acceptance counts drafts that were reached: given those before were accepted.
    """
    seconds, tokens, accepted, reached = 0.0, 0, 0, 0
    for prompt in prompts:
        target.known = 0
        text = [*prompt, target.forward(prompt)[-1]]
        if draft is not None:
            draft.known = 0
            draft.forward(prompt)
        began = time.perf_counter()
        while len(text) < len(prompt) + NEW_TOKENS:
            drafts = _drafts(draft, text, depth) if draft is not None else []
            verified = target.forward([text[-1], *drafts])
            right = next((i for i, token in enumerate(drafts) if token != verified[i]), len(drafts))
            text += [*drafts[:right], verified[right]]
            target.known = len(text) - 1
            if draft is not None:
                draft.known = min(draft.known, len(text) - 1)
            accepted += right
            reached += min(right + 1, len(drafts))
        seconds += time.perf_counter() - began
        tokens += len(text) - len(prompt) - 1
    return tokens / seconds, accepted / max(reached, 1)


def _drafts(draft: Decoder, text: list[int], depth: int) -> list[int]:
    """The draft reads what it does not know yet, then goes on by itself."""
    found = [draft.forward(text[draft.known :])[-1]]
    while len(found) < depth:
        found.append(draft.forward(found[-1:])[-1])
    return found


def _whole_keys(found: dict[str, float]) -> dict[int, float]:
    return {int(key): value for key, value in found.items()}
