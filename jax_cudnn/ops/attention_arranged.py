"""Attention over other storage layouts than one dense array each for q, k and v."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.dims import Dims, Shape
from .._core.graph.dtypes import FLOATS
from .._core.graph.node import NUMBERS_ONLY, Node, OtherForm, frozen
from .._core.reasons import Reason
from .attention_base import LENGTHS, Attending, wrong_dtypes

if TYPE_CHECKING:
    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import GraphSpec, Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation


@frozen
class Arranged(Node):
    """``base`` with other ports: the same attention over another storage layout.

    Functions of ``jax_cudnn.ops`` create these nodes and check their integer operands, because a
    plan reads out of bounds if these are wrong. So ``g`` has no method for them.
    """

    base: Any  # Sdpa or SdpaBackward

    anchor = True
    product = True
    keeps_dtypes = True
    row_major = True
    writes_all = True
    broadcasts_around = NUMBERS_ONLY
    dtypes = FLOATS
    selecting = LENGTHS[:1]
    rounding = Attending.rounding

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "dims" in cls.__dict__:
            cls.ports = Dims.parse(cls.dims)

    @property
    def deterministic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.deterministic

    def settled(self) -> Node:
        return dataclasses.replace(self, base=self.base.settled())

    def instead(self) -> OtherForm | None:
        other = self.base.instead()
        return other and other._replace(node=dataclasses.replace(self, base=other.node))

    @property
    def results(self) -> tuple[str, ...]:
        return self.base.results

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, base=self.base.without(results))

    def linear_in(self, port: str) -> bool:
        return self.base.linear_in(port)

    @property
    def score_mod(self) -> Any:
        return self.base.score_mod

    def keywords(self) -> dict[str, Any]:
        return self.base.keywords() | {
            name: value for name, value in super().keywords().items() if name != "base"
        }

    def backward(self, wanted: Collection[str]) -> Node:
        """The node that computes the gradients with respect to these ports."""
        raise NotImplementedError

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if len(graph.calls) > 1:
            return Reason(f"{self.method} needs its own plan, because of its storage layout")
        return wrong_dtypes(self.results, tensors)

    def sizes(self, inputs: Mapping[str, Tensor]) -> dict[str, int | Shape]:
        for port in self.integers:
            if port in inputs and inputs[port].dtype != "int32":
                raise GraphTypeError(
                    f"{port!r} has the wrong dtype",
                    expected="int32",
                    got=f"{inputs[port].dtype}{list(inputs[port].shape)}",
                )
        return super().sizes({p: x for p, x in inputs.items() if p not in self.integers})

    def checked_shapes(self, inputs: Mapping[str, Tensor], wanted: Mapping[str, Shape]) -> None:
        """GraphError if operands do not have these shapes."""
        for port, shape in wanted.items():
            if port in inputs and inputs[port].shape != shape:
                raise GraphError(
                    f"{port!r} has the wrong shape",
                    expected=str(list(shape)),
                    got=str(list(inputs[port].shape)),
                )

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        if "Stats" not in outputs:
            return super().jvp(g, tangents, inputs, outputs)
        from .attention_tangent import AttentionTangent  # lazy, for a fast import

        node = AttentionTangent(self, tuple(tangents), tuple(outputs), tuple(inputs))
        along = {node.given[port]: tangent for port, tangent in tangents.items()}
        made = g.apply(node, **inputs, **outputs, **along)
        return dict(zip(node.outs, made, strict=True))

    def folds(self, batched: frozenset[str], tensors: Tensors) -> Iterable[Mapping[str, int]]:
        return ()
