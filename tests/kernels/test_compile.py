"""Every kernel compiles to machine code for GPUs, which the interpreter does not show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = (
    227 * 1024
)  # bytes that a block may use on an H100 or H200 (CUDA C++ programming guide, table of limits)


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path: Path) -> None:
    """A kernel uses what only the interpreter takes, or more shared memory than a GPU has."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    for name in ("TRITON_INTERPRET", "PYTHONSAFEPATH"):  # the module is run from the repository's root
        environment.pop(name, None)
    command = [sys.executable, "-m", "tests.kernels.aot", "90"]
    root = Path(__file__).parents[2]
    output = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=1800, check=True
    )
    reports = [json.loads(line) for line in output.stdout.splitlines()]
    kernels = {report["kernel"] for report in reports}
    assert kernels == {
        "_trunk_kernel",
        "_tail_kernel",
        "_kv_write_kernel",
        "_first_kernel",
        "_next_kernel",
        "_fork_kernel",
        "_draw_kernel",
        "_dense_kernel",
        "_residual_kernel",
        "_walk_kernel",
    }
    assert all(report["cubin"] > 0 and report["shared"] <= SHARED_MEMORY for report in reports)
