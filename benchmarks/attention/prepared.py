"""All sides of one attention on the same arrays: in their forms, compiled, and run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core.implementation import CUDNN, XLA

from .. import sides, torch_graphs
from ..compiling import compiled, told
from ..halves import Halves, halves
from ..sides import BACKWARD, OURS, REFERENCE, TRAINING, WHOLE, Call, Fillers
from . import torch_sides
from .case import AttentionCase, Named, Side
from .figures import Running

_AGAIN = 1.0  # seconds: of a call that takes less there is a second one, which may be quicker
_NO_BACKWARD = "it has no backward"

Given = Mapping[str, tuple[Any, tuple[Any, ...]]]
"""By side a function and its operands."""


class Prepared:
    """The sides of one case."""

    def __init__(self, case: AttentionCase, fillers: Fillers) -> None:
        self.case, self.fillers = case, fillers
        self.operands = jax.block_until_ready(case.arrays(jax.random.key(0)))
        ways = {WHOLE: CUDNN, OURS: None, REFERENCE: XLA}
        every = {side: case.ours(way) for side, way in ways.items()} | {**case.others, **case.xla}
        self.sides = {side: way for side, way in every.items() if isinstance(way, Side)}
        self.without = {side: way for side, way in every.items() if isinstance(way, str)}
        self.given: dict[str, Named] = {}
        self.dy: dict[str, Any] = {}
        self.halves: dict[str, Halves] = {}
        self.saved: dict[str, list[Any]] = {}
        self.copied: dict[int, list[jax.Array]] = {}  # of an array by its id, itself the first
        self.ways: dict[str, Side] = dict(self.sides)  # and of PyTorch those that run
        self.never = {side: way for side, way in case.torch.items() if isinstance(way, str)}
        self.plain = {REFERENCE, *case.xla}  # which may need much memory, and are not short

    def prepare(self) -> None:
        """Brings the operands into the form of each side in JAX."""
        for side, way in self.sides.items():
            try:
                self._prepare(side, way)
            except Exception as error:
                self.without[side] = told(error)

    def _prepare(self, side: str, way: Side) -> None:
        given = jax.block_until_ready(way.given(self.operands))
        self.dy[side] = given.get("dy")
        self.given[side] = {name: x for name, x in given.items() if name != "dy"}
        if self.case.learned and way.backward:
            self.halves[side] = halves(way.function, self.given[side], self.case.learned)

    def ready(self, program: str, repeats: int) -> tuple[Given, dict[str, Running], dict[str, str]]:
        """The functions of a program in JAX, all sides that are compiled, and why others are
        not."""
        given, not_run = self._given(program)
        ready, failed = self._compiled(given, repeats)
        theirs, reasons = self._torch(program, repeats)
        return given, ready | theirs, not_run | failed | reasons

    def results(self, program: str, side: str, running: Running) -> tuple[Named, float]:
        """The results by name, and the seconds of a call; what the backward needs is put aside."""
        found, took = None, math.inf
        for _ in range(2):
            found = None  # so that the next one has its memory
            began = time.perf_counter()
            found = jax.block_until_ready(running.call())
            took = min(took, time.perf_counter() - began)
            if took > _AGAIN:
                break
        found = running.first(found)
        if side in self.halves and program == TRAINING:
            self.saved[side] = self.halves[side].saved(self.given[side], found)
            found = found[0]
        if program != BACKWARD:
            found = {"y": found["y"]}
        return found, took

    def _given(self, program: str) -> tuple[Given, dict[str, str]]:
        """The functions of a program in JAX, by side, with their operands; and why some are not."""
        if program != BACKWARD:
            found = {
                side: (
                    self.halves[side].training
                    if side in self.halves
                    else sides.by_name(self.sides[side].function),
                    (operands,),
                )
                for side, operands in self.given.items()
                if side not in self.without
            }
            return found, dict(self.without)
        found = {}
        for side, half in self.halves.items():
            if side in self.saved:
                found[side] = (half.backward, (self.saved[side], self.dy[side]))
        missing = {
            side: "its forward did not run" if way.backward else _NO_BACKWARD
            for side, way in self.sides.items()
            if side not in found
        }
        return found, missing | self.without

    def _compiled(self, given: Given, repeats: int) -> tuple[dict[str, Running], dict[str, str]]:
        """JAX's sides; those that are not plain XLA do their work ``repeats`` times."""
        often = {side: 1 if side in self.plain else repeats for side in given}
        several = {
            side: (sides.each(function), self.copies(operands, often[side]))
            for side, (function, operands) in given.items()
        }
        ready, failed = compiled(several)
        running = {
            side: Running(call, lambda found: found[0], self.fillers.jax, often[side])
            for side, call in ready.items()
        }
        return running, failed

    def copies(self, operands: tuple[Any, ...], often: int) -> tuple[Any, ...]:
        """The operands as often as a program does its work, in arrays of their own: of the same
        ones XLA would compute the same once. All sides share them."""

        def one(x: jax.Array, position: int) -> jax.Array:
            known = self.copied.setdefault(id(x), [x])
            while len(known) <= position:
                known.append(jax.block_until_ready(_copy(x)))
            return known[position]

        return tuple(
            jax.tree.map(partial(one, position=position), operands) for position in range(often)
        )

    def _torch(self, program: str, repeats: int) -> tuple[dict[str, Running], dict[str, str]]:
        """PyTorch's sides, each in the way that was chosen for all programs."""
        if not torch_graphs.installed():
            return {}, dict.fromkeys(self.case.torch, torch_graphs.MISSING)
        running, failed = {}, {}
        for side, ways in self.case.torch.items():
            if isinstance(ways, str):
                continue
            try:
                way = self._way(side, ways)
                if program == BACKWARD and not way.backward:
                    failed[side] = _NO_BACKWARD
                    continue
                call = self._torch_call(program, way, repeats)
            except Exception as error:
                failed[side] = told(error)
                continue
            take = torch_graphs.Pending.arrays
            running[side] = Running(call, take, self.fillers.torch, repeats)
        return running, failed | self.never

    def _way(self, side: str, ways: Sequence[Side]) -> Side:
        """The first that runs a backward, or else a forward; what the first of all raises, where
        none does."""
        if side in self.ways:
            return self.ways[side]
        errors: list[Exception] = []
        for program in reversed(self.case.programs):
            for way in ways:
                if program == BACKWARD and not way.backward:
                    continue
                try:
                    jax.block_until_ready(self._torch_call(program, way, 1)())
                except Exception as error:
                    errors.append(error)
                    continue
                self.ways[side] = way
                return way
        raise errors[0]

    def _torch_call(self, program: str, way: Side, repeats: int) -> Call:
        given = dict(jax.block_until_ready(way.given(self.operands)))
        dy = given.pop("dy", None)
        sets = self.copies((given, dy), repeats)
        learned = self.case.learned
        return torch_sides.program(way.function, program, learned, sets, way.captured)


_copy = jax.jit(jnp.copy)
