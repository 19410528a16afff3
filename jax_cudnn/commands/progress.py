"""Progress of a command on stderr."""

from __future__ import annotations

import sys
import time

_SECONDS = 2.0


class Progress:
    """Shows what a command does: on a terminal in one line that it rewrites, else in at most one
    line every two seconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._shown = -_SECONDS
        self._terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        seconds = time.perf_counter() - self._began
        if self._terminal:
            print(f"\r\x1b[K{text}, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        elif seconds - self._shown >= _SECONDS:
            self._shown = seconds
            print(f"{text}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Clears the line on a terminal."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
