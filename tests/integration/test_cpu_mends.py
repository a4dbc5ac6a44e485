"""vLLM's CPU build samples wrongly under speculation; what we mend is needed, and mends it."""

import pytest
import torch

from .engine import DRAFT, EngineFailed, EngineProcess, prompts, requests_for, saguaro

CPU_BUILD = not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CPU_BUILD, reason="the faults are of vLLM's CPU build")

TOP_K = {"temperature": 1.0, "top_k": 4, "max_tokens": 24, "ignore_eos": True}


def test_expand_batch_to_tokens():
    """Ours repeats each value for its tokens; vLLM's leaves memory as it was."""
    wanted = {"values": [7.0, 0.0, 3.0], "counts": [2, 3, 1]}
    with EngineProcess(saguaro(DRAFT, 2)) as engine:
        assert engine.call("expand_batch_to_tokens", **wanted) == [7.0, 7.0, 1.0, 1.0, 1.0, 3.0]
        engine.call("register_kernels_again")  # no other engine would start in a process that had saguaro
    with EngineProcess(saguaro(DRAFT, 2), patches=("no_mends",)) as engine:
        unmended = engine.call("expand_batch_to_tokens", **wanted)
        assert unmended == [-77.0] * 6, "vLLM has mended it: the mend can go"
        with pytest.raises(EngineFailed, match="get"):
            engine.call("register_kernels_again")


def test_top_k_in_a_step_without_drafts():
    """The override of `_sample` is needed: without it a step in which no row has drafts crashes."""
    options = {"fallback": "ngram", "prompt_lookup_min": 30, "prompt_lookup_max": 30, "tree_budget": 1}
    requests = requests_for(prompts("docs")[:2], TOP_K)
    with EngineProcess(saguaro(DRAFT, 2, **options)) as engine:
        assert [len(result["outputs"][0]["token_ids"]) for result in engine.generate(requests)] == [24, 24]
    engine = EngineProcess(saguaro(DRAFT, 2, **options), patches=("no_empty_step",))
    try:
        with pytest.raises(EngineFailed, match=r"max\(\)"):
            engine.generate(requests)
    finally:
        engine.kill()
