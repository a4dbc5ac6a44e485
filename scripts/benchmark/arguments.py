"""Arguments that several benchmarks take, checked before anything is measured: types for argparse."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ssd.cli import output

if TYPE_CHECKING:
    import torch


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, at least 1")
    return int(text)


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
    """A path that can be written."""
    return _checked(text, output.check)


def image_to_write(text: str) -> Path:
    """The same, whose name ends as an image's."""
    return _checked(text, output.check_image)


def _checked(text: str, check: Callable[[str, Path], None]) -> Path:
    try:
        check("the file", Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)
