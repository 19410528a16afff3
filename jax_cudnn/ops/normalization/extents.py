"""The dimensions over which normalizations take mean and variance, how XLA does it, and operands
of these shapes as examples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ..._core.graph.dims import Shape
from ..._core.graph.planned import Example

_LONGEST = 12288  # of rows; measured on an H200
_PIXELS = 4096  # of an image: up to here an estimate of the mean is good enough


def is_sharded(x: jax.Array, axis: int) -> bool:
    """Whether a mesh with explicit axes shards an array's axis, which JAX neither slices nor
    reshapes there."""
    spec = jax.typeof(x).sharding.spec
    return axis < len(spec) and spec[axis] not in (None, ())


class Extent:
    """The dimensions over which a kind of normalization takes mean and variance."""

    centred = True
    """Whether the mean is subtracted."""

    def reduced(self, shape: Shape, scale: Shape) -> tuple[int, ...]:
        """The normalized dimensions of an input with this scale."""
        raise NotImplementedError

    def scales(self, shape: Shape) -> str:
        """A description of the valid shapes of a scale for this input."""
        raise NotImplementedError

    def fits(self, shape: Shape, scale: Shape) -> bool:
        """Whether a scale of the input's rank fits this input."""
        raise NotImplementedError

    def moments(self, x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Mean (0 unless ``centred``) and variance. Squares distances from the mean, so it is
        accurate even if the mean is much larger than the deviation."""
        mean = jnp.mean(x, axis=axes, keepdims=True)
        mean = mean if self.centred else jnp.zeros_like(mean)
        return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)

    def at_once(self, x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Mean and variance from sums of x and of its squares: one pass over x. Loses digits where
        the mean is many deviations, which elements of 16 bits do, too."""
        mean = jnp.mean(x, axis=axes, keepdims=True) if self.centred else 0.0
        variance = jnp.mean(jnp.square(x), axis=axes, keepdims=True) - jnp.square(mean)
        return jnp.broadcast_to(mean, variance.shape), jnp.maximum(variance, 0)

    def favours(self, size: int, kept: bool) -> bool:
        """Whether XLA is faster with one pass over ``size`` elements, whose mean and variance are
        ``kept``: XLA makes one kernel of all that reads a row twice and keeps nothing else."""
        return True


class Rows(Extent):
    """Normalizes the dimensions that the scale has."""

    def __init__(self, centred: bool = True, first: int = 0) -> None:
        self.centred, self.first = centred, first

    def reduced(self, shape: Shape, scale: Shape) -> tuple[int, ...]:
        return tuple(axis for axis in range(self.first, len(shape)) if scale[axis] != 1)

    def favours(self, size: int, kept: bool) -> bool:
        return kept or (isinstance(size, int) and size > _LONGEST)

    def scales(self, shape: Shape) -> str:
        front = [shape[0]] if self.first else []
        return (
            f"{[*front, *(1,) * (len(shape) - 1 - len(front)), shape[-1]]} for the last dimension"
        )

    def fits(self, shape: Shape, scale: Shape) -> bool:
        pairs = [*zip(shape, scale, strict=True)][self.first :]
        if not all(size in (1, whole) for whole, size in pairs):
            return False
        some = any(size != 1 for _, size in pairs) or any(whole == 1 for whole, _ in pairs)
        return some and (not self.first or scale[0] == shape[0])


class Spatial(Extent):
    """Normalizes the spatial dimensions per channel; with ``batch``, over the whole batch."""

    def __init__(self, batch: bool) -> None:
        self.batch = batch

    def reduced(self, shape: Shape, scale: Shape) -> tuple[int, ...]:
        return (*((0,) if self.batch else ()), *range(2, len(shape)))

    def scales(self, shape: Shape) -> str:
        return str([1, *shape[1:2], *(1,) * (len(shape) - 2)])

    def fits(self, shape: Shape, scale: Shape) -> bool:
        return scale == (1, *shape[1:2], *(1,) * (len(shape) - 2))

    def moments(self, x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Over the whole batch, takes one pass over an array that does not fit on the chip: it
        sums distances from an estimate of the mean, the median of the means of three pixels.

        With k pixels, the mean of one is at most k**0.5 deviations from the mean of all, so the
        difference of the two sums loses at most a factor of k of float32's precision, and almost
        nothing if two of the three pixels are typical. Above ``_PIXELS`` it takes two passes.
        """
        pixels = [axis for axis in axes if axis > 1 and isinstance(x.shape[axis], int)]
        pixels = [axis for axis in pixels if not is_sharded(x, axis)]
        count = math.prod(x.shape[axis] for axis in pixels)
        if not (self.batch and 1 < count <= _PIXELS):
            return super().moments(x, axes)
        guesses = []
        for quarter in (1, 2, 3):
            part = x
            for axis in pixels:
                at = x.shape[axis] * quarter // 4
                part = jax.lax.slice_in_dim(part, at, at + 1, axis=axis)
            guesses.append(jnp.mean(part, axis=axes, keepdims=True))
        low, middle, high = guesses
        guess = jnp.maximum(jnp.minimum(low, middle), jnp.minimum(jnp.maximum(low, middle), high))
        away = x - jax.lax.stop_gradient(guess)
        off = jnp.mean(away, axis=axes, keepdims=True)
        variance = jnp.mean(jnp.square(away), axis=axes, keepdims=True) - jnp.square(off)
        return jax.lax.stop_gradient(guess) + off, jnp.maximum(variance, 0)


def backward_example(
    x: Shape, scale: Shape, statistics: Shape, dtype: str = "bfloat16", wide: Sequence[str] = ()
) -> Example:
    """Operands of a backward with a mean; ``wide`` are float32, as the statistics."""
    both = dict.fromkeys(("mean", "inv_variance"), statistics)
    return Example(
        {"grad": x, "input": x, "scale": scale, **both},
        dtype,
        dtypes=dict.fromkeys((*wide, *both), "float32"),
        positive=("inv_variance",),
    )
