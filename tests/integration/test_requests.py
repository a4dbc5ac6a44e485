"""What requests can ask for, and what happens to them on the way: as without speculation."""

import json
import re
import shutil

import pytest

from .conftest import NO_WHITESPACE
from .engine import (
    DRAFT,
    PROMPT_SETS,
    EngineFailed,
    EngineProcess,
    check_same_tokens,
    prompts,
    requests_for,
    saguaro,
)

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
TEXTS = [text for name in PROMPT_SETS for text in prompts(name)[10:12]]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class", "module"]},
        "public": {"type": "boolean"},
        "args": {"type": "array", "items": {"enum": ["self", "key", "value"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "public", "args"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(slow_target):
    options = {"enable_prefix_caching": True, "structured_outputs_config": NO_WHITESPACE}
    with EngineProcess(saguaro(DRAFT, 4), model=slow_target, **options) as process:
        yield process


def check_all_equal(found: list[dict], expected: list[dict], what: str) -> None:
    """Tokens, text and the reasons for ending."""
    check_same_tokens(found, expected, what)
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a["outputs"], b["outputs"], strict=True):
            assert {key: x[key] for key in ("text", "finish_reason", "stop_reason")} == {
                key: y[key] for key in ("text", "finish_reason", "stop_reason")
            }, what


def compare(engine, baseline, requests: list[dict], what: str) -> list[dict]:
    expected = baseline.generate(requests)
    check_all_equal(engine.generate(requests), expected, what)
    return expected


# ---- structured outputs ----


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"kind", "public", "args"}
        and value["kind"] in ("function", "class", "module")
        and isinstance(value["public"], bool)
        and 1 <= len(value["args"]) <= 3
    )


