"""Arguments that several benchmarks take, checked before anything is measured: types for argparse."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def device(text: str) -> "torch.device":
    """`cuda`, `cuda:N` or `cpu`."""
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r} must be cuda, cuda:N or cpu")
    return device


def file_to_read(text: str) -> Path:
    """A file that exists."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: there is no such file")
    return path


def file_to_write(text: str) -> Path:
    """A path in a folder that exists."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder {str(path.parent)!r}")
    return path
