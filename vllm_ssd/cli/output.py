"""Files that a command writes: whether it can is found out before the work, not after it."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

STDOUT = Path("-")


def check(option: str, path: Path | None) -> None:
    """Raises `ValueError` naming the option unless a file can be written at `path`; None and `STDOUT` are fine."""
    if path is None or path == STDOUT:
        return
    if path.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, a folder; give the name of a file in it.")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, whose folder does not exist; make it first.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option} is {str(path)!r}, which you may not write; choose another place.")


def check_image(option: str, path: Path | None) -> None:
    """The same for a plot: its name must end as an image's that matplotlib can draw."""
    check(option, path)
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ValueError(f"{option} needs matplotlib: pip install 'vllm-ssd[advise]'.") from error
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"{option} is {str(path)!r}; its name must end in one of .{', .'.join(kinds)}.")


def tell(paths: Sequence[Path | None]) -> None:
    """Say on stderr which files there are now."""
    written = [str(path) for path in paths if path is not None and path != STDOUT]
    if written:
        print("written: " + ", ".join(written), file=sys.stderr)
