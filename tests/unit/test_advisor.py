"""Advice from figures, figures from small real models, and the hint at the start."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from vllm_ssd import theory
from vllm_ssd.metrics import Totals
from vllm_ssd.sdsl import advisor, scaling_law
from vllm_ssd.sdsl import hint as hint_module
from vllm_ssd.sdsl.advisor import Candidate, Setting, Target
from vllm_ssd.sdsl.hint import SizeHint, measured_acceptance, measured_slow_rate, size_hint
from vllm_ssd.theory import StepTime

MODELS = Path(__file__).parent.parent / "data" / "models"

# ---- advice from figures ----

TARGET = Target("big", 7e9, perplexity=8.0, verify_seconds=StepTime(0.020, 0.0001))


def candidate(name: str, params: float, acceptance: float, step: float, **more) -> Candidate:
    return Candidate(
        name,
        params,
        same_tokenizer=True,
        perplexity=15.0,
        measured_acceptance=acceptance,
        by_position=[acceptance],
        step_seconds=StepTime(step, 0.00001),
        **more,
    )


def test_saguaro_affords_a_larger_draft_than_plain_speculation() -> None:
    small, large = candidate("small", 1e8, 0.6, 0.0005), candidate("large", 1e9, 0.8, 0.003)
    found = advisor.advise(TARGET, [small, large], Setting())
    by_name = {each.candidate.name: each for each in found.assessments}
    assert by_name["small"].sd.rate > 0.9 * by_name["large"].sd.rate
    assert by_name["large"].ssd.rate > 1.2 * by_name["small"].ssd.rate
    assert found.chosen.candidate.name == "large"
    assert "large" in found.sentence and "saguaro" in found.sentence
    assert f"num_speculative_tokens {by_name['large'].ssd.num_drafts}" in found.sentence


def test_a_draft_as_slow_as_the_target_is_not_recommended() -> None:
    found = advisor.advise(TARGET, [candidate("slow", 5e9, 0.5, 0.019)], Setting())
    assert found.assessments[0].sd.num_drafts == 0
    assert found.assessments[0].sd.rate == pytest.approx(found.assessments[0].none)
    late = advisor.advise(TARGET, [candidate("slower", 5e9, 0.3, 0.060)], Setting())
    assert late.sentence.startswith("Do not speculate")


def test_the_best_number_of_drafts_falls_as_steps_get_slower() -> None:
    depths = [advisor.advise(TARGET, [candidate("d", 1e8, 0.8, step)], Setting()).chosen for step in (0.0005, 0.004)]
    assert depths[0].sd.num_drafts > depths[1].sd.num_drafts
    assert depths[0].ssd.num_drafts > depths[1].ssd.num_drafts


def test_hits_follow_the_measured_ranks() -> None:
    sure = candidate("sure", 1e8, 0.7, 0.001, refused_misses=[1.0] + [0.0] * 32, bonus_misses=[1.0] + [0.0] * 32)
    blind = candidate("blind", 1e8, 0.7, 0.001, refused_misses=[1.0] * 33, bonus_misses=[1.0] * 33)
    found = advisor.advise(TARGET, [sure, blind], Setting())
    assert found.assessments[0].ssd.hit_rate == pytest.approx(1.0)
    assert found.assessments[1].ssd.hit_rate == pytest.approx(0.0)
    assert found.chosen.candidate.name == "sure"


def test_engine_overhead_lowers_every_speed() -> None:
    free = advisor.advise(TARGET, [candidate("d", 1e8, 0.7, 0.001)], Setting()).assessments[0]
    real = advisor.advise(TARGET, [candidate("d", 1e8, 0.7, 0.001)], Setting(overhead=0.005)).assessments[0]
    assert real.none < free.none and real.sd.rate < free.sd.rate and real.ssd.rate < free.ssd.rate
    assert real.none == pytest.approx(1 / 0.0251)


def test_other_tokenizers_cannot_draft() -> None:
    other = dataclasses.replace(candidate("other", 1e8, 0.9, 0.0001), same_tokenizer=False)
    found = advisor.advise(TARGET, [other, candidate("own", 1e8, 0.5, 0.001)], Setting())
    assert not found.assessments[0].usable and found.assessments[0].ssd is None
    assert found.chosen.candidate.name == "own"
    assert advisor.advise(TARGET, [other], Setting()).sentence.startswith("None of these drafts fits")


def test_sizes_alone_give_the_laws_figures() -> None:
    found = advisor.advise(Target("70B", 70e9), [Candidate("350M", 3.5e8)], Setting())
    row = found.assessments[0]
    assert row.ratio_to_best_size == pytest.approx(3.5e8 / 276.8e6)
    x = scaling_law.CHINCHILLA.perplexity(3.5e8, 2e12)
    y = scaling_law.CHINCHILLA.perplexity(70e9, 2e12)
    assert row.law_acceptance == pytest.approx(scaling_law.PUBLISHED_ACCEPTANCE(x, y))
    assert row.sdsl_gamma == scaling_law.best_gamma(row.law_acceptance, 3.5e8, 70e9)
    assert row.none == 1.0 and row.ssd.rate > row.sd.rate > 1.0


def test_the_rule_is_not_applied_to_small_targets() -> None:
    assert not advisor.advise(Target("t", 1.6e7), [Candidate("d", 2e6)], Setting()).rule_applies
    assert advisor.advise(Target("t", 7e9), [Candidate("d", 1e8)], Setting()).rule_applies


def test_laws_alone_never_say_take() -> None:
    """Where the law's α is an end of its range, it says nothing at all."""
    one, eight = Candidate("1B", 1e9), Candidate("8B", 8e9)
    found = advisor.advise(Target("t", 70e9), [eight, one], Setting())
    assert not found.measured and found.chosen.candidate.name == "1B"
    assert found.sentence.startswith("Not measured. By laws alone 1B would do best, with saguaro")
    same = advisor.advise(Target("t", 70e9), [Candidate("d", 70e9)], Setting())
    assert "1.00x of what t gives alone: not worth it" in same.sentence
    surprised = dataclasses.replace(one, same_tokenizer=True, perplexity=120.0)
    found = advisor.advise(Target("t", 70e9, perplexity=10.0), [surprised], Setting())
    assert found.assessments[0].law_acceptance == 0.0
    assert found.chosen is None and found.any_fits
    assert found.sentence.startswith("No recommendation: nothing was measured")
    assert "add --measure" in found.sentence


