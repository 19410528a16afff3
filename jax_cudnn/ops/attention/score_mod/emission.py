"""Passing a score_mod and its derivative to cuDNN."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._core.graph.dims import Shape
from ...._core.graph.spec import Call, GraphSpec, intern
from ...._core.reasons import Reason
from ...._core.transforms.linearize import TANGENT, linearize
from ...._core.transforms.transpose import COTANGENT, transpose
from .value import TILE, axis_of, takes_infinity

if TYPE_CHECKING:
    from .value import ScoreMod

_LARGEST = 3e38  # of float32, nearly
_COMPARED = {"cmp_le": [3, 2], "cmp_ge": [2, 3]}  # the index axes of causal masks
_SWAPPED = {method: method for method in ("add", "mul", "min", "max", "cmp_eq", "cmp_neq")}
_SWAPPED |= {"cmp_lt": "cmp_gt", "cmp_gt": "cmp_lt", "cmp_le": "cmp_ge", "cmp_ge": "cmp_le"}


@dataclass(frozen=True)
class Derivative:
    """The backward graph: ``backward`` reads ``values`` (its operand: the tensor of ``forward``)
    and the gradient of the result (its operand ``gradient``), and returns the gradient of the
    scores (its result ``result``). Without ``backward`` the gradient is passed through, or 0 if
    ``is_zero``.
    """

    forward: GraphSpec
    backward: GraphSpec | None = None
    values: tuple[tuple[str, str], ...] = ()
    gradient: str = ""
    result: str = ""
    is_zero: bool = False


@functools.lru_cache(maxsize=1024)
def derivative(spec: GraphSpec) -> Derivative:
    """The derivative of a score_mod with respect to the scores, from its nodes' derivatives."""
    linear = linearize(spec, frozenset({spec.inputs[0]}))
    tangent = linear.tangent
    (along,) = tangent.results
    if along is None:
        return Derivative(spec, is_zero=True)
    if tangent.spec is None:
        return Derivative(spec)
    sources = zip(tangent.spec.inputs, tangent.inputs, strict=True)
    own = {name: source.of for name, source in sources}
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
    """Adds a score_mod to a cudnn.pygraph, followed by its derivative.

    cuDNN's attention engines read a scalar only as the second operand, and booleans only as
    selectors: a comparison that selects is boolean, others are 1 or 0.

    They skip the hidden scores of causal attention only if the mask comes first. The function then
    gets -inf for hidden scores, and -inf is added to its results there; the derivative needs no
    mask, because it multiplies weights of 0.
    """

    def __init__(
        self, mod: ScoreMod, operands: Mapping[str, Any], found: Derivative | None = None
    ) -> None:
        self._mod, self._found, self._spec = mod, found, _emitted(mod)
        self._operands = {name: operands[port] for name, port in mod.named.items()}
        self._tensors: dict[str, Any] = {}
        self._numbers: dict[tuple[int, str], Any] = {}
        self._tensors_of: dict[tuple[int, str], Any] = {}  # scalars in the scores' shape
        self._known: dict[tuple[Any, ...], Any] = {}  # by node, kind and operands
        self._score: Any = None

    @classmethod
    def with_derivative(cls, mod: ScoreMod, operands: Mapping[str, Any]) -> Emission:
        return cls(mod, operands, derivative(_emitted(mod)))

    def forward(self, graph: Any, score: Any) -> Any:
        """The callback ``score_mod``."""
        spec, (result,), found = self._spec, self._spec.outputs, self._found
        read = {result, *_numbers_in(spec)}
        if found is not None:
            spec = found.forward
            behind = _numbers_in(found.backward) if found.backward else set()
            read = {result, *_numbers_in(spec), *(of for n, of in found.values if n in behind)}
        self._score = score
        seen = self._causal(graph) if self._mod.masks_first else score
        self._tensors = {spec.inputs[0]: seen, **self._operands}
        self._add(graph, spec, read, "score_mod")
        made = self._tensors[result]
        return self._hidden(graph, made, seen) if self._mod.masks_first else made

    def _causal(self, graph: Any) -> Any:
        """The scores, with -inf where the key comes after the query."""
        seen = _in_float(graph, "cmp_ge", self._index(graph, 2), self._index(graph, 3))
        seen.set_data_type(_kinds().BOOLEAN)
        made = graph.binary_select(self._score, self._number(graph, -math.inf), seen)
        return made.set_data_type(_kinds().FLOAT)

    def _hidden(self, graph: Any, made: Any, seen: Any) -> Any:
        """The modified scores, with -inf where the scores are -inf."""
        far = _in_float(graph, "add", seen, self._number(graph, _LARGEST))
        least = _in_float(graph, "min", far, self._number(graph, 0.0))
        return _in_float(graph, "add", made, least)

    def backward(self, graph: Any, gradient: Any) -> Any:
        """The callback ``score_mod_bprop``, called after ``score_mod``."""
        found = self._found
        assert found is not None
        if found.is_zero:
            return graph.mul(a=gradient, b=self._number(graph, 0.0))
        if found.backward is None:
            return gradient
        values = {name: self._tensors[of] for name, of in found.values}
        self._tensors = {found.gradient: gradient, **values}
        self._add(
            graph, found.backward, {found.result, *_numbers_in(found.backward)}, "score_mod_bprop"
        )
        return self._tensors[found.result]

    def _add(self, graph: Any, spec: GraphSpec, read: Collection[str], title: str) -> None:
        """Add all calls of a graph, except those added before, which cuDNN would compute again;
        comparisons in ``read`` are numeric."""
        for call in spec.calls:
            ((_, name),) = call.outputs
            title_of = f"{title}::{call.name}"
            if (axis := axis_of(call.node)) is not None:
                self._tensors[name] = self._index(graph, axis, name=title_of)
                continue
            selects = call.node.method.startswith("cmp_") and name not in read
            operands = (self._tensors.get(n, spec.tensor(n).literal) for _, n in call.inputs)
            key = repr(call.node), selects, *operands
            if key not in self._known:
                made = self._made(graph, spec, call, title_of)
                kind = _kinds().BOOLEAN if selects else _kinds().FLOAT
                self._known[key] = made.set_data_type(kind)
            self._tensors[name] = self._known[key]

    def _made(self, graph: Any, spec: GraphSpec, call: Call, title: str) -> Any:
        method = call.node.method
        leading = _leading_number(spec, call)
        common = {"name": title, "compute_data_type": _kinds().FLOAT}
        numbers = {p: v for p, n in call.inputs if (v := spec.tensor(n).value) is not None}
        given = {port: self._tensors.get(name) for port, name in call.inputs}
        first, *others = given
        given |= {port: self._number(graph, numbers[port]) for port in others if port in numbers}
        if first in numbers and leading is None:
            swapped, number = getattr(graph, _SWAPPED[method]), self._number(graph, numbers[first])
            return swapped(*(given[port] for port in others), number, **common)
        if leading is not None:
            given[first] = self._everywhere(graph, leading)
        (made,) = call.node.emit(graph, given, common)
        return made

    def _index(self, graph: Any, axis: int, **common: Any) -> Any:
        kind = _kinds().INT32
        made = graph.gen_index(self._score, axis=axis, compute_data_type=kind, **common)
        return made.set_data_type(kind)

    def _everywhere(self, graph: Any, value: float) -> Any:
        """A scalar as a tensor of the scores' shape."""
        key = id(graph), value.hex()
        if key not in self._tensors_of:
            zero = self._number(graph, 0.0)
            nothing = _in_float(graph, "mul", self._index(graph, 3), zero)
            self._tensors_of[key] = _in_float(graph, "add", nothing, self._number(graph, value))
        return self._tensors_of[key]

    def _number(self, graph: Any, value: float) -> Any:
        import cudnn

        # The frontend treats a value that float32 cannot represent as float64.
        value = float(np.float32(value))
        key = id(graph), value.hex()
        if key not in self._numbers:
            # A runtime parameter, because cuDNN before 9.22 has no constants.
            kind = cudnn._pybind_module.scalar_type.RUNTIME_PARAM
            self._numbers[key] = graph.tensor_scalar(value, kind)
        return self._numbers[key]


