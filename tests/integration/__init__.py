"""Tests with real vLLM engines on a CPU. `engine.py` is the harness."""
