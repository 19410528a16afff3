"""How cuDNN is given a function of attention's scores, and the derivative of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.graph.spec import Call, GraphSpec
from .._core.transforms.linearize import TANGENT, linearize
from .._core.transforms.transpose import COTANGENT, transpose
from .logical import GenIndex

if TYPE_CHECKING:
    from .score_mod import ScoreMod

_SWAPPED = {method: method for method in ("add", "mul", "min", "max", "cmp_eq", "cmp_neq")}
_SWAPPED |= {"cmp_lt": "cmp_gt", "cmp_gt": "cmp_lt", "cmp_le": "cmp_ge", "cmp_ge": "cmp_le"}


@dataclass(frozen=True)
class Derivative:
    """How a gradient goes back: ``backward`` reads ``values`` (its operand: the tensor of
    ``forward``) and the gradient of the result, its operand ``gradient``, and gives that of the
    scores, its result ``result``. Without a ``backward``, that is the same; or 0, if ``is_zero``.
    """

    forward: GraphSpec
    backward: GraphSpec | None = None
    values: tuple[tuple[str, str], ...] = ()
    gradient: str = ""
    result: str = ""
    is_zero: bool = False


@functools.lru_cache(maxsize=1024)
def derivative(spec: GraphSpec) -> Derivative:
    """The derivative of a function of the scores by these, from those of its nodes."""
    linear = linearize(spec, frozenset({spec.inputs[0]}))
    tangent = linear.tangent
    (along,) = tangent.results
    if along is None:
        return Derivative(spec, is_zero=True)
    if tangent.spec is None:
        return Derivative(spec)
    own = {
        name: source.of for name, source in zip(tangent.spec.inputs, tangent.inputs, strict=True)
    }
    (moving,) = (name for name, key in own.items() if key == (TANGENT, spec.inputs[0]))
    backward = transpose(tangent.spec, (moving,), tangent.spec.outputs)
    (result,) = backward.results
    if result is None or backward.spec is None:
        return Derivative(linear.forward, is_zero=result is None)
    values, gradient = [], ""
    for name, source in zip(backward.spec.inputs, backward.inputs, strict=True):
        kind, of = source.of  # pyright: ignore[reportGeneralTypeIssues]
        if kind == COTANGENT:
            gradient = name
        else:
            values.append((name, own[of][1]))  # pyright: ignore[reportIndexIssue]
    return Derivative(linear.forward, backward.spec, tuple(values), gradient, str(result.of))


class Emission:
    """Adds a function of the scores to a cudnn.pygraph, and its derivative behind it.

    cuDNN's engines for attention read a number only as the second operand, and booleans only where
    they select: there a comparison is one, elsewhere 1 or 0.
    """

    def __init__(self, mod: ScoreMod, operands: Mapping[str, Any]) -> None:
        self.mod = mod
        self.derivative: Derivative | None = None
        self._operands = {name: operands[port] for name, port in mod.named.items()}
        self._tensors: dict[str, Any] = {}
        self._numbers: dict[tuple[int, str], Any] = {}
        self._score: Any = None

    def with_derivative(self) -> Emission:
        self.derivative = derivative(self.mod.spec)
        return self

    def forward(self, graph: Any, score: Any) -> Any:
        """The callback ``score_mod``."""
        spec = self.derivative.forward if self.derivative else self.mod.spec
        self._score = score
        self._tensors = {spec.inputs[0]: score, **self._operands}
        self._add(graph, spec, "score_mod")
        return self._tensors[self.mod.spec.outputs[0]]

    def backward(self, graph: Any, gradient: Any) -> Any:
        """The callback ``score_mod_bprop``, after the other."""
        found = self.derivative
        assert found is not None
        if found.is_zero:
            return graph.mul(a=gradient, b=self._number(graph, 0.0))
        if found.backward is None:
            return gradient
        ours = {name: self._tensors[of] for name, of in found.values}
        self._tensors = {found.gradient: gradient, **ours}
        self._add(graph, found.backward, "score_mod_bprop")
        return self._tensors[found.result]

    def _add(self, graph: Any, spec: GraphSpec, title: str) -> None:
        selecting = self._selecting(spec)
        for call in spec.calls:
            ((_, name),) = call.outputs
            common = {"name": f"{title}::{call.name}"}
            if isinstance(call.node, GenIndex):
                self._tensors[name] = self._index(graph, call.node.axis, **common)
                continue
            made = self._made(graph, spec, call, common)
            kind = _kinds().BOOLEAN if name in selecting else _kinds().FLOAT
            self._tensors[name] = made.set_data_type(kind)

    def _made(self, graph: Any, spec: GraphSpec, call: Call, common: dict[str, Any]) -> Any:
        node, common = call.node, {**common, "compute_data_type": _kinds().FLOAT}
        values = {port: spec.tensor(name).value for port, name in call.inputs}
        given = {
            port: self._tensors[name] if values[port] is None else values[port]
            for port, name in call.inputs
        }
        first, *others = given
        if values[first] is not None:
            (second,) = others if len(others) == 1 else [""]
            if node.method in _SWAPPED and values[second] is None:
                swapped = getattr(graph, _SWAPPED[node.method])
                number = self._number(graph, values[first])
                return swapped(given[second], number, **common)
            if node.method == "sub" and values[second] is None:
                negative = graph.neg(given[second], compute_data_type=_kinds().FLOAT)
                negative.set_data_type(_kinds().FLOAT)
                return graph.add(negative, self._number(graph, values[first]), **common)
            given[first] = self._everywhere(graph, values[first])
        for port in others:
            if values[port] is not None:
                given[port] = self._number(graph, values[port])
        (made,) = node.emit(graph, given, common)
        return made

    def _selecting(self, spec: GraphSpec) -> set[str]:
        """Comparisons that are read as masks of selections only, here and in the derivative."""
        graphs = [spec]
        found = self.derivative
        renamed: dict[str, str] = {}
        if found is not None and found.backward is not None:
            graphs = [found.forward, found.backward]
            renamed = dict(found.values)
        others = {self.mod.spec.outputs[0]}
        for graph in graphs:
            for call in graph.calls:
                for port, name in call.inputs:
                    if port != "mask":
                        others.add(renamed.get(name, name) if graph is not graphs[0] else name)
        own = spec is graphs[0]
        return {
            name
            for call in spec.calls
            if call.node.method.startswith("cmp_")
            for _, name in call.outputs
            if name not in others or (not own and name not in spec.outputs)
        }

    def _index(self, graph: Any, axis: int, **common: Any) -> Any:
        made = graph.gen_index(self._score, axis=axis, compute_data_type=_kinds().INT32, **common)
        return made.set_data_type(_kinds().INT32)

    def _everywhere(self, graph: Any, value: float) -> Any:
        """A number as a tensor of the scores' shape."""
        common = {"compute_data_type": _kinds().FLOAT}
        nothing = graph.mul(self._index(graph, 3), self._number(graph, 0.0), **common)
        nothing.set_data_type(_kinds().FLOAT)
        made = graph.add(nothing, self._number(graph, value), **common)
        return made.set_data_type(_kinds().FLOAT)

    def _number(self, graph: Any, value: float) -> Any:
        import cudnn

        # The frontend takes a number that float32 does not hold for one of float64.
        value = float(np.float32(value))
        key = id(graph), value.hex()
        if key not in self._numbers:
            # A parameter; older versions of cuDNN have no constants.
            kind = cudnn._pybind_module.scalar_type.RUNTIME_PARAM
            self._numbers[key] = graph.tensor_scalar(value, kind)
        return self._numbers[key]


def _kinds() -> Any:
    import cudnn

    return cudnn.data_type
