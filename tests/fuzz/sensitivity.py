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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_cudnn._core.graph.dtypes import FP8, is_floating
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning.split import part

from .interpreter import interpreted
from .samples import attends

_RUNS, _MORE_RUNS = 6, 48
_EDGES = 500
# Relative moves: of results that functions like exp give on a GPU, of the terms of a sum, and of
# the operands of products that may be cut to TF32 or keep few bits between the steps.
RESULT, TERM, CUT = 2.0**-16, 2.0**-18, 2.0**-10
# Operands of attention's products, which round what they are multiplied by to their 16 bits.
_BESIDE_WEIGHTS = ("q", "k", "v", "dO")

Arrays = list[np.ndarray]
Noise = np.random.Generator | None
"""Where moves come from; None for none."""


@dataclass(frozen=True)
class Comparison:
    """A result beside the reference's, in units of the tolerance.

    An element's tolerance is twice its largest move in the disturbed runs, more by the root mean
    square of all elements' moves and by one unit in the last place of its dtype (float32: four).

    Attributes:
        ratio: the largest error in units of the tolerance, without the outliers that are allowed.
        outliers: elements beyond it.
        allowed: how many may be, unless they are larger than all that the reference has: twice as
            many as a disturbed run has beside the others, and one of 500, as no number of runs
            finds every element that lies on an edge.
        blunt: the share of elements whose tolerance is as large as the values themselves.
        measured: whether the tolerance was; not where the error is one of last places, see
            :func:`compare`.
    """

    ratio: float
    outliers: int
    allowed: int
    blunt: float
    measured: bool = True

    @property
    def right(self) -> bool:
        return self.outliers <= self.allowed

    @property
    def far_off(self) -> bool:
        """Whether more runs would not make it right."""
        return self.outliers > 10 * (self.allowed + 1) and self.ratio > 4


class Reference:
    """The outputs of a graph for operands, computed on the CPU, one operation at a time."""

    def __init__(self, spec: GraphSpec, operands: Sequence[Any]):
        self._spec = spec
        self._operands = [np.asarray(operand) for operand in operands]
        self._exact: dict[str, np.ndarray] = {}

    @property
    def outputs(self) -> Arrays:
        return self._outputs(None)

    def compare(self, got: Sequence[np.ndarray]) -> list[Comparison]:
        """Each output beside the reference's."""
        return compare(got, self.outputs, self._outputs)

    def values(self, noise: Noise = None, narrow: str = "") -> dict[str, np.ndarray]:
        """All tensors of the graph by name, moved at random if there is noise; then, with a dtype
        ``narrow``, float32 results as well as if they were rounded to that."""
        if noise is not None:
            return self._run(noise, narrow)
        self._exact = self._exact or self._run(None, "")
        return self._exact

    def _outputs(self, noise: Noise) -> Arrays:
        values = self.values(noise)
        return [values[name] for name in self._spec.outputs]

    def _run(self, noise: Noise, narrow: str) -> dict[str, np.ndarray]:
        on_grid = noise is not None and bool(narrow) and noise.random() < 0.5
        values = dict(zip(self._spec.inputs, self._operands, strict=True))
        for position in range(len(self._spec.calls)):
            one = part(self._spec, (position,))
            inputs = {name: values[name] for name in one.inputs}
            if noise is not None:
                inputs = _with_moved_terms(one, inputs, noise)
            results = _program(one.canonical())(*inputs.values())
            if noise is not None:
                results = [_moved_result(one, x, inputs, noise) for x in results]
                results = [_narrowed(x, narrow, on_grid, noise) for x in results]
            values.update(zip(one.outputs, results, strict=True))
        return values


@functools.lru_cache(maxsize=256)
def _program(one: GraphSpec) -> Callable[..., Arrays]:
    return interpreted(functools.partial(evaluate, one))


