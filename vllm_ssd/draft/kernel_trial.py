"""What kernels and graphs must show at start before they are trusted.

Kernels are held against their twins, which are PyTorch alone: one that a new compiler or device breaks then costs
speed, and a warning, but neither drafts nor the target's law. What changes logits no more than roundings do is not
noticed, nor what goes wrong beyond the sizes that are tried, or later.

Shapes: V padded vocabulary, W candidates of a row.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_ssd.draft.batch import FlatBatch, Group, causal_group, flatten
from vllm_ssd.kernels.draw import Laws, draw
from vllm_ssd.kernels.fork import fork

if TYPE_CHECKING:
    from vllm_ssd.draft.graph_forward import GraphForward
    from vllm_ssd.draft.graph_planting import Planting, Step
    from vllm_ssd.draft.graph_round import GraphRound
    from vllm_ssd.draft.model import DraftModel

# Of what the logits vary: roundings, not other results. The models of the tests come to 0.01 in bfloat16.
_MOST_APART = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.1}
_PROMPT_LENGTHS = (1, 8, 64, 120)
_TRUNK_LENGTHS = (8, 2048)  # where a tail counts, and of several splits of several tiles
_CELLS = 16_384  # rows times slots that they attend to: the twins gather them
_WANTED = 8  # rows whose logits are compared
_DRAWS = 32
_LAW_TOLERANCE = 1e-3  # of a probability: the rounding of a logit of 1000 is 6e-5
_ROUND_TOKENS = 8  # of each sequence that a tree is grown on
_ROUND_SEQUENCES, _ROUND_BRANCHES = 2, 2
_SAME_CANDIDATES = 0.8  # all, but where roundings change between two runs of the same
_ROUND_TOLERANCE = 0.05  # of the largest logit


# ---- the forward ----


def forward_difference(graphs: "GraphForward", pools: Sequence[torch.Tensor], max_length: int) -> str | None:
    """What sets the logits apart from those of the twins, beyond roundings; None: nothing.

    Tries prompts, and then each graph, with as many rows as it has, over pools that hold no sequence yet.
    """
    for replay, batch in _trials(graphs, pools, max_length):
        found, expected = replay(), graphs.without_kernels(batch, pools)
        apart = _apart(found, expected)
        if apart <= _MOST_APART[pools[0].dtype]:
            continue
        # Of a draft that turns roundings into more than that, the plain forward is as far away.
        if not apart <= 2 * _apart(graphs.graph_decoder.light.forward(batch, pools), expected) <= 1:
            return f"its logits differ from those without kernels, by {apart:.3f} of what they vary"
    return None


def _trials(
    graphs: "GraphForward", pools: Sequence[torch.Tensor], max_length: int
) -> Iterator[tuple[Callable[[], torch.Tensor], FlatBatch]]:
    """Forwards by the kernels, and their batches."""
    num_slots = pools[0].shape[1]
    for length in (min(length, num_slots, max_length) for length in _PROMPT_LENGTHS):
        slots = np.arange(length)
        batch = _batch([causal_group(slots % graphs.graph_decoder.vocab_size, 0, slots, slots)], pools)
        yield functools.partial(graphs.forward, batch, pools), batch
    known = min(_PROMPT_LENGTHS[-1], max_length, num_slots // 2)  # slots that hold the last prompt
    depth = min(graphs.shape.depth, max_length // 2)
    for (bucket, per_block), longest in itertools.product(graphs.graphs(), _TRUNK_LENGTHS):
        if not known or not depth:
            return  # no room for a branch
        alone = per_block == 1
        rows = min(bucket, num_slots - known, graphs.shape.max_sequences if alone else bucket)
        longest = max(1, min(max_length - depth, longest, _CELLS // rows))
        batch = _batch(_branches(rows, alone, longest, depth, known, graphs.graph_decoder.vocab_size), pools)
        yield functools.partial(graphs.forward_in, batch, bucket, per_block, pools), batch


def _branches(rows: int, alone: bool, longest: int, deepest: int, known: int, vocab_size: int) -> list[Group]:
    """Branches of two sequences, or (`alone`) of one each.

    Their trunks go over the `known` slots, in an order of their own and more than once, and so do their tails, but
    for the rows' own slots, which follow.
    """
    sizes = [1] * rows if alone else [size for size in (rows - rows // 3, rows // 3) if size]
    groups, first = [], known
    for number, size in enumerate(sizes):
        length, depth = max(1, longest - 5 * (number % 7)), min((deepest, 3, 1)[number % 3], deepest)
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


def has_room(device_round: "GraphRound", num_slots: int, max_length: int) -> bool:
    """Whether `round_difference` has slots and positions for its trees."""
    depth = device_round.shape.depth
    slots = _ROUND_SEQUENCES * (_ROUND_TOKENS + _ROUND_BRANCHES * depth)
    return num_slots >= slots and max_length >= _ROUND_TOKENS + depth


@torch.inference_mode()
def round_difference(device_round: "GraphRound", model: "DraftModel") -> str | None:
    """What of a round on the device is not what the plain forward and the twins give; None: nothing."""
    trunks = np.arange(_ROUND_SEQUENCES * _ROUND_TOKENS).reshape(_ROUND_SEQUENCES, -1)
    groups = [causal_group((1 + trunk % (model.vocab_size - 1)).tolist(), 0, trunk, trunk) for trunk in trunks]
    logits = model.forward(flatten(groups, model.device))
    if not _draws_agree(logits, device_round.shape.width, device_round.vocab_size):
        return "its candidates and draws differ from those without kernels"
    if not _grows_alike(device_round, model, groups, logits):
        return "its logits differ from those of the plain forward"
    return None


def _draws_agree(logits: torch.Tensor, width: int, vocab_size: int) -> bool:
    """Whether fork and draw take from these logits, [R, V], what their twins take, under laws of all kinds.

    But for a few rows: where a law's running sum meets a random number or top-p, a rounding decides.
    """
    logits = logits.repeat(-(-_DRAWS // len(logits)), 1)[:_DRAWS]
    numbers = torch.arange(_DRAWS, dtype=torch.int32, device=logits.device)
    laws = Laws(
        temperature=numbers % 4 * 0.7,
        top_k=numbers % 3 * (width // 2),
        top_p=1 - numbers % 5 * 0.09731,  # no fraction that a few equal logits give
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
    close = ((mine.probs - twin.probs).abs() <= _LAW_TOLERANCE).all(dim=1) & ((mine.q - twin.q).abs() <= _LAW_TOLERANCE)
    return same and int((close & (mine.tokens == twin.tokens)).sum()) >= _DRAWS - 2


def _grows_alike(
    device_round: "GraphRound", model: "DraftModel", groups: Sequence[Group], logits: torch.Tensor
) -> bool:
    """Whether trees over these sequences see the plain forward's logits: after the glue, and step after step.

    `logits`: of all the sequences' tokens.
    """
    from vllm_ssd.draft.graph_planting import Choice, Planting
    from vllm_ssd.draft.graph_rows import host_rows

    shape = device_round.shape
    groups = groups[: min(len(groups), shape.max_sequences, shape.max_rows)]
    width = min(_ROUND_BRANCHES, shape.max_rows // len(groups), model.vocab_size)
    first = _ROUND_SEQUENCES * _ROUND_TOKENS
    tails = np.arange(first, first + len(groups) * width * shape.depth).reshape(len(groups), width, -1)
    last = [dataclasses.replace(group, **_last_token(group)) for group in groups]
    device_round.set_trunks([group.trunk for group in groups])
    device_round.glue(host_rows(last, shape.depth))
    plantings = [
        Planting(place, _ROUND_TOKENS, tail, choice=Choice([], [place]), temperature=float(place))
        for place, tail in enumerate(tails)
    ]
    device_round.plant(plantings, fan_out=[1] * shape.depth)
    device_round.grow(shape.depth)
    steps = device_round.finished(at_least=shape.depth)
    ends = logits[_ROUND_TOKENS - 1 :: _ROUND_TOKENS]
    if not all(_near(end, ids, values) for end, ids, values in zip(ends, *device_round.glued())):
        return False
    if not _goes_on_alike(device_round, plantings, steps):  # before the plain forward writes KV of its own
        return False
    trunks = [group.trunk for group in groups for _ in range(width)]
    for row, (trunk, tail) in enumerate(zip(trunks, tails.reshape(-1, shape.depth))):
        slots, token_id = np.concatenate((trunk, tail)), int(steps[0].bets[row])
        if steps[0].above[row] != _ROUND_TOKENS:
            return False
        for known, step in enumerate(steps, _ROUND_TOKENS):
            group = causal_group([token_id], known, slots[: known + 1], slots[known : known + 1])
            end = model.forward(flatten([group], model.device))[0]
            if not _near(end, step.token_ids[row], step.values[row]):
                return False
            token_id = int(step.tokens[row])
    return True


def _goes_on_alike(device_round: "GraphRound", plantings: "Sequence[Planting]", steps: "Sequence[Step]") -> bool:
    """Whether trees that begin with the tokens of their first step have the candidates of the second."""
    tips = np.split(steps[0].tokens, len(plantings))
    begun = [
        dataclasses.replace(planting, choice=None, bets=[(0, token_id) for token_id in own], begun=1)
        for planting, own in zip(plantings, tips)
    ]
    device_round.plant(begun, fan_out=[1])
    device_round.grow()
    [step] = device_round.finished(at_least=1)
    return bool((step.token_ids == steps[1].token_ids).mean() >= _SAME_CANDIDATES)


def _last_token(group: Group) -> dict[str, Any]:
    return {name: getattr(group, name)[-1:] for name in ("token_ids", "positions", "slots", "prefix", "tails")}


def _near(logits: torch.Tensor, token_ids: np.ndarray, values: np.ndarray) -> bool:
    """Whether candidates, [W], have the logits, [V], of a row."""
    expected, known = logits.float().cpu().numpy(), token_ids >= 0
    apart = np.abs(expected[token_ids[known]] - values[known]).max()
    return bool(apart <= _ROUND_TOLERANCE * np.abs(expected).max())
