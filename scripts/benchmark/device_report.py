"""What benchmarks of one device say about it, and where their results go."""

import json
import platform
import sys
from pathlib import Path

import torch
import triton


def setup(device: torch.device, bandwidth: float) -> dict:
    """What the figures were measured with. `bandwidth`: of a copy, bytes a second."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "bandwidth_gb_s": bandwidth / 1e9,
        "command": " ".join(sys.argv),
    }


def write(path: Path | None, setup: dict, rows: list[dict]) -> None:
    """All results so far, if they were asked for: a run that is cut short keeps them."""
    if path:
        path.write_text(json.dumps({"setup": setup, "results": rows}, indent=1))
