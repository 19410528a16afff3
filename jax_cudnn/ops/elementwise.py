"""What pointwise operations share, and how a function becomes one.

Most of cuDNN's pointwise modes have no attributes: such an operation is written as the function
that it computes, under :func:`elementwise`. Those with attributes are subclasses of
:class:`Pointwise`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import jax

from .._core.builder import register
from .._core.dims import Shape
from .._core.dtypes import FLOATS, FP8, is_floating
from .._core.errors import GraphError
from .._core.node import Example, Node

if TYPE_CHECKING:
    from .._core.spec import GraphSpec, Tensor

IMAGES, ROWS, ROW = (8, 64, 28, 28), (1, 128, 96), (1, 1, 96)


@dataclass(frozen=True)
class Pointwise(Node):
    """An operation on each element by itself; dimensions of size 1 broadcast.

    Computes in float32. The result has the promoted dtype of the operands, unless ``result`` says
    otherwise.
    """

    dtypes = (*FLOATS, *FP8, "int8", "uint8", "int32")
    result: ClassVar[str] = ""
    """"bool"; "real" for functions whose values are no integers: integers give float32."""
    shaped: ClassVar[str] = ""
    """The port whose shape the result has; any of the ports where it is empty."""

    alike: ClassVar[bool] = False
    """Whether cuDNN computes it rightly for operands of one shape only."""

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        # Measured on an H200 with cuDNN 9.19: the backward operations alone in a graph read an
        # operand that broadcasts out of bounds.
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
        if self.shaped and inputs[self.shaped].shape != shape:
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
    jax_names: tuple[str, ...] = (),
    rounding: str = "",
    examples: tuple[Example, ...] | None = None,
) -> Callable[[Callable[..., jax.Array]], type[Pointwise]]:
    """Decorator: a function of arrays becomes the registered node that computes it.

    The function's name is pygraph's method and its parameters are the ports; its body, applied to
    arrays in the compute type, is the node's reference.
    """

    def make(function: Callable[..., jax.Array]) -> type[Pointwise]:
        name, ports = function.__name__, tuple(inspect.signature(function).parameters)
        shapes = usual(*ports) if examples is None else examples
        members = {
            "__doc__": inspect.cleandoc(function.__doc__ or ""),
            "__module__": function.__module__,
            "__qualname__": name,  # pickle finds the class where the function stood
            "method": name,
            "dims": ", ".join(f"{port}: ..." for port in ports) + " -> OUT_0: ...",
            "reference": lambda self, **arrays: (function(**arrays),),
            "result": result,
            "shaped": shaped,
            "alike": alike,
            "dtypes": dtypes,
            "jax_names": jax_names,
            "rounding": rounding,
            "examples": shapes,
        }
        # A dataclass by inheritance: it has no fields of its own, and making 50 of them costs
        # 30 ms of import.
        return register(type(name, (Pointwise,), members))

    return make
