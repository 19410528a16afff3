"""Matrix products in float8 for training: the product and both of its gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._core import compat
from .._core.errors import GraphError, GraphTypeError
from .._core.graph.promotion import is_tiny
from .._core.graph.reference import saturated
from .._core.primitive import align_varying
from .arguments import floating, preferred_dtype
from .matmul.functions import matmul
from .scaling import E4M3, E5M2, DelayedScaling, amax_of, check_scaling, quantizable, scale_of

_DTYPES = "bfloat16", "float16", "float32"
_MANTISSA, _BIAS = 23, 127  # of a float32: bits after its exponent, and what this has added
_MOST = 63  # of an exponent


class _Array(NamedTuple):
    """What a gradient has of its operand: the dtype, and the sharding where it is explicit."""

    dtype: str
    sharding: Any

    @classmethod
    def of(cls, x: jax.Array, dtype: Any = None) -> _Array:
        sharding = jax.typeof(x).sharding
        explicit = bool(sharding.mesh.explicit_axes)
        return cls(str(dtype or x.dtype), sharding if explicit else None)


class _Kind(NamedTuple):
    x: _Array
    w: _Array
    out: _Array
    grad_dtype: str


class _Narrow(NamedTuple):
    """An array in float8: ``array / 2**exponent`` approximates it. The kernels of these products
    read both operands along the summed dimensions, so it is kept with these last."""

    rows: jax.Array | None  # (..., last)
    columns: jax.Array | None  # (last, ...)
    exponent: jax.Array
    amax: jax.Array


def float8_matmul(
    x: jax.Array,
    w: jax.Array,
    scaling: DelayedScaling | None = None,
    *,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``jnp.matmul(x, w)`` with operands in float8, and both gradients likewise.

    ``x`` and ``w`` are rounded to float8_e4m3fn and the gradient ``dy`` of the result to
    float8_e5m2, each multiplied by a scale that maps it into range. The products ``x w``,
    ``dy w^T`` and ``x^T dy`` read these and accumulate in float32, on Hopper in fewer bits. Scales
    are powers of 2, so that scaling does not round, at most ``max / amax`` with the largest finite
    value of the float8 dtype and the largest absolute value of the array, and within 2**-63 and
    2**63. The residuals of x and w are in float8.

    **Current scaling** (``scaling=None``): amax is that of the array.

    **Delayed scaling** (``DelayedScaling.create(..., operation="matmul")``): amax is that of
    earlier steps, which saves a pass over each array. The gradient with respect to ``scaling`` is
    the state of the next step. Without it, ``dy`` has a current scale. Values out of range
    saturate.

    The products run in XLA: in float8 kernels of cuBLASLt or Triton where the GPU has them,
    elsewhere as products of the same rounded values. Sizes that are multiples of 16 need no padding
    there. Reverse mode of first order only.

    Args:
        x: (..., K) in bfloat16, float16 or float32.
        w: (K, N), likewise; it may be wider than x, such as parameters in float32.
        scaling: the state of delayed scaling, or None.
        preferred_element_type: the dtype of the result, one of these three; by default the promoted
            dtype of the operands. float16 costs a pass over the result: use bfloat16.
        out_sharding: of the result, on a mesh with explicit axes, as in ``jnp.matmul``.

    Returns: (..., N). NaN and infinite elements do not affect the scales, and give NaN in the rows
    and columns that depend on them. Gradients have the dtypes of their operands. Relative errors of
    random inputs, in the norm: about 4 % for the result, and 6 % for gradients. Under ``vmap`` each
    element has its own scales, and products are then not in float8's kernels: merge a batch into
    the rows of x. On sharded arrays the scales are those of the whole arrays; in
    :func:`jax.shard_map`, of each device's.

    Raises:
        GraphTypeError: an operand is not an array of these dtypes, or scaling is not a state of
            this operation.
        GraphError: the shapes do not fit; second derivatives.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> x, w = jnp.ones((4, 7, 32), "bfloat16"), jnp.ones((32, 16), "bfloat16")
        >>> jc.ops.float8_matmul(x, w).shape
        (4, 7, 16)
        >>> state = jc.ops.DelayedScaling.create(16, operation="matmul")
        >>> loss = lambda w, state: jc.ops.float8_matmul(x, w, state).sum()
        >>> gradient, state = jax.jit(jax.grad(loss, (0, 1)))(w, state)
        >>> state.scale.tolist()
        [448.0, 448.0, 57344.0]
    """
    return product(x, w, scaling, preferred_element_type, out_sharding)[0]


def product(
    x: Any, w: Any, scaling: DelayedScaling | None, dtype: Any = None, out_sharding: Any = None
) -> tuple[jax.Array, DelayedScaling | None]:
    """The result of :func:`float8_matmul`, and the state with the largest values of x and w."""
    x, w = floating("x", x, _DTYPES), floating("w", w, _DTYPES)
    check_scaling(scaling, "matmul")
    if not x.ndim or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise GraphError(
            "the operands of float8_matmul do not fit",
            expected="x (..., K) and w (K, N)",
            got=f"x {x.shape}, w {w.shape}",
            fix="pass w.T" if x.shape[-1:] == w.shape[1:] else None,
        )
    out = preferred_dtype(jnp.result_type(x, w) if dtype is None else dtype)
    if out not in _DTYPES:
        raise GraphTypeError(
            "preferred_element_type is not valid", expected=", ".join(_DTYPES), got=out
        )
    x, w, *_ = align_varying((x, w, *jax.tree.leaves(scaling)))
    grad_dtype = E5M2 if scaling is None else scaling.grad_dtype
    of_x, of_w = _Array.of(x), _Array.of(w)
    if out_sharding is None and (of_x.sharding or of_w.sharding):  # that of the same product
        out_sharding = jax.eval_shape(matmul, x, w.astype(x.dtype)).sharding
    kind = _Kind(of_x, of_w, _Array(out, out_sharding), grad_dtype)
    run: Any = _product
    y, amax = run(kind, x, w, scaling)
    if scaling is None:
        return y, None
    return y, lax.stop_gradient(scaling).updated(lax.stop_gradient(amax))


