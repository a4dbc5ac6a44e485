"""Builds the trees: what the draft does with the rounds it is told of.

One call of `step` is one forward of the model, chosen in this order: glue (tokens that have no
KV yet), JIT drafts that a target waits for, tree steps, prompt prefill in chunks. Between two
steps a new round may come in and make some of the work worthless. Knows nothing about
processes or sockets.
"""

import time
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import torch

from vllm_ssd.config import SaguaroConfig
from vllm_ssd.draft.bandit import SaguaroBandit
from vllm_ssd.draft.batch import FlatBatch, Group, causal_group, flatten
from vllm_ssd.draft.drawing import Drawer
from vllm_ssd.draft.forecast import Forecast, Part
from vllm_ssd.draft.intake import Intake
from vllm_ssd.draft.kv_cache import SlotPool
from vllm_ssd.draft.outbox import Outbox
from vllm_ssd.draft.pace import Pace
from vllm_ssd.draft.planner import Planner
from vllm_ssd.draft.sequence import Candidates, Sequence
from vllm_ssd.draft.sequences import Sequences
from vllm_ssd.messages import Law, Push, Report, Round
from vllm_ssd.sampling import top_tokens
from vllm_ssd.statistics import DriftingTime

GLUE_LIMIT = 64
"""More pending tokens than this are a prefill."""
_PREFILL_CHUNK = (16, 512)  # tokens, least and most in one forward
_PREFILL_SECONDS = 0.25  # a forward must not be longer, or outcomes wait for it
_BUSY_PREFILL_SECONDS = 0.005  # the same while trees are to be built

Top = tuple[np.ndarray, np.ndarray]
"""Logits (float32) and token ids (int64) of the most probable tokens, each [num_rows, m]."""
Forwards = Generator[tuple[list[Group], np.ndarray | None], Top, bool | None]
"""Asks for forwards of groups, with the rows whose logits are wanted (None: all)."""


class Work(NamedTuple):
    """Sequences by what they need next."""

    glue: list[Sequence]  # KV of a few tokens
    waiting: list[Sequence]  # a draft that the target waits for
    growing: list[Sequence]  # a tree step
    prefill: list[Sequence]  # KV of many tokens, the latest first
    forks: list[Sequence]  # branches

    @property
    def is_urgent(self) -> bool:
        """Whether the target waits."""
        return bool(self.waiting) or any(sequence.wanted for sequence in self.glue)


