"""`vllm-ssd simulate`: the paper's pairs, or your own times, played round by round."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from vllm_ssd import simulator
from vllm_ssd.cli import output, text
from vllm_ssd.config import MAX_SPECULATIVE_TOKENS
from vllm_ssd.presets import PRESETS, Preset
from vllm_ssd.simulator import FALLBACKS, Figures, Scenario
from vllm_ssd.theory import StepTime

_NUDGE = 0.05  # acceptance rate up and down, for the line of sensitivity
_LONGEST_MS = 1e6
_MOST_ROWS = 4096
_SLOWER = 1.5  # draft steps take so much longer, for the same line


_HEADING = (
    ["batch", "none tokens/s", "SD tokens/s", "SSD tokens/s", "over SD", "over none", "hits", "late", "waited"]
    + ["always waiting tokens/s", "never tokens/s"]  # SSD under the fixed rules
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--preset", choices=[*PRESETS, "all"], default="all", help="which pair to start from (default: all)")
    add("--batch", type=text.read_batches, default=[1, 2, 4, 8, 16, 32], help="rows in flight, for example 1,4,16")
    add("--draft-devices", type=text.read_positive, help="devices that draft; rows are split over them")
    add(
        "--tree-devices",
        type=text.read_positive,
        help="devices over which each tree is split (draft_devices of the configuration): each builds --branches",
    )
    add("--acceptance", type=text.read_share, help="chance that a draft is accepted if those before it were")
    add("--k", type=text.read_positive, help=f"drafts a round of SSD, at most {MAX_SPECULATIVE_TOKENS}")
    add("--sd-k", type=text.read_positive, help="drafts a round of SD")
    add("--branches", type=text.read_positive, help="branches of a row's tree")
    add("--verify-ms", type=float, help="a forward of the target over one token")
    add("--draft-ms", type=float, help="a forward of the draft over one token")
    add("--overhead-ms", type=float, help="a round's time that is no forward")
    add(
        "--fallback",
        choices=FALLBACKS,
        help="what rows that missed do: wait for the draft, go on fast, as pays in the round by itself (auto: the "
        "paper's rule, and the presets'), or as pays in the long run (what saguaro does)",
    )
    add("--rounds", type=text.read_positive, default=3000)
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the figures there as well; - prints them instead of the table")


def run(args: argparse.Namespace) -> int:
    output.check("--json", args.json)
    if args.k is not None and args.k > MAX_SPECULATIVE_TOKENS:
        raise ValueError(f"--k is {args.k}; it must be at most {MAX_SPECULATIVE_TOKENS}, as in the engine.")
    names = list(PRESETS) if args.preset == "all" else [args.preset]
    results = {}
    for name in names:
        scenario = adjusted(PRESETS[name].scenario, args)
        results[name] = _play(scenario, args)
        if str(args.json) != "-":
            print(describe(PRESETS[name], scenario, results[name]), end="\n\n")
    found = json.dumps({name: _as_json(PRESETS[name], result) for name, result in results.items()}, indent=1)
    if str(args.json) == "-":
        print(found)
    elif args.json:
        args.json.write_text(found + "\n", encoding="utf-8")
        output.tell([args.json])
    return 0


@dataclasses.dataclass
class Result:
    """What the runs of one scenario gave."""

    scenario: Scenario
    figures: list[Figures]  # one a batch
    break_even: int | None  # b* as it came out
    paper_break_even: float  # b* by the paper's formula
    sensitivity: dict[str, Figures]  # at the first batch


def adjusted(scenario: Scenario, args: argparse.Namespace) -> Scenario:
    """The scenario with what the user set. Raises `ValueError` naming the option."""
    if max(args.batch) > _MOST_ROWS:
        raise ValueError(f"--batch has {max(args.batch)}; it must be at most {_MOST_ROWS} rows.")
    changes: dict[str, Any] = {
        "draft_devices": args.draft_devices,
        "tree_devices": args.tree_devices,
        "acceptance": args.acceptance,
        "num_drafts": args.k,
        "sd_num_drafts": args.sd_k,
        "branches": args.branches,
        "fallback": args.fallback,
        "overhead": _seconds("--overhead-ms", args.overhead_ms, least=0.0),
        "verify": _with_base(scenario.verify, _seconds("--verify-ms", args.verify_ms)),
        "draft": _with_base(scenario.draft, _seconds("--draft-ms", args.draft_ms)),
    }
    return dataclasses.replace(scenario, **{key: value for key, value in changes.items() if value is not None})


def _seconds(option: str, milliseconds: float | None, least: float = 1e-6) -> float | None:
    if milliseconds is None:
        return None
    if not least <= milliseconds <= _LONGEST_MS:
        raise ValueError(f"{option} is {milliseconds:g}; it must be milliseconds, above 0 and up to {_LONGEST_MS:g}.")
    return 1e-3 * milliseconds


def _with_base(step: StepTime, seconds: float | None) -> StepTime | None:
    return None if seconds is None else dataclasses.replace(step, base=seconds)


def _play(scenario: Scenario, args: argparse.Namespace) -> Result:
    figures = [simulator.simulate(scenario, batch, args.rounds, args.seed) for batch in args.batch]

    def changed(**changes: Any) -> Figures:
        return simulator.simulate(dataclasses.replace(scenario, **changes), args.batch[0], args.rounds, args.seed)

    low, high = max(scenario.acceptance - _NUDGE, 0.0), min(scenario.acceptance + _NUDGE, 1.0)
    slower = StepTime(_SLOWER * scenario.draft.base, scenario.draft.per_unit)
    sensitivity = {
        f"acceptance {low:.2f}": changed(acceptance=low),
        f"acceptance {high:.2f}": changed(acceptance=high),
        f"draft steps {_SLOWER}x as long": changed(draft=slower),
    }
    return Result(
        scenario,
        figures,
        simulator.break_even_batch(scenario, seed=args.seed),
        simulator.paper_break_even(scenario, figures[0].hit_rate),
        sensitivity,
    )


def describe(preset: Preset, scenario: Scenario, result: Result) -> str:
    """The report of one scenario."""
    changed = "" if scenario == preset.scenario else ", with your changes"
    lines = [f"{preset.about}, inputs{changed}:", *(f"  - {line}" for line in preset.inputs)]
    if changed:
        lines.append(f"  now: {_in_words(scenario)}")
    lines.append(text.table(_HEADING, [_row(figures) for figures in result.figures]))
    if not changed:
        lines.append(f"published, batch 1: {preset.over_sd}x over SD, {preset.over_none}x over no speculation")
    lines.append(
        f"sensitivity, batch {result.figures[0].batch}: "
        + "; ".join(f"{what}: {f.over_sd:.2f}x, {f.over_none:.2f}x" for what, f in result.sensitivity.items())
    )
    found = "above 256" if result.break_even is None else str(result.break_even)
    lines.append(
        f"b*: from batch {found} on, never waiting for the draft beats always waiting; "
        f"the paper's formula says {result.paper_break_even:.1f}"
    )
    return "\n".join(lines)


def _row(figures: Figures) -> list[str]:
    return [
        str(figures.batch),
        f"{figures.none:.1f}",
        f"{figures.sd:.1f}",
        f"{figures.ssd:.1f}",
        f"{figures.over_sd:.2f}x",
        f"{figures.over_none:.2f}x",
        f"{figures.hit_rate:.2f}",
        f"{figures.late_share:.0%}",
        f"{figures.waited_share:.0%}",
        f"{figures.ssd_waiting:.1f}",
        f"{figures.ssd_fast:.1f}",
    ]


def _in_words(scenario: Scenario) -> str:
    each_tree = f" on each of {scenario.tree_devices} devices" if scenario.tree_devices > 1 else ""
    rows = f", rows split over {scenario.draft_devices} devices" if scenario.draft_devices > 1 else ""
    return (
        f"verify {1e3 * scenario.verify.base:.2f} ms, draft step {1e3 * scenario.draft.base:.2f} ms, "
        f"overhead {1e3 * scenario.overhead:.2f} ms, acceptance {scenario.acceptance:g}, K {scenario.num_drafts} "
        f"(SD {scenario.sd_num_drafts}), {scenario.branches} branches{each_tree}{rows}, fallback {scenario.fallback}"
    )


def _as_json(preset: Preset, result: Result) -> dict[str, Any]:
    def plain(figures: Figures) -> dict[str, Any]:
        return {**dataclasses.asdict(figures), "over_sd": figures.over_sd, "over_none": figures.over_none}

    limit = result.paper_break_even
    return {
        "pair": preset.about,
        "inputs": preset.inputs,
        "scenario": dataclasses.asdict(result.scenario),
        "figures": [plain(figures) for figures in result.figures],
        "published": {"over_sd": preset.over_sd, "over_none": preset.over_none},
        "sensitivity": {what: plain(figures) for what, figures in result.sensitivity.items()},
        "break_even_batch": result.break_even,
        "paper_break_even_batch": limit if math.isfinite(limit) else None,
    }
