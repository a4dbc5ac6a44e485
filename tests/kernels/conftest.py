"""Kernels run natively on CUDA, and in Triton's interpreter elsewhere.

Triton decides this when a kernel is defined, by an environment variable: it is set while Triton and
the kernels are imported, and in their tests, so that no other test and no subprocess runs interpreted.
Where Triton was imported before (by another test of the same run), its own library is not
interpreted; it is then imported anew, and what others hold of it stays what it was.
"""

import importlib
import os
import sys

import pytest
import torch

_KERNELS = ("draw", "fork", "kv_write", "selection", "sparse_q", "tree_attention", "tree_walk")


def _import_interpreted() -> None:
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
            if not name.startswith("triton._C"):  # machine code, which cannot be loaded twice
                del sys.modules[name]
        for name in _KERNELS:
            sys.modules.pop(f"vllm_ssd.kernels.{name}", None)
        for name in _KERNELS:
            importlib.import_module(f"vllm_ssd.kernels.{name}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


if not torch.cuda.is_available():
    _import_interpreted()


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")  # Triton asks again when it launches


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
