"""The common base of fp8 attention and its backward pass: attributes, shapes, scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .._core.errors import GraphTypeError
from .._core.graph.dims import Shape
from .._core.graph.dtypes import FP8
from .._core.graph.node import NUMBERS_ONLY, Node, frozen
from .._core.reasons import Reason
from .attention_base import (
    BOTTOM_RIGHT,
    LENGTHS,
    TOP_LEFT,
    check_shapes,
    checked_band,
    read_again,
    structure,
)
from .attention_reference import Band

if TYPE_CHECKING:
    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import GraphSpec, Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation

TILE = 128
"""Queries and keys per tile; cuDNN's backward pass is correct only for whole tiles."""


@frozen
class Scaled(Node):
    """Attention whose operands have scales. Subclasses state the fields ``bounds``, whose names
    differ between pygraph's methods, and the ports that are fp8 and float32."""

    anchor = True
    product = True
    keeps_dtypes = True
    row_major = True
    apart = True
    writes_all = True
    broadcasts_around = NUMBERS_ONLY
    dtypes = FP8
    selecting = LENGTHS[:1]
    of_all_examples = (
        "Amax_S", "Amax_O", "amax_dQ", "amax_dK", "amax_dV", "amax_dP",
    )  # fmt: skip
    bounds: ClassVar[tuple[str, str]] = ("left_bound", "right_bound")
    others: ClassVar[Mapping[str, str]] = {"stats": "float32"}
    """Ports that are neither fp8 nor scales, with their dtypes."""

    attn_scale: float = 1.0
    diagonal_alignment: str = TOP_LEFT

    @classmethod
    def create(cls, **attributes: Any) -> Node:
        return super().create(**checked_band(attributes, cls.bounds))

    @property
    def band(self) -> Band:
        left, right = (getattr(self, bound) for bound in self.bounds)
        return Band(left, right, self.diagonal_alignment == BOTTOM_RIGHT)

    def factor_shape(self, port: str, inputs: Mapping[str, Tensor]) -> Shape:
        """The shape of a scale or descale."""
        return (1, 1, 1, 1)

    def factor_dtype(self) -> str:
        return "float32"

    def checked(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError or GraphTypeError if shapes or dtypes do not fit."""
        lengths = dict.fromkeys(LENGTHS, "int32")
        factors = [port for port in inputs if port.startswith(("scale_", "descale_"))]
        wanted = {**lengths, **self.others, **dict.fromkeys(factors, self.factor_dtype())}
        for port, tensor in inputs.items():
            allowed = (wanted[port],) if port in wanted else self.dtypes
            if tensor.dtype not in allowed:
                raise GraphTypeError(
                    f"{port!r} has the wrong dtype",
                    expected=" or ".join(allowed),
                    got=f"{tensor.dtype}{list(tensor.shape)}",
                )
        self.ports.match({port: tensor.shape for port, tensor in inputs.items()})
        if self.compute_data_type != "float32":
            raise GraphTypeError(
                f"{self.method} does not support compute_data_type {self.compute_data_type}",
                expected="float32",
                got=self.compute_data_type,
            )
        check_shapes(inputs, {port: self.factor_shape(port, inputs) for port in factors})

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        kinds = {tensors[port].dtype for port in ("q", "k", "v")}
        if len(kinds) > 1:
            return Reason(
                f"cuDNN's fp8 attention requires q, k and v of one dtype, not {', '.join(kinds)}"
            )
        if any(t.value is not None for t in tensors.values()):
            return Reason(
                "cuDNN's fp8 attention reads scales from device memory: pass them as arrays"
            )
        return read_again(self.results, tensors, graph)

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        return self.band.flops(shapes["q"], shapes["v"], "dO" in shapes)

    def folds(self, batched: frozenset[str], tensors: Tensors) -> Iterable[dict[str, int]]:
        """Into the batch, if all batch elements share the scales."""
        common = {*self.of_all_examples, *filter(self.is_common, tensors)}
        if not batched & common:
            yield dict.fromkeys({*tensors} - common, 0)

    def is_common(self, port: str) -> bool:
        """Whether all batch elements share an operand."""
        return port.startswith(("scale_", "descale_"))

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        from .attention_fp8_tangent import WideTangent

        node = WideTangent(self, tuple(tangents), tuple(outputs), tuple(inputs))
        along = {node.given[port]: tangent for port, tangent in tangents.items()}
        return dict(zip(node.outs, g.apply(node, **inputs, **along), strict=True))

    def keywords(self) -> dict[str, Any]:
        attributes = super().keywords()
        if self.band == Band(bottom_right=self.band.bottom_right):
            del attributes["diagonal_alignment"]
        return attributes

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        keywords = structure(self.keywords(), tensors)
        made = getattr(pygraph, self.method)(**tensors, **keywords, **common)
        return tuple(tensor for tensor in made if tensor is not None)
