"""Reading sizes from the command line, and laying out tables."""

import argparse
from collections.abc import Sequence

from vllm_ssd.sdsl import sizes


def read_size(text: str) -> float:
    """A number of parameters, for argparse."""
    try:
        return sizes.read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_batches(text: str) -> list[int]:
    """ "1,4,16" → [1, 4, 16]."""
    try:
        batches = [int(part) for part in text.split(",")]
    except ValueError:
        batches = []
    if not batches or min(batches) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of batch sizes; write for example 1,4,16")
    return batches


def read_positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def read_share(text: str) -> float:
    """A number within [0, 1]."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned, the first to the left and the others to the right. Raises `ValueError` for a ragged row."""
    lines = [list(heading), *(list(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths)))
        for line in lines
    )


def count(number: int, noun: str) -> str:
    """(1, "device") → "1 device", (2, "device") → "2 devices"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
