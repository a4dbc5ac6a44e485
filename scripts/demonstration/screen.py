"""What the demo prints with: headings, progress, and text that is wrapped as it comes."""

import shutil
import sys


def print_heading(text: str) -> None:
    print(f"\n--- {text} " + "-" * max(3, line_width() - len(text) - 5), flush=True)


def line_width() -> int:
    return max(60, min(100, shutil.get_terminal_size((88, 24)).columns))


def show_progress(text: str) -> None:
    """Show a line that the next one replaces; nothing where the output is not a terminal."""
    if sys.stdout.isatty():
        print(f"\r  {text:<20}\r", end="", flush=True)


class WrappedWriter:
    """Prints text as it comes, indented, and breaks lines between words."""

    def __init__(self, indent: str, width: int) -> None:
        self.indent, self.width = indent, width
        self.column = 0  # what stands on the line, the indent included; 0: nothing yet
        self.word = ""  # what may still grow

    def write(self, text: str) -> None:
        for character in text:
            if not character.isspace():
                self.word += character
                continue
            if character != "\n" and not self.column and not self.word.strip():
                self.word += character  # the indentation of code
                continue
            self._flush_word()
            if character == "\n":
                print(flush=True)
                self.column = 0
            else:
                self.word = " "
        sys.stdout.flush()

    def end(self) -> None:
        self._flush_word()
        print(flush=True)

    def _flush_word(self) -> None:
        if self.column and self.column + len(self.word) > self.width:
            print()
            self.column, self.word = 0, self.word.lstrip()
        if self.word.strip():
            if not self.column:
                print(self.indent, end="")
                self.column = len(self.indent)
            print(self.word, end="")
            self.column += len(self.word)
        self.word = ""