class DraftEngine:
    """Trees for all sequences of one target."""

    def __init__(
        self,
        model,
        config: SaguaroConfig,
        num_slots: int,
        seed: int | None = None,
        pool: SlotPool | None = None,
        part: Part | None = None,
    ) -> None:
        """`model`: a `DraftModel`, or anything with its `forward`, `vocab_size`, `num_embeddings`,
        `max_length` and `device`. `pool`: where slots come from, if not from `num_slots` of its own.
        `part`: of each tree, if other drafts build the rest.
        """
        self._model = model
        self._config = config
        self._pool = pool or SlotPool(num_slots)
        self._sequences = Sequences(self._pool)
        self._outbox = Outbox(self._report, part.index if part else 0)
        self._forecast = Forecast(config, part)
        self._drawer = Drawer(config.draft_top_m, seed)
        self._bandit = SaguaroBandit(config.saguaro_c, seed)
        self._pace = Pace(config.tree_budget)
        self._prefill_time = DriftingTime(in_proportion=True)  # by number of tokens
        self._planner = Planner(
            self._sequences, self._forecast, self._pace, config.num_speculative_tokens, config.most_branches
        )
        self._intake = Intake(
            self._sequences,
            self._pool,
            self._outbox,
            self._forecast,
            self._bandit,
            self._pace,
            self._planner,
            most_tokens=model.max_length - 2 * config.num_speculative_tokens - 1,
            num_embeddings=model.num_embeddings,
        )
        self._latest_fan_out: list[int] = []
        self.busy_seconds = 0.0
        self.prefill_seconds = _PREFILL_SECONDS  # the longest prefill while no tree is to be built

    # ---- what the target tells ----

    def begin_round(self, message: Round, earliest: float | None = None) -> None:
        """Take in what a step of the target brought; drops the work it made worthless.

        `earliest`: when the message may have come, by `time.perf_counter()`; None: just now.
        """
        self._intake.take(message, earliest)

    @property
    def num_sequences(self) -> int:
        """Sequences it works for."""
        return len(self._sequences)

    def knows(self, seq_id: int) -> bool:
        """Whether it works for this sequence."""
        return self._sequences.get(seq_id) is not None

    def release(self, num_slots: int) -> None:
        """Give back at least so many KV slots; the sequences that lose theirs are read again when needed."""
        for sequence in self._sequences.oldest_first():
            if num_slots <= 0:
                return
            num_slots -= sequence.num_slots
            self._outbox.decline(sequence)
            sequence.drop_kv()

    def sequence(self, seq_id: int) -> Sequence:
        """What is known of a sequence. Raises `KeyError` if it is not known."""
        if (sequence := self._sequences.get(seq_id)) is None:
            raise KeyError(seq_id)
        return sequence

    # ---- what the draft does ----

    def step(self) -> bool:
        """Do one forward (or only a fork). Returns False when there is nothing to do."""
        forwards, top = self.forwards(), None
        while True:
            try:
                groups, logit_rows = forwards.send(top)
            except StopIteration as end:
                return end.value
            top = self._forward(flatten(groups, self._model.device, logit_rows))

    def forwards(self) -> Forwards:
        """The same as a generator, for whoever joins the forwards of several engines.

        It must be run to its end before anything else is asked of the engine.
        """
        work = self._work()
        began = time.perf_counter()
        if work.glue:
            yield from self._glue(work)
        elif work.waiting:
            yield from self._jit_step(work.waiting)
        elif work.forks:
            self._fork(work.forks)
            return True
        elif work.growing:
            yield from self._tree_step(work.growing)
        elif work.prefill:
            yield from self._prefill(work.prefill[0], self.prefill_seconds)
        elif (to_extend := self._planner.to_extend()) is None:
            return False
        else:
            self._extend(to_extend)
        if work.prefill and (work.glue or work.growing) and not work.is_urgent:
            yield from self._prefill(work.prefill[0], _BUSY_PREFILL_SECONDS)
        self.busy_seconds += time.perf_counter() - began
        return True

    def take_push(self) -> Push | None:
        """What was built since the last call, or None."""
        return self._outbox.take(self._sequences.round_id, self.busy_seconds, self._pool.usage)

    def _report(self) -> Report | None:
        """What was measured and decided; None before the first tree."""
        width, depth = self._planner.latest_shape
        if not width:
            return None
        return Report(
            self._forecast.outcome_shares(),
            self._forecast.acceptance,
            self._forecast.sharpness(),
            self._latest_fan_out,
            width,
            depth,
            self._pace.share,
            [self._pace.step_seconds(n) for n in (1, 8, 32)],
            self._bandit.best,
        )

    def _work(self) -> Work:
        """Sort the sequences by what they need."""
        work = glue, waiting, growing, prefill, forks = Work([], [], [], [], [])
        lets_step = self._planner.lets_step()
        for sequence in self._sequences:
            if not sequence.fork_due and not sequence.wanted and not sequence.steps_left:
                continue
            pending = len(sequence.tokens) + len(sequence.trunk) - len(sequence.slots)
            if pending > GLUE_LIMIT:
                self._outbox.decline(sequence)
                prefill.append(sequence)
            elif sequence.wanted and (not pending or sequence.trunk):
                waiting.append(sequence)
            elif pending:
                glue.append(sequence)
            elif sequence.fork_due:
                forks.append(sequence)
            elif sequence.steps_left == 1 or (sequence.steps_left and lets_step):
                growing.append(sequence)
        prefill.sort(key=lambda s: -s.last_round)
        return work

    def seconds_until_overdue(self) -> float:
        """How long to wait for an outcome before there is work again; infinite if there will be none."""
        return self._planner.seconds_until_more()

    def _prefill(self, sequence: Sequence, seconds: float) -> Forwards:
        """One chunk of a prompt, of about this length in time."""
        least, most = _PREFILL_CHUNK
        known = self._prefill_time.known
        tokens = max(self._prefill_time.most_within(seconds, most), least) if known else 2 * least
        before = len(sequence.slots)
        began = time.perf_counter()
        yield from self._feed_pending([sequence], tokens)
        if len(sequence.slots) > before:
            self._prefill_time.observe(len(sequence.slots) - before, time.perf_counter() - began)

    def _glue(self, work: Work) -> Forwards:
        """What an outcome left without KV: the target's own tokens, and drafts that were not ours."""
        yield from self._feed_pending(work.glue, GLUE_LIMIT)

    def _feed_pending(self, sequences: list[Sequence], limit: int) -> Forwards:
        """Compute the KV of tokens that have none, and the candidates after the last of them."""
        began = time.perf_counter()
        groups, fed = [], []
        for sequence in sequences:
            pending = sequence.pending[:limit]
            slots = self._sequences.take_slots(len(pending), sequences)
            if slots is None:
                self._outbox.decline(sequence)
                sequence.drop_kv()
                continue
            known = len(sequence.slots)
            sequence.slots.extend(slots)
            groups.append(causal_group(pending, known, sequence.slots.view(), slots))
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
        top = yield groups, logit_rows
        for sequence, candidates in zip(owners, self._candidates(*top)):
            sequence.candidates.append(candidates)
        if flat <= GLUE_LIMIT:
            self._pace.observe_step(flat, time.perf_counter() - began)

    def _jit_step(self, sequences: list[Sequence]) -> Forwards:
        """One more draft for each row that the target waits for."""
        fed = [s for s in sequences if s.trunk and s.pending]
        if fed:
            yield from self._feed_pending(fed, GLUE_LIMIT)
        self._draw_for_target(sequences)

    def _draw_for_target(self, sequences: list[Sequence]) -> None:
        """One more draft for each, from the candidates after the last token."""
        for sequence in sequences:
            if sequence.pending or not sequence.candidates:
                self._outbox.decline(sequence)  # no room in the KV cache: the target takes its fallback
                sequence.rest()
                continue
            if not sequence.trunk:
                self._outbox.add_branches(sequence, self._sequences.round_id, [])
            [token_id], law = self._drawer.next_tokens(
                [sequence], [sequence.candidates[-1]], [len(sequence.trunk)], self._forecast.fan_out()
            )
            self._outbox.add_growth(sequence, [token_id], law.get(0))
            sequence.trunk.append(token_id)
            sequence.wanted -= 1
        self._pace.restart_clock()

    def _fork(self, sequences: list[Sequence]) -> None:
        """Hang a wave of branches: at row j the top candidates without the trunk's own next token."""
        width, depth = self._planner.shape(sequences)
        for sequence in sequences:
            built = {(branch.offset, branch.tokens[0]) for branch in sequence.branches}
            outcomes = self._forecast.outcomes(sequence, len(built) + width)
            outcomes = [outcome for outcome in outcomes if outcome not in built][:width]
            self._hang(sequence, outcomes, depth)

    def _extend(self, sequences: list[Sequence]) -> None:
        """Branches that were cut short grow again; trees without such get another wave."""
        whole = []
        for sequence in sequences:
            if short := sequence.short_branches(self._planner.depth):
                sequence.resume(short, self._planner.most_steps)
                self._outbox.add_resumed(sequence, self._sequences.round_id)
            else:
                whole.append(sequence)
        if whole:
            self._fork(whole)

    def _hang(self, sequence: Sequence, outcomes: list[tuple[int, int]], depth: int) -> None:
        """A wave that bets on these outcomes, with so many drafts planned for each; the target hears of it."""
        sequence.fork_due = False
        sequence.hang(outcomes, self._planner.most_steps, self._planner.most_steps - depth)
        self._latest_fan_out = np.bincount([o for o, _ in outcomes], minlength=len(sequence.trunk) + 1).tolist()
        if outcomes:
            self._outbox.add_branches(sequence, self._sequences.round_id, outcomes, depth)

    def _tree_step(self, sequences: list[Sequence]) -> Forwards:
        """One token for each branch of all waves, in one flat batch."""
        began = time.perf_counter()
        groups, grown, tips = [], [], []
        for sequence in self._planner.growing(sequences):
            slots = self._sequences.take_slots(len(sequence.wave), sequences)
            if slots is None:
                sequence.rest()  # what is built stays; it just grows no deeper
                sequence.is_exhausted = True
                continue
            for branch, slot in zip(sequence.wave, slots.tolist()):
                branch.slots.append(slot)
            groups.append(sequence.branch_group(slots))
            grown.append(sequence)
            tips += sequence.wave
        if not groups:
            return
        top = yield groups, None
        candidates = self._candidates(*top)
        owners = [sequence for sequence in grown for _ in sequence.wave]
        depths = [len(branch.tokens) - 1 for branch in tips]
        token_ids, laws = self._drawer.next_tokens(owners, candidates, depths, self._forecast.fan_out())
        for branch, token_id, after in zip(tips, token_ids, candidates):
            branch.candidates.append(after)
            branch.tokens.append(token_id)
        self._push_growth(grown, token_ids, laws)
        seconds = time.perf_counter() - began
        self._outbox.add_tree_step(seconds)
        self._pace.observe_step(len(tips), seconds)

    def _push_growth(self, grown: list[Sequence], token_ids: list[int], laws: dict[int, Law]) -> None:
        row = 0
        for index, sequence in enumerate(grown):
            count = len(sequence.wave)
            self._outbox.add_growth(sequence, token_ids[row : row + count], laws.get(index))
            sequence.steps_left -= 1
            row += count

    # ---- parts of a step ----

    @torch.inference_mode()
    def _forward(self, batch: FlatBatch) -> Top:
        """Top candidates of the wanted rows, on the host."""
        logits = self._model.forward(batch)
        values, token_ids = top_tokens(logits, self.width, self._model.vocab_size)
        return values.cpu().numpy(), token_ids.cpu().numpy()

    @property
    def width(self) -> int:
        """m: candidates that are wanted of a row."""
        samples = any(sequence.samples for sequence in self._sequences)
        return max(self._forecast.num_candidates, self._config.draft_top_m if samples else 1)

    @staticmethod
    def _candidates(values: np.ndarray, token_ids: np.ndarray) -> list[Candidates]:
        return [Candidates(ids, logits) for ids, logits in zip(token_ids, values)]
