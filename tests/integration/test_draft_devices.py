"""Several drafts build each tree: the text is the target's own, whatever becomes of one of them.

Both drafts share the core that the target leaves: what is shown is that they are right, not fast.
"""

import time

import psutil
import pytest

from .engine import DRAFT, PROMPT_SETS, EngineProcess, check_same_tokens, prompts, requests_for, saguaro
from .test_sampling_law import check_drafts_took_part, check_law, sample, start
from .tiny import PROMPT, Law

DEVICES = ["cpu:1", "cpu:1"]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
REQUESTS = requests_for([text for name in PROMPT_SETS for text in prompts(name)[:2]], GREEDY)
HITS = ("hits_draft_1", "hits_draft_2")


@pytest.fixture(scope="module")
def engine(slow_target):
    config = saguaro(DRAFT, 4, draft_devices=DEVICES, tree_budget=8, prompt_lookup_min=2)
    with EngineProcess(config, model=slow_target) as process:
        assert len(process.draft_pids()) == 2
        yield process


def hits_of(engine, requests, expected) -> list[float]:
    """Generate with settled trees, compare, and return the hits of each draft."""
    before = engine.stats()
    check_same_tokens(engine.generate(requests, sequential=True, settled=True), expected, "one at a time")
    after = engine.stats()
    return [after[name] - before[name] for name in HITS]


def test_text_is_the_targets_and_both_drafts_hit(engine, baseline):
    expected = baseline.generate(REQUESTS)
    check_same_tokens(engine.generate(REQUESTS), expected, "in batches of eight")
    assert min(hits_of(engine, REQUESTS, expected)) > 20
    stats = engine.stats()
    assert sum(stats[name] for name in HITS) == stats["hits"] + stats["part_hits"] > 0.5 * stats["lookups"]
    assert not engine.warnings()


@pytest.mark.parametrize("victim", (1, 2))
def test_one_is_killed_and_comes_back(engine, baseline, victim):
    expected = baseline.generate(REQUESTS)
    before = engine.stats()
    found = engine.generate(REQUESTS, events={"6": f"kill {victim}"})
    check_same_tokens(found, expected, f"draft {victim} killed at step 6")
    line = f"draft {victim} of 2 on CPU cores 1 is down"
    assert not engine.stats()["draft_up"], "nobody learns that one is missing"
    assert len([text for text in engine.log().splitlines() if line in text]) == 1
    hits = hits_of(engine, REQUESTS[:4], expected[:4])
    assert hits[2 - victim] > 5, "the other one builds no trees"
    for _ in range(100):  # until it has loaded
        if engine.stats()["draft_restarts"] > before["draft_restarts"] and len(engine.draft_pids()) == 2:
            hits = hits_of(engine, REQUESTS[:4], expected[:4])
            if min(hits) > 5:
                break
        check_same_tokens(engine.generate(REQUESTS[:4]), expected[:4], "while it loads")
    assert min(hits) > 5, "the one that came back builds no trees"
    assert engine.stats()["draft_up"]
    assert len([text for text in engine.log().splitlines() if line in text]) == 1, "one fault, one warning"
    assert engine.stats()["draft_restarts"] == before["draft_restarts"] + 1
    assert len(engine.leftovers()) == 2, "the dead draft's directory is still there"


def test_none_outlives_the_target(engine):
    pids = engine.draft_pids()
    assert engine.close() == 0
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, pids)) and not engine.leftovers()


def test_sampled_text_has_the_targets_law(tiny_pair):
    """Drafts of two processes, each with its own draws, verified with the laws they were drawn from."""
    law = Law(tiny_pair[0], PROMPT).joint(temperature=1.0)
    with start(tiny_pair, draft_devices=DEVICES, tree_budget=4, fallback="draft", saguaro_c=0.5) as engine:
        before = engine.stats()
        check_law(lambda: sample(engine, 1000, PROMPT, temperature=1.0), law, "two drafts, batch 8")
        check_law(lambda: sample(engine, 150, PROMPT, batch=1, temperature=1.0), law, "two drafts, batch 1")
        after = engine.stats()
    check_drafts_took_part(before, after)
    assert all(after[name] > 30 for name in HITS), "a draft took no part"
