"""Random graphs of 3 to 12 operations, for tests of what must hold for every graph."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core.errors import GraphError, GraphTypeError
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.graph.tensor import GraphTensor
from jax_cudnn._core.graph.trace import GraphFunction, graph

from .drawing import Drawing, Operand
from .nodes import add_node
from .operands import shape
from .patterns import PATTERNS, Writer

LEAST, MOST = 3, 12
"""Operations of a graph."""
_DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
# Without those that promise more than XLA may keep (deterministic) or name an engine.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"precision": "highest"},
    {"intermediate_data_type": "bfloat16"},
    {"intermediate_data_type": "float16"},
)


@dataclass(frozen=True)
class RandomGraph:
    """A random graph function with the shapes and dtypes of its operands."""

    seed: int
    function: GraphFunction
    avals: tuple[jax.ShapeDtypeStruct, ...]
    _drawn: Mapping[str, Operand]

    @functools.cached_property
    def spec(self) -> GraphSpec:
        return self.function.trace(*self.avals)[1].spec

    def operands(self, number: int = 0) -> list[jax.Array]:
        """Random operands, other ones for other numbers; with the first the values are tame."""
        drawn = (o.draw(self.seed, number, int(name[1:])) for name, o in self._drawn.items())
        return [jnp.asarray(x) for x in drawn]

    def inputs(self, number: int = 0) -> list[jax.Array]:
        """The operands as the spec's inputs: one without dimensions has the rank of what it
        stands beside."""
        tensors = self.spec.input_tensors
        return [x.reshape(t.shape) for x, t in zip(self.operands(number), tensors, strict=True)]


@functools.lru_cache(maxsize=512)
def random_graph(seed: int) -> RandomGraph:
    """The graph of a seed: of 3 to 12 operations, all of which some output needs.

    Equal seeds give equal graphs in every process, with the same registry of nodes. The values
    are tame (finite, neither huge nor vanishing), the tensors small.
    """
    rng = random.Random(seed)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        drawing = _draw(seed, rng)
    outputs = _outputs(rng, drawing)
    options = rng.choice(_OPTIONS) if rng.random() < 0.15 else {}
    operands = drawing.operands
    avals = (jax.ShapeDtypeStruct(o.shape, jnp.dtype(o.dtype)) for o in operands.values())
    function = graph(_function(f"random_{seed}", drawing, outputs), **options)
    return RandomGraph(seed, function, tuple(avals), operands)


def _draw(seed: int, rng: random.Random) -> Drawing:
    drawing = Drawing(seed, rng, rng.choice(_DTYPES), shape(rng))
    count, share = rng.randint(LEAST, MOST), rng.choice((0.0, 0.15, 0.6))
    alone = [pattern for pattern, size in PATTERNS.items() if size == count]
    if alone and rng.random() < 0.35:
        with contextlib.suppress(GraphError, GraphTypeError):  # what it added is a graph, too
            rng.choice(alone)(Writer(drawing))
    while (left := count - len(drawing.steps)) > 0:
        fitting = [pattern for pattern, size in PATTERNS.items() if size <= left]
        if fitting and rng.random() < share:
            with contextlib.suppress(GraphError, GraphTypeError):
                rng.choice(fitting)(Writer(drawing))
        else:
            add_node(drawing)
    return drawing


def _outputs(rng: random.Random, drawing: Drawing) -> list[str]:
    """Names of what is returned: all that nothing uses, and some of the rest."""
    uses = {value.name: value.uses for value in (*drawing.values, *drawing.hidden)}
    hidden = {value.name for value in drawing.hidden}
    outputs = []
    for step in drawing.steps:
        ends = not any(uses[name] for name in step.results)
        shown = [name for name in step.results if name not in hidden]
        returned = [name for name in shown if rng.random() < (0.6 if ends else 0.2)]
        outputs += returned or ([step.results[0]] if ends else [])
    rng.shuffle(outputs)
    return outputs


def _function(name: str, drawing: Drawing, outputs: list[str]) -> Callable[..., list[GraphTensor]]:
    """The graph function that makes the steps."""
    operands, steps = drawing.operands, tuple(drawing.steps)

    def function(g: Any, *arrays: GraphTensor) -> list[GraphTensor]:
        values = dict(zip(operands, arrays, strict=True))

        def at(port: Any) -> Any:
            if isinstance(port, list):
                return [values[name] for name in port]
            return values[port] if isinstance(port, str) else port

        for operand, array in zip(operands.values(), arrays, strict=True):
            if operand.strides is not None:
                array.set_stride(operand.strides)
        for step in steps:
            ports = {port: at(names) for port, names in step.ports.items()}
            made = getattr(g, step.method)(**ports, **step.attributes)
            made = made if isinstance(made, tuple) else (made,)
            if step.dtype is not None:
                made[0].set_data_type(step.dtype)
            if step.strides is not None:
                made[0].set_stride(step.strides)
            values.update(zip(step.results, made, strict=True))
        return [values[name] for name in outputs]

    function.__name__ = name
    return function
