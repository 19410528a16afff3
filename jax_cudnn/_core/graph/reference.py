"""Runs a GraphSpec in jnp: lowering away from CUDA, oracle of the tests, default derivative."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from .dtypes import INTEGERS, NARROW, arithmetic, is_floating, itemsize
from .node import Node
from .options import lax_precision
from .spec import Call, GraphSpec

WIDE = "wide"
_parted: ContextVar[bool] = ContextVar("parted", default=True)
HALVES = ("bfloat16", "float16")
_CHOSEN = [{"bfloat16"}, {"float16"}]


@contextmanager
def in_one_part() -> Iterator[None]:
    """While references are traced for their axes only, which parts would hide."""
    token = _parted.set(False)
    try:
        yield
    finally:
        _parted.reset(token)


def may_part() -> bool:
    """Whether a reference may compute in parts, to save memory."""
    return _parted.get()


def evaluate(
    spec: GraphSpec, *operands: jax.Array, products: str = "", read: Collection[str] = ()
) -> list[jax.Array]:
    """The outputs of the graph for operands in the order of ``spec.inputs``.

    Each node computes in its compute type and its result is rounded to the dtype its tensor has
    in the spec, as in a fused plan. ``read`` names the outputs that later computations of the same
    program read.

    ``products`` adapts the graph to a backend of XLA. WIDE converts 16-bit operands of products to
    float32, because XLA's CPU backend lacks some of the others; values stay the same.
    """
    with jax.numpy_rank_promotion("allow"):  # a user's setting is for the user's code only
        return _evaluated(spec, operands, products == WIDE, read)


def _evaluated(
    spec: GraphSpec, operands: Sequence[jax.Array], widens: bool, read: Collection[str]
) -> list[jax.Array]:
    values = given(spec, operands)
    precision = lax_precision(spec.options.precision)
    inside = {name for call in spec.calls for _, name in call.inputs}
    for call, inputs in steps(spec.calls, values):
        node = call.node
        if node.anchor.product:
            if widens and node.compute_data_type == "float32":
                halves = {port: x for port, x in inputs.items() if str(x.dtype) in HALVES}
                inputs |= {port: x.astype(jnp.float32) for port, x in halves.items()}
            results = node.reference(**inputs, precision=precision)
        else:
            results = applied(node, inputs)
        for (_, name), result in zip(call.outputs, results, strict=True):
            dtype, is_read = spec.tensor(name).dtype, name in inside or name in read
            values[name] = rounded(kept(result, dtype) if is_read else result, dtype)
    return [values[name] for name in spec.outputs]


def given(spec: GraphSpec, operands: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The values of a graph's inputs and constants, by name."""
    values = dict(zip(spec.inputs, operands, strict=True))
    kind = "float64" if spec.has_float64 else "float32"
    for constant in spec.constants:
        assert constant.value is not None
        exact = kind if constant.dtype == "float32" else constant.dtype
        values[constant.name] = jnp.full(constant.shape, constant.value, exact)
    return values


def steps(
    calls: Sequence[Call], values: Mapping[str, jax.Array]
) -> Iterator[tuple[Call, dict[str, jax.Array]]]:
    """Each call of a graph with its operands, which ``values`` has by then; without random numbers
    that another call draws: it draws them again."""
    made = {name: port for call in calls for port, name in call.outputs}
    for call in calls:
        inputs, draws = dict(call.inputs), call.node.draws
        if draws and draws.seed in inputs and made.get(inputs.get(draws.drawn, "")) == draws.made:
            del inputs[draws.drawn]
        yield call, {port: values[name] for port, name in inputs.items()}


def applied(node: Node, inputs: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """A node's results, not yet rounded, for operands of any dtype."""
    exact = node.algebra.chooses and {str(x.dtype) for x in inputs.values()} in _CHOSEN
    if not (exact or node.anchor.product or node.algebra.moves or node.xla_only):
        compute = arithmetic(node.compute_data_type)
        inputs = {port: x.astype(compute) for port, x in inputs.items()}
    return node.reference(**inputs)


def kept(value: jax.Array, dtype: str) -> jax.Array:
    """A value reduced to the precision of a dtype, by a separate operation: XLA removes a
    conversion to a narrower float and back. (For those of :data:`NARROW`, ``rounded`` does it.)"""
    if not is_floating(dtype) or not is_floating(str(value.dtype)) or dtype in NARROW:
        return value
    if itemsize(dtype) >= itemsize(str(value.dtype)):
        return value
    cut, largest = value.astype(dtype).astype(value.dtype), float(jnp.finfo(dtype).max)
    cut = jax.lax.reduce_precision(cut, jnp.finfo(value.dtype).nexp, jnp.finfo(dtype).nmant)
    return jnp.where(jnp.abs(cut) > largest, jnp.copysign(jnp.inf, cut), cut)


def rounded(value: jax.Array, dtype: str) -> jax.Array:
    """A value in another dtype, as cuDNN stores it: integers saturate, and floats round to the
    nearest integer (even); to float8 and float4 they saturate, too."""
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    if dtype in NARROW:
        value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
        return _on_grid(_in_range(value, dtype), dtype).astype(target)
    if dtype in INTEGERS:
        limits = jnp.iinfo(target)
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = jnp.round(value)
        return jnp.clip(value, limits.min, limits.max).astype(target)
    return value.astype(target)


def saturated(value: jax.Array, dtype: str) -> jax.Array:
    """A value in float8 or float4, for what reads it from memory: where XLA fuses the reader, it
    may leave the conversion out."""
    return _in_range(value, dtype).astype(dtype)


def _in_range(value: jax.Array, dtype: str) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(value, -largest, largest)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _on_grid(value: jax.Array, dtype: str) -> jax.Array:
    """Floats in the range of a narrow dtype, rounded to it without a conversion."""
    narrow = jnp.finfo(dtype)
    step = float(narrow.smallest_subnormal)
    tiny = jnp.round(value / step) * step
    normal = jax.lax.reduce_precision(value, jnp.finfo(value.dtype).nexp, narrow.nmant)
    return jnp.where(jnp.abs(value) < float(narrow.smallest_normal), tiny, normal)


@_on_grid.defjvp
def _on_grid_jvp(dtype: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _on_grid(*primals, dtype), tangents[0]
