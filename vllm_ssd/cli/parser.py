"""argparse whose refusals are one sentence, and which knows what was meant.

Knows no command. What argparse does not say well by itself: a size below 0, which looks like an option, and
an option that is spelt wrong.
"""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import NoReturn

_NEGATIVE = re.compile(r"-\.?\d")
_PLAIN_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # which argparse takes for a value by itself


class Parser(argparse.ArgumentParser):
    """Commands made with `add_subparsers` are of this class too."""

    def error(self, message: str) -> NoReturn:
        """One line on stderr, status 2."""
        message = re.sub(r"^argument ", "", message)
        if message.startswith("the following arguments are required"):
            message += f" (see {self.prog} --help)"
        self.exit(2, f"{self.prog}: {message}\n")

    def options(self) -> list[str]:
        """Its long options."""
        return re.findall(r"--[a-z][a-z-]*", self.format_usage())


def parse(parser: Parser, commands: dict[str, Parser], words: Sequence[str]) -> argparse.Namespace:
    """Parse `words`; ends with status 2 and one sentence if they are wrong. `commands`: its parsers by name."""
    command = next((commands[word] for word in words if word in commands), parser)
    _refuse_negative_sizes(command, words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        command.error(_about_unknown(unknown[0], command.options()))
    return args


def _refuse_negative_sizes(command: Parser, words: Sequence[str]) -> None:
    option = None
    for word in words:
        if word.startswith("--"):
            option = word
        elif option and _NEGATIVE.match(word) and not _PLAIN_NEGATIVE.fullmatch(word):
            command.error(f"{option} is {word!r}; it must be above 0")


def _about_unknown(word: str, options: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"{word!r} is one argument too many"
    near = difflib.get_close_matches(word.split("=")[0], options, n=1)
    return f"there is no option {word}" + (f"; did you mean {near[0]}?" if near else "; --help lists them")
