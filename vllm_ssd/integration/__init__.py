"""All contact with vLLM. `hooks.py` lists what is touched, and why."""
