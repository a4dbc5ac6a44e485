#!/usr/bin/env python3
"""How often each fan-out foresees the outcome of a verification, at the same number of branches.

    python scripts/bench_fan_out.py --target TARGET --draft DRAFT --prompts PROMPTS.jsonl \\
        --k 5 --branches 4 8 16 24 32 --json fan_out.json --plot fan_out.png

The target answers the prompts once, greedily and without speculation. Then its answers are
replayed as verifications of the draft's own drafts: at each, every fan-out lays its bets before
the outcome is shown to it. With `--temperature` the drafts are drawn, and verified by rejection sampling
against the target's law. No time is measured, so the figures do not depend on the machine.

With `--parts N` the bets are also shared out among N drafts, as with the option `draft_devices`: each lays
its part of the branches on outcomes of its own class.

"hindsight" is the best that fixed (position, rank) cells can do: the cells that came out most
often, chosen after all outcomes are known.
"""

import argparse
import collections
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmark import arguments

FAN_OUTS = ("uniform", "geometric", "measured")


def main() -> int:
    args = parse_args()
    prompts = read_prompts(args.prompts, args.limit)
    if args.temperature > 0:
        rows = replay(args, sampled_verifications(args, prompts))
    else:
        rows = replay(args, verifications(args, target_answers(args, prompts)))
    print(table(rows))
    args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if args.plot:
        plot(rows, f"{args.target} + {args.draft}, K = {args.k}\n{args.prompts}", args.plot)
    return 0


def target_answers(args: argparse.Namespace, prompts: list[str]) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of each prompt, as token ids."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(model=args.target, dtype=args.dtype, enforce_eager=True, max_model_len=args.max_model_len)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


def replay(args: argparse.Namespace, verified: Iterable[tuple[Any, list[int]]]) -> list[dict[str, Any]]:
    """A row for each fan-out and number of branches."""
    forecasts = {
        (name, branches): Bets(args, name, branches, 1) for name, branches in itertools.product(FAN_OUTS, args.branches)
    }
    for parts, branches in itertools.product(args.parts, args.branches):
        forecasts[f"measured/{parts}", branches] = Bets(args, "measured", branches, parts)
    foreseen: collections.Counter[tuple[str, int]] = collections.Counter()
    cells: collections.Counter[tuple[int, int]] = collections.Counter()
    lookups = emitted_tokens = 0
    for sequence, emitted in verified:
        outcome = (len(emitted) - 1, emitted[-1])
        for key, bets in forecasts.items():
            foreseen[key] += bets.hold(sequence, outcome)
            bets.learn(sequence, emitted)
        if (rank := rank_of(sequence, *outcome)) is not None:
            cells[outcome[0], rank] += 1
        lookups += 1
        emitted_tokens += len(emitted)
    best = [count for _, count in cells.most_common()]
    found = [{"fan_out": name, "branches": n, "hits": foreseen[name, n]} for name, n in forecasts]
    found += [{"fan_out": "hindsight", "branches": n, "hits": sum(best[:n])} for n in args.branches]
    common = {"k": args.k, "lookups": lookups, "tokens_per_round": emitted_tokens / lookups}
    return [{**row, "hit_rate": row["hits"] / lookups, **common} for row in found]


class Bets:
    """The bets of one draft, or of several that share them."""

    def __init__(self, args: argparse.Namespace, fan_out: str, branches: int, parts: int) -> None:
        from vllm_ssd.config import SaguaroConfig
        from vllm_ssd.draft.forecast import Forecast, Part

        self._each = branches // parts
        config = SaguaroConfig(args.draft, args.k, tree_budget=self._each, fan_out=fan_out)
        self._forecasts = [Forecast(config, Part(index, parts)) for index in range(parts)]

    def hold(self, sequence: Any, outcome: tuple[int, int]) -> bool:
        """Whether an outcome is among them."""
        return any(outcome in forecast.outcomes(sequence, self._each) for forecast in self._forecasts)

    def learn(self, sequence: Any, emitted: list[int]) -> None:
        """What the verification emitted."""
        for forecast in self._forecasts:
            forecast.remember(sequence, emitted)
            forecast.learn()


def verifications(args: argparse.Namespace, answers: list[tuple[list[int], list[int]]]) -> Iterator[tuple[Any, list]]:
    """Each verification of K drafts: the draft's sequence before it, and what the target emits."""
    vocab_size = 1 + max(token for prompt, answer in answers for token in (*prompt, *answer))
    draft = Draft(args, max(vocab_size, args.vocab_size), max(len(prompt) + len(answer) for prompt, answer in answers))
    for prompt, answer in answers:
        draft.start(prompt)
        place = 0
        emitted = answer[:1]
        while place + len(emitted) + args.k < len(answer):
            sequence, _ = draft.after(emitted)
            place += len(emitted)
            drafts = sequence.trunk
            accepted = next((i for i, draft in enumerate(drafts) if draft != answer[place + i]), len(drafts))
            emitted = answer[place : place + accepted + 1]
            yield sequence, emitted


