"""The parts of `scripts/demo.py`.

    answering.py   the process of one engine: it answers the prompts and counts
    comparison.py  the engines' results side by side
    screen.py      headings, and text that is shown as it comes

Only the first imports vLLM.
"""
