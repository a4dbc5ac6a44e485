"""The heap of a process that serves a draft."""

import gc


def freeze() -> None:
    """Keep Python's garbage collector away from all that is loaded by now.

    A full collection walks through every object that torch and transformers made, 0.2 s in which no
    tree grows, and it would come while the first requests run.
    """
    gc.collect()
    gc.freeze()
