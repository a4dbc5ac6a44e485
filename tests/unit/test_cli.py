"""The command line: quick to help, one sentence for each fault, figures for people and as JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ssd import simulator
from vllm_ssd.cli import main, text
from vllm_ssd.presets import PRESETS

MODELS = Path(__file__).parent.parent / "data" / "models"
TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from vllm_ssd.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'vllm', 'transformers', 'scipy', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("advise", "simulate", "doctor"))


@pytest.mark.parametrize("command", ["advise", "simulate", "doctor"])
def test_every_command_has_help(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert "--" in capsys.readouterr().out


# ---- simulate ----


def test_simulate_prints_the_papers_pairs(capsys) -> None:
    assert main(["simulate", "--batch", "1,8", "--rounds", "500"]) == 0
    out = capsys.readouterr().out
    for preset in PRESETS.values():
        assert preset.about in out
        assert f"published, batch 1: {preset.over_sd}x over SD" in out
    assert out.count("b*: from batch") == len(PRESETS)


def test_simulate_as_json_says_what_the_simulator_says(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ["simulate", "--preset", "llama-70b", "--batch", "2", "--rounds", "400", "--seed", "7"]
    assert main([*arguments, "--json", str(file)]) == 0
    found = json.loads(file.read_text())["llama-70b"]
    figures = simulator.simulate(PRESETS["llama-70b"].scenario, 2, 400, 7)
    assert found["figures"][0]["ssd"] == pytest.approx(figures.ssd)
    assert found["figures"][0]["over_sd"] == pytest.approx(figures.over_sd)


def test_simulate_takes_changes(capsys) -> None:
    changes = ["--draft-devices", "4", "--acceptance", "0.5", "--draft-ms", "1", "--fallback", "fast"]
    assert main(["simulate", "--preset", "qwen3-32b", "--batch", "1", "--rounds", "200", "--json", "-", *changes]) == 0
    scenario = json.loads(capsys.readouterr().out)["qwen3-32b"]["scenario"]
    assert scenario["draft_devices"] == 4 and scenario["acceptance"] == 0.5 and scenario["tree_devices"] == 1
    assert scenario["draft"]["base"] == pytest.approx(0.001) and scenario["fallback"] == "fast"


def test_simulate_splits_trees(capsys) -> None:
    common = ["simulate", "--preset", "qwen3-32b", "--batch", "8", "--rounds", "400"]
    assert main([*common, "--tree-devices", "2"]) == 0
    assert "15 branches on each of 2 devices" in capsys.readouterr().out
    assert main([*common, "--tree-devices", "2", "--json", "-"]) == 0
    two = json.loads(capsys.readouterr().out)["qwen3-32b"]
    assert two["scenario"]["tree_devices"] == 2 and two["scenario"]["branches"] == 15
    assert main([*common, "--json", "-"]) == 0
    one = json.loads(capsys.readouterr().out)["qwen3-32b"]
    assert two["figures"][0]["hit_rate"] > one["figures"][0]["hit_rate"] + 0.05


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "--batch", "0"], "write for example 1,4,16"),
        (["simulate", "--batch", "x"], "write for example 1,4,16"),
        (["simulate", "--draft-devices", "0"], "not a whole number above 0"),
        (["simulate", "--acceptance", "2"], "not a number from 0 to 1"),
        (["simulate", "--verify-ms", "-1"], "--verify-ms is -1"),
        (["simulate", "--draft-ms", "nan"], "--draft-ms is nan"),
        (["advise", "--target-params", "70Q", "--draft-params", "1B"], "write for example 350M or 70B"),
        (["advise", "--target-params", "70B"], "--draft-params"),
        (["advise"], "give either --target"),
        (["advise", "--target-params", "70B", "--draft-params", "1B", "--measure"], "--measure needs models"),
        (
            ["advise", "--target-params", "70B", "--draft-params", "1B", "--json", "/nowhere/x.json"],
            "folder does not exist",
        ),
        (["advise", "--target", "/nowhere/model", "--draft", DRAFT], "'/nowhere/model' is no folder"),
        (["doctor", "--model", TARGET], "give both"),
    ],
)
def test_faults_are_one_sentence(arguments: list[str], says: str, capsys) -> None:
    try:
        status = main(arguments)
    except SystemExit as end:  # argparse's own way
        status = end.code
    assert status == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert says in error and error.startswith("vllm-ssd")


# ---- advise ----


def test_advise_from_sizes(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "advice.json", tmp_path / "advice.png"]
    arguments = ["advise", "--target-params", "70B", "--draft-params", "277M", "8B", "--target-devices", "4"]
    assert main([*arguments, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    out = capsys.readouterr().out
    assert "277M (272M to 282M)" in out and "Take 277M" in out
    found = json.loads(files[0].read_text())[0]
    assert found["chosen"] == "277M" and found["best_size"]["value"] == pytest.approx(276.8e6)
    assert [draft["name"] for draft in found["drafts"]] == ["277M", "8B"]
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_advise_measures_a_real_pair(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    words = tmp_path / "words.txt"
    words.write_text("The function returns a list of strings. If the file does not exist, an error is raised.\n" * 40)
    file = tmp_path / "advice.json"
    arguments = ["advise", "--target", TARGET, "--draft", DRAFT, "--measure", "--text", str(words), "--batch", "1,2"]
    assert main([*arguments, "--dtype", "float32", "--json", str(file)]) == 0
    output = capsys.readouterr()
    assert "perplexity of target" in output.err and "times of draft" in output.err  # progress
    assert "batch 1" in output.out and "batch 2" in output.out
    for advice in json.loads(file.read_text()):
        (draft,) = advice["drafts"]
        assert draft["same_tokenizer"] and 0.0 < draft["measured_acceptance"] <= 1.0
        assert len(draft["by_position"]) == 8
        assert draft["none"] > 0 and draft["sd"]["rate"] >= 0.999 * draft["none"]
        assert advice["target"]["perplexity"] < draft["perplexity"]


# ---- doctor ----


def test_doctor_accepts_the_pair_and_refuses_a_folder_without_a_model(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    from vllm_ssd.cli import doctor

    good = list(doctor.pair(TARGET, DRAFT))
    assert all(finding.good for finding in good)
    assert any("same tokenizer, 4,096 tokens" in finding.what for finding in good)
    bad = list(doctor.pair(TARGET, str(tmp_path)))
    assert not bad[-1].good and "no config that transformers can read" in bad[-1].what
    swapped = list(doctor.pair(DRAFT, TARGET))
    assert any(not finding.good and "larger than the target" in finding.what for finding in swapped)


def test_doctor_refuses_another_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import shutil

    from vllm_ssd.cli import doctor

    other = tmp_path / "other"
    shutil.copytree(MODELS / "draft", other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = list(doctor.pair(TARGET, str(other)))
    assert not found[-1].good and "the tokenizer of" in found[-1].what


def test_doctor_ends_with_the_worst_finding(monkeypatch, capsys) -> None:
    from vllm_ssd.cli import doctor

    def broken():
        raise RuntimeError("no such library\nsecond line")

    for name in ("versions", "hooks", "draft_devices"):
        monkeypatch.setattr(doctor, name, lambda: iter([doctor.Finding(True, "fine")]))
    monkeypatch.setattr(doctor, "plugin", lambda: iter([doctor.Finding(True, "fine")]))
    assert main(["doctor"]) == 0
    monkeypatch.setattr(doctor, "plugin", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  RuntimeError: no such library\n" in out and out.count("ok    fine") == 7


def test_doctor_sees_plugins_that_are_left_out(monkeypatch) -> None:
    from vllm_ssd.cli import doctor

    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [type("Point", (), {"name": "saguaro"})])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert not next(doctor.plugin()).good
    monkeypatch.setenv("VLLM_PLUGINS", "other,saguaro")
    assert next(doctor.plugin()).good
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    assert "does not see the plugin" in next(doctor.plugin()).what


# ---- sizes ----


@pytest.mark.parametrize(
    ("written", "value"), [("350M", 3.5e8), ("70B", 7e10), ("1.5b", 1.5e9), ("1e9", 1e9), ("12", 12)]
)
def test_sizes_are_read(written: str, value: float) -> None:
    assert text.read_size(written) == value


@pytest.mark.parametrize(("value", "written"), [(3.5e8, "350M"), (7e10, "70B"), (1.18e9, "1.18B"), (999, "999")])
def test_sizes_are_shown(value: float, written: str) -> None:
    from vllm_ssd.sdsl.sizes import show_size

    assert show_size(value) == written
