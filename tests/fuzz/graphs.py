"""Random graphs of 3 to 12 operations, for tests of what must hold for every graph."""

import contextlib
import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core.errors import GraphError, GraphTypeError
from jax_cudnn._core.graph.node import registry
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.graph.trace import GraphFunction, graph

from .drawing import Drawing, Operand, each, state
from .nodes import DRAWS, add_node
from .operands import shape

LEAST, MOST = 3, 12  # operations
_DTYPES = ("bfloat16", "bfloat16", "float16", "float32")
# Without those that promise more than XLA may keep (deterministic) or name an engine.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"precision": "highest"},
    {"intermediate_data_type": "bfloat16"},
    {"intermediate_data_type": "float16"},
)


_EPILOGUE = (
    *("bias", "scale", "add", "mul", "sub", "max", "relu_backward", "swish_backward"),
    *("relu", "gelu", "gelu_approx_tanh", "swish", "sigmoid", "tanh", "elu", "abs", "identity"),
)


@dataclass(frozen=True)
class RandomGraph:
    """A random graph function with the shapes and dtypes of its operands."""

    seed: int
    function: GraphFunction
    drawn: Mapping[str, Operand]

    @functools.cached_property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(o.shape, jnp.dtype(o.dtype)) for o in self.drawn.values())

    @functools.cached_property
    def spec(self) -> GraphSpec:
        return self.function.trace(*self.avals)[1].spec

    def inputs(self, number: int = 0) -> list[jax.Array]:
        """Operands of the spec, other ones for other numbers; with the first all values are tame.
        One without dimensions has the rank of what it stands beside."""
        drawn = (o.draw(self.seed, number, int(name[1:])) for name, o in self.drawn.items())
        pairs = zip(drawn, self.spec.input_tensors, strict=True)
        return [jnp.asarray(x).reshape(tensor.shape) for x, tensor in pairs]


@functools.lru_cache(maxsize=512)
def random_graph(seed: int) -> RandomGraph:
    """The graph of a seed: of 3 to 12 operations, all of which some output needs.

    Equal seeds give equal graphs in every process, with the same registry of nodes. The values
    are tame (finite, neither huge nor vanishing), the tensors small.
    """
    rng = random.Random(seed)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        drawing = Drawing(seed, rng, rng.choice(_DTYPES), shape(rng))
        count = rng.randint(LEAST, MOST)
        if rng.random() < 0.3:
            with contextlib.suppress(GraphError, GraphTypeError):  # what it added is a graph, too
                _fusion(drawing, rng.randint(3, count))
        while len(drawing.steps) < count:
            add_node(drawing)
    outputs = _outputs(rng, drawing)
    options = rng.choice(_OPTIONS) if rng.random() < 0.15 else {}
    operands = {v.name: v.operand for v in drawing.values if v.operand and v.uses}
    function = _function(f"random_{seed}", drawing.steps, operands, outputs)
    return RandomGraph(seed, graph(function, **options), operands)


def _fusion(drawing: Drawing, size: int) -> None:
    """A product and operations on each element of its result, for one plan of cuDNN's."""
    rng = drawing.rng
    method = rng.choice(("matmul", "conv_fprop", "conv_fprop", "conv_dgrad", "conv_wgrad"))
    value = drawing.add(method, *DRAWS[method](drawing, registry()[method]))[0]
    for left in reversed(range(size - 1)):
        method = rng.choice(_EPILOGUE)
        ports, full = registry()[method].ports.input_names, value.shape
        bias = (1, full[1], *[1] * (len(full) - 2))
        other = full if method.endswith("_backward") or rng.random() < 0.4 else bias
        operands = dict(zip(ports, (value, Operand(other, drawing.dtype)), strict=False))
        value = drawing.add(method, operands, {}, None if left else drawing.dtype)[0]


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


def _function(name: str, steps: Any, operands: Any, outputs: list[str]) -> Callable[..., list[Any]]:
    """The graph function that makes the steps."""

    def function(g: Any, *arrays: Any) -> list[Any]:
        values = dict(zip(operands, arrays, strict=True))
        for operand, array in zip(operands.values(), arrays, strict=True):
            state(array, None, operand.layout)
        for step in steps:
            at = {p: each(x, lambda x: values.get(x, x)) for p, x in step.ports.items()}
            made = getattr(g, step.method)(**at, **step.attributes)
            made = made if isinstance(made, tuple) else (made,)
            state(made[0], step.dtype, step.layout)
            values.update(zip(step.results, made, strict=True))
        return [values[name] for name in outputs]

    function.__name__ = name
    return function
