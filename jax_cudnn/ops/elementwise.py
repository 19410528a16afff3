"""What pointwise operations share, and how a function becomes one.

Most of cuDNN's pointwise modes have no attributes: such an operation is written as the function
that it computes, under :func:`elementwise`. Those with attributes are subclasses of
:class:`Pointwise`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from .._core.errors import GraphError
from .._core.graph.builder import register
from .._core.graph.dims import Shape
from .._core.graph.dtypes import FLOATS, FP8, is_floating
from .._core.graph.example import Example
from .._core.graph.node import Node
from .folds import anywhere

if TYPE_CHECKING:
    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import GraphSpec, Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation

Slope = Callable[..., Any] | None
"""A function of ``g``, ``t`` and of those operands (or ``OUT_0``) that its parameters name."""

IMAGES, ROWS, ROW = (8, 64, 28, 28), (1, 128, 96), (1, 1, 96)


class Pointwise(Node):
    """An operation on each element by itself; dimensions of size 1 broadcast.

    Computes in float32. The result has the promoted dtype of the operands, unless ``result`` says
    otherwise.
    """

    dtypes = (*FLOATS, *FP8, "int8", "uint8", "int32")
    recomputed = True
    result: ClassVar[str] = ""
    """"bool"; "real" for functions whose values are no integers: integers give float32."""
    shaped: ClassVar[str] = ""
    """The port whose shape the result has; any of the ports where it is empty."""

    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """By port, which values its slope reads; without those that have no slope that is constant
    where they are not read."""
    singular: ClassVar[bool] = False
    """Whether operands of 0 give no finite result."""
    alike: ClassVar[bool] = False
    """Whether cuDNN computes it rightly for operands of one shape only."""

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        # Measured on an H200 with cuDNN 9.19: the backward operations alone in a graph read an
        # operand that broadcasts out of bounds.
        if self.shaped and tensors[self.shaped].value is not None:
            return f"{self.shaped} is a number, and the result has the other operand's shape"
        shapes = {tensor.shape for tensor in tensors.values() if tensor.value is None}
        if not self.alike or len(shapes) == 1:
            return None
        return (
            f"its operands broadcast ({', '.join(str(list(s)) for s in sorted(shapes))}), and "
            "cuDNN computes it for operands of one shape only"
        )

    def pattern(self, tensors: Mapping[str, Tensor]) -> str:
        return ""

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        ((output, (shape, dtype)),) = super().infer(inputs).items()
        first = inputs.get(self.shaped)  # a number has every shape
        if first is not None and first.value is None and first.shape != shape:
            (other,) = (name for name in inputs if name != self.shaped)
            raise GraphError(
                f"{other} is larger than {self.shaped}",
                expected=f"each dimension of {other} to be 1 or that of {self.shaped} "
                f"{list(inputs[self.shaped].shape)}",
                got=f"{other} of shape {list(inputs[other].shape)}",
                fix="swap the arguments, or use add or mul, which broadcast both ways",
            )
        if self.result == "bool" or (self.result == "real" and not is_floating(dtype)):
            dtype = "bool" if self.result == "bool" else "float32"
        return {output: (shape, dtype)}

    def default_compute(self, inputs: Mapping[str, Tensor]) -> str:
        return "bool" if self.dtypes == ("bool",) else "float32"

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor | None:
        """``t`` times the derivative of the result by the operand at a port; None where that is 0.

        ``values`` holds the operands and the result (by its port), but the operand itself where
        the result is linear in it: there the derivative depends on the others only.
        NotImplemented leaves it to the reference.
        """
        return NotImplemented

    def is_linear(self, ports: Collection[str]) -> bool:
        (out,) = self.ports.output_names
        return all(port in self.reads and not {*ports, out} & {*self.reads[port]} for port in ports)

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        (out,) = outputs
        values = {**inputs, **outputs}
        terms = [self.slope(g, port, t, values) for port, t in tangents.items()]
        if any(term is NotImplemented for term in terms):
            return super().jvp(g, tangents, inputs, outputs)
        found = [term for term in terms if term is not None]
        return {out: g.sum(found)} if found else {}

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor]:
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

    def folds(self, batched: frozenset[str], tensors: Tensors) -> Iterable[dict[str, int]]:
        return anywhere(tensors, range(len(tensors[self.ports.output_names[0]].shape)))

    def broadcasts(self, port: str, axis: int) -> bool:
        return port != self.shaped


def usual(*ports: str, dtypes: tuple[str, str] = ("bfloat16", "float32")) -> tuple[Example, ...]:
    """Two examples for these ports: images of one shape, and rows with a row as the last."""
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
    singular: bool = False,
    jumps: bool = False,
    jax_names: tuple[str, ...] = (),
    rounding: str = "",
    slopes: Mapping[str, Slope] | None = None,
    examples: tuple[Example, ...] | None = None,
) -> Callable[[Callable[..., jax.Array]], type[Pointwise]]:
    """Decorator: a function of arrays becomes the registered node that computes it.

    The function's name is pygraph's method and its parameters are the ports; its body, applied to
    arrays in the compute type, is the node's reference. ``slopes`` gives, by port, what
    :meth:`Pointwise.slope` gives: a function of ``g``, ``t`` and the values it names, or None for
    no derivative; ports that it leaves out are left to the reference. What ``jumps``, and a
    comparison, is not computed again for a derivative: of a rounded residual it can be another.
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
            "__qualname__": name,  # pickle finds the class where the function stood
            "method": name,
            "dims": ", ".join(f"{port}: ..." for port in ports) + " -> OUT_0: ...",
            "slope": slope,
            "reads": {} if jumps else {p: _operands(f) for p, f in known.items() if f is not None},
            "reference": lambda self, **arrays: (function(**arrays),),
            "result": result,
            "shaped": shaped,
            "alike": alike,
            "chooses": chooses,
            "adds": adds,
            "singular": singular,
            "recomputed": not (jumps or result == "bool"),
            "dtypes": dtypes,
            "jax_names": jax_names,
            "rounding": rounding,
            "examples": shapes,
        }
        # A dataclass by inheritance: it has no fields of its own, and making 50 of them costs
        # 30 ms of import.
        return register(type(name, (Pointwise,), members))

    return make


def _operands(slope: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters after ``g`` and ``t``."""
    return _positional(slope)[2:]


def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters; inspect.signature takes a hundred times as long."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount]
