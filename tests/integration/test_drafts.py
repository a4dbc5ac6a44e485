"""Good and bad drafts, and every way to build trees and to fall back: the text never changes."""

import pytest

from vllm_ssd.config import AUTO_BRANCHES

from .conftest import models_script
from .engine import DRAFT, PROMPT_SETS, EngineProcess, check_same_tokens, prompts, requests_for, saguaro

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SOME_PROMPTS = [text for name in PROMPT_SETS for text in prompts(name)[:4]]


def totals_of(engine: EngineProcess, requests: list[dict], expected: list[dict], **options) -> dict[str, float]:
    """Generate, compare, and return the totals of this run alone."""
    before = engine.stats()
    check_same_tokens(engine.generate(requests, **options), expected, "text")
    return {key: value - before[key] for key, value in engine.stats().items()}


def test_draft_that_is_the_target_is_always_accepted(made_models):
    """The target is the draft with layers that change nothing: the same function, and slower."""
    target = made_models / "draft-24"
    models_script().grow(DRAFT, target, layers=24)
    requests = requests_for(SOME_PROMPTS, {**GREEDY, "max_tokens": 60})
    with EngineProcess(model=target) as engine:
        expected = engine.generate(requests)
    with EngineProcess(saguaro(DRAFT, 4, draft_dtype="float32", fallback="none"), model=target) as engine:
        totals = totals_of(engine, requests, expected, sequential=True, settled=True)
        metrics = engine.metrics()
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert drafted > 500 and accepted >= 0.98 * drafted
    assert metrics["vllm:saguaro_draft_up"] == 1, "LLM.get_metrics has none of ours"
    assert totals["hits"] + totals["part_hits"] >= 0.95 * totals["lookups"]


def test_random_draft(random_draft, slow_target, baseline):
    requests = requests_for(SOME_PROMPTS, GREEDY)
    with EngineProcess(saguaro(random_draft, 4, fallback="draft"), model=slow_target) as engine:
        totals = totals_of(engine, requests, baseline.generate(requests))
    assert totals["drafted_tokens"] > 50
    assert totals["accepted_tokens"] < 0.1 * totals["drafted_tokens"]


def test_prompts_of_others_bring_wider_trees(slow_target, baseline):
    """While long prompts delay the verification, the draft idles, or what it adds spoils the text."""
    alone = requests_for(SOME_PROMPTS[:1], {**GREEDY, "max_tokens": 48})
    others = requests_for(
        [" ".join(SOME_PROMPTS[i:] + SOME_PROMPTS[:i])[:1200] for i in range(6)],
        {"temperature": 0, "max_tokens": 1, "extra_args": {"saguaro": False}},  # no trees of their own
    )
    crowd = [*alone, *(dict(request, id=f"other{i}", arrive=4 + i) for i, request in enumerate(others))]
    with EngineProcess(saguaro(DRAFT, 4, fallback="none"), model=slow_target) as engine:
        usual = totals_of(engine, alone, baseline.generate(alone))
        delayed = totals_of(engine, crowd, baseline.generate(crowd))
    assert 0 < usual["branches"] <= AUTO_BRANCHES * (usual["rounds"] + 1)
    assert delayed["branches"] - usual["branches"] > 4 * AUTO_BRANCHES


@pytest.mark.parametrize(
    "options",
    [
        {"fallback": "draft"},
        {"fallback": "ngram", "prompt_lookup_min": 2},
        {"fallback": "none"},
        {"fallback": "auto", "fallback_batch_threshold": 2},
        {"fan_out": "uniform", "tree_budget": 8},
        {"fan_out": [6, 0, 3, 1, 2], "fallback": "none"},
        {"tree_budget": 1, "draft_dtype": "float32"},
    ],
    ids=str,
)
def test_settings_leave_the_text_alone(options, slow_target, baseline):
    requests = requests_for(SOME_PROMPTS, GREEDY)
    with EngineProcess(saguaro(DRAFT, 4, **options), model=slow_target) as engine:
        totals = totals_of(engine, requests, baseline.generate(requests))
        alone = totals_of(engine, requests[:4], baseline.generate(requests[:4]), sequential=True, settled=True)
    assert totals["accepted_tokens"] > 0 and alone["hits"] > 0
    asked_for = options.get("fallback")
    if asked_for == "draft":
        assert totals["fallback_draft"] > 0 and totals["fallback_ngram"] == 0
    elif asked_for == "ngram":
        assert totals["fallback_ngram"] > 0 and totals["fallback_draft"] == 0
    elif asked_for == "none":
        assert totals["fallback_none"] == totals["misses"] > 0
    elif asked_for == "auto":
        assert alone["fallback_draft"] > 0
