"""The gradients of a convolution with respect to its image (dgrad) and weight (wgrad)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import arithmetic, itemsize
from ..._core.graph.planned import CHANNELS_LAST, ONE_ELEMENT, About, Anchor, Engines, Example, Work
from ..._core.reasons import Reason
from ..._core.rules import GraphSpec, Tensor, Tensors
from .base import SOLVERS, ConvolutionGradient, Roles
from .reference import convolved, cropped


@register
class ConvDgrad(ConvolutionGradient):
    """Gradient of a convolution with respect to its image.

    ``DX[n, g*i + c, x] = sum over k, y, r of loss[n,k,y] * filter[k,c,r]`` where ``stride*y +
    dilation*r - pre_padding = x`` and ``g`` is the group of ``k``: the image's cotangent from
    ``jax.vjp`` of ``conv_fprop``.

    Args:
        loss: (N, K, *spatial), the cotangent of the forward's output.
        filter: (K, C / groups, *spatial), the weight of the forward.
        padding, pre_padding, post_padding, stride, dilation, convolution_mode: as in the forward.
        out_dims: the shape of DX; the number of groups follows from its channels. Default: one
            group and the smallest image that gives this loss, ``(y - 1)*stride +
            dilation*(r - 1) + 1 - pre_padding - post_padding``. ``.set_dim([...])`` on the result
            is equivalent, as in pygraph.

    Element types as in ``conv_fprop``. Raises GraphError if the shapes do not fit. Source:
    cuDNN documentation, ``CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA``.
    """

    method = "conv_dgrad"
    ports = Dims.parse("loss: n k *y, filter: k i *r -> DX: n c *x")
    roles = Roles("DX", "filter", "loss")
    about = About(
        requires="one convolution per graph; both operands of one dtype, or of two float8 "
        "formats; no integers; cuDNN 9.19 supports neither float8 nor float32 results of 16-bit "
        "operands; 9.28 supports both, float8 with one group, strides of 1, channels in multiples "
        "of 16 and no flipped filter",
        jax_names=("conv_transpose",),
    )
    examples = (
        Example.of("loss: 8 64 28 28, filter: 64 32 3 3", padding=[1, 1]),
        Example.of(
            "loss: 4 64 14 15, filter: 64 32 3 3",
            "float16",
            padding=[1, 1],
            stride=[2, 1],
            out_dims=[4, 32, 28, 15],
        ),
        Example.of("loss: 2 32 16 16, filter: 32 16 3 3", "float32", dilation=[2, 2]),
        Example.of("loss: 4 24 24, filter: 24 16 3", stride=[2]),
        Example.of(
            "loss: 2 32 6 9 8, filter: 32 4 3 3 3",
            "float16",
            padding=[1, 1, 1],
            out_dims=[2, 16, 6, 9, 8],
        ),
        Example.of(
            "loss: 4 32 7 7, filter: 32 1 3 3",
            pre_padding=[0, 1],
            post_padding=[1, 0],
            stride=[2, 2],
            out_dims=[4, 32, 15, 14],
            convolution_mode="CONVOLUTION",
        ),
        Example.of("loss: 2 16 5 5, filter: 16 16 3 3", "int8", alone=False),
    )

    def smallest(self, first: Shape, second: Shape) -> Shape:
        loss, filter = first, second
        ends = zip(loss[2:], filter[2:], *self.spatial(len(filter) - 2), strict=False)
        image = ((y - 1) * s + d * (r - 1) + 1 - pre - post for y, r, pre, post, s, d in ends)
        return (loss[0], filter[1], *image)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: for 16 bits cuDNN refuses this, for float32 it
        # computes wrong results (relative error 1.0).
        if any(step > 1 for step in self.stride) and len(graph.calls) > 1:
            return Reason("it has strides and the graph has other operations")
        return super().support(tensors, graph)

    def work(self, tensors: Tensors) -> Work:
        # Strides dilate the loss; cuDNN and XLA have separate kernels for that.
        strided, work = any(step > 1 for step in self.stride), super().work(tensors)
        return work._replace(pattern=work.pattern + " strided" * strided)

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        # Measured on an H200 with cuDNN 9.19: with 16-bit operands it rounds a float32 result to
        # 16 bits. On an H100: if the padding before and after differs, engine 50 is wrong for
        # float32 (relative error 1.4).
        wide = tensors["DX"].dtype == "float32" != tensors["loss"].dtype
        uneven = (50,) if self.pre_padding != self.post_padding else ()
        return Engines(wrong=(*uneven, *((8,) if wide else super().engines(tensors, graph).wrong)))

    def reference(
        self, loss: jax.Array, filter: jax.Array, *, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        filter = self.cross_correlated(filter)
        (k, i, *r), y = filter.shape, loss.shape[2:]
        pre, _, stride, dilation = self.spatial(len(r))
        reach = [d * (size - 1) for d, size in zip(dilation, r, strict=True)]
        _, c, *x = self.result_shape(loss.shape, filter.shape)
        groups = c // i
        # The loss, dilated by the stride, is correlated with the flipped filter.
        before = [e - b for e, b in zip(reach, pre, strict=True)]
        after = [
            size + e - (n - 1) * s - 1 - b
            for size, e, n, s, b in zip(x, reach, y, stride, before, strict=True)
        ]
        loss, padding, spread = cropped(loss, list(zip(before, after, strict=True)), stride)
        flipped = jnp.flip(filter, tuple(range(2, filter.ndim)))
        axes = tuple(range(len(r) + 2))
        if groups == 1:  # XLA finds its backward convolution in this form only
            by_group, of_filter = flipped, (1, 0, *axes[2:])
        else:
            by_group = flipped.reshape(groups, k // groups, i, *r).swapaxes(1, 2)
            by_group, of_filter = by_group.reshape(groups * i, k // groups, *r), axes
        out = convolved(
            loss,
            by_group,
            [1] * len(r),
            padding,
            lhs_dilation=spread,
            rhs_dilation=dilation,
            dimension_numbers=jax.lax.ConvDimensionNumbers(axes, of_filter, axes),
            feature_group_count=groups,
            precision=precision,
            accumulator=arithmetic(self.compute_data_type),
        )
        return (out,)


@register
class ConvWgrad(ConvolutionGradient):
    """Gradient of a convolution with respect to its weight.

    ``DW[k,c,r] = sum over n, y of image[n, g*i + c, stride*y + dilation*r - pre_padding] *
    loss[n,k,y]`` where ``g`` is the group of ``k``: the weight's cotangent from ``jax.vjp`` of
    ``conv_fprop``.

    Args:
        image: (N, C, *spatial), the image of the forward.
        loss: (N, K, *spatial), the cotangent of the forward's output.
        padding, pre_padding, post_padding, stride, dilation, convolution_mode: as in the forward.
        out_dims: the shape of DW; the number of groups follows from its channels. Default: one
            group and the largest window that fits, ``(x + pre_padding + post_padding -
            (y - 1)*stride - 1) // dilation + 1``. ``.set_dim([...])`` on the result is equivalent,
            as in pygraph.

    Element types as in ``conv_fprop``. Raises GraphError if the shapes do not fit. Source:
    cuDNN documentation, ``CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER``.
    """

    method = "conv_wgrad"
    ports = Dims.parse("image: n c *x, loss: n k *y -> DW: k i *r")
    roles = Roles("image", "DW", "loss")
    anchor = Anchor(product=True, broadcasts=ONE_ELEMENT, order=CHANNELS_LAST)
    about = About(
        requires="one convolution per graph; both operands of one dtype, or of two float8 "
        "formats; no integers; cuDNN 9.19 supports neither float8 nor float32 results of 16-bit "
        "operands; 9.28 supports both, float8 with one group, channels in multiples of 16 and no "
        "flipped weight",
    )
    examples = (
        Example.of("image: 8 32 28 28, loss: 8 64 28 28", padding=[1, 1], out_dims=[64, 32, 3, 3]),
        Example.of(
            "image: 4 32 28 15, loss: 4 64 14 15",
            "float16",
            padding=[1, 1],
            stride=[2, 1],
            out_dims=[64, 32, 3, 3],
        ),
        Example.of("image: 2 16 20 20, loss: 2 32 16 16", "float32", dilation=[2, 2]),
        Example.of("image: 4 16 49, loss: 4 24 24", stride=[2]),
        Example.of(
            "image: 2 16 6 9 8, loss: 2 32 6 9 8",
            "float16",
            padding=[1, 1, 1],
            out_dims=[32, 4, 3, 3, 3],
        ),
        Example.of(
            "image: 4 32 15 14, loss: 4 32 7 7",
            pre_padding=[0, 1],
            post_padding=[1, 0],
            stride=[2, 2],
            out_dims=[32, 1, 3, 3],
            convolution_mode="CONVOLUTION",
        ),
        Example.of("image: 2 16 7 7, loss: 2 16 5 5", "int8", alone=False),
    )

    def smallest(self, first: Shape, second: Shape) -> Shape:
        image, loss = first, second
        ends = zip(image[2:], loss[2:], *self.spatial(len(image) - 2), strict=False)
        window = ((x + pre + post - (y - 1) * s - 1) // d + 1 for x, y, pre, post, s, d in ends)
        return (loss[1], image[1], *window)

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        # Measured with cuDNN 9.19 on H100 and H200 (float32) and H100 (bfloat16): if the padding
        # before and after differs, they are wrong, with relative errors of 7e-2 and more; engine 2
        # (on H200, random graph 257) adds a tensor to 16-bit weights of 4 channels wrongly.
        uneven = self.pre_padding != self.post_padding
        channels = tensors["DW"].shape[:2] if itemsize(tensors["image"].dtype) == 2 else ()
        wrong = (*((1, 18, 20) if uneven else ()), *((2,) if any(n % 8 for n in channels) else ()))
        return Engines(wrong=(*wrong, *super().engines(tensors, graph).wrong))

    def reference(
        self, image: jax.Array, loss: jax.Array, *, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        c, x, y = image.shape[1], image.shape[2:], loss.shape[2:]
        rank = len(x)
        pre, _, stride, dilation = self.spatial(rank)
        span = [s * (n - 1) + 1 for s, n in zip(stride, y, strict=True)]
        _, i, *r = self.result_shape(image.shape, loss.shape)
        # The image is correlated with the loss, dilated by the stride; the batch is contracted, and
        # the dilation is the step of the window.
        after = [
            (size - 1) * d + w - n - b
            for size, d, w, n, b in zip(r, dilation, span, x, pre, strict=True)
        ]
        image, padding, _ = cropped(image, list(zip(pre, after, strict=True)), [1] * rank)
        swapped = (1, 0, *range(2, rank + 2))
        out = convolved(
            image,
            loss,
            dilation,
            padding,
            rhs_dilation=stride,
            dimension_numbers=jax.lax.ConvDimensionNumbers(swapped, swapped, swapped),
            batch_group_count=c // i,
            precision=precision,
            accumulator=arithmetic(self.compute_data_type),
        )
        return (self.cross_correlated(out),)


SOLVERS |= {"image": ConvDgrad, "weight": ConvWgrad}