def reads_leading_numbers(mod: ScoreMod) -> bool:
    """Whether the derivative has operations on a scalar that cannot be their second operand."""
    behind = derivative(_emitted(mod)).backward
    return behind is not None and any(
        _leading_number(behind, call) is not None for call in behind.calls
    )


def _emitted(mod: ScoreMod) -> GraphSpec:
    """The graph that is added operation by operation."""
    inner = before_causal_mask(mod.spec) if mod.masks_first else None
    return inner or mod.spec


def _leading_number(spec: GraphSpec, call: Call) -> float | None:
    """The scalar that is a call's first operand and cannot be its second; else None."""
    (_, first), *others = call.inputs
    value = spec.tensor(first).value
    alone = all(spec.tensor(name).value is None for _, name in others)
    return None if alone and call.node.method in _SWAPPED else value


@functools.lru_cache(maxsize=1024)
def before_causal_mask(spec: GraphSpec) -> GraphSpec | None:
    """The graph without its last operation, if that is a causal mask and the rest is a function of
    the score alone; else None."""
    made = {name: call for call in spec.calls for _, name in call.outputs}
    last = made[spec.outputs[0]]
    if last.node.method != "binary_select" or len(spec.inputs) > 1:
        return None
    (_, changed), (_, hidden), (_, mask) = last.inputs
    if spec.tensor(hidden).value != -math.inf or changed not in {*made, *spec.inputs}:
        return None
    compares = made.get(mask)
    if compares is None or _COMPARED.get(compares.node.method) != [
        axis_of(made[name].node) if name in made else None for _, name in compares.inputs
    ]:
        return None
    needed, calls = {changed}, []
    for call in reversed(spec.calls):
        if {name for _, name in call.outputs} & needed:
            calls.insert(0, call)
            needed |= {name for _, name in call.inputs}
    if not calls or any(axis_of(call.node) is not None for call in calls):
        return None
    tensors = tuple(t for t in spec.tensors if t.name in needed)
    return intern(
        dataclasses.replace(spec, tensors=tensors, calls=tuple(calls), outputs=(changed,))
    )


