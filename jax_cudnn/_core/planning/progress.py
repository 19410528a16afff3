"""Says what takes so long when a program needs seconds of planning."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

log = logging.getLogger("jax_cudnn")

_SILENT = 2.0  # seconds of planning before, and between, two lines
_here = threading.local()


class _Program:
    """What has been planned for one program so far."""

    def __init__(self) -> None:
        self.questions, self.seconds, self.told = 0, 0.0, 0.0

    def tell(self, name: str, seconds: float) -> None:
        self.told = self.seconds + seconds
        log.warning(
            "planning for cuDNN takes time: %d graphs and parts of graphs in %.1f s so far, now "
            "for %s (equal ones are planned once, and the plan cache keeps the plans)",
            self.questions,
            self.told,
            name,
        )

    @contextlib.contextmanager
    def planning(self, name: str) -> Iterator[None]:
        """Around one question to cuDNN; tells also while it takes long."""
        began = time.perf_counter()
        left = max(0.0, self.told + _SILENT - self.seconds)
        timer = threading.Timer(left, lambda: self.tell(name, time.perf_counter() - began))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            self.questions += 1
            self.seconds += time.perf_counter() - began


@contextlib.contextmanager
def of_program(program: Hashable) -> Iterator[None]:
    """Inside, this thread plans for a program; what came before for the same one counts."""
    if getattr(_here, "name", None) != program:
        _here.name, _here.program = program, _Program()
    _here.active = True
    try:
        yield
    finally:
        _here.active = False


@dataclass
class Clock:
    """How long planning took."""

    seconds: float = 0.0


@contextlib.contextmanager
def planning(name: str) -> Iterator[Clock]:
    """Around the planning of one graph of the function ``name``, whether it succeeds or not."""
    clock, began = Clock(), time.perf_counter()
    active = getattr(_here, "active", False)
    try:
        with _here.program.planning(name) if active else contextlib.nullcontext():
            yield clock
    finally:
        clock.seconds = time.perf_counter() - began
