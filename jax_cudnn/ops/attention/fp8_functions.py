"""fp8 attention of wider arrays, with current or delayed scaling."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._core.graph.layout import packed_strides
from ..._core.graph.options import Options
from ..._core.graph.reference import rounded
from ..._core.graph.trace import GraphFunction
from ..._core.primitive import align_varying, resharded
from ..arguments import chosen, flags
from ..scaling import E4M3, DelayedScaling, amax_of, check_scaling, largest, quantizable, scale_of
from . import arguments
from .bias import LENGTHS
from .fp8_tangent import Quantize
from .reference import Band

_WEIGHTS = largest(E4M3)  # the scale of the softmax weights, which are at most 1
_FACTORS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
_GRADIENTS = ("dQ", "dK", "dV")
_ONE = (1, 1, 1, 1)


class _Kind(NamedTuple):
    """The parameters of an attention call, without its arrays."""

    scale: float
    band: Band
    options: Options | None
    implementation: str | None
    fp8_backward: bool

    def run(self, function: GraphFunction, *arrays: Any, **static: Any) -> Any:
        graph = chosen(function, self.options, "default", self.implementation)  # no float32
        return graph(*arrays, **arguments.attributes(self.scale, self.band, ""), **static)


def _placed(x):
    """A (B, N, T, H) tensor in the memory layout of (B, T, N, H)."""
    return x.set_stride(packed_strides(x.shape, arguments.BY_TOKEN))


def _padding(lengths):
    return dict(zip(LENGTHS, lengths, strict=False))


def _current(g, operands, scales, lengths, **attributes):
    def quantized(x, scale, dtype):
        states = {"input": x._state, "scale": scale._state}
        return _placed(g._append(Quantize(str(dtype)), states))

    narrow = [
        quantized(_placed(x), scales[f"scale_{port}"], E4M3)
        for port, x in zip("qkv", operands, strict=True)
    ]
    out, *_ = g.sdpa_fp8(
        *narrow,
        **{port: scales[port] for port in _FACTORS},
        **_padding(lengths),
        **attributes,
    )
    out = _placed(out.set_data_type(E4M3))
    return quantized(out, scales["descale_o"], operands[0].dtype)


def _forward(g, operands, factors, lengths, *, keep, **attributes):
    out, stats, _, amax = g.sdpa_fp8(
        *map(_placed, operands),
        **factors,
        **_padding(lengths),
        **attributes,
    )
    return (_placed(out), stats, amax) if keep else (_placed(out),)


def _backward(g, operands, stats, factors, lengths, **attributes):
    results = g.sdpa_fp8_backward(
        *map(_placed, operands),
        stats,
        **factors,
        **_padding(lengths),
        **attributes,
    )
    return (*map(_placed, results[:3]), *results[3:])


def _wide_backward(g, operands, stats, lengths, *, left_bound, right_bound, **attributes):
    results = g.sdpa_backward(
        *map(_placed, operands),
        stats,
        **_padding(lengths),
        diagonal_band_left_bound=left_bound,
        diagonal_band_right_bound=right_bound,
        **attributes,
    )
    return tuple(map(_placed, results))


CURRENT = GraphFunction(_current, name="dot_product_attention_fp8")
FORWARD = GraphFunction(_forward, name="dot_product_attention_fp8")
BACKWARD = GraphFunction(_backward, name="dot_product_attention_fp8 (backward)")
WIDE_BACKWARD = GraphFunction(_wide_backward, name="dot_product_attention_fp8 (backward)")


def dot_product_attention_fp8(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scaling: DelayedScaling | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    bottom_right: bool = False,
    fp8_backward: bool = False,
    implementation: str | None = None,
    options: Options | None = None,
) -> jax.Array:
    """Scaled dot-product attention with fp8 matrix products.

    ``softmax(scale * query key^T) value`` for each head. Query, key, value and the softmax weights
    are rounded to float8_e4m3fn, each multiplied by a scale that maps it into range; sums, maxima
    and exponentials are float32. Letters as in :func:`dot_product_attention`.

    **Current scaling** (``scaling=None``): the program computes scales from the arrays: from the
    largest absolute values of query, key and value, from 1 for the weights, and from the largest
    absolute value of value for the result (a weighted mean of values).

    **Delayed scaling** (a :class:`DelayedScaling`): scales come from earlier steps. This saves the
    passes over query, key and value before the call. The gradient with respect to ``scaling`` is
    the state of the next step. Values out of range saturate.

    **Gradients** are by default those of attention in 16 bits (float32 operands: bfloat16), with
    the result and the sums of weights of the fp8 forward pass: on Hopper cuDNN's fp8 backward pass
    mostly takes longer. ``fp8_backward=True`` takes it all the same, and keeps the operands in
    fp8 until then. Its gradient of the result is rounded to float8_e5m2. With current scaling it is
    scaled by its largest absolute value, and the scales of derived quantities come from bounds that
    hold for any input. These are generous: from 32k queries per key head on, small elements of the
    key and value gradients underflow in float8_e5m2. Forward mode needs current scaling and
    ``fp8_backward=True``.

    Args:
        query: (B, T, N, H) or (T, N, H) in bfloat16, float16 or float32. cuDNN requires H to be a
            multiple of 16, and 128 for the fp8 backward pass on SM 90.
        key: (B, S, K, H) or (S, K, H), of query's dtype.
        value: (B, S, K, E) or (S, K, E), of query's dtype.
        scaling: the state of delayed scaling, or None.
        scale: factor of the scores, a Python scalar, by default ``H**-0.5``.
        bottom_right: align the last query with the last key; needs SM 100 or newer.
        is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size: as in
            :func:`dot_product_attention`.
        fp8_backward: whether gradients are of fp8 products, too.
        implementation, options: as in :func:`dot_product_attention`.

    Returns: (B, T, N, E) or (T, N, E), of query's dtype. NaN and infinite inputs do not affect the
    scales, and give NaN in the rows that depend on them. Compared with float32, random inputs give
    results with a relative error (in the norm) of about 6 %, and gradients with 2 to 6 %. With
    ``fp8_backward`` these have about 10 %, and more over thousands of keys, where they are small
    sums of large terms (21 % at 8192, causal). Under ``vmap`` each element has its own
    scales, so the calls run sequentially (put a batch in B), except for results without gradients
    under one shared state of delayed scaling.

    Raises:
        GraphError, GraphTypeError: shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: cuDNN does not support it, with ``implementation="cudnn"``.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; Shah et al. 2024, arXiv:2407.08608; cuDNN
    documentation, "Scaled Dot Product Attention FP8".

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> q, k = jnp.ones((2, 128, 8, 128), "bfloat16"), jnp.ones((2, 128, 2, 128), "bfloat16")
        >>> jc.ops.dot_product_attention_fp8(q, k, k, is_causal=True).shape
        (2, 128, 8, 128)
    """
    check_scaling(scaling, "attention")
    is_causal, bottom_right, fp8_backward = flags(
        is_causal=is_causal, bottom_right=bottom_right, fp8_backward=fp8_backward
    )
    (query, key, value), had_batch = arguments.batched(query=query, key=key, value=value)
    arguments.check_operands(query, key, value)
    band = arguments.band_of(is_causal, local_window_size, bottom_right)
    factor = arguments.scalar_scale(query, scale)
    kind = _Kind(factor, band, options, implementation, fp8_backward)
    lengths = arguments.lengths_of(
        arguments.scores_of(query, key), query_seq_lengths, key_value_seq_lengths
    )
    by_head = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    operands = tuple(align_varying((*by_head, *lengths, *jax.tree.leaves(scaling)))[:3])
    out: Any
    if scaling is None and fp8_backward:
        out = kind.run(CURRENT, operands, _current_factors(operands), lengths)
    else:
        out = _attention(kind, operands, lengths, scaling)
    out = jnp.swapaxes(out, 1, 2)
    if lengths:  # cuDNN 9.19 writes some rows after the last query on an H200
        out = jnp.where(jnp.arange(out.shape[1]).reshape(1, -1, 1, 1) < lengths[0], out, 0)
    return out if had_batch else out[0]


def _factor(x: jax.Array) -> jax.Array:
    return x.reshape(_ONE)


def _scales(
    operands: tuple[jax.Array, ...], scaling: DelayedScaling | None
) -> dict[str, jax.Array]:
    """The scales of q, k, v and of the result, which has v's if they are of these arrays."""
    if scaling is not None:
        return scaling.scales()
    found = {}
    for port, x in zip("qkv", operands, strict=True):
        numbers = jnp.where(jnp.isfinite(x), x, 0)  # other elements do not affect the scale
        found[port] = scale_of(jax.lax.stop_gradient(amax_of(numbers)), E4M3)
    return {**found, "o": found["v"]}


