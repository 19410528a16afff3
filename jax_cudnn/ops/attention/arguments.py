"""The arguments of all attention functions: checked, and converted to the form that graphs take."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.errors import GraphError, GraphTypeError, shown
from ..._core.graph.dims import Shape
from ..._core.graph.dtypes import wide_dtype
from ..arguments import array, floating, int32, number
from . import extras
from .base import BOTTOM_RIGHT, TOP_LEFT
from .bias import LENGTHS, clipped_lengths
from .reference import Band, bound
from .score_mod.value import ScoreMod, check_function
from .score_mod.written import written

BY_TOKEN = (0, 2, 1, 3)
"""(B, H, S, D) in the memory layout of (B, S, H, D), and back."""
Aval = jax.Array | jax.ShapeDtypeStruct
_SCORES = "B, N, T, S"
Lengths = Sequence[jax.Array]
"""Those of queries and of keys, (B, 1, 1, 1), or neither."""

# -- query, key and value --------------------------------------------------------------------------


def operands(ranks: Sequence[int], expected: str, **named: Any) -> list[jax.Array]:
    """Arguments as arrays of floats of one of these ranks, the same for all."""
    arrays: list[jax.Array] = []
    for name, given in named.items():
        x = floating(name, given)
        if x.ndim not in ranks or x.ndim != (arrays or [x])[0].ndim:
            raise GraphError(
                f"{name} has the wrong rank",
                expected=expected,
                got=f"{name} of shape {list(x.shape)}",
            )
        arrays.append(x)
    return arrays


def batched(heads_first: bool = False, **named: Any) -> tuple[list[jax.Array], bool]:
    """Query, key and value with a batch dimension, and whether they had it."""
    form = "N, T, H" if heads_first else "T, N, H"
    expected = f"query, key and value all of the form (B, {form}) or all of ({form})"
    arrays = operands((3, 4), expected, **named)
    had = arrays[0].ndim == 4
    return (arrays if had else [x[None] for x in arrays]), had


def by_token(x: jax.Array, heads_first: bool) -> Aval:
    """An operand's shape and dtype with tokens before heads."""
    if not heads_first:
        return x
    b, n, t, h = x.shape
    return jax.ShapeDtypeStruct((b, t, n, h), x.dtype)


