"""``score_mod`` and ``score_mod_bprop`` of cudnn.pygraph, functions of a graph and a tensor: called
with a graph of ours, and from there on a jnp function, as ``g.sdpa`` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError, GraphTypeError, shown
from .._core.graph.builder import GraphBuilder
from .._core.graph.dims import Shape
from .._core.graph.dtypes import is_floating
from .._core.graph.node import Node
from .._core.graph.reference import applied, rounded
from .._core.graph.source import defined_at
from .._core.graph.spec import GraphSpec
from .._core.graph.tensor import GraphTensor
from ..ops.attention.score_mod.value import axis_of, unwatched
from ..ops.pointwise.elementwise import Pointwise

_MANY = 4  # elements of each dimension on which a derivative is tried


def as_jnp(
    functions: Mapping[str, Any], scores: Shape, tensor_of: Callable[[Any], Any]
) -> dict[str, Any]:
    """The arguments ``score_mod`` and ``score_mod_operands`` of ``g.sdpa``; ``tensor_of`` gives the
    number or the tensor for what a function reads besides the scores. Raises GraphError if
    ``score_mod_bprop`` is not the derivative of ``score_mod``, from which ours is made."""
    forward, backward = (functions.get(name) for name in ("score_mod", "score_mod_bprop"))
    if forward is None:
        raise GraphError("score_mod_bprop without score_mod", fix="pass both")
    g = _Recorded(scores, tensor_of)
    spec = g.finish([g.called(forward, g.score)])
    if backward is not None:
        back = g.finish([g.called(backward, g.input("gradient", scores, "float32"))])
        if not _is_derivative(spec, back, scores, g.shapes):
            raise GraphError(
                "score_mod_bprop is not the derivative of score_mod",
                expected="the gradient of the scores, where they are finite",
                why="the derivative is made of score_mod, and they differ on random scores",
                where=defined_at(backward),
            )
    names = [name for name in spec.inputs if name in g.operands]

    def function(score: Any, b: Any, h: Any, q: Any, kv: Any, *operands: Any) -> Any:
        values = {g.score.name: score, **dict(zip(names, operands, strict=True))}
        return jnp.broadcast_to(_run(spec, values, (b, h, q, kv)), score.shape)

    function.__name__ = getattr(forward, "__name__", "score_mod")
    return {"score_mod": function, "score_mod_operands": [g.operands[name] for name in names]}


class _Recorded(GraphBuilder):
    """The graph that a function gets."""

    def __init__(self, scores: Shape, tensor_of: Callable[[Any], Any]) -> None:
        super().__init__()
        self.score = self.input("score", scores, "float32")
        self.operands: dict[str, Any] = {}  # the outer tensors by the names of inputs
        self._tensor_of = tensor_of

    @property
    def shapes(self) -> dict[str, tuple[Shape, str]]:
        return {name: (x.shape, x._state.dtype) for name, x in self.operands.items()}

    def called(self, function: Any, tensor: GraphTensor) -> GraphTensor:
        result = function(self, tensor)
        if not isinstance(result, GraphTensor) or result._builder is not self:
            raise GraphTypeError(
                "score_mod did not return a tensor of its graph",
                expected="the result of an operation of the graph that it got",
                got=shown(result),
                where=defined_at(function),
            )
        return result

    def tensor_scalar(self, value: float, scalar_type: Any = None) -> float:
        return value

    def _apply(self, method: str, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("compute_data_type", None)
        own = {name: self._own(x) for name, x in kwargs.items()}
        return super()._apply(method, *map(self._own, args), **own)

    def _call(self, node: Node, ports: dict[str, Any], compute: str | None) -> Any:
        if not isinstance(node, Pointwise):
            raise GraphError(f"score_mod: {node.method} is not elementwise")
        if "bool" not in node.dtypes or node.method == "binary_select":
            ports = {p: x if p == "mask" else self._number(x) for p, x in ports.items()}
        return super()._call(node, ports, compute)

    def _number(self, x: Any) -> Any:
        """1 or 0 for the result of a comparison."""
        is_truth = isinstance(x, GraphTensor) and x._state.dtype == "bool"
        return self.binary_select(1.0, 0.0, x) if is_truth else x

    def _own(self, value: Any) -> Any:
        """A tensor of the outer graph as an input."""
        if not hasattr(value, "get_dim") or getattr(value, "_builder", None) is self:
            return value
        outer = self._tensor_of(value)
        if not isinstance(outer, GraphTensor):
            return outer
        for name, known in self.operands.items():
            if known is outer:
                return GraphTensor(self, self._tensors[name])
        made = self.input(f"operand{len(self.operands)}", outer.shape, outer._state.dtype)
        self.operands[made.name] = outer
        return made


def _run(spec: GraphSpec, given: Mapping[str, Any], indices: Sequence[Any]) -> Any:
    """The result in jnp, with the indices (B, H, Sq, Skv) of the scores."""
    values: dict[str, Any] = {t.name: np.float32(t.value or 0) for t in spec.constants}
    values |= given
    for call in spec.calls:
        ((_, name),) = call.outputs
        if (axis := axis_of(call.node)) is not None:
            values[name] = indices[axis]
            continue
        (result,) = applied(call.node, {port: values[n] for port, n in call.inputs})
        dtype = spec.tensor(name).dtype
        wide = is_floating(dtype) and result.dtype == "float64"
        values[name] = result if wide else rounded(result, dtype)
    return values[spec.outputs[0]]


def _is_derivative(
    spec: GraphSpec, back: GraphSpec, scores: Shape, operands: Mapping[str, tuple[Shape, str]]
) -> bool:
    """Whether ``back`` gives the gradient of the scores where they are finite, on random values."""
    noise = np.random.default_rng(0)

    def some(shape: Shape, dtype: str = "float32") -> jax.Array:
        small = [min(size, _MANY) for size in shape]
        whole = noise.integers(-8, 9, small)
        return jnp.asarray(3 * noise.normal(size=small) if is_floating(dtype) else whole, dtype)

    with unwatched():
        score, gradient = some(scores), some(scores)
        others = {name: some(*of) for name, of in operands.items()}
        spread = (np.linspace(0, n - 1, min(n, _MANY)).astype("int32") for n in scores)
        indices = [
            jnp.asarray(places).reshape([-1 if axis == i else 1 for i in range(4)])
            for axis, places in enumerate(spread)
        ]
        value, pull = jax.vjp(
            lambda x: jnp.broadcast_to(_run(spec, {"score": x, **others}, indices), x.shape), score
        )
        (want,) = pull(gradient)
        got = _run(back, {"score": score, "gradient": gradient, **others}, indices)
        got = np.where(np.isfinite(value), got, want)
        return bool(np.allclose(got, want, rtol=1e-3, atol=1e-4, equal_nan=True))
