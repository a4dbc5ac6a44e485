"""The parts of `scripts/validate_scaling_law.py`.

corpus.py       text to train on: code of the standard library, and what the target writes
students.py     drafts of several sizes, distilled from the target
measurements.py perplexity, acceptance and speed of each, as `vllm-ssd advise` measures them
report.py       the law fitted to them: table, R², plot
"""
