"""Base classes of all normalizations: shapes, references, and the tangent from their statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.by_reference import Derivative, Transposed, moving
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FLOATS, FP8, arithmetic, wide_dtype
from ..._core.graph.node import Algebra, Node, check_ports, choice, frozen, matched
from ..._core.graph.planned import NUMBERS_ONLY, About, Anchor, Work
from ..._core.graph.spec import Call
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, Handles, Tensor, Tensors, Values
from .extents import Extent

TRAINING, INFERENCE = "TRAINING", "INFERENCE"
PHASES = (TRAINING, INFERENCE)
Moments = Callable[[jax.Array, tuple[int, ...]], tuple[jax.Array, jax.Array]]
"""Mean and variance of an array over these axes."""
STATISTICS = ("mean", "inv_var")
BACKWARD_PORTS = Dims.parse(
    "grad: *x, input: *x, scale: *s, mean: *m, inv_variance: *m -> DX: *x, DScale: *s, DBias: *s"
)

ANCHOR = Anchor(writes_all=True, broadcasts=NUMBERS_ONLY)
"""Of all normalizations."""


class Normalizing(Node):
    """Shapes of a normalization and its backward."""

    extent: ClassVar[Extent]
    anchor = ANCHOR
    dtypes = FLOATS
    computed: ClassVar[tuple[str, ...]] = ()
    """The operands that any operation in the same plan may compute."""

    def checked(self, inputs: Mapping[str, Tensor]) -> tuple[Shape, Shape]:
        """The shapes of input and statistics; GraphError if the operands do not fit."""
        matched(self, inputs)
        shape, scale = inputs["input"].shape, inputs["scale"].shape
        if len(scale) != len(shape) or not self.extent.fits(shape, scale):
            raise GraphError(
                "'scale' does not fit 'input'",
                expected=f"a scale of shape {self.extent.scales(shape)}",
                got=f"scale of shape {list(scale)}, input of shape {list(shape)}",
                why="a graph normalizes the dimensions that the scale has",
                fix="jc.ops functions take any axis, for example jc.ops.layer_norm(x, axis=-1)",
            )
        axes = self.extent.reduced(shape, scale)
        statistics = tuple(1 if i in axes else size for i, size in enumerate(shape))
        wanted = {
            "bias": scale,
            "grad": shape,
            **dict.fromkeys(("mean", "inv_variance", "inv_var"), statistics),
            **dict.fromkeys(("epsilon", "momentum"), (1,) * len(shape)),
            **dict.fromkeys(("in_running_mean", "in_running_var"), scale),
        }
        check_ports(inputs, wanted, sources=("input", "scale"))
        return shape, statistics

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        arrays = [p for p in ("epsilon", "momentum") if p in tensors and tensors[p].value is None]
        if arrays:
            return Reason(
                f"{' and '.join(arrays)} is computed on the device, but cuDNN needs the value on "
                "the host: pass a Python scalar"
            )
        for port in ("mean", "inv_var", "inv_variance"):
            if port in tensors and tensors[port].dtype != "float32":
                return Reason(
                    f"cuDNN reads and writes its {port} in float32, not {tensors[port].dtype}"
                )
        shape, scale = tensors["input"].shape, tensors["scale"].shape
        axes = self.extent.reduced(shape, scale)
        if math.prod(shape[axis] for axis in axes) == 1:
            return Reason("it normalizes over a single element")
        return self._wrong_in_plan(tensors, graph)

    def _wrong_in_plan(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        """The part of the graph that cuDNN accepts and then computes wrongly.

        Measured on an H200 with cuDNN 9.19: if an operand of a backward, or a scale other than
        1 + scale, is computed in the plan, cuDNN reads the operands of that computation instead, or
        nothing; one tensor at two ports fails with CUDNN_STATUS_BAD_PARAM at execution.
        """
        made = {name: call for call in graph.calls for _, name in call.outputs}
        given = {port: tensors[port].name for port in self.ports.input_names if port in tensors}
        for port, name in given.items():
            maker = made.get(name)
            free = port in self.computed or (port == "scale" and maker and _adds(maker, graph))
            if maker and not free:
                return Reason(f"{maker.name} computes its {port}")
            if tensors[port].value is None and [*given.values()].count(name) > 1:
                return Reason(
                    f"one tensor is its {' and '.join(p for p in given if given[p] == name)}"
                )
        return None

    def work(self, tensors: Tensors) -> Work:
        return Work(8 * math.prod(tensors["input"].shape), self.method)


class Normalization(Normalizing):
    """Forward: ``Y`` and the statistics."""

    backward: ClassVar[type[NormalizationBackward]]
    algebra = Algebra(smooth=True)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        shape, statistics = self.checked(inputs)
        return {
            port: (shape, inputs["input"].dtype) if port == "Y" else (statistics, "float32")
            for port in self.results
        }

    def reference(
        self,
        input: jax.Array,
        scale: jax.Array,
        epsilon: jax.Array,
        bias: jax.Array | None = None,
        moments: Moments | None = None,
    ) -> tuple[jax.Array, ...]:
        axes = self.extent.reduced(input.shape, scale.shape)
        mean, variance = (moments or self.extent.moments)(input, axes)
        inv_var = jax.lax.rsqrt(variance + epsilon)
        y = normalized(input, mean, inv_var) * scale
        y = y if bias is None else y + bias
        found = {"Y": y, "mean": mean, "inv_var": inv_var}
        return tuple(found[port] for port in self.results)

    def xla(self, input: jax.Array, **others: jax.Array) -> tuple[jax.Array, ...] | None:
        axes = self.extent.reduced(input.shape, others["scale"].shape)
        size = math.prod(input.shape[axis] for axis in axes)
        kept = len(self.results) > 1
        if input.dtype.itemsize > 2 or not self.extent.favours(size, kept):
            return None
        arrays = {"input": input, **others}
        kind = arithmetic(self.compute_data_type)
        wide: Any = {port: x.astype(kind) for port, x in arrays.items()}
        return self.reference(**wide, moments=self.extent.at_once)

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        if "inv_var" not in outputs or not {*tangents} <= {"input", "scale", "bias"}:
            return super().jvp(g, tangents, inputs, outputs)
        shape = inputs["input"].shape
        axes = self.extent.reduced(shape, inputs["scale"].shape)
        if self.extent.centred and math.prod(shape[axis] for axis in axes) == 1:
            # The distance from the mean is exactly 0; recomputed from a rounded input it is not.
            moved = {"Y": "bias", "mean": "input"}
            return {out: tangents[port] for out, port in moved.items() if port in tangents}

        node = NormalizationTangent(self, tuple(tangents), tuple(outputs))
        values = {port: inputs[port] for port in ("input", "scale")}
        values |= {port: outputs[port] for port in STATISTICS if port in outputs}
        along = {node.given[port]: tangent for port, tangent in tangents.items()}
        return dict(zip(node.outs, g.apply(node, **values, **along), strict=True))


@frozen
class Phased(Normalization):
    """A normalization that returns its statistics in training only."""

    norm_forward_phase: str = choice(PHASES, default=TRAINING)

    @property
    def results(self) -> tuple[str, ...]:
        training = self.norm_forward_phase == TRAINING
        return self.ports.output_names if training else self.ports.output_names[:1]

    def without(self, results: Collection[str]) -> Node:
        if {*results} >= {*self.ports.output_names[1:]}:
            return dataclasses.replace(self, norm_forward_phase=INFERENCE)
        return self

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        import cudnn

        phase = getattr(cudnn.norm_forward_phase, self.norm_forward_phase)
        return super().emit(pygraph, {"norm_forward_phase": phase, **tensors}, common)

    def keywords(self) -> dict[str, Any]:
        return {}

    def work(self, tensors: Tensors) -> Work:
        work, kept = super().work(tensors), self.norm_forward_phase == TRAINING
        return work if kept else work._replace(pattern=f"{work.pattern} inference")


class NormalizationBackward(Normalizing):
    """Gradients of a normalization with respect to input, scale and bias."""

    about = About(rounding="sums in float32")

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        shape, _ = self.checked(inputs)
        scale = inputs["scale"]
        return {
            port: (shape, inputs["input"].dtype) if port == "DX" else (scale.shape, scale.dtype)
            for port in self.results
        }

    def reference(
        self,
        grad: jax.Array,
        input: jax.Array,
        scale: jax.Array,
        inv_variance: jax.Array,
        mean: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        axes = self.extent.reduced(input.shape, scale.shape)
        shared = tuple(axis for axis, size in enumerate(scale.shape) if size == 1)
        xhat = normalized(input, mean, inv_variance)
        if self.extent.centred and {*axes} <= {*shared}:  # DX needs parts of the same sums
            count = max(math.prod(grad.shape[axis] for axis in axes), 1)
            along = jnp.sum(grad * xhat, axis=axes, keepdims=True)
            each = jnp.sum(grad, axis=axes, keepdims=True)
            dx = inv_variance * scale * (grad - each / count - xhat * (along / count))
            further = tuple(axis for axis in shared if axis not in axes)
            dscale, dbias = (jnp.sum(x, axis=further, keepdims=True) for x in (along, each))
        else:
            dx = inv_variance * projected(grad * scale, xhat, axes, self.extent.centred)
            dscale = jnp.sum(grad * xhat, axis=shared, keepdims=True)
            dbias = jnp.sum(grad, axis=shared, keepdims=True)
        found = {"DX": dx, "DScale": dscale, "DBias": dbias}
        return tuple(found[port] for port in self.results)

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {"grad"}

    def _wrong_in_plan(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        for call in graph.calls:
            if tensors["DX"].name in (name for _, name in call.inputs):
                return Reason(f"{call.name} reads its DX")
        return super()._wrong_in_plan(tensors, graph)


def _adds(call: Call, graph: GraphSpec) -> bool:
    """Whether a call adds a scalar to an operand of the graph, as 1 + scale does."""
    given = [graph.tensor(name) for _, name in call.inputs]
    arrays = [tensor for tensor in given if tensor.value is None]
    return call.node.method == "add" and len(arrays) == 1 and arrays[0].name in graph.inputs


def normalized(x: jax.Array, mean: jax.Array | None, inv_var: jax.Array) -> jax.Array:
    return (x if mean is None else x - mean) * inv_var


def projected(slope: jax.Array, xhat: jax.Array, axes: tuple[int, ...], centred: bool) -> jax.Array:
    """``slope`` without its components along the row's mean (if ``centred``) and along xhat."""
    along = jnp.mean(slope * xhat, axis=axes, keepdims=True) * xhat
    return slope - along - (jnp.mean(slope, axis=axes, keepdims=True) if centred else 0)


@frozen
class NormalizationTangent(Derivative):
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
    ) -> Values:
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