def compare(
    got: Sequence[np.ndarray],
    want: Arrays,
    disturbed: Callable[[Noise], Arrays],
    step: float = 0.0,
) -> list[Comparison]:
    """Arrays beside those that are wanted; ``disturbed`` gives these as a run with noise does.

    Where one is not right, more runs have their say, unless one is far off. Nothing is measured
    where no float differs by more than ``step`` of itself and of the array's root mean square.
    """
    quick = [_within(np.asarray(a), b, step) for a, b in zip(got, want, strict=True)]
    found = [c for c in quick if c is not None]
    if len(found) == len(quick):
        return found
    runs: list[Arrays] = []
    for count in (_RUNS, _MORE_RUNS):
        runs += [disturbed(np.random.default_rng(seed)) for seed in range(len(runs), count)]
        found = [
            known or _compare(np.asarray(got[i]), want[i], [run[i] for run in runs])
            for i, known in enumerate(quick)
        ]
        if all(c.right for c in found) or any(c.far_off for c in found):
            break
    return found


# -- moves -----------------------------------------------------------------------------------------


def _with_moved_terms(
    one: GraphSpec, inputs: dict[str, np.ndarray], noise: np.random.Generator
) -> dict[str, np.ndarray]:
    """The operands of an operation, moved where it adds up products or other terms of them: each
    element by itself, and all together, as bits that are cut off make all of them smaller."""
    node = one.calls[0].node
    if node.moves or _each_element(one, inputs):
        return inputs
    amount = CUT if node.product and products_are_cut(one) else TERM
    terms = {name: moved(x, amount, noise, together=True) for name, x in inputs.items()}
    if attends(node):
        rounding = max(_rounding(one.tensor(name).dtype) for name in _multiplied(one))
        terms |= {name: moved(terms[name], rounding, noise) for name in _multiplied(one)}
    return terms


def _multiplied(one: GraphSpec) -> set[str]:
    """The operands of an operation that are those of products, if it has products."""
    call = one.calls[0]
    every = not attends(call.node)
    return {name for port, name in call.inputs if every or port in _BESIDE_WEIGHTS}


def _rounding(dtype: str) -> float:
    """Half a unit of a float of 16 bits; nothing of float32."""
    return 0.0 if dtype == "float32" else float(jnp.finfo(dtype).eps) / 2


def products_are_cut(one: GraphSpec) -> bool:
    """Whether a GPU may cut an operand of a product to fewer bits, or keep fewer of its sums."""
    coarse = FP8 if one.options.precision in ("high", "highest") else ("float32", *FP8)
    return any(one.tensor(name).dtype in coarse for name in _multiplied(one))


def _moved_result(
    one: GraphSpec, result: np.ndarray, inputs: dict[str, np.ndarray], noise: np.random.Generator
) -> np.ndarray:
    """A result, moved where another computation may round it otherwise: whole numbers are taken
    as exact, and so are results that are one of the operands, or its negative."""
    if one.calls[0].node.moves or not is_floating(str(result.dtype)):
        return result
    values = np.abs(result.astype(np.float32))
    exact = values == np.round(values)
    if _each_element(one, inputs):
        for x in inputs.values():
            exact |= values == np.abs(np.asarray(x, np.float32))
    info = jnp.finfo(result.dtype)
    amount, least = max(RESULT, float(info.eps)), float(info.smallest_subnormal)
    return np.where(exact, result, moved(result, amount, noise, least=least))


def _narrowed(x: np.ndarray, dtype: str, on_grid: bool, noise: np.random.Generator) -> np.ndarray:
    """A float32 result rounded to a narrower float, or moved as far as that could."""
    if not dtype or x.dtype != np.float32:
        return x
    rounded = x.astype(jnp.dtype(dtype)).astype(np.float32)
    info = jnp.finfo(dtype)
    least = float(info.smallest_subnormal)
    near = rounded if on_grid else moved(x, float(info.eps), noise, least=least)
    return np.where((rounded == x) | ~np.isfinite(rounded), x, near)


