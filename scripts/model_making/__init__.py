"""The parts of `scripts/models.py`.

    smollm2.py   SmolLM2-135M-Instruct out of a GGUF file, as Hugging Face files
    variants.py  a deeper model that says the same; a random one
    folder.py    model folders: made whole or not at all, their weights read and written

Nothing here knows vLLM or vllm_ssd: the results are ordinary Hugging Face folders.
"""
