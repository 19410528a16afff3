"""Random operands of a graph, to run and time it."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from .graph.boundary import boundary
from .graph.dtypes import E8M0, is_floating
from .graph.spec import GraphSpec, Tensor

_TILE = 1_000_003  # random numbers, which repeat in larger arrays: a prime, so rows differ
_STEP = 100_003  # places in the tile between the beginnings of two operands


def operands(spec: GraphSpec, plain: bool = False) -> list[np.ndarray]:
    """Random operands; floats are normal, or, if ``plain`` or of one element, as scales are,
    positive multiples of 1/4, which have roots and logarithms, and are equal in places. Indices
    into other operands are valid: full lengths, offsets at equal distances, pages in their order.
    """
    generator = np.random.default_rng(0)
    normal = generator.standard_normal(_TILE, np.float32)
    if plain:
        normal = _positive(normal)
    values = {
        t.name: _random(t, generator, np.roll(normal, -_STEP * i))  # no two are the same numbers
        for i, t in enumerate(spec.input_tensors)
    }
    for call, edge in zip(spec.calls, boundary(spec).edges, strict=True):
        node, shapes = call.node, {p: spec.tensor(n) for p, n in (*call.inputs, *call.outputs)}
        positions = node.indices.positions
        names = {port: name for port, name in call.inputs if port in positions}
        for port, offset in node.indices.offsets.items():
            if offset in names and port in shapes:
                tokens, *token = shapes[port].shape
                count = math.prod(shapes[offset].shape)
                steps = np.linspace(0, tokens, count).astype(np.int64) * math.prod(token)
                values[names[offset]] = steps.reshape(shapes[offset].shape)
                names.pop(offset, None)
        if not names:
            continue
        given = {
            port: jnp.asarray(values[n], jnp.int32)
            if n in values and port not in names
            else jnp.full(shapes[port].shape, 2**30, jnp.int32)
            for port, n in call.inputs
            if port in positions
        }
        for port, most in edge.clipped(given).items():
            if names.get(port) in values:
                most = np.asarray(most)  # lengths, one of each batch element, are the largest
                pages = most.size > most.shape[0]  # of several each is another
                every = np.arange(most.size).reshape(most.shape) % (most + 1)
                values[names[port]] = every if pages else most
    return [values[t.name].astype(jnp.dtype(t.dtype), copy=False) for t in spec.input_tensors]


def _positive(normal: np.ndarray) -> np.ndarray:
    return np.abs(np.round(4 * normal)) / 4 + 0.25


def _random(tensor: Tensor, generator: np.random.Generator, normal: np.ndarray) -> np.ndarray:
    if is_floating(tensor.dtype):
        if math.prod(tensor.shape) == 1:  # cuDNN's attention assumes that scales are positive
            normal = _positive(normal)
        return np.resize(normal.astype(jnp.dtype(tensor.dtype)), tensor.shape)
    if tensor.dtype == E8M0:
        return np.resize(2.0 ** np.clip(np.round(normal), -2, 2), tensor.shape)
    if tensor.dtype == "bool":
        return np.resize(generator.random(_TILE) < 0.5, tensor.shape)
    kind = np.iinfo(jnp.dtype(tensor.dtype))
    drawn = generator.integers(kind.min, kind.max, 4099, np.int64 if kind.min else np.uint64)
    return np.resize(drawn.astype(jnp.dtype(tensor.dtype)), tensor.shape)