def test_measured_drafts_are_recommended_however_small_the_target() -> None:
    found = advisor.advise(dataclasses.replace(TARGET, params=1e8), [candidate("d", 1e7, 0.7, 0.001)], Setting())
    assert found.measured and found.sentence.startswith("Take d with saguaro")


# ---- figures from real models ----


@pytest.fixture(scope="module")
def measured():
    """The pair, measured on a part of the default text: greedy, sampled, and the target as its own draft."""
    measuring = pytest.importorskip("vllm_ssd.sdsl.measuring")
    from vllm_ssd.sdsl.models import ModelFiles

    target_files = ModelFiles(str(MODELS / "target"))
    target, draft = measuring.load(target_files), measuring.load(ModelFiles(str(MODELS / "draft")))
    assert str(target.dtype) == "torch.bfloat16"
    windows = measuring.windows_of(measuring.default_text(), target_files)[:3]
    return {
        "perplexities": (measuring.perplexity(target, windows), measuring.perplexity(draft, windows)),
        "greedy": measuring.agreement(target, draft, windows, 4096, 0.0),
        "sampled": measuring.agreement(target, draft, windows, 4096, 1.0),
        "self": measuring.agreement(target, target, windows, 4096, 1.0),
        "greedy self": measuring.agreement(target, target, windows, 4096, 0.0),
        "written": measuring.agreement(
            target, draft, measuring.continuations(target, windows, 0.0), 4096, 0.0, measuring.CONTEXT
        ),
    }


def test_the_larger_model_is_less_surprised(measured) -> None:
    target, draft = measured["perplexities"]
    assert 1.0 < target < draft < 4096


def test_a_model_accepts_its_own_drafts(measured) -> None:
    """To the last one when greedy, although equal logits are frequent in bfloat16."""
    assert measured["greedy self"].acceptance == 1.0
    assert measured["greedy self"].by_position == [1.0] * 8
    assert measured["greedy self"].bonus_misses[1:] == [0.0] * 32
    assert measured["self"].acceptance == pytest.approx(1.0, abs=1e-5)
    assert measured["self"].by_position == pytest.approx([1.0] * 8, abs=1e-5)


def test_acceptance_is_that_of_a_real_pair(measured) -> None:
    for kind in ("greedy", "sampled"):
        assert 0.25 < measured[kind].acceptance < 0.85
        assert all(0.0 <= rate <= 1.0 for rate in measured[kind].by_position)


def test_what_the_target_writes_is_easier_to_draft_than_what_people_write(measured) -> None:
    """Greedy, this small target soon repeats itself."""
    assert measured["written"].acceptance > measured["greedy"].acceptance


def test_more_branches_miss_less_and_none_always_miss(measured) -> None:
    for kind in ("greedy", "sampled"):
        for misses in (measured[kind].refused_misses, measured[kind].bonus_misses):
            assert misses[0] == 1.0
            assert all(np.diff(misses) <= 1e-6)
            assert 0.0 <= misses[-1] < misses[1] < 1.0


