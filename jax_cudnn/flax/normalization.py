"""Normalizations on cuDNN."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops
from ..ops.epilogue import Activation
from .layer import ActivatedLayer, Layer, finished, fusible, unknown


class _Norm(Layer):
    axis_name: Any
    dtype: Any

    @property
    def unfused(self) -> str | None:
        if self.axis_name is not None:
            return "it averages over a named axis"
        return unknown(self.dtype)


class LayerNorm(_Norm, nnx.LayerNorm):
    """``flax.nnx.LayerNorm``: ``(x - mean) * (var + epsilon)**-0.5 * scale + bias``.

    Arguments and shapes are those of ``nnx.LayerNorm``; everything is computed in float32 and
    rounded once. ``use_fast_variance`` has no effect: cuDNN averages squared distances from the
    mean, which loses no digits and takes no longer.

    An ``axis_name``, a mask, features outside of the reduced axes, float64, complex and empty
    arrays fall back to Flax's implementation.

    Source: Ba et al. 2016, arXiv:1607.06450; ``flax.nnx.LayerNorm``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> jnn.LayerNorm(64, rngs=nnx.Rngs(0))(jnp.ones((4, 16, 64))).shape
        (4, 16, 64)
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        found = _rows(self, x, mask, "scale", "bias")
        if found is None:
            return super().__call__(jnp.asarray(x), mask=mask)
        x, axes, scale, bias, out = found
        return ops.layer_norm(x, scale, bias, axis=axes, epsilon=self.epsilon).astype(out)


class RMSNorm(_Norm, nnx.RMSNorm):
    """``flax.nnx.RMSNorm``: ``x * (mean(x**2) + epsilon)**-0.5 * scale``.

    Arguments are those of ``nnx.RMSNorm``; shapes and fallbacks are as for :class:`LayerNorm`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; ``flax.nnx.RMSNorm``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> jnn.RMSNorm(64, rngs=nnx.Rngs(0))(jnp.ones((4, 16, 64))).shape
        (4, 16, 64)
    """

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        found = _rows(self, x, mask, "scale")
        if found is None:
            return super().__call__(jnp.asarray(x), mask)
        x, axes, scale, out = found
        return ops.rms_norm(x, scale, axis=axes, epsilon=self.epsilon).astype(out)


class GroupNorm(_Norm, nnx.GroupNorm):
    """``flax.nnx.GroupNorm``: normalizes each group of channels of each image independently.

    The arguments are those of ``nnx.GroupNorm``; ``use_fast_variance`` has no effect.
    ``jax_cudnn.ops.group_norm`` documents what runs on cuDNN. Shapes: x (batch, ..., num_features).
    ``reduction_axes`` other than all but the first, and the cases listed at :class:`LayerNorm`,
    fall back to Flax's implementation.

    Source: Wu and He 2018, arXiv:1803.08494; ``flax.nnx.GroupNorm``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> jnn.GroupNorm(64, num_groups=8, rngs=nnx.Rngs(0))(jnp.ones((4, 16, 64))).shape
        (4, 16, 64)
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        x = jnp.asarray(x)
        inner = tuple(range(1, x.ndim))
        images = self.reduction_axes is None or _axes(x, self.reduction_axes) == inner
        fits = inner and images and x.shape[-1] == self.num_groups * self.group_size
        found = _operands(self, x, mask, inner[-1:], "scale", "bias") if fits else None
        if found is None:
            return super().__call__(x, mask=mask)
        x, scale, bias, out = found
        return ops.group_norm(x, self.num_groups, scale, bias, epsilon=self.epsilon).astype(out)


class InstanceNorm(_Norm, nnx.InstanceNorm):
    """``flax.nnx.InstanceNorm``: normalizes each channel of each image independently.

    The arguments are those of ``nnx.InstanceNorm``; ``use_fast_variance`` has no effect. Shapes: x
    (batch, *spatial, num_features), or with the channels at ``feature_axes``. Several feature axes,
    inputs without a spatial axis, and the cases listed at :class:`LayerNorm`, fall back to Flax's
    implementation.

    Source: Ulyanov et al. 2016, arXiv:1607.08022; ``flax.nnx.InstanceNorm``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> jnn.InstanceNorm(16, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 8, 16))).shape
        (2, 8, 8, 16)
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        x = jnp.asarray(x)
        axes = _axes(x, self.feature_axes)
        one = len(axes) == 1 and axes[0] > 0 and x.ndim > 2
        found = _operands(self, x, mask, axes, "scale", "bias") if one else None
        if found is None:
            return super().__call__(x, mask=mask)
        x, scale, bias, out = found
        return ops.instance_norm(x, scale, bias, axis=axes[0], epsilon=self.epsilon).astype(out)