def _numbers_in(spec: GraphSpec) -> set[str]:
    """The tensors that a graph reads other than as selectors."""
    return {name for call in spec.calls for port, name in call.inputs if port != "mask"}


def _kinds() -> Any:
    import cudnn

    return cudnn.data_type


def _in_float(graph: Any, method: str, *operands: Any) -> Any:
    """The result of an operation in float32."""
    kind = _kinds().FLOAT
    return getattr(graph, method)(*operands, compute_data_type=kind).set_data_type(kind)


def refused_backward(mod: ScoreMod, scores: Shape) -> Reason | None:
    """Why cuDNN does not run the derivative of a score_mod, or None."""
    if reads_leading_numbers(mod):
        return Reason(
            "cuDNN's backward is wrong if the derivative of score_mod has an operation with a "
            "scalar as its first operand: write jnp.where(seen, score, -jnp.inf), with the "
            "scalar last"
        )
    if not takes_infinity(mod, scores):
        return Reason(
            f"cuDNN's backward pads {scores[2]} queries and {scores[3]} keys to multiples of "
            f"{TILE} and calls score_mod with -inf there; this score_mod returns NaN or +inf "
            "for -inf, or its derivative is not finite there: pad queries and keys, and pass "
            "the lengths as query_seq_lengths and key_value_seq_lengths"
        )
    return None
