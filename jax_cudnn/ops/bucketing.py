"""Pad sequences to a few lengths, because each shape needs a plan and a compilation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError
from .arguments import array, integer


def bucket(length: int, *, least: int = 128, per_doubling: int = 4) -> int:
    """The size of the smallest bucket that holds ``length`` tokens.

    Bucket sizes are ``least`` and ``per_doubling`` equal steps per doubling: by default 128, 160,
    192, 224, 256, 320, 384, 448, 512, 640, ... Padding is less than ``1 / per_doubling`` of the
    length (above ``least``), and lengths up to ``n`` use ``1 + per_doubling * log2(n / least)``
    buckets.

    Args:
        length: the number of tokens, a Python integer of at least 0.
        least: the smallest bucket, a multiple of ``per_doubling``.
        per_doubling: the number of buckets per doubling of the length.

    Raises:
        GraphError: an argument is out of range or not a Python integer.

    Example:
        >>> import jax_cudnn as jc
        >>> [jc.ops.bucket(n) for n in (1, 128, 129, 1000)]
        [128, 128, 160, 1024]
    """
    for name, value, lowest in (
        ("length", length, 0),
        ("least", least, 1),
        ("per_doubling", per_doubling, 1),
    ):
        integer(name, value, lowest, why="shapes are static")
    if least % per_doubling:
        raise GraphError(
            "least is not a multiple of per_doubling",
            expected=f"a multiple of {per_doubling}",
            got=f"least={least}, per_doubling={per_doubling}",
            why="the steps between buckets are equal integers",
        )
    if length <= least:
        return least
    lower = least << ((length - 1) // least).bit_length() - 1  # least * 2**i < length
    step = lower // per_doubling
    return lower + step * math.ceil((length - lower) / step)


def pad_to_bucket(
    x: jax.Array,
    *,
    axis: int = 1,
    lengths: jax.Array | None = None,
    least: int = 128,
    per_doubling: int = 4,
) -> tuple[jax.Array, jax.Array]:
    """Pad sequences to the size of a :func:`bucket`, and return their lengths.

    Each sequence length needs a compiled program and a cuDNN plan; with padding, each bucket does.
    Attention with lengths ignores the padding, as long as it is finite.

    Args:
        x: (B, T, ...), or with tokens along another ``axis``; the batch comes first. A NumPy array
            stays a NumPy array, so that nothing is compiled for T.
        axis: the axis of the tokens.
        lengths: (B,) in int32, the length of each sequence, clipped to [0, T]; by default T.
        least: as for :func:`bucket`.
        per_doubling: as for :func:`bucket`.

    Returns: x padded with zeros after its tokens, and the lengths, (B,) in int32, for
    ``query_seq_lengths`` and ``key_value_seq_lengths`` of :func:`dot_product_attention`.

    Raises:
        GraphError: axis or lengths do not fit, or as for :func:`bucket`.

    Example:
        >>> import numpy as np, jax_cudnn as jc
        >>> tokens, lengths = jc.ops.pad_to_bucket(np.ones((2, 300, 8, 64), np.float32))
        >>> tokens.shape, lengths.tolist()
        ((2, 320, 8, 64), [300, 300])
    """
    of: Any = np if isinstance(x, np.ndarray) else jnp
    x = x if of is np else array("x", x)
    if not -x.ndim <= axis < x.ndim or axis % max(x.ndim, 1) == 0:
        raise GraphError(
            "axis is not valid",
            expected=f"an axis after the batch axis 0, for an array of rank {x.ndim}",
            got=f"axis={axis}, shape {list(x.shape)}",
        )
    axis %= x.ndim
    size = x.shape[axis]
    if lengths is None:
        found = np.full(len(x), size, np.int32)
    elif hasattr(lengths, "dtype"):
        found = lengths
    else:  # Python integers are int64 under x64
        found = array("lengths", lengths)
        found = found.astype(np.int32) if found.dtype == np.int64 else found
    if found.shape != x.shape[:1] or found.dtype != np.int32:
        raise GraphError(
            "lengths are not valid",
            expected=f"int32[{x.shape[0]}], one length per batch element",
            got=f"{found.dtype}{list(found.shape)}",
        )
    more = bucket(size, least=least, per_doubling=per_doubling) - size
    padded = of.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)])
    return padded, of.clip(of.asarray(found), 0, size)
