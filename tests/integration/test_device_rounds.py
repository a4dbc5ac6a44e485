"""Trees that grow on the device, as on a GPU, here with the twins of the kernels: same text, same law.

Slower on a CPU than the steps from the host that users have there; what is shown is that they are right.
"""

import pytest

from .engine import DRAFT, PROMPT_SETS, EngineProcess, check_same_tokens, prompts, requests_for, saguaro
from .test_sampling_law import check_drafts_took_part, check_law, sample
from .tiny import PROMPT, VOCAB, Law

ON = {"VLLM_SSD_DEVICE_ROUNDS": "on", "VLLM_LOGGING_LEVEL": "INFO"}
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
REQUESTS = requests_for([text for name in PROMPT_SETS for text in prompts(name)[:3]], GREEDY)


def check_trees_grow_on_the_device(engine: EngineProcess) -> None:
    assert "trees grow on the device" in engine.log(), "this tests what the other tests test"


def test_greedy_text_is_the_targets(slow_target, baseline):
    expected = baseline.generate(REQUESTS)
    with EngineProcess(saguaro(DRAFT, 4, tree_budget=6), model=slow_target, environment=ON) as engine:
        check_trees_grow_on_the_device(engine)
        check_same_tokens(engine.generate(REQUESTS), expected, "in batches of eight")
        before = engine.stats()
        check_same_tokens(engine.generate(REQUESTS, sequential=True, settled=True), expected, "one at a time")
        after = engine.stats()
        hits, lookups = (after[key] - before[key] for key in ("hits", "lookups"))
        assert hits > 0.3 * lookups > 20, "too few trees took part"
        assert not engine.warnings()


@pytest.mark.parametrize("fallback", ("draft", "none"))
def test_sampled_text_has_the_targets_law(tiny_pair, fallback):
    """ "draft": the device also drafts what the target waits for after a miss; "none": nobody waits."""
    target, draft = tiny_pair
    options = {"draft_dtype": "float32", "draft_top_m": VOCAB, "tree_budget": 8, "saguaro_c": 0.5}
    law = Law(target, PROMPT).joint(temperature=1.0)
    config = saguaro(draft, 3, fallback=fallback, **options)
    with EngineProcess(config, model=target, max_model_len=64, environment=ON) as engine:
        check_trees_grow_on_the_device(engine)
        before = engine.stats()
        check_law(lambda: sample(engine, 1000, PROMPT, temperature=1.0), law, f"{fallback}, batch 8")
        check_law(lambda: sample(engine, 300, PROMPT, batch=1, temperature=1.0), law, f"{fallback}, batch 1")
        after = engine.stats()
    check_drafts_took_part(before, after)
    assert after["hits"] - before["hits"] > 100, "too few trees took part"
