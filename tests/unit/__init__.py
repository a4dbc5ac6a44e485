"""Tests without vLLM, without a GPU: each module of the package on its own."""
