"""Directories of sockets: each engine removes its own, and what the dead left."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_ssd.transport import Endpoint, directory_prefix


def dead_pid() -> int:
    """Of a process that is over."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_start_removes_what_the_dead_left_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets of killed engines pile up, or an engine in another container that shares /tmp loses its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prefix = directory_prefix()
    mine = prefix.removesuffix(f"{os.getpid()}-")
    namespace = int(mine.split("-")[2])
    dead = dead_pid()
    left, alive = tmp_path / f"{mine}{dead}-abc", tmp_path / f"{prefix}abc"
    elsewhere = tmp_path / f"vllm-ssd-{namespace + 1}-{dead}-abc"
    others = [alive, elsewhere, tmp_path / "vllm-ssd-notes", tmp_path / f"{mine}nobody-abc"]
    for folder in (left, *others):
        folder.mkdir()
    endpoint = Endpoint()
    assert not left.exists()
    assert all(folder.exists() for folder in others)
    endpoint.remove()
    assert not Path(endpoint.directory).exists()
