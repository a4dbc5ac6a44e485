"""Warnings that whoever reaches a port can cause, as often as they like."""

import logging
import time

_PAUSE = 5.0  # seconds between two lines


class RareLog:
    """One line in five seconds, with the number of those that were left out."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_at = 0.0
        self._left_out = 0

    def __call__(self, text: str) -> None:
        """Warn, or count."""
        now = time.monotonic()
        if now < self._next_at:
            self._left_out += 1
            return
        others = f" ({self._left_out} more were refused meanwhile)" if self._left_out else ""
        self._logger.warning("%s%s", text, others)
        self._next_at, self._left_out = now + _PAUSE, 0
