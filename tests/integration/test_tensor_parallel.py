"""Two ranks: one talks to the draft, both verify alike."""

import functools

import pytest

from .engine import DRAFT, PROMPT_SETS, TARGET, EngineProcess, check_same_tokens, prompts, requests_for, saguaro
from .test_sampling_law import PROMPT, SAMPLES, check_law, sample
from .tiny import VOCAB, Law

pytestmark = pytest.mark.slow

TEXTS = [text for name in PROMPT_SETS for text in prompts(name)[:4]]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SEEDED = [{"temperature": 0.9, "top_k": 50, "seed": i, "max_tokens": 30, "ignore_eos": True} for i in range(len(TEXTS))]


def start(speculative_config, **options) -> EngineProcess:
    return EngineProcess(
        speculative_config,
        core=None,
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        **options,
    )


def test_greedy_and_seeded_text():
    greedy, seeded = requests_for(TEXTS, GREEDY), requests_for(TEXTS, SEEDED)
    # The small model as target: its heads can be split in two, 9 cannot.
    with start(None, model=DRAFT) as engine:
        expected, expected_seeded = engine.generate(greedy), engine.generate(seeded)
    with start(saguaro(TARGET, 4, draft_device="cpu:1", fallback="draft"), model=DRAFT) as engine:
        check_same_tokens(engine.generate(greedy), expected, "greedy, two ranks")
        check_same_tokens(engine.generate(seeded), expected_seeded, "seeded, two ranks")
        mixed = [{**request, "id": f"m{i}", "arrive": i} for i, request in enumerate(greedy + seeded)]
        check_same_tokens(engine.generate(mixed), expected + expected_seeded, "mixed, two ranks")
        found = engine.generate(greedy, events={"5": "kill"})
        check_same_tokens(found, expected, "draft killed, two ranks")
        assert engine.stats()["accepted_tokens"] > 50
        assert len(engine.draft_pids()) <= 1
    assert not engine.leftovers()


def test_sampled_law(tiny_pair):
    target, draft = tiny_pair
    config = saguaro(draft, 3, draft_device="cpu:1", draft_dtype="float32", draft_top_m=VOCAB, fallback="draft")
    with start(config, model=target, max_model_len=64) as engine:
        draw = functools.partial(sample, engine, SAMPLES, PROMPT, temperature=1.0, top_k=9)
        check_law(draw, Law(target, PROMPT).joint(top_k=9), "two ranks")
        stats = engine.stats()
    assert 0.1 < stats["accepted_tokens"] / stats["drafted_tokens"] < 0.9
