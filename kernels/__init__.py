"""Kernels of the draft engine; installed as `vllm_ssd.kernels`.

Each file holds one operation: a kernel in Triton (two where the second takes up what the first left),
a wrapper that checks what it is given, and a twin in plain PyTorch: the oracle of the tests, and what runs
where there is no GPU. `launch` and `selection` hold what they share, `tree_layout` what the attention works
on. Nothing here knows about models, requests or vLLM.

No GPU has run them yet: the tests run Triton's interpreter and compile for GPUs (`docs/performance.md`).
"""
