"""Whether two results agree up to rounding; checked before anything is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .errors import GraphError
from .graph.dtypes import is_floating
from .graph.reference import applied
from .graph.spec import Call, GraphSpec

# Products of float32 operands may be rounded to TF32 (10 bits) by either side.
TF32_EPS = 2.0**-10
_ROUNDINGS = 4  # of the operands may explain a difference
_FLIPS = 0.3  # of floats that are rounded to integers may be one off
_EDGES = 1000  # of so many integers and booleans that follow from floats one may be another


@dataclass(frozen=True)
class Difference:
    """The difference of a result from the expected one.

    Attributes:
        relative: ``|got - want| / |want|`` in the Euclidean norm; the maximum over all leaves.
        worst: ``max |got - want| / (|want| + rms(want))`` over all elements. For a wrong tile in
            a large array, which the norm would hide, it is of order 1.
    """

    relative: float
    worst: float

    def within(self, tolerance: float) -> bool:
        """Whether both are small enough; single elements may differ four times as much."""
        return self.relative <= tolerance and self.worst <= 4 * tolerance

    def __str__(self) -> str:
        return f"{self.relative:.2g} (norm), {self.worst:.2g} (worst element)"

    def json(self) -> dict[str, float | None]:
        """As JSON, with None for values that are not finite."""
        figures = {"relative": self.relative, "worst": self.worst}
        return {k: float(f"{v:.3g}") if math.isfinite(v) else None for k, v in figures.items()}


def difference(got: Any, want: Any) -> Difference:
    """The Difference of two pytrees of arrays; raises GraphError if their shapes differ."""
    ours, theirs = jax.tree.leaves(got), jax.tree.leaves(want)
    shapes = [[leaf.shape for leaf in leaves] for leaves in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise GraphError(
            "the functions return different shapes",
            expected=str(shapes[1]),
            got=str(shapes[0]),
            fix="compare functions that return the same, with a transposition at the end of one if "
            "need be",
        )
    found = [jax.device_get(figures(a, b)) for a, b in zip(ours, theirs, strict=True) if a.size]
    relative, worst = ([float(leaf[i]) for leaf in found] for i in (0, 1))
    return Difference(largest(relative), largest(worst))


def largest(values: Sequence[float]) -> float:
    """The largest value; infinity for NaN, which max could miss."""
    return max((math.inf if math.isnan(value) else value for value in values), default=0.0)


class Figures(NamedTuple):
    """How one result differs from the expected one.

    ``relative`` and ``worst``: as of a :class:`Difference`; ``finite``: both over the elements that
    are finite on both sides; ``beyond``: the part of the elements that differ by more than one;
    ``other``: the part that differs.
    """

    relative: Any
    worst: Any
    finite: tuple[Any, Any]
    beyond: Any
    other: Any


@jax.jit
def figures(got: jax.Array, want: jax.Array) -> Figures:
    """The figures of two arrays of one shape, in float32."""
    a, b = got.astype(jnp.float32), want.astype(jnp.float32)
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))  # equal infinities are equal
    beyond = ~same & ~(jnp.abs(a - b) <= 1)
    top = jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0), initial=0)
    unit = jnp.where(top > 0, top, 1)  # else squares would overflow, or be 0
    a, b, tiny = a / unit, b / unit, jnp.finfo(jnp.float32).tiny
    known = jnp.where(jnp.isfinite(b), b, 0)
    scale = jnp.sqrt(jnp.mean(known * known))

    def both(error: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = error / (jnp.abs(known) + scale + tiny)
        worst = jnp.max(jnp.where(jnp.isnan(parts), jnp.inf, parts))  # max may drop a NaN
        return jnp.sqrt(jnp.mean(error * error)) / (scale + tiny), worst

    error = jnp.where(same, 0, jnp.abs(a - b))
    finite = jnp.where(jnp.isfinite(a) & jnp.isfinite(b), error, 0)
    return Figures(*both(error), both(finite), jnp.mean(beyond), jnp.mean(got != want))


def tolerance(operands: Sequence[Any], results: Any) -> float:
    """Twice the machine epsilon of the coarsest dtype to which either side may round.

    For bfloat16 this is 2**-6, about nine times the error of one rounding: epilogues in bfloat16
    pass, a wrong operand does not. 8-bit floats are exact in products, and count only as results.
    """
    coarsest = TF32_EPS
    for leaf in jax.tree.leaves(results):
        coarsest = max(coarsest, _eps(leaf.dtype))
    for leaf in jax.tree.leaves(operands):
        if leaf.dtype.itemsize > 1:
            coarsest = max(coarsest, _eps(leaf.dtype))
    return 2 * coarsest


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def wrong(spec: GraphSpec, given: Sequence[Figures], near: Callable[[], Sequence[Figures]]) -> str:
    """How a graph's results, of which these are the :func:`figures`, differ from its reference's by
    more than rounding explains; else empty. ``near`` gives those of the reference for operands that
    are one rounding away: what cancels is inexact in any arithmetic."""
    read, made = (
        [jax.ShapeDtypeStruct(t.shape, jnp.dtype(t.dtype)) for t in side]
        for side in (spec.input_tensors, spec.output_tensors)
    )
    for i, (tensor, of) in enumerate(zip(spec.output_tensors, given, strict=True)):
        if not is_floating(tensor.dtype):
            follows, rounds = _from_floats(spec, tensor.name)
            other = float(of.beyond if rounds else of.other)
            if other > follows / _EDGES or (rounds and float(of.other) > _FLIPS):
                return (
                    f"{float(of.other):.2%} of its {tensor.dtype} results differ from the reference"
                )
            continue
        limit = tolerance(read, made[i])
        found = _difference(of.relative, of.worst)
        if found.within(limit):
            continue
        other = _difference(*near()[i].finite)  # one that overflows explains nothing of the others
        exact = found.relative <= max(limit, _ROUNDINGS * other.relative)
        exact &= found.worst <= max(4 * limit, _ROUNDINGS * other.worst)
        if not (exact and math.isfinite(found.worst)):  # a rounding explains no NaN
            return (
                f"it differs from the reference by {found}, more than {limit:.2g} and than "
                f"{_ROUNDINGS} roundings of the operands, each of {other}"
            )
    return ""


def _from_floats(spec: GraphSpec, name: str) -> tuple[bool, bool]:
    """Whether integers or booleans follow from floats, which each side may round in its way, such
    as the mask of a computed value; and whether they are such floats, rounded to integers."""
    made, follows, rounds = {name}, False, False
    for call in reversed(spec.calls):
        if not made & {result for _, result in call.outputs}:
            continue
        read = [name for _, name in call.inputs]
        made |= {*read}
        follows |= any(is_floating(spec.tensor(name).dtype) for name in read)
        if (port := next((p for p, result in call.outputs if result == name), None)) is not None:
            at = call.node.results.index(port)
            rounds = is_floating(str(_before_rounding(spec, call)[at].dtype))
    return follows, follows and rounds and spec.tensor(name).dtype != "bool"


def _before_rounding(spec: GraphSpec, call: Call) -> Sequence[jax.ShapeDtypeStruct]:
    avals = {}
    for port, name in call.inputs:
        tensor = spec.tensor(name)
        avals[port] = jax.ShapeDtypeStruct(tensor.shape, jnp.dtype(tensor.dtype))
    return jax.eval_shape(lambda given: applied(call.node, given), avals)


def _difference(relative: Any, worst: Any) -> Difference:
    return Difference(largest([float(relative)]), largest([float(worst)]))


@jax.jit
def rounded(x: jax.Array) -> jax.Array:
    """The array with each element one rounding larger or smaller, half of them each."""
    if not is_floating(x.dtype.name) or x.dtype.itemsize < 2:
        return x
    eps = max(float(jnp.finfo(x.dtype).eps), TF32_EPS)
    index = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape)
    return jnp.where(index * np.uint32(2654435769) >> 31 == 0, x * (1 + eps), x * (1 - eps))
