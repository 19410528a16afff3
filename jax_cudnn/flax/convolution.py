"""Convolutions with a bias, batch normalization and an activation in cuDNN's epilogue."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.linear import canonicalize_padding
from jax import lax

from .. import ops
from .._core.errors import GraphError
from ..ops import arguments, epilogue
from ..ops.epilogue import Activation
from .layer import ActivatedLayer, Operands, finished, fusible, shallow, unknown
from .normalization import BatchNorm, move, normalized, parameters

log = logging.getLogger("jax_cudnn")
_WRAPPED = {"CIRCULAR": "wrap", "REFLECT": "reflect"}


class Conv(ActivatedLayer, nnx.Conv):
    """``flax.nnx.Conv`` with fused bias and activation: ``activation(conv(x, W) + b)``.

    Args:
        activation: as for ``jax_cudnn.ops.conv``, or None.
        *args, **named: the arguments of ``nnx.Conv``.

    Shapes: x (*batch, *spatial, in_features), with any number of batch dimensions; kernel
    (*kernel_size, in_features / feature_group_count, out_features); bias (out_features,), as in
    Flax. cuDNN reads (out_features, *kernel_size, in_features), so each call transposes the kernel.

    With input dilation, negative padding or more than three spatial dimensions, the layer calls
    ``jax_cudnn.ops.conv_general_dilated``, and XLA runs bias and activation. A custom
    ``conv_general_dilated``, a precision that cuDNN does not support, an ``out_sharding``, float64,
    complex and empty arrays, and empty results fall back to Flax's implementation.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.Conv(3, 16, (3, 3), 2, activation="relu", rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 8, 3))).shape
        (2, 4, 4, 16)
    """

    @property
    def unfused(self) -> str | None:
        if self.conv_general_dilated is not lax.conv_general_dilated:
            return "it has a custom conv_general_dilated"
        return unknown(self.dtype, self.precision)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        prepared = None if out_sharding is not None else _windows(self, inputs)
        if prepared is None:
            return finished(super().__call__(inputs, out_sharding), self.activation)
        found, window, shape = prepared
        x = found.x
        if _plain(self):
            y = ops.conv(
                x, found.kernel, **window, bias=found.bias, activation=self.activation,
                precision=self.precision, preferred_element_type=found.out,
            )  # fmt: skip
        else:
            y = ops.conv_general_dilated(
                x, found.kernel, window["strides"], window["padding"],
                _dimensions(self.input_dilation, x.ndim - 2), window["dilation"],
                window["dimension_numbers"], self.feature_group_count, precision=self.precision,
                preferred_element_type=np.dtype(found.out),
            )  # fmt: skip
            y = finished(y, self.activation, found.bias)
        return y.reshape(shape)


class ConvTranspose(ActivatedLayer, nnx.ConvTranspose):
    """``flax.nnx.ConvTranspose`` as the data gradient of a convolution, with an activation.

    Args:
        activation: as for ``jax_cudnn.ops.conv_transpose``, or None.
        *args, **named: the arguments of ``nnx.ConvTranspose``.

    Shapes: x (*batch, *spatial, in_features), with any number of batch dimensions; kernel
    (*kernel_size, in_features, out_features), or with ``transpose_kernel`` (*kernel_size,
    out_features, in_features); bias (out_features,), as in Flax. Without strides cuDNN runs bias
    and activation, otherwise XLA.

    These fall back to Flax's implementation, followed by the activation: named padding other than
    "SAME" and "VALID", padding that does not occur in the gradient of a convolution (see
    ``jax_cudnn.ops.conv_transpose``), a precision that cuDNN does not support, more than three
    spatial dimensions, float64, complex and empty arrays.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.ConvTranspose(16, 3, (2, 2), (2, 2), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 4, 4, 16))).shape
        (2, 8, 8, 3)
    """

    @property
    def unfused(self) -> str | None:
        if self.padding == "CIRCULAR":
            return "its padding is circular, which the gradient of a convolution cannot have"
        if len(self.kernel_size) > 3:
            return f"it has {len(self.kernel_size)} spatial dimensions"
        if isinstance(self.padding, str) and self.padding not in ("SAME", "VALID"):
            return f"padding {self.padding!r} is handled by Flax"
        return unknown(self.dtype, self.precision)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        found, rank = _operands(self, inputs), len(self.kernel_size)
        if found is None:
            return finished(super().__call__(inputs), self.activation)
        try:
            y = ops.conv_transpose(
                found.x.reshape(-1, *found.x.shape[-rank - 1 :]),
                found.kernel,
                bias=found.bias,
                activation=self.activation,
                strides=_dimensions(self.strides, rank),
                padding=canonicalize_padding(self.padding, rank),
                dilation=_dimensions(self.kernel_dilation, rank),
                dimension_numbers=_channels_last(rank),
                transpose_kernel=self.transpose_kernel,
                precision=self.precision,
                preferred_element_type=found.out,
            )
        except GraphError as error:  # for wrong arguments Flax raises its own error
            log.debug("ConvTranspose: XLA runs it: %s", error)
            return finished(super().__call__(inputs), self.activation)
        return y.reshape(*inputs.shape[: -rank - 1], *y.shape[1:])


class ConvNormAct(nnx.Module):
    """``activation(norm(conv(x)) + residual)`` for an ``nnx.Conv`` and an ``nnx.BatchNorm``.

    With running averages it is one cuDNN plan, in which the normalization is the epilogue of the
    convolution. In training there are two plans: the convolution, and the normalization with the
    activation.

    Args:
        in_features: as for ``nnx.Conv``.
        out_features: as for ``nnx.Conv``.
        kernel_size: as for ``nnx.Conv``.
        strides: as for ``nnx.Conv``.
        activation: as for ``jax_cudnn.ops.conv_batch_norm``, or None.
        use_running_average: as for ``nnx.BatchNorm``.
        momentum: as for ``nnx.BatchNorm``.
        epsilon: as for ``nnx.BatchNorm``.
        use_bias: whether the convolution has a bias.
        dtype: as for both layers.
        param_dtype: as for both layers.
        rngs: as for both layers.
        **conv: other arguments of ``nnx.Conv``.

    The parameters and statistics are those of the inner layers ``conv`` and ``norm``, with Flax's
    names, shapes and initialisers.

    The two layers run sequentially, each as it does alone, if either falls back to Flax; if an
    inner layer has an activation or another class; or for a bias of the convolution, input
    dilation, negative padding, a ``dtype`` other than that of the convolution's result, or a
    residual that broadcasts or widens the result.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> block = jnn.ConvNormAct(3, 16, (3, 3), 2, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 8, 8, 3))).shape
        (2, 4, 4, 16)
        >>> block.eval()
        >>> sorted(nnx.to_pure_dict(nnx.state(block))["norm"])
        ['bias', 'mean', 'scale', 'var']
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        activation: Activation = "relu",
        use_running_average: bool | None = False,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **conv: Any,
    ):
        shared = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.conv = Conv(
            in_features, out_features, kernel_size, strides, use_bias=use_bias, **shared, **conv
        )
        self.norm = BatchNorm(
            out_features,
            use_running_average=use_running_average,
            momentum=momentum,
            epsilon=epsilon,
            **shared,
        )
        self.activation = epilogue.activation_name(activation)

    @classmethod
    def of(cls, conv: nnx.Conv, norm: nnx.BatchNorm, activation: Activation = None) -> Self:
        """Makes a block that shares the Variables of two layers, of Flax or of this package. The
        activation replaces the norm's own; None keeps that. The constructor of a derived class is
        not called.

        Raises:
            GraphError: a layer has another class.
        """
        made = shallow(nnx.Module(), cls)
        made.conv, made.norm = Conv.of(conv), BatchNorm.of(norm)
        given = made.norm.activation if activation is None else activation
        made.norm.activation, made.activation = None, epilogue.activation_name(given)
        return made

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        """Applies the block to x (*batch, *spatial, in_features); the residual broadcasts to the
        result."""
        norm, averages = self.norm, use_running_average
        residual = None if residual is None else jnp.asarray(residual)
        if averages is None:
            averages = getattr(norm, "use_running_average", None)
        prepared = None if averages is None else self._fused(x, residual)
        if prepared is None:  # the layers run sequentially, whatever their classes
            y = self.conv(x)
            if type(norm) is BatchNorm and norm.activation is None:
                return normalized(norm, y, averages, None, residual, self.activation)
            named: Any = {} if use_running_average is None else {"use_running_average": averages}
            return finished(norm(y, **named), self.activation, residual=residual)
        found, window, shape = prepared
        if residual is not None:
            residual = residual.reshape(-1, *shape[x.ndim - found.x.ndim + 1 :])
        y, running = ops.conv_batch_norm(
            found.x,
            found.kernel,
            *parameters(norm),
            norm.mean[...],
            norm.var[...],
            training=not averages,
            momentum=norm.momentum,
            epsilon=norm.epsilon,
            residual=residual,
            activation=self.activation,
            precision=self.conv.precision,
            **window,
        )
        if not averages:
            move(norm, running)
        return y.reshape(shape)

    def _fused(self, x: jax.Array, residual: jax.Array | None) -> Any:
        """The result of ``_windows`` if both layers fit into one graph, whose dtype is that of
        both results and of the sum with the residual; else None."""
        conv, norm = self.conv, self.norm
        if type(conv) is not Conv or type(norm) is not BatchNorm:
            return None
        alone = conv.bias is None and conv.activation is None and norm.activation is None
        if not alone or norm.axis != -1 or norm.unfused or not _plain(conv):
            return None
        of_norm = [v for v in (norm.mean[...], norm.var[...], *parameters(norm)) if v is not None]
        if (prepared := _windows(conv, x)) is None or not fusible(*of_norm, residual):
            return None
        found, _, shape = prepared
        dtypes = {found.x.dtype, jnp.dtype(found.out), jnp.dtype(norm.dtype or jnp.float32)}
        fits = len(dtypes) == 1 and all(v.shape == shape[-1:] for v in of_norm)
        if residual is not None:
            same = jnp.result_type(found.x, residual) == found.x.dtype
            fits = fits and same and residual.shape == shape
        return prepared if fits else None


