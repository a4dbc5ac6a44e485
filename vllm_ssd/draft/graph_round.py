"""A round of the draft on a GPU without waiting for it: fork, then steps that feed one another.

The host says where branches may hang and which slots they may use; tokens, laws and candidates stay
on the device from step to step, and come to the host by themselves, in pinned memory, step after
step. Branches need not be equally deep: each row has a place in its own tail. Nothing here reads a
tensor back before its event has passed. A step is a graph: it finds which step it is in a counter on
the device.

On a CPU the same calls run at once (the tests compare their trees with the engine's, on real
weights, and on a simulated GPU too).

Shapes: R rows (branches of all sequences), S sequences, D steps, W candidates of a row.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from vllm_ssd.draft.batch import to_device
from vllm_ssd.draft.forecast import Part
from vllm_ssd.draft.graph_buffers import RowBuffers, Shape, TreeBuffers, send
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_outcomes import chosen_outcomes
from vllm_ssd.draft.graph_planting import Planting, Step, bet_columns, law_columns, tail_columns
from vllm_ssd.draft.graph_rows import HostRows, joined
from vllm_ssd.draft.graph_runner import GraphRunner, bucket_of, buckets
from vllm_ssd.kernels.draw import Laws, draw
from vllm_ssd.kernels.fork import fork
from vllm_ssd.kernels.tree_layout import rows_per_block


class GraphRound:
    """Builds the trees of all sequences of a round."""

    def __init__(
        self,
        decoder: GraphDecoder,
        pools: Sequence[torch.Tensor],
        shape: Shape,
        vocab_size: int,
        top_m: int,
        num_candidates: int | None = None,
        graphs: bool = True,
    ) -> None:
        """`vocab_size`: ids from here on are padding. `num_candidates`: of a row, from which bets are
        chosen (None: all W). `graphs` False: launch every kernel, to compare.
        """
        self._decoder, self._pools, self._shape = decoder, pools, shape
        self.vocab_size, self._top_m = vocab_size, top_m
        self._num_candidates = num_candidates or shape.width
        device = decoder.device
        self._rows = RowBuffers(shape, device)
        self._tree = TreeBuffers(shape, device)
        self._runner = GraphRunner(device, graphs)
        pinned = {"pin_memory": device.type == "cuda"}
        self._host = [
            torch.zeros(tensor.shape, dtype=tensor.dtype, **pinned)
            for tensor in (self._tree.tokens, self._tree.law_ids, self._tree.law_probs, self._tree.law_values)
        ]
        self._host_bets = torch.zeros(self._tree.bets.shape, dtype=torch.int32, **pinned)
        self._host_glue = [
            torch.zeros(tensor.shape, dtype=tensor.dtype, **pinned)
            for tensor in (self._tree.glue_ids, self._tree.glue_values)
        ]
        self._glued = 0  # rows of the last glue
        self._count = self._bucket = self._per_block = self._begun = 0
        self._pending: deque[tuple[int, torch.cuda.Event | None]] = deque()

    @property
    def shape(self) -> Shape:
        """The sizes of its buffers."""
        return self._shape

    # ---- what the host says ----

    def set_trunks(self, trunks: Sequence[np.ndarray]) -> None:
        """The slots of the sequences at places 0, 1, …, committed tokens and drafts in flight."""
        self._rows.fill_trunks(joined(trunks))

    def change_trunks(self, cells: np.ndarray, slots: np.ndarray) -> None:
        """What changed in the table of trunks, as `TrunkTable.update` says it."""
        self._rows.change_trunks(cells, slots)

    def glue(self, rows: HostRows) -> None:
        """Compute the KV of tokens that have none, and the candidates after each of them.

        `row_sequence` names places in the table of trunks; `trunks` is not used.
        """
        self._glued = count = len(rows.token_ids)
        bucket = bucket_of(count, self._shape.max_rows)
        per_block = self._shared(int(np.bincount(rows.row_sequence).max()))
        self._rows.fill(rows, bucket, per_block)
        self._runner.run(("glue", bucket, per_block), lambda: self._glue(bucket, per_block))

    def add_candidates(self, token_ids: np.ndarray, values: np.ndarray) -> int:
        """Candidates that the host has, behind those of the last glue, [n, W] int32 and float32; their first row."""
        rows = slice(self._glued, self._glued + len(token_ids))
        send(token_ids, self._tree.glue_ids[rows])
        send(values, self._tree.glue_values[rows])
        return self._glued

    def plant(
        self,
        plantings: Sequence[Planting],
        fan_out: Sequence[int],
        recovered: float = 1.0,
        part: Part | None = None,
    ) -> None:
        """Begin a round: with the bets of the host, and behind them with what the device chooses by candidates.

        Plantings with a `choice` come last, have as many branches each, and speak of rows of the last `glue` and of
        `add_candidates`. `fan_out`: F by position, for Saguaro sampling. `recovered`: as of
        `fanout.most_probable_outcomes`. `part`: the class of outcomes to choose from, if other drafts build the rest.
        """
        self._lay_out(plantings, fan_out)
        send(bet_columns(plantings, self._bucket), self._tree.bets[:, : self._bucket])
        if chosen := [planting for planting in plantings if planting.choice is not None]:
            self._choose(chosen, recovered, part)
        self._begin()

    def grow(self, steps: int = 1) -> None:
        """Enqueue tree steps: one token more for every branch. Raises `ValueError` beyond the tree's depth."""
        if self._begun + steps > self._shape.depth:
            raise ValueError(f"{self._begun + steps} steps were asked for; a tree has {self._shape.depth}.")
        for _ in range(steps):
            self._runner.run(("step", self._bucket, self._per_block), lambda: self._step(self._bucket, self._per_block))
            self._fetch(self._begun)
            self._begun += 1

    def finished(self, at_least: int = 0) -> list[Step]:
        """Steps that have come to the host since the last call; waits until they are `at_least` so many."""
        steps = []
        while self._pending:
            number, event = self._pending[0]
            if event is not None and not event.query():
                if len(steps) >= at_least:
                    break
                event.synchronize()
            self._pending.popleft()
            fields = [field[number, : self._count].numpy().copy() for field in self._host]
            above, bets = self._host_bets[:, : self._count].numpy().copy()
            steps.append(Step(number, *fields, above, bets))
        return steps

    @property
    def under_way(self) -> int:
        """Steps that the device has not done yet, of this round or of one that was given up."""
        return sum(event is not None and not event.query() for _, event in self._pending)

    def glued(self) -> tuple[np.ndarray, np.ndarray]:
        """Candidates after the rows of the last glue, best first: ids [rows, W] int32, logits [rows, W] float32.

        Here once the first step of a round with bets that the device chose is finished.
        """
        token_ids, values = (host[: self._glued].numpy().copy() for host in self._host_glue)
        return token_ids, values

    def warm_up(self) -> None:
        """Capture the graphs of all buckets, over rows that are all padding."""
        for bucket in buckets(self._shape.max_rows):
            for per_block in {1, self._shared(2)}:
                self._rows.clear()
                self._tree.sizes.zero_()
                self._runner.run(("glue", bucket, per_block), lambda b=bucket, p=per_block: self._glue(b, p))
                self._tree.step.zero_()
                self._runner.run(("step", bucket, per_block), lambda b=bucket, p=per_block: self._step(b, p))

    # ---- what the device does ----

    def _glue(self, bucket: int, per_block: int) -> None:
        hidden = self._decoder.hidden(self._rows.rows(bucket, per_block), self._pools)
        for part in self._parts(bucket):
            logits = self._decoder.logits(hidden[part])
            none = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
            width = self._shape.width
            self._tree.glue_values[part], self._tree.glue_ids[part] = fork(
                logits, none, torch.full_like(none, width), width, self.vocab_size
            )
            del logits  # one part in memory at a time

    def _step(self, bucket: int, per_block: int) -> None:
        """One token for each row that has a slot left; then the counter goes on."""
        rows, tree, step = self._rows, self._tree, self._tree.step
        depth = tree.begun[:bucket] + step  # of each row's tail
        grows = depth < tree.limits[:bucket]
        depth = depth.clamp(max=self._shape.depth - 1)
        rows.slots[:bucket] = torch.where(grows, rows.tail_slots[:bucket].gather(1, depth[:, None])[:, 0], -1)
        rows.positions[:bucket] = rows.trunk_lengths[:bucket] + depth
        rows.tail_lengths[:bucket] = (depth + 1) * grows
        position = (tree.first_positions[:bucket] + step).clamp(max=self._shape.depth - 1)
        tree.laws.fan_out[:bucket] = tree.fan_out.index_select(0, position)
        hidden = self._decoder.hidden(rows.rows(bucket, per_block), self._pools)
        for part in self._parts(bucket):
            laws = Laws(*(field[part] for field in tree.laws))
            drawn = draw(self._decoder.logits(hidden[part]), laws, self._shape.width, self.vocab_size)
            tree.tokens[:, part].index_copy_(0, step, drawn.tokens[None])
            tree.law_ids[:, part].index_copy_(0, step, drawn.token_ids[None])
            tree.law_probs[:, part].index_copy_(0, step, drawn.probs[None])
            tree.law_values[:, part].index_copy_(0, step, drawn.values[None])
            rows.token_ids[part] = drawn.tokens
        tree.laws.counter[:bucket] += 1
        step += 1

    def _parts(self, bucket: int) -> list[slice]:
        """Rows whose logits are in memory at a time."""
        size = self._shape.logit_rows
        return [slice(begin, min(begin + size, bucket)) for begin in range(0, bucket, size)]

    def _choose(self, plantings: Sequence[Planting], recovered: float, part: Part | None) -> None:
        """The bets of the last rows, and the glue's candidates on their way to the host."""
        tree, budget = self._tree, len(plantings[0].tail_slots)
        offsets, tokens, possible = chosen_outcomes(
            tree.glue_values,
            tree.glue_ids,
            [planting.choice for planting in plantings],
            recovered,
            budget,
            part,
            self._num_candidates,
        )
        lengths = to_device(np.asarray([p.length for p in plantings], dtype=np.int32), self._decoder.device)
        rows = slice(self._count - budget * len(plantings), self._count)
        tree.bets[0, rows] = torch.where(possible, lengths[:, None] + offsets, 0).flatten()
        tree.bets[1, rows] = torch.where(possible, tokens, 0).flatten()
        tree.limits[rows] *= possible.flatten()
        for host, field in zip(self._host_glue, (tree.glue_ids, tree.glue_values)):
            host[: self._glued].copy_(field[: self._glued], non_blocking=True)

    def _begin(self) -> None:
        """The bets become the rows' tokens; the tree stands at step 0."""
        bucket = self._bucket
        self._rows.trunk_lengths[:bucket] = self._tree.bets[0, :bucket]
        self._rows.token_ids[:bucket] = self._tree.bets[1, :bucket]
        self._tree.step.zero_()
        for host, field in zip(self._host_bets, self._tree.bets):  # each contiguous: a strided copy would wait
            host[: self._count].copy_(field[: self._count], non_blocking=True)
        self._begun = 0
        self._pending.clear()

    def _lay_out(self, plantings: Sequence[Planting], fan_out: Sequence[int]) -> None:
        """Rows of the sequences, their tails and laws."""
        counts = [len(planting.tail_slots) for planting in plantings]
        self._count = sum(counts)
        self._bucket = bucket_of(self._count, self._shape.max_rows)
        self._per_block = self._shared(max(counts))
        tails, own_sizes = tail_columns(plantings, self._shape.depth)
        sizes = np.zeros((3, self._bucket), dtype=np.int32)
        sizes[:, : self._count] = own_sizes
        send(sizes, self._tree.sizes[:, : self._bucket])
        nothing = np.zeros(self._count, dtype=np.int32)
        places = np.repeat(np.asarray([p.place for p in plantings], dtype=np.int32), counts)
        rows = HostRows(nothing, nothing, nothing, places, nothing, tails, nothing, [])
        self._rows.fill(rows, self._bucket, self._per_block)

        for name, column in law_columns(plantings, self._bucket, self._shape.depth, self._top_m).items():
            send(column, getattr(self._tree.laws, name)[: self._bucket])
        by_step = [fan_out[min(step, len(fan_out) - 1)] for step in range(self._shape.depth)]
        send(np.asarray(by_step, dtype=np.int32), self._tree.fan_out)

    def _fetch(self, number: int) -> None:
        """Enqueue the way of a step's results to the host."""
        tree = self._tree
        for field, host in zip((tree.tokens, tree.law_ids, tree.law_probs, tree.law_values), self._host):
            host[number, : self._count].copy_(field[number, : self._count], non_blocking=True)
        event = None
        if self._decoder.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._pending.append((number, event))

    def _shared(self, rows_per_sequence: int) -> int:
        """Rows of a block: one of two, so that there are two graphs of a bucket."""
        heads = self._shape.num_heads // self._shape.num_kv_heads
        return 1 if rows_per_sequence == 1 else rows_per_block(heads, self._shape.max_rows)
