"""The gradients of fp8 attention by cuDNN's backward pass, scaled by bounds of their magnitude."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.by_reference import derived_ports
from ..._core.graph.dims import Shape
from ..._core.graph.dtypes import FP8
from ..._core.graph.node import Node, frozen
from ..._core.graph.planned import EVEN_IF_STRICT, About
from ..._core.rules import Derivation, GraphTensor, Tensor, Tensors, Values
from ..scaling import E4M3, E5M2, largest, quantizable, scale_of


class InXla(Node):
    """An operation that cuDNN graphs lack, besides those for which the user asked."""

    about = About(requires="runs in XLA: not an operation of cuDNN graphs")
    xla_only = EVEN_IF_STRICT


@frozen
class Quantize(InXla):
    """``scale * input`` in a dtype, with saturation; infinite values become NaN in fp8. It runs in
    XLA, which fuses it with adjacent operations. The derivative ignores the rounding and treats the
    scale as constant."""

    method = "quantize"
    ports = derived_ports(("input", "scale"), ("OUT_0",))

    dtype: str

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"OUT_0": (inputs["input"].shape, self.dtype)}

    def reference(self, *, input: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        wide = quantizable(input) if self.dtype in FP8 else input.astype(jnp.float32)
        return (wide * scale.astype(jnp.float32),)

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {"input"}

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        if "input" not in tangents:
            return {}
        node = self if self.dtype not in FP8 else dataclasses.replace(self, dtype="float32")
        return {"OUT_0": g.apply(node, input=tangents["input"], scale=inputs["scale"])[0]}

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        node = dataclasses.replace(self, dtype=tensors["input"].dtype)
        return {"input": g.apply(node, input=cotangents["OUT_0"], scale=inputs["scale"])[0]}


@frozen
class Bounds(InXla):
    """The largest absolute value and the largest norm of a token of ``scale * input``, apart from
    :class:`QuantizeGradient`: of shards they are largest values, too."""

    method = "bounds"
    ports = derived_ports(("input", "scale"), ("size", "norm"))

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return dict.fromkeys(self.results, ((1, 1, 1, 1), "float32"))

    def reference(self, *, input: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        x = input.astype(jnp.float32) * scale.astype(jnp.float32)
        norms = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1))
        return _largest(jnp.abs(x)), _largest(norms)

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        """They are constants, as the scales."""
        return {}


@frozen
class QuantizeGradient(InXla):
    """The gradient with respect to O in fp8, and the scales for cuDNN's backward pass.

    ``scale_dO`` follows from the gradient's largest absolute value. The others follow from bounds,
    with the largest norms |dO| and |v| of a token: ``|dS| <= attn_scale |dO| |v| / 2``, as dP
    differs from its mean by at most (1 - P) times its range;
    ``|dQ| <= attn_scale |dO| |v| max(k)``; ``|dK| <= n max(dS) max(q)`` and ``|dV| <= n max(dO)``
    for n queries per head of k and v. A loose bound costs range, which float8_e5m2 has plenty of,
    and not precision.
    """

    method = "quantize_gradient"

    attn_scale: float
    queries: int
    finite: float
    """The largest number of the dtype of q and k."""
    dtype: str = E5M2
    results_ = (
        "dO", "scale_dO", "descale_dO", "descale_o", "scale_dP", "descale_dP",
        "scale_dQ", "scale_dK", "scale_dV", "unscale_q", "unscale_k", "unscale_v",
    )  # fmt: skip
    ports = derived_ports(
        ("grad", "size", "norm", "norm_v", "descale_q", "descale_k", "descale_v", "scale_o"),
        results_,
    )

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        one = ((1, 1, 1, 1), "float32")
        return {"dO": (inputs["grad"].shape, self.dtype)} | dict.fromkeys(self.results_[1:], one)

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        x = {port: array.astype(jnp.float32) for port, array in arrays.items()}
        most = {port: self.finite * x[f"descale_{port}"] for port in ("q", "k")}
        slope = abs(self.attn_scale) * x["norm"] * x["norm_v"]
        bounds = {
            "dO": x["size"],
            "dP": slope / 2,
            "dQ": slope * most["k"],
            "dK": self.queries * slope / 2 * most["q"],
            "dV": self.queries * x["size"],
        }
        scales = {name: scale_of(bound, self.dtype) for name, bound in bounds.items()}
        found = {"dO": quantizable(x["grad"] * x["scale_o"]) * scales["dO"]}
        found |= {"descale_dO": 1 / scales["dO"], "descale_o": 1 / x["scale_o"]}
        found |= {f"scale_{name}": scale for name, scale in scales.items()}
        found["descale_dP"] = 1 / scales["dP"]
        for port in "qkv":  # back to the units of the fp8 operands
            found[f"unscale_{port}"] = x[f"descale_{port}"] / scales[f"d{port.upper()}"]
        return tuple(found[name] for name in self.results_)

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        """Scales are constants: later operations divide by them."""
        if "grad" not in tangents:
            return {}
        along = tangents["grad"]
        for scale in (inputs["scale_o"], outputs["scale_dO"]):
            (along,) = g.apply(Quantize("float32"), input=along, scale=scale)
        return {"dO": along}


def _largest(x: jax.Array) -> jax.Array:
    """The largest finite value: other elements become NaN in fp8, whatever the scale."""
    return jnp.max(jnp.where(jnp.isfinite(x), x, 0), initial=0).reshape(1, 1, 1, 1)


def gradients(
    base: Any,
    g: Derivation,
    operands: Values,
    results: Values,
    wanted: Collection[str],
    grad: GraphTensor,
) -> dict[str, GraphTensor]:
    """The gradients by cuDNN's backward pass in the units of the fp8 arrays, see
    :func:`.tangent.gradients`."""
    node = base.backward()
    q, v = operands["q"], operands["v"]
    kind = str(v.dtype) if str(v.dtype) in FP8 else E4M3
    queries = q.shape[1] // v.shape[1] * q.shape[2]
    quantize = QuantizeGradient(base.attn_scale, queries, largest(kind))
    size, norm = g.apply(Bounds(), input=grad, scale=operands["scale_o"])
    _, norm_v = g.apply(Bounds(), input=v, scale=operands["descale_v"])
    taken = {name: operands[name] for name in quantize.ports.input_names if name in operands}
    scaled = g.apply(quantize, grad=grad, size=size, norm=norm, norm_v=norm_v, **taken)
    made = dict(zip(quantize.results, scaled, strict=True))
    g.ordered(made["dO"], results["O"]._state.order)
    values = {port: x for port, x in operands.items() if port != "scale_o"}
    values |= {port: x for port, x in made.items() if port in node.ports.input_names}
    values |= {"o": results["O"], "stats": results["Stats"]}
    found = dict(zip(node.results, g.apply(node, **values), strict=True))
    for port in wanted:
        x = g.fixed(found[f"d{port.upper()}"], quantize.dtype)
        g.ordered(x, operands[port]._state.order)
        (found[f"d{port.upper()}"],) = g.apply(
            Quantize("float32"), input=x, scale=made[f"unscale_{port}"]
        )
    return found
