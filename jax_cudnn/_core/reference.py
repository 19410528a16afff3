"""Runs a GraphSpec in jnp: lowering away from CUDA, oracle of the tests, default derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .dtypes import FP8, INTEGERS, is_floating, itemsize
from .options import lax_precision
from .spec import GraphSpec


def evaluate(spec: GraphSpec, *operands: jax.Array, wide_products: bool = False) -> list[jax.Array]:
    """The outputs of the graph for operands in the order of ``spec.inputs``.

    Each node computes in its compute type and its result is rounded to the dtype its tensor has
    in the spec, where a fused plan rounds it, too. With ``wide_products`` 16-bit operands of
    products are converted to float32, which changes no product: XLA's CPU backend has not all.
    """
    values = dict(zip(spec.inputs, operands, strict=True))
    for constant in spec.constants:
        assert constant.value is not None
        values[constant.name] = jnp.full(constant.shape, constant.value, constant.dtype)
    precision = lax_precision(spec.options.precision)
    read = {name for call in spec.calls for _, name in call.inputs}
    for call in spec.calls:
        node, inputs = call.node, {port: values[name] for port, name in call.inputs}
        if node.anchor:
            if wide_products:
                inputs = {port: _widened(x) for port, x in inputs.items()}
            results = node.reference(**inputs, precision=precision)
        elif node.moves or node.leftover:
            results = node.reference(**inputs)
        else:
            compute = node.accumulator
            results = node.reference(**{port: x.astype(compute) for port, x in inputs.items()})
        for (_, name), result in zip(call.outputs, results, strict=True):
            dtype = spec.tensor(name).dtype
            values[name] = rounded(_kept(result, dtype) if name in read else result, dtype)
    return [values[name] for name in spec.outputs]


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if str(x.dtype) in ("bfloat16", "float16") else x


def _kept(value: jax.Array, dtype: str) -> jax.Array:
    """A value cut to the precision of a dtype, for what is computed further: there XLA leaves
    conversions to a narrower float and back out, unless the cut is an operation of its own."""
    if not is_floating(dtype) or not is_floating(str(value.dtype)):
        return value
    if itemsize(dtype) >= itemsize(str(value.dtype)):
        return value
    cut, largest = rounded(value, dtype).astype(value.dtype), float(jnp.finfo(dtype).max)
    cut = jax.lax.reduce_precision(cut, jnp.finfo(value.dtype).nexp, jnp.finfo(dtype).nmant)
    return jnp.where(jnp.abs(cut) > largest, jnp.copysign(jnp.inf, cut), cut)


def rounded(value: jax.Array, dtype: str) -> jax.Array:
    """A value in another dtype, as cuDNN stores it: integers saturate, and floats round to the
    nearest integer (even); to float8 they saturate, too."""
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    if dtype in FP8:
        largest = float(jnp.finfo(target).max)
        return jnp.clip(value, -largest, largest).astype(target)
    if dtype in INTEGERS:
        limits = jnp.iinfo(target)
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = jnp.round(value)
        return jnp.clip(value, limits.min, limits.max).astype(target)
    return value.astype(target)