def _operands(layer: Any, inputs: jax.Array) -> Operands | None:
    """Input, masked kernel and bias; None where Flax handles or rejects them."""
    kernel, mask = layer.kernel[...], layer.mask
    fits = mask is None or mask.shape == kernel.shape
    if layer.unfused or inputs.ndim <= len(layer.kernel_size) or not fits:
        return None
    return Operands.of(layer, inputs, kernel if mask is None else kernel * mask)


def _plain(layer: nnx.Conv) -> bool:
    """Whether ``ops.conv`` supports a layer's settings once ``_windows`` has prepared them."""
    rank = len(layer.kernel_size)
    padding = canonicalize_padding(layer.padding, rank)
    negative = not isinstance(padding, str) and np.min(padding, initial=0) < 0
    return 1 <= rank <= 3 and {*_dimensions(layer.input_dilation, rank)} == {1} and not negative


def _windows(
    layer: Conv, inputs: jax.Array
) -> tuple[Operands, dict[str, Any], tuple[int, ...]] | None:
    """The operands, with one batch dimension and with padding that cuDNN does not support applied;
    the remaining arguments for ``ops.conv``; and the result's shape. None where Flax handles or
    rejects them."""
    found, groups = _operands(layer, inputs), layer.feature_group_count
    if found is None or found.x.shape[-1] != groups * found.kernel.shape[-2]:
        return None
    if found.bias is not None and found.bias.shape != found.kernel.shape[-1:]:
        return None
    rank = len(layer.kernel_size)
    batch, x = inputs.shape[: -rank - 1], found.x.reshape(-1, *inputs.shape[-rank - 1 :])
    dilation = _dimensions(layer.kernel_dilation, rank)
    padding = canonicalize_padding(layer.padding, rank)
    reach = [d * (size - 1) for size, d in zip(layer.kernel_size, dilation, strict=True)]
    if padding == "CAUSAL" and rank == 1:
        padding = [(reach[0], 0)]
    elif isinstance(padding, str) and padding in _WRAPPED:
        around = [(0, 0), *((r // 2, (r + 1) // 2) for r in reach), (0, 0)]
        x, padding = jnp.pad(x, around, mode=_WRAPPED[padding]), "VALID"
    strides, between = (_dimensions(s, rank) for s in (layer.strides, layer.input_dilation))
    named = isinstance(padding, str)
    if named and padding.upper() not in ("SAME", "SAME_LOWER", "VALID"):
        return None
    if min(*strides, *between, 1) < 1:
        return None  # Flax rejects it
    sizes = [b * (size - 1) + 1 for size, b in zip(x.shape[1:-1], between, strict=True)]
    window = [r + 1 for r in reach]
    pads = arguments.pads(padding, sizes, window, strides) if named else padding
    room = [size + sum(p) - r for size, p, r in zip(sizes, pads, reach, strict=True)]
    if any(isinstance(size, int) and size < 1 for size in room):
        return None  # no window fits: the result is empty
    spatial = (-(-r // stride) for r, stride in zip(room, strides, strict=True))
    shape = (*batch, *spatial, found.kernel.shape[-1])
    settings = {
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "dimension_numbers": _channels_last(rank),
    }
    return found._replace(x=x), settings, shape


def _channels_last(rank: int) -> lax.ConvDimensionNumbers:
    """Images (N, *spatial, C) and kernels (*spatial, I, O)."""
    spatial = range(rank)
    image = (0, rank + 1, *(1 + axis for axis in spatial))
    return lax.ConvDimensionNumbers(image, (rank + 1, rank, *spatial), image)


def _dimensions(setting: Any, rank: int) -> tuple[int, ...]:
    """A setting for each spatial dimension; None means 1."""
    setting = 1 if setting is None else setting
    return (setting,) * rank if isinstance(setting, int) else tuple(setting)