EMAIL = r"[a-z]{3,8}@[a-z]{2,6}\.(org|com)"
CHOICES = ("a function", "a class", "nothing at all")
GRAMMARS = {
    "json": ({"json": SCHEMA}, fits_schema),
    "regex": ({"regex": EMAIL}, re.compile(EMAIL).fullmatch),
    "choice": ({"choice": list(CHOICES)}, CHOICES.__contains__),
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_structured_outputs(engine, baseline, kind):
    grammar, is_right = GRAMMARS[kind]
    params = {"temperature": 0, "max_tokens": 80, "structured_outputs": grammar}
    for result in compare(engine, baseline, requests_for(TEXTS, params), kind):
        [output] = result["outputs"]
        assert output["finish_reason"] == "stop" and is_right(output["text"]), output["text"]


def test_thirty_sampled_json_requests_among_others(engine):
    params = {"temperature": 1.0, "max_tokens": 100, "structured_outputs": GRAMMARS["json"][0]}
    requests = requests_for((TEXTS * 3)[:30], params)
    plain = requests_for(TEXTS, {**GREEDY, "temperature": 0.8})
    for place, request in enumerate(requests):
        request["arrive"] = place
    for place, request in enumerate(plain):
        request.update(id=f"p{place}", arrive=3 * place)
    found = engine.generate(requests + plain)[:30]
    for result in found:
        [output] = result["outputs"]
        assert output["finish_reason"] == "stop" and fits_schema(output["text"]), output["text"]
    assert len({result["outputs"][0]["text"] for result in found}) > 3, "not sampled"


def test_seeded_structured_outputs(engine, baseline):
    params = [
        {"temperature": 1.0, "seed": i, "max_tokens": 80, "structured_outputs": GRAMMARS["json"][0]}
        for i in range(len(TEXTS))
    ]
    compare(engine, baseline, requests_for(TEXTS, params), "seeded JSON")


# ---- where a request ends ----


def test_stop_strings_and_stop_tokens(engine, baseline):
    plain = baseline.generate(requests_for(TEXTS, GREEDY))
    stops, tokens = [], []
    for result in plain:
        [output] = result["outputs"]
        middle = len(output["text"]) // 2
        stops.append({**GREEDY, "stop": [output["text"][middle : middle + 4]]})
        tokens.append({**GREEDY, "ignore_eos": False, "stop_token_ids": [output["token_ids"][11]]})
    for result in compare(engine, baseline, requests_for(TEXTS, stops), "stop strings"):
        assert result["outputs"][0]["finish_reason"] == "stop"
    expected = compare(engine, baseline, requests_for(TEXTS, tokens), "stop tokens")
    assert all(len(result["outputs"][0]["token_ids"]) <= 12 for result in expected)
    late = [{**params, "min_tokens": 20} for params in tokens]
    expected = compare(engine, baseline, requests_for(TEXTS, late), "min_tokens")
    assert all(len(result["outputs"][0]["token_ids"]) >= 20 for result in expected)


@pytest.mark.parametrize("max_tokens", (1, 2, 3))
def test_few_tokens(engine, baseline, max_tokens):
    expected = compare(engine, baseline, requests_for(TEXTS, {**GREEDY, "max_tokens": max_tokens}), "few tokens")
    assert all(len(result["outputs"][0]["token_ids"]) == max_tokens for result in expected)


def test_up_to_the_models_length(engine, baseline):
    token_ids = engine.call("tokenize", texts=["".join(prompts("docs"))])[0]
    places = ((0, 511), (50, 510), (90, 505), (20, 480), (7, 460))
    texts = [token_ids[start : start + length] for start, length in places]
    texts.append(token_ids[:30])  # a short row beside them keeps its drafts
    params = [{"temperature": 0, "max_tokens": None, "ignore_eos": True}] * 5 + [GREEDY]
    before = engine.stats()
    expected = compare(engine, baseline, requests_for(texts, params), "to the end")
    assert [len(result["outputs"][0]["token_ids"]) for result in expected] == [1, 2, 7, 32, 52, 40]
    assert engine.stats()["accepted_tokens"] > before["accepted_tokens"]


# ---- what a request can ask for ----


@pytest.mark.parametrize(
    "extra",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.6},
        {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    ],
    ids=str,
)
def test_penalties(engine, baseline, extra):
    requests = requests_for(TEXTS, {**GREEDY, **extra})
    expected = compare(engine, baseline, requests, str(extra))
    assert expected != baseline.generate(requests_for(TEXTS, GREEDY)), "the penalty changes nothing here"


def test_bad_words(engine, baseline):
    plain = baseline.generate(requests_for(TEXTS, GREEDY))
    params = []
    for result in plain:
        words = re.findall(r"[A-Za-z]{2,}", result["outputs"][0]["text"]) or ["the"]
        params.append({**GREEDY, "bad_words": sorted(set(words[:2]))})
    expected = compare(engine, baseline, requests_for(TEXTS, params), "bad words")
    assert expected != plain, "the bad words change nothing here"


def test_logprobs(engine, baseline):
    requests = requests_for(TEXTS, {**GREEDY, "max_tokens": 20, "logprobs": 3, "prompt_logprobs": 1})
    expected = baseline.generate(requests)
    found = engine.generate(requests)
    check_same_tokens(found, expected, "logprobs")
    for a, b in zip(found, expected, strict=True):
        pairs = list(zip(a["outputs"][0]["logprobs"], b["outputs"][0]["logprobs"], strict=True))
        pairs += zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True)
        assert len(pairs) == 20 + len(b["prompt_token_ids"])
        for ours, theirs in pairs:
            if theirs is None:
                assert ours is None
                continue
            assert len(ours) == len(theirs)
            common = set(ours) & set(theirs)
            assert len(common) >= len(theirs) - 1  # two that tie for the last place may change
            assert all(abs(ours[token] - theirs[token]) < 1e-3 for token in common)