def _each_element(one: GraphSpec, inputs: dict[str, np.ndarray]) -> bool:
    """Whether each element of the result depends on those at its place alone."""
    shape = one.tensor(one.outputs[0]).shape
    elementwise = one.calls[0].node.ports.is_elementwise
    return elementwise and shape == np.broadcast_shapes(*(x.shape for x in inputs.values()))


def moved(
    x: np.ndarray,
    amount: float,
    noise: np.random.Generator,
    together: bool = False,
    least: float = 0.0,
) -> np.ndarray:
    """Each float times a random number between ``1 - amount`` and ``1 + amount``; ``together``,
    all of them times another one, too. Those that are not 0 move by at most ``least`` besides,
    which is what a dtype's smallest numbers are rounded by."""
    if not is_floating(str(x.dtype)):
        return x
    moves = noise.uniform(1 - amount, 1 + amount, x.shape).astype(np.float32)
    if together:
        moves *= np.float32(noise.choice((1 - amount, 1 + amount)))
    largest = float(jnp.finfo(x.dtype).max)
    with np.errstate(invalid="ignore"):
        product = x.astype(np.float32) * moves
        if least:
            product += np.where(x == 0, 0, noise.uniform(-least, least, x.shape))
        tame = np.clip(product, -largest, largest)
        return np.where(np.isfinite(product), tame, product).astype(x.dtype)


# -- comparison ------------------------------------------------------------------------------------


def _compare(got: np.ndarray, want: np.ndarray, runs: Arrays) -> Comparison:
    place = _places(want)
    errors = _distance(got, want)
    moves = np.stack([_distance(run, want) for run in runs])
    tolerance = _tolerance(moves, place)
    beyond = [
        int(np.sum(moves[i] > _tolerance(np.delete(moves, i, 0), place))) for i in range(len(runs))
    ]
    largest = float(np.max(np.abs(want, dtype=np.float64), initial=0, where=np.isfinite(want)))
    beyond_all = np.any(errors > np.maximum(tolerance, 2 * largest))
    allowed = 0 if beyond_all else 2 * max(beyond) + errors.size // _EDGES
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(errors == 0, 0.0, errors / tolerance).ravel()
    outliers = int(np.sum(ratios > 1))
    inside = np.sort(ratios)[: max(ratios.size - allowed, 1)]
    blunt = float(np.mean(tolerance >= max(root_mean_square(want), 1e-30)))
    return Comparison(float(inside[-1]), outliers, allowed, blunt)


def _within(got: np.ndarray, want: np.ndarray, step: float) -> Comparison | None:
    """The comparison, where all is within a step of itself and of the root mean square."""
    errors, size = _distance(got, want), root_mean_square(want)
    step = step if is_floating(str(want.dtype)) else 0.0
    tolerance = step * (np.abs(want.astype(np.float64)) + size)
    if not np.all((errors == 0) | (errors <= tolerance)):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(errors == 0, 0.0, errors / tolerance)
    return Comparison(float(np.max(ratios, initial=0)), 0, 0, 0.0, measured=False)


def _tolerance(moves: np.ndarray, place: np.ndarray) -> np.ndarray:
    """For each element, from the runs' moves of all."""
    return 2 * moves.max(0) + root_mean_square(moves) + place


def root_mean_square(x: np.ndarray) -> float:
    """Of the finite elements, in their number with the others."""
    wide = x.astype(np.float64)
    finite = np.where(np.isfinite(wide), wide, 0)
    return math.sqrt(float(np.mean(np.square(finite)))) if x.size else 0.0


def _distance(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Absolute differences; 0 between equal infinities and between NaN, infinite beside NaN."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        error = np.where(same, 0.0, np.abs(a - b))
    return np.where(np.isnan(error), np.inf, error)


def _places(want: np.ndarray) -> np.ndarray:
    """What each element's last place is worth; 0 for integers and booleans."""
    values = np.abs(want.astype(np.float64))
    if not is_floating(str(want.dtype)):
        return np.zeros(want.shape)
    info = jnp.finfo(want.dtype)
    return np.where(np.isfinite(values), values * float(info.eps), 0) + float(
        info.smallest_subnormal
    )
