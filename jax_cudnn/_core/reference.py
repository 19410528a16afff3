"""Runs a GraphSpec in jnp: lowering away from CUDA, oracle of the tests, default derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .dtypes import FP8, INTEGERS
from .options import lax_precision
from .spec import GraphSpec


def evaluate(spec: GraphSpec, *operands: jax.Array) -> list[jax.Array]:
    """The outputs of the graph for operands in the order of ``spec.inputs``.

    Each node computes in its compute type and its result is rounded to the dtype its tensor has
    in the spec, where a fused plan rounds it, too.
    """
    values = dict(zip(spec.inputs, operands, strict=True))
    for constant in spec.constants:
        assert constant.value is not None
        values[constant.name] = jnp.full(constant.shape, constant.value, constant.dtype)
    precision = lax_precision(spec.options.precision)
    for call in spec.calls:
        node, inputs = call.node, {port: values[name] for port, name in call.inputs}
        if node.anchor:
            results = node.reference(**inputs, precision=precision)
        elif node.moves or node.leftover:
            results = node.reference(**inputs)
        else:
            compute = node.accumulator
            results = node.reference(**{port: x.astype(compute) for port, x in inputs.items()})
        for (_, name), result in zip(call.outputs, results, strict=True):
            values[name] = rounded(result, spec.tensor(name).dtype)
    return [values[name] for name in spec.outputs]


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
