"""Rotary position embeddings, and the frequencies that long contexts need."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.errors import GraphError, GraphTypeError, nearest, shown
from .._core.primitive import without_explicit_axes
from .arguments import flags, floating, integer, integral, number

_BASE = 10000.0
_SCALINGS = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""By ``rope_type``: the keys that a scaling must have, and those that it may have."""


def rotary_embedding(
    x: jax.Array,
    positions: jax.Array | None = None,
    *,
    base: float = _BASE,
    frequencies: Any = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scale: float = 1.0,
) -> jax.Array:
    r"""Rotates pairs of elements of queries or keys by angles that grow with the position.

    Pair :math:`i` of a token at position :math:`p` is rotated by :math:`\theta = p f_i`:

    .. math:: (a, b) \mapsto s\,(a \cos\theta - b \sin\theta,\; b \cos\theta + a \sin\theta)

    with the frequencies :math:`f_i` and the ``scale`` :math:`s`. The scores of rotated queries and
    keys then depend on the difference of their positions. It runs in XLA, which fuses it with the
    operations before it.

    Angles are products in float32 (in float64 for x of float64). As the frequency and the product
    are rounded, the error is up to :math:`2^{-23}` of the angle: 0.016 for one of 131072 radians.
    Positions above :math:`2^{24}` are rounded to float32 first: to even ones, from :math:`2^{25}`
    on to multiples of 4, and so on.

    Args:
        x: (..., T, N, H) floats: tokens, heads, elements of a head.
        positions: (T,) or (..., T) integers; dimensions before T may be 1. By default 0 to T - 1.
        base: of the default frequencies ``base ** (-2 i / rotary_dim)``.
        frequencies: (rotary_dim // 2,) floats, in radians per position, in place of those of
            ``base``: :func:`rotary_frequencies` has those of Llama 3 and YaRN.
        rotary_dim: the first elements of each head, which are rotated; even, by default H, or
            twice the number of ``frequencies``. The others are returned as they are.
        interleaved: pairs are elements 2 i and 2 i + 1 (GPT-J, RoFormer) instead of i and
            i + rotary_dim // 2 (Llama's and GPT-NeoX's in Hugging Face's layout).
        scale: factor of the rotated elements, YaRN's attention factor.

    Returns:
        An array like x, computed in float32 or wider.

    Raises:
        GraphTypeError: x or frequencies are not floats, positions are not integers, or an option is
            not static.
        GraphError: shapes do not fit, or rotary_dim is odd or larger than H.

    Source: Su et al. 2021, arXiv:2104.09864.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> y = jc.ops.rotary_embedding(jnp.ones((1, 3, 1, 2)))
        >>> [f"{element:.2f}" for element in y[0, 1, 0]]
        ['-0.30', '1.38']
    """
    x = floating("x", x)
    if x.ndim < 3:
        raise GraphError(
            "x has too few dimensions",
            expected="(..., T, N, H): tokens, heads, elements of a head",
            got=f"{x.shape}",
            fix="add a dimension for the heads with x[..., None, :]",
        )
    (interleaved,) = flags(interleaved=interleaved)
    scale, wide = number("scale", scale), jnp.promote_types(x.dtype, jnp.float32)
    if isinstance(frequencies, tuple):
        raise GraphTypeError(
            "frequencies is not an array",
            expected="an array of floats",
            got=shown(frequencies),
            fix="rotary_frequencies returns two: frequencies, scale = rotary_frequencies(...)",
        )
    if frequencies is not None:
        if base != _BASE:
            raise GraphError(
                "base is of the default frequencies, and frequencies are given",
                got=f"base={base}",
                fix=f"pass base to rotary_frequencies: rotary_frequencies(rotary_dim, {base})",
            )
        frequencies = floating("frequencies", frequencies)
        rotary_dim = 2 * frequencies.size if rotary_dim is None else rotary_dim
    size = _rotary_dim(x.shape[-1] if rotary_dim is None else rotary_dim, x.shape[-1])
    if frequencies is None:
        frequencies = _frequencies(size, base)
    elif frequencies.shape != (size // 2,):
        raise GraphError(
            "frequencies are not one for each pair of elements",
            expected=f"({size // 2},) for rotary_dim={size}",
            got=f"{frequencies.shape}",
        )
    at, frequencies = _positions(positions, x.shape), jnp.asarray(frequencies, wide)
    run: Any = functools.partial(_rotated, interleaved=interleaved, scale=scale)
    run = without_explicit_axes(run, (x, at, frequencies), jax.typeof(x).sharding.spec)
    return run(x, at, frequencies)


def _rotated(
    x: jax.Array, at: jax.Array, frequencies: jax.Array, *, interleaved: bool, scale: float
) -> jax.Array:
    half, wide = frequencies.size, frequencies.dtype
    at = at.reshape(*(1,) * (x.ndim - 2 - at.ndim), *at.shape, 1, 1)
    angles = at.astype(wide) * frequencies.reshape(*(1,) * (x.ndim - 1), half)
    cos, sin = jnp.cos(angles) * scale, jnp.sin(angles) * scale
    pairs, axis = ((half, 2), -1) if interleaved else ((2, half), -2)
    both = x[..., : 2 * half].astype(wide).reshape(*x.shape[:-1], *pairs)
    a, b = (lax.index_in_dim(both, i, axis, keepdims=False) for i in (0, 1))
    both = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
    both = both.reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return jnp.concatenate([both, x[..., 2 * half :]], -1)


def rotary_frequencies(
    rotary_dim: int, base: float = _BASE, scaling: Mapping[str, Any] | None = None
) -> tuple[np.ndarray, float]:
    r"""The ``frequencies`` and the ``scale`` of :func:`rotary_embedding` for longer contexts.

    Without a scaling :math:`f_i = b^{-2i/d}` for the base :math:`b` and :math:`d` rotated elements,
    and the scale is 1. A scaling has the names and the meaning of ``rope_scaling`` in a Hugging
    Face configuration. With its ``factor`` :math:`F` and the length :math:`L`
    (``original_max_position_embeddings``) that a model was trained for, frequencies become

    .. math:: f_i \leftarrow (1 - g_i) f_i / F + g_i f_i

    ========== ====================================================================================
    rope_type  :math:`g_i`
    ========== ====================================================================================
    default    1
    linear     0
    llama3     :math:`(L f_i / 2\pi - l) / (h - l)` within 0 and 1; :math:`l` is
               ``low_freq_factor``, :math:`h` ``high_freq_factor``
    yarn       :math:`1 - (i - r(\beta_{fast})) / (r(\beta_{slow}) - r(\beta_{fast}))` within 0 and
               1, with :math:`r(\beta) = d \ln(L / 2\pi\beta) / (2 \ln b)`, rounded down for
               ``beta_fast`` (32) and up for ``beta_slow`` (1) unless ``truncate`` is False
    ========== ====================================================================================

    YaRN's scale is ``attention_factor``, by default :math:`m(1)` with
    :math:`m(k) = 0.1\,k \ln F + 1`, or :math:`m(k_1) / m(k_2)` with ``mscale`` :math:`k_1` and
    ``mscale_all_dim`` :math:`k_2` (DeepSeek's). It applies to queries and to keys.

    Args:
        rotary_dim: the number of rotated elements of a head, even.
        base: above 0; ``rope_theta`` in a configuration.
        scaling: None, or a mapping with ``rope_type`` and the keys of that type.

    Returns:
        Frequencies, (rotary_dim // 2,) in float64, and the scale.

    Raises:
        GraphError: a key of the scaling is missing or unknown, or a value is out of range.

    Source: Llama 3's ``apply_scaling`` (github.com/meta-llama/llama-models); Peng et al. 2023,
    arXiv:2309.00071; ``modeling_rope_utils`` of Hugging Face's transformers.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}
        >>> frequencies, scale = jc.ops.rotary_frequencies(64, 1e6, yarn)
        >>> x = jnp.ones((2, 8, 4, 64))
        >>> y = jc.ops.rotary_embedding(x, frequencies=frequencies, scale=scale)
        >>> frequencies.shape, round(scale, 3), y.shape
        ((32,), 1.139, (2, 8, 4, 64))
    """
    size = _rotary_dim(rotary_dim)
    plain, given = _frequencies(size, base), _scaling(scaling)
    kind, factor = given["rope_type"], given.get("factor", 1.0)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / factor, 1.0
    length = given["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        kept = (length * plain / (2 * math.pi) - low) / (high - low)
    else:
        betas = given.get("beta_fast", 32.0), given.get("beta_slow", 1.0)
        first, last = (
            size * math.log(length / (2 * math.pi * beta)) / (2 * math.log(base)) for beta in betas
        )
        if given.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        width = last - first if last != first else 0.001  # as transformers has it
        kept = 1 - (np.arange(size // 2) - first) / width
    kept = np.clip(kept, 0, 1)
    scale = _attention_factor(factor, given) if kind == "yarn" else 1.0
    return (1 - kept) * plain / factor + kept * plain, scale


def _attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    def magnitude(of: float) -> float:
        return 0.1 * of * math.log(max(factor, 1)) + 1

    if "attention_factor" in given:
        return given["attention_factor"]
    if {"mscale", "mscale_all_dim"} <= {*given}:
        return magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return magnitude(1)


def _scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries that are not None, checked; numbers as floats."""
    if scaling is not None and not isinstance(scaling, Mapping):
        raise GraphTypeError(
            "scaling is not a mapping",
            expected='None, or for example {"rope_type": "linear", "factor": 4.0}',
            got=shown(scaling),
            fix="pass the rope_scaling of the model's configuration",
        )
    given = {k: v for k, v in (scaling or {"rope_type": "default"}).items() if v is not None}
    kind = given.setdefault("rope_type", given.pop("type", None))  # "type" in older configurations
    given.pop("type", None)
    if kind not in _SCALINGS:
        raise GraphError(
            "rope_type is not valid",
            expected=", ".join(map(repr, _SCALINGS)),
            got=shown(kind),
            fix=nearest(kind, _SCALINGS) or "compute the frequencies, and pass frequencies=",
        )
    needed, optional = _SCALINGS[kind]
    missing, unknown = {*needed} - {*given}, {*given} - {*needed, *optional, "rope_type"}
    if missing or unknown:
        raise GraphError(
            f"a scaling of type {kind!r} has other keys",
            expected=f"{', '.join(needed) or 'none'}; optional: {', '.join(optional) or 'none'}",
            got=", ".join(f"{k}={shown(v)}" for k, v in given.items() if k != "rope_type"),
            why=f"missing: {sorted(missing)}" if missing else f"unknown: {sorted(unknown)}",
            fix="pass rope_theta as base=, and rotary_dim for a partial_rotary_factor",
        )
    for name in {*given} - {"rope_type", "truncate"}:
        given[name] = number(name, given[name])
        if given[name] <= 0:
            raise GraphError(f"{name} is not valid", expected="above 0", got=shown(given[name]))
    if kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
        raise GraphError(
            "the scaling has no range of frequencies",
            expected="low_freq_factor below high_freq_factor",
            got=f"{given['low_freq_factor']} and {given['high_freq_factor']}",
        )
    return given


def _rotary_dim(size: Any, most: Any = None) -> int:
    size = integer("rotary_dim", size, 2, "pairs of elements are rotated; their number is static")
    if size % 2 or (most is not None and size > most):
        raise GraphError(
            "rotary_dim is not valid",
            expected="an even number" + ("" if most is None else f" up to the head size {most}"),
            got=f"{size}",
            why="pairs of elements are rotated",
            fix="pass rotary_dim= for the first elements of each head",
        )
    return size


def _frequencies(size: int, base: Any) -> np.ndarray:
    if number("base", base) <= 0:
        raise GraphError("base is not valid", expected="above 0", got=shown(base))
    return float(base) ** (-np.arange(0, size, 2) / size)


def _positions(positions: Any, shape: tuple[Any, ...]) -> jax.Array:
    *batch, count, _, _ = shape
    if positions is None:
        return jnp.arange(count)
    positions = integral("positions", positions, "the index of each token in its sequence")
    whole = (*batch, count)
    fits = positions.ndim in (1, len(whole)) and positions.shape[-1] == count
    own = zip(positions.shape[:-1], batch, strict=False)
    if not fits or any(n not in (1, m) for n, m in own):
        raise GraphError(
            "positions do not fit x",
            expected=f"({count},) or {whole} for x {shape}",
            got=f"{positions.shape}",
        )
    return positions
