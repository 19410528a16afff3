"""Tangents and gradients of a graph's reference, and how far apart two right ones may be.

Forward and reverse mode go from operation to operation: each is differentiated in jnp by itself, at
the values that the graph gives it, in float32. Rounding has the derivative of the identity, also
where it saturates; what becomes an integer or a boolean has none.

As in :mod:`.sensitivity`, runs with everything moved at random say how far apart two right results
may be. What moves beside the forward's values: tangents and cotangents, which a derived graph
rounds wherever the graph has 16 bits; the values at which it differentiates, because it may keep
those in 16 bits; and operands of its products, which have 16 bits if one of the product's has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn._core.graph.dtypes import FP8, is_floating
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning.split import part

from .interpreter import interpreted
from .samples import attends
from .sensitivity import (
    CUT,
    RESULT,
    TERM,
    Noise,
    Reference,
    moved,
    products_are_cut,
    root_mean_square,
)

_LEAST = float(jnp.finfo("float16").smallest_subnormal)
_LOST = 0.1  # of a row's spread, or of a weight, at most
Named = dict[str, np.ndarray]


class Differentiated:
    """The reference of a graph for operands, with tangents and gradients by all of its floats."""

    def __init__(self, spec: GraphSpec, operands: Sequence[Any]):
        self._spec, self._forward = spec, Reference(spec, operands)
        self._narrow, self._grain = narrowest(spec), grain(spec)

    def tangents(self, given: Named, noise: Noise = None) -> Named:
        """Tangents by name of all tensors that have some, for those of some operands."""
        values = self._forward.values(noise, self._narrow)
        tangents = _in_float32(given)
        for one in _steps(self._spec):
            if not tangents.keys() & {*one.inputs}:
                continue
            at, along = self._at(one, values, noise), {}
            for name in _floats(one, one.inputs):
                along[name] = tangents.get(name, np.zeros(at[name].shape, np.float32))
            found = _pushed(one.canonical())(
                [*at.values()], [*self._through(one, along, noise).values()]
            )
            for name, x in zip(_floats(one, one.outputs), found, strict=True):
                tangents[name] = self._kept(one, x, noise)
        return tangents

    def gradients(self, given: Named, noise: Noise = None) -> Named:
        """Cotangents by name of all tensors that have some, for those of some results."""
        values = self._forward.values(noise, self._narrow)
        sums = _in_float32(given)
        for one in reversed(_steps(self._spec)):
            if not sums.keys() & {*one.outputs}:
                continue
            at, arrived = self._at(one, values, noise), {}
            for name in _floats(one, one.outputs):
                zeros = np.zeros(self._spec.tensor(name).shape, np.float32)
                arrived[name] = self._kept(one, sums.get(name, zeros), noise)
            if noise is not None and attends(one.calls[0].node):
                arrived |= self._with_moved_means(one, arrived, values, noise)
            found = _pulled(one.canonical())(
                [*at.values()], [*self._through(one, arrived, noise).values()]
            )
            for name, x in zip(_floats(one, one.inputs), found, strict=True):
                x = self._kept(one, x, noise)
                if noise is not None and one.tensor(name).dtype in FP8:  # rounded before the sum
                    x = moved(x, float(jnp.finfo(one.tensor(name).dtype).eps) / 2, noise)
                sums[name] = sums[name] + x if name in sums else x
        return sums

    @property
    def finite(self) -> bool:
        """Whether all values are; also their squares, which derivatives take, where float16 keeps
        what is between the steps. A statistic that attention alone reads may be -inf."""
        calls = self._spec.calls
        read = {name for call in calls for port, name in call.inputs if port != "stats"}
        read |= {*self._spec.outputs}
        values = (x for name, x in self._forward.values().items() if name in read)
        wide = [x.astype(np.float32) for x in values if is_floating(str(x.dtype))]
        if self._spec.options.intermediate_data_type == "float16":
            largest = math.sqrt(float(jnp.finfo("float16").max))
            return all(bool((np.abs(x) < largest).all()) for x in wide)
        return all(bool(np.isfinite(x).all()) for x in wide)

    @property
    def conditioned(self) -> bool:
        """Whether no normalization is of rows whose spread is lost beside their mean, once that or
        they are rounded, and no weight of attention is lost, once queries and keys are."""
        steps = _steps(self._spec)
        return all(self._keeps_spread(one) and self._keeps_weights(one) for one in steps)

    def _keeps_spread(self, one: GraphSpec) -> bool:
        """What goes over one element has no spread to lose."""
        values, ports = self._forward.values(), dict(one.calls[0].inputs)
        node: Any = one.calls[0].node
        if not (getattr(node, "extent", None) and node.extent.centred and "epsilon" in ports):
            return True
        x = values[ports["input"]].astype(np.float64)
        axes = node.extent.reduced(x.shape, one.tensor(ports["scale"]).shape)
        if math.prod(x.shape[axis] for axis in axes) == 1:
            return True
        lost = (self._grain or RESULT) * np.abs(x.mean(axes))
        return not np.any(lost > _LOST * x.std(axes))

    def _keeps_weights(self, one: GraphSpec) -> bool:
        """A derivative finds the weights again from the statistic, and may have kept float32
        queries and keys in 16 bits, which moves large scores by more than the weights bear."""
        values, ports = self._forward.values(), dict(one.calls[0].inputs)
        node: Any = one.calls[0].node
        if not attends(node):
            return True
        q, k = (values[ports[port]] for port in ("q", "k"))
        if q.dtype != np.float32 and k.dtype != np.float32:
            return True
        k = np.repeat(k.astype(np.float32), q.shape[1] // k.shape[1], axis=1)
        scores = node.attn_scale * (q.astype(np.float32) @ np.swapaxes(k, 2, 3))
        return bool(np.max(np.abs(scores)) * self._grain < 2 * _LOST)

    def outputs(self, noise: Noise = None) -> Named:
        """The results by name."""
        values = self._forward.values(noise)
        return {name: values[name] for name in self._spec.outputs}

    # -- moves -----------------------------------------------------------------------------------

    def _at(self, one: GraphSpec, values: Mapping[str, np.ndarray], noise: Noise) -> Named:
        """The values at which an operation is differentiated."""
        at = {name: values[name] for name in one.inputs}
        wide = {name: x.astype(np.float32) for name, x in at.items() if name in _floats(one, at)}
        return at | self._through(one, wide, noise)

    def _through(self, one: GraphSpec, arrays: Named, noise: Noise) -> Named:
        """What enters an operation's derivative, moved as far as it may be rounded there."""
        node = one.calls[0].node
        if noise is None or node.moves or node.ports.is_elementwise:
            return arrays
        amount = TERM
        if node.product:
            amount = max(self._grain, CUT if products_are_cut(one) else TERM)
        return {name: self._moved(x, amount, noise, together=True) for name, x in arrays.items()}

    def _with_moved_means(
        self, one: GraphSpec, arrived: Named, values: Named, noise: np.random.Generator
    ) -> Named:
        """The cotangent of attention's statistic, moved as far as rounding O moves each row's
        product of it and its cotangent, which the backward subtracts: it reaches as much."""
        ports = dict(one.calls[0].outputs)
        if "Stats" not in ports or not values.keys() & arrived.keys() & {ports.get("O")}:
            return {}
        o, grad = values[ports["O"]].astype(np.float32), arrived[ports["O"]]
        spread = np.sqrt(np.sum(np.square(o * grad), axis=-1, keepdims=True))
        amount = max(self._grain, RESULT, float(jnp.finfo(values[ports["O"]].dtype).eps))
        moves = noise.uniform(-amount, amount, spread.shape).astype(np.float32)
        return {ports["Stats"]: arrived[ports["Stats"]] + moves * spread}

    def _kept(self, one: GraphSpec, x: np.ndarray, noise: Noise) -> np.ndarray:
        """A tangent or cotangent that an operation gave. Its derivative may be computed from its
        result, as that was rounded; what only moves elements rounds where it changes their type."""
        x = np.asarray(x)
        dtypes = {one.tensor(name).dtype for name in (*one.inputs, *one.outputs)}
        if noise is None or (one.calls[0].node.moves and len(dtypes) == 1):
            return x
        results = [one.tensor(name).dtype for name in _floats(one, one.outputs)]
        coarsest = max(float(jnp.finfo(dtype).eps) for dtype in results)
        return self._moved(x, max(self._grain, RESULT, coarsest), noise)

    def _moved(
        self, x: np.ndarray, amount: float, noise: np.random.Generator, together: bool = False
    ) -> np.ndarray:
        """Also by what does not become small with the values: the least float16, and roundings
        inside of an operation's derivative, where the graph computes in 16 bits."""
        least = _LEAST if self._narrow == "float16" else 0.0
        if self._spec.options.intermediate_data_type != "float32":
            least += amount * root_mean_square(x)
        return moved(x, amount, noise, together, least)


