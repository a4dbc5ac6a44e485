"""What kernels and graphs must show at start before they are trusted.

Each is held against its twin, which is PyTorch alone: a kernel that a new compiler or device breaks then costs
speed, and a warning, but neither drafts nor the target's law.

Shapes: R rows, V padded vocabulary, W candidates of a row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_ssd.draft.batch import FlatBatch, Group, causal_group, flatten
from vllm_ssd.kernels.draw import Laws, draw
from vllm_ssd.kernels.fork import fork

if TYPE_CHECKING:
    from vllm_ssd.draft.graph_forward import GraphForward
    from vllm_ssd.draft.graph_round import GraphRound
    from vllm_ssd.draft.model import DraftModel

# Roundings, not other results: bfloat16 came to 0.01 with random weights, 0.03 with a few key biases of 400.
MOST_APART = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}
_PROMPT_LENGTHS = (1, 8, 64, 120)
_LONGEST_TRUNK = 2048  # several splits of several tiles
_CELLS = 16_384  # rows times slots that they attend to: the twins gather them
_WANTED = 8  # rows whose logits are compared
_DRAWS = 64
ROUND_TOKENS = 8  # of the sequence that a tree is grown on
_ROUND_TOLERANCE = 0.05  # of the largest logit


# ---- the forward ----


def forward_apart(graphs: "GraphForward", pools: Sequence[torch.Tensor], max_length: int) -> float:
    """How far logits are from those of the twins: root mean square of a row, of what they all vary; the furthest.

    Tries prompts, and then each graph, with as many rows as it has, over pools that hold no sequence yet.
    """
    num_slots = pools[0].shape[1]
    furthest = 0.0
    for length in (min(length, num_slots, max_length) for length in _PROMPT_LENGTHS):
        slots = np.arange(length)
        batch = _batch([causal_group(slots % graphs.vocab_size, 0, slots, slots)], pools)
        furthest = max(furthest, _apart(graphs.forward(batch, pools), graphs.without_kernels(batch, pools)))
    known = min(_PROMPT_LENGTHS[-1], max_length, num_slots // 2)  # slots that hold the last prompt
    for bucket, per_block in graphs.graphs() if known else ():
        alone = per_block == 1
        rows = min(bucket, num_slots - known, graphs.max_sequences if alone else bucket)
        longest = max(1, min(max_length - 3, _LONGEST_TRUNK, _CELLS // rows))
        batch = _batch(_branches(rows, alone, longest, known, graphs.vocab_size), pools)
        found = graphs.forward_in(batch, bucket, per_block, pools)
        furthest = max(furthest, _apart(found, graphs.without_kernels(batch, pools)))
    return furthest


def _branches(rows: int, alone: bool, longest: int, known: int, vocab_size: int) -> list[Group]:
    """Branches of two sequences, or (`alone`) of one each.

    Their trunks go over the `known` slots, in an order of their own and more than once; the slots that follow
    are the rows' own.
    """
    sizes = [1] * rows if alone else [size for size in (rows - rows // 3, rows // 3) if size]
    groups, first = [], known
    for number, size in enumerate(sizes):
        length, depth = max(1, longest - 5 * (number % 7)), 1 + number % 3
        own = np.arange(first, first + size)
        trunk = (np.arange(length) * 7 + 3 * number) % known
        prefix = length - np.arange(size) % length
        above = (own[:, None] * 5 + np.arange(depth - 1)) % known
        tails = np.concatenate((above, own[:, None]), axis=1)
        groups.append(Group(own % vocab_size, prefix + depth - 1, own, trunk, prefix, tails))
        first += size
    return groups


def _batch(groups: Sequence[Group], pools: Sequence[torch.Tensor]) -> FlatBatch:
    rows = sum(len(group.token_ids) for group in groups)
    wanted = np.unique(np.linspace(0, rows - 1, _WANTED).astype(np.int64))
    return flatten(groups, pools[0].device, wanted=wanted)


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.float(), expected.float()
    apart = (found - expected).square().mean(dim=1).sqrt().max() / expected.std().clamp(min=1e-6)
    return float(apart.nan_to_num(torch.inf))


# ---- rounds ----


@torch.inference_mode()
def round_difference(device_round: "GraphRound", model: "DraftModel") -> str | None:
    """What of a round on the device is not what the plain forward and the twins give; None: nothing."""
    slots = np.arange(ROUND_TOKENS)
    logits = model.forward(flatten([causal_group(slots.tolist(), 0, slots, slots)], model.device))
    if not _draws_agree(logits, device_round.shape.width, device_round.vocab_size):
        return "its candidates and draws differ from those without kernels"
    if not _grows_alike(device_round, model):
        return "its logits differ from those of the plain forward"
    return None


def _draws_agree(logits: torch.Tensor, width: int, vocab_size: int) -> bool:
    """Whether fork and draw take from these logits, [R, V], what their twins take, under laws of all kinds."""
    logits = logits.repeat(-(-_DRAWS // len(logits)), 1)[:_DRAWS]
    numbers = torch.arange(_DRAWS, dtype=torch.int32, device=logits.device)
    laws = Laws(
        temperature=numbers % 4 * 0.7,
        top_k=numbers % 3 * (width // 2),
        top_p=1 - numbers % 5 * 0.1,
        fan_out=numbers % 6,
        saguaro_c=1 - numbers % 7 * 0.15,
        seed=numbers.long() * 0x1234567890AB,
        counter=numbers * 97,
    )
    mine, twin = draw(logits, laws, width, vocab_size), draw(logits, laws, width, vocab_size, backend="torch")
    excluded = torch.where(numbers % 2 == 0, twin.token_ids[:, 0], -1)
    counts = numbers % (width + 1)
    candidates, others = (fork(logits, excluded, counts, width, vocab_size, backend=b) for b in (None, "torch"))
    same = all(map(torch.equal, (*candidates, mine.token_ids, mine.values), (*others, twin.token_ids, twin.values)))
    close = torch.allclose(mine.probs, twin.probs, rtol=0, atol=1e-4)
    # Where a law's running sum meets the random number, a rounding decides.
    equal = mine.tokens == twin.tokens
    close = close and torch.allclose(mine.q[equal], twin.q[equal], rtol=0, atol=1e-4)
    return same and close and int(equal.sum()) >= _DRAWS - 2


def _grows_alike(device_round: "GraphRound", model: "DraftModel") -> bool:
    """Whether a branch that grows on the device sees the logits of the plain forward, step after step."""
    from vllm_ssd.draft.graph_planting import Planting

    depth = device_round.shape.depth
    slots = np.arange(ROUND_TOKENS + depth)
    trunk, tail = slots[:ROUND_TOKENS], slots[ROUND_TOKENS:]
    device_round.set_trunks([trunk])
    device_round.plant([Planting(0, ROUND_TOKENS, tail[None])], [(0, 0)], [1] * depth)
    device_round.grow(depth)
    token_id = 0
    for step in device_round.finished(at_least=depth):
        known = ROUND_TOKENS + step.number
        batch = flatten([causal_group([token_id], known, slots[: known + 1], slots[known : known + 1])], model.device)
        logits = model.forward(batch)[0].float().cpu().numpy()
        token_ids = step.token_ids[0][step.token_ids[0] >= 0]
        apart = np.abs(logits[token_ids] - step.values[0][: len(token_ids)]).max()
        if not apart <= _ROUND_TOLERANCE * np.abs(logits).max():
            return False
        token_id = int(step.tokens[0])
    return True
