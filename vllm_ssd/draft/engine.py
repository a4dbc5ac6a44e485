"""Builds the trees: what the draft does with the rounds it is told of.

One call of `step` is one forward of the model, chosen in this order: glue (tokens that have no
KV yet), JIT drafts that a target waits for, tree steps, prompt prefill in chunks. Between two
steps a new round may come in and make some of the work worthless. Knows nothing about
processes or sockets.
"""

import time
from collections.abc import Iterable

import numpy as np
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.batch import FlatBatch, Group, flatten
from vllm_ssd.draft.kv_cache import SlotPool
from vllm_ssd.draft.sequence import Branch, Candidates, Sequence
from vllm_ssd.fanout import FanOut, Sharpness, most_probable_outcomes
from vllm_ssd.messages import Branches, Growth, Law, Outcome, Push, Round, Start, pack_law, unpack_tokens
from vllm_ssd.sampling import draw, saguaro_law, top_tokens
from vllm_ssd.statistics import Acceptance, LinearTime

_GLUE_LIMIT = 64  # more pending tokens than this are a prefill
_PREFILL_CHUNK = (16, 512)  # tokens, least and most in one forward
_PREFILL_SECONDS = 0.25  # a forward must not be longer, or outcomes wait for it
_BUSY_PREFILL_SECONDS = 0.005  # the same while trees are to be built
_RECENT_ROUNDS = 1  # a step may bring two rounds: new prompts, then outcomes
_MAX_FAN_OUT = 32  # candidates kept for each node
_VERIFY_SHARE = 0.85  # the part of a verify that a tree may take


