"""The tangent of attention, given its result and statistic; its transpose is cuDNN's backward."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

from .._core.graph.by_reference import Tangent, Transposed, derived_ports
from .._core.graph.dims import Dims, Shape
from .._core.graph.node import Node, frozen
from .attention import Sdpa
from .attention_arranged import Arranged
from .attention_extras import sink_gradient
from .score_mod import is_operand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation

_GRADIENTS = {
    "q": "dQ", "k": "dK", "v": "dV", "qkv": "dQKV", "bias": "dBias", "sink_token": "dSink_token",
}  # fmt: skip
_LARGEST = 3e38  # of float32, nearly


@frozen
class SinkGradient(Node):
    """dSink_token of sdpa_backward, summed by XLA in a fixed order."""

    method = "sdpa_sink_gradient"
    leftover = True
    ports = derived_ports(("o", "dO", "stats", "sink_token"), ("dSink_token",))
    requires = "XLA sums the gradient of sinks: cuDNN's sum has no fixed order, and no padding"

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"dSink_token": (inputs["sink_token"].shape, "float32")}

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (sink_gradient(*(arrays[port] for port in self.ports.input_names)),)

    def linear_in(self, port: str) -> bool:
        return port == "dO"


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
        assert isinstance(self.base, (Sdpa, Arranged))
        # Padding has a statistic of -inf, which cuDNN's sum over all queries does not skip; with
        # dropout its sum is wrong.
        drawn = "seed" in inputs  # the dropout mask is then drawn again
        apart = g.options.deterministic or drawn or "seq_len_q" in inputs
        node = self.base.backward({*linear} - ({"sink_token"} if apart else set()))
        inner = [port for port in self.inner if port != "dropout_mask" or not drawn]
        values = {port: inputs[port] for port in inner}
        values |= {"o": inputs["O"], "stats": inputs["Stats"], "dO": cotangents[out]}
        if self.base.score_mod is not None and self.base.score_mod.hides:
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


def _finite(g: Derivation, stats: GraphTensor) -> GraphTensor:
    """The statistic, made so large for a query that sees no key that all its weights are 0: with
    -inf cuDNN's backward computes NaN. NaN stays NaN."""
    return g.binary_select(stats, _LARGEST, g.logical_not(g.cmp_le(stats, -_LARGEST)))
