"""What a user can ask of saguaro: every option, its default, its check.

Knows nothing about vLLM: `integration/` turns vLLM's speculative-config mapping into a
`SaguaroConfig` and hands it to the proposer and to the draft server.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_ssd.addresses import check_address

MAX_SPECULATIVE_TOKENS = 32
_LONGEST_NGRAM = 1 << 20
FAN_OUT_NAMES = ("measured", "geometric", "uniform")
FALLBACKS = ("auto", "draft", "ngram", "none")
LEAST_C = 0.001  # less would leave nothing of a draft's probabilities in float32
AUTO_BRANCHES = 32
"""Branches a request with tree_budget "auto", if there is time for so many."""
OVERDUE = 1.5
"""Times the expected verification: what takes longer is delayed, and does not only vary."""


@dataclasses.dataclass(frozen=True)
class SaguaroConfig:
    """One frozen set of options, checked when it is made.

    Raises `ValueError` naming the option, what is wrong and what would be right.
    """

    model: str
    """The draft model: a local folder or a name on the Hugging Face hub."""
    num_speculative_tokens: int
    """K: the most drafts a request gets in a round."""
    revision: str | None = None
    """Revision of the draft model on the hub."""
    trust_remote_code: bool = False
    """Whether the draft may run code from its repository; follows the target's setting."""

    draft_device: str = "auto"
    """Where the draft runs: "auto", "cuda:1", "cpu:1" or "cpu:2-5" (CPU cores to pin it to)."""
    draft_devices: tuple[str, ...] | None = None
    """Instead of `draft_device`: two or more, each for a draft that builds a part of every tree."""
    draft_dtype: str = "auto"
    """Weights and KV cache of the draft: "auto", "float32", "bfloat16" or "float16"."""
    draft_kv_cache_memory_bytes: int | None = None
    """Size of the draft's KV cache (of each draft's); None takes a share of its device's free memory."""
    draft_start_timeout: float = 600.0
    """Seconds to wait for the draft to load before the start is given up."""

    draft_address: str | None = None
    """Where a shared draft listens (`vllm-ssd serve-draft`): "ipc:///path" or "tcp://host:port"; None
    starts a draft of the target's own."""
    draft_keys: str | None = None
    """Folder with the keys for that address (`vllm-ssd keygen`); needed unless it is on this machine."""

    tree_budget: int | str = "auto"
    """Branches the draft (each draft) builds for a request in a round; "auto": as many as the measured
    verify leaves time for, and more while a verify is delayed."""
    fan_out: str | tuple[int, ...] = "measured"
    """How branches are spread over the K+1 positions where a verification may stop: "measured"
    (the most probable outcomes by the row's own draft probabilities, their sharpness measured),
    "geometric" (the paper's theorem), "uniform" or K+1 counts."""
    saguaro_c: float | str = 1.0
    """C of Saguaro sampling, in [LEAST_C, 1], 1 is off; "auto": the one that brings the most tokens a second.
    No effect on greedy rows."""
    draft_top_m: int = 64
    """Sampled drafts are drawn from the m most probable tokens of the draft."""

    fallback: str = "auto"
    """What a row that missed takes: "draft" (wait), "ngram", "none"; "auto" decides."""
    fallback_batch_threshold: int | None = None
    """With "auto": batches of up to this many rows wait for the draft, larger ones take n-grams;
    None decides each round by the measured gain of waiting."""
    prompt_lookup_min: int = 3
    """Shortest n-gram to look up, as for vLLM's `ngram` method."""
    prompt_lookup_max: int = 5
    """Longest n-gram to look up, as for vLLM's `ngram` method."""

    size_hint: bool = True
    """Whether to say once, in one log line, that the draft is far from the advised size and it shows."""

    @property
    def num_draft_devices(self) -> int:
        """Drafts that share each tree."""
        return len(self.draft_devices or ("",))

    @property
    def most_branches(self) -> int:
        """Branches a request that a round plans for, at most; those of each draft."""
        return AUTO_BRANCHES if self.tree_budget == "auto" else int(self.tree_budget)

    def __post_init__(self) -> None:
        for key in ("fan_out", "draft_devices"):
            if isinstance(getattr(self, key), list):
                object.__setattr__(self, key, tuple(getattr(self, key)))
        for check in _CHECKS:
            check(self)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> "SaguaroConfig":
        """Build a config from the user's JSON object (without `method`).

        Raises `ValueError` for an unknown key, a missing one or a bad value.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        keys = ["method", *(name for name in names if name != "trust_remote_code")]
        for key in options:
            if key not in names:
                close = difflib.get_close_matches(str(key), keys, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(keys)}."
                raise ValueError(f"speculative_config: unknown key {key!r} for method 'saguaro'; {hint}")
        for key in ("model", "num_speculative_tokens"):
            if options.get(key) is None:
                raise ValueError(f"speculative_config: method 'saguaro' needs {key!r}, for example {_EXAMPLE}.")
        return cls(**options)


_EXAMPLE = '{"method": "saguaro", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5}'


def _refuse(key: str, value: object, right: str) -> None:
    raise ValueError(f"speculative_config[{key!r}] is {value!r}; it must be {right}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_int(key: str, low: int, high: int | None = None):
    right = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"

    def check(config: SaguaroConfig) -> None:
        value = getattr(config, key)
        if not _is_int(value) or value < low or (high is not None and value > high):
            _refuse(key, value, right)

    return check


def _check_choice(key: str, choices: Sequence[str]):
    def check(config: SaguaroConfig) -> None:
        value = getattr(config, key)
        if value not in choices:
            _refuse(key, value, "one of " + ", ".join(repr(choice) for choice in choices))

    return check


def _check_texts(config: SaguaroConfig) -> None:
    if not isinstance(config.model, str) or not config.model:
        _refuse("model", config.model, "the folder or hub name of the draft model")
    if config.revision is not None and not isinstance(config.revision, str):
        _refuse("revision", config.revision, "a branch, tag or commit of the draft's repository, or null")
    if not isinstance(config.draft_device, str):
        _refuse("draft_device", config.draft_device, "'auto', 'cuda:N' or 'cpu:CORES', for example 'cpu:2-5'")
    if not isinstance(config.trust_remote_code, bool):
        _refuse("trust_remote_code", config.trust_remote_code, "true or false")


def _check_devices(config: SaguaroConfig) -> None:
    value = config.draft_devices
    if value is None:
        return
    names = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
    if not names or len(value) < 2:
        right = "a list of two or more devices, for example ['cuda:4', 'cuda:5'] (one is draft_device), or null"
        _refuse("draft_devices", list(value) if isinstance(value, tuple) else value, right)
    for key, default in (("draft_device", "auto"), ("draft_address", None)):
        if getattr(config, key) != default:
            _refuse("draft_devices", list(value), f"null with {key}; leave out one of the two")


def _check_tree_budget(config: SaguaroConfig) -> None:
    value = config.tree_budget
    if value != "auto" and (not _is_int(value) or not 1 <= value <= 1024):
        _refuse("tree_budget", value, "'auto' or a whole number from 1 to 1024")


def _check_address(config: SaguaroConfig) -> None:
    address, keys = config.draft_address, config.draft_keys
    if keys is not None and (not isinstance(keys, str) or not keys):
        _refuse("draft_keys", keys, "a folder that `vllm-ssd keygen` made, or null")
    if address is None:
        if keys is not None:
            _refuse("draft_keys", keys, "null unless draft_address is given")
        return
    try:
        check_address(address, keys is not None)
    except ValueError as error:
        raise ValueError(f"speculative_config['draft_address'] is {address!r}: {error}.") from None
    if config.draft_device != "auto":
        _refuse("draft_device", config.draft_device, "'auto' with draft_address: the shared draft has its --device")
    if config.draft_kv_cache_memory_bytes is not None:
        value = config.draft_kv_cache_memory_bytes
        _refuse("draft_kv_cache_memory_bytes", value, "null with draft_address: the shared draft has its own option")


def _check_kv_cache(config: SaguaroConfig) -> None:
    value = config.draft_kv_cache_memory_bytes
    if value is not None and (not _is_int(value) or not 1 << 20 <= value <= 1 << 50):
        _refuse("draft_kv_cache_memory_bytes", value, "a number of bytes, at least 1048576 and at most 2**50, or null")


def _check_threshold(config: SaguaroConfig) -> None:
    value = config.fallback_batch_threshold
    if value is not None and (not _is_int(value) or value < 0):
        _refuse("fallback_batch_threshold", value, "a whole number of at least 0, or null (measured)")
    if value is not None and config.fallback != "auto":
        _refuse("fallback_batch_threshold", value, f"null where `fallback` is {config.fallback!r}: it is for 'auto'")


def _check_fan_out(config: SaguaroConfig) -> None:
    value, positions = config.fan_out, config.num_speculative_tokens + 1
    if value in FAN_OUT_NAMES:
        return
    counts_fit = isinstance(value, tuple) and len(value) == positions
    if not counts_fit or not all(_is_int(count) and count >= 0 for count in value) or sum(value) == 0:
        _refuse(
            "fan_out",
            list(value) if isinstance(value, tuple) else value,
            f"'measured', 'geometric', 'uniform' or a list of {positions} counts "
            "(num_speculative_tokens + 1), not all 0",
        )


def _check_saguaro_c(config: SaguaroConfig) -> None:
    value = config.saguaro_c
    if value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not LEAST_C <= value <= 1:
        _refuse("saguaro_c", value, f"'auto' or a number from {LEAST_C} to 1 (1 is off)")


def _check_start_timeout(config: SaguaroConfig) -> None:
    value = config.draft_start_timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        _refuse("draft_start_timeout", value, "a number of seconds above 0")


def _check_size_hint(config: SaguaroConfig) -> None:
    if not isinstance(config.size_hint, bool):
        _refuse("size_hint", config.size_hint, "true or false")


def _check_prompt_lookup(config: SaguaroConfig) -> None:
    if config.prompt_lookup_min > config.prompt_lookup_max:
        _refuse("prompt_lookup_min", config.prompt_lookup_min, f"at most prompt_lookup_max={config.prompt_lookup_max}")


_CHECKS = (
    _check_texts,
    _check_int("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS),
    _check_choice("draft_dtype", ("auto", "float32", "bfloat16", "float16")),
    _check_kv_cache,
    _check_devices,
    _check_address,
    _check_start_timeout,
    _check_tree_budget,
    _check_fan_out,
    _check_saguaro_c,
    _check_int("draft_top_m", 1, 1024),
    _check_choice("fallback", FALLBACKS),
    _check_threshold,
    _check_int("prompt_lookup_min", 1, _LONGEST_NGRAM),
    _check_int("prompt_lookup_max", 1, _LONGEST_NGRAM),
    _check_prompt_lookup,
    _check_size_hint,
)