def narrowest(spec: GraphSpec) -> str:
    """The coarsest float of 16 bits that a derivative of a graph may round to: float8 is multiplied
    as bfloat16. Graphs of float32 alone have none."""
    found = {spec.options.intermediate_data_type, *(tensor.dtype for tensor in spec.tensors)}
    if found & {"bfloat16", *FP8}:
        return "bfloat16"
    return "float16" if "float16" in found else ""


def grain(spec: GraphSpec) -> float:
    """How far that rounds, of a value; 0 for graphs of float32."""
    return float(jnp.finfo(narrowest(spec)).eps) if narrowest(spec) else 0.0


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """A float as an array of this dtype has it: float8 saturates."""
    if dtype in FP8:
        largest = float(jnp.finfo(dtype).max)
        x = np.clip(x, -largest, largest)
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(jnp.dtype(dtype))


def _in_float32(arrays: Mapping[str, np.ndarray]) -> Named:
    return {name: np.asarray(x).astype(np.float32) for name, x in arrays.items()}


@functools.lru_cache(maxsize=512)
def _steps(spec: GraphSpec) -> tuple[GraphSpec, ...]:
    """The graph of each operation; attention's has its statistic also where nothing reads it."""
    steps = (part(spec, (position,)) for position in range(len(spec.calls)))
    return tuple(_with_statistic(one) if attends(one.calls[0].node) else one for one in steps)


