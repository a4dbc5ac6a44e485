"""Model folders: made whole or not at all, their weights read and written."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder to fill that becomes `out` only when all went well: nobody sees half a model."""
    if out.exists():
        raise FileExistsError(f"{out} is there already; remove it to make it again")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        yield folder
        if not out.exists():  # else another process was faster, with the same result
            folder.rename(out)


def load_weights(folder: Path) -> Weights:
    weights: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    if not weights:
        raise FileNotFoundError(f"{folder}: no .safetensors file")
    return weights


def save_weights(folder: Path, weights: Weights) -> None:
    contiguous = {name: weight.contiguous() for name, weight in weights.items()}
    file = folder / "model.safetensors"
    save_file(contiguous, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors makes it readable by its owner alone


def copy_all_but_weights(src: Path, folder: Path) -> None:
    """Copy config, tokenizer, chat template and generation config."""
    for file in src.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(file, folder / file.name)
