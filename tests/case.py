"""A graph function with the shapes and dtypes of its operands: what tests and benchmarks run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn._core.graph.example import Example
from jax_cudnn._core.graph.node import REGISTRY, Node
from jax_cudnn._core.graph.trace import GraphFunction, graph


@dataclass(frozen=True)
class Case:
    """A graph function with the shapes and dtypes of its operands.

    ``planned`` is False for graphs that cuDNN refuses, in words. ``positive`` holds the positions
    of operands that are at least 0.25.
    """

    name: str
    function: GraphFunction
    avals: tuple[jax.ShapeDtypeStruct, ...]
    planned: bool = True
    positive: frozenset[int] = frozenset()

    def operands(self, key: jax.Array) -> list[jax.Array]:
        """Random operands; weights of products are scaled so that results have unit variance."""
        _, trace = self.function.trace(*self.avals)
        fan_in = {}
        for call in trace.spec.calls:
            # (image, weight) or (A, B): the second is the weight.
            if call.node.product and len(call.inputs) == 2:
                (_, image), (_, weight) = call.inputs
                shape = trace.spec.tensor(weight).shape
                contracted = shape[-2] if len(trace.spec.tensor(image).shape) == 3 else None
                fan_in[weight] = contracted or math.prod(shape[1:])
        names = dict(zip(trace.operands, trace.spec.inputs, strict=True))
        # Drawn by NumPy: jax.random compiles a program for each shape.
        random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return [
            _drawn(random, aval, fan_in.get(names.get(i, ""), 1) ** -0.5, i in self.positive)
            for i, aval in enumerate(self.avals)
        ]


def _drawn(
    random: np.random.Generator, aval: jax.ShapeDtypeStruct, scale: float, positive: bool
) -> jax.Array:
    """Normal floats times ``scale``, small integers, or fair booleans."""
    if aval.dtype == jnp.bool_:
        values = random.random(aval.shape) < 0.5
    elif jnp.issubdtype(aval.dtype, jnp.integer):
        least = 0 if jnp.issubdtype(aval.dtype, jnp.unsignedinteger) else -8
        values = random.integers(least, 9, aval.shape)
    else:
        values = random.standard_normal(aval.shape, np.float32) * np.float32(scale)
    if positive:
        values = np.abs(values) + 0.25
    return jnp.asarray(values.astype(aval.dtype))


def case(*avals: tuple[tuple[int, ...], str]) -> Callable[[Callable[..., Any]], Case]:
    """Decorator: a function of ``g`` and arrays of these shapes and dtypes becomes a Case."""

    def make(fn: Callable[..., Any]) -> Case:
        structs = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in avals)
        return Case(fn.__name__, graph(fn), structs)

    return make


def node_cases() -> Iterator[Case]:
    """One case for each example of each registered node."""
    for method, node in REGISTRY.items():
        for number, example in enumerate(node.examples):
            yield _of_example(method, node, number, example)


def _of_example(method: str, node: type[Node], number: int, example: Example) -> Case:
    given = {n: example.inputs[n] for n in node.ports.input_names if n in example.inputs}
    numbers = {name: value for name, value in given.items() if isinstance(value, float)}
    shapes = {name: value for name, value in given.items() if name not in numbers}
    variadic = {port.name for port in node.ports.inputs if port.variadic}

    def fn(g: Any, *operands: Any) -> Any:
        left = iter(operands)
        ports = {
            name: [next(left) for _ in shape] if name in variadic else next(left)
            for name, shape in shapes.items()
        }
        result = getattr(g, method)(**ports, **numbers, **example.attributes)
        return result.set_data_type(example.out) if example.out else result

    fn.__name__ = f"{method}_{number}_{example.dtype}"
    avals = [
        (shape, example.dtypes.get(name, example.dtype))
        for name, given in shapes.items()
        for shape in (given if name in variadic else [given])
    ]
    positive = frozenset(list(shapes).index(port) for port in example.positive)
    return dataclasses.replace(case(*avals)(fn), planned=example.alone, positive=positive)
