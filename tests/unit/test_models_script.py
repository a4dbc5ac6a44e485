"""scripts/models.py: grown models say the same as their source, random ones keep its shape."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]


def _load_script():
    spec = importlib.util.spec_from_file_location("models_script", REPOSITORY / "scripts" / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


models = _load_script()
DRAFT = REPOSITORY / "tests" / "data" / "models" / "draft"


def _logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(5, 45)[None]).logits  # [1, 40, vocab_size]


def test_a_grown_model_has_the_logits_of_its_source(tmp_path):
    models.grow(DRAFT, tmp_path / "grown", layers=5)
    assert json.loads((tmp_path / "grown" / "config.json").read_text())["num_hidden_layers"] == 5
    assert torch.equal(_logits(tmp_path / "grown"), _logits(DRAFT))


def test_noise_changes_the_logits_and_its_seed_repeats_them(tmp_path):
    for name in ("one", "two"):
        models.grow(DRAFT, tmp_path / name, layers=4, noise=0.01, seed=3)
    assert not torch.equal(_logits(tmp_path / "one"), _logits(DRAFT))
    one, two = (models.load_weights(tmp_path / name) for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_random_model_has_the_tensors_of_its_source(tmp_path):
    models.randomise(DRAFT, tmp_path / "random")
    source, drawn = models.load_weights(DRAFT), models.load_weights(tmp_path / "random")
    assert {name: (w.shape, w.dtype) for name, w in source.items()} == {
        name: (w.shape, w.dtype) for name, w in drawn.items()
    }
    assert not torch.equal(_logits(tmp_path / "random"), _logits(DRAFT))


def test_fewer_layers_are_refused_and_leave_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="has 2 layers already"):
        models.grow(DRAFT, tmp_path / "out", layers=1)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_there_is_not_written_over(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="is there already"):
        models.grow(DRAFT, tmp_path / "out", layers=3)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="small-draft, small-target, smollm2"):
        models.find("medium")


def test_gguf_names_become_hugging_face_names():
    assert models.hugging_face_name("blk.3.attn_q.weight") == "model.layers.3.self_attn.q_proj.weight"
    assert models.hugging_face_name("output_norm.weight") == "model.norm.weight"
