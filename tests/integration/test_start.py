"""Starting: wrong options are refused in one sentence, right ones arrive, nothing happens unasked."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.integration import hooks

from .engine import DRAFT, TARGET, EngineProcess, check_same_tokens, prompts, requests_for, saguaro
from .tiny import make_pair


def config_of(speculative_config: dict | None, **options):
    options = {"model": str(TARGET), "max_model_len": 512, **options}
    return EngineArgs(**options, speculative_config=speculative_config).create_engine_config()


def refusal(speculative_config: dict, error: type[Exception] = ValueError, **options) -> str:
    with pytest.raises(error) as caught:
        config_of(speculative_config, **options)
    message = str(caught.value)
    assert "\n" not in message.strip(), f"more than one line: {message}"
    assert len(message) < 500
    return message


WRONG = [
    ({"tree_bugdet": 8}, ("tree_bugdet", "tree_budget")),
    ({"num_speculative_tokens": 0}, ("num_speculative_tokens", "from 1 to 32")),
    ({"num_speculative_tokens": 33}, ("num_speculative_tokens", "from 1 to 32")),
    ({"num_speculative_tokens": None}, ("num_speculative_tokens",)),
    ({"model": None}, ("'model'",)),
    ({"draft_device": "cpu:99"}, ("draft_device", "no core 99")),
    ({"draft_device": "cuda:9"}, ("draft_device",)),
    ({"draft_device": "gpu"}, ("draft_device", "cuda:N")),
    ({"draft_devices": []}, ("draft_devices", "two or more")),
    ({"draft_devices": ["cpu:1", "cpu:99"]}, ("draft_devices", "cpu:99", "no core 99")),
    ({"draft_devices": ["cuda:1", "cuda:2"]}, ("draft_devices", "built for CPUs")),
    ({"draft_devices": ["cpu:1", "cpu:1"], "draft_device": "cpu:1"}, ("draft_devices", "null with draft_device")),
    ({"model": "/no/such/folder"}, ("model", "/no/such/folder", "does not exist")),
    ({"fan_out": [1, 2]}, ("fan_out", "num_speculative_tokens + 1")),
    ({"saguaro_c": 0}, ("saguaro_c",)),
    ({"fallback": "wait"}, ("fallback", "'ngram'")),
    ({"draft_kv_cache_memory_bytes": 12}, ("draft_kv_cache_memory_bytes",)),
]


@pytest.mark.parametrize("wrong, words", WRONG, ids=str)
def test_wrong_option(wrong, words):
    message = refusal({**saguaro(), **wrong})
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "options, word",
    [
        ({"worker_cls": "my.Worker"}, "worker_cls"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline_parallel_size"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2, "data_parallel_backend": "ray"}, "use 'mp'"),
    ],
    ids=str,
)
def test_wrong_engine_option(options, word):
    if "ray" in options.values():
        pytest.importorskip("ray", reason="vLLM itself refuses this without Ray")
    assert word in refusal(saguaro(), **options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"distributed_executor_backend": "ray"}, ("on Ray there is one draft", "'mp'")),
        ({"data_parallel_size": 2, "data_parallel_size_local": 2}, ("2 data parallel ranks", "draft_device")),
    ],
    ids=str,
)
def test_several_draft_devices_where_there_is_one_draft(options, words):
    if "distributed_executor_backend" in options:
        pytest.importorskip("ray", reason="vLLM itself refuses this without Ray")
    message = refusal(saguaro(draft_devices=["cpu:1", "cpu:1"]), **options)
    assert "draft_devices" in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    "facts",
    (
        {"data_parallel_size": 2, "data_parallel_size_local": 0, "data_parallel_address": "127.0.0.1"},
        {"tensor_parallel_size": 3, "nnodes": 3, "node_rank": 2, "distributed_executor_backend": "mp"},
    ),
    ids=("no rank", "a later rank"),
)
def test_node_without_a_draft(facts):
    """It is refused for devices that only the node of the draft has."""
    spec = config_of(saguaro(draft_device="cuda:1"), **facts).speculative_config
    assert spec.saguaro.draft_device == "cuda:1"


def test_draft_with_another_tokenizer(tmp_path):
    _, draft = make_pair(tmp_path)
    assert "tokenizer" in refusal(saguaro(draft))


def test_draft_whose_tokens_have_other_ids(tmp_path):
    """Vocabularies of one size are taken for one vocabulary."""
    draft = tmp_path / "draft"
    shutil.copytree(DRAFT, draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "is not the target's" in refusal(saguaro(draft))


def test_target_without_a_tokenizer(tmp_path):
    """Whoever skips the tokenizer reads of backends that cannot be instantiated."""
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        (target / name).symlink_to(TARGET / name)
    message = refusal(saguaro(), model=str(target), skip_tokenizer_init=True)
    assert f"tokenizer is {str(target)!r}, which cannot be read" in message


def test_folder_without_a_model(tmp_path):
    assert "cannot be read" in refusal(saguaro(tmp_path))


def test_mistyped_method():
    assert refusal({**saguaro(), "method": "saguro"}).endswith("write 'saguaro'.")
    with pytest.raises(ValueError, match="ngram"):  # vLLM's own message, which lists its methods
        config_of({"method": "sugar", "model": str(DRAFT), "num_speculative_tokens": 3})


def test_vllm_without_a_hook(monkeypatch):
    gone = hooks.Hook("vllm.engine.arg_utils", "EngineArgs.no_such_method", "a test", "never")
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS, gone))
    message = refusal(saguaro(), RuntimeError)
    assert "no_such_method" in message and hooks.vllm_version() in message
    assert config_of(None).speculative_config is None, "vLLM without saguaro must go on working"


def test_hook_table_holds_against_this_vllm():
    assert len(hooks.HOOKS) > 5
    for hook in hooks.HOOKS:
        assert hooks.missing_in_vllm(hook) is None
    hook = dataclasses.replace(hooks.HOOKS[0], parameters=("no_such",))
    assert "no_such" in hooks.missing_in_vllm(hook)
    assert "missing" in hooks.missing_in_vllm(hooks.Hook("vllm.no_such_module", "x", "a test", "never"))


# ---- forms of the option ----


def parsed(*arguments: str):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--model", str(TARGET), "--max-model-len", "512", *arguments]))
    return args.create_engine_config().speculative_config


OPTIONS = saguaro(num_speculative_tokens=4, saguaro_c=0.5, fan_out="uniform", tree_budget=7, draft_device="cpu:1")


def test_json_dotted_and_yaml_parse_alike(tmp_path):
    expected = SaguaroConfig.from_mapping({key: value for key, value in OPTIONS.items() if key != "method"})
    as_json = parsed("--speculative-config", json.dumps(OPTIONS))
    dotted = parsed(*(f"--speculative-config.{key}={value}" for key, value in OPTIONS.items()))
    file = tmp_path / "config.yaml"
    file.write_text("speculative-config:\n" + "".join(f"  {key}: {value}\n" for key, value in OPTIONS.items()))
    from_file = parsed("--config", str(file))
    for form, found in (("JSON", as_json), ("dotted", dotted), ("YAML", from_file)):
        assert found.saguaro == expected, form
        assert found.num_speculative_tokens == 4, form


def test_a_list_of_devices_parses_in_every_form(tmp_path):
    devices = ["cpu:1", "cpu:0-1"]
    options = saguaro(draft_devices=devices)
    file = tmp_path / "config.yaml"
    file.write_text(f"speculative-config:\n  method: saguaro\n  model: {DRAFT}\n  num_speculative_tokens: 5\n"
                    "  draft_devices: ['cpu:1', 'cpu:0-1']\n")  # fmt: skip
    dotted = [f"--speculative-config.{key}={value}" for key, value in saguaro().items()]
    forms = {
        "JSON": ("--speculative-config", json.dumps(options)),
        "dotted": (*dotted, f"--speculative-config.draft_devices={json.dumps(devices)}"),
        "YAML": ("--config", str(file)),
    }
    for form, arguments in forms.items():
        assert parsed(*arguments).saguaro.draft_devices == tuple(devices), form


def test_wrong_type_names_the_key():
    with pytest.raises(ValueError, match="tree_budget"):
        parsed("--speculative-config", json.dumps({**OPTIONS, "tree_budget": "7"}))


def test_auto_becomes_the_cores_that_the_target_leaves(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
    assert parsed("--speculative-config", json.dumps(saguaro())).saguaro.draft_device == "cpu:1"


def test_auto_is_refused_where_the_target_takes_every_core(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    with pytest.raises(ValueError, match="takes all cores"):
        parsed("--speculative-config", json.dumps(saguaro()))


def test_trust_remote_code_is_the_targets():
    with pytest.raises(ValueError, match="--trust-remote-code"):
        parsed("--speculative-config", json.dumps(saguaro(trust_remote_code=True)))


# ---- installed, but not asked for ----

UNASKED = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
args = EngineArgs(model=sys.argv[1], max_model_len=512, speculative_config=json.loads(sys.argv[2]))
config = args.create_engine_config()
print(json.dumps({
    "ours": sorted(name for name in sys.modules if name.startswith("vllm_ssd")),
    "worker_cls": config.parallel_config.worker_cls,
    "speculative_config": repr(config.speculative_config),
    "wrapped": hasattr(EngineArgs.create_speculative_config, "_saguaro"),
}))
"""


