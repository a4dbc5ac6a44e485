"""What can be read of a model without running it: sizes, tokenizer, and whether it is all there.

Every refusal is one `ValueError` sentence that names the model.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """A model of transformers, as a local folder or a name on the hub."""

    name: str
    trust_remote_code: bool = False
    """Whether it may run code from its repository."""

    @property
    def folder(self) -> Path | None:
        """The local folder; None for a name on the hub."""
        path = Path(self.name).expanduser()
        return path if path.is_dir() else None

    @property
    def place(self) -> str:
        """The same for the same model, however its folder was written."""
        return str(self.folder.resolve()) if self.folder else self.name

    def label(self, depth: int = 1) -> str:
        """What a table calls it: the last `depth` parts of its path, or its name on the hub."""
        return str(Path(*self.folder.absolute().parts[-depth:])) if self.folder else self.name

    @cached_property
    def config(self) -> Any:
        """Its text config. Raises `ValueError` if there is none."""
        from transformers import AutoConfig

        looks_local = self.name.startswith(("/", ".", "~")) or self.name.count("/") != 1
        if self.folder is None and looks_local:
            raise ValueError(f"{self.name!r} is no folder; give the folder of a transformers model, or its hub name.")
        try:
            found = AutoConfig.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)
            return found.get_text_config()
        except Exception as error:  # transformers raises many kinds
            raise ValueError(
                f"{self.name!r} has no config that transformers can read ({_first_line(error)})."
            ) from error

    @cached_property
    def tokenizer(self) -> Any:
        """Raises `ValueError` if it cannot be read."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)
        except Exception as error:
            raise ValueError(f"the tokenizer of {self.name!r} cannot be read ({_first_line(error)}).") from error

    @cached_property
    def num_params(self) -> int:
        """Parameters by the heads of its weight files. Raises `ValueError` for a folder without weights."""
        _ = self.config  # what is no model at all gets its own sentence
        folder = self.folder or _fetched(self.name)
        count = sum(_params_in(file) for file in sorted(folder.glob("*.safetensors")))
        if count == 0:
            raise ValueError(f"{self.name!r} holds no weights: there is no .safetensors file with tensors in it.")
        missing = [name for name in _files_of_index(folder) if not (folder / name).exists()]
        if missing:
            raise ValueError(f"{self.name!r} is incomplete: its index names {missing[0]}, which is not there.")
        return count

    def shares_tokenizer(self, other: "ModelFiles") -> bool:
        """Whether both map the same tokens to the same ids; a padded vocabulary does not matter."""
        return self.tokenizer.get_vocab() == other.tokenizer.get_vocab()


def labels(target: ModelFiles, drafts: Sequence[ModelFiles]) -> list[str]:
    """What a table calls the target and each draft: as much of their paths as tells them apart.

    Raises `ValueError` for a draft that is given twice.
    """
    places = [files.place for files in drafts]
    twice = [files.name for i, files in enumerate(drafts) if files.place in places[:i]]
    if twice:
        raise ValueError(f"the draft {twice[0]!r} is given twice; give each once.")
    found = [_label(files, [target, *drafts]) for files in (target, *drafts)]
    return [found[0], *(f"{name} (itself)" if name == found[0] else name for name in found[1:])]


def _label(files: ModelFiles, all_files: Sequence[ModelFiles]) -> str:
    others = [other for other in all_files if other.place != files.place]
    depth = 1
    while files.label(depth) in [other.label(depth) for other in others] and depth < len(Path(files.place).parts):
        depth += 1
    return files.label(depth)


def num_params_on_disk(name: str) -> int | None:
    """Parameters of a model that is here already, without asking the hub; None if that cannot be told."""
    try:
        files = ModelFiles(name)
        return ModelFiles(str(files.folder or _fetched(name, only_local=True))).num_params
    except (ValueError, OSError, ImportError):
        return None


def _fetched(name: str, only_local: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.json"]
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=only_local))
    except Exception as error:
        raise ValueError(f"the weights of {name!r} cannot be had ({_first_line(error)}).") from error


def _files_of_index(folder: Path) -> set[str]:
    index = folder / _INDEX
    return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else set()


def _params_in(file: Path) -> int:
    """Elements of all tensors of a .safetensors file: its head is a length (8 bytes) and JSON."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{str(file)!r} is no .safetensors file; perhaps it was not fetched whole.")
        try:
            head = json.loads(stream.read(struct.unpack("<Q", prefix)[0]))
            return sum(_product(entry["shape"]) for key, entry in head.items() if key != "__metadata__")
        except (ValueError, MemoryError, OverflowError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{str(file)!r} is no .safetensors file; perhaps it is a Git LFS pointer.") from error


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
