"""Reports planning that takes seconds (a bar on a terminal, else log lines), and warns where a
function is planned for more and more shapes, as for sequences of every length."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator

from ..graph.dims import Shape
from ..graph.spec import GraphSpec

log = logging.getLogger("jax_cudnn")

_SILENT = 2.0  # seconds of planning before the first line, and between two log lines
_REDRAW = 0.5  # seconds between two drawings of the bar
_WIDTH = 20  # characters of the bar
_MANY = 64  # shapes of one function; the convolutions of a large model have half as many


class Program:
    """What has been planned for one program so far, of ``total`` graphs where that is known."""

    def __init__(self, total: int | None = None) -> None:
        self.total, self.done, self.seconds, self._reported = total, 0, 0.0, 0.0
        self._drawn = False
        self.before, self.after = 0.0, 0.0  # seconds of its measured graphs without and with that

    def watch(self, name: str, began: float, over: threading.Event) -> None:
        """Reports until it is over."""
        wait = self._reported + (_REDRAW if self._drawn else _SILENT) - self.seconds
        while not over.wait(max(0.0, wait)):
            self._reported = self.seconds + time.perf_counter() - began
            if log.isEnabledFor(logging.WARNING):
                self._report(name)
            wait = _REDRAW if self._drawn else _SILENT

    def _report(self, name: str) -> None:
        number, seconds = self.done + 1, self._reported
        count, bar = f"graph {number}", "#" * min(number, _WIDTH)
        if self.total is not None:
            total = max(self.total, number)
            count += f" of {total}"
            bar = f"[{'#' * (_WIDTH * self.done // total):<{_WIDTH}}]"
        if self.before:
            count += f", measured so far: {self.after / self.before:.2f} of the time"
        if _on_terminal():
            line = f"planning for cuDNN {bar} {count}, {seconds:.1f} s: {name}"
            print(f"\r\x1b[K{line[:99]}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            said = "planning for cuDNN: %s (%s), %.1f s so far; plans are cached"
            log.warning(said, count, name, seconds)

    def erase(self) -> None:
        """Remove the bar from the terminal."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False


class _Here(threading.local):
    program: Program | None = None  # of which this thread plans graphs
    lowered: tuple[Hashable, Program] | None = None  # a program by its key
    watched: bool = False


_here = _Here()


def _on_terminal() -> bool:
    """Whether to draw: where the user handles this package's log, it gets lines instead."""
    return sys.stderr.isatty() and not log.hasHandlers()


@contextlib.contextmanager
def counted(total: int) -> Iterator[Program]:
    """Inside, this thread plans ``total`` graphs, those of one lowered program or as many as are
    ``done``."""
    outer, _here.program = _here.program, (made := Program(total))
    try:
        yield made
    finally:
        _here.program = outer
        made.erase()


@contextlib.contextmanager
def of_program(key: object) -> Iterator[bool]:
    """Inside, this thread plans one graph of a program; earlier ones of the same program count.
    Gives whether it is the first."""
    first = _here.lowered is None or _here.lowered[0] is not key
    if _here.lowered is None or first:
        _here.lowered = key, Program()
    outer = _here.program
    program = _here.program = outer or _here.lowered[1]
    try:
        yield first
    finally:
        _here.program = outer
        program.done += 1
        if program.total is None:
            program.erase()


@contextlib.contextmanager
def at_once(total: int, count: int) -> Iterator[Callable[[object], None]]:
    """Around the planning of ``total`` graphs of a program, ``count`` of them at once. Gives what
    is to be called for each that is done."""
    with counted(total) as program, planning(f"{count} at once"):

        def done(_: object) -> None:
            program.done += 1

        yield done


@contextlib.contextmanager
def planning(name: str) -> Iterator[None]:
    """Around one request to cuDNN for the function ``name``, whether it succeeds or not."""
    program = _here.program
    if program is None or _here.watched:  # a measurement plans, too
        yield
        return
    began, over = time.perf_counter(), threading.Event()
    watcher = threading.Thread(target=program.watch, args=(name, began, over), daemon=True)
    watcher.start()
    _here.watched = True
    try:
        yield
    finally:
        _here.watched = False
        over.set()
        watcher.join()
        program.seconds += time.perf_counter() - began


def measured(before: float, after: float) -> None:
    """A graph of this thread's program was measured: its seconds without and with that."""
    if (program := _here.program) is not None:
        program.before += before
        program.after += after


# The shapes of a function, by its name and its operations: nodes hold shapes, too.
_shapes: dict[tuple[str, ...], set[tuple[Shape, ...]]] = {}
_lock = threading.Lock()


def count_shapes(spec: GraphSpec, name: str) -> None:
    """Counts the shapes of a function's operands; warns at 64 and at each doubling."""
    shapes = tuple(tensor.shape for tensor in spec.input_tensors)
    with _lock:
        known = _shapes.setdefault((name, *(call.node.method for call in spec.calls)), set())
        new = shapes not in known
        known.add(shapes)
        found = len(known)
    if new and found >= _MANY and found & (found - 1) == 0:
        log.warning(
            "%s was planned for %d different shapes, most recently %s: each shape needs its own "
            "plan and compilation; use fewer shapes, for example by padding sequences with "
            "jax_cudnn.ops.pad_to_bucket",
            name,
            found,
            ", ".join(map(str, spec.input_tensors)),
        )