class DraftEngine:
    """Trees for all sequences of one target."""

    def __init__(self, model, config: SaguaroConfig, num_slots: int, seed: int | None = None) -> None:
        """`model`: a `DraftModel`, or anything with its `forward`, `vocab_size`, `max_length`, `device`."""
        self._model = model
        self._config = config
        self._pool = SlotPool(num_slots)
        self._sequences: dict[int, Sequence] = {}
        self._fan_out = FanOut(config.fan_out)
        self._num_candidates = min(config.tree_budget + 1, _MAX_FAN_OUT + 1)
        self._acceptance = Acceptance(config.num_speculative_tokens)
        self._sharpness = {False: Sharpness(), True: Sharpness()}  # greedy rows, sampled rows
        self._step_time = LinearTime()  # by number of branches
        self._prefill_time = LinearTime()  # by number of tokens
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._round_id = -1
        self._depth = config.num_speculative_tokens
        self._verify_seconds = 0.0
        self._items: list[Branches | Growth] = []
        self._lost: list[int] = []
        self.busy_seconds = 0.0

    # ---- what the target tells ----

    def begin_round(self, message: Round) -> None:
        """Take in what a step of the target brought; drops the work it made worthless."""
        self._round_id = message.round_id
        self._depth = message.depth
        self._verify_seconds = message.verify_seconds
        for seq_id in message.finished:
            if (sequence := self._sequences.pop(seq_id, None)) is not None:
                sequence.drop_kv()
        for start in message.starts:
            self._start(start)
        for outcome in message.outcomes:
            self._take(outcome)

    def _start(self, start: Start) -> None:
        if (known := self._sequences.pop(start.seq_id, None)) is not None:
            known.drop_kv()
        tokens = unpack_tokens(start.token_ids).tolist()
        sequence = Sequence(start.seq_id, tokens, start.temperature, start.top_k, start.top_p, self._pool)
        sequence.trunk = list(start.drafts)
        sequence.fork_due = self._depth > 0 and self._has_room(sequence)
        self._touch(sequence)

    def _take(self, outcome: Outcome) -> None:
        sequence = self._sequences.get(outcome.seq_id)
        if sequence is None or len(sequence.tokens) + len(outcome.emitted) != outcome.length:
            self._lose(outcome.seq_id)
            return
        self._learn(sequence, outcome.emitted)
        sequence.advance(outcome.emitted, outcome.drafts)
        sequence.rest()
        if self._has_room(sequence):
            sequence.wanted = outcome.wanted
            sequence.fork_due = self._depth > 0
        self._touch(sequence)

    def _learn(self, sequence: Sequence, emitted: list[int]) -> None:
        """Where it stopped, and how well the draft's probabilities foretold it."""
        if sequence.trunk:
            self._acceptance.observe(len(sequence.trunk), len(emitted) - 1)
        sharpness = self._sharpness[sequence.samples]
        for candidates, token_id in zip(sequence.candidates, emitted):
            (found,) = np.nonzero(candidates.token_ids[: self._num_candidates] == token_id)
            if len(found):
                sharpness.observe(self._scaled(sequence, candidates), int(found[0]))

    def _scaled(self, sequence: Sequence, candidates: Candidates) -> np.ndarray:
        """Logits of the best candidates at the request's temperature."""
        logits = candidates.logits[: self._num_candidates]
        return logits / sequence.temperature if sequence.samples else logits

    def _touch(self, sequence: Sequence) -> None:
        sequence.last_round = self._round_id
        self._sequences[sequence.seq_id] = sequence
        if len(sequence.tokens) + 2 * self._config.num_speculative_tokens + 1 > self._model.max_length:
            self._lose(sequence.seq_id)

    def _lose(self, seq_id: int) -> None:
        self._lost.append(seq_id)
        if (sequence := self._sequences.pop(seq_id, None)) is not None:
            sequence.drop_kv()

    # ---- what the draft does ----

    def step(self) -> bool:
        """Do one forward (or only a fork). Returns False when there is nothing to do."""
        glue, waiting, growing, prefill, forks = self._work()
        began = time.perf_counter()
        if glue:
            self._feed_pending(glue, _GLUE_LIMIT)
        elif waiting:
            self._jit_step(waiting)
        elif forks:
            self._fork(forks)
            return True
        elif growing:
            self._tree_step(growing)
        elif prefill:
            self._prefill(prefill[0], _PREFILL_SECONDS)
        else:
            return False
        if prefill and (glue or growing):
            self._prefill(prefill[0], _BUSY_PREFILL_SECONDS)
        self.busy_seconds += time.perf_counter() - began
        return True

    def take_push(self) -> Push | None:
        """What was built since the last call, or None."""
        if not self._items and not self._lost:
            return None
        push = Push(self._round_id, self._items, self._lost, self.busy_seconds, self._pool.usage)
        self._items, self._lost = [], []
        return push

    def _work(self):
        """Sort the sequences by what they need: (glue, JIT, tree steps, prefill, fork)."""
        glue, waiting, growing, prefill, forks = [], [], [], [], []
        for sequence in self._sequences.values():
            if not sequence.fork_due and not sequence.wanted and not sequence.steps_left:
                continue
            pending = len(sequence.tokens) + len(sequence.trunk) - len(sequence.slots)
            if pending > _GLUE_LIMIT:
                prefill.append(sequence)
            elif sequence.wanted and (not pending or sequence.trunk):
                waiting.append(sequence)
            elif pending:
                glue.append(sequence)
            elif sequence.fork_due:
                forks.append(sequence)
            elif sequence.steps_left:
                growing.append(sequence)
        prefill.sort(key=lambda s: -s.last_round)
        return glue, waiting, growing, prefill, forks

    def _prefill(self, sequence: Sequence, seconds: float) -> None:
        """One chunk of a prompt, of about this length in time."""
        least, most = _PREFILL_CHUNK
        slope = self._prefill_time.slope()
        tokens = min(max(int(seconds / slope), least), most) if slope > 0 else 2 * least
        before = len(sequence.slots)
        began = time.perf_counter()
        self._feed_pending([sequence], tokens)
        self._prefill_time.observe(len(sequence.slots) - before, time.perf_counter() - began)

    def _feed_pending(self, sequences: list[Sequence], limit: int) -> None:
        """Compute the KV of tokens that have none, and the candidates after the last of them."""
        groups, fed = [], []
        for sequence in sequences:
            pending = sequence.pending[:limit]
            slots = self._take_slots(len(pending), sequences)
            if slots is None:
                sequence.drop_kv()
                continue
            known = len(sequence.slots)
            sequence.slots.extend(slots)
            groups.append(_causal_group(pending, known, sequence.slots.view(), slots))
            fed.append((sequence, known, len(pending)))
        if not groups:
            return
        owners, rows, flat = [], [], 0
        for sequence, known, count in fed:
            # Candidates are wanted from the last committed token on.
            first = max(known, len(sequence.tokens) - 1)
            for position in range(first, known + count):
                owners.append(sequence)
                rows.append(flat + position - known)
            flat += count
        # At least one row keeps the shapes simple; its logits are not used while prefilling.
        logit_rows = np.asarray(rows or [0], dtype=np.int64)
        top = self._forward(flatten(groups, self._model.device, logit_rows))
        for sequence, candidates in zip(owners, self._candidates(*top)):
            sequence.candidates.append(candidates)

    def _jit_step(self, sequences: list[Sequence]) -> None:
        """One more draft for each row that the target waits for."""
        fed = [s for s in sequences if s.trunk and s.pending]
        if fed:
            self._feed_pending(fed, _GLUE_LIMIT)
        for sequence in sequences:
            if sequence.pending or not sequence.candidates:
                sequence.rest()  # no room in the KV cache: the target takes its fallback
                continue
            if not sequence.trunk:
                self._items.append(self._branches(sequence, [], []))
            [token_id], law = self._next_tokens([sequence], [sequence.candidates[-1]], [len(sequence.trunk)])
            self._items.append(Growth(sequence.seq_id, [token_id], law.get(0)))
            sequence.trunk.append(token_id)
            sequence.wanted -= 1

    def _fork(self, sequences: list[Sequence]) -> None:
        """Hang the branches: at row j the top candidates without the trunk's own next token."""
        budgets = self._budgets(sequences)
        for sequence, (budget, depth) in zip(sequences, budgets):
            sequence.fork_due = False
            outcomes = self._outcomes(sequence, budget)
            sequence.branches = [Branch(offset, [token_id]) for offset, token_id in outcomes]
            sequence.steps_left = depth if outcomes else 0
            if outcomes:
                offsets, token_ids = map(list, zip(*outcomes))
                self._items.append(self._branches(sequence, offsets, token_ids))

    def _outcomes(self, sequence: Sequence, budget: int) -> list[tuple[int, int]]:
        """The bets of one row: (offset, token)."""
        if self._fan_out.by_row and len(sequence.candidates) == len(sequence.trunk) + 1:
            token_ids = np.stack([c.token_ids[: self._num_candidates] for c in sequence.candidates])
            logits = np.stack([self._scaled(sequence, c) for c in sequence.candidates])
            sharpness = self._sharpness[sequence.samples].value
            return most_probable_outcomes(token_ids, logits, sequence.trunk, budget, sharpness)
        counts = self._fan_out.counts(len(sequence.trunk), budget, self._acceptance.rate)
        return [
            (offset, token_id)
            for offset, count in enumerate(counts)
            for token_id in _alternatives(sequence, offset, count)
        ]

    def _tree_step(self, sequences: list[Sequence]) -> None:
        """One token for each branch of all sequences, in one flat batch."""
        began = time.perf_counter()
        groups, grown = [], []
        for sequence in sequences:
            slots = self._take_slots(len(sequence.branches), sequences)
            if slots is None:
                sequence.rest()  # what is built stays; it just grows no deeper
                continue
            for branch, slot in zip(sequence.branches, slots.tolist()):
                branch.slots.append(slot)
            groups.append(_branch_group(sequence, slots))
            grown.append(sequence)
        if not groups:
            return
        candidates = self._candidates(*self._forward(flatten(groups, self._model.device)))
        owners = [sequence for sequence in grown for _ in sequence.branches]
        branches = [branch for sequence in grown for branch in sequence.branches]
        depths = [len(branch.tokens) - 1 for branch in branches]
        token_ids, laws = self._next_tokens(owners, candidates, depths)
        for branch, token_id, after in zip(branches, token_ids, candidates):
            branch.candidates.append(after)
            branch.tokens.append(token_id)
        self._push_growth(grown, token_ids, laws)
        self._step_time.observe(len(branches), time.perf_counter() - began)

    def _push_growth(self, grown: list[Sequence], token_ids: list[int], laws: dict[int, Law]) -> None:
        row = 0
        for index, sequence in enumerate(grown):
            count = len(sequence.branches)
            self._items.append(Growth(sequence.seq_id, token_ids[row : row + count], laws.get(index)))
            sequence.steps_left -= 1
            row += count

    # ---- parts of a step ----

    def _branches(self, sequence: Sequence, offsets: list[int], token_ids: list[int]) -> Branches:
        trunk = list(sequence.trunk)
        return Branches(sequence.seq_id, self._round_id, len(sequence.tokens), trunk, offsets, token_ids)

    def _budgets(self, sequences: list[Sequence]) -> list[tuple[int, int]]:
        """Branches and depth for each sequence: glue + depth · t_tree(N) must fit one verify."""
        width, depth = self._config.tree_budget, max(self._depth, 1)
        if self._verify_seconds > 0 and self._step_time.known:
            rows = max(len(sequences), sum(1 for s in self._sequences.values() if s.steps_left or s.fork_due))
            glue = self._step_time.seconds(rows)
            available = _VERIFY_SHARE * self._verify_seconds - glue
            while width > 1 and depth * self._step_time.seconds(width * rows) > available:
                width -= 1
            while depth > 1 and depth * self._step_time.seconds(width * rows) > available:
                depth -= 1
        return [(width, depth)] * len(sequences)

    def _take_slots(self, count: int, batch: list[Sequence]) -> np.ndarray | None:
        """Slots for a sequence of `batch`; evicts sequences that no recent round had, oldest first."""
        while (slots := self._pool.take(count)) is None:
            idle = [s for s in self._idle() if s not in batch]
            if not idle:
                return None
            min(idle, key=lambda s: s.last_round).drop_kv()
        return slots

    def _idle(self) -> list[Sequence]:
        """Sequences with KV that may be evicted."""
        return [s for s in self._sequences.values() if len(s.slots) and s.last_round < self._round_id - _RECENT_ROUNDS]

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether what the sequence lacks fits the KV cache; if not, it is not even begun."""
        lacking = len(sequence.tokens) + len(sequence.trunk) - len(sequence.slots)
        free = self._pool.num_free
        return lacking <= free or lacking <= free + sum(s.num_slots for s in self._idle() if s is not sequence)

    @torch.inference_mode()
    def _forward(self, batch: FlatBatch) -> tuple[np.ndarray, np.ndarray]:
        """Top candidates of the wanted rows: logits and token ids, each [num_rows, m], on the host."""
        logits = self._model.forward(batch)
        values, token_ids = top_tokens(logits, self._width(), self._model.vocab_size)
        return values.cpu().numpy(), token_ids.cpu().numpy()

    def _width(self) -> int:
        samples = any(sequence.samples for sequence in self._sequences.values())
        return max(self._num_candidates, self._config.draft_top_m if samples else 1)

    @staticmethod
    def _candidates(values: np.ndarray, token_ids: np.ndarray) -> list[Candidates]:
        return [Candidates(ids, logits) for ids, logits in zip(token_ids, values)]

    @torch.inference_mode()
    def _next_tokens(
        self, owners: list[Sequence], candidates: list[Candidates], depths: list[int]
    ) -> tuple[list[int], dict[int, Law]]:
        """The next token of each row (rows of one owner stand together), and the laws by owner's index.

        Greedy owners take the argmax, the others draw from σ_{F,C} of the position `depths`.
        """
        token_ids = [int(c.token_ids[0]) for c in candidates]
        laws: dict[int, Law] = {}
        for index, (sequence, rows) in enumerate(_runs(owners)):
            if sequence.samples:
                columns, ids, probs = self._draw(sequence, candidates[rows.start : rows.stop], depths[rows.start : rows.stop])
                for row, column, row_ids in zip(rows, columns, ids):
                    token_ids[row] = int(row_ids[column])
                laws[index] = pack_law(ids, probs)
        return token_ids, laws

    def _draw(self, sequence: Sequence, candidates: list[Candidates], depths: list[int]):
        """Draw a token a row: column indices [n], token ids and probabilities [n, m]."""
        width = min(self._config.draft_top_m, min(len(c.token_ids) for c in candidates))
        values = torch.from_numpy(np.stack([c.logits[:width] for c in candidates]))
        ids = np.stack([c.token_ids[:width] for c in candidates])
        rows = len(candidates)
        counts = self._fan_out.counts(
            self._config.num_speculative_tokens, self._config.tree_budget, self._acceptance.rate
        )
        probs = saguaro_law(
            values,
            temperature=torch.full((rows,), sequence.temperature),
            top_k=torch.full((rows,), sequence.top_k),
            top_p=torch.full((rows,), sequence.top_p),
            fan_out=torch.tensor([counts[min(depth, len(counts) - 1)] for depth in depths]),
            saguaro_c=self._config.saguaro_c,
        )
        return draw(probs, self._generator).tolist(), ids, probs.numpy()


def _runs(owners: list[Sequence]) -> Iterable[tuple[Sequence, range]]:
    """Each owner with the rows it owns; the rows of an owner are adjacent."""
    begin = 0
    for row in range(1, len(owners) + 1):
        if row == len(owners) or owners[row] is not owners[begin]:
            yield owners[begin], range(begin, row)
            begin = row


def _alternatives(sequence: Sequence, offset: int, count: int) -> list[int]:
    """The `count` most probable tokens after trunk[:offset], without the trunk's own next token."""
    if offset >= len(sequence.candidates):
        return []
    token_ids = sequence.candidates[offset].token_ids[: count + 1].tolist()
    if offset < len(sequence.trunk):
        token_ids = [token_id for token_id in token_ids if token_id != sequence.trunk[offset]]
    return token_ids[:count]


