"""A round of the draft on a GPU without waiting for it: fork, then steps that feed one another.

The host says where branches may hang and which slots they may use; tokens, laws and candidates stay
on the device from step to step, and come to the host by themselves, in pinned memory, step after
step. Nothing here reads a tensor back before its event has passed. A step is a graph: it finds which
step it is in a counter on the device.

On a CPU the same calls run at once (the tests compare their trees with the engine's, on real
weights, and on a simulated GPU too).

Shapes: R rows (branches of all sequences), S sequences, D steps, W candidates of a row, P positions
where a verification may stop (K + 1).
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from vllm_ssd.draft.batch import to_device
from vllm_ssd.draft.forecast import Part
from vllm_ssd.draft.graph_buffers import RowBuffers, Shape, TreeBuffers, send
from vllm_ssd.draft.graph_decoder import GraphDecoder
from vllm_ssd.draft.graph_outcomes import UNKNOWN, most_probable_outcomes
from vllm_ssd.draft.graph_planting import Planting, Step, law_columns
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

    def plant(self, plantings: Sequence[Planting], bets: Sequence[tuple[int, int]], fan_out: Sequence[int]) -> None:
        """Begin a round with branches that the host chose.

        `bets`: (trunk tokens above, first token) of all rows, in the order of the plantings and their
        tail slots. `fan_out`: F by position, for Saguaro sampling.
        """
        self._lay_out(plantings, fan_out)
        above = np.repeat([planting.length for planting in plantings], [len(p.tail_slots) for p in plantings])
        chosen = np.asarray(bets, dtype=np.int32).reshape(-1, 2)
        table = np.zeros((2, self._bucket), dtype=np.int32)
        table[0, : self._count] = above + chosen[:, 0]
        table[1, : self._count] = chosen[:, 1]
        send(table, self._tree.bets[:, : self._bucket])
        self._begin()

    def plant_most_probable(
        self,
        plantings: Sequence[Planting],
        first_rows: Sequence[int],
        trunks: Sequence[Sequence[int]],
        sharpness: Sequence[float],
        acceptance: Sequence[Sequence[float] | None],
        recovered: float,
        fan_out: Sequence[int],
        part: Part | None = None,
    ) -> None:
        """Begin a round with the most probable outcomes by the candidates of the last `glue`, and those added.

        For each planting: their row after its last committed token, the drafts in flight, by what its logits
        are multiplied before they are probabilities, and the drafts' acceptance if they were drawn; `recovered`:
        as of `fanout.most_probable_outcomes`.
        All plantings have as many tail slots. `part`: the class of outcomes to choose from, if other drafts build
        the rest.
        """
        self._lay_out(plantings, fan_out)
        size, positions = len(plantings), max(map(len, trunks)) + 1
        table = np.full((size, positions + 1), -1, dtype=np.int32)
        lengths = [planting.length for planting in plantings]
        facts = np.full((size, 3 + positions - 1), UNKNOWN, dtype=np.float32)  # what is one number each; acceptance
        facts[:, :3] = np.asarray([first_rows, sharpness, lengths]).T
        for row, trunk, rates, measured in zip(table, trunks, facts[:, 3:], acceptance):
            row[: len(trunk)] = trunk
            row[positions] = len(trunk)
            if measured is not None:
                rates[: len(trunk)] = measured
        device = self._decoder.device
        sent, sent_facts = to_device(table, device), to_device(facts, device)
        rows, exponents, above = sent_facts[:, :3].unbind(1)
        at = rows.long()[:, None] + torch.arange(positions, device=device)
        at = at.clamp(max=self._shape.max_rows - 1)
        offsets, tokens, possible = most_probable_outcomes(
            self._tree.glue_values[at][..., : self._num_candidates],
            self._tree.glue_ids[at][..., : self._num_candidates],
            sent[:, : positions - 1],
            sent[:, positions],
            exponents,
            sent_facts[:, 3:],
            recovered,
            self._count // size,
            part,
        )
        self._tree.bets[:, : self._bucket].zero_()
        above = torch.where(possible, above.int()[:, None] + offsets, 0)
        self._tree.bets[0, : self._count] = above.flatten()
        self._tree.bets[1, : self._count] = torch.where(possible, tokens, 0).flatten()
        for host, field in zip(self._host_glue, (self._tree.glue_ids, self._tree.glue_values)):
            host[: self._glued].copy_(field[: self._glued], non_blocking=True)
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

    def glued(self) -> tuple[np.ndarray, np.ndarray]:
        """Candidates after the rows of the last glue, best first: ids [rows, W] int32, logits [rows, W] float32.

        Here once the first step of the round that `plant_most_probable` began is finished.
        """
        token_ids, values = (host[: self._glued].numpy().copy() for host in self._host_glue)
        return token_ids, values

    def warm_up(self) -> None:
        """Capture the graphs of all buckets, over rows that are all padding."""
        for bucket in buckets(self._shape.max_rows):
            for per_block in {1, self._shared(2)}:
                self._rows.clear()
                self._tree.live.zero_()
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
        """One token for each row; then the counter goes on."""
        rows, tree, step = self._rows, self._tree, self._tree.step
        live = tree.live[:bucket]
        rows.slots[:bucket] = torch.where(live > 0, rows.tail_slots[:bucket].index_select(1, step)[:, 0], -1)
        rows.positions[:bucket] = rows.trunk_lengths[:bucket] + step
        rows.tail_lengths[:bucket] = (step + 1) * live
        tree.laws.fan_out[:bucket] = tree.fan_out.index_select(0, step).expand(bucket)
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

    def _begin(self) -> None:
        """The bets become the rows' tokens; the tree stands at step 0."""
        bucket = self._bucket
        self._rows.trunk_lengths[:bucket] = self._tree.bets[0, :bucket]
        self._rows.token_ids[:bucket] = self._tree.bets[1, :bucket]
        self._tree.live[:bucket] = (self._tree.bets[0, :bucket] > 0).int()
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
        tails = np.concatenate([planting.tail_slots for planting in plantings]).astype(np.int32)
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