@pytest.mark.parametrize(
    "speculative_config", (None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
)
def test_unasked_nothing_changes(speculative_config):
    answers = []
    for plugins in ("saguaro", ""):
        run = subprocess.run(
            [sys.executable, "-c", UNASKED, str(TARGET), json.dumps(speculative_config)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        answers.append(json.loads(run.stdout.splitlines()[-1]))
        assert "saguaro" not in run.stdout.lower() + run.stderr.lower() or plugins == ""
    with_plugin, without = answers
    assert with_plugin.pop("wrapped") and not without.pop("wrapped")
    ours = with_plugin.pop("ours")
    assert without.pop("ours") == []
    assert ours == ["vllm_ssd", "vllm_ssd.integration", "vllm_ssd.integration.engine_args", "vllm_ssd.plugin"]
    assert with_plugin == without


# ---- padded vocabularies ----


def pad(source, out, size: int, loud: bool):
    """A copy with rows of embedding up to `size`; `loud` rows would win every argmax."""
    out.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    rows = torch.zeros((size - len(embedding), embedding.shape[1]), dtype=embedding.dtype)
    if loud:
        rows += 4 * embedding[: len(rows)]
    weights["model.embed_tokens.weight"] = torch.cat([embedding, rows])
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def test_padded_vocabularies_are_accepted(tmp_path, baseline):
    target = pad(TARGET, tmp_path / "target", 4160, loud=False)
    draft = pad(DRAFT, tmp_path / "draft", 4288, loud=True)
    assert config_of(saguaro(draft), model=str(target)).speculative_config.real_vocab_size == 4096
    requests = requests_for(prompts("docs")[:6], {"temperature": 0, "max_tokens": 40, "ignore_eos": True})
    with EngineProcess(saguaro(draft, 3, fallback="draft"), model=target) as engine:
        check_same_tokens(engine.generate(requests), baseline.generate(requests), "padded")
        stats = engine.stats()
        assert stats["accepted_tokens"] > 0.1 * stats["drafted_tokens"] > 0, "padding was drafted"
        for request in requests:
            request["params"] = {**request["params"], "temperature": 1.0}
        sampled = engine.generate(requests)
        assert not engine.warnings()
    assert max(max(result["outputs"][0]["token_ids"]) for result in sampled) < 4096
