"""Whether two results agree up to rounding; checked before anything is timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .errors import GraphError
from .graph.dtypes import FP4, FP8, is_floating
from .graph.spec import GraphSpec

TF32_EPS = 2.0**-10
"""Of products of float32 operands, which either side may round so."""
_APPROXIMATE_EPS = 2.0**-13
"""Of float32 where nothing is a product: GPUs approximate ``exp`` and ``tanh``."""
_ROUNDINGS = 4  # of the operands may explain a difference
_MOST = 0.1  # that they may explain of a whole result; more is no comparison
_FEW, _EDGES = 10_000, 1000  # one of so many floats, or roundings to integers, may be any value
_SIZES = tuple(2.0**i for i in range(-10, 11))  # of errors that are counted
_NARROW = (*FP8, FP4)
_MOST_OF_FP8 = 0.5  # that one element may differ: eps of float8_e5m2 is 0.25
_FINITE = 0.9  # of the elements of a reference, at least


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

    ``relative`` and ``worst``: as of a :class:`Difference`. ``bias``: of the factor that fits best.
    ``other``: how many elements differ. ``larger``: how many finite ones by more than each of
    ``_SIZES``, relative to themselves and the usual size of all. Of the expected one: ``rare``,
    how many elements are the rarer of zero and not zero; ``informative``, whether it tells a
    right result from others: most of it is finite, and not all of it is one value.
    """

    relative: Any
    worst: Any
    bias: Any
    other: Any
    larger: Any
    rare: Any
    informative: Any


@jax.jit
def figures(got: jax.Array, want: jax.Array) -> Figures:
    """The figures of two arrays of one shape, in float32."""
    a, b = got.astype(jnp.float32), want.astype(jnp.float32)
    same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))  # equal infinities are equal
    other = jnp.sum(~same if jnp.issubdtype(want.dtype, jnp.floating) else got != want)
    finite = jnp.isfinite(b)
    top = jnp.max(jnp.where(finite, jnp.abs(b), 0), initial=0)
    unit = jnp.where(top > 0, top, 1)  # else squares would overflow, or be 0
    a, b, tiny = a / unit, b / unit, jnp.finfo(jnp.float32).tiny
    known = jnp.where(finite, b, 0)
    square = jnp.mean(known * known)
    scale = jnp.sqrt(square)
    error = jnp.where(same, 0, jnp.abs(a - b))
    parts = error / (jnp.abs(known) + scale + tiny)
    usual = jnp.mean(jnp.sqrt(jnp.abs(known))) ** 2  # which few large elements hardly change
    both = jnp.isfinite(error)
    sizes = jnp.where(both, error / (jnp.abs(known) + usual + tiny), 0).reshape(-1, 1)
    bias = jnp.mean(jnp.where(both, (a - b) * known, 0)) / (square + tiny)
    zero = jnp.sum(b == 0)
    informative = (jnp.mean(finite) >= _FINITE) & ((b.size <= 1) | jnp.any(b != b.reshape(-1)[:1]))
    return Figures(
        jnp.sqrt(jnp.mean(error * error)) / (scale + tiny),
        jnp.max(jnp.where(jnp.isnan(parts), jnp.inf, parts)),  # max may drop a NaN
        jnp.abs(bias),
        other,
        jnp.sum(sizes > np.asarray(_SIZES, np.float32), 0),
        jnp.minimum(zero, b.size - zero),
        informative,
    )


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


class UninformativeError(Exception):
    """A graph's results for these operands do not tell a right way from a wrong one."""


