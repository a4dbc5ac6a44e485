"""The results of the engines side by side."""

from typing import Any

from demonstration.screen import print_heading

MOST_SHARED = 0.03  # of the time; with more of it lost to other work, speeds say nothing


def print_comparison(results: dict[str, dict[str, Any]], names: dict[str, str], one_core: bool) -> None:
    """`results`: engine → its answers, counts and share of lost time; `names`: engine → what to call it."""
    first, rows = next(iter(results)), []
    base = speed(results[first])
    shares = {names[engine]: result["shared"] for engine, result in results.items()}
    comparable = not one_core and max(shares.values()) <= MOST_SHARED
    for engine, result in results.items():
        counts = result["counts"]
        lookups = counts.get("lookups")
        ratio = f"  ({speed(result) / base:.2f}x)" if comparable and engine != first else ""
        rows.append(
            (
                names[engine],
                f"{speed(result):.1f}{ratio}",
                f"{1 + counts['accepted_tokens'] / lookups:.2f}" if lookups else "1",
                hit_rate(counts),
                "-" if engine == first else same_text(results[first], result),
            )
        )
    print_heading("side by side")
    labels = ("", "tokens/s", "mean acceptance length", "hit rate", f"same text as {names[first]}")
    widths = [max(map(len, column)) for column in (labels, *rows)]
    print()
    for line in zip(labels, *rows, strict=True):
        print("  " + "   ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    if len(results) > 1:
        print("\n  In float32 the texts must be the same: the target verifies every token.")
    print("  Acceptance length: tokens that one forward of the target yields.")
    if "saguaro" in results:
        print("  Hit rate: rounds whose drafts were there when the target had verified the last ones.")
        if restarts := results["saguaro"]["counts"]["draft_restarts"]:
            print(f"  The draft process had to be restarted {restarts:g} times.")
    if one_core:
        print("\n  The speeds are not comparable: target and draft had to share one core.")
    elif not comparable:
        lost = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        print(f"\n  The speeds are not comparable: other work held the target's core ({lost} of the time).")
        print("  Run the demo again on an idle machine.")


def speed(result: dict[str, Any]) -> float:
    """Tokens per second over all answers, their prompts included."""
    return sum(len(a["tokens"]) for a in result["answers"]) / sum(a["seconds"] for a in result["answers"])


def hit_rate(counts: dict[str, float]) -> str:
    if "hits" not in counts or not counts["lookups"]:
        return "-"
    part = counts["part_hits"] / counts["lookups"]
    return f"{counts['hits'] / counts['lookups']:.0%}" + (f" (+ {part:.0%} in part)" if part >= 0.005 else "")


def same_text(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Say whether the answers are equal, token by token; if not, where they part."""
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(one["answers"], other["answers"], strict=True)]
    different = [number for number, (a, b) in enumerate(pairs) if a != b]
    if not different:
        return f"yes, all {len(pairs)}" if len(pairs) > 1 else "yes"
    a, b = pairs[different[0]]
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"NO: {len(different)} of {len(pairs)} differ; answer {different[0] + 1} from token {place + 1}"
