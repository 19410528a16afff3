"""The forward convolution, and the sums of its result that a batch normalization needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import arithmetic
from ..._core.graph.node import Algebra, Fold, Node, matched
from ..._core.graph.planned import CHANNELS_LAST, About, Anchor, Engines, Example
from ..._core.graph.promotion import product_dtype
from ..._core.rules import Derivation, GraphSpec, Tensor, Tensors, Values
from ..transformations import along
from .base import SOLVERS, Convolution, Roles
from .reference import convolved


@register
class ConvFprop(Convolution):
    """Forward convolution (cross-correlation).

    ``Y[n,k,y] = sum over c, r of image[n, g*i + c, stride*y + dilation*r - pre_padding] *
    weight[k,c,r]``, where ``i`` is the number of channels in ``weight`` and ``g`` the group of
    ``k``. The size of a spatial dimension of Y is ``(x + pre_padding + post_padding -
    dilation*(r - 1) - 1) // stride + 1``.

    Args:
        image: (N, C, *spatial), one to three spatial dimensions.
        weight: (K, C / groups, *spatial); the number of groups follows from the shapes.
        padding: zeros on both sides, one integer per spatial dimension (default 0); or
            ``pre_padding`` and ``post_padding`` for the two sides separately.
        stride, dilation: one integer per spatial dimension (default 1).
        convolution_mode: "CROSS_CORRELATION", or "CONVOLUTION", which flips the weight.

    Element types: floats, accumulated in float32 (float32 inputs may be rounded to TF32, as in
    lax at default precision); 8-bit integers, accumulated in int32. Raises GraphError if ranks or
    sizes do not fit. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD``.
    """

    method = "conv_fprop"
    ports = Dims.parse("image: n c *x, weight: k i *r -> Y: n k *y")
    roles = Roles("image", "weight", "Y")
    anchor = Anchor(product=True, prologue="genstats", order=CHANNELS_LAST)  # both in float16
    algebra = Algebra(scaled="weight")  # by a factor of each feature
    about = About(
        requires="one convolution per graph; both operands of one dtype, or of two float8 "
        "formats; float8 without depthwise groups and convolution_mode; operands of pointwise "
        "operations in the graph are full, (1, K, 1, 1), (N, 1, H, W) or scalars",
        jax_names=("conv_general_dilated", "conv", "conv2d", "conv_with_general_padding"),
    )
    examples = (
        Example.of("image: 8 64 28 28, weight: 64 64 3 3", padding=[1, 1]),
        Example.of("image: 4 32 15 17, weight: 48 32 5 3", "float16", stride=[2, 1]),
        Example.of("image: 2 16 20 20, weight: 32 16 3 3", "float32", dilation=[2, 2]),
        Example.of("image: 4 32 16 16, weight: 64 32 2 2", pre_padding=[0, 1], post_padding=[1, 0]),
        Example.of("image: 4 16 50, weight: 24 16 3", stride=[2]),
        Example.of(
            "image: 2 16 6 9 8, weight: 32 16 3 3 3",
            "float16",
            padding=[1, 1, 1],
            convolution_mode="CONVOLUTION",
        ),
        Example.of("image: 4 32 14 14, weight: 32 1 3 3", padding=[1, 1]),
        Example.of("image: 4 32 14 14, weight: 48 8 3 3", "float32", padding=[1, 1]),
        Example.of("image: 2 16 8 8, weight: 16 16 3 3", "int8"),
        Example.of("image: 4 32 16 16, weight: 64 32 3 3", "float8_e4m3fn", out="bfloat16"),
        Example.of("image: 4 32 9 9, weight: 32 1 3 3", "float8_e4m3fn", alone=False),
    )

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        return {"Y": (self.forward_shape(**inputs), product_dtype(inputs))}

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        # Measured on an H200 with cuDNN 9.19: for int8, engines 0 and 28 write wrong int32 results
        # (832 becomes 1610612736); the other engines are correct. For float32, engine 53 fails at
        # execution if an intermediate value is a second result, for example kept for a derivative
        # (CUDNN_STATUS_INTERNAL_ERROR: get_user_ptrs()[idx] != nullptr); 52 is of the same kind and
        # is what planning without a GPU chooses.
        several = len(graph.outputs) > 1
        wide = tensors["image"].dtype == "float32" and several
        wrong = (*((52, 53) if wide else ()), *super().engines(tensors, graph).wrong)
        # Measured on an H200 with cuDNN 9.19: the engines written for convolution, bias and relu
        # (0, 11, 51) accept graphs with two results and fail at execution. The engines that
        # generate a kernel for any graph have this knob.
        pointwise = all(c.node.anchor or c.node.ports.is_elementwise for c in graph.calls)
        return Engines(
            wrong=(0, 28) if tensors["Y"].dtype == "int32" else wrong,
            knob="KERNEL_CFG" if pointwise and several else "",
        )

    def reference(
        self, image: jax.Array, weight: jax.Array, *, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        weight = self.cross_correlated(weight)
        rank = image.ndim - 2
        pre, post, stride, dilation = self.spatial(rank)
        # Padding beyond a window's reach is separate: lax's derivative would need negative padding.
        # So is symbolic padding, which lax's convolutions do not take.
        reach = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        beyond = [
            (_over(before, most), _over(after, most), 0)
            for before, after, most in zip(pre, post, reach, strict=True)
        ]
        if any(map(any, beyond)):
            zero = jnp.zeros((), image.dtype)
            image = jax.lax.pad(image, zero, [(0, 0, 0), (0, 0, 0), *beyond])
        out = convolved(
            image,
            weight,
            stride,
            [
                (before - low, after - high)
                for before, after, (low, high, _) in zip(pre, post, beyond, strict=True)
            ],
            rhs_dilation=dilation,
            dimension_numbers=jax.lax.ConvDimensionNumbers(*[tuple(range(rank + 2))] * 3),
            feature_group_count=image.shape[1] // weight.shape[1],
            precision=precision,
            accumulator=arithmetic(self.compute_data_type),
        )
        return (out,)


SOLVERS["result"] = ConvFprop


def _over(padding: int, most: int) -> int:
    return max(padding - most, 0) if isinstance(padding, int) else padding


@register
class Genstats(Node):
    """Sums over all dimensions but the channels, for the statistics of a batch normalization.

    ``SUM[c] = sum over n, x of input[n,c,x]`` and ``SQ_SUM[c] = sum over n, x of
    input[n,c,x]**2``, both (1, C, 1, ...) in float32.

    Args:
        input: (N, C, *spatial).

    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR``.
    """

    method = "genstats"
    ports = Dims.parse("input: n c *x -> SUM: n c *x, SQ_SUM: n c *x")
    about = About(
        requires="it follows a float16 convolution whose result is float16 (.set_data_type) and "
        "is also returned; in other graphs, two reductions compute the same sums",
    )
    examples = (
        Example.of("input: 8 64 28 28", "float16", alone=False),
        Example.of("input: 2 16 5 6", "float32", alone=False),
    )

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        return along(self, "c", batched, tensors)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        shape = inputs["input"].shape
        if len(shape) < 3:
            raise GraphError(
                "the input has no spatial dimensions",
                expected="(N, C, *spatial)",
                got=f"shape {list(shape)}",
            )
        sums = (1, shape[1], *(1,) * (len(shape) - 2))
        return {"SUM": (sums, "float32"), "SQ_SUM": (sums, "float32")}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        axes = (0, *range(2, input.ndim))
        return (
            jnp.sum(input, axis=axes, keepdims=True),
            jnp.sum(input * input, axis=axes, keepdims=True),
        )

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        t, x, shape = tangents["input"], inputs["input"], outputs["SUM"].shape
        return {"SUM": g.reduced(t, shape), "SQ_SUM": g.reduced(g.mul(t, g.add(x, x)), shape)}
