"""How large a draft should be: the scaling laws of speculative decoding (SDSL, arXiv 2603.11053), and advice.

scaling_law.py   the laws: acceptance from perplexities, perplexity from sizes, throughput, the best size
measuring.py     perplexity, acceptance and step times of real models on this machine
advisor.py       both made into a table, and one recommendation
hint.py          the one line that saguaro may log at its start
"""