def _current_factors(operands: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    """The factors of q, k, v, the weights and the result."""
    scales = {port: _factor(scale) for port, scale in _scales(operands, None).items()}
    found = {f"scale_{port}": scale for port, scale in scales.items()}
    return {**found, **{f"descale_{p}": 1 / x for p, x in scales.items()}, **_of_weights()}


def _of_weights() -> dict[str, jax.Array]:
    """The factors of the softmax weights, as arrays: cuDNN reads them from device memory."""
    factors = {"scale_s": _WEIGHTS, "descale_s": 1 / _WEIGHTS}
    return {name: jnp.full(_ONE, factor, jnp.float32) for name, factor in factors.items()}


def _quantized(x: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    return rounded(quantizable(x) * scale, dtype)


def _narrow(
    operands: tuple[jax.Array, ...], scales: dict[str, jax.Array]
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """The operands in fp8, and the factors of the forward pass."""
    narrow = [_quantized(x, scales[p], E4M3) for p, x in zip("qkv", operands, strict=True)]
    factors = {f"descale_{port}": _factor(1 / scales[port]) for port in "qkv"}
    return narrow, {**factors, **_of_weights(), "scale_o": _factor(scales["o"])}


def _wide(out: jax.Array, scales: dict[str, jax.Array], dtype: Any) -> jax.Array:
    return (out.astype(jnp.float32) / scales["o"]).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    kind: _Kind, operands: tuple[jax.Array, ...], lengths: Any, scaling: DelayedScaling | None
) -> jax.Array:
    scales = _scales(operands, scaling)
    narrow, factors = _narrow(operands, scales)
    (out,) = kind.run(FORWARD, narrow, factors, lengths, keep=False)
    return _wide(out, scales, operands[0].dtype)


def _with_residuals(
    kind: _Kind, operands: tuple[jax.Array, ...], lengths: Any, scaling: DelayedScaling | None
) -> tuple[jax.Array, Any]:
    scales = _scales(operands, scaling)
    narrow, factors = _narrow(operands, scales)
    narrow_out, stats, amax = kind.run(FORWARD, narrow, factors, lengths, keep=True)
    out = _wide(narrow_out, scales, operands[0].dtype)
    largest = {"o": amax}
    if scaling is not None:
        largest |= {port: amax_of(x) for port, x in zip("qkv", operands, strict=True)}
    kept = [*narrow, narrow_out] if kind.fp8_backward else [*operands, out]
    return out, (kept, stats, lengths, scaling, largest, jnp.zeros(0, out.dtype))


def _gradients(kind: _Kind, residuals: Any, grad: jax.Array) -> Any:
    kept, stats, lengths, scaling, largest, like = residuals  # like has the operands' dtype
    if kind.fp8_backward:
        scales = scaling.scales()
        factors = {f"descale_{n}": _factor(1 / scales[n]) for n in ("q", "k", "v", "o", "dO", "dP")}
        factors |= {f"scale_{n}": _factor(scales[n]) for n in (*_GRADIENTS, "dP")} | _of_weights()
        operands = [*kept, _quantized(grad, scales["dO"], scaling.grad_dtype)]
        *found, dQ, dK, dV, dP = kind.run(BACKWARD, operands, stats, factors, lengths)
        found = [x.astype(jnp.float32) / scales[n] for n, x in zip(_GRADIENTS, found, strict=True)]
        largest = largest | {"dO": amax_of(grad), "dP": dP, "dQ": dQ, "dK": dK, "dV": dV}
    else:
        dtype = like.dtype if like.dtype.itemsize == 2 else jnp.bfloat16
        found = kind.run(WIDE_BACKWARD, [x.astype(dtype) for x in (*kept, grad)], stats, lengths)
    state = None if scaling is None else scaling.updated(largest)
    own = [jax.typeof(operand).sharding for operand in kept[:3]]
    gradients = (resharded(x.astype(like.dtype), s) for x, s in zip(found, own, strict=True))
    return tuple(gradients), None, state


_attention.defvjp(_with_residuals, _gradients)
