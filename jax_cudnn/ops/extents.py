"""Over which dimensions normalizations take their mean and variance, and how XLA does."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .._core import compat
from .._core.graph.dims import Shape

_PIXELS = 4096  # of an image, of which a guess of the mean is good enough


class Extent:
    """Over which dimensions a kind of normalization takes its mean and variance."""

    centred = True
    """Whether the mean is subtracted."""

    def reduced(self, shape: Shape, scale: Shape) -> tuple[int, ...]:
        """The normalized dimensions of an input, for a scale."""
        raise NotImplementedError

    def scales(self, shape: Shape) -> str:
        """The shapes of a scale for this input, in words."""
        raise NotImplementedError

    def fits(self, shape: Shape, scale: Shape) -> bool:
        """Whether a scale is one for this input; both have the same rank."""
        raise NotImplementedError

    def moments(self, x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Mean (0 unless ``centred``) and variance, right also where the mean is far larger than
        the distances from it: these are squared."""
        mean = jnp.mean(x, axis=axes, keepdims=True)
        mean = mean if self.centred else jnp.zeros_like(mean)
        return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)


class Rows(Extent):
    """The dimensions that a scale has."""

    def __init__(self, centred: bool = True, first: int = 0) -> None:
        self.centred, self.first = centred, first

    def reduced(self, shape: Shape, scale: Shape) -> tuple[int, ...]:
        return tuple(axis for axis in range(self.first, len(shape)) if scale[axis] != 1)

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
    """The spatial dimensions, of each channel; ``batch``: of all images together."""

    def __init__(self, batch: bool) -> None:
        self.batch = batch

    def reduced(self, shape: Shape, scale: Shape) -> tuple[int, ...]:
        return (*((0,) if self.batch else ()), *range(2, len(shape)))

    def scales(self, shape: Shape) -> str:
        return str([1, *shape[1:2], *(1,) * (len(shape) - 2)])

    def fits(self, shape: Shape, scale: Shape) -> bool:
        return scale == (1, *shape[1:2], *(1,) * (len(shape) - 2))

    def moments(self, x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Of all images together in one pass over what no chip holds: of distances from a guess of
        the mean, the middle one of the means of three pixels of the images.

        Of k pixels the mean of one is at most k**0.5 deviations from that of all, so that the
        difference of the two sums keeps all but a factor of k of float32's digits, and nearly all
        of them where two of the three are like the others. Of more than ``_PIXELS`` it takes two.
        """
        pixels = [axis for axis in axes if axis > 1 and x.shape[axis] > 1]
        pixels = [axis for axis in pixels if not compat.is_sharded(x, axis)]
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
