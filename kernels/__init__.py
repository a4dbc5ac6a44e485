"""Kernels of the draft engine; installed as `vllm_ssd.kernels`."""
