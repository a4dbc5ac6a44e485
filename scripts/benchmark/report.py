"""Measurements made into rows: the table, the JSON, the plot. Knows no engine."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.measurement import Measurement, median
from benchmark.plan import Engine, Workload

Row = dict[str, Any]

_COLUMNS = {  # key of a row -> (heading, format)
    "method": ("method", "s"),
    "variant": ("variant", "s"),
    "cores": ("cores", "s"),
    "batch": ("batch", "d"),
    "temperature": ("temp", "g"),
    "k": ("k", "d"),
    "tok_s": ("tok/s", ".1f"),
    "predicted_tok_s": ("predicted", ".1f"),
    "decode_tok_s": ("decode tok/s", ".1f"),
    "itl_ms_p50": ("ITL p50 ms", ".1f"),
    "itl_ms_p99": ("ITL p99 ms", ".1f"),
    "ttft_ms_p50": ("TTFT ms", ".0f"),
    "tokens_per_round": ("tok/round", ".2f"),
    "acceptance_length": ("accept len", ".2f"),
    "hit_rate": ("hits", ".2f"),
    "round_ms_p50": ("round ms", ".1f"),
    "wait_ms_per_round": ("wait ms", ".1f"),
    "draft_ms_per_round": ("draft ms", ".1f"),
    "equal": ("equal", "s"),
}


@dataclasses.dataclass
class Result:
    """All runs of one workload on one engine."""

    engine: Engine
    workload: Workload
    measurements: list[Measurement] = dataclasses.field(default_factory=list)  # one a repeat
    outputs: list[list[list[int]]] = dataclasses.field(default_factory=list)  # repeat -> request -> token ids


Predict = Callable[[Result, Sequence[Result]], float | None]


def rows(results: Sequence[Result], predict: Predict = lambda _result, _results: None) -> list[Row]:
    """One row a result, medians over its repeats. Keys that do not apply are None.

    `predict` gives what theory expects of a result.
    """
    return [
        {
            **dataclasses.asdict(result.engine),
            **dataclasses.asdict(result.workload),
            **dataclasses.asdict(median(result.measurements)),
            "predicted_tok_s": predict(result, results),
            "tok_s_runs": [each.tok_s for each in result.measurements],
            "requests": len(result.outputs[0]),
            "equal_outputs": equal_outputs(result, _reference(result, results)),
        }
        for result in results
        if result.measurements
    ]


def equal_outputs(result: Result, reference: Result | None) -> int | None:
    """How many requests got the reference's tokens in every repeat; None where chance decides."""
    if reference is None or result.workload.temperature > 0:
        return None
    expected = reference.outputs[0]
    return sum(all(run[index] == tokens for run in result.outputs) for index, tokens in enumerate(expected))


def table(found: Sequence[Row]) -> str:
    """The rows as text; columns that no row fills are left out."""
    cells = [[heading for heading, _ in _COLUMNS.values()]]
    for row in found:
        equal = None if row["equal_outputs"] is None else f"{row['equal_outputs']}/{row['requests']}"
        shown = {**row, "variant": row["variant"] or None, "equal": equal}
        cells.append(["-" if shown[key] is None else format(shown[key], spec) for key, (_, spec) in _COLUMNS.items()])
    columns = [column for column in zip(*cells, strict=True) if set(column[1:]) != {"-"}]
    padded = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    return "\n".join("  ".join(line) for line in zip(*padded, strict=True))


def save(found: Sequence[Row], setup: dict[str, Any], path: Path) -> None:
    """Write the list of rows, and what they share beside it in `*.setup.json`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".setup.json").write_text(json.dumps(setup, indent=1) + "\n")


def plot(found: Sequence[Row], title: str, path: Path) -> None:
    """Bars of tokens/s by method for each batch size, one panel a temperature, each at its best K."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    temperatures = sorted({row["temperature"] for row in found})
    figure, panels = pyplot.subplots(
        1, len(temperatures), squeeze=False, figsize=(6 * len(temperatures), 4), layout="constrained"
    )
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        _draw_panel(panel, [row for row in found if row["temperature"] == temperature])
        panel.set_title(f"temperature {temperature:g}")
    figure.suptitle(title, fontsize="small")
    figure.savefig(path, dpi=150)


def _draw_panel(panel: Any, found: Sequence[Row]) -> None:
    batches = sorted({row["batch"] for row in found})
    series = list(dict.fromkeys((row["method"], row["variant"], row["cores"]) for row in found))
    width = 0.8 / len(series)
    for number, (method, variant, cores) in enumerate(series):
        best: dict[int, Row] = {}
        for row in found:
            if (row["method"], row["variant"], row["cores"]) == (method, variant, cores):
                best[row["batch"]] = max(best.get(row["batch"], row), row, key=lambda each: each["tok_s"])
        places = [batches.index(batch) + (number - (len(series) - 1) / 2) * width for batch in best]
        bars = panel.bar(
            places, [row["tok_s"] for row in best.values()], width, label=f"{method} {variant}, cores: {cores}"
        )
        labels = [f"{row['tok_s']:.0f}" + (f"\nK={row['k']}" if row["k"] else "") for row in best.values()]
        panel.bar_label(bars, labels, fontsize="x-small")
    panel.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    panel.set_ylabel("tokens/s")
    panel.margins(y=0.15)
    panel.legend(fontsize="x-small")


def _reference(result: Result, results: Sequence[Result]) -> Result | None:
    """No speculation on the same workload, on the same cores if it was run there."""
    plain = [
        other
        for other in results
        if other.engine.method == "none" and other.workload == result.workload and other.measurements
    ]
    same = [other for other in plain if other.engine.cores == result.engine.cores]
    return next(iter(same or plain), None)
