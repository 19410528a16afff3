"""Convolutions of ResNet-50, VGG, ResNeXt, ConvNeXt, MobileNet, EfficientNet and a 3-D U-Net."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core.graph.trace import graph
from jax_cudnn.commands.timing import Formulation

from ..case import Array, Operand
from .case import Made, ModelCase


@dataclass(frozen=True)
class Conv:
    """A convolution with "same" padding: ``channels`` to ``features``, window ``r``, cubic."""

    batch: int
    size: int
    channels: int
    features: int
    r: int
    stride: int = 1
    groups: int = 1
    rank: int = 2

    @property
    def spatial(self) -> dict[str, list[int]]:
        """pygraph's attributes."""
        pad, one = [self.r // 2] * self.rank, [1] * self.rank
        return {"padding": pad, "stride": [self.stride] * self.rank, "dilation": one}

    @property
    def image(self) -> Operand:
        return Operand((self.batch, *[self.size] * self.rank, self.channels))

    @property
    def weight(self) -> Operand:
        """Channels-last, as cuDNN likes it best: (K, *window, C / groups)."""
        shape = (self.features, *[self.r] * self.rank, self.channels // self.groups)
        fan_in = self.r**self.rank * shape[-1]
        return Operand(shape, scale=fan_in**-0.5)

    @property
    def result(self) -> Operand:
        out = (self.size + 2 * (self.r // 2) - self.r) // self.stride + 1
        return Operand((self.batch, *[out] * self.rank, self.features))

    @property
    def small(self) -> Conv:
        """The same with a small batch and image, and few channels."""
        few = replace(self, batch=2, size=min(self.size, 8))
        if self.groups > 1:
            groups = 16 if self.groups == self.channels else 4
            return replace(few, channels=16, features=16, groups=groups)
        return replace(few, channels=min(self.channels, 16), features=min(self.features, 24))

    def lax(self, x: Array, w: Array, layout: str, **options: Any) -> Array:
        """The convolution in plain JAX; ``layout`` such as "NHWC OHWI"."""
        lhs, rhs = (order.replace("s", "DHW"[-self.rank :]) for order in layout.split())
        return jax.lax.conv_general_dilated(
            x,
            w,
            [self.stride] * self.rank,
            [(self.r // 2, self.r // 2)] * self.rank,
            dimension_numbers=(lhs, rhs, lhs),
            feature_group_count=self.groups,
            **options,
        )


def first(x: Array) -> Array:
    """Channels to the second place: cuDNN's dims of a channels-last array, the same memory."""
    return jnp.moveaxis(x, -1, 1)


def last(x: Array) -> Array:
    return jnp.moveaxis(x, 1, -1)


def hwio(w: Array) -> Array:
    """(O, *window, I) to (*window, I, O)."""
    return jnp.moveaxis(w, 0, -1)


def ohwi(w: Array) -> Array:
    return jnp.moveaxis(w, -1, 0)


# -- convolutions with an epilogue -----------------------------------------------------------------


def _epilogue(y: Array, scale: Array | None, bias: Array, *residual: Array) -> Array:
    y = (y if scale is None else y * scale) + bias
    for r in residual:
        y = y + r
    return jax.nn.relu(y)


def _fused(conv: Conv, *, residual: bool) -> tuple[str, Any, Any, Any]:
    """relu(conv(x, w) * scale + bias [+ residual])."""

    @graph
    def conv_scale_bias_relu(g, x, w, scale, bias, *residual):
        y = g.bias(g.mul(g.conv_fprop(x, w, **conv.spatial), scale), bias)
        for r in residual:
            y = g.add(y, r)
        return g.relu(y)

    def ours(x, w, scale, bias, *residual):
        scale, bias = (v.reshape(1, -1, *[1] * conv.rank) for v in (scale, bias))
        y = conv_scale_bias_relu(first(x), first(w), scale, bias, *map(first, residual))
        return last(y)

    def in_bf16(x, w, *rest):
        return _epilogue(conv.lax(x, w, "NsC OsI"), *rest)

    def in_f32(x, w, *rest):
        y = conv.lax(x, w, "NsC sIO", preferred_element_type=jnp.float32)
        return _epilogue(y, *rest).astype(x.dtype)

    def folded(x, w, scale, *rest):
        w = w * scale.reshape(-1, *[1] * (w.ndim - 1))
        return _epilogue(conv.lax(x, w, "NsC OsI"), None, *rest)

    def in_nchw(x, w, scale, bias, *residual):
        scale, bias = (v.reshape(-1, *[1] * conv.rank) for v in (scale, bias))
        y = conv.lax(first(x), first(w), "NCs OIs")
        return last(_epilogue(y, scale, bias, *map(first, residual)))

    def as_product(x, w, *rest):
        y = jnp.einsum("nhwc,ck->nhwk", x, w, preferred_element_type=jnp.float32)
        return _epilogue(y, *rest).astype(x.dtype)

    xla = {
        "NHWC x OHWI, epilogue in bf16": in_bf16,
        "NHWC x HWIO, epilogue in f32": Formulation(in_f32, lambda x, w, *r: (x, hwio(w), *r)),
        "scale folded into the weight": folded,
    }
    if conv.r == 1 and conv.stride == 1:
        xla["matrix product, epilogue in f32"] = Formulation(
            as_product, lambda x, w, *r: (x, w.reshape(w.shape[0], -1).T, *r)
        )
    else:
        xla["NCHW x OIHW, epilogue in bf16"] = in_nchw
    vector = Operand((conv.features,))
    operands = (conv.image, conv.weight, vector, vector, *((conv.result,) * residual))
    part = "scale, bias, residual, relu" if residual else "scale, bias, relu"
    return part, ours, xla, operands


# -- convolutions alone and their derivatives ------------------------------------------------------


def _fprop(conv: Conv) -> tuple[str, Any, Any, Any]:
    @graph
    def conv_fprop(g, x, w):
        return g.conv_fprop(x, w, **conv.spatial)

    xla = _in_layouts(lambda layout, x, w: conv.lax(x, w, layout), "image weight -> image")
    return "fprop", _channels_last(conv_fprop), xla, (conv.image, conv.weight)


def _dgrad(conv: Conv) -> tuple[str, Any, Any, Any]:
    """The image's cotangent from those of the result and the weight."""
    dims = list(jax.eval_shape(first, conv.image.aval).shape)

    @graph
    def conv_dgrad(g, dy, w):
        return g.conv_dgrad(loss=dy, filter=w, **conv.spatial).set_dim(dims)

    def xla(layout, dy, w):
        x = conv.image.aval.update(dtype=dy.dtype)
        x = jax.eval_shape(first, x) if layout.startswith("NCs") else x
        return jax.linear_transpose(lambda x: conv.lax(x, w, layout), x)(dy)[0]

    forms = _in_layouts(xla, "image weight -> image")
    return "dgrad", _channels_last(conv_dgrad), forms, (conv.result, conv.weight)


def _wgrad(conv: Conv) -> tuple[str, Any, Any, Any]:
    """The weight's cotangent from the image and that of the result."""
    dims = list(jax.eval_shape(first, conv.weight.aval).shape)
    # As under a loss that is a mean: with cotangents of size one the sums would be huge.
    dy = replace(conv.result, scale=(conv.result.shape[1] ** conv.rank * conv.batch) ** -0.5)

    @graph
    def conv_wgrad(g, x, dy):
        return g.conv_wgrad(image=x, loss=dy, **conv.spatial).set_dim(dims)

    def xla(layout, x, dy):
        order = {"OsI": lambda w: w, "sIO": hwio, "OIs": first}[layout.split()[1]]
        w = jax.eval_shape(order, conv.weight.aval.update(dtype=x.dtype))
        return jax.linear_transpose(lambda w: conv.lax(x, w, layout), w)(dy)[0]

    forms = _in_layouts(xla, "image image -> weight")
    return "wgrad", _channels_last(conv_wgrad), forms, (conv.image, dy)


def _channels_last(function: Callable[..., Array]) -> Callable[..., Array]:
    """A graph on cuDNN's dims as a function of channels-last arrays."""
    return lambda *operands: last(function(*map(first, operands)))


def _in_layouts(function: Callable[..., Array], roles: str) -> dict[str, Any]:
    """``function(layout, *operands)`` in the three layouts of lax that models use.

    The names are those of images; H W stands for D H W of volumes, too.
    """
    given, result = roles.split(" -> ")

    def reordered(*operands):
        pairs = zip(given.split(), operands, strict=True)
        return tuple(hwio(a) if role == "weight" else a for role, a in pairs)

    def in_nchw(*operands):
        return last(function("NCs OIs", *map(first, operands)))

    return {
        "NHWC x OHWI": partial(function, "NsC OsI"),
        "NHWC x HWIO": Formulation(
            partial(function, "NsC sIO"),
            reordered,
            ohwi if result == "weight" else None,
        ),
        "NCHW x OIHW": in_nchw,
    }


# -- the cases -------------------------------------------------------------------------------------

_BATCH = 256
RESNET = {
    "stem-7x7-s2": Conv(_BATCH, 224, 3, 64, 7, stride=2),
    "1x1-64-256-at-56": Conv(_BATCH, 56, 64, 256, 1),
    "3x3-64-at-56": Conv(_BATCH, 56, 64, 64, 3),
    "3x3-128-s2-at-56": Conv(_BATCH, 56, 128, 128, 3, stride=2),
    "3x3-256-at-14": Conv(_BATCH, 14, 256, 256, 3),
    "1x1-1024-256-at-14": Conv(_BATCH, 14, 1024, 256, 1),
    "3x3-512-at-7": Conv(_BATCH, 7, 512, 512, 3),
}
STEM = Conv(32, 224, 3, 64, 3)
DEPTHWISE = {
    "convnext/depthwise-7x7-96-at-56": Conv(64, 56, 96, 96, 7, groups=96),
    "mobilenet/depthwise-3x3-144-at-56": Conv(64, 56, 144, 144, 3, groups=144),
    "efficientnet/depthwise-5x5-240-at-28": Conv(64, 28, 240, 240, 5, groups=240),
}
GROUPED = {
    "3x3-128-in-32-groups-at-56": Conv(64, 56, 128, 128, 3, groups=32),
    "3x3-512-in-32-groups-at-14": Conv(_BATCH, 14, 512, 512, 3, groups=32),
}
UNET = Conv(4, 64, 64, 64, 3, rank=3)


def cases() -> Iterator[Made]:
    for name, conv in RESNET.items():
        yield _case(f"resnet50/{name}", conv, partial(_fused, residual=False))
    yield _case("vgg/stem-3x3", STEM, partial(_fused, residual=False))
    for name, conv in RESNET.items():
        if name != "stem-7x7-s2":  # no residual joins there
            yield _case(f"resnet50/{name}", conv, partial(_fused, residual=True))
    for name in ("3x3-64-at-56", "3x3-256-at-14"):
        for derivative in (_dgrad, _wgrad):
            yield _case(f"resnet50/{name}", RESNET[name], derivative)
    for name, conv in GROUPED.items():
        for part in (_fprop, _dgrad):
            yield _case(f"resnext/{name}", conv, part)
    for name, conv in DEPTHWISE.items():
        # Three of the derivative at which cuDNN loses, so that no one shape decides.
        for part in (_dgrad,) if name.startswith("efficientnet") else (_fprop, _dgrad, _wgrad):
            yield _case(name, conv, part)
    for part in (_fprop, _dgrad, _wgrad):
        yield _case("unet3d/3x3x3-64-at-64", UNET, part)


def _case(shape: str, conv: Conv, build: Callable[[Conv], Any]) -> Made:
    def make(tiny: bool) -> ModelCase:
        part, *built = build(conv.small if tiny else conv)
        return ModelCase(f"{shape}/{part.replace(', ', '-')}", part, *built)

    return make
