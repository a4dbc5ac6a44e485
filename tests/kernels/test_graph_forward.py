"""The forward over ragged rows equals the plain forward of `transformers`, and its padding does nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from unit.test_model import LIGHT, assert_equals_plain, causal_group, empty_pools, tiny

from vllm_ssd.draft import graph_decoder
from vllm_ssd.draft.batch import Group, flatten
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_forward import GraphForward, ready
from vllm_ssd.draft.graph_rows import host_rows
from vllm_ssd.draft.graph_runner import bucket_of, buckets
from vllm_ssd.draft.light_decoder import try_build

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("max_rows", (64, 2))
def test_the_ragged_forward_equals_the_plain_one(name: str, max_rows: int) -> None:
    """A kind of model, a bucket or a batch beyond the buffers gives other logits."""
    model = tiny(name)
    decoder = GraphDecoder(try_build(model))
    assert_equals_plain(GraphForward(decoder, max_length=64, depth=4, max_rows=max_rows), model)


def test_warm_up_writes_nothing() -> None:
    """Padding rows write into slots that others use."""
    model = tiny("llama")
    forward = GraphForward(GraphDecoder(try_build(model)), max_length=64, depth=4, max_rows=8)
    pools = empty_pools(model)
    with torch.inference_mode():
        forward.forward(flatten([causal_group([1, 2, 3], 0, np.arange(3))], CPU), pools)
        before = [pool.clone() for pool in pools]
        forward.warm_up(pools)
    assert all(torch.equal(pool, old) for pool, old in zip(pools, before))


def test_a_forward_that_goes_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A kernel that this device or compiler breaks drafts nonsense, or ends the draft."""
    model = tiny("llama")
    light, pools = try_build(model), empty_pools(model)
    assert isinstance(ready(light, pools, 64, 4), GraphForward)

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * light._head(hidden)

    def failing(self, hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    for logits, message in ((scaled, "logits differ"), (failing, "no such instruction")):
        monkeypatch.setattr(GraphDecoder, "logits", logits)
        assert ready(light, pools, 64, 4) is light
        assert message in caplog.text


@pytest.mark.parametrize(
    "wrong",
    (
        lambda tree: {"trunk_lengths": tree.trunk_lengths // 2},
        lambda tree: {"trunk_lengths": tree.trunk_lengths - (tree.trunk_lengths > 32).int()},
        lambda tree: {"trunk_lengths": tree.trunk_lengths // 16 * 16},
        lambda tree: {"trunk_lengths": tree.trunk_lengths.clamp(max=1500)},
        lambda tree: {"trunk_lengths": tree.trunk_lengths.clamp(max=300)} if tree.per_block == 1 else {},
        lambda tree: {"tail_lengths": tree.tail_lengths * (tree.per_block == 1)},
        lambda tree: {"tail_lengths": tree.tail_lengths.clamp(max=12)},
        lambda tree: {"tail_lengths": tree.tail_lengths * (len(tree.tail_lengths) > 1)},
        lambda tree: {"row_sequence": torch.zeros_like(tree.row_sequence)},
        lambda tree: {"row_sequence": torch.where(torch.arange(len(tree.row_sequence)) > 700, 0, tree.row_sequence)},
    ),
    ids=(
        "half of the trunk left out",
        "its last slot",
        "a part of a tile",
        "the end of long trunks",
        "the end of trunks that are not shared",
        "tails where trunks are shared",
        "long tails",
        "tails of one row",
        "other sequences",
        "late rows",
    ),
)
def test_an_attention_that_goes_wrong_is_not_taken(wrong, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Drafts are wrong more often, and nobody hears of it."""
    model = tiny("llama", max_position_embeddings=4096)
    light, attention = try_build(model), graph_decoder.tree_attention
    pools = empty_pools(model, num_slots=1200)

    def broken(queries, pool, tree, scale, workspace, backend=None) -> torch.Tensor:
        if backend is None:
            tree = dataclasses.replace(tree, **wrong(tree))
        return attention(queries, pool, tree, scale, workspace, backend=backend)

    monkeypatch.setattr(graph_decoder, "tree_attention", broken)
    assert ready(light, pools, 4096, 4) is light
    assert "differ from those without kernels, by " in caplog.text


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_roundings_are_taken(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A draft whose kernels round, as they do, runs without them."""
    model = tiny("llama", max_position_embeddings=4096).to(dtype)
    attention = graph_decoder.tree_attention

    def rounded(queries, pool, tree, scale, workspace, backend=None) -> torch.Tensor:
        mixed = attention(queries, pool, tree, scale, workspace, backend=backend)
        noise = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(len(mixed)))
        return mixed if backend else (mixed * (1 + noise * 0.5 * torch.finfo(dtype).eps)).to(dtype)

    monkeypatch.setattr(graph_decoder, "tree_attention", rounded)
    assert isinstance(ready(try_build(model), empty_pools(model, num_slots=1200), 4096, 4), GraphForward), caplog.text


def test_rows_are_the_groups() -> None:
    """What a row attends to is not what the mask of the padded form says, or the row is another token's."""
    generator = np.random.default_rng(0)
    groups = []
    for count, length, depth in ((3, 9, 2), (1, 1, 0), (5, 12, 4), (2, 0, 1)):
        slots = generator.permutation(99)
        groups.append(
            Group(
                token_ids=generator.integers(0, 9, count).tolist(),
                positions=generator.integers(0, 9, count),
                slots=generator.integers(0, 99, count),
                trunk=slots[:length],
                prefix=generator.integers(0, length + 1, count),
                tails=slots[length : length + count * depth].reshape(count, depth),
            )
        )
    rows, batch = host_rows(groups, 4), flatten(groups, CPU)
    attended = []
    for row in range(len(rows.token_ids)):
        trunk = rows.trunks[rows.row_sequence[row]][: rows.trunk_lengths[row]]
        attended.append([*trunk, *rows.tail_slots[row, : rows.tail_lengths[row]]])
    expected, positions = [], []
    for b, group in enumerate(groups):
        for mask in batch.mask[b, : len(group.token_ids)]:
            expected.append(batch.columns[b][mask].tolist())
            positions.append(batch.column_positions[b][mask].tolist())
    assert attended == expected
    assert all(places == list(range(len(places))) for places in positions)  # a tail goes on where its prefix ends
    for mine, field in (
        (rows.token_ids, batch.token_ids),
        (rows.positions, batch.positions),
        (rows.slots, batch.slots),
    ):
        assert mine.tolist() == field.tolist()
    with pytest.raises(ValueError, match="a tail of 4 slots; it may have 3"):
        host_rows(groups, 3)


def test_a_bucket_holds_its_rows() -> None:
    """Rows are cut off, or a bucket is met that was never captured."""
    for most in (1, 5, 64, 1536, 3000):
        sizes = {bucket_of(rows, most) for rows in range(1, most + 1)}
        assert all(rows <= bucket_of(rows, most) <= most for rows in range(1, most + 1))
        assert sizes == set(buckets(most))
    with pytest.raises(ValueError, match="the buffers hold 8"):
        bucket_of(9, 8)


def check_replays(device: torch.device) -> None:
    """Forwards in graphs that were captured over padding equal direct calls."""
    torch.manual_seed(0)
    model = tiny("qwen3").to(device)
    with torch.inference_mode():
        decoder = GraphDecoder(try_build(model))
        graphs, direct = (GraphForward(decoder, max_length=64, depth=4, max_rows=8) for _ in range(2))
        direct._runner.run = lambda _key, function: function()
        pools = [pool.to(device) for pool in empty_pools(model)]
        graphs.warm_up(pools)
        for tokens in ([1, 2, 3], [4, 5], [6, 7, 8, 9, 1, 2, 3, 4]):
            batch = flatten([causal_group(tokens, 0, np.arange(len(tokens)))], device)
            torch.testing.assert_close(graphs.forward(batch, pools), direct.forward(batch, pools))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="captures CUDA graphs; test_simulated_gpu.py does it elsewhere"
)
def test_replayed_graphs_equal_direct_calls() -> None:
    """A captured forward reads or writes what moved."""
    check_replays(torch.device("cuda"))
