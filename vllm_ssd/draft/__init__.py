"""The draft server: a process of its own that builds trees. Imports torch and transformers, not vLLM."""