class BatchNorm(_Norm, ActivatedLayer, nnx.BatchNorm):
    """``flax.nnx.BatchNorm``, with a residual and an activation:
    ``activation((x - mean) * (var + epsilon)**-0.5 * scale + bias + residual)``.

    Args:
        activation: as for ``jax_cudnn.ops.batch_norm``, or None; only relu runs on cuDNN.
        *args, **named: the arguments of ``nnx.BatchNorm``.

    Shapes: x (batch, ..., num_features), or with the channels at ``axis``; the residual broadcasts
    to x. The result has the dtype of the sum of Flax's result and the residual. Running statistics
    are Flax's, with the biased variance, in float32.

    Without an activation and a residual, the layer falls back to Flax's implementation: XLA fuses
    it with the operations that follow, which is faster. It also falls back, followed by residual
    and activation, for an ``axis_name``, a mask, channels in several axes or in the first, float64,
    complex and empty arrays. Otherwise ``use_fast_variance`` has no effect, and the running
    statistics and parameters that normalize stay in float32, while Flax rounds them to ``dtype``.

    Source: Ioffe and Szegedy 2015, arXiv:1502.03167; ``flax.nnx.BatchNorm``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.BatchNorm(16, activation="relu", rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 8, 8, 16))
        >>> layer(x, residual=x).shape
        (2, 8, 8, 16)
    """

    @property
    def remark(self) -> str | None:
        if self.activation is None:
            return "XLA fuses it with what follows; cuDNN runs it with activation= or residual="
        return None

    @property
    def kept(self) -> str | None:
        return self.unfused or self.remark

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
        residual: jax.Array | None = None,
    ) -> jax.Array:
        return normalized(self, x, use_running_average, mask, residual, self.activation)


def normalized(
    layer: BatchNorm,
    x: jax.Array,
    averages: bool | None,
    mask: jax.Array | None,
    residual: Any,
    activation: Activation,
) -> jax.Array:
    """``activation(norm(x) + residual)``, ignoring the layer's own activation."""
    averages = layer.use_running_average if averages is None else averages
    x, residual = jnp.asarray(x), None if residual is None else jnp.asarray(residual)
    axes, plain = _axes(x, layer.axis), activation is None and residual is None
    fits = not plain and len(axes) == 1 and axes[0] > 0 and averages is not None
    fits = fits and (residual is None or _addable(residual, x))
    found = _operands(layer, x, mask, axes, "mean", "var", "scale", "bias") if fits else None
    if found is None:
        y = super(BatchNorm, layer).__call__(x, averages, mask=mask)
        return finished(y, activation, residual=residual)
    x, *_, out = found
    if residual is not None:
        out = jnp.result_type(out, residual)
        x, residual = x.astype(jnp.promote_types(x.dtype, out)), jnp.broadcast_to(residual, x.shape)
    y, running = ops.batch_norm(
        x,
        *parameters(layer),
        layer.mean[...],
        layer.var[...],
        training=not averages,
        momentum=layer.momentum,
        epsilon=layer.epsilon,
        axis=axes[0],
        residual=residual,
        activation=activation,
    )
    if not averages:
        move(layer, running)
    return y.astype(out)


def parameters(layer: nnx.BatchNorm) -> tuple[jax.Array | None, jax.Array | None]:
    """Scale and bias in float32, at no cost for cuDNN."""
    scale, bias = layer.scale, layer.bias
    return (
        None if scale is None else scale[...].astype(jnp.float32),
        None if bias is None else bias[...].astype(jnp.float32),
    )


def move(layer: nnx.BatchNorm, running: tuple[jax.Array, jax.Array]) -> None:
    """Stores new running statistics, without their gradient."""
    layer.mean[...], layer.var[...] = jax.lax.stop_gradient(running)


def _addable(residual: jax.Array, x: jax.Array) -> bool:
    """Whether a graph can add it to x: floats that broadcast to x's shape."""
    pairs = zip(reversed(residual.shape), reversed(x.shape), strict=False)
    broadcasts = residual.ndim <= x.ndim and all(r in (1, size) for r, size in pairs)
    return broadcasts and fusible(residual)


def _axes(x: jax.Array, axes: Any) -> tuple[int, ...]:
    given = (axes,) if isinstance(axes, int) else axes
    return tuple(sorted({a + x.ndim if a < 0 else a for a in given}))


def _operands(
    layer: Any, x: jax.Array, mask: Any, features: tuple[int, ...], *names: str
) -> tuple[Any, ...] | None:
    """x and the Variables promoted as Flax promotes them (x at least to the result's dtype), and
    the result's dtype; None where Flax computes it: with a mask, for unsupported dtypes, empty
    arrays, and Variables whose number of features is not that of x."""
    variables = (getattr(layer, name) for name in names)
    given = (x, *(None if v is None else v[...] for v in variables))
    if mask is not None or layer.unfused or not {*features} <= {*range(x.ndim)}:
        return None
    size = math.prod(x.shape[a] for a in features)
    if not fusible(*given[1:]) or any(v is not None and v.size != size for v in given[1:]):
        return None
    x, *promoted = layer.promote_dtype(given, dtype=layer.dtype)
    learned = (p for name, p in zip(names, promoted, strict=True) if name in ("scale", "bias"))
    out = layer.dtype or jnp.result_type(x, *(p for p in learned if p is not None))
    x = x.astype(jnp.promote_types(x.dtype, out))
    return (x, *promoted, out) if fusible(x, *promoted) else None


def _rows(layer: Any, x: jax.Array, mask: Any, *names: str) -> tuple[Any, ...] | None:
    """The same with the axes of a row, and parameters broadcast to it; None if they do not fit."""
    x = jnp.asarray(x)
    axes, features = _axes(x, layer.reduction_axes), _axes(x, layer.feature_axes)
    fits = axes and {*axes} <= {*range(x.ndim)}
    found = _operands(layer, x, mask, features, *names) if fits else None
    if found is None:
        return None
    x, *given, out = found
    if not {*features} <= {*axes} and any(p is not None for p in given):
        return None
    row = [x.shape[a] for a in axes]
    aligned = [x.shape[a] if a in features else 1 for a in axes]
    rows = (None if p is None else jnp.broadcast_to(p.reshape(aligned), row) for p in given)
    return x, axes, *rows, out