def sampled_verifications(args: argparse.Namespace, prompts: list[str]) -> Iterator[tuple[Any, list[int]]]:
    """The same of drawn drafts: accepted with min(1, p / q), else the residual's token is emitted."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, generator = AutoTokenizer.from_pretrained(args.target), np.random.default_rng(0)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    vocab_size = args.vocab_size or target.config.vocab_size
    draft = Draft(args, vocab_size, args.max_model_len)

    @torch.inference_mode()
    def laws_after(tokens: list[int], drafts: list[int]) -> np.ndarray:  # p, [len(drafts) + 1, vocab_size]
        logits = target(torch.tensor([tokens + drafts])).logits[0, len(tokens) - 1 :, :vocab_size]
        return torch.softmax(logits.double() / args.temperature, dim=-1).numpy()

    for text in prompts:
        tokens = tokenizer(text)["input_ids"][: args.max_model_len - args.max_tokens - args.k]
        draft.start(tokens, args.temperature)
        end = len(tokens) + args.max_tokens
        emitted = [int(generator.choice(vocab_size, p=laws_after(tokens, [])[0]))]
        while len(tokens) + len(emitted) < end:
            sequence, drawn_from = draft.after(emitted)
            tokens = tokens + emitted
            emitted = []
            p = laws_after(tokens, sequence.trunk)
            for place, (token, (ids, probs)) in enumerate(zip(sequence.trunk, drawn_from, strict=True)):
                q = np.zeros(vocab_size)
                q[ids] = probs
                if generator.random() * q[token] >= p[place, token]:
                    residual = np.maximum(p[place] - q, 0.0)
                    emitted.append(int(generator.choice(vocab_size, p=residual / residual.sum())))
                    break
                emitted.append(token)
            else:
                emitted.append(int(generator.choice(vocab_size, p=p[-1])))
            yield sequence, emitted


class Draft:
    """A draft whose every row waits for K drafts, as after a miss: what it drafts does not depend on bets."""

    def __init__(self, args: argparse.Namespace, vocab_size: int, longest: int) -> None:
        import torch

        from vllm_ssd.config import SaguaroConfig
        from vllm_ssd.draft.engine import DraftEngine
        from vllm_ssd.draft.model import DraftModel

        config = SaguaroConfig(args.draft, args.k)
        model = DraftModel(config, torch.device("cpu"), vocab_size)
        self._engine = DraftEngine(model, config, model.allocate_kv_cache(None, 2 * longest + 4096), seed=0)
        self._k, self._number, self._length = args.k, -1, 0

    def start(self, prompt: list[int], temperature: float = 0.0) -> None:
        """The next request; the one before is over."""
        from vllm_ssd.messages import Round, Start, pack_tokens

        self._number += 1
        start = Start(self._number, pack_tokens(prompt), [], temperature, 0, 1.0)
        self._engine.begin_round(Round(0, [start], [], [self._number - 1], self._k, 0.0))
        self._length = len(prompt)

    def after(self, emitted: list[int]) -> tuple[Any, list[tuple[Any, Any]]]:
        """The sequence with K drafts after these tokens; of drawn ones also the laws, token ids and probabilities."""
        from vllm_ssd.messages import Growth, Outcome, Round, unpack_law

        self._length += len(emitted)
        outcome = Outcome(self._number, self._length, emitted, [], self._k)
        self._engine.begin_round(Round(0, [], [outcome], [], self._k, 0.0))
        sequence, items = self._engine.sequence(self._number), []
        while sequence.wanted or sequence.pending:
            self._engine.step()
            if (push := self._engine.take_push()) is not None:
                items += push.items
        laws = [unpack_law(item.law, 1) for item in items if isinstance(item, Growth) and item.law is not None]
        return sequence, [(ids[0][ids[0] >= 0], probs[0][ids[0] >= 0]) for ids, probs in laws[: self._k]]


def rank_of(sequence: Any, position: int, token_id: int) -> int | None:
    """The rank of the emitted token among the draft's candidates, its own next draft left out."""
    candidates = sequence.candidates[position].token_ids.tolist()
    if position < len(sequence.trunk) and sequence.trunk[position] in candidates:
        candidates.remove(sequence.trunk[position])
    return candidates.index(token_id) if token_id in candidates else None


def table(rows: list[dict[str, Any]]) -> str:
    """Hit rates, a line for each fan-out, a column for each number of branches."""
    widths = sorted({row["branches"] for row in rows})
    names = list(dict.fromkeys(row["fan_out"] for row in rows))
    rates = {(row["fan_out"], row["branches"]): row["hit_rate"] for row in rows}
    lines = [f"{'branches':>10}" + "".join(f"{width:>8}" for width in widths)]
    lines += [f"{name:>10}" + "".join(f"{rates[name, width]:>8.3f}" for width in widths) for name in names]
    first = rows[0]
    return "\n".join([*lines, f"{first['lookups']} verifications, {first['tokens_per_round']:.2f} tokens each"])


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Hit rate over branches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in dict.fromkeys(row["fan_out"] for row in rows):
        points = sorted((row["branches"], row["hit_rate"]) for row in rows if row["fan_out"] == name)
        panel.plot(*zip(*points, strict=True), "--" if name == "hindsight" else "o-", label=name)
    panel.set(xlabel="branches a request", ylabel="hit rate", ylim=(0, 1))
    panel.legend()
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=150)


def read_prompts(path: Path, limit: int | None) -> list[str]:
    """The `prompt` of each line of a JSON-lines file."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line in itertools.islice(lines, limit)]


def parse_args() -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True)
    add("--draft", required=True)
    add("--prompts", type=arguments.file_to_read, required=True, help='JSON lines with a key "prompt"')
    add("--limit", type=int, help="use the first N prompts")
    add("--temperature", type=float, default=0.0, help="0: greedy")
    add("--k", type=int, default=5, help="speculative tokens")
    add("--branches", type=int, nargs="+", default=[4, 8, 16, 24, 32])
    add("--parts", type=int, nargs="*", default=[], help="numbers of drafts that share the branches")
    add("--max-tokens", type=int, default=96)
    add("--max-model-len", type=int, default=1024)
    add("--vocab-size", type=int, default=0, help="token ids from here on are padding (0: above all that occur)")
    add("--dtype", default="float32", help="of the target")
    add("--json", type=arguments.file_to_write, required=True)
    add("--plot", type=arguments.image_to_write)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