@functools.partial(jax.jit, static_argnums=(1, 3, 4))  # outside of a jit a layout is a placement
def _quantized(x: jax.Array, dtype: str, delayed: Any, rows: bool, columns: bool) -> _Narrow:
    """An array in float8, in the requested orders."""
    amax = amax_of(jnp.where(jnp.isfinite(x), x, 0))
    exponent = _exponent(scale_of(amax, dtype) if delayed is None else delayed)
    narrow = saturated(quantizable(x) * _power_of_2(exponent), dtype)
    if delayed is None:
        narrow = _stored(narrow)
    else:  # amax is of the same pass
        narrow, amax = _stored((narrow, amax))
    turned = _stored(jnp.moveaxis(narrow, -1, 0)) if columns else None
    return _Narrow(narrow if rows else None, turned, exponent, amax)


def _stored(arrays: Any) -> Any:
    """Arrays that are computed once and lie in memory in the order of their dimensions: XLA would
    rather compute them, or choose an order, for each product."""
    return lax.optimization_barrier(jax.tree.map(compat.in_order, arrays))


def _exponent(scale: jax.Array) -> jax.Array:
    """That of the largest power of 2 that is not above a scale. The sum of two is one, too."""
    scale = jnp.clip(scale, 2.0**-_MOST, 2.0**_MOST)
    return (lax.bitcast_convert_type(scale, jnp.int32) >> _MANTISSA) - _BIAS


def _power_of_2(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + _BIAS) << _MANTISSA, jnp.float32)


def _dot(a: Any, b: Any, summed: Any, exponent: jax.Array, out: _Array) -> jax.Array:
    """The product of two arrays, divided by ``2**exponent``, which does not round.

    Both are in float8: XLA drops a conversion to it and back, as excess precision, unless the array
    is :func:`_stored`. So tiny ones may be converted.
    """
    wide = "bfloat16" if out.dtype == "bfloat16" else "float32"
    if is_tiny(a.size, b.size):
        a, b, wide = a.astype("float32"), b.astype("float32"), "float32"
    y = lax.dot_general(
        a, b, (summed, ((), ())), preferred_element_type=wide, out_sharding=out.sharding
    )
    return (y * _power_of_2(-exponent).astype(wide)).astype(out.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    kind: _Kind, x: jax.Array, w: jax.Array, scaling: DelayedScaling | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    y, narrow = _run(kind, x, w, scaling, differentiated=False)
    return y, {name: each.amax for name, each in narrow.items()}


def _run(
    kind: _Kind, x: jax.Array, w: jax.Array, scaling: DelayedScaling | None, differentiated: bool
) -> tuple[jax.Array, dict[str, _Narrow]]:
    """The product, and operands in the orders of its gradients."""
    scales = {} if scaling is None else scaling.scales()
    of_x = _quantized(x, E4M3, scales.get("x"), True, differentiated)
    of_w = _quantized(w, E4M3, scales.get("w"), differentiated, True)
    exponent = of_x.exponent + of_w.exponent
    y = _dot(of_x.rows, of_w.columns, ((x.ndim - 1,), (1,)), exponent, kind.out)
    return y, {"x": of_x._replace(rows=None), "w": of_w._replace(columns=None)}


def _forward(kind: _Kind, x: Any, w: Any, scaling: Any) -> Any:
    """With CustomVJPPrimal for arrays, which says whether it is differentiated."""
    leaves = jax.tree.leaves(scaling)
    x, w, scaling = jax.tree.map(lambda leaf: leaf.value, (x, w, scaling))
    y, narrow = _run(kind, x, w, scaling, differentiated=True)
    requested = any(leaf.perturbed for leaf in leaves)
    kept = narrow, scaling if requested else None
    return (y, {name: each.amax for name, each in narrow.items()}), kept


def _backward(kind: _Kind, kept: Any, cotangents: Any) -> Any:
    dy: Any = cotangents[0]
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros(dy.shape, dy.dtype)  # pyright: ignore[reportArgumentType]
    (narrow, scaling), dy = _once((kept, dy))
    x, w = narrow["x"], narrow["w"]
    delayed = None if scaling is None else scaling.scales()["dy"]
    of_y = _quantized(dy, kind.grad_dtype, delayed, True, True)
    last, rows = dy.ndim - 1, (*range(1, dy.ndim),)
    dx = _dot(of_y.rows, w.rows, ((last,), (1,)), of_y.exponent + w.exponent, kind.x)
    dw = _dot(x.columns, of_y.columns, (rows, rows), x.exponent + of_y.exponent, kind.w)
    if scaling is None:
        return dx, dw, None
    return dx, dw, scaling.updated({"x": x.amax, "w": w.amax, "dy": of_y.amax})


_product.defvjp(_forward, _backward, symbolic_zeros=True)


@jax.custom_jvp
def _once(arrays: Any) -> Any:
    """The arrays, which cannot be differentiated: rounding to float8 has no useful derivative."""
    return arrays


@_once.defjvp
def _once_jvp(primals: Any, tangents: Any) -> Any:
    raise GraphError(
        "float8_matmul has no second derivatives",
        why="its gradient is a product of rounded values",
        fix="differentiate twice in bfloat16: jc.ops.matmul, or layers with float8=None",
    )