def test_two_answers_to_one_prompt(engine, baseline):
    requests = requests_for(TEXTS[:4], [{**GREEDY, "temperature": 0.9, "n": 2, "seed": 7 + i} for i in range(4)])
    expected = compare(engine, baseline, requests, "n = 2")
    assert all(len(result["outputs"]) == 2 for result in expected)
    assert any(r["outputs"][0]["token_ids"] != r["outputs"][1]["token_ids"] for r in expected)


@pytest.mark.parametrize("extra", ({"min_p": 0.1}, {"logit_bias": {"5": 3.0}}), ids=str)
def test_what_vllm_cannot_verify_is_refused(engine, extra):
    with pytest.raises(EngineFailed) as refused:
        engine.generate(requests_for(TEXTS[:1], {**GREEDY, "temperature": 1.0, **extra}))
    assert "speculative" in str(refused.value).splitlines()[0]


# ---- what happens to requests on the way ----


def test_prefix_cache_hits_at_the_target(engine, baseline):
    """The draft must read what the target's cache lets it skip."""
    token_ids = engine.call("tokenize", texts=["".join(prompts("code"))])[0]
    prompt, longer, other = token_ids[:300], token_ids[:400], token_ids[:290] + token_ids[500:540]
    requests = requests_for([prompt, prompt, longer, other, prompt], GREEDY)
    expected = baseline.generate(requests)
    before = engine.stats()
    found = engine.generate(requests, sequential=True, settled=True)
    check_all_equal(found, expected, "prefix cache")
    assert [result["num_cached_tokens"] > 0 for result in found] == [False, True, True, True, True]
    after = engine.stats()
    assert after["hits"] + after["part_hits"] > before["hits"] + before["part_hits"] + 10


def test_aborts_and_ids_used_again(engine, baseline):
    texts = [text for name in PROMPT_SETS for text in prompts(name)[12:16]]
    requests = requests_for(texts, GREEDY)
    again = requests_for(list(reversed(texts)), GREEDY)
    for place, request in enumerate(requests):
        request["arrive"] = place
        if place % 2:
            request["abort"] = place + 1 + place % 7  # some wait, some are in their prefill, some decode
    for place, request in enumerate(again):
        # The same ids: free again soon where the first was aborted, later where it runs to its end.
        request["arrive"] = place + 10 if place % 2 else 200 + place
    found = engine.generate(requests + again)
    expected = baseline.generate([*requests, *again])
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        whole = place >= len(requests) or place % 2 == 0
        ours = a["outputs"][0]["token_ids"] if a["outputs"] else []
        theirs = b["outputs"][0]["token_ids"]
        assert ours == (theirs if whole else theirs[: len(ours)]), f"request {place}"
    assert any(0 < len(a["outputs"][0]["token_ids"]) < 40 for a in found if a["outputs"]), "none aborted while decoding"
    check_same_tokens(engine.generate(again[:4]), baseline.generate(again[:4]), "after the aborts")


def test_forty_requests_and_the_counters_add_up(engine, baseline):
    texts = [text for name in PROMPT_SETS for text in prompts(name)[20:28]]
    requests = requests_for(texts, [{**GREEDY, "max_tokens": 5 + 11 * i % 50} for i in range(40)])
    expected = baseline.generate(requests)
    before, metrics_before = engine.stats(), engine.metrics()
    check_all_equal(engine.generate(requests), expected, "40 requests over 8 slots")
    stats = {key: value - before[key] for key, value in engine.stats().items()}
    metrics = {
        key: value - metrics_before[key] for key, value in engine.metrics().items() if isinstance(value, (int, float))
    }
    generated = sum(len(result["outputs"][0]["token_ids"]) for result in expected)
    assert stats["lookups"] == stats["hits"] + stats["part_hits"] + stats["misses"]
    assert stats["lookups"] <= stats["verified_rows"]
    assert stats["misses"] == stats["fallback_draft"] + stats["fallback_ngram"] + stats["fallback_none"]
    assert stats["emitted_tokens"] == generated == metrics["vllm:generation_tokens"]
    assert stats["emitted_tokens"] == stats["verified_rows"] + stats["accepted_tokens"]
    assert stats["accepted_tokens"] == metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert stats["drafted_tokens"] == metrics["vllm:spec_decode_num_draft_tokens"]