def _with_statistic(one: GraphSpec) -> GraphSpec:
    outputs = tuple(name for port, name in one.calls[0].outputs if port in ("O", "Stats"))
    return replace(one, outputs=outputs or one.outputs, _cache={})


def _floats(spec: GraphSpec, names: Iterable[str]) -> list[str]:
    return [name for name in names if is_floating(spec.tensor(name).dtype)]


def _function(one: GraphSpec, values: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """The float results of a graph as a function of its float operands, in float32 throughout."""
    tensors = tuple(replace(t, dtype="float32") if is_floating(t.dtype) else t for t in one.tensors)
    options = replace(one.options, precision="highest")
    wide = replace(one, tensors=tensors, options=options, _cache={})
    floats = _floats(one, one.inputs)

    def function(*moving: Any) -> list[Any]:
        given = dict(zip(one.inputs, values, strict=True)) | dict(zip(floats, moving, strict=True))
        found = dict(zip(one.outputs, evaluate(wide, *given.values()), strict=True))
        return [found[name] for name in _floats(one, one.outputs)]

    return function, [x for x, name in zip(values, one.inputs, strict=True) if name in floats]


@functools.lru_cache(maxsize=256)
def _pushed(one: GraphSpec) -> Callable[..., Any]:
    def tangents(values: Any, along: Any) -> Any:
        function, at = _function(one, values)
        return jax.jvp(function, at, along)[1]

    return interpreted(tangents)


@functools.lru_cache(maxsize=256)
def _pulled(one: GraphSpec) -> Callable[..., Any]:
    def gradients(values: Any, cotangents: Any) -> Any:
        function, at = _function(one, values)
        return jax.vjp(function, *at)[1](cotangents)

    return interpreted(gradients)
