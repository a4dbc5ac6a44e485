"""Advice for the terminal: what is known of the target, a table of the drafts, what its columns mean, what to do."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_ssd.cli import text
from vllm_ssd.sdsl.advisor import MOST_DRAFTS, Advice, Assessment, Choice
from vllm_ssd.sdsl.sizes import show_size


@dataclass(frozen=True)
class Column:
    """A heading and its cell in a row; None: not known."""

    heading: str
    cell: Callable[[Assessment], str | None]
    means: str = ""  # for the legend, with the term


def describe(advices: Sequence[Advice]) -> str:
    """One table for each batch size; columns in which nothing is known are left out."""
    lines = [_about_target(advices[0])]
    for advice in advices:
        if advice.target.verify_seconds is not None:
            lines.append(f"\nbatch {advice.setting.batch}, none: {advice.assessments[0].none:.1f} tokens/s")
        columns = [
            column for column in _columns(advice) if any(column.cell(each) is not None for each in advice.assessments)
        ]
        rows = [[column.cell(each) or "-" for column in columns] for each in advice.assessments]
        lines.append(text.table([column.heading for column in columns], rows))
        if advice is advices[0]:
            lines.append(_legend(columns))
        lines.append(advice.sentence)
    return "\n".join(lines)


def _columns(advice: Advice) -> list[Column]:
    """`tokenizer` to `step ms` need models; without times, speeds are gains over none."""
    temperature = advice.setting.temperature
    alpha = "α" if temperature is None else f"α (T={temperature:g})"
    unit = "gain" if advice.target.verify_seconds is None else "tokens/s"
    return [
        Column("draft", lambda each: each.candidate.name),
        Column("params", lambda each: show_size(each.candidate.params)),
        Column(
            "N/N_opt",
            lambda each: f"{each.ratio_to_best_size:.2g}" if advice.rule_applies else None,
            "N/N_opt: size over the best one by SDSL's rule",
        ),
        Column("tokenizer", lambda each: {True: "fits", False: "differs", None: None}[each.candidate.same_tokenizer]),
        Column("perplexity", lambda each: _shown(each.candidate.perplexity, ".1f")),
        Column("α law", lambda each: _shown(each.law_acceptance, ".2f"), "α law: acceptance of a draft by SDSL's law"),
        Column(alpha, lambda each: _shown(each.candidate.measured_acceptance, ".2f"), f"{alpha}: measured on the text"),
        Column(
            "own text",
            lambda each: _shown(each.candidate.by_position and each.candidate.by_position[0], ".2f"),
            "own text: measured on what the target itself writes, which the speeds rest on",
        ),
        Column("step ms", lambda each: _shown(_step_ms(each), ".2f"), "step ms: a draft forward of one token here"),
        Column(
            "SDSL gain",
            lambda each: None if each.sdsl is None else f"{each.sdsl:.2f}x (γ {each.sdsl_gamma})",
            "SDSL gain: over no speculation by FLOPs alone, with γ drafts a round",
        ),
        Column(f"SD {unit} (K)", lambda each: _choice(each.sd, each), "SD: plain speculative decoding"),
        Column(
            f"SSD {unit} (K, branches)",
            lambda each: _choice(each.ssd, each),
            f"SSD: saguaro; K: the best number of drafts a round up to {MOST_DRAFTS}; branches: of a request's tree",
        ),
        Column(
            "hits", lambda each: _shown(each.ssd and each.ssd.hit_rate, ".2f"), "hits: rounds whose drafts are ready"
        ),
    ]


def _legend(columns: Sequence[Column]) -> str:
    means = "; ".join(column.means for column in columns if column.means)
    return textwrap.fill(means, 118, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def _about_target(advice: Advice) -> str:
    target, best = advice.target, advice.best_size
    about = f"{target.name}: {show_size(target.params)} parameters"
    if target.perplexity is not None:
        about += f", perplexity {target.perplexity:.1f}"
    if advice.rule_applies:
        return (
            f"{about}; N_opt by SDSL's linear rule {show_size(best.value)} "
            f"({show_size(best.low)} to {show_size(best.high)})"
        )
    return (
        f"{about}\nSDSL's rule for N_opt was fitted to targets of 13B to 110B and its law of α to HellaSwag: "
        "for so small a target the rule says nothing, and the law is an extrapolation."
    )


def _step_ms(each: Assessment) -> float | None:
    step = each.candidate.step_seconds
    return None if step is None else 1e3 * step(1)


def _choice(choice: Choice | None, each: Assessment) -> str | None:
    """Speed in tokens/s, or over none where times are not known, and what gives it."""
    if choice is None:
        return None
    value = f"{choice.rate:.1f}" if each.candidate.step_seconds is not None else f"{choice.rate / each.none:.2f}x"
    return f"{value} ({choice.num_drafts}, {choice.branches})" if choice.branches else f"{value} ({choice.num_drafts})"


def _shown(value: float | None, spec: str) -> str | None:
    return None if value is None else format(value, spec)
