"""Requests with a seed: exactly the text of vLLM without speculation, whatever the drafts were."""

import pytest

from .engine import DRAFT, PROMPT_SETS, EngineProcess, check_same_tokens, prompts, requests_for, saguaro

TEXTS = [text for name in PROMPT_SETS for text in prompts(name)[5:8]]
KINDS = [
    {"temperature": 0.4},
    {"temperature": 0.6, "top_k": 20},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.5, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
]


def seeded_requests(max_tokens: int = 40) -> list[dict]:
    params = [
        {**KINDS[i % len(KINDS)], "seed": 1000 + i, "max_tokens": max_tokens, "ignore_eos": True}
        for i in range(len(TEXTS))
    ]
    return requests_for(TEXTS, params)


@pytest.fixture(scope="module")
def engine(slow_target):
    with EngineProcess(saguaro(DRAFT, 4), model=slow_target) as process:
        yield process


@pytest.mark.parametrize("sequential", (False, True), ids=("batch 8", "batch 1"))
def test_text_of_vllm_without_speculation_twice(engine, baseline, sequential):
    requests = seeded_requests()
    expected = baseline.generate(requests)
    assert len({tuple(result["outputs"][0]["token_ids"]) for result in expected}) == len(TEXTS)
    before = engine.stats()
    for attempt in ("first", "second"):
        check_same_tokens(engine.generate(requests, sequential=sequential, settled=True), expected, f"{attempt} time")
    assert engine.stats()["accepted_tokens"] > before["accepted_tokens"] + 20


def test_beside_rows_without_a_seed(engine, baseline):
    """Rows without a seed draw from vLLM's global generator; seeded rows must not notice them."""
    seeded = seeded_requests()
    expected = baseline.generate(seeded)
    others = requests_for(TEXTS, {"temperature": 1.0, "max_tokens": 25, "ignore_eos": True})
    mixed = []
    for place, (one, other) in enumerate(zip(seeded, others, strict=True)):
        mixed += [{**one, "arrive": 2 * place}, {**other, "id": f"other{place}", "arrive": 2 * place + 1}]
    check_same_tokens(engine.generate(mixed)[::2], expected, "mixed with rows without a seed")


def test_while_the_draft_is_killed(engine, baseline):
    requests = seeded_requests()
    restarts = engine.stats()["draft_restarts"]
    warnings = len(engine.warnings())
    found = engine.generate(requests, events={"8": "kill"})
    check_same_tokens(found, baseline.generate(requests), "draft killed at step 8")
    assert len(engine.warnings()) == warnings + 1
    assert engine.stats()["draft_restarts"] - restarts in (0, 1)
