"""A scripted draft model, and the target's side of the rounds, for the tests of the draft engine."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_ssd.draft.batch import FlatBatch
from vllm_ssd.draft.engine import DraftEngine
from vllm_ssd.messages import Branches, Growth, Outcome, Push, Round, Start, pack_tokens, unpack_law

VOCABULARY = 29


@functools.lru_cache(maxsize=200_000)
def context_logits(context: tuple[int, ...]) -> np.ndarray:
    """Logits after a context, [VOCABULARY]: other contexts have quite other ones."""
    seed = functools.reduce(lambda a, token: (a * 1_000_003 + token + 1) % (1 << 61), context, 12345)
    return np.random.default_rng(seed).normal(size=VOCABULARY, scale=2.0).astype(np.float32)


class ContextModel:
    """Its "KV" of a token is the token and its position; its logits depend on exactly what is attended to.

    A wrong slot, mask or position gives other logits, or fails here: positions must be 0..p.
    """

    device = torch.device("cpu")
    vocab_size = num_embeddings = VOCABULARY

    def __init__(self, num_slots: int, max_length: int = 100_000) -> None:
        self.max_length = max_length
        self.batches: list[FlatBatch] = []
        self._kv = torch.full((num_slots, 2), -1)  # slot -> (position, token)

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        self.batches.append(batch)
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens of a batch share a slot"
        self._kv[batch.slots] = torch.stack((batch.positions, batch.token_ids), dim=1)
        mask = batch.mask.flatten(0, 1)
        width = batch.mask.shape[1]
        rows = range(len(batch.token_ids)) if batch.logit_rows is None else batch.logit_rows.tolist()
        return torch.from_numpy(np.stack([self._logits(batch, mask, width, row) for row in rows]))

    def _logits(self, batch: FlatBatch, mask: torch.Tensor, width: int, row: int) -> np.ndarray:
        at = row if batch.padded_rows is None else int(batch.padded_rows[row])
        seen = sorted(map(tuple, self._kv[batch.columns[at // width][mask[at]]].tolist()))
        positions, tokens = zip(*seen, strict=True)
        assert positions == tuple(range(int(batch.positions[row]) + 1)), "a token sees gaps or doubles"
        return context_logits(tokens)


@dataclass
class Bet:
    """A branch as the target got it."""

    seq_id: int
    prefix: tuple[int, ...]  # the tokens that the chain follows
    chain: list[int] = field(default_factory=list)
    laws: list[tuple[np.ndarray, np.ndarray] | None] = field(default_factory=list)  # (token ids, probabilities)


@dataclass
class Fork:
    """The alternatives hung below one place."""

    context: tuple[int, ...]
    excluded: int | None  # the trunk's own next token
    token_ids: list[int]


class Target:
    """The target's side: histories, drafts in flight, and all that was pushed."""

    def __init__(self, engine: DraftEngine) -> None:
        self.engine = engine
        self.history: dict[int, list[int]] = {}
        self.in_flight: dict[int, list[int]] = {}
        self.bets: list[Bet] = []
        self.forks: list[Fork] = []
        self.lost: list[int] = []
        self.declined: list[int] = []
        self.pushes: list[Push] = []
        self._open: dict[int, list[Bet]] = {}
        self._round_id = 0

    def start(
        self, seq_id: int, tokens: Sequence[int], drafts: Sequence[int] = (), temperature: float = 0.0, **sampling
    ) -> Start:
        """A new sequence, as the message for the draft."""
        self.history[seq_id] = list(tokens)
        self.in_flight[seq_id] = list(drafts)
        self._open.pop(seq_id, None)
        top_k, top_p = sampling.get("top_k", 0), sampling.get("top_p", 1.0)
        return Start(seq_id, pack_tokens(tokens), list(drafts), temperature, top_k, top_p)

    def outcome(self, seq_id: int, emitted: Sequence[int], drafts: Sequence[int] = (), wanted: int = 0) -> Outcome:
        """An outcome, as the message for the draft."""
        self.history[seq_id].extend(emitted)
        self.in_flight[seq_id] = list(drafts)
        return Outcome(seq_id, len(self.history[seq_id]), list(emitted), list(drafts), wanted)

    def tell(
        self,
        starts: Sequence[Start] = (),
        outcomes: Sequence[Outcome] = (),
        finished: Sequence[int] = (),
        depth: int = 4,
        verify_seconds: float = 0.0,
    ) -> None:
        """Send one round."""
        self._round_id += 1
        for seq_id in finished:
            del self.history[seq_id], self.in_flight[seq_id]
        self.engine.begin_round(
            Round(self._round_id, list(starts), list(outcomes), list(finished), depth, verify_seconds)
        )

    def run(self, steps: int = 2000) -> bool:
        """Let the draft do up to so many steps; True if it has nothing left to do."""
        for _ in range(steps):
            went_on = self.engine.step()
            if (push := self.engine.take_push()) is not None:
                self._take(push)
            if not went_on:
                return True
        return False

    def branches(self, seq_id: int) -> list[Bet]:
        """The latest branches of a sequence."""
        return self._open.get(seq_id, [])

    def _take(self, push: Push) -> None:
        self.pushes.append(push)
        self.lost.extend(push.lost)
        self.declined.extend(push.declined)
        for item in push.items:
            if isinstance(item, Branches):
                self._hang(item)
            else:
                self._grow(item)

    def _hang(self, item: Branches) -> None:
        base = tuple(self.history[item.seq_id][: item.length])
        assert len(base) == item.length
        if not item.token_ids:
            bets = [Bet(item.seq_id, base + tuple(item.trunk))]
        else:
            places = list(zip(item.offsets, item.token_ids, strict=True))
            bets = [Bet(item.seq_id, base + tuple(item.trunk[:offset]) + (token,)) for offset, token in places]
            if item.drafts:
                self._open[item.seq_id] = [self._found(bet, list(built)) for bet, built in zip(bets, item.drafts)]
                return
            for offset in sorted(set(item.offsets)):
                excluded = item.trunk[offset] if offset < len(item.trunk) else None
                hung = [token for at, token in places if at == offset]
                self.forks.append(Fork(base + tuple(item.trunk[:offset]), excluded, hung))
        self._open[item.seq_id] = bets
        self.bets.extend(bets)

    def _found(self, bet: Bet, chain: list[int]) -> Bet:
        """The branch that was begun before and has these drafts."""
        return next(b for b in self.bets if (b.seq_id, b.prefix, b.chain) == (bet.seq_id, bet.prefix, chain))

    def _grow(self, item: Growth) -> None:
        bets = self._open[item.seq_id]
        law = None if item.law is None else unpack_law(item.law, len(item.token_ids))
        assert len(item.token_ids) <= len(bets)
        for i, (bet, token) in enumerate(zip(bets, item.token_ids)):  # the optional step may take only the first
            bet.chain.append(token)
            bet.laws.append(None if law is None else (law[0][i], law[1][i]))


