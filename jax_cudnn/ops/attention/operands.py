"""Operands of the attention functions: checked and converted to the form that graphs take."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.errors import GraphError, GraphTypeError, shown
from ..._core.graph.dtypes import wide_dtype
from ..arguments import array, floating, int32, number
from . import extras as extras
from .bias import nonempty
from .reference import Band, bound
from .score_mod.value import ScoreMod, check_function
from .score_mod.written import written

BY_TOKEN = (0, 2, 1, 3)
"""(B, H, S, D) in the memory layout of (B, S, H, D), and back."""
Aval = jax.Array | jax.ShapeDtypeStruct
_MASKED = -0.7  # times the largest finite value


def operand(name: str, x: Any, rank: int, heads_first: bool = False) -> jax.Array:
    """An argument with rank 4; GraphError if its rank differs from the query's."""
    x = floating(name, x)
    if x.ndim != rank or rank not in (3, 4):
        form = "N, T, H" if heads_first else "T, N, H"
        raise GraphError(
            f"{name} has the wrong rank",
            expected=f"query, key and value all of the form (B, {form}) or all of ({form})",
            got=f"{name} of shape {list(x.shape)}",
        )
    return x if rank == 4 else x[None]


def by_token(x: jax.Array, heads_first: bool) -> Aval:
    """An operand's shape and dtype as (B, T, N, H)."""
    if not heads_first:
        return x
    b, n, t, h = x.shape
    return jax.ShapeDtypeStruct((b, t, n, h), x.dtype)


def check_operands(query: Aval, key: Aval, value: Aval) -> None:
    """GraphError or GraphTypeError unless the operands are (B, T, N, H), (B, S, K, H) and
    (B, S, K, E)."""
    (b, _, n, h), (*bs, heads, size) = query.shape, key.shape
    fits = size == h and bs[0] == b and value.shape[:3] == key.shape[:3]
    if not fits or heads == 0 or n % heads:
        raise GraphError(
            "query, key and value do not fit together",
            expected="(B, T, N, H), (B, S, K, H) and (B, S, K, E), with N a multiple of K",
            got=f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}",
        )
    check_size(h, query)
    if not query.dtype == key.dtype == value.dtype:
        raise GraphTypeError(
            "query, key and value have different dtypes",
            expected="one dtype",
            got=f"{query.dtype}, {key.dtype} and {value.dtype}",
            fix="cast them before the call",
        )


def check_size(size: int, x: Aval) -> None:
    """GraphError if the query heads in this array have no elements."""
    if size == 0:
        raise GraphError(
            "query heads have no elements",
            expected="a head size H of at least 1",
            got=f"shape {list(x.shape)}",
            why="scores are sums over H, by default divided by sqrt(H)",
        )


def scaled(query: jax.Array, scale: Any) -> tuple[jax.Array, float]:
    """The query and the scalar factor of the scores; an array multiplies the query."""
    if scale is None:
        if isinstance(query.shape[-1], int):
            return query, query.shape[-1] ** -0.5
        raise GraphError("the default scale of a symbolic head size", fix="pass scale")
    if isinstance(scale, numbers.Real):
        return query, number("scale", scale)
    factor = floating("scale", scale)
    sizes = zip(factor.shape[::-1], query.shape[::-1], strict=False)
    if factor.ndim > query.ndim or any(a not in (1, b) for a, b in sizes):
        raise GraphError("scale does not broadcast to the query", got=f"shape {factor.shape}")
    return (query * factor).astype(query.dtype), 1.0


def window_bounds(window: Any) -> tuple[int | None, int | None]:
    """The bounds of cuDNN's band for local_window_size; the left bound is exclusive."""
    if window is None:
        return None, None
    both = window if isinstance(window, (tuple, list)) else (window, window)
    valid = all(isinstance(w, (int, np.integer)) and not isinstance(w, bool) for w in both)
    if len(both) != 2 or not valid or min(both) < 0:
        raise GraphError(
            "local_window_size is not valid",
            expected="two integers (left, right) of at least 0, or one for both",
            got=shown(window),
        )
    left, right = map(bound, both)
    return None if left is None else left + 1, right


