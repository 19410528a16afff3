"""The tangent of a normalization from its statistics; it transposes to cuDNN's backward."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._core.graph.by_reference import ByReference, Transposed, derived_ports, moving
from .._core.graph.dims import Dims, Shape
from .._core.graph.dtypes import FP8, wide_dtype
from .._core.graph.node import frozen
from .normalization_base import STATISTICS, Normalization, normalized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation


@frozen
class NormalizationTangent(ByReference):
    """Tangents of the results of a normalization, from its input, scale and statistics.

    With ``xhat = (input - mean) * inv_var`` and m the mean over the normalized dimensions:
    ``dY = scale * inv_var * (dx - m(dx) - xhat * m(dx * xhat)) + dscale * xhat + dbias``,
    ``dmean = m(dx)``, ``dinv_var = -inv_var**2 * m(dx * xhat)``. The transpose is cuDNN's backward.
    """

    active: tuple[str, ...]
    """Which of input, scale and bias have a tangent."""
    outs: tuple[str, ...]
    """The results of the normalization; the statistics are operands here."""

    kind = "jvp"

    @property
    def inner(self) -> tuple[str, ...]:
        return ("input", "scale", *(port for port in STATISTICS if port in self.outs))

    @property
    def given(self) -> dict[str, str]:
        """Port of the normalization -> the port with its tangent."""
        return moving(self.active, self.inner)

    @property
    def made(self) -> dict[str, str]:
        """Result of the normalization -> the result that is its tangent."""
        return moving(self.outs, (*self.inner, *self.given.values()))

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return derived_ports((*self.inner, *self.given.values()), self.made.values())

    def linear_in(self, port: str) -> bool:
        return port in self.given.values()

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        x, statistic = inputs["input"], inputs["inv_var"]
        found = {"Y": (x.shape, x.dtype)}
        return {
            name: found.get(port, (statistic.shape, "float32")) for port, name in self.made.items()
        }

    def reference(self, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        assert isinstance(self.base, Normalization)
        extent = self.base.extent
        kind = wide_dtype(*arrays.values())
        arrays = {port: x.astype(kind) for port, x in arrays.items()}
        x, scale, inv_var = (arrays[port] for port in ("input", "scale", "inv_var"))
        axes = extent.reduced(x.shape, scale.shape)
        xhat = normalized(x, arrays.get("mean"), inv_var)
        zero = jnp.zeros_like(inv_var)
        found = {"Y": jnp.zeros_like(x), "mean": zero, "inv_var": zero}
        if "input" in self.active:
            dx = arrays[self.given["input"]]
            slope = jnp.mean(dx * xhat, axis=axes, keepdims=True)
            found["mean"] = jnp.mean(dx, axis=axes, keepdims=True)
            found["inv_var"] = -jnp.square(inv_var) * slope
            dx = dx - found["mean"] if extent.centred else dx
            found["Y"] = scale * inv_var * (dx - xhat * slope)
        if "scale" in self.active:
            found["Y"] += arrays[self.given["scale"]] * xhat
        if "bias" in self.active:
            found["Y"] += arrays[self.given["bias"]]
        return tuple(found[port] for port in self.outs)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor]:
        y = self.made["Y"]
        linear = {port: name for port, name in self.given.items() if name not in inputs}
        if y not in cotangents or "input" not in linear or not {*inputs} >= {*self.inner}:
            return super().transpose(g, cotangents, inputs, tensors)
        assert isinstance(self.base, Normalization)
        node = self.base.backward(compute_data_type=self.base.compute_data_type)
        values = {
            port: inputs[{"inv_variance": "inv_var"}.get(port, port)]
            for port in node.ports.input_names
            if port != "grad"
        }
        grad = cotangents[y]
        if grad._state.dtype in FP8:  # unsupported; the input's dtype holds it exactly
            grad = g.rounded(grad, inputs["input"]._state.dtype)
        made = g.apply(node, grad=grad, **values)
        found = dict(zip(node.results, made, strict=True))
        sources = {"input": "DX", "scale": "DScale", "bias": "DBias"}
        passed = {name: found[sources[port]] for port, name in linear.items()}
        others = tuple(name for name in cotangents if name != y)
        if others:  # of the statistics, which depend on the input only
            x = linear["input"]
            aval = x, tensors[x].shape, tensors[x].dtype
            # A float32 DX excludes the faster engines for rows, and all engines for channels.
            passed[x] = g.rounded(passed[x], tensors[x].dtype, alone=True)
            fixed = dict(inputs)
            through = Transposed(
                dataclasses.replace(self, active=("input",)), (aval,), others, tuple(fixed)
            )
            given = {through.given[name]: cotangents[name] for name in others}
            passed[x] = g.sum([passed[x], *g.apply(through, **fixed, **given)])
        return passed
