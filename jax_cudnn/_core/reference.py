"""Runs a GraphSpec in jnp: lowering away from CUDA, oracle of the tests, default derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .spec import GraphSpec


def evaluate(spec: GraphSpec, *operands: jax.Array) -> list[jax.Array]:
    """The outputs of the graph for operands in the order of ``spec.inputs``.

    Each node computes in float32 and its result is rounded to the dtype its tensor has in the
    spec, where a fused plan rounds it, too.
    """
    values = dict(zip(spec.inputs, operands, strict=True))
    for constant in spec.constants:
        assert constant.value is not None
        values[constant.name] = jnp.full(constant.shape, constant.value, constant.dtype)
    for call in spec.calls:
        results = call.node.reference(**{port: values[name] for port, name in call.inputs})
        for (_, name), result in zip(call.outputs, results, strict=True):
            values[name] = result.astype(spec.tensor(name).dtype)
    return [values[name] for name in spec.outputs]