def lengths_of(
    queries: Any, keys: Any, query: Aval, key: Aval
) -> tuple[jax.Array, jax.Array] | None:
    """Both lengths as (B, 1, 1, 1) and in range; None if neither is given."""
    if queries is None and keys is None:
        return None
    found = []
    for name, given, of in (
        ("query_seq_lengths", queries, query),
        ("key_value_seq_lengths", keys, key),
    ):
        batch = of.shape[0]
        given = jnp.full(batch, of.shape[1], jnp.int32) if given is None else int32(name, given)
        if given.shape != (batch,) or given.dtype != jnp.int32:
            raise GraphError(
                f"{name} is not valid",
                expected=f"int32[{batch}], one length per batch element",
                got=f"{given.dtype}{list(given.shape)}",
            )
        found.append(jnp.clip(given, 0, of.shape[1]).reshape(batch, 1, 1, 1))
    return nonempty(query.shape[1], *found)


def masking(mask: Any, query: Aval, key: Aval) -> jax.Array | None:
    """The mask with rank 4; GraphTypeError if it is not boolean."""
    if mask is None:
        return None
    mask = broadcasting("mask", mask, query, key)
    if mask.dtype != jnp.bool_:
        raise GraphTypeError(
            "mask is not boolean",
            expected="bool, True where a query sees a key",
            got=f"{mask.dtype}{list(mask.shape)}",
            fix="pass an additive mask as bias, or use mask.astype(bool)",
        )
    return mask


def additive(bias: Any, mask: jax.Array | None, query: Aval, key: Aval) -> jax.Array | None:
    """The bias, with the mask from :func:`masking` folded in, with rank 4."""
    if bias is not None:
        bias = broadcasting("bias", bias, query, key)
        _check_bias(bias)
        bias = bias.astype(query.dtype)
    if mask is None:
        return bias
    seen = jnp.zeros((), query.dtype) if bias is None else bias
    return jnp.where(mask, seen, jnp.asarray(unseen(query.dtype), query.dtype))


def unseen(dtype: Any) -> float:
    """The score of a key hidden by a mask; ``fully_masked_rows`` are handled apart."""
    return _MASKED * float(jnp.finfo(dtype).max)


def _check_bias(bias: jax.Array) -> None:
    if bias.dtype == jnp.bool_ or jnp.issubdtype(bias.dtype, jnp.complexfloating):
        raise GraphTypeError(
            "bias is not real-valued",
            expected="floats, which are added to the scores",
            got=f"{bias.dtype}{list(bias.shape)}",
            fix="pass it as mask=, True where a query sees a key"
            if bias.dtype == jnp.bool_
            else "",
        )


def modification(
    function: Any,
    operands: Sequence[Any],
    query: Aval,
    key: Aval,
    band: Band,
    lengths: Sequence[jax.Array],
) -> tuple[ScoreMod, tuple[jax.Array, ...]]:
    """The score_mod with band and lengths as a value, and its operands in the form that graphs
    take."""
    check_function(function)
    found, truths, kind = [], [], wide_dtype(query)
    for i, given in enumerate(operands):
        x = None if given is None else broadcasting(f"score_mod_operands[{i}]", given, query, key)
        if x is None or jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise GraphTypeError(
                f"score_mod_operands[{i}] is not a real-valued array",
                expected="an array of floats, integers or booleans",
                got=shown(given),
            )
        if x.dtype == jnp.bool_:
            truths.append(i)
            x = x.astype(query.dtype)
        elif jnp.issubdtype(x.dtype, jnp.integer):
            x = x.astype(jnp.int32)
        found.append(x.astype(kind) if x.dtype.itemsize == 8 else x)
    mod, read = written(
        function, found, _scores(query, key), band, lengths, tuple(truths), kind=kind.name
    )
    return mod, tuple(read)


