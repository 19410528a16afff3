"""MXFP8: fp8 values with one power-of-two scale per block of 32, and cuDNN's layout of scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.dims import Shape
from .._core.graph.dtypes import E8M0
from .._core.graph.reference import rounded
from .._core.primitive import dims_of, without_explicit_axes
from .arguments import floating
from .scaling import E4M3, fp8_name, largest

BLOCK = 32
"""Consecutive elements that share a scale."""
_ROWS, _COLUMNS = 128, 4  # of a tile of scales
_TILE = _ROWS * _COLUMNS  # with a dimension of this size, axes are sharded in whole tiles only
_BIAS = 127  # of the exponents
_NAN = 255  # the code of NaN


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def scales_shape(shape: Shape, axis: int, block: int = BLOCK) -> Shape:
    """The shape of the scales of (..., S, D) for blocks along D (-1) or S (-2): the number of
    blocks replaces that dimension, and both are rounded up to whole tiles."""
    *lead, s, d = shape
    if axis == -1:
        return *lead, _up(s, _ROWS), _up(-(-d // block), _COLUMNS)
    return *lead, _up(-(-s // block), _COLUMNS), _up(d, _ROWS)


def quantize_mxfp8(x: jax.Array, axis: int = -1, dtype: Any = E4M3) -> tuple[jax.Array, jax.Array]:
    """Quantize an array to fp8 values with one scale per block of 32, as in ``sdpa_mxfp8``.

    A block's scale is the smallest power of two that brings its largest absolute value into the
    dtype's range; values are divided by it and rounded. If a block contains NaN or infinity, its
    scale is NaN.

    Args:
        x: (B, H, S, D), of floats.
        axis: -1 for blocks along D (q, k and dO in products over D), -2 for blocks along S (v,
            and q, k and dO in products over tokens).
        dtype: float8_e4m3fn or float8_e5m2.

    Returns: (B, H, S, D) of ``dtype``, and the scales in float8_e8m0fnu, of shape
    (B, H, S', D'/32) or (B, H, S'/32, D'), with S' and D' rounded up to multiples of 128. The
    scales are in cuDNN's order: the matrix of scales, with the block index as its second axis, is
    stored as consecutive tiles of 128 by 4, with scale (i, j) of a tile at offset
    ``16 (i % 32) + 4 (i // 32) + j``. So do not index it; use :func:`dequantize_mxfp8`.

    Raises:
        GraphError, GraphTypeError: the rank, axis or dtype is not supported.

    Source: OCP Microscaling Formats 1.0; cuBLAS documentation, "1D Block Scaling Factors Layout".

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> values, scales = jc.ops.quantize_mxfp8(jnp.ones((1, 2, 200, 64)))
        >>> scales.shape, scales.dtype.name
        ((1, 2, 256, 4), 'float8_e8m0fnu')
    """
    x = floating("x", x).astype(jnp.float32)
    name = fp8_name("dtype", dtype)
    _check_blocks(x, axis)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks, most = blocks_of(x, axis, BLOCK)
        factor, codes = powers(most, name)
        values = rounded(without_blocks(blocks * factor[..., None], x.shape, axis), name)
        return values, scales_of(codes, axis)

    specs = jax.P(*dims_of(x)), jax.P(*dims_of(x)[:2], None, None)
    return without_explicit_axes(run, (x,), specs)(x)


def dequantize_mxfp8(values: jax.Array, scales: jax.Array, axis: int = -1) -> jax.Array:
    """The inverse of :func:`quantize_mxfp8`, up to rounding: values times their blocks' scales.

    Args:
        values: (B, H, S, D) in fp8.
        scales: the scales of ``values``, in float8_e8m0fnu.
        axis: the axis of the blocks, -1 or -2.

    Returns: (B, H, S, D) in float32.

    Raises:
        GraphError, GraphTypeError: the rank or axis is not supported, or the scales do not fit.

    Source: OCP Microscaling Formats 1.0.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> x = jnp.full((1, 1, 4, 32), 3.0)
        >>> float(jc.ops.dequantize_mxfp8(*jc.ops.quantize_mxfp8(x))[0, 0, 0, 0])
        3.0
    """
    _check_blocks(values, axis)
    if str(scales.dtype) != E8M0:
        raise GraphTypeError("the scales have a wrong dtype", expected=E8M0, got=str(scales.dtype))
    arrays = values.astype(jnp.float32), scales.astype(jnp.float32)
    run = functools.partial(dequantized, axis=axis)
    return without_explicit_axes(run, arrays, jax.P(*dims_of(values)))(*arrays)


def _check_blocks(x: jax.Array, axis: Any) -> None:
    if x.ndim != 4 or axis not in (-1, -2):
        raise GraphError(
            "the rank or the axis of the blocks is not valid",
            expected="an array (B, H, S, D), and axis=-1 or -2",
            got=f"shape {list(x.shape)}, axis={axis}",
        )


def _exponent(x: jax.Array) -> jax.Array:
    """The smallest representable n with x <= 2**n; -127 for 0. By bits, as JAX's frexp is one
    operation through which no axis is followed."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    least = ((bits + 0x7FFFFF) >> 23) - _BIAS
    return jnp.clip(jnp.where(bits > 0x400000, least, -_BIAS), -_BIAS, _BIAS)


def _power(exponent: jax.Array) -> jax.Array:
    """2**exponent, exactly; 0 if that is not a normal float32."""
    return jax.lax.bitcast_convert_type((exponent + _BIAS) << 23, jnp.float32)


def blocks_of(x: jax.Array, axis: int, block: int) -> tuple[jax.Array, jax.Array]:
    """The blocks of (..., S, D) along D (-1) or S (-2), as (..., rows, blocks, block) filled with
    zeros; and the largest absolute value of each."""
    rows = x if axis == -1 else jnp.swapaxes(x, -1, -2)
    *lead, size = rows.shape
    filled = jnp.pad(rows, [(0, 0)] * len(lead) + [(0, _up(size, block) - size)])
    blocks = filled.reshape(*lead, filled.shape[-1] // block, block)
    return blocks, jnp.max(jnp.abs(blocks), axis=-1, initial=0)


def without_blocks(blocks: jax.Array, shape: Shape, axis: int) -> jax.Array:
    """The inverse of :func:`blocks_of`."""
    *lead, count, block = blocks.shape
    rows = blocks.reshape(*lead, count * block)[..., : shape[axis]]
    return rows if axis == -1 else jnp.swapaxes(rows, -1, -2)


def powers(most: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """For blocks with these largest absolute values the factor that brings them into the range of
    a dtype, and the codes of its inverse in float8_e8m0fnu."""
    exponent = _exponent(most / largest(dtype))
    codes = jnp.where(jnp.isfinite(most), exponent + _BIAS, _NAN).astype(jnp.uint8)
    return _power(-exponent), codes


def scales_of(codes: jax.Array, axis: int, dtype: str = E8M0) -> jax.Array:
    """Codes of 8 bits (..., rows, blocks) as scales in tiles."""
    *lead, rows, blocks = codes.shape
    m, n = _up(rows, _ROWS), _up(blocks, _COLUMNS)
    filled = jnp.pad(codes, (*[(0, 0)] * len(lead), (0, m - rows), (0, n - blocks)))
    parts = filled.reshape(*lead, m // _ROWS, 4, 32, n // _COLUMNS, _COLUMNS)
    tiles = jnp.swapaxes(parts, -4, -2).reshape(*lead, m // _ROWS, n // _COLUMNS, _TILE)
    ordered = tiles.reshape(*lead, m, n) if axis == -1 else tiles.reshape(*lead, n, m)
    return jax.lax.bitcast_convert_type(ordered, jnp.dtype(dtype))


def fitting_scales(scales: Any, values: Any, axis: int, block: int) -> Shape:
    """The shape of the scales of values; GraphError if they have another."""
    wanted = scales_shape(values.shape, axis, block)
    if scales.shape != wanted:
        raise GraphError(
            "the scales do not fit the values",
            expected=f"{list(wanted)} in tiles of {_ROWS} by {_COLUMNS}, for {list(values.shape)}",
            got=f"{list(scales.shape)}, blocks of {block} along axis {axis}",
        )
    return wanted


def dequantized(values: jax.Array, scales: jax.Array, axis: int, block: int = BLOCK) -> jax.Array:
    """Values times the scales of their blocks, which are in tiles."""
    wanted = fitting_scales(scales, values, axis, block)
    *lead, m, n = wanted if axis == -1 else (*wanted[:-2], *wanted[:-3:-1])
    tiles = scales.reshape(*lead, m // _ROWS, n // _COLUMNS, _TILE)
    parts = tiles.reshape(*lead, m // _ROWS, n // _COLUMNS, 32, 4, _COLUMNS)
    rows = jnp.swapaxes(parts, -4, -2).reshape(*lead, m, n)
    each = jnp.repeat(rows, block, axis=-1)
    each = each if axis == -1 else jnp.swapaxes(each, -1, -2)
    return values * each[..., : values.shape[-2], : values.shape[-1]]
