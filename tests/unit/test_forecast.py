"""The forecast learns from outcomes on which of the next ones to bet."""

import numpy as np
import pytest

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.forecast import Forecast
from vllm_ssd.draft.kv_cache import SlotPool
from vllm_ssd.draft.sequence import Candidates, Sequence

K = 3
VOCAB = 2000
WIDTH = 40  # candidates that a draft keeps


def drawn(generator: np.random.Generator) -> Sequence:
    """A sequence that samples, with K drawn drafts in flight; the law after each is rather flat."""
    sequence = Sequence(0, [1, 2, 3], 1.0, 0, 1.0, SlotPool(64))
    logits = -np.sort(-generator.normal(size=(K + 1, WIDTH)).astype(np.float32), axis=1)
    sequence.candidates = [Candidates(generator.permutation(VOCAB)[:WIDTH].astype(np.int64), row) for row in logits]
    sequence.trunk = [int(generator.choice(candidates.token_ids)) for candidates in sequence.candidates[:K]]
    sequence.trunk_c = 1.0
    return sequence


@pytest.mark.parametrize("held", (False, True), ids=("not among the candidates", "among them"))
def test_bets_go_where_tokens_can_be_foreseen(held: bool) -> None:
    """Half of the branches wait for recovery tokens that the draft's law, cut as it is, never holds."""
    generator, forecast = np.random.default_rng(0), Forecast(SaguaroConfig("scripted", K, tree_budget=16))
    for _ in range(300):
        sequence = drawn(generator)
        accepted = next((k for k in range(K) if generator.random() < 0.2), K)
        emitted = VOCAB + 1
        if held or accepted == K:
            candidates = sequence.candidates[accepted]
            law = np.exp(candidates.logits) * ~np.isin(candidates.token_ids, sequence.trunk[accepted : accepted + 1])
            emitted = int(generator.choice(candidates.token_ids, p=law / law.sum()))
        forecast.remember(sequence, [*sequence.trunk[:accepted], emitted])
        forecast.learn()
    at_the_end = [offset == K for _ in range(20) for offset, _ in forecast.outcomes(drawn(generator), 16)]
    assert len(at_the_end) == 20 * 16
    share = sum(at_the_end) / len(at_the_end)
    assert 0.3 < share < 0.9 if held else share > 0.98
