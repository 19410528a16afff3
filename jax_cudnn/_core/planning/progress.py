"""Reports the progress of planning when it takes seconds: a bar on a terminal, else log lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

log = logging.getLogger("jax_cudnn")

_SILENT = 2.0  # seconds of planning before the first line, and between two log lines
_REDRAW = 0.5  # seconds between two drawings of the bar
_WIDTH = 20  # characters of the bar
_here = threading.local()


class Program:
    """What has been planned for one program so far, of ``total`` graphs where that is known."""

    def __init__(self, total: int | None = None) -> None:
        self.total, self.done, self.seconds, self.reported = total, 0, 0.0, 0.0
        self._drawn = False

    @contextlib.contextmanager
    def graph(self) -> Iterator[None]:
        """Around the planning of one graph of the program in this thread."""
        outer, _here.program = getattr(_here, "program", None), self
        try:
            yield
        finally:
            _here.program = outer
            self.done += 1
            if self.total is None:
                self.erase()

    @contextlib.contextmanager
    def planning(self, name: str) -> Iterator[None]:
        """Around one request to cuDNN; also reports while that takes long."""
        began, over = time.perf_counter(), threading.Event()

        def watch() -> None:
            since = self.reported + (_REDRAW if self._drawn else _SILENT) - self.seconds
            while not over.wait(max(0.0, since)):
                self._report(name, self.seconds + time.perf_counter() - began)
                since = _REDRAW if self._drawn else _SILENT

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            self.seconds += time.perf_counter() - began

    def _report(self, name: str, seconds: float) -> None:
        self.reported = seconds
        number = self.done + 1
        total = None if self.total is None else max(self.total, number)
        if not log.isEnabledFor(logging.WARNING):
            return
        count = f"graph {number}" if total is None else f"graph {number} of {total}"
        if not _on_terminal():
            log.warning(
                "planning for cuDNN: %s (%s), %.1f s so far; plans are cached",
                count,
                name,
                seconds,
            )
            return
        filled = 0 if total is None else _WIDTH * self.done // total
        bar = "#" * min(number, _WIDTH) if total is None else f"[{'#' * filled:<{_WIDTH}}]"
        line = f"planning for cuDNN {bar} {count}, {seconds:.1f} s: {name}"
        print(f"\r\x1b[K{line[:99]}", end="", file=sys.stderr, flush=True)
        self._drawn = True

    def erase(self) -> None:
        """Remove the bar from the terminal."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False


def _on_terminal() -> bool:
    """Whether to draw: where the user handles this package's log, it gets lines instead."""
    return sys.stderr.isatty() and not log.hasHandlers()


@contextlib.contextmanager
def counted(total: int) -> Iterator[Program]:
    """Inside, this thread plans ``total`` graphs, for one lowered program or by ``graph()``."""
    outer = getattr(_here, "counted", None)
    _here.counted = made = Program(total)
    try:
        yield made
    finally:
        _here.counted = outer
        made.erase()


@contextlib.contextmanager
def of_program(key: Hashable) -> Iterator[None]:
    """Inside, this thread plans one graph of a program; earlier ones of the same program count."""
    made = getattr(_here, "counted", None)
    if made is None:
        if getattr(_here, "key", None) != key:
            _here.key, _here.lowered = key, Program()
        made = _here.lowered
    with made.graph():
        yield


@dataclass
class Clock:
    """How long planning took."""

    seconds: float = 0.0


@contextlib.contextmanager
def planning(name: str) -> Iterator[Clock]:
    """Around the planning of one graph of the function ``name``, whether it succeeds or not."""
    clock, began = Clock(), time.perf_counter()
    program = getattr(_here, "program", None)
    try:
        with contextlib.nullcontext() if program is None else program.planning(name):
            yield clock
    finally:
        clock.seconds = time.perf_counter() - began
