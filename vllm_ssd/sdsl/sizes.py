"""Numbers of parameters as people write them."""

import math
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def read_size(text: str) -> float:
    """ "350M" → 3.5e8, "70B" → 7e10, "1.2e9" → 1.2e9. Raises `ValueError` on anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    value = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} is not a number of parameters; write for example 350M or 70B")
    return value


def show_size(params: float) -> str:
    """3.5e8 → "350M"."""
    for unit in ("T", "B", "M", "K"):
        if params >= 0.9995 * _UNITS[unit]:
            return f"{params / _UNITS[unit]:.3g}{unit}"
    return f"{params:.0f}"
