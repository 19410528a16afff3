"""``lax.conv_general_dilated`` for the references, in forms that XLA compiles on every platform."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.dtypes import FP8
from ..._core.graph.promotion import product_operands

_EXACT = 1 << 24  # float32 represents all integers up to here
_LARGEST, _HALF = 128, 16  # largest magnitude of int8, and base of its 4-bit halves


def convolved(
    lhs: jax.Array, rhs: jax.Array, *spatial: Any, accumulator: Any, **options: Any
) -> jax.Array:
    """The convolution of two operands, promoted to one dtype, in the dtype ``accumulator``.

    XLA has no integer convolution on a GPU, so int8 runs in float32, split into 4-bit halves where
    the sums would not be exact. With both operands split, sums of up to 74,565 products are exact;
    longer sums round as float32 does.
    """
    if {str(lhs.dtype), str(rhs.dtype)} & {*FP8}:
        # XLA would fuse the conversion into the convolution, and then may find no kernel.
        wide = product_operands(lhs, rhs, accumulator=accumulator)
        lhs, rhs = jax.lax.optimization_barrier((*wide,))
    else:
        lhs, rhs = product_operands(lhs, rhs, accumulator=accumulator)

    def convolve(lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
        return jax.lax.conv_general_dilated(
            lhs, rhs, *spatial, preferred_element_type=dtype, **options
        )

    if not jnp.issubdtype(lhs.dtype, jnp.integer):
        return convolve(lhs, rhs, accumulator)
    products = math.prod(rhs.shape) // max(rhs.shape[options["dimension_numbers"].rhs_spec[0]], 1)
    largest = _LARGEST * _LARGEST
    pieces: list[list[tuple[int, jax.Array]]] = [[(1, lhs)], [(1, rhs)]]
    for i in (0, 1):
        if products * largest >= _EXACT:
            largest = largest // _LARGEST * (_HALF - 1)
            pieces[i] = [*_halves(pieces[i][0][1])]
    sums = [
        convolve(a.astype(jnp.float32), b.astype(jnp.float32), jnp.float32).astype(jnp.int32)
        * (scale_a * scale_b)
        for scale_a, a in pieces[0]
        for scale_b, b in pieces[1]
    ]
    return sum(sums[1:], sums[0]).astype(accumulator)


def _halves(x: jax.Array) -> Iterator[tuple[int, jax.Array]]:
    """The 4-bit halves of an int8 array, each with its factor."""
    high = jnp.floor_divide(x, _HALF)
    yield _HALF, high
    yield 1, x - _HALF * high


def cropped(
    image: jax.Array, padding: Sequence[tuple[int, int]], spread: Sequence[int]
) -> tuple[jax.Array, list[tuple[int, int]], Sequence[int]]:
    """The image after negative padding is applied, the remaining padding and ``spread``.

    With a padding of (-1, 1), jaxlib 0.10.2 reads out of bounds on a CPU. Symbolic padding, which
    lax's convolutions do not take, is applied, too.
    """
    if not all(isinstance(size, int) for pair in padding for size in pair):
        crops = [(*pair, s - 1) for pair, s in zip(padding, spread, strict=True)]
        padding = [(0, 0)] * len(crops)
    elif all(size >= 0 for pair in padding for size in pair):
        return image, list(padding), spread
    else:
        crops = [
            (min(low, 0), min(high, 0), s - 1)
            for (low, high), s in zip(padding, spread, strict=True)
        ]
        padding = [(max(low, 0), max(high, 0)) for low, high in padding]
    zero = jnp.zeros((), image.dtype)
    image = jax.lax.pad(image, zero, [(0, 0, 0), (0, 0, 0), *crops])
    return image, list(padding), [1] * len(spread)
