"""Convolutions with a fused epilogue, with lax's conventions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import max_dim

from ..._core.errors import GraphError
from ..._core.graph.dims import integers
from ..._core.graph.options import Options
from ..._core.graph.source import user_level
from ..._core.graph.trace import GraphFunction
from .. import arguments, epilogue
from ..arguments import pads
from ..epilogue import Activation, Terms
from .patches import as_patches


def _fprop(g, x, w, scale, bias, residual, *, pads, strides, dilation, activation, out):
    pre, post = zip(*pads, strict=True)
    y = g.conv_fprop(x, w, pre_padding=pre, post_padding=post, stride=strides, dilation=dilation)
    return epilogue.apply(g, y, scale, bias, residual, activation).set_data_type(out)


def _dgrad(g, x, w, *, pads, strides, dilation, flip, dims, out):
    pre, post = zip(*pads, strict=True)
    y = g.conv_dgrad(
        x,
        w,
        pre_padding=pre,
        post_padding=post,
        stride=strides,
        dilation=dilation,
        convolution_mode="CONVOLUTION" if flip else "CROSS_CORRELATION",
    )
    return y.set_dim(dims).set_data_type(out)


CONV = GraphFunction(_fprop, name="conv")
CONV_TRANSPOSE = GraphFunction(_dgrad, name="conv_transpose")
_UNSTRIDED = GraphFunction(_fprop, name="conv_transpose")


def conv(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: Any = None,
    scale: Any = None,
    residual: jax.Array | None = None,
    activation: Activation = None,
    strides: int | Sequence[int] = 1,
    padding: arguments.Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    groups: int | None = None,
    dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> jax.Array:
    """Convolution with a fused epilogue, in one cuDNN plan.

    ``activation(conv(x, w) * scale + bias + residual)``, where conv is
    ``lax.conv_general_dilated`` (a cross-correlation) over 1, 2 or 3 spatial dimensions.

    Args:
        x: the image, (N, C, *spatial) unless ``dimension_numbers`` says otherwise. The batch
            dimension may be missing, as in Equinox: then it is missing from the result, too.
        w: the weights, (features, C / groups, *spatial) unless ``dimension_numbers`` says
            otherwise.
        bias, scale: (features,) or a scalar.
        residual: has the shape of the result.
        activation: a name ("relu", "relu6", "leaky_relu", "gelu", "gelu_exact", "silu",
            "sigmoid", "tanh", "elu", "softplus") or the function from ``jax.nn``. "gelu" is the
            tanh approximation, the default of ``jax.nn.gelu`` (``g.gelu_approx_tanh``);
            "gelu_exact" is ``g.gelu``.
        strides, dilation: one integer, or one per spatial dimension.
        padding: "SAME", "SAME_LOWER", "VALID", one integer, or (low, high) per spatial dimension.
        groups: number of feature groups; C groups make a depthwise convolution. If omitted, it
            follows from the shapes, with a Python warning if it is greater than 1.
        dimension_numbers: as in lax, for example ("NHWC", "OHWI", "NHWC"). cuDNN reads images
            channels-last and weights as (features, *spatial, C / groups): arrays stored in this
            order are not copied, arrays in any other order are copied once.
        precision: of float32 products, as in lax: DEFAULT allows TF32.
        preferred_element_type: dtype of the result. Default: the dtype of the operands; float32
            for float8, and for int8 with an epilogue; int32 for int8 without one.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

    Element types: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8; accumulated in
    float32 (int8: int32). The epilogue computes in float32 and rounds once. float64 runs in XLA.

    Raises:
        GraphError, GraphTypeError: the shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: with ``implementation="cudnn"``, when compiled for a GPU on which
            cuDNN has no engine for this convolution.

    Source: ``jax.lax.conv_general_dilated``; cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> x, w = jnp.ones((2, 8, 8, 16)), jnp.ones((32, 3, 3, 16))
        >>> jc.ops.conv(x, w, bias=jnp.ones(32), activation="relu",
        ...             dimension_numbers=("NHWC", "OHWI", "NHWC")).shape
        (2, 8, 8, 32)
    """
    x, w = arguments.promoted(x, w)
    unbatched = x.ndim == w.ndim - 1
    if unbatched:
        dimension_numbers = arguments.numbers(x[None], w, dimension_numbers)
        x = jnp.expand_dims(x, dimension_numbers.lhs_spec[0])
    if groups is None:
        groups = groups_of_shapes(x, w, dimension_numbers)
    image, weight, shape, spec, windows = prepared(
        x, w, strides, padding, dilation, groups, dimension_numbers, unbatched
    )
    terms = _terms(scale, bias, residual, activation, shape, weight, spec, unbatched)
    out = arguments.out_dtype(image, weight, preferred_element_type, terms.given)
    if 0 in image.shape[1:]:
        y = _of_nothing(shape, terms, out)
    else:
        function = arguments.chosen(CONV, options, precision, implementation)
        y = function(image, weight, *terms[:3], **windows, activation=terms.activation, out=out)
    y = arguments.transpose(y, np.argsort(spec.out_spec))
    return y.squeeze(spec.out_spec[0]) if unbatched else y


def groups_of_shapes(x: jax.Array, w: jax.Array, dimension_numbers: Any) -> int:
    """The number of groups of an operation without ``groups``, with a warning if there are
    several."""
    spec = arguments.numbers(x, w, dimension_numbers)
    channels, of_weights = x.shape[spec.lhs_spec[1]], w.shape[spec.rhs_spec[1]]
    if channels == of_weights or not (of_weights and channels) or channels % of_weights:
        return 1
    groups = channels // of_weights
    if w.shape[spec.rhs_spec[0]] % groups:
        return 1
    warnings.warn(
        f"jax_cudnn.ops infers {groups} groups from {channels} image channels and weights for "
        f"{of_weights}. Pass groups={groups} if this is what you want; otherwise check "
        "dimension_numbers.",
        stacklevel=user_level(),
    )
    return groups


class Prepared(NamedTuple):
    """The operands of a convolution graph, (N, C, *spatial) and (K, C, *spatial)."""

    image: jax.Array
    weight: jax.Array
    shape: tuple[int, ...]
    """Shape of the result, (N, K, *spatial)."""
    spec: lax.ConvDimensionNumbers
    windows: dict[str, tuple[Any, ...]]


def prepared(
    x: jax.Array,
    w: jax.Array,
    strides: int | Sequence[int],
    padding: arguments.Padding,
    dilation: int | Sequence[int],
    groups: int,
    dimension_numbers: Any,
    unbatched: bool = False,
) -> Prepared:
    """Checks lax's arguments and converts them, promoted, to the form that graphs take."""
    spec = arguments.numbers(x, w, dimension_numbers)
    image, weight = arguments.transpose(x, spec.lhs_spec), arguments.transpose(w, spec.rhs_spec)
    rank = image.ndim - 2
    (groups,) = integers("groups", (groups,), 1, groups)
    batch, channels, *_ = spec.lhs_spec
    where = channels - (unbatched and batch < channels), spec.rhs_spec[1]  # of the user's arrays
    arguments.check_channels(image.shape[1], weight.shape[1], where, groups)
    stride, dilate = (
        arguments.each("strides", strides, rank),
        arguments.each("dilation", dilation, rank),
    )
    window = [d * (r - 1) + 1 for d, r in zip(dilate, weight.shape[2:], strict=True)]
    padded = pads(padding, image.shape[2:], window, stride)
    sizes = (
        (size + sum(pair) - reach) // step + 1
        for size, pair, reach, step in zip(image.shape[2:], padded, window, stride, strict=True)
    )
    shape = (image.shape[0], weight.shape[0], *sizes)
    windows = {"pads": padded, "strides": stride, "dilation": dilate}
    image, weight, windows = as_patches(image, weight, windows)
    return Prepared(image, weight, shape, spec, windows)