def check_operands(query: Aval, key: Aval, value: Aval, paged: bool = False) -> None:
    """GraphError or GraphTypeError unless the operands are (B, T, N, H), (B, S, K, H) and
    (B, S, V, E), or with ``paged`` (B, T, N, H), (P, U, K, H) and (P, U, V, E)."""
    (b, _, n, h), (pages, tokens, heads, size) = query.shape, key.shape
    if paged:
        what, form, further = "query and pages", "P, U", " and at least one page"
        fits = 0 not in (pages, tokens, value.shape[0])
    else:
        what, form, further = "query, key and value", "B, S", ""
        fits = pages == b and value.shape[:2] == key.shape[:2]
    of_values = value.shape[2]
    if not fits or size != h or 0 in (heads, of_values) or n % heads or n % of_values:
        raise GraphError(
            f"{what} do not fit together",
            expected=f"(B, T, N, H), ({form}, K, H) and ({form}, V, E), with N a multiple of K and "
            f"of V{further}",
            got=f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}",
            fix="set heads_first=True for pages (P, K, U, H), and False for (P, U, K, H)"
            if paged
            else None,
        )
    check_size(h, query)
    if not query.dtype == key.dtype == value.dtype:
        raise GraphTypeError(
            f"{what} have different dtypes",
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


def scores_of(query: Aval, key: Aval) -> Shape:
    """The shape of the scores, (B, N, T, S)."""
    return query.shape[0], query.shape[2], query.shape[1], key.shape[1]


# -- scale, band, lengths and other integers -------------------------------------------------------


def scaled(query: jax.Array, scale: Any) -> tuple[jax.Array, float]:
    """The query and the scalar factor of the scores; an array multiplies the query."""
    if scale is None and not isinstance(query.shape[-1], int):
        raise GraphError("the default scale of a symbolic head size", fix="pass scale")
    if scale is None or isinstance(scale, numbers.Real):
        return query, scalar_scale(query, scale)
    factor = floating("scale", scale)
    sizes = zip(factor.shape[::-1], query.shape[::-1], strict=False)
    if factor.ndim > query.ndim or any(a not in (1, b) for a, b in sizes):
        raise GraphError("scale does not broadcast to the query", got=f"shape {factor.shape}")
    return (query * factor).astype(query.dtype), 1.0


def scalar_scale(query: jax.Array, scale: Any) -> float:
    """The factor of the scores where it must be a scalar."""
    instead = "multiply the query by the array, or "
    return query.shape[-1] ** -0.5 if scale is None else number("scale", scale, instead)


def band_of(is_causal: bool, window: Any, bottom_right: bool) -> Band:
    """The keys that a query sees; the left bound of cuDNN's band is exclusive."""
    left = right = None
    if window is not None:
        both = window if isinstance(window, (tuple, list)) else (window, window)
        valid = all(isinstance(w, (int, np.integer)) and not isinstance(w, bool) for w in both)
        if len(both) != 2 or not valid or min(both) < 0:
            raise GraphError(
                "local_window_size is not valid",
                expected="two integers (left, right) of at least 0, or one for both",
                got=shown(window),
            )
        left, right = map(bound, both)
    return Band(None if left is None else left + 1, 0 if is_causal else right, bottom_right)


def attributes(scale: float, band: Band, prefix: str = "diagonal_band_") -> dict[str, Any]:
    """The attributes of a node."""
    return {
        "attn_scale": scale,
        "diagonal_alignment": BOTTOM_RIGHT if band.bottom_right else TOP_LEFT,
        f"{prefix}left_bound": band.left,
        f"{prefix}right_bound": band.right,
    }


def integers(
    name: str, x: Any, shape: Sequence[Any], meaning: str = "", fix: str | None = None
) -> jax.Array:
    """An int32 array of this shape, in which letters are any size of at least 1."""
    x = int32(name, x)
    fits = x.ndim == len(shape) and all(
        own != 0 if isinstance(size, str) else own == size
        for own, size in zip(x.shape, shape, strict=True)
    )
    if not fits or x.dtype != jnp.int32:
        raise GraphError(
            f"{name} is not valid",
            expected=f"int32[{', '.join(map(str, shape))}]{meaning}",
            got=f"{x.dtype}{list(x.shape)}",
            fix=fix,
        )
    return x


def lengths_of(scores: Shape, queries: Any, keys: Any) -> Lengths:
    """Both lengths, in range; none if neither is given."""
    if queries is None and keys is None:
        return ()
    batch, _, *most = scores
    named = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
    found = {}
    for port, (name, given), count in zip(LENGTHS, named.items(), most, strict=True):
        if given is None:
            given = jnp.full(batch, count, jnp.int32)
        given = integers(name, given, (batch,), ", one length per batch element")
        found[port] = given.reshape(batch, 1, 1, 1)
    return tuple(clipped_lengths(scores, found).values())


# -- operands that broadcast to the scores ---------------------------------------------------------


def broadcasting(name: str, x: Any, scores: Shape, letters: str = _SCORES) -> jax.Array:
    """An array with rank 4; GraphError if it does not broadcast to the scores."""
    x = array(name, x)
    shape = (*(1,) * (4 - x.ndim), *x.shape)
    if not _fits(shape, scores):
        per_batch = x.ndim == 3 and _fits((x.shape[0], 1, *x.shape[1:]), scores)
        raise GraphError(
            f"{name} does not fit the scores",
            expected=f"a shape that broadcasts to ({letters}) = {list(scores)}",
            got=f"shape {list(x.shape)}",
            why="rank 3 broadcasts as (N, T, S), as in jax.nn" if per_batch else None,
            fix=f"did you mean {name}[:, None]?" if per_batch else None,
        )
    return x.reshape(shape)


def _fits(shape: Shape, scores: Shape) -> bool:
    return len(shape) == 4 and all(a in (1, b) for a, b in zip(shape, scores, strict=True))


def bias_of(
    bias: Any, scores: Shape, dtype: Any, letters: str = _SCORES, masks: bool = True
) -> jax.Array | None:
    """The bias with rank 4, in the query's dtype; ``masks``: whether the function has a mask."""
    if bias is None:
        return None
    bias = broadcasting("bias", bias, scores, letters)
    if bias.dtype == jnp.bool_ or jnp.issubdtype(bias.dtype, jnp.complexfloating):
        fix = "pass it as mask=, True where a query sees a key" if masks else ""
        raise GraphTypeError(
            "bias is not real-valued",
            expected="floats, which are added to the scores",
            got=f"{bias.dtype}{list(bias.shape)}",
            fix=fix if bias.dtype == jnp.bool_ else "",
        )
    return bias.astype(dtype)


def mask_of(mask: Any, scores: Shape) -> jax.Array | None:
    """The mask with rank 4; GraphTypeError if it is not boolean."""
    if mask is None:
        return None
    mask = broadcasting("mask", mask, scores)
    if mask.dtype != jnp.bool_:
        raise GraphTypeError(
            "mask is not boolean",
            expected="bool, True where a query sees a key",
            got=f"{mask.dtype}{list(mask.shape)}",
            fix="pass an additive mask as bias, or use mask.astype(bool)",
        )
    return mask


def modification(
    function: Any, given: Sequence[Any], scores: Shape, dtype: Any, band: Band, lengths: Lengths
) -> tuple[ScoreMod, tuple[jax.Array, ...]]:
    """The score_mod with band and lengths as a value, and its operands in the form that graphs
    take."""
    check_function(function)
    found, truths, kind = [], [], wide_dtype(jax.ShapeDtypeStruct((), dtype))
    for i, one in enumerate(given):
        x = None if one is None else broadcasting(f"score_mod_operands[{i}]", one, scores)
        if x is None or jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise GraphTypeError(
                f"score_mod_operands[{i}] is not a real-valued array",
                expected="an array of floats, integers or booleans",
                got=shown(one),
            )
        if x.dtype == jnp.bool_:
            truths.append(i)
            x = x.astype(dtype)
        elif jnp.issubdtype(x.dtype, jnp.integer):
            x = x.astype(jnp.int32)
        found.append(x.astype(kind) if x.dtype.itemsize == 8 else x)
    mod, read = written(function, found, scores, band, lengths, tuple(truths), kind=kind.name)
    return mod, tuple(read)


# -- dropout, sinks, ALiBi and block masks ---------------------------------------------------------


def extensions(
    scores: Shape,
    dtype: Any,
    dropout_rate: Any,
    dropout_rng: Any,
    sink: Any,
    alibi: bool,
    block_mask: Any,
    is_causal: bool,
) -> tuple[float | None, dict[str, jax.Array]]:
    """The node's dropout_probability and its operands by port."""
    rate, found = _rate(dropout_rate), {}
    if rate is not None:
        found["seed"] = _seed(dropout_rng)
        found["offset"] = jnp.zeros((1, 1, 1, 2), jnp.uint32)
    if sink is not None:
        found["sink_token"] = sink_of(sink, scores[1], dtype)
    if block_mask is not None:
        found["block_mask"] = _tiles(block_mask, scores)
    if alibi and not is_causal:
        raise GraphError(
            "alibi without is_causal",
            expected="is_causal=True",
            got=f"is_causal={is_causal!r}",
            why="ALiBi defines slopes only for earlier keys",
            fix="pass is_causal=True, or pass other distances as bias",
        )
    return rate, found


def _rate(rate: Any) -> float | None:
    number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
    if not number or not 0 <= float(rate) < 1:
        raise GraphError(
            "dropout_rate is not valid",
            expected="a Python scalar, at least 0 and below 1",
            got=shown(rate),
            why="it is static; under jax.jit list it in static_argnames",
        )
    return float(rate) or None


def _seed(key: Any) -> jax.Array:
    """The key as cuDNN's seed, low word first: ``jax.random.key(7)`` is seed 7."""
    if key is None:
        raise GraphError(
            "dropout_rate without dropout_rng",
            expected="a random key, such as jax.random.key(0)",
            got="dropout_rng=None",
            fix="pass dropout_rng, or omit dropout_rate outside of training",
        )
    key = array("dropout_rng", key, "a jax.random key")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 0:
        data = jax.random.key_data(key)
        key = data if data.size == 2 else jax.random.bits(key, (2,), jnp.uint32)
    if key.shape != (2,) or key.dtype != jnp.uint32:
        raise GraphTypeError(
            "dropout_rng is not a key",
            expected="one jax.random key, or its data, uint32[2]",
            got=f"{key.dtype}{list(key.shape)}",
            fix="make one of a number: jax.random.key(0)",
        )
    return key[::-1].reshape(1, 1, 1, 2)


def sink_of(sink: Any, heads: int, dtype: Any) -> jax.Array:
    sink = array("sink", sink)
    if sink.shape != (heads,) or not jnp.issubdtype(sink.dtype, jnp.floating):
        raise GraphError(
            "sink is not valid",
            expected=f"float32[{heads}], one logit per query head",
            got=f"{sink.dtype}{list(sink.shape)}",
        )
    return sink.astype(wide_dtype(jax.ShapeDtypeStruct((), dtype))).reshape(1, heads, 1, 1)


def _tiles(mask: Any, scores: Shape) -> jax.Array:
    mask = array("block_mask", mask)
    wanted = *scores[:2], *extras.tiles(scores[2], scores[3])
    fits = mask.ndim == 4 and mask.shape[2:] == wanted[2:]
    fits = fits and all(s in (1, w) for s, w in zip(mask.shape, wanted, strict=True))
    if not fits or mask.dtype != jnp.bool_:
        raise (GraphTypeError if fits else GraphError)(
            "block_mask is not valid",
            expected=f"bool{list(wanted)}, or 1 in the first two dimensions",
            got=f"{mask.dtype}{list(mask.shape)}",
            why=f"each element covers {extras.TILE} queries and {extras.TILE} keys",
        )
    packed = extras.packed(mask)
    return jnp.broadcast_to(packed, (*scores[:2], *packed.shape[2:]))
