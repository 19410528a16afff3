"""The derivative of fp8 attention: a float32 tangent whose transpose is cuDNN's backward pass, with
gradients scaled by bounds of their magnitude."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from ..._core.graph.by_reference import Tangent, Transposed, derived_ports
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FP8
from ..._core.graph.node import EVEN_IF_STRICT, Node, frozen
from ..scaling import E4M3, E5M2, largest, quantizable, scale_of

if TYPE_CHECKING:
    from ..._core.graph.node import Tensors, Values
    from ..._core.graph.spec import Tensor
    from ..._core.graph.tensor import GraphTensor
    from ..._core.transforms.derivation import Derivation


@frozen
class WideTangent(Tangent):
    """Tangents from the reference, in float32 if the values are fp8, as tangents have no scale."""

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        found = super().infer({port: inputs[port] for port in self.inner})
        return {
            name: (shape, "float32" if dtype in FP8 else dtype)
            for name, (shape, dtype) in found.items()
        }


@frozen
class Quantize(Node):
    """``scale * input`` in a dtype, with saturation; infinite values become NaN in fp8. It runs in
    XLA, which fuses it with adjacent operations. The derivative ignores the rounding and treats the
    scale as constant."""

    method = "quantize"
    requires = "runs in XLA: not an operation of cuDNN graphs"
    xla_only = EVEN_IF_STRICT
    ports = derived_ports(("input", "scale"), ("OUT_0",))

    dtype: str

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"OUT_0": (inputs["input"].shape, self.dtype)}

    def reference(self, *, input: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        wide = quantizable(input) if self.dtype in FP8 else input.astype(jnp.float32)
        return (wide * scale.astype(jnp.float32),)

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {"input"}

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        if "input" not in tangents:
            return {}
        node = self if self.dtype not in FP8 else dataclasses.replace(self, dtype="float32")
        return {"OUT_0": g.apply(node, input=tangents["input"], scale=inputs["scale"])[0]}

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor]:
        node = dataclasses.replace(self, dtype=tensors["input"].dtype)
        return {"input": g.apply(node, input=cotangents["OUT_0"], scale=inputs["scale"])[0]}


@frozen
class Bounds(Node):
    """The largest absolute value and the largest norm of a token of ``scale * input``, apart from
    :class:`QuantizeGradient`: of shards they are largest values, too."""

    method = "bounds"
    requires = "runs in XLA: not an operation of cuDNN graphs"
    xla_only = EVEN_IF_STRICT
    ports = derived_ports(("input", "scale"), ("size", "norm"))

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return dict.fromkeys(self.results, ((1, 1, 1, 1), "float32"))

    def reference(self, *, input: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = input.astype(jnp.float32) * scale.astype(jnp.float32)
        norms = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1))
        return _largest(jnp.abs(x)), _largest(norms)

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        """They are constants, as the scales."""
        return {}


@frozen
class QuantizeGradient(Node):
    """The gradient with respect to O in fp8, and the scales for cuDNN's backward pass.

    ``scale_dO`` follows from the gradient's largest absolute value. The others follow from bounds,
    with the largest norms |dO| and |v| of a token: ``|dS| <= attn_scale |dO| |v| / 2``, as dP
    differs from its mean by at most (1 - P) times its range;
    ``|dQ| <= attn_scale |dO| |v| max(k)``; ``|dK| <= n max(dS) max(q)`` and ``|dV| <= n max(dO)``
    for n queries per head of k and v. A loose bound costs range, which float8_e5m2 has plenty of,
    and not precision.
    """

    method = "quantize_gradient"
    requires = "runs in XLA: not an operation of cuDNN graphs"
    xla_only = EVEN_IF_STRICT

    attn_scale: float
    queries: int
    finite: float
    """The largest number of the dtype of q and k."""
    dtype: str = E5M2
    results_ = (
        "dO", "descale_dO", "descale_o", "scale_dP", "descale_dP",
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

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        """Scales are constants: later operations divide by them."""
        if "grad" not in tangents:
            return {}
        to = Quantize("float32")
        along = g.apply(to, input=tangents["grad"], scale=inputs["scale_o"])[0]
        return {"dO": g.apply(Unscale(), input=along, descale=outputs["descale_dO"])[0]}


@frozen
class Unscale(Node):
    """``input / descale`` in float32."""

    method = "unscale"
    requires = "runs in XLA: not an operation of cuDNN graphs"
    xla_only = EVEN_IF_STRICT
    ports = derived_ports(("input", "descale"), ("OUT_0",))

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"OUT_0": (inputs["input"].shape, "float32")}

    def reference(self, *, input: jax.Array, descale: jax.Array) -> tuple[jax.Array, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (input.astype(jnp.float32) / descale.astype(jnp.float32),)

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {"input"}


def _largest(x: jax.Array) -> jax.Array:
    """The largest finite value: other elements become NaN in fp8, whatever the scale."""
    return jnp.max(jnp.where(jnp.isfinite(x), x, 0), initial=0).reshape(1, 1, 1, 1)


@frozen
class Fp8Tangent(WideTangent):
    """Tangents of O and Stats, in the units of the fp8 arrays; O and Stats are operands for the
    transpose."""

    read: ClassVar[tuple[str, str]] = ("O", "Stats")

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return derived_ports((*self.inner, *self.read, *self.given.values()), self.made.values())

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return super().reference(**{p: x for p, x in arrays.items() if p not in self.read})

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor]:
        out = self.made["O"]
        linear = {port: name for port, name in self.given.items() if name not in inputs}
        known = {*inputs} >= {*self.inner, *self.read}
        if out not in cotangents or not known or not {*linear} <= {*"qkv"}:
            return super().transpose(g, cotangents, inputs, tensors)
        passed = self._backward(g, cotangents[out], inputs, linear)
        others = tuple(name for name in cotangents if name != out)
        alone = {*others} == {self.made["Stats"]}  # which v does not move
        moved = {port: name for port, name in linear.items() if port != "v" or not alone}
        if others and moved:
            avals = tuple((n, tensors[n].shape, tensors[n].dtype) for n in moved.values())
            plain = dataclasses.replace(self, active=tuple(moved))
            through = Transposed(plain, avals, others, tuple(inputs))
            given = {through.given[name]: cotangents[name] for name in others}
            further = g.apply(through, **inputs, **given)
            for name, more in zip(moved.values(), further, strict=True):
                passed[name] = g.sum([passed[name], more])
        return passed

    def _backward(
        self, g: Derivation, grad: GraphTensor, inputs: Values, linear: Mapping[str, str]
    ) -> dict[str, GraphTensor]:
        base: Any = self.base
        node = base.backward()
        q, v = inputs["q"], inputs["v"]
        kind = str(v.dtype) if str(v.dtype) in FP8 else E4M3
        queries = q.shape[1] // v.shape[1] * q.shape[2]
        quantize = QuantizeGradient(base.attn_scale, queries, largest(kind))
        size, norm = g.apply(Bounds(), input=grad, scale=inputs["scale_o"])
        _, norm_v = g.apply(Bounds(), input=v, scale=inputs["descale_v"])
        taken = {name: inputs[name] for name in quantize.ports.input_names if name in inputs}
        results = g.apply(quantize, grad=grad, size=size, norm=norm, norm_v=norm_v, **taken)
        made = dict(zip(quantize.results, results, strict=True))
        g.ordered(made["dO"], inputs["O"]._state.order)
        values = {port: inputs[port] for port in self.inner if port != "scale_o"}
        values |= {port: x for port, x in made.items() if port in node.ports.input_names}
        values |= {"o": inputs["O"], "stats": inputs["Stats"]}
        found = dict(zip(node.results, g.apply(node, **values), strict=True))
        passed = {}
        for port, name in linear.items():
            x = g.fixed(found[f"d{port.upper()}"], quantize.dtype)
            g.ordered(x, inputs[port]._state.order)
            factor = made[f"unscale_{port}"]
            passed[name] = g.apply(Quantize("float32"), input=x, scale=factor)[0]
        return passed