def conv_transpose(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: Any = None,
    scale: Any = None,
    residual: jax.Array | None = None,
    activation: Activation = None,
    strides: int | Sequence[int] = 1,
    padding: arguments.Padding = "SAME",
    dilation: int | Sequence[int] = 1,
    dimension_numbers: Any = None,
    transpose_kernel: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> jax.Array:
    """Transposed convolution with an epilogue.

    ``activation(lax.conv_transpose(x, w, ...) * scale + bias + residual)``, computed as the data
    gradient of a convolution, without dilating the image in memory. With ``strides`` of 1 it is
    one plan. cuDNN cannot fuse an epilogue into a gradient with larger strides: then the gradient
    is rounded to its dtype, and XLA applies the epilogue in float32.

    Args:
        x, w, bias, scale, residual, activation, dilation, precision, preferred_element_type,
            implementation, options: as in :func:`conv`.
        dimension_numbers: as in ``lax.conv_transpose``. Default: ("NHWC", "HWIO", "NHWC"), with as
            many spatial letters as there are spatial dimensions.
        strides: the distance between elements of the image in the result.
        padding: "SAME" (the result is ``strides`` times as large), "VALID", or (low, high) per
            spatial dimension, added to the dilated image as in lax.
        transpose_kernel: flip the weights and swap their input and output features, as in the
            gradient of a convolution.

    Raises: as :func:`conv`. Source: ``jax.lax.conv_transpose``; cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> x, w = jnp.ones((2, 8, 8, 16)), jnp.ones((2, 2, 16, 32))
        >>> jc.ops.conv_transpose(x, w, strides=2).shape
        (2, 16, 16, 32)
    """
    x, w = arguments.promoted(x, w)
    if dimension_numbers is None:
        letters = "DHW"[3 - (x.ndim - 2) :] if x.ndim in (3, 4, 5) else ""
        dimension_numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    spec = arguments.numbers(x, w, dimension_numbers)
    image, weight = arguments.transpose(x, spec.lhs_spec), arguments.transpose(w, spec.rhs_spec)
    if transpose_kernel:
        weight = jnp.swapaxes(weight, 0, 1)
    rank = image.ndim - 2
    stride, dilate = (
        arguments.each("strides", strides, rank),
        arguments.each("dilation", dilation, rank),
    )
    given = [padding] * rank if isinstance(padding, str) else arguments.pairs(padding, rank)
    windows = zip(weight.shape[2:], stride, dilate, given, strict=True)
    padded = tuple(arguments.transposed_pads(*window) for window in windows)
    arguments.check_channels(image.shape[1], weight.shape[1], (spec.lhs_spec[1], spec.rhs_spec[1]))
    sizes = (
        (step * (size - 1) + 1 if size != 0 else 0) + sum(pair) - reach * (r - 1)
        for step, size, pair, reach, r in zip(
            stride, image.shape[2:], padded, dilate, weight.shape[2:], strict=True
        )
    )
    shape = (image.shape[0], weight.shape[0], *sizes)
    terms = _terms(scale, bias, residual, activation, shape, weight, spec)
    out = arguments.out_dtype(image, weight, preferred_element_type, terms.given)
    if 0 in (*image.shape[1:], weight.shape[0]):
        y = _of_nothing(shape, terms, out)
    elif set(stride) == {1} and min(min(pair) for pair in padded) >= 0:  # a plain convolution
        y = arguments.chosen(_UNSTRIDED, options, precision, implementation)(
            image,
            jnp.flip(weight, range(2, weight.ndim)) if transpose_kernel else weight,
            *terms[:3],
            pads=padded,
            strides=stride,
            dilation=dilate,
            activation=terms.activation,
            out=out,
        )
    else:
        function = arguments.chosen(CONV_TRANSPOSE, options, precision, implementation)
        flip = not transpose_kernel
        y = dilated(image, weight, padded, stride, dilate, 1, flip, out, function)
        if y is None:
            raise GraphError(
                "no transposed convolution has this padding",
                expected="low and high padding between 0 and dilation * (window - 1), and a "
                "result that the windows cover",
                got=f"padding={padding!r} for weights {w.shape}",
                fix="pad the result with jnp.pad, or crop it",
            )
        y = epilogue.apply_outside(y, terms, out)
    return arguments.transpose(y, np.argsort(spec.out_spec))


def _of_nothing(shape: tuple[int, ...], terms: Terms, out: str) -> jax.Array:
    """The result for an image without pixels or channels, whose sums are 0."""
    zeros = jnp.zeros([max_dim(size, 0) for size in shape])
    return epilogue.apply_outside(zeros, terms, out)


def _terms(
    scale: Any,
    bias: Any,
    residual: Any,
    activation: Activation,
    shape: tuple[int, ...],
    weight: jax.Array,
    spec: lax.ConvDimensionNumbers,
    unbatched: bool = False,
) -> Terms:
    """The epilogue of a convolution with a result (N, C, *spatial) of ``shape``."""
    features, rank = weight.shape[0], weight.ndim
    user_shape = list(arguments.laid_out(shape, spec.out_spec))
    if unbatched:
        del user_shape[spec.out_spec[0]]
    terms = Terms.of(
        scale, bias, residual, activation, shape=(*user_shape,), features=features, rank=rank,
        axis=1,
    )  # fmt: skip
    if terms.residual is None:
        return terms
    residual = terms.residual
    residual = jnp.expand_dims(residual, spec.out_spec[0]) if unbatched else residual
    return terms._replace(residual=arguments.transpose(residual, spec.out_spec))


def dilated(
    image: jax.Array,
    weight: jax.Array,
    padding: Sequence[tuple[int, int]],
    spread: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    flip: bool,
    out: str,
    function: GraphFunction,
) -> jax.Array | None:
    """The convolution of an image dilated by ``spread``, as a data gradient; None if no gradient
    has this padding. ``flip``: the weights belong to a cross-correlation of that image."""
    # out[i] = sum over y, r of image[y] * weight[r] where spread*y = i + dilation*r - low: the
    # data gradient for reversed weights, with pre_padding = dilation * (window - 1) - low.
    pads, dims = [], []
    for axis, (low, high) in enumerate(padding):
        reach = dilation[axis] * (weight.shape[2 + axis] - 1)
        size = spread[axis] * (image.shape[2 + axis] - 1) + 1
        dims.append(size + low + high - reach)
        # The strides of the forward convolution may leave up to spread - 1 rows untouched.
        unreached = 0 < high - reach < spread[axis]
        pads.append((reach - low, 0 if unreached else reach - high))
    if any(p < 0 for pair in pads for p in pair) or any(d < 1 for d in dims):
        return None
    features = weight.shape[0]
    if groups > 1:  # (O, I / groups) as the gradient has it: (I, O / groups)
        parts = weight.reshape(groups, features // groups, *weight.shape[1:])
        weight = jnp.swapaxes(parts, 1, 2).reshape(
            image.shape[1], features // groups, *weight.shape[2:]
        )
    else:
        weight = jnp.swapaxes(weight, 0, 1)
    return function(
        image,
        weight,
        pads=tuple(pads),
        strides=tuple(spread),
        dilation=tuple(dilation),
        flip=flip,
        dims=(image.shape[0], features, *dims),
        out=out,
    )