def play_round(target: Target, generator: random.Random, depth: int, vocabulary: int, wait: bool = True) -> None:
    """One round in which each sequence hits, misses, takes n-grams, waits (JIT) or has its drafts cut, by chance."""
    outcomes = []
    for seq_id in list(target.history):
        if generator.random() < 0.15:
            continue  # not in this step's batch
        trunk = target.in_flight[seq_id]
        committed = tuple(target.history[seq_id])
        bets = [bet for bet in target.branches(seq_id) if bet.prefix[: len(committed)] == committed != bet.prefix]
        kind = generator.choice(("hit", "hit", "cut", "ngram", "wait", "nothing"))
        if kind == "hit" and bets:
            bet = generator.choice(bets)
            drafts = bet.chain[: generator.randint(0, depth)]
            outcomes.append(target.outcome(seq_id, bet.prefix[len(committed) :], drafts))
        elif kind == "cut" and trunk:
            length = generator.randint(1, len(trunk))
            outcomes.append(target.outcome(seq_id, trunk[:length], trunk[length:][: generator.randint(0, depth)]))
        else:
            emitted = [*trunk[: generator.randint(0, len(trunk))], generator.randrange(vocabulary)]
            ngrams = [generator.randrange(vocabulary) for _ in range(generator.randint(1, depth))]
            wanted = generator.randint(1, depth) if kind == "wait" and wait else 0
            outcomes.append(target.outcome(seq_id, emitted, ngrams if kind == "ngram" else [], wanted))
    target.tell(outcomes=outcomes, depth=depth)


def assert_greedy(target: Target, logits_after: Callable[[tuple[int, ...]], np.ndarray], tolerance: float) -> None:
    """Every chain is what greedy decoding gives after its prefix, every fork holds the best alternatives."""
    for bet in target.bets:
        for i, token in enumerate(bet.chain):
            logits = logits_after(bet.prefix + tuple(bet.chain[:i]))
            assert logits[token] >= logits.max() - tolerance, (bet, i)
    for fork in target.forks:
        logits = logits_after(fork.context).copy()
        if fork.excluded is not None:
            logits[fork.excluded] = -np.inf
        best = np.sort(logits)[::-1][: len(fork.token_ids)]
        assert len(set(fork.token_ids)) == len(fork.token_ids)
        assert np.allclose(logits[fork.token_ids], best, atol=tolerance), fork
