"""The base class of pointwise operations, and a decorator that makes one from a function.

Most of cuDNN's pointwise modes have no attributes: such an operation is written as the function
it computes, decorated with :func:`elementwise`. Operations with attributes are subclasses of
:class:`Pointwise`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

import jax

from ..._core.errors import GraphError
from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FLOATS, FP8, is_floating
from ..._core.graph.node import Algebra, Fold, Node
from ..._core.graph.planned import About, Example, Work
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Tensor, Tensors, Values
from ..transformations import anywhere

Slope = Callable[..., Any] | None
"""A function of ``g``, ``t`` and the operands (or ``OUT_0``) named by its parameters."""

IMAGES, ROWS, ROW = (8, 64, 28, 28), (1, 128, 96), (1, 1, 96)


class Pointwise(Node):
    """An element-wise operation; dimensions of size 1 broadcast.

    Computes in float32. The result has the promoted dtype of the operands unless ``result`` says
    otherwise.
    """

    dtypes = (*FLOATS, *FP8, "int8", "uint8", "int32")
    algebra = Algebra(smooth=True, recomputed=True)
    result: ClassVar[str] = ""
    """"bool"; or "real" for functions with non-integer values: integers give float32."""
    shaped: ClassVar[str] = ""
    """The port that determines the result's shape; if empty, all ports broadcast."""

    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The values that the slope of each port reads. A port is missing if its slope is not constant
    in values outside this list."""
    alike: ClassVar[bool] = False
    """Whether cuDNN computes correct results only for operands of equal shapes."""
    singular: ClassVar[bool] = False
    """Whether a result is not finite for operands of 0."""

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: a backward operation that is alone in a graph reads a
        # broadcast operand out of bounds.
        if self.shaped and tensors[self.shaped].literal is not None:
            return Reason(f"{self.shaped} is a scalar, but it determines the shape of the result")
        shapes = {tensor.shape for tensor in tensors.values() if tensor.literal is None}
        if not self.alike or len(shapes) == 1:
            return None
        return Reason(
            f"its operands broadcast ({', '.join(str(list(s)) for s in sorted(shapes))}); "
            "cuDNN supports equal shapes only"
        )

    def work(self, tensors: Tensors) -> Work:
        return Work(math.prod(tensors[self.ports.outputs[0].name].shape))

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        ((output, (shape, dtype)),) = super().infer(inputs).items()
        first = inputs.get(self.shaped)  # a scalar fits every shape
        if first is not None and first.literal is None and first.shape != shape:
            (other,) = (name for name in inputs if name != self.shaped)
            raise GraphError(
                f"{other} is larger than {self.shaped}",
                expected=f"each dimension of {other} 1 or equal to that of {self.shaped} "
                f"{list(inputs[self.shaped].shape)}",
                got=f"{other} of shape {list(inputs[other].shape)}",
                fix="swap the arguments, or use add or mul, which broadcast both ways",
            )
        if self.result == "bool" or (self.result == "real" and not is_floating(dtype)):
            dtype = "bool" if self.result == "bool" else "float32"
        return {output: (shape, dtype)}

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor | None:
        """``t`` times the derivative of the result with respect to one operand; None if that is 0.

        ``values`` holds the operands and the result by port, without an operand in which the
        result is linear: its derivative depends on the remaining values only. NotImplemented
        leaves the derivative to the reference.
        """
        return NotImplemented

    def linear_in(self, ports: Collection[str]) -> bool:
        (out,) = self.ports.output_names
        return all(port in self.reads and not {*ports, out} & {*self.reads[port]} for port in ports)

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        (out,) = outputs
        values = {**inputs, **outputs}
        terms = [self.slope(g, port, t, values) for port, t in tangents.items()]
        if any(term is NotImplemented for term in terms):
            return super().jvp(g, tangents, inputs, outputs)
        found = [term for term in terms if term is not None]
        return {out: g.sum(found)} if found else {}

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        (cotangent,) = cotangents.values()
        passed = {}
        for port in self.ports.input_names:
            if port in inputs:
                continue
            term = self.slope(g, port, cotangent, inputs)
            if term is NotImplemented:
                return super().transpose(g, cotangents, inputs, tensors)
            if term is not None:
                passed[port] = g.reduced(term, tensors[port].shape)
        return passed

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        axes = range(len(tensors[self.ports.output_names[0]].shape))
        return anywhere(tensors, axes, broadcast={*tensors} - {self.shaped})


def usual(*ports: str, dtypes: tuple[str, str] = ("bfloat16", "float32")) -> tuple[Example, ...]:
    """Two examples for these ports: equal images, and rows with a broadcast row as the last."""
    first, second = dtypes
    last = [ROW] if len(ports) > 1 else [ROWS]
    shapes = [ROWS] * (len(ports) - 1) + last
    return (
        Example(dict.fromkeys(ports, IMAGES), first),
        Example(dict(zip(ports, shapes, strict=True)), second),
    )


def elementwise(
    *,
    result: str = "",
    shaped: str = "",
    dtypes: tuple[str, ...] = Pointwise.dtypes,
    alike: bool = False,
    chooses: bool = False,
    adds: bool = False,
    multiplies: bool = False,
    smooth: bool = True,
    singular: bool = False,
    jumps: bool = False,
    jax_names: tuple[str, ...] = (),
    rounding: str = "",
    slopes: Mapping[str, Slope] | None = None,
    examples: tuple[Example, ...] | None = None,
) -> Callable[[Callable[..., jax.Array]], type[Pointwise]]:
    """Decorator that registers a node for a function of arrays.

    The function's name is pygraph's method, its parameters are the ports, and its body, applied to
    arrays in the compute type, is the node's reference. ``slopes`` gives the result of
    :meth:`Pointwise.slope` per port: a function of ``g``, ``t`` and the values it names, or None
    for no derivative; the reference differentiates the remaining ports. A derivative does not
    recompute discontinuous functions (``jumps``) and comparisons: from a rounded residual they can
    differ.
    """

    def make(function: Callable[..., jax.Array]) -> type[Pointwise]:
        name, ports = function.__name__, _positional(function)
        shapes = usual(*ports) if examples is None else examples
        known = dict.fromkeys(ports) if result == "bool" or dtypes == ("bool",) else slopes or {}

        def slope(self: Pointwise, g: Derivation, port: str, t: GraphTensor, values: Values) -> Any:
            if port not in known:
                return NotImplemented
            function = known[port]
            if function is None:
                return None
            return function(g, t, *(values[name] for name in _operands(function)))

        members = {
            "__doc__": inspect.cleandoc(function.__doc__ or ""),
            "__module__": function.__module__,
            "__qualname__": name,  # pickle finds the class under the function's name
            "method": name,
            "ports": Dims.parse(", ".join(f"{port}: ..." for port in ports) + " -> OUT_0: ..."),
            "slope": slope,
            "reads": {} if jumps else {p: _operands(f) for p, f in known.items() if f is not None},
            "reference": lambda self, **arrays: (function(**arrays),),
            "result": result,
            "shaped": shaped,
            "alike": alike,
            "singular": singular,
            "algebra": Algebra(
                chooses=chooses,
                adds=adds,
                multiplies=multiplies,
                smooth=smooth and not (singular or jumps or result == "bool"),
                recomputed=not (jumps or result == "bool"),
            ),
            "dtypes": dtypes,
            "about": About(jax_names=jax_names, rounding=rounding),
            "examples": shapes,
        }
        # A dataclass by inheritance: it adds no fields, and decorating 50 classes would cost 30 ms
        # of import.
        return register(type(name, (Pointwise,), members))

    return make


def _operands(slope: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters after ``g`` and ``t``."""
    return _positional(slope)[2:]


def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters; inspect.signature is 100 times slower."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount]