def wrong(spec: GraphSpec, given: Sequence[Figures], near: Callable[[], Sequence[Figures]]) -> str:
    """How a graph's results, of which these are the :func:`figures`, differ from its reference's by
    more than rounding explains; else empty. ``near`` gives those of the reference for operands that
    are one rounding away: what cancels is inexact in any arithmetic, and what is rounded to
    integers, or chosen by a comparison, jumps."""
    for i, (tensor, of) in enumerate(zip(spec.output_tensors, given, strict=True)):
        if not of.informative:
            raise UninformativeError
        floats, elements = is_floating(tensor.dtype), math.prod(tensor.shape)
        found = Difference(largest([float(of.relative)]), largest([float(of.worst)]))
        limit, worst, bias = 0.0, 0.0, math.inf
        if floats:
            narrow = tensor.dtype if tensor.dtype in _NARROW else _narrowest(spec)
            few, limit = elements // _FEW, _limit(spec, narrow)
            worst = 4 * limit
            if narrow:  # a wrong scale is larger than the mean of many roundings
                worst = min(worst, _MOST_OF_FP8)
                bias = limit / 8 + _ROUNDINGS * found.relative / math.sqrt(elements)
            right = found.relative <= limit and found.worst <= worst and float(of.bias) <= bias
        elif _is_exact(spec, tensor.name):
            if of.other:
                return f"{int(of.other)} of {elements} elements are others, which nothing rounds"
            continue
        else:
            few = int(of.rare) / _EDGES
            right = of.other <= few
        if right:
            continue
        moved = near()[i]
        if floats and not moved.relative <= _MOST:
            raise UninformativeError
        # Errors of a size are explained by four times as many of half of it.
        explained = (few + _ROUNDINGS * int(n) for n in (moved.larger[0], *moved.larger[:-1]))
        right = all(
            count <= most
            for size, count, most in zip(_SIZES, of.larger, explained, strict=True)
            if size >= worst
        )
        if floats:
            right &= found.relative <= max(limit, _ROUNDINGS * moved.relative)  # not if it is NaN
            right &= float(of.bias) <= bias + _ROUNDINGS * float(moved.bias)
        if not right:
            return (
                f"it differs from the reference by {found}, in {int(of.other)} of {elements} "
                f"elements, more than {limit:.2g} and than {_ROUNDINGS} roundings of the operands, "
                f"each of {float(moved.relative):.2g} and in {int(moved.other)} elements"
            )
    return ""


def _narrowest(spec: GraphSpec) -> str:
    """The coarsest float of 8 or 4 bits to which a graph rounds on its way; empty for none."""
    made = (spec.tensor(name).dtype for call in spec.calls for _, name in call.outputs)
    return max({*made} & {*_NARROW}, key=_eps, default="")


def _limit(spec: GraphSpec, narrow: str) -> float:
    """The tolerance of a result of a graph; ``narrow`` is a float of 8 or 4 bits, to which it is
    rounded, or empty."""
    least = least_eps(spec)
    halves = (t.dtype for t in spec.tensors if is_floating(t.dtype) and t.dtype not in _NARROW)
    coarsest = 2 * max(least, *map(_eps, halves), 0.0)
    return max(coarsest, _eps(narrow)) if narrow else coarsest


def least_eps(spec: GraphSpec) -> float:
    """The epsilon of a graph's arithmetic in float32."""
    rounds = bool(spec.anchors)
    return TF32_EPS if rounds and spec.options.precision in (None, "default") else _APPROXIMATE_EPS


def _is_exact(spec: GraphSpec, name: str) -> bool:
    """Whether integers or booleans follow from the operands without any rounding."""
    made = {name}
    for call in reversed(spec.calls):
        if not made & {result for _, result in call.outputs}:
            continue
        read = {name for _, name in call.inputs}
        made |= read
        node, rounds = call.node, any(is_floating(spec.tensor(name).dtype) for name in read)
        if rounds and not (
            node.algebra.moves or node.algebra.chooses or node.method.startswith("cmp_")
        ):
            return False
    return True


@functools.partial(jax.jit, static_argnums=1)
def rounded(x: jax.Array, least: float = TF32_EPS) -> jax.Array:
    """The array with each element one rounding larger or smaller, half of them each; a rounding is
    at least ``least``."""
    if not is_floating(x.dtype.name) or x.dtype.itemsize < 2:
        return x
    eps = max(float(jnp.finfo(x.dtype).eps), least)
    index = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape)
    return jnp.where(index * np.uint32(2654435769) >> 31 == 0, x * (1 + eps), x * (1 - eps))
