"""Convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from .._core.builder import register
from .._core.dims import Shape, integers
from .._core.errors import GraphError
from .._core.node import Example, Node, product_compute, product_dtype, product_operands

if TYPE_CHECKING:
    from .._core.spec import Tensor


@register
@dataclass(frozen=True)
class ConvFprop(Node):
    """Forward convolution (cross-correlation).

    ``Y[n,k,y] = sum over c, r of image[n, g*i + c, stride*y + dilation*r - pre_padding] *
    weight[k,c,r]``, where ``i`` is the number of channels in ``weight`` and ``g`` the group of
    ``k``. The size of a spatial dimension of Y is ``(x + pre_padding + post_padding -
    dilation*(r - 1) - 1) // stride + 1``.

    Args:
        image: (N, C, *spatial).
        weight: (K, C / groups, *spatial); the number of groups follows from the shapes.
        padding: zeros on both sides, one number a spatial dimension (0 when omitted); or
            ``pre_padding`` and ``post_padding`` for the two sides apart.
        stride, dilation: one number a spatial dimension (1 when omitted).

    Element types: float32, bfloat16, float16, accumulated in float32 (float32 inputs may be
    rounded to TF32, as in lax at default precision). Raises GraphError for ranks and sizes that
    do not fit. Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD``.
    """

    method = "conv_fprop"
    dims = "image: n c *x, weight: k i *r -> Y: n k *y"
    batch = "n"
    jax_names = ("conv_general_dilated", "conv", "conv_with_general_padding")
    requires = (
        "one convolution a graph; around it, operands of pointwise operations are full, "
        "(1, K, 1, 1), (N, 1, H, W) or numbers"
    )
    anchor = True
    least_rank = 4
    channels_last = True
    examples = (
        Example(
            {"image": (8, 64, 28, 28), "weight": (64, 64, 3, 3)}, "bfloat16", {"padding": [1, 1]}
        ),
        Example(
            {"image": (4, 32, 15, 17), "weight": (48, 32, 5, 3)}, "float16", {"stride": [2, 1]}
        ),
        Example(
            {"image": (2, 16, 20, 20), "weight": (32, 16, 3, 3)}, "float32", {"dilation": [2, 2]}
        ),
        Example(
            {"image": (4, 32, 16, 16), "weight": (64, 32, 2, 2)},
            "bfloat16",
            {"pre_padding": [0, 1], "post_padding": [1, 0]},
        ),
    )

    pre_padding: tuple[int, ...] = ()
    post_padding: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    convolution_mode: str = "CROSS_CORRELATION"

    @classmethod
    def create(
        cls,
        padding: Sequence[int] | None = None,
        stride: Sequence[int] = (),
        dilation: Sequence[int] = (),
        convolution_mode: Any = "CROSS_CORRELATION",
        *,
        pre_padding: Sequence[int] | None = None,
        post_padding: Sequence[int] | None = None,
    ) -> ConvFprop:
        if padding is not None and (pre_padding is not None or post_padding is not None):
            raise GraphError(
                "padding is given twice",
                expected="padding=[...], or pre_padding=[...] with post_padding=[...]",
                got=f"padding={padding}, pre_padding={pre_padding}, post_padding={post_padding}",
            )
        mode = getattr(convolution_mode, "name", convolution_mode)
        if mode not in ("CROSS_CORRELATION", "CONVOLUTION"):
            raise GraphError(
                "unknown convolution_mode",
                expected="'CROSS_CORRELATION' or 'CONVOLUTION'",
                got=repr(convolution_mode),
            )
        both = () if padding is None else integers("padding", padding)
        return cls(
            integers("pre_padding", both if pre_padding is None else pre_padding, 0),
            integers("post_padding", both if post_padding is None else post_padding, 0),
            integers("stride", stride, 1),
            integers("dilation", dilation, 1),
            mode,
        )

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        sizes = self.sizes(inputs)
        x, r = _group(sizes["*x"]), _group(sizes["*r"])
        if len(x) != len(r) or not x:
            raise GraphError(
                "image and weight have different numbers of spatial dimensions",
                expected="image (N, C, *spatial) and weight (K, C / groups, *spatial) of one rank",
                got=f"image {list(inputs['image'].shape)}, weight {list(inputs['weight'].shape)}",
            )
        n, c, k, i = (cast(int, sizes[letter]) for letter in "ncki")
        if not i or c % i or k % (c // i):
            raise GraphError(
                "the channels of image and weight do not fit",
                expected="C a multiple of weight's channels, and K a multiple of the groups",
                got=f"C = {c}, weight of shape {list(inputs['weight'].shape)} (K = {k})",
                fix="weight is (K, C / groups, *spatial): OIHW order, not HWIO; image is NCHW",
            )
        y = []
        pre, post, stride, dilation = self._spatial(len(x))
        for axis, size in enumerate(x):
            window = dilation[axis] * (r[axis] - 1) + 1
            padded = size + pre[axis] + post[axis]
            if isinstance(padded, int) and padded < window:
                raise GraphError(
                    f"the window is larger than spatial dimension {axis} of the image",
                    expected=f"at most {padded} ({size} and padding {pre[axis]} + {post[axis]})",
                    got=f"{window} (size {r[axis]}, dilation {dilation[axis]})",
                )
            y.append((padded - window) // stride[axis] + 1)
        return {"Y": ((n, k, *y), product_dtype(inputs))}

    def default_compute(self, inputs: Mapping[str, Tensor]) -> str:
        return product_compute(inputs)

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        return 2 * math.prod(shapes["Y"]) * math.prod(shapes["weight"][1:])

    def reference(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, image: jax.Array, weight: jax.Array, *, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        rank = image.ndim - 2
        pre, post, stride, dilation = self._spatial(rank)
        if self.convolution_mode == "CONVOLUTION":
            weight = jnp.flip(weight, tuple(range(2, 2 + rank)))
        image, weight = product_operands(image, weight)
        out = jax.lax.conv_general_dilated(
            image,
            weight,
            stride,
            list(zip(pre, post, strict=True)),
            rhs_dilation=dilation,
            dimension_numbers=jax.lax.ConvDimensionNumbers(*[tuple(range(rank + 2))] * 3),
            feature_group_count=image.shape[1] // weight.shape[1],
            precision=precision,
            preferred_element_type=self.accumulator,
        )
        return (out,)

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        import cudnn

        rank = len(tensors["image"].get_dim()) - 2
        pre, post, stride, dilation = self._spatial(rank, from_view=True)
        mode = getattr(cudnn._pybind_module.convolution_mode, self.convolution_mode)  # pyright: ignore
        return (
            pygraph.conv_fprop(
                tensors["image"],
                tensors["weight"],
                pre_padding=list(pre),
                post_padding=list(post),
                stride=list(stride),
                dilation=list(dilation),
                convolution_mode=mode,
                **common,
            ),
        )

    def _spatial(self, rank: int, from_view: bool = False) -> list[tuple[int, ...]]:
        """The four spatial attributes with their defaults filled in, checked for rank."""
        filled = []
        for name, default in (
            ("pre_padding", 0),
            ("post_padding", 0),
            ("stride", 1),
            ("dilation", 1),
        ):
            value = getattr(self, name) or (default,) * rank
            if 0 < len(value) < rank and from_view:  # cuDNN's view of an image of lower rank
                value = (default,) * (rank - len(value)) + value
            if len(value) != rank:
                raise GraphError(
                    f"{name} has the wrong length",
                    expected=f"{rank} numbers, one for each spatial dimension",
                    got=f"{name}={list(value)}",
                )
            filled.append(value)
        return filled


def _group(size: int | Shape) -> Shape:
    assert isinstance(size, tuple)
    return size
