"""The command `vllm-ssd`.

Each command lives in a module of its own, which is imported only when its turn comes: `--help`
needs neither torch nor vLLM.
"""

import importlib
import sys
from collections.abc import Sequence

from vllm_ssd import __version__
from vllm_ssd.cli.parser import Parser, parse

_COMMANDS = {
    "advise": "which draft for a target, how many drafts a round, and what it would bring",
    "doctor": "whether this installation, its devices and a pair of models can work",
    "keygen": "keys for a draft that is reached over a network",
    "serve-draft": "one draft for several targets",
    "simulate": "SSD, SD and no speculation on devices that are not at hand",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status. Faults of the user's input end in one sentence, status 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog="vllm-ssd", description="Speculative speculative decoding for vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-ssd {__version__}")
    adder = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    chosen = next((word for word in given if not word.startswith("-")), None)
    for name, about in _COMMANDS.items():
        commands[name] = adder.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
        if name == chosen:
            try:
                module = importlib.import_module(f"vllm_ssd.cli.{name.replace('-', '_')}")
            except ModuleNotFoundError as error:
                commands[name].error(f"{error.name} is not installed: pip install 'vllm-ssd[advise]'")
            module.add_arguments(commands[name])
            commands[name].set_defaults(run=module.run)
    args = parse(parser, commands, given)
    try:
        return args.run(args)
    except (ValueError, OSError, ImportError) as error:
        print(f"vllm-ssd {args.command}: {error}", file=sys.stderr)
        return 2
