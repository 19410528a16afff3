"""How far apart two right results of a graph may be, found by disturbing its reference.

Two computations of one graph round alike, but add in other orders, and cut float32 products to
TF32. Where the graph then compares, rounds to integers or takes a maximum, a difference in the
last place becomes one of order 1, for some elements. How many, and what follows, no fixed tolerance
says. So the reference is run again and again with every inexact value moved, at random, by more
than another computation would differ there: what these runs differ by is the tolerance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from .._core.dtypes import FP8, is_floating
from .._core.reference import evaluate
from .._core.spec import Call, GraphSpec
from .._core.split import part

_RUNS, _MORE_RUNS = 6, 42
# Relative moves: of results that functions like exp give on a GPU, of the terms of a sum, and of
# the operands of products that may be cut to TF32 or keep few bits between the steps.
_RESULT, _TERM, _CUT = 2.0**-16, 2.0**-18, 2.0**-10

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Comparison:
    """A result beside the reference's, in units of the tolerance.

    An element's tolerance is twice its largest move in the disturbed runs, more by the root mean
    square of all elements' moves and by one unit in the last place of its dtype.

    Attributes:
        ratio: the largest error in units of the tolerance, without the outliers that are allowed.
        outliers: elements beyond it.
        allowed: how many may be: twice as many as a disturbed run has beside the others.
        blunt: the share of elements whose tolerance is as large as the values themselves.
    """

    ratio: float
    outliers: int
    allowed: int
    blunt: float

    @property
    def right(self) -> bool:
        return self.outliers <= self.allowed


class Reference:
    """The outputs of a graph for operands, computed on the CPU, one operation at a time."""

    def __init__(self, spec: GraphSpec, operands: Sequence[jax.Array]):
        self._spec = spec
        self._operands = [np.asarray(operand) for operand in operands]
        self.outputs = self._run(None)
        self._disturbed: list[Arrays] = []

    def compare(self, got: Sequence[jax.Array]) -> list[Comparison]:
        """Each output beside the reference's. Where it is not right, more runs have their say."""
        found: list[Comparison] = []
        for runs in (_RUNS, _MORE_RUNS):
            self._disturb(runs)
            found = [
                _compare(np.asarray(array), want, [run[i] for run in self._disturbed])
                for i, (array, want) in enumerate(zip(got, self.outputs, strict=True))
            ]
            if all(comparison.right for comparison in found):
                break
        return found

    def _disturb(self, runs: int) -> None:
        for seed in range(len(self._disturbed), runs):
            self._disturbed.append(self._run(np.random.default_rng(seed)))

    def _run(self, noise: np.random.Generator | None) -> Arrays:
        spec = self._spec
        values = dict(zip(spec.inputs, self._operands, strict=True))
        for position, call in enumerate(spec.calls):
            program = _program(part(spec, (position,)).canonical())
            names = [name for name in dict.fromkeys(n for _, n in call.inputs) if name in values]
            names.sort(key=[t.name for t in spec.tensors].index)
            inputs = [values[name] for name in names]
            if noise is not None:
                inputs = _moved_terms(call, inputs, noise)
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                results = [np.asarray(x) for x in program(*inputs)]
            if noise is not None:
                results = [_moved_result(call, r, inputs, noise) for r in results]
            values.update(zip((name for _, name in call.outputs), results, strict=True))
        return [values[name] for name in spec.outputs]