def test_greedy_bonus_tokens_hit_one_branch_as_often_as_drafts_are_accepted(measured) -> None:
    """At temperature 0 both say: the target's argmax is the draft's."""
    assert 1.0 - measured["greedy"].bonus_misses[1] == pytest.approx(measured["greedy"].acceptance, abs=1e-6)


def test_sampled_acceptance_is_the_overlap_of_two_laws() -> None:
    torch = pytest.importorskip("torch")
    from vllm_ssd.sdsl import measuring

    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])

    class Fixed:
        device = torch.device("cpu")

        def __init__(self, law):
            self._logits = law.log()

        def __call__(self, tokens):
            logits = self._logits.expand(*tokens.shape, 3)
            return type("Output", (), {"logits": logits})

    part = measuring._on_windows(Fixed(p), Fixed(q), torch.zeros(1, 8, dtype=torch.long), 3, 1.0)
    assert part["acceptance"] == pytest.approx(0.2 + 0.3 + 0.2)
    # (p − q)+ lies on token 0 alone, which is among the draft's two best besides token 1.
    assert part["refused_misses"][2] == pytest.approx(0.0, abs=1e-6)
    assert part["bonus_misses"][1] == pytest.approx(1 - 0.3, abs=1e-6)  # the draft's best is token 1


def test_texts_that_are_too_short_are_refused() -> None:
    measuring = pytest.importorskip("vllm_ssd.sdsl.measuring")
    from vllm_ssd.sdsl.models import ModelFiles

    with pytest.raises(ValueError, match="the text has 3 tokens; at least 512"):
        measuring.windows_of("Hi there", ModelFiles(str(MODELS / "target")))
    with pytest.raises(ValueError, match="--text 'a.txt' has 3 tokens; at least 512"):
        measuring.windows_of("Hi there", ModelFiles(str(MODELS / "target")), "--text 'a.txt'")


def test_times_grow_with_the_load_and_are_read_between_points() -> None:
    timing = pytest.importorskip("vllm_ssd.sdsl.timing")
    import torch

    curve = timing.measure(str(MODELS / "draft"), torch.device("cpu"), "float32", [1, 64])
    assert 0.0 < curve(1) < curve(64) < curve(200)
    assert curve(1) < curve(30) < curve(64)


# ---- files ----


def test_parameters_are_counted_without_loading() -> None:
    from vllm_ssd.sdsl.models import ModelFiles

    assert ModelFiles(str(MODELS / "target")).num_params == 16_520_256
    assert ModelFiles(str(MODELS / "draft")).num_params == 2_229_504


def test_folders_without_weights_say_so(tmp_path: Path) -> None:
    from vllm_ssd.sdsl.models import ModelFiles

    shutil.copy(MODELS / "draft" / "config.json", tmp_path)
    files = ModelFiles(str(tmp_path))
    assert files.config.model_type == "llama"
    with pytest.raises(ValueError, match="holds no weights"):
        _ = files.num_params
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
        _ = files.num_params


def test_incomplete_models_are_refused(tmp_path: Path) -> None:
    from vllm_ssd.sdsl.models import ModelFiles

    shutil.copytree(MODELS / "draft", tmp_path / "draft")
    index = '{"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}'
    (tmp_path / "draft" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match="incomplete: its index names model-00002"):
        _ = ModelFiles(str(tmp_path / "draft")).num_params


def test_code_of_a_model_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    from vllm_ssd.sdsl.models import ModelFiles

    (tmp_path / "own.py").write_text(
        "from transformers import PretrainedConfig\nclass Own(PretrainedConfig):\n    model_type = 'own_model'\n"
    )
    (tmp_path / "config.json").write_text('{"model_type": "own_model", "auto_map": {"AutoConfig": "own.Own"}}')
    with pytest.raises(ValueError, match="no config that transformers can read"):
        _ = ModelFiles(str(tmp_path)).config
    assert ModelFiles(str(tmp_path), trust_remote_code=True).config.model_type == "own_model"


def test_models_of_one_name_are_told_apart(tmp_path: Path) -> None:
    from vllm_ssd.sdsl.models import ModelFiles, labels

    def made(*parts: str) -> ModelFiles:
        folder = tmp_path.joinpath(*parts)
        folder.mkdir(parents=True, exist_ok=True)
        return ModelFiles(str(folder))

    target, small, one, two = made("x", "model"), made("small"), made("a", "draft"), made("b", "draft")
    assert labels(target, [small, one]) == ["model", "small", "draft"]
    assert labels(target, [small, one, two]) == ["model", "small", "a/draft", "b/draft"]
    assert labels(target, [made("y", "model"), small]) == ["x/model", "y/model", "small"]
    assert labels(target, [target, one]) == ["model", "model (itself)", "draft"]
    assert labels(ModelFiles("owner/model"), [target, ModelFiles("other/model")]) == [
        "owner/model",
        "model",
        "other/model",
    ]
    with pytest.raises(ValueError, match="is given twice"):
        labels(target, [one, ModelFiles(f"{tmp_path}/a/../a/draft")])


