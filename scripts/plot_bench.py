#!/usr/bin/env python3
"""Plot what scripts/bench.py wrote: figures over batch sizes, or over the names of variants that are numbers.

    python scripts/plot_bench.py bench.json --over batch --show tok_s --out batch.png
    python scripts/plot_bench.py c.json --over variant --show tok_s hit_rate acceptance_length --out c.png

One panel for each figure. Over `batch` there is a line for each method and variant; over `variant`, which
may be a value of `saguaro_c`, say, variants whose names are no numbers become horizontal lines.
"""

import argparse
import json
import sys
from typing import Any

from benchmark import arguments

Row = dict[str, Any]


def main() -> int:
    summary, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=arguments.file_to_read, help="what bench.py wrote")
    parser.add_argument("--over", choices=("batch", "variant"), required=True)
    parser.add_argument("--show", nargs="+", default=["tok_s"], help="keys of the rows")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=arguments.image_to_write, required=True)
    args = parser.parse_args()
    rows: list[Row] = json.loads(args.json.read_text())
    for key in args.show:
        if not any(isinstance(row.get(key), (int, float)) for row in rows):
            parser.error(f"--show {key}: no row of {args.json} has such a figure; there are {', '.join(rows[0])}")

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(args.show), squeeze=False, figsize=(4.5 * len(args.show), 3.5), layout="constrained"
    )
    for panel, key in zip(panels[0], args.show, strict=True):
        draw = over_batch if args.over == "batch" else over_variant
        draw(panel, [row for row in rows if row.get(key) is not None], key)
        panel.set_title(key, fontsize="small")
        panel.legend(fontsize="x-small")
    figure.suptitle(args.title, fontsize="small")
    figure.savefig(args.out, dpi=150)
    return 0


def over_batch(panel: Any, rows: list[Row], key: str) -> None:
    """A line for each method and variant."""
    for name in dict.fromkeys(map(name_of, rows)):
        points = sorted((row["batch"], row[key]) for row in rows if name_of(row) == name)
        panel.plot(*zip(*points, strict=True), "o-", label=name)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("batch")


def over_variant(panel: Any, rows: list[Row], key: str) -> None:
    """Variants that are numbers as a line, others as horizontal lines."""
    numbers = sorted((float(row["variant"]), row[key]) for row in rows if is_number(row["variant"]))
    panel.plot(*zip(*numbers, strict=True), "o-", label="fixed")
    for count, row in enumerate(row for row in rows if not is_number(row["variant"])):
        panel.axhline(row[key], linestyle="--", color=f"C{count + 1}", label=name_of(row))
    panel.set_xlabel("variant")


def name_of(row: Row) -> str:
    return row["variant"] or row["method"]


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
