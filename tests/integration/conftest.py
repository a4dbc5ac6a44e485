"""What the engine tests share: models made on the fly, and vLLM's answers without speculation."""

import importlib.util
import json
from pathlib import Path

import pytest

from .engine import DRAFT, TARGET, TESTS, EngineProcess
from .tiny import make_pair


def models_script():
    """`scripts/models.py` as a module."""
    spec = importlib.util.spec_from_file_location("models_script", TESTS.parent / "scripts" / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def made_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models that tests make."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def slow_target(made_models: Path) -> Path:
    """The target with layers that change nothing: same text, but time for the draft to build trees."""
    out = made_models / "target-16"
    models_script().grow(TARGET, out, layers=16)
    return out


@pytest.fixture(scope="session")
def random_draft(made_models: Path) -> Path:
    """A draft that is nearly always wrong."""
    out = made_models / "random-draft"
    models_script().randomise(DRAFT, out)
    return out


@pytest.fixture(scope="session")
def tiny_pair(made_models: Path) -> tuple[Path, Path]:
    """Target (made slow, as `slow_target`) and draft with a vocabulary of 16 tokens."""
    target, draft = make_pair(made_models / "tiny")
    slow = made_models / "tiny" / "slow"
    models_script().grow(target, slow, layers=12)
    return slow, draft


NO_WHITESPACE = {"backend": "xgrammar", "disable_any_whitespace": True}  # else a weak model writes nothing else


class Baseline:
    """vLLM without speculation; starts an engine when it is asked something new."""

    def __init__(self, **options) -> None:
        self._options = options
        self._engine: EngineProcess | None = None
        self._known: dict[str, dict] = {}

    def generate(self, requests: list[dict]) -> list[dict]:
        """Results in the order of `requests`, whatever their arrivals."""
        keys = [json.dumps([request["prompt"], request["params"]], sort_keys=True) for request in requests]
        new = {key: request for key, request in zip(keys, requests, strict=True) if key not in self._known}
        if new:
            if self._engine is None:
                self._engine = EngineProcess(**self._options)
            plain = [
                {"id": f"b{i}", "prompt": request["prompt"], "params": request["params"]}
                for i, request in enumerate(new.values())
            ]
            self._known.update(zip(new, self._engine.generate(plain), strict=True))
        return [self._known[key] for key in keys]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@pytest.fixture(scope="session")
def baseline():
    """The target without speculation."""
    engine = Baseline(structured_outputs_config=NO_WHITESPACE)
    yield engine
    engine.close()
