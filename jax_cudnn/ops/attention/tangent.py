"""The tangent of attention, and attention over other storages than dense arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from ..._core.errors import GraphError, GraphTypeError
from ..._core.graph.by_reference import Tangent, Transposed, derived_ports
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FLOATS
from ..._core.graph.node import XLA_ONLY, Engines, Fold, Node, frozen
from ..._core.reasons import Reason
from .base import LENGTHS, Attending, wrong_dtypes
from .extras import sink_gradient
from .score_mod.value import is_operand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..._core.graph.node import Tensors, Values
    from ..._core.graph.spec import GraphSpec, Tensor
    from ..._core.graph.tensor import GraphTensor
    from ..._core.transforms.derivation import Derivation

_GRADIENTS = {
    "q": "dQ", "k": "dK", "v": "dV", "qkv": "dQKV", "bias": "dBias", "sink_token": "dSink_token",
}  # fmt: skip
_LARGEST = 3e38  # of float32, nearly


@frozen
class SinkGradient(Node):
    """dSink_token of sdpa_backward, summed by XLA in a fixed order."""

    method = "sdpa_sink_gradient"
    xla_only = XLA_ONLY
    ports = derived_ports(("o", "dO", "stats", "sink_token"), ("dSink_token",))
    requires = "XLA sums the gradient of sinks: cuDNN's sum has no fixed order, and no padding"

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"dSink_token": (inputs["sink_token"].shape, "float32")}

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (sink_gradient(*(arrays[port] for port in self.ports.input_names)),)

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {"dO"}


@frozen
class AttentionTangent(Tangent):
    """Tangents of O and Stats, from the reference; O and Stats are operands for the transpose."""

    @property
    def _read(self) -> tuple[str, ...]:
        return (*self.inner, *self.outs)

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return derived_ports((*self._read, *self.given.values()), self.made.values())

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return super().infer({port: inputs[port] for port in self.inner})

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return super().reference(**{p: x for p, x in arrays.items() if p not in self.outs})

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor]:
        out = self.made["O"]
        linear = {port: name for port, name in self.given.items() if name not in inputs}
        of_mod = {port: name for port, name in linear.items() if is_operand(port)}
        if out not in cotangents or not {*inputs} >= {*self._read}:
            return super().transpose(g, cotangents, inputs, tensors)
        base: Any = self.base
        # Padding has a statistic of -inf, which cuDNN's sum over all queries does not skip; with
        # dropout its sum is wrong.
        drawn = "seed" in inputs  # the dropout mask is then drawn again
        apart = g.options.deterministic or drawn or "seq_len_q" in inputs
        node = base.backward({*linear} - ({"sink_token"} if apart else set()))
        inner = [port for port in self.inner if port != "dropout_mask" or not drawn]
        values = {port: inputs[port] for port in inner}
        values |= {"o": inputs["O"], "stats": inputs["Stats"], "dO": cotangents[out]}
        if base.score_mod is not None and base.score_mod.hides:
            values["stats"] = _finite(g, inputs["Stats"])
        made = g.apply(node, **values)
        found = dict(zip(node.results, made, strict=True))
        if "sink_token" in linear and apart:
            read = {port: values[port] for port in ("o", "dO", "stats", "sink_token")}
            (found["dSink_token"],) = g.apply(SinkGradient(), **read)
        passed = {name: found[_GRADIENTS[p]] for p, name in linear.items() if p not in of_mod}
        if of_mod:
            passed |= self._by_reference(g, of_mod, cotangents, inner, inputs, tensors)
        others = tuple(name for name in cotangents if name != out)
        if others:  # of the statistic, which does not depend on v
            moved = {p: name for p, name in linear.items() if p != "v" and p not in of_mod}
            of_others = {name: cotangents[name] for name in others}
            further = self._by_reference(g, moved, of_others, inner, inputs, tensors)
            for name, more in further.items():
                passed[name] = g.sum([passed[name], more])
        return passed

    def _by_reference(
        self,
        g: Derivation,
        moved: Mapping[str, str],
        cotangents: Values,
        inner: Sequence[str],
        inputs: Values,
        tensors: Tensors,
    ) -> dict[str, GraphTensor]:
        """The cotangents of the tangents ``moved``, from some cotangents, by the reference."""
        if not moved:
            return {}
        avals = tuple((n, tensors[n].shape, tensors[n].dtype) for n in moved.values())
        plain = dataclasses.replace(self, active=tuple(moved), inner=tuple(inner))
        read = {port: inputs[port] for port in plain._read}
        through = Transposed(plain, avals, tuple(cotangents), tuple(read))
        given = {through.given[name]: x for name, x in cotangents.items()}
        return dict(zip(moved.values(), g.apply(through, **read, **given), strict=True))


def tangents_of(
    attention: Node, g: Derivation, tangents: Values, inputs: Values, outputs: Values
) -> dict[str, GraphTensor]:
    """The tangents of an attention's O and Stats, see :meth:`Node.jvp`."""
    node = AttentionTangent(attention, tuple(tangents), tuple(outputs), tuple(inputs))
    along = {node.given[port]: tangent for port, tangent in tangents.items()}
    return dict(zip(node.outs, g.apply(node, **inputs, **outputs, **along), strict=True))


def _finite(g: Derivation, stats: GraphTensor) -> GraphTensor:
    """The statistic, made so large for a query that sees no key that all its weights are 0: with
    -inf cuDNN's backward computes NaN. NaN stays NaN."""
    return g.binary_select(stats, _LARGEST, g.logical_not(g.cmp_le(stats, -_LARGEST)))


@frozen
class Arranged(Node):
    """``base`` with other ports: the same attention over another storage layout.

    Functions of ``jax_cudnn.ops`` create these nodes and check their integer operands, because a
    plan reads out of bounds if these are wrong. So ``g`` has no method for them.
    """

    base: Any  # Sdpa or SdpaBackward

    anchor = Attending.anchor
    integers: ClassVar[tuple[str, ...]] = LENGTHS
    """int32 ports with the positions of elements in other operands."""
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

    def engines(self, tensors: Tensors, graph: GraphSpec) -> Engines:
        other = self.base.otherwise
        if other is not None:
            other = other._replace(node=dataclasses.replace(self, base=other.node))
        return Engines(otherwise=other)

    @property
    def results(self) -> tuple[str, ...]:
        return self.base.results

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, base=self.base.without(results))

    def linear_in(self, ports: Collection[str]) -> bool:
        return self.base.linear_in(ports)

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

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
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
        return tangents_of(self, g, tangents, inputs, outputs)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        return ()