# ---- other engines ----


def test_chunked_prefill_and_preemption(slow_target, baseline):
    """A token budget smaller than the prompts, and a KV cache smaller than the batch."""
    options = {"max_num_batched_tokens": 96, "num_gpu_blocks_override": 13, "enable_prefix_caching": True}
    with EngineProcess(saguaro(DRAFT, 4), model=slow_target, **options) as engine:
        token_ids = engine.call("tokenize", texts=["".join(prompts("docs"))])[0]
        texts = [token_ids[40 * i : 40 * i + 190 + 8 * i] for i in range(8)]
        # No seeds: on CPUs vLLM itself crashes when it prefills a seeded prompt in chunks.
        params = [{**GREEDY, "max_tokens": 150}, {**GREEDY, "max_tokens": 150, "temperature": 0.8}] * 4
        requests = requests_for(texts, params)
        found = engine.generate(requests)
        metrics, stats = engine.metrics(), engine.stats()
    check_all_equal(found[::2], baseline.generate(requests[::2]), "chunked prefill, preemption")
    assert all(len(result["outputs"][0]["token_ids"]) == 150 for result in found[1::2])
    assert metrics["vllm:num_preemptions"] > 0, "nothing was preempted: this proves little"
    assert stats["hits"] > 0
    assert stats["lookups"] == stats["hits"] + stats["part_hits"] + stats["misses"]
    assert stats["emitted_tokens"] == metrics["vllm:generation_tokens"] == 8 * 150


def test_prompt_longer_than_the_drafts_context(made_models, slow_target, baseline):
    short = made_models / "short-draft"
    shutil.copytree(DRAFT, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    with EngineProcess(saguaro(short, 4, prompt_lookup_min=2), model=slow_target) as engine:
        token_ids = engine.call("tokenize", texts=["".join(prompts("docs"))])[0]
        long_one = requests_for([token_ids[:300]], GREEDY)
        check_all_equal(engine.generate(long_one), baseline.generate(long_one), "longer than the context")
        stats = engine.stats()
        assert stats["hits"] == stats["part_hits"] == 0 and stats["misses"] > 0, "a draft from beyond its context"
        # One stays beyond, one grows beyond it, one stays below.
        texts = [token_ids[:300], token_ids[40:140], token_ids[90:120]]
        for sequential in (False, True):
            requests = requests_for(texts, {**GREEDY, "max_tokens": 60})
            found = engine.generate(requests, sequential=sequential, settled=sequential)
            check_all_equal(found, baseline.generate(requests), "around the context")
        assert engine.stats()["hits"] > 0
        assert not engine.warnings(), "the draft failed"


def test_small_kv_cache_of_the_draft(slow_target, baseline):
    """512 slots (in float32) for eight sequences of more than 200 tokens."""
    config = saguaro(DRAFT, 4, draft_kv_cache_memory_bytes=1 << 20, draft_dtype="float32")
    with EngineProcess(config, model=slow_target) as engine:
        token_ids = engine.call("tokenize", texts=["".join(prompts("chat"))])[0]
        texts = [token_ids[30 * i : 30 * i + 150 + 60 * (i % 5)] for i in range(12)]
        requests = requests_for(texts, {**GREEDY, "max_tokens": 60})
        check_all_equal(engine.generate(requests), baseline.generate(requests), "small KV cache, batch 8")
        before = engine.stats()
        found = engine.generate(requests, sequential=True, settled=True)
        check_all_equal(found, baseline.generate(requests), "small KV, batch 1")
        assert engine.stats()["hits"] > before["hits"] + 20, "the draft did not recover"
        assert not engine.warnings(), "the draft failed"
