"""Takes out the drafts that vLLM makes up.

A request that joins a decoding batch with one token to compute (a prompt of one token, or all but one
in the prefix cache) is scheduled as if it had K drafts, each -1, so that the batch stays uniform for
CUDA graphs. Nothing could be right about them: the CPU build's verification reads the probability of
token -1 and may accept it, and a one-hot law of it would forbid the last token of the vocabulary. Here
drafts are ragged anyway, so the runner gets such requests as what they are. The scheduler keeps its own
account, for which the drafts were refused.
"""

import dataclasses
from typing import Any

import numpy as np


def without_placeholders(scheduler_output: Any) -> Any:
    """The same step without drafts that are none; the scheduler's own object is left alone."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    counts = {req_id: len(token_ids) for req_id, token_ids in drafts.items() if token_ids and token_ids[0] < 0}
    if not counts:
        return scheduler_output
    scheduled = dict(scheduler_output.num_scheduled_tokens)
    for req_id, count in counts.items():
        scheduled[req_id] -= count
    return dataclasses.replace(
        scheduler_output,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=scheduler_output.total_num_scheduled_tokens - sum(counts.values()),
        scheduled_spec_decode_tokens={req_id: ids for req_id, ids in drafts.items() if req_id not in counts},
    )


def without_placeholder_rows(grammar_output: Any, scheduled: dict[str, list[int]], kept: dict[str, list[int]]) -> Any:
    """The grammar's bit masks for the rows that are left. `scheduled`, `kept`: drafts before and after."""
    if grammar_output is None or len(scheduled) == len(kept):
        return grammar_output
    rows: list[int] = []
    first = 0
    for req_id in grammar_output.structured_output_request_ids:
        rows += range(first, first + 1 + len(kept.get(req_id, ())))
        first += 1 + len(scheduled.get(req_id, ()))
    return dataclasses.replace(
        grammar_output, grammar_bitmask=np.ascontiguousarray(grammar_output.grammar_bitmask[rows])
    )
