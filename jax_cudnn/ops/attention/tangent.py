"""The tangent of attention, of every dtype and storage. Its transpose is cuDNN's backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from ..._core.graph.by_reference import Tangent, Transposed, derived_ports
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FP8
from ..._core.graph.node import Node, frozen
from ..._core.graph.planned import XLA_ONLY, About
from ..._core.rules import Derivation, GraphTensor, Tensor, Tensors, Values
from .extras import sink_gradient
from .score_mod.value import is_operand

_GRADIENTS = {
    "q": "dQ", "k": "dK", "v": "dV", "qkv": "dQKV", "bias": "dBias", "sink_token": "dSink_token",
}  # fmt: skip
_LARGEST = 3e38  # of float32, nearly


def tangents_of(
    attention: Node, g: Derivation, tangents: Values, inputs: Values, outputs: Values
) -> dict[str, GraphTensor]:
    """The tangents of an attention's results, see :meth:`Node.jvp`."""
    node = SdpaTangent(attention, tuple(tangents), tuple(outputs), tuple(inputs))
    along = {node.given[port]: tangent for port, tangent in tangents.items()}
    read = {port: outputs[port] for port in node.read}
    return dict(zip(node.outs, g.apply(node, **inputs, **read, **along), strict=True))


@frozen
class SdpaTangent(Tangent):
    """Tangents of an attention's results from the reference, in float32 if the results are fp8, as
    tangents have no scale.

    If ``base`` has a method ``gradients``, which adds its backward node, and the statistic, O and
    Stats are operands for the transpose.
    """

    @property
    def read(self) -> tuple[str, ...]:
        return ("O", "Stats") if "Stats" in self.outs and hasattr(self.base, "gradients") else ()

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return derived_ports((*self.inner, *self.read, *self.given.values()), self.made.values())

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {
            name: (shape, "float32" if dtype in FP8 else dtype)
            for name, (shape, dtype) in super().infer(inputs).items()
        }

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return super().reference(**{p: x for p, x in arrays.items() if p not in self.read})

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        out = self.made.get("O")
        linear = {port: name for port, name in self.given.items() if name not in inputs}
        of_mod = {port: name for port, name in linear.items() if is_operand(port)}
        known = self.read and out in cotangents and {*inputs} >= {*self.inner, *self.read}
        if out is None or not known or linear.keys() - of_mod.keys() - _GRADIENTS.keys():
            return super().transpose(g, cotangents, inputs, tensors)
        # The dropout mask is drawn again from the seed.
        inner = [port for port in self.inner if port != "dropout_mask" or "seed" not in inputs]
        base: Any = self.base
        found = base.gradients(
            g, {port: inputs[port] for port in inner}, inputs, linear, cotangents[out]
        )
        passed = {name: found[_GRADIENTS[p]] for p, name in linear.items() if p not in of_mod}
        passed |= self._by_reference(g, of_mod, cotangents, inner, inputs, tensors)
        others = {name: x for name, x in cotangents.items() if name != out}
        alone = {*others} == {self.made["Stats"]}  # which does not depend on v
        moved = {
            p: name for p, name in linear.items() if p not in of_mod and not (p == "v" and alone)
        }
        for name, more in self._by_reference(g, moved, others, inner, inputs, tensors).items():
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
        if not moved or not cotangents:
            return {}
        avals = tuple((n, tensors[n].shape, tensors[n].dtype) for n in moved.values())
        plain = dataclasses.replace(self, active=tuple(moved), inner=tuple(inner))
        read = {port: inputs[port] for port in (*inner, *self.read)}
        through = Transposed(plain, avals, tuple(cotangents), tuple(read))
        given = {through.given[name]: x for name, x in cotangents.items()}
        return dict(zip(moved.values(), g.apply(through, **read, **given), strict=True))


# -- the gradients of attention in 16 bits or more -------------------------------------------------


@frozen
class SinkGradient(Node):
    """dSink_token of sdpa_backward, summed by XLA in a fixed order."""

    method = "sdpa_sink_gradient"
    xla_only = XLA_ONLY
    ports = derived_ports(("o", "dO", "stats", "sink_token"), ("dSink_token",))
    about = About(
        requires="XLA sums the gradient of sinks: cuDNN's sum has no fixed order, and no padding",
    )

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"dSink_token": (inputs["sink_token"].shape, "float32")}

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (sink_gradient(*(arrays[port] for port in self.ports.input_names)),)

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {"dO"}


def gradients(
    base: Any,
    g: Derivation,
    operands: Values,
    results: Values,
    wanted: Collection[str],
    grad: GraphTensor,
) -> dict[str, GraphTensor]:
    """The results of the backward node of ``base``, by port, for its operands, its results O and
    Stats, and the gradient with respect to O."""
    # Padding has a statistic of -inf, which cuDNN's sum over all queries does not skip; with
    # dropout its sum is wrong.
    by_reference = g.options.deterministic or "seed" in operands or "seq_len_q" in operands
    node = base.backward({*wanted} - ({"sink_token"} if by_reference else set()))
    values = {**operands, "o": results["O"], "stats": results["Stats"], "dO": grad}
    if base.score_mod is not None and base.score_mod.hides:
        values["stats"] = _finite(g, results["Stats"])
    found = dict(zip(node.results, g.apply(node, **values), strict=True))
    if "sink_token" in wanted and by_reference:
        read = {port: values[port] for port in ("o", "dO", "stats", "sink_token")}
        (found["dSink_token"],) = g.apply(SinkGradient(), **read)
    return found


def _finite(g: Derivation, stats: GraphTensor) -> GraphTensor:
    """The statistic, made so large for a query that sees no key that all its weights are 0: with
    -inf cuDNN's backward computes NaN. NaN stays NaN."""
    return g.binary_select(stats, _LARGEST, g.logical_not(g.cmp_le(stats, -_LARGEST)))
