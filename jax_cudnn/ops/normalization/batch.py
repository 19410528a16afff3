"""Batch normalization: statistics per channel, over the whole batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import jax
from jax.core import max_dim

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FLOATS, arithmetic
from ..._core.graph.node import Algebra, Fold, Node, check_ports
from ..._core.graph.planned import XLA_ONLY, About, Example
from ..._core.reasons import Kind, Reason
from ..._core.rules import Derivation, GraphSpec, Tensor, Tensors, Values
from .base import BACKWARD_PORTS, Moments, normalized
from .channels import (
    CHANNELS,
    IMAGES,
    OF_CHANNELS,
    ROUNDING,
    BackwardOfChannels,
    ForwardOfChannels,
)
from .extents import Spatial, backward_example

_MULTIPLE = 8


def _odd_channels(tensors: Mapping[str, Tensor]) -> Reason | None:
    channels = tensors["input"].shape[1]
    odd = Reason(f"{channels} channels, not a multiple of {_MULTIPLE}", Kind.SHAPE)
    return odd if channels % _MULTIPLE else None


@register
class BatchnormBackward(BackwardOfChannels):
    """Gradients of batchnorm.

    With ``xhat = (input - mean) * inv_variance``, ``s = grad * scale`` and m the mean over one
    channel of the batch: ``DX = inv_variance * (s - m(s) - xhat * m(s * xhat))``,
    ``DScale = sum(grad * xhat)`` and ``DBias = sum(grad)`` over all dimensions but the channels.

    Args:
        grad: gradient with respect to Y, (N, C, *spatial).
        input: as in the forward.
        scale: as in the forward.
        mean: result of the forward.
        inv_variance: inv_var of the forward.

    Returns: DX in the dtype of input; DScale and DBias in the dtype of scale.

    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR`` with
    ``CUDNN_BATCH_NORM``.
    """

    method = "batchnorm_backward"
    computed = ("grad",)
    anchor = OF_CHANNELS._replace(
        prologue="mul",  # with a mask, see masks.py
        returns_prologue=True,
        bit_masks=True,
    )
    ports = BACKWARD_PORTS
    about = BackwardOfChannels.about._replace(requires="channels a multiple of 8")
    extent = Spatial(batch=True)
    examples = (backward_example(IMAGES, CHANNELS, CHANNELS, wide=("scale",)),)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        for call in graph.calls:
            made = {name for _, name in call.outputs}
            dtypes = {graph.tensor(name).dtype for _, name in call.inputs}
            if tensors["grad"].name in made and "bool" not in dtypes:
                return Reason(f"{call.name} computes its grad and is not a mask")
        return super().support(tensors, graph) or _odd_channels(tensors)


@register
class Batchnorm(ForwardOfChannels):
    """Batch normalization in training: ``Y = (input - mean) * inv_var * scale + bias``.

    ``inv_var = (var + epsilon)**-0.5``; mean and (biased) variance are per channel, over the n
    elements of that channel in the batch. The running statistics are updated:
    ``next_running_mean = (1 - momentum) * in_running_mean + momentum * mean``, and
    ``next_running_var`` likewise with the unbiased variance ``var * n / (n - 1)`` (0 for n = 1).

    Args:
        input: (N, C, *spatial).
        scale: (1, C, 1, ...).
        bias: like scale.
        in_running_mean: like scale, float32.
        in_running_var: like scale, float32.
        epsilon: a Python scalar, added to the variance.
        momentum: a Python scalar: weight of the new statistics.

    pygraph's ``peer_stats`` is not supported: JAX sums over several GPUs, see
    ``jc.ops.batch_norm``.

    Returns: Y in the dtype of input; mean, inv_var, next_running_mean and next_running_var, like
    scale, in float32.

    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR`` with
    ``CUDNN_BATCH_NORM``.
    """

    method = "batchnorm"
    ports = Dims.parse(
        "input: *x, scale: *s, bias: *s, in_running_mean: *s, in_running_var: *s, epsilon: *e, "
        "momentum: *e -> Y: *x, mean: *s, inv_var: *s, next_running_mean: *s, next_running_var: *s"
    )
    about = About(
        requires="channels a multiple of 8; epsilon and momentum Python scalars",
        rounding=f"{ROUNDING}; XLA takes one pass over images of up to 4096 pixels, around an "
        "estimated mean",
    )
    anchor = OF_CHANNELS._replace(bit_masks=True)
    extent = Spatial(batch=True)
    backward = BatchnormBackward
    examples = tuple(
        Example.of(
            "input: 8 64 14 14, scale: float32 1 64 1 1, bias: float32 1 64 1 1, "
            "in_running_mean: float32 1 64 1 1, in_running_var: float32 1 64 1 1, "
            "epsilon: 1e-5, momentum: 0.1",
            dtype,
            positive=("in_running_var",),
        )
        for dtype in ("bfloat16", "float16", "float32")
    )

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        return super().support(tensors, graph) or _odd_channels(tensors)

    def reference(
        self,
        input: jax.Array,
        scale: jax.Array,
        bias: jax.Array,
        in_running_mean: jax.Array,
        in_running_var: jax.Array,
        epsilon: jax.Array,
        momentum: jax.Array,
        moments: Moments | None = None,
    ) -> tuple[jax.Array, ...]:
        axes = self.extent.reduced(input.shape, scale.shape)
        mean, variance = (moments or self.extent.moments)(input, axes)
        inv_var = jax.lax.rsqrt(variance + epsilon)
        y = normalized(input, mean, inv_var) * scale + bias
        count = input.size // max(scale.size, 1)
        unbiased = variance * (count / max_dim(count - 1, 1))
        return (
            y,
            mean,
            inv_var,
            in_running_mean + momentum * (mean - in_running_mean),
            in_running_var + momentum * (unbiased - in_running_var),
        )

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        count = math.prod(inputs["input"].shape) // max(math.prod(outputs["mean"].shape), 1)
        known = isinstance(count, int)  # no constant of a graph is a symbolic size
        if not known or not {*tangents} <= {
            "input",
            "scale",
            "bias",
            "in_running_mean",
            "in_running_var",
        }:
            return NotImplemented
        of_y = {p: t for p, t in tangents.items() if p in ("input", "scale", "bias")}
        own = {p: outputs[p] for p in ("Y", "mean", "inv_var")}
        found = dict(super().jvp(g, of_y, inputs, own)) if of_y else {}
        # The tangent of the variance follows from that of inv_var = (var + epsilon)**-0.5. Dividing
        # three times avoids inv_var**3, which overflows in float16; 1 - momentum avoids
        # cancellation.
        moved = {"mean": found.get("mean")}
        if "inv_var" in found:
            inv_var, along = outputs["inv_var"], found["inv_var"]
            for _ in range(3):
                along = g.div(along, inv_var)
            moved["var"] = g.mul(along, -2.0 * count / max(count - 1, 1))
        momentum = inputs["momentum"]
        number = momentum._state.value
        rest = g.sub(1.0, momentum) if number is None else 1.0 - number
        for which in ("mean", "var"):
            new, running = moved.get(which), tangents.get(f"in_running_{which}")
            terms = [] if new is None else [g.mul(new, momentum)]
            if running is not None:
                terms.append(g.mul(running, rest))
            if terms:
                found[f"next_running_{which}"] = g.sum(terms)
        return found


@register
class BatchnormInference(Node):
    """Batch normalization with given statistics:
    ``Y = (input - mean) * inv_variance * scale + bias``.

    Args:
        input: (N, C, *spatial).
        mean: (1, C, 1, ...).
        inv_variance: like mean, ``(var + epsilon)**-0.5``.
        scale: like mean.
        bias: like mean.

    Returns: Y in the dtype of input. Source: ``Batchnorm_inference_attributes`` in the cuDNN
    frontend.
    """

    method = "batchnorm_inference"
    algebra = Algebra(smooth=True, affine="input")
    ports = Dims.parse("input: *x, mean: *s, inv_variance: *s, scale: *s, bias: *s -> Y: *x")
    xla_only = XLA_ONLY
    dtypes = FLOATS
    about = About(requires="runs in XLA: cuDNN up to 9.28 has no engine for it, from A100 to B200")
    examples = (
        Example.of(
            "input: 8 64 14 14, mean: float32 1 64 1 1, inv_variance: float32 1 64 1 1, "
            "scale: float32 1 64 1 1, bias: float32 1 64 1 1",
            positive=("inv_variance",),
        ),
    )

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        x = inputs["input"]
        wanted = (1, *x.shape[1:2], *(1,) * (len(x.shape) - 2))
        check_ports(inputs, dict.fromkeys({*inputs} - {"input"}, wanted), sources=("input",))
        return {"Y": (x.shape, x.dtype)}

    def reference(
        self,
        input: jax.Array,
        mean: jax.Array,
        inv_variance: jax.Array,
        scale: jax.Array,
        bias: jax.Array,
    ) -> tuple[jax.Array, ...]:
        given = (input, mean, inv_variance, scale, bias)
        wide = (x.astype(arithmetic(self.compute_data_type)) for x in given)
        x, mean, inv_variance, scale, bias = wide
        return (normalized(x, mean, inv_variance) * scale + bias,)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        if batched <= {"input"}:
            yield Fold({"input": 0, "Y": 0})
        yield Fold(dict.fromkeys(tensors, 1))
