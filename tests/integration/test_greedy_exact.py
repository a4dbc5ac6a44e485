"""Greedy text in float32 is vLLM's own, for every prompt, K, batch shape, and order of arrival."""

import pytest

from .engine import PROMPT_SETS, EngineProcess, check_same_tokens, prompts, requests_for, saguaro

GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
ALL_PROMPTS = [text for name in PROMPT_SETS for text in prompts(name)]
DEPTHS = (1, 3, 5, 8)


@pytest.fixture(scope="module", params=DEPTHS, ids=lambda depth: f"K={depth}")
def engine(request, slow_target):
    with EngineProcess(saguaro(num_speculative_tokens=request.param), model=slow_target) as process:
        process.depth = request.param
        yield process


def test_all_prompts_in_batches_of_eight(engine, baseline):
    requests = requests_for(ALL_PROMPTS, GREEDY)
    found = engine.generate(requests)
    check_same_tokens(found, baseline.generate(requests), f"K={engine.depth}, batch 8")
    assert engine.stats()["accepted_tokens"] > 500, "drafts hardly took part: this proves little"


def test_one_at_a_time(engine, baseline):
    requests = requests_for(ALL_PROMPTS[DEPTHS.index(engine.depth) :: len(DEPTHS)], GREEDY)
    before = engine.stats()
    found = engine.generate(requests, sequential=True, settled=True)
    check_same_tokens(found, baseline.generate(requests), f"K={engine.depth}, batch 1")
    after = engine.stats()
    assert after["hits"] - before["hits"] > 0.3 * (after["lookups"] - before["lookups"]), "too few trees took part"


def test_requests_join_and_leave(engine, baseline):
    """Every third step a request joins; they end at different lengths."""
    texts = ALL_PROMPTS[3::9]
    requests = requests_for(texts, [{**GREEDY, "max_tokens": 12 + 7 * (i % 6)} for i in range(len(texts))])
    for place, request in enumerate(requests):
        request["arrive"] = 3 * place
    before = engine.stats()
    found = engine.generate(requests, settled=True)
    check_same_tokens(found, baseline.generate(requests), f"K={engine.depth}, joining and leaving")
    assert engine.stats()["hits"] > before["hits"] + 30, "too few trees took part"