def _causal_group(token_ids: list[int], known: int, columns: np.ndarray, slots: np.ndarray) -> Group:
    """Tokens that follow `known` earlier ones, each attending to all before it."""
    count = len(token_ids)
    positions = np.arange(known, known + count)
    mask = np.arange(known + count)[None, :] <= positions[:, None]
    return Group(token_ids, positions, slots, columns.copy(), np.arange(known + count), mask)


def _branch_group(sequence: Sequence, slots: np.ndarray) -> Group:
    """The tips of all branches: each attends to the trunk above it and to its own tail."""
    branches = sequence.branches
    trunk = sequence.slots.view()
    tails = np.asarray([branch.slots for branch in branches], dtype=np.int64)  # [n, depth]
    depth = tails.shape[1]
    above = len(sequence.tokens) + np.asarray([branch.offset for branch in branches])  # [n]
    mask = np.zeros((len(branches), len(trunk) + tails.size), dtype=bool)
    mask[:, : len(trunk)] = np.arange(len(trunk))[None, :] < above[:, None]
    mask[:, len(trunk) :] = np.repeat(np.eye(len(branches), dtype=bool), depth, axis=1)
    columns = np.concatenate([trunk, tails.reshape(-1)])
    tail_positions = above[:, None] + np.arange(depth)[None, :]
    column_positions = np.concatenate([np.arange(len(trunk)), tail_positions.reshape(-1)])
    tips = [branch.tokens[-1] for branch in branches]
    return Group(tips, above + depth - 1, slots, columns, column_positions, mask)
