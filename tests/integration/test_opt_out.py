"""Requests that want no drafts: `extra_args={"saguaro": False}`."""

import pytest

from .engine import DRAFT, EngineFailed, EngineProcess, check_same_tokens, prompts, requests_for, saguaro

GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}
SHORT = {**GREEDY, "max_tokens": 6}
TEXTS = prompts("docs")[:4]
COSTS = ("lookups", "drafted_tokens", "fallback_ngram", "fallback_none", "branches", "draft_seconds")


@pytest.fixture(scope="module")
def engine(slow_target):
    with EngineProcess(saguaro(DRAFT, 4, prompt_lookup_min=2), model=slow_target) as process:
        process.generate(requests_for(TEXTS[:2], GREEDY), settled=True)
        yield process


def without_drafts(params: dict, value: object = False) -> dict:
    return {**params, "extra_args": {"saguaro": value}}


def changes(engine: EngineProcess, requests: list[dict], **options) -> tuple[list[dict], dict[str, float]]:
    """The results of requests, and by how much the totals grew."""
    before = engine.stats()
    found = engine.generate(requests, **options)
    return found, {key: value - before[key] for key, value in engine.stats().items()}


@pytest.mark.parametrize("value", (False, 0, "false"))
def test_a_row_without_drafts_costs_the_draft_nothing(engine, baseline, value):
    requests = requests_for(TEXTS, without_drafts(GREEDY, value))
    engine.generate(requests[:1])  # takes in what the draft pushed for requests before
    drafts = engine.metrics()["vllm:spec_decode_num_draft_tokens"]
    found, grown = changes(engine, requests, settled=True)
    check_same_tokens(found, baseline.generate(requests_for(TEXTS, GREEDY)), "without drafts")
    assert grown["rounds"] >= 47 and grown["emitted_tokens"] == 4 * 48
    assert {key: grown[key] for key in COSTS} == dict.fromkeys(COSTS, 0)
    assert engine.metrics()["vllm:spec_decode_num_draft_tokens"] == drafts


def test_other_rows_keep_their_drafts(engine, baseline):
    params = [without_drafts(GREEDY), SHORT, without_drafts(GREEDY), SHORT]
    expected = baseline.generate(requests_for(TEXTS, [GREEDY, SHORT, GREEDY, SHORT]))
    found, grown = changes(engine, requests_for(TEXTS, params), settled=True)
    check_same_tokens(found, expected, "rows with and without drafts")
    assert 0 < grown["lookups"] <= 2 * 6, "rows that opted out are looked up"
    assert grown["branches"] > 0


def test_sampled_rows_without_drafts_are_vllms_own(engine, baseline):
    """A seed makes the text of a row comparable."""
    seeded = {"temperature": 0.9, "seed": 11, "max_tokens": 32, "ignore_eos": True}
    params = [without_drafts(seeded), seeded, without_drafts(seeded), GREEDY]
    expected = baseline.generate(requests_for(TEXTS, [seeded, seeded, seeded, GREEDY]))
    check_same_tokens(engine.generate(requests_for(TEXTS, params)), expected, "seeded rows without drafts")


def test_yes_is_as_good_as_nothing(engine):
    _, grown = changes(engine, requests_for(TEXTS, without_drafts(GREEDY, True)), settled=True)
    assert grown["hits"] > 10


def test_a_wrong_value_is_refused_and_the_engine_lives(engine, baseline):
    with pytest.raises(EngineFailed, match=r"extra_args\['saguaro'\].* is 'off': it must be true or false"):
        engine.generate(requests_for(TEXTS[:1], without_drafts(GREEDY, "off")))
    requests = requests_for(TEXTS, GREEDY)
    found, grown = changes(engine, requests, settled=True)
    check_same_tokens(found, baseline.generate(requests), "after a refusal")
    assert grown["hits"] > 10
