"""Drop-in replacements for lax functions that run on cuDNN, for Flax's hooks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._core.graph.dtypes import FLOATS, PRODUCTS, canonical
from .arguments import array, chosen, numbers, promoted, transpose
from .convolution.functions import CONV, CONV_TRANSPOSE, dilated
from .convolution.patches import as_patches
from .matmul.functions import DOT_GENERAL, product

log = logging.getLogger("jax_cudnn")


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """``lax.conv_general_dilated`` on cuDNN, with the same arguments and result.

    For Flax: ``nnx.Conv(..., conv_general_dilated=jax_cudnn.ops.conv_general_dilated)``.
    Image dilation without strides runs as a transposed convolution. Calls that cuDNN does not
    support fall back to lax: batch groups, strides together with image dilation, negative padding,
    more than three spatial dimensions, integers without ``preferred_element_type``, and
    complex. The logger ``jax_cudnn`` reports each fallback at debug level.

    Raises: GraphTypeError for operands that are not arrays, the errors of lax for other wrong
    arguments; UnsupportedGraphError under ``jax_cudnn.implementation("cudnn")`` on a GPU on which
    cuDNN has no engine.

    Source: ``jax.lax.conv_general_dilated``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> x, w = jnp.ones((2, 16, 8, 8)), jnp.ones((32, 16, 3, 3))
        >>> jc.ops.conv_general_dilated(x, w, (2, 2), "SAME").shape
        (2, 32, 4, 4)
    """
    lhs, rhs = array("lhs", lhs), array("rhs", rhs)
    aval, plain = _in_lax(
        lax.conv_general_dilated, out_sharding, lhs, rhs, window_strides, padding, lhs_dilation,
        rhs_dilation, dimension_numbers, feature_group_count, batch_group_count, precision,
        preferred_element_type,
    )  # fmt: skip
    if out_sharding is not None:
        return plain("an out_sharding")
    rank = lhs.ndim - 2
    if batch_group_count != 1:
        return plain("batch groups")
    if not 1 <= rank <= 3:
        return plain(f"{rank} spatial dimensions")
    if any(str(a.dtype) not in PRODUCTS for a in (lhs, rhs)) or lhs.dtype != rhs.dtype:
        return plain(f"dtypes {lhs.dtype} and {rhs.dtype}")
    reason = _result_is_laxs(lhs, rhs, aval)
    if reason is not None:
        return plain(reason)
    spec = numbers(lhs, rhs, dimension_numbers)
    image, weight = transpose(lhs, spec.lhs_spec), transpose(rhs, spec.rhs_spec)
    stride = tuple(window_strides)
    spread = tuple(lhs_dilation or (1,) * rank)
    dilate = tuple(rhs_dilation or (1,) * rank)
    window = [d * (r - 1) + 1 for d, r in zip(dilate, weight.shape[2:], strict=True)]
    sizes = [s * (n - 1) + 1 for s, n in zip(spread, image.shape[2:], strict=True)]
    padded = (
        tuple(lax.padtype_to_pads(sizes, window, stride, padding))
        if isinstance(padding, str)
        else tuple(map(tuple, padding))
    )
    out = aval.dtype
    if set(spread) != {1}:
        if set(stride) != {1}:
            return plain("strides and image dilation together")
        if str(lhs.dtype) not in FLOATS:
            return plain("image dilation with 8-bit types")
        function = chosen(CONV_TRANSPOSE, None, precision)
        groups = feature_group_count
        y = dilated(image, weight, padded, spread, dilate, groups, True, canonical(out), function)
        if y is None:
            return plain("padding that no transposed convolution supports")
    elif any(p < 0 for pair in padded for p in pair):
        return plain("negative padding")
    else:
        windows = {"pads": padded, "strides": stride, "dilation": dilate}
        image, weight, windows = as_patches(image, weight, windows)
        y = chosen(CONV, None, precision)(
            image, weight, None, None, None, **windows, activation=None, out=canonical(out)
        )
    return transpose(y, np.argsort(spec.out_spec))


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """``lax.dot_general`` on cuDNN, with the same arguments and result.

    For Flax: ``nnx.Linear(..., dot_general=jax_cudnn.ops.dot_general)``. Contracted, batch and
    free dimensions that are contiguous in memory are read in place; otherwise the operand is copied
    first. Calls that cuDNN does not support fall back to lax: no contracted dimension, float32 at a
    precision that forbids TF32, integers without ``preferred_element_type``, complex,
    and an ``out_sharding``. The logger ``jax_cudnn`` reports each fallback at debug level.

    Raises: GraphTypeError for operands that are not arrays, the errors of lax for other wrong
    arguments; UnsupportedGraphError under ``jax_cudnn.implementation("cudnn")`` on a GPU on which
    cuDNN has no engine.

    Source: ``jax.lax.dot_general``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> x, w = jnp.ones((4, 7, 16)), jnp.ones((16, 32))
        >>> jc.ops.dot_general(x, w, (((2,), (0,)), ((), ()))).shape
        (4, 7, 32)
    """
    lhs, rhs = array("lhs", lhs), array("rhs", rhs)
    aval, plain = _in_lax(
        lax.dot_general, out_sharding, lhs, rhs, dimension_numbers, precision,
        preferred_element_type,
    )  # fmt: skip
    if out_sharding is not None:
        return plain("an out_sharding")
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if not lhs_contract:
        return plain("no contracted dimension")
    names = {str(lhs.dtype), str(rhs.dtype)}
    if not names <= {*PRODUCTS} or (len(names) > 1 and not names & {*FLOATS}):
        return plain(f"dtypes {lhs.dtype} and {rhs.dtype}")
    reason = _result_is_laxs(lhs, rhs, aval)
    if reason is not None:
        return plain(reason)
    lhs, rhs = promoted(lhs, rhs, ("lhs", "rhs"))
    a, a_order = _arranged(lhs, lhs_batch, lhs_contract, contract_last=True)
    b, b_order = _arranged(rhs, rhs_batch, rhs_contract, contract_last=False)
    return product(
        chosen(DOT_GENERAL, None, precision),
        a,
        b,
        out=canonical(aval.dtype),
        batched=len(lhs_batch),
        depth=len(lhs_contract),
        orders=(a_order, b_order),
    )


def _in_lax(
    function: Callable[..., Any], out_sharding: Any, *arguments: Any
) -> tuple[Any, Callable[[str], jax.Array]]:
    """The aval that lax gives for its arguments, which it checks with its own errors; and the
    fallback to it, for a reason."""

    def plain(reason: str) -> jax.Array:
        log.debug("%s: XLA runs it: %s", function.__name__, reason)
        further = {} if out_sharding is None else {"out_sharding": out_sharding}
        return function(*arguments, **further)

    return jax.eval_shape(functools.partial(function, *arguments)), plain


def _result_is_laxs(lhs: jax.Array, rhs: jax.Array, aval: Any) -> str | None:
    """Why a result falls back to lax: cuDNN's values would differ (integers wrap around in lax and
    saturate here, float8 overflows to NaN), or the array is empty, or the dtype is unsupported."""
    if 0 in (*lhs.shape, *rhs.shape, *aval.shape):
        return "an empty array"
    if aval.dtype.name not in (*FLOATS, "int32"):
        return f"a result of {aval.dtype}"
    operands = {str(lhs.dtype), str(rhs.dtype)}
    if aval.dtype.name == "int32" and operands != {"int8"}:
        return f"int32 from {', '.join(sorted(operands))}"
    return None


def _arranged(
    x: jax.Array, batch: Sequence[int], contract: Sequence[int], contract_last: bool
) -> tuple[jax.Array, tuple[int, ...]]:
    """An operand of dot_general as (batch, free, contracted) or (batch, contracted, free), and its
    memory order.

    If the dimensions of each group are adjacent in the array, its order is kept: the layout of the
    call undoes this transpose, so nothing is copied.
    """
    free = tuple(axis for axis in range(x.ndim) if axis not in (*batch, *contract))
    groups = [[*batch], *(([*free], [*contract]) if contract_last else ([*contract], [*free]))]
    axes = [axis for group in groups for axis in group]
    stored = sorted(groups, key=lambda group: group[:1] or [-1])
    y = jnp.transpose(x, axes)
    if [axis for group in stored for axis in group] == list(range(x.ndim)):
        return y, tuple(axes.index(axis) for axis in range(x.ndim))
    return y, tuple(range(x.ndim))