def _scores(query: Aval, key: Aval) -> tuple[int, ...]:
    """The shape of the scores."""
    return query.shape[0], query.shape[2], query.shape[1], key.shape[1]


def broadcasting(name: str, x: Any, query: Aval, key: Aval) -> jax.Array:
    """An array with rank 4; GraphError if it does not broadcast to the scores."""
    x, scores = array(name, x), _scores(query, key)
    shape = (*(1,) * (4 - x.ndim), *x.shape)
    if not _fits(shape, scores):
        per_batch = x.ndim == 3 and _fits((x.shape[0], 1, *x.shape[1:]), scores)
        raise GraphError(
            f"{name} does not fit the scores",
            expected=f"a shape that broadcasts to (B, N, T, S) = {list(scores)}",
            got=f"shape {list(x.shape)}",
            why="rank 3 broadcasts as (N, T, S), as in jax.nn" if per_batch else None,
            fix=f"did you mean {name}[:, None]?" if per_batch else None,
        )
    return x.reshape(shape)


def _fits(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    return len(shape) == 4 and all(a in (1, b) for a, b in zip(shape, scores, strict=True))


Lengths = Sequence[jax.Array] | None


def fully_masked_rows(
    mask: jax.Array | None,
    query: Aval,
    key: Aval,
    *,
    band: Band,
    lengths: Lengths,
    block_mask: jax.Array | None = None,
) -> jax.Array | None:
    """The queries that see some key without ``mask`` but none with it, (B or 1, N or 1, T, 1); None
    if there is no mask.

    Args:
        mask: of rank 4.
        query, key: (B, T, N, H) and (B, S, K, H).
        lengths: of queries and of keys, (B, 1, 1, 1) each.
    """
    if mask is None:
        return None
    t, s = query.shape[1], key.shape[1]
    queries, keys = lengths or (t, s)
    i, j = jnp.arange(t).reshape(1, 1, t, 1), jnp.arange(s).reshape(1, 1, 1, s)
    left = (i < queries) & (j < keys) & band.sees(i, j, keys - queries)
    if block_mask is not None:
        tiles = jnp.repeat(jnp.repeat(block_mask, extras.TILE, 2), extras.TILE, 3)
        left &= tiles[:, :, :t, :s]
    return left.any(-1, keepdims=True) & ~(left & mask).any(-1, keepdims=True)


def unmask_rows(mask: jax.Array | None, rows: jax.Array | None) -> jax.Array | None:
    """The mask with all keys of these rows shown, unless that needs a larger mask: their scores are
    then ordinary values instead of the same large one."""
    if mask is None or rows is None:
        return mask
    fits = all(a in (1, b) for a, b in zip(rows.shape[:3], mask.shape[:3], strict=True))
    return mask | (rows if fits else ~mask.any(-1, keepdims=True))


def fill_with_mean(
    out: jax.Array, statistic: jax.Array, value: jax.Array, rows: jax.Array | None, lengths: Lengths
) -> tuple[jax.Array, jax.Array]:
    """The result (B, N, T, E) with the mean of a batch element's values (B, K, S, E) in these rows,
    and the statistic (B, N, T, 1) of hidden keys.

    If all scores of a row are the same large value, its statistic does not resolve the logarithm of
    their count, from which the backward pass computes their weights.
    """
    if rows is None:
        return out, statistic
    count = value.shape[2]
    if lengths is not None:
        _, keys = lengths
        value = jnp.where(jnp.arange(count).reshape(1, 1, count, 1) < keys, value, 0)
        count = keys
    kind = wide_dtype(value)
    mean = value.astype(kind).sum(2, keepdims=True) / count
    batch, heads, _, size = mean.shape
    groups = out.shape[1] // heads  # jnp.repeat does not support heads sharded over a mesh
    mean = jnp.tile(mean[:, :, None], (1, 1, groups, 1, 1)).reshape(batch, heads * groups, 1, size)
    found = jnp.where(rows, mean, out.astype(kind))  # the gradient's sum is then in float32
    return found.astype(out.dtype), jnp.where(rows, unseen(out.dtype), statistic)
