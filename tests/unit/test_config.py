"""The options: right ones are accepted, wrong ones refused in one sentence that names the key."""

import dataclasses
from typing import Any

import pytest

from vllm_ssd.config import SaguaroConfig

REQUIRED = {"model": "a/draft", "num_speculative_tokens": 3}

WRONG = [
    *(("revision", value) for value in (5, True)),
    *(("trust_remote_code", value) for value in ("yes", 1)),
    *(("draft_device", value) for value in (1, None)),
    *(("draft_devices", value) for value in ([], ["cuda:1"], "cuda:1", "cuda:1|cuda:2", [1, 2], 2, True)),
    ("model", ""),
    ("model", 5),
    *(("num_speculative_tokens", value) for value in (0, -1, 33, True, "5", 2.0)),
    *(("draft_dtype", value) for value in ("float64", "fp16", 16, None)),
    *(("draft_kv_cache_memory_bytes", value) for value in (0, 1000, 1.5e9, "4GiB", True, 10**400)),
    *(("draft_start_timeout", value) for value in (0, -1, "60", True, float("nan"))),
    *(("tree_budget", value) for value in (0, 1025, "24", True)),
    *(("fan_out", value) for value in ("even", 4, None, [0, 0, 0, 0], [1, -1, 2, 2], [1.0, 2, 2, 2])),
    *(("fan_out", [1] * length) for length in (0, 3, 5)),  # one for each of K + 1 positions
    *(("size_hint", value) for value in (1, "yes", None)),
    *(("saguaro_c", value) for value in (0, 1e-46, 1.1, -0.5, "0.5", True, float("nan"))),
    *(("draft_top_m", value) for value in (0, 1025, 64.0)),
    *(("fallback", value) for value in ("n-gram", "", None, 1)),
    *(("fallback_batch_threshold", value) for value in (-1, 2.5, "8", True)),
    *(("prompt_lookup_min", value) for value in (0, 6, "3")),
    *(("prompt_lookup_max", value) for value in (0, 5.0, 10**400)),
]

RIGHT = [
    *({"num_speculative_tokens": value} for value in (1, 32)),
    *({"draft_dtype": value} for value in ("auto", "float32", "bfloat16", "float16")),
    *({"draft_kv_cache_memory_bytes": value} for value in (None, 1 << 20, 1 << 34)),
    {"draft_start_timeout": 5},
    *({"tree_budget": value} for value in (1, 1024, "auto")),
    *({"fan_out": value} for value in ("measured", "geometric", "uniform", [1, 2, 3, 4], (0, 0, 0, 1))),
    *({"saguaro_c": value} for value in (1, 1.0, 0.01, "auto")),
    *({"draft_top_m": value} for value in (1, 1024)),
    *({"size_hint": value} for value in (True, False)),
    *({"fallback": value} for value in ("auto", "draft", "ngram", "none")),
    *({"fallback_batch_threshold": value} for value in (None, 0, 64)),
    *({"fallback": value, "fallback_batch_threshold": None} for value in ("draft", "ngram")),
    {"prompt_lookup_min": 4, "prompt_lookup_max": 4},
    *({"draft_devices": value} for value in (None, ["cuda:4", "cuda:5"], ["cpu:1", "cpu:1", "cpu:2-3"])),
    {"trust_remote_code": True, "revision": "main", "draft_device": "cpu:1"},
]


def message_of(options: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        SaguaroConfig.from_mapping(options)
    return str(caught.value)


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert message.endswith((".", "?"))


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_wrong_values_are_refused_by_key_and_value(key: str, value: Any) -> None:
    """A wrong value passes, crashes elsewhere, or the user is not told which key to change."""
    message = message_of({**REQUIRED, key: value})
    assert repr(key) in message
    assert repr(value) in message
    assert "must be" in message
    assert_one_sentence(message)


@pytest.mark.parametrize("fallback", ("draft", "ngram", "none"))
def test_a_batch_threshold_is_refused_where_it_says_nothing(fallback: str) -> None:
    """It is ignored, and the user believes that batches are told apart."""
    message = message_of({**REQUIRED, "fallback": fallback, "fallback_batch_threshold": 4})
    assert "fallback_batch_threshold" in message and repr(fallback) in message
    assert_one_sentence(message)


@pytest.mark.parametrize("options", RIGHT, ids=str)
def test_right_values_are_taken(options: dict[str, Any]) -> None:
    """A documented value is refused, or is not what the config then holds."""
    config = SaguaroConfig.from_mapping({**REQUIRED, **options})
    for key, value in options.items():
        assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("typo", "meant"),
    (("num_speculative_token", "num_speculative_tokens"), ("saguaroc", "saguaro_c"), ("fanout", "fan_out")),
)
def test_an_unknown_key_comes_with_a_suggestion(typo: str, meant: str) -> None:
    """A misspelt option is dropped silently, or refused without help."""
    message = message_of({**REQUIRED, typo: 1})
    assert repr(typo) in message
    assert f"did you mean {meant!r}?" in message
    assert_one_sentence(message)


def test_an_unknown_key_like_no_other_comes_with_the_list() -> None:
    """The user has to look for the known keys in the source."""
    message = message_of({**REQUIRED, "zzz": 1})
    assert "'zzz'" in message
    names = {field.name for field in dataclasses.fields(SaguaroConfig)} - {"trust_remote_code"}  # no key of it
    assert all(name in message for name in names | {"method"})


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("absent", (True, False), ids=("absent", "null"))
def test_missing_options_come_with_an_example(key: str, absent: bool) -> None:
    """A missing option shows as a TypeError of `__init__`."""
    options = {k: v for k, v in REQUIRED.items() if k != key}
    message = message_of(options if absent else {**options, key: None})
    assert repr(key) in message
    assert '"method": "saguaro"' in message
    assert_one_sentence(message)


@pytest.mark.parametrize("other", ({"draft_device": "cuda:1"}, {"draft_address": "ipc:///run/draft"}), ids=str)
def test_several_devices_stand_alone(other: dict[str, str]) -> None:
    """One of two options that contradict each other is dropped without a word."""
    message = message_of({**REQUIRED, "draft_devices": ["cuda:4", "cuda:5"], **other})
    assert "'draft_devices'" in message and f"with {next(iter(other))}" in message
    assert_one_sentence(message)


def test_the_config_is_frozen_and_comes_back_from_its_fields() -> None:
    """The draft server cannot be told the options, or somebody changes them on the way."""
    config = SaguaroConfig.from_mapping({**REQUIRED, "fan_out": [1, 2, 3, 4], "draft_devices": ["cpu:1"] * 2})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.saguaro_c = 1.0
    assert SaguaroConfig(**dataclasses.asdict(config)) == config
    assert hash(config) == hash(SaguaroConfig(**dataclasses.asdict(config)))
