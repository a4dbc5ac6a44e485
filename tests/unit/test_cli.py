"""The command line: quick to help, one sentence for each fault, figures for people and as JSON."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ssd import simulator
from vllm_ssd.cli import main, text
from vllm_ssd.presets import PRESETS

SIZES = ["advise", "--target-params", "70B", "--draft-params", "1B"]
MODELS = Path(__file__).parent.parent / "data" / "models"
TARGET, DRAFT = str(MODELS / "target"), str(MODELS / "draft")
PAIR = ["advise", "--target", TARGET, "--draft", DRAFT]


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


def test_a_missing_library_is_named_with_its_remedy() -> None:
    code = "import sys; sys.modules['scipy'] = None\nfrom vllm_ssd.cli import main\nmain(['advise'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "vllm-ssd advise: scipy is not installed: pip install 'vllm-ssd[advise]'\n"


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
    assert "10 branches on each of 2 devices" in capsys.readouterr().out
    assert main([*common, "--tree-devices", "2", "--json", "-"]) == 0
    two = json.loads(capsys.readouterr().out)["qwen3-32b"]
    assert two["scenario"]["tree_devices"] == 2 and two["scenario"]["branches"] == 10
    assert main([*common, "--json", "-"]) == 0
    one = json.loads(capsys.readouterr().out)["qwen3-32b"]
    assert two["figures"][0]["hit_rate"] > one["figures"][0]["hit_rate"] + 0.05


def test_simulate_says_what_its_figures_are(tmp_path: Path, capsys) -> None:
    file = tmp_path / "figures.json"
    options = ["--batch", "2", "--rounds", "200", "--draft-devices", "1", "--k", "4", "--json", str(file)]
    assert main(["simulate", "--preset", "llama-70b", *options]) == 0
    output = capsys.readouterr()
    (row,) = rows_of(output.out, "batch")
    (figures,) = json.loads(file.read_text())["llama-70b"]["figures"]
    assert row["none tokens/s"] == f"{figures['none']:.1f}" and row["SSD tokens/s"] == f"{figures['ssd']:.1f}"
    assert row["always waiting tokens/s"] == f"{figures['ssd_waiting']:.1f}"
    assert row["never tokens/s"] == f"{figures['ssd_fast']:.1f}"
    assert "K 4 (SD 6), 21 branches, fallback auto" in output.out
    assert output.err == f"written: {file}\n"


# ---- faults ----


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "--batch", "0"], "write for example 1,4,16"),
        (["simulate", "--batch", "x"], "write for example 1,4,16"),
        (["simulate", "--batch", "-1,4"], "--batch is '-1,4'; it must be above 0"),
        (["simulate", "--draft-devices", "0"], "not a whole number above 0"),
        (["simulate", "--acceptance", "2"], "not a number from 0 to 1"),
        (["simulate", "--acceptance", "-1"], "not a number from 0 to 1"),
        (["simulate", "--verify-ms", "-1"], "--verify-ms is -1"),
        (["simulate", "--draft-ms", "nan"], "--draft-ms is nan"),
        (["simulate", "--draft-ms", "1e308"], "--draft-ms is 1e+308"),
        (["simulate", "--batch", "1000000000"], "--batch has 1000000000; it must be at most 4096"),
        (["keygen", ""], "FOLDER is empty"),
        (["simulate", "--k", "33"], "--k is 33; it must be at most 32"),
        (["simulate", "--json", "/nowhere/f"], "--json is '/nowhere/f', whose folder does not exist"),
        (["simulate", "--bach", "1"], "there is no option --bach; did you mean --batch?"),
        (["simulate", "--zzzzzz"], "there is no option --zzzzzz; --help lists them"),
        (["simulate", "what"], "'what' is one argument too many"),
        (["advise", "--target-params", "70Q", "--draft-params", "1B"], "write for example 350M or 70B"),
        (["advise", "--target-params", "70B", "--draft-params", "-3M"], "--draft-params is '-3M'; it must be above 0"),
        (["advise", "--target-params", "1e400", "--draft-params", "1B"], "--target-params: '1e400' is not a number"),
        (["advise", "--target-params", "70B"], "--draft-params"),
        (["advise"], "give either --target"),
        ([*PAIR, "--mesure"], "there is no option --mesure; did you mean --measure?"),
        ([*SIZES, "--measure"], "--measure needs models: give --target and --draft"),
        ([*SIZES, "--text", "x"], "--text needs models: give --target and --draft"),
        ([*SIZES, "--batch", "1,8"], "--batch needs --measure and models: give --target and --draft"),
        ([*SIZES, "--temperature", "0"], "--temperature needs --measure and models"),
        ([*SIZES, "--dtype", "auto"], "--dtype needs --measure and models"),
        ([*SIZES, "--overhead-ms", "0"], "--overhead-ms needs --measure and models"),
        ([*PAIR, "--batch", "8"], "--batch needs --measure: without it nothing is timed"),
        ([*PAIR, "--measure", "--target-devices", "4"], "--target-devices goes without --measure"),
        ([*PAIR, "--measure", "--temperature", "nan"], "--temperature is nan; it must be a number from 0 on"),
        ([*SIZES, "--json", "/nowhere/x.json"], "--json is '/nowhere/x.json', whose folder does not exist"),
        ([*SIZES, "--json", "/"], "--json is '/', a folder"),
        ([*SIZES, "--plot", "advice.what"], "--plot is 'advice.what'; its name must end in one of"),
        ([*SIZES, "--plot", "advice"], "--plot is 'advice'; its name must end in one of"),
        ([*PAIR, "--text", "/nowhere/words"], "--text is '/nowhere/words', which cannot be read (No such file"),
        ([*PAIR, "--text", "/"], "--text is '/', which cannot be read (Is a directory)"),
        ([*PAIR, "--text", str(MODELS / "draft" / "model.safetensors")], "which is no text in UTF-8"),
        ([*PAIR, DRAFT], "is given twice"),
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
    output = capsys.readouterr()
    (error,) = output.err.splitlines()
    assert says in error and error.startswith(f"vllm-ssd {arguments[0]}: ")
    assert output.out == ""


@pytest.mark.parametrize("words", ["", "Hi there"])
def test_texts_that_are_too_short_are_named(words: str, tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "words.txt"
    file.write_text(words)
    assert main([*PAIR, "--text", str(file)]) == 2
    assert re.search(f"--text '{file}' has [0-3] tokens; at least 512 are needed", capsys.readouterr().err)


# ---- advise ----


def rows_of(out: str, first: str) -> list[dict[str, str]]:
    """The rows of the first table whose first heading is `first`: what stands under each heading."""
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(first + " "))
    headings = [(match.group(), match.end()) for match in re.finditer(r"\S+(?: \S+)*", lines[at])]
    rows = []
    for line in lines[at + 1 :]:
        cells = [(match.group(), match.start(), match.end()) for match in re.finditer(r"\S+(?: \S+)*", line)]
        # Columns are aligned to the right, but for the first: a cell belongs to the heading it ends with.
        if len(cells) != len(headings) or any(cell[2] != end for cell, (_, end) in zip(cells[1:], headings[1:])):
            break
        rows.append({heading: cell[0] for (heading, _), cell in zip(headings, cells)})
    return rows


def values_in(draft: dict) -> dict[str, str]:
    """What a table should say of a draft, from the JSON: all that is the same in every mode."""
    return {
        "draft": draft["name"],
        "α law": f"{draft['law_acceptance']:.2f}",
        "SDSL gain": f"{draft['sdsl']['gain']:.2f}x (γ {draft['sdsl']['gamma']})",
        "hits": f"{draft['ssd']['hit_rate']:.2f}",
    }


def test_advise_from_sizes(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / "advice.json", tmp_path / "advice.png"]
    arguments = ["advise", "--target-params", "70B", "--draft-params", "277M", "8B", "--target-devices", "4"]
    assert main([*arguments, "--json", str(files[0]), "--plot", str(files[1])]) == 0
    output = capsys.readouterr()
    assert "277M (272M to 282M)" in output.out
    assert output.err == f"written: {files[0]}, {files[1]}\n"
    found = json.loads(files[0].read_text())[0]
    assert found["chosen"] == "277M" and found["best_size"]["value"] == pytest.approx(276.8e6)
    assert [draft["name"] for draft in found["drafts"]] == ["277M", "8B"]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    for row, draft in zip(rows_of(output.out, "draft"), found["drafts"], strict=True):
        assert row == {
            **values_in(draft),
            "params": draft["name"],
            "N/N_opt": f"{draft['ratio_to_best_size']:.2g}",
            "SD gain (K)": f"{draft['sd']['rate']:.2f}x ({draft['sd']['num_drafts']})",
            "SSD gain (K, branches)": f"{draft['ssd']['rate']:.2f}x "
            f"({draft['ssd']['num_drafts']}, {draft['ssd']['branches']})",
        }


def test_advise_from_sizes_says_that_it_measured_nothing(capsys) -> None:
    assert main([*SIZES, "--target-devices", "4"]) == 0
    out = capsys.readouterr().out
    assert "Not measured. By laws alone 1B would do best" in out and "Take " not in out
    assert "α by SDSL's law (fitted on HellaSwag" in out and "Chinchilla's law gives after 2T tokens" in out
    assert "the target's on 4 more of the kind" in out and "docs/scaling_law.md" in out
    assert main(["advise", "--target-params", "100M", "--draft-params", "10M"]) == 0
    assert "No recommendation: nothing was measured" in capsys.readouterr().out


def test_advise_as_json_alone(capsys) -> None:
    assert main([*SIZES, "--json", "-"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)[0]["drafts"][0]["name"] == "1B" and output.err == ""


def test_advise_before_measuring_recommends_nothing_for_small_models(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "advice.json"
    assert main([*PAIR, "--json", str(file), "--target-devices", "2"]) == 0
    out = capsys.readouterr().out
    (advice,) = json.loads(file.read_text())
    (draft,) = advice["drafts"]
    assert advice["chosen"] is None and not advice["measured"] and advice["setting"]["target_devices"] == 2
    assert "No recommendation: nothing was measured" in out and "add --measure" in out and "Take " not in out
    assert rows_of(out, "draft") == [
        {
            **values_in(draft),
            "params": "2.23M",
            "tokenizer": "fits",
            "perplexity": f"{draft['perplexity']:.1f}",
            "SD gain (K)": f"{draft['sd']['rate']:.2f}x ({draft['sd']['num_drafts']})",
            "SSD gain (K, branches)": f"{draft['ssd']['rate']:.2f}x "
            f"({draft['ssd']['num_drafts']}, {draft['ssd']['branches']})",
        }
    ]


def test_advise_measures_a_real_pair(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    words = tmp_path / "words.txt"
    words.write_text("The function returns a list of strings. If the file does not exist, an error is raised.\n" * 40)
    file = tmp_path / "advice.json"
    assert (
        main([*PAIR, "--measure", "--text", str(words), "--batch", "1,2", "--dtype", "float32", "--json", str(file)])
        == 0
    )
    output = capsys.readouterr()
    assert "perplexity of target" in output.err and "times of draft" in output.err  # progress
    tables = output.out.split("\nbatch ")[1:]
    for batch, advice, table in zip((1, 2), json.loads(file.read_text()), tables, strict=True):
        (draft,) = advice["drafts"]
        assert advice["measured"] and draft["same_tokenizer"] and 0.0 < draft["measured_acceptance"] <= 1.0
        assert len(draft["by_position"]) == 8
        assert draft["none"] > 0 and draft["sd"]["rate"] >= 0.999 * draft["none"]
        assert advice["target"]["perplexity"] < draft["perplexity"]
        assert table.startswith(f"{batch}, none: {draft['none']:.1f} tokens/s")
        assert rows_of(table, "draft") == [
            {
                **values_in(draft),
                "params": "2.23M",
                "tokenizer": "fits",
                "perplexity": f"{draft['perplexity']:.1f}",
                "α (T=0)": f"{draft['measured_acceptance']:.2f}",
                "own text": f"{draft['by_position'][0]:.2f}",
                "step ms": f"{1e3 * draft['step_seconds']['seconds'][0]:.2f}",
                "SD tokens/s (K)": f"{draft['sd']['rate']:.1f} ({draft['sd']['num_drafts']})",
                "SSD tokens/s (K, branches)": f"{draft['ssd']['rate']:.1f} "
                f"({draft['ssd']['num_drafts']}, {draft['ssd']['branches']})",
            }
        ]
        assert advice["recommendation"] in table
        assert ("own text: measured on what the target" in " ".join(table.split())) == (batch == 1)  # the legend, once


def test_no_draft_that_fits_is_a_failure_without_work(tmp_path: Path, capsys) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "advice.json"
    other = with_other_tokenizer(tmp_path / "other")
    assert main(["advise", "--target", TARGET, "--draft", str(other), "--measure", "--json", str(file)]) == 1
    output = capsys.readouterr()
    assert "None of these drafts fits target: a draft needs the target's tokenizer." in output.out
    assert rows_of(output.out, "draft") == [{"draft": "other", "params": "2.23M", "tokenizer": "differs"}]
    assert output.err == f"written: {file}\n"
    assert json.loads(file.read_text())[0]["chosen"] is None


def test_ragged_tables_are_refused() -> None:
    with pytest.raises(ValueError):
        text.table(["a", "b"], [["1", "2", "3"]])
    assert text.table(["a", "bb"], [["ccc", "1"]]) == "a    bb\nccc   1"


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


def with_other_tokenizer(folder: Path) -> Path:
    """The draft, in a folder that it makes, with two tokens exchanged."""
    shutil.copytree(MODELS / "draft", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = list(vocabulary)[300:302]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_doctor_refuses_another_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from vllm_ssd.cli import doctor

    found = list(doctor.pair(TARGET, str(with_other_tokenizer(tmp_path / "other"))))
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