def test_missing_folders_are_named() -> None:
    from vllm_ssd.sdsl.models import ModelFiles

    with pytest.raises(ValueError, match="'/nowhere/model' is no folder"):
        _ = ModelFiles("/nowhere/model").config


# ---- the hint ----


def test_the_hint_is_silent_when_all_is_well() -> None:
    assert size_hint(70e9, 277e6, 5, slow_rate=0.5, acceptance=0.1) is None  # the size is right
    assert size_hint(70e9, 8e9, 5, slow_rate=0.01) is None  # large, but in time
    assert size_hint(70e9, 1e7, 5, acceptance=0.7) is None  # small, but accepted
    assert size_hint(70e9, 8e9, 5) is None  # nothing measured
    assert size_hint(16e6, 16e6, 5, slow_rate=0.9) is None  # the rule does not hold for so small a target


@pytest.mark.parametrize(
    ("draft", "late", "accepted", "says"),
    [(8e9, 0.4, 0.8, "40% of its trees are late or short"), (1e7, 0.0, 0.2, "20% of its drafts are accepted")],
)
def test_the_hint_is_one_line_with_a_command(draft: float, late: float, accepted: float, says: str) -> None:
    line = size_hint(70e9, draft, 5, late, accepted, ("T", "D"))
    assert says in line and "\n" not in line
    assert "vllm-ssd advise --target T --draft D" in line and "size_hint" in line


@pytest.mark.parametrize(("factor", "speaks"), [(3.9, False), (4.1, True), (1 / 3.9, False), (1 / 4.1, True)])
def test_the_hint_keeps_to_a_quarter_and_four_times(factor: float, speaks: bool) -> None:
    draft = factor * scaling_law.linear_rule(70e9).value
    assert (size_hint(70e9, draft, 5, slow_rate=0.5, acceptance=0.1) is not None) == speaks


@pytest.fixture
def large_late_draft(monkeypatch):
    """Sizes of a 70B target and an 8B draft, and totals whose trees were late in 40 % of the rounds."""
    monkeypatch.setattr(hint_module, "num_params_on_disk", {"T": 70_000_000_000, "D": 8_000_000_000}.get)
    return Totals(rounds=500, late_rounds=200, verified_rows=500, drafted_tokens=2000, accepted_tokens=1200)


def test_the_hint_is_logged_once_when_there_were_enough_rounds(large_late_draft, caplog) -> None:
    hint = SizeHint("T", "D", 4)
    with caplog.at_level("INFO", logger="vllm.saguaro"):
        hint(dataclasses.replace(large_late_draft, rounds=499))
        assert not caplog.records
        for _ in range(3):
            hint(large_late_draft)
    assert len(caplog.records) == 1 and "40% of its trees are late or short" in caplog.text


@pytest.mark.parametrize(("target", "enabled"), [("T", False), ("not here", True)])
def test_the_hint_can_be_off_and_needs_both_sizes(large_late_draft, caplog, target: str, enabled: bool) -> None:
    hint = SizeHint(target, "D", 4, enabled)
    with caplog.at_level("INFO", logger="vllm.saguaro"):
        hint(large_late_draft)
    assert not hint.open and not caplog.records


def test_short_trees_are_slow_ones_too() -> None:
    """A draft that is too slow plans shallow trees, is never late, and nobody hears of it."""
    totals = Totals(rounds=500, late_rounds=5, hits=60, part_hits=40)
    assert measured_slow_rate(totals) == pytest.approx(0.4)
    assert measured_slow_rate(dataclasses.replace(totals, late_rounds=300)) == pytest.approx(0.6)
    assert measured_slow_rate(Totals(rounds=500)) == 0.0


def test_measured_acceptance_is_that_of_the_totals() -> None:
    tokens = theory.expected_tokens(0.6, 4)
    totals = Totals(verified_rows=1000, drafted_tokens=4000, accepted_tokens=round(1000 * (tokens - 1)))
    assert measured_acceptance(totals) == pytest.approx(0.6, abs=0.001)
    assert measured_acceptance(Totals(verified_rows=10)) is None


def test_sizes_on_disk_never_ask_the_hub(monkeypatch) -> None:
    from vllm_ssd.sdsl.models import num_params_on_disk

    assert num_params_on_disk(str(MODELS / "draft")) == 2_229_504
    assert num_params_on_disk("nobody/has-this-model") is None
