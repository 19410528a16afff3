"""Sequences of any length in arrays of a few lengths: each shape takes a plan and a compilation."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError


def bucket(length: int, *, least: int = 128, per_doubling: int = 4) -> int:
    """The shortest bucket that holds ``length`` tokens.

    Buckets are ``least`` and, from each doubling of it to the next, ``per_doubling`` in equal
    steps: by default 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, ... Less than
    ``1 / per_doubling`` of a bucket's lower end is padding, and lengths up to ``n`` have
    ``1 + per_doubling * log2(n / least)`` buckets.

    Args:
        length: how many tokens, a Python integer of at least 0.
        least: the shortest bucket, a multiple of ``per_doubling``.
        per_doubling: how many buckets there are to twice a length.

    Raises:
        GraphError: no such integers.

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
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < lowest:
            raise GraphError(
                f"{name} is not valid",
                expected=f"a Python integer of at least {lowest}: shapes are static",
                got=repr(value)[:200],
            )
    if least % per_doubling:
        raise GraphError(
            "least is no multiple of per_doubling",
            expected="equal steps between buckets",
            got=f"least={least}, per_doubling={per_doubling}",
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
    """An array of sequences, padded to the length of a :func:`bucket`, and how long each is.

    Functions of sequences of every length make a program, and cuDNN a plan, for each; of padded
    ones for each bucket. Attention's results do not depend on what is behind the lengths, as
    long as that is finite, as zeros are.

    Args:
        x: (B, T, ...), or with its tokens at ``axis``; examples are in front. A NumPy array stays
            one, so that nothing is compiled for T.
        axis: where the tokens are.
        lengths: (B,) in int32, where examples are shorter than T; by default all have T. They are
            brought into the range from 0 to T.
        least, per_doubling: as :func:`bucket`.

    Returns: x with zeros behind its tokens, and the lengths, (B,) in int32, as
    ``query_seq_lengths`` and ``key_value_seq_lengths`` of :func:`dot_product_attention`.

    Raises:
        GraphError: an axis or lengths that do not fit; as :func:`bucket`.

    Example:
        >>> import numpy as np, jax_cudnn as jc
        >>> tokens, lengths = jc.ops.pad_to_bucket(np.ones((2, 300, 8, 64), np.float32))
        >>> tokens.shape, lengths.tolist()
        ((2, 320, 8, 64), [300, 300])
    """
    array: Any = np if isinstance(x, np.ndarray) else jnp
    x = array.asarray(x)
    if not -x.ndim <= axis < x.ndim or axis % max(x.ndim, 1) == 0:
        raise GraphError(
            "no axis of tokens",
            expected=f"an axis behind the first, for an array of rank {x.ndim}",
            got=f"axis={axis}, shape {list(x.shape)}",
        )
    axis %= x.ndim
    size = x.shape[axis]
    found: Any = array.full(x.shape[0], size, np.int32) if lengths is None else lengths
    found = array.asarray(found)
    if found.shape != x.shape[:1] or found.dtype != np.int32:
        raise GraphError(
            "lengths are not valid",
            expected=f"int32[{x.shape[0]}], the length of each example",
            got=f"{found.dtype}{list(found.shape)}",
        )
    more = bucket(size, least=least, per_doubling=per_doubling) - size
    return array.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)]), array.clip(
        found, 0, size
    )
