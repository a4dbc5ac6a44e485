"""Reading sizes from the command line, and laying out tables."""

import argparse
import re
from collections.abc import Sequence

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_size(text: str) -> float:
    """ "350M" → 3.5e8, "70B" → 7e10, "1.2e9" → 1.2e9."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    value = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters; write for example 350M or 70B")
    return value


def show_size(params: float) -> str:
    """3.5e8 → "350M"."""
    for unit in ("T", "B", "M", "K"):
        if params >= 0.9995 * _UNITS[unit]:
            return f"{params / _UNITS[unit]:.3g}{unit}"
    return f"{params:.0f}"


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
    """Columns aligned, the first to the left and the others to the right."""
    lines = [list(heading), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heading))]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths)))
        for line in lines
    )
