"""The benchmark's predicted column: from measured parts to tokens a second, on runs whose truth is known."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from benchmark.measurement import Timeline, measure, median  # noqa: E402
from benchmark.plan import Engine, Workload  # noqa: E402
from benchmark.prediction import predicted_tok_s  # noqa: E402
from benchmark.report import Result  # noqa: E402

PREFILL, STEP = 0.05, 0.02  # seconds


def run(bursts: list[int], step: float = STEP, **counters):
    """A run of one request: a first token, then a burst of tokens a step; returns its measurement and outputs."""
    now, deliveries, steps = PREFILL, [(PREFILL, 1)], [(PREFILL, 1, True)]
    for count in bursts:
        now += step
        deliveries.append((now, count))
        steps.append((step, count, False))
    vllm = {"drafts": 0, "draft_tokens": 0, "accepted": 0} | {k: v for k, v in counters.items() if k in VLLM}
    saguaro = {k: v for k, v in counters.items() if k not in VLLM and k != "accepted_at"}
    timeline = Timeline(0.0, [0.0], [deliveries], steps)
    found = measure(timeline, vllm, saguaro, counters.get("accepted_at", ()))
    return found, [list(range(1 + sum(bursts)))]


VLLM = ("drafts", "draft_tokens", "accepted")


def result(method: str, k: int, *runs) -> Result:
    found = Result(Engine(method, "target", k), Workload(1, 0.0))
    for measurement, outputs in runs:
        found.measurements.append(measurement)
        found.outputs.append(outputs)
    return found


def drafting_run(step: float = STEP, **more):
    """100 rounds of 3 drafts: 80 accept the first, 60 the second, 30 the third too."""
    bursts = [4] * 30 + [3] * 30 + [2] * 20 + [1] * 20
    counters = {"drafts": 100, "draft_tokens": 300, "accepted": 170, "accepted_at": [80, 60, 30]}
    return run(bursts, step, **counters, **more)


def test_plain_decoding_is_predicted_by_its_steps() -> None:
    plain = result("none", 0, run([1] * 50), run([1] * 50))
    assert predicted_tok_s(plain, [plain]) == pytest.approx(plain.measurements[0].tok_s)


def test_speculation_is_predicted_by_acceptance_and_steps() -> None:
    spec = result("draft_model", 3, drafting_run(), drafting_run())
    measurement = spec.measurements[0]
    assert measurement.acceptance_by_position == pytest.approx([0.8, 0.75, 0.5])
    assert predicted_tok_s(spec, [spec]) == pytest.approx(measurement.tok_s)


def test_a_repeat_is_predicted_by_the_others_not_by_itself() -> None:
    quick, slow = drafting_run(0.01), drafting_run(0.03)
    spec = result("draft_model", 3, quick, slow)
    predicted = predicted_tok_s(spec, [spec])
    assert predicted == pytest.approx((quick[0].tok_s + slow[0].tok_s) / 2, rel=0.1)
    only = result("draft_model", 3, quick, quick, quick, slow)
    assert predicted_tok_s(only, [only]) == pytest.approx(quick[0].tok_s)


def test_saguaro_takes_its_acceptance_from_the_same_draft_model() -> None:
    counters = {"rounds": 100, "lookups": 100, "hits": 80, "verify_seconds": 1.4, "wait_seconds": 0.1}
    saguaro = result("saguaro", 3, drafting_run(**counters), drafting_run(**counters))
    alone = predicted_tok_s(saguaro, [saguaro])
    assert alone == pytest.approx(saguaro.measurements[0].tok_s)
    # A draft_model row whose drafts were all refused takes the tokens away, not the time.
    refused = run([1] * 100, drafts=100, draft_tokens=300, accepted=0, accepted_at=[0, 0, 0])
    other = result("draft_model", 3, refused)
    assert predicted_tok_s(saguaro, [saguaro, other]) < 0.5 * alone
    unlike = result("draft_model", 5, refused)  # another K is another row
    assert predicted_tok_s(saguaro, [saguaro, unlike]) == alone


def test_rows_without_drafts_emit_one_token() -> None:
    """N-grams found in half of the rounds only."""
    half = run([3] * 50 + [1] * 50, drafts=50, draft_tokens=100, accepted=100, accepted_at=[50, 50])
    ngram = result("ngram", 2, half, half)
    assert half[0].drafting_share == pytest.approx(0.5)
    assert predicted_tok_s(ngram, [ngram]) == pytest.approx(half[0].tok_s)


def test_what_was_not_measured_is_not_predicted() -> None:
    empty = result("draft_model", 3, run([]))
    assert predicted_tok_s(empty, [empty]) is None
    assert predicted_tok_s(result("none", 0), []) is None


def test_medians_of_lists_go_position_by_position() -> None:
    one, two = drafting_run()[0], drafting_run()[0]
    two = dataclasses.replace(two, acceptance_by_position=[0.6, 0.65])
    assert median([one, two]).acceptance_by_position == pytest.approx([0.7, 0.7])
