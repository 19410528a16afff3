"""Matrix products with a fused epilogue, with the conventions of jnp and lax."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.dtypes import FLOATS, PRODUCTS
from ..._core.graph.layout import packed_strides
from ..._core.graph.options import Options
from ..._core.graph.trace import GraphFunction
from .. import epilogue
from ..arguments import chosen, flags, out_dtype, preferred_dtype, promoted
from ..epilogue import NO_TERMS, Activation, Terms
from .nodes import contracted


def _product(g, a, b, scale, bias, residual, *, batched, depth, orders, activation, out):
    dtypes = {str(a.dtype), str(b.dtype)}
    (wide,) = dtypes & {*FLOATS} if len(dtypes) == 2 and dtypes & {*FLOATS} else (None,)
    for operand, order in zip((a, b), orders, strict=True):
        operand.set_stride(packed_strides(operand.shape, order))
    if wide is not None:  # one operand has 8 bits: cuDNN converts it in the same kernel
        a, b = (x if str(x.dtype) == wide else g.identity(x).set_data_type(wide) for x in (a, b))
    y = contracted(g, a, b, batched=batched, depth=depth)
    return epilogue.apply(g, y, scale, bias, residual, activation).set_data_type(out)


MATMUL = GraphFunction(_product, name="matmul")
DOT_GENERAL = GraphFunction(_product, name="dot_general")


def product(
    function: GraphFunction,
    a: jax.Array,
    b: jax.Array,
    terms: Terms = NO_TERMS,
    *,
    out: str,
    batched: int = 0,
    depth: int = 1,
    orders: tuple[tuple[int, ...], ...] | None = None,
) -> jax.Array:
    """The product of a (batch, rows, depth) and b (batch, depth, columns), which have so many
    dimensions for the batch and the sum, with an epilogue of the result's rank."""
    orders = ((*range(a.ndim),), (*range(b.ndim),)) if orders is None else orders
    return function(
        a,
        b,
        *terms[:3],
        batched=batched,
        depth=depth,
        orders=orders,
        activation=terms.activation,
        out=out,
    )


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    bias: Any = None,
    scale: Any = None,
    residual: jax.Array | None = None,
    activation: Activation = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    options: Options | None = None,
) -> jax.Array:
    """Matrix product with a fused epilogue, in one cuDNN plan.

    ``activation(jnp.matmul(a, b) * scale + bias + residual)``.

    Args:
        a: (..., m, k), or (k,). b: (..., k, n), or (k,). Leading dimensions broadcast; if only
            ``a`` has them, they are merged with m.
        bias, scale: (n,) or a scalar.
        residual: has the shape of the result.
        activation: as in :func:`jax_cudnn.ops.conv`.
        transpose_a, transpose_b: the operand is (..., k, m) or (..., n, k); cuDNN reads it in this
            order, without a copy.
        precision: of float32 products, as in lax: DEFAULT allows TF32. cuDNN has no float32
            matmul without TF32, so HIGH and HIGHEST run in XLA.
        preferred_element_type: dtype of the result. Default: the promoted dtype of the operands;
            float32 for float8, and for int8 with an epilogue; int32 for int8 without one.
        implementation: "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`.
        options: how to choose the plan, see :class:`jax_cudnn.Options`.

    Element types: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2, int8, and bfloat16 or
    float16 with int8 or float8; accumulated in float32 (int8: int32). The epilogue computes in
    float32 and rounds once. float64 runs in XLA.

    Raises:
        GraphError, GraphTypeError: the shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: with ``implementation="cudnn"``, when compiled for a GPU on which
            cuDNN has no engine for this product.

    Source: ``jax.numpy.matmul``; cuDNN documentation, ``CUDNN_BACKEND_OPERATIONMATMUL``.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> x, w = jnp.ones((4, 7, 16)), jnp.ones((16, 32))
        >>> jc.ops.matmul(x, w, bias=jnp.ones(32), activation="gelu").shape
        (4, 7, 32)
    """
    a, b = promoted(a, b, ("a", "b"))
    if not a.ndim or not b.ndim:
        raise GraphError(
            "matmul does not take scalars",
            expected="arrays of rank 1 or more",
            got=f"{a.shape} and {b.shape}",
        )
    transpose_a, transpose_b = flags(transpose_a=transpose_a, transpose_b=transpose_b)
    one_row, one_column = a.ndim == 1, b.ndim == 1
    if one_row:
        a, transpose_a = a[None, :], False
    if one_column:
        b, transpose_b = b[:, None], False
    (m, k), (k2, n) = _matrix(a, transpose_a), _matrix(b, transpose_b)
    if k != k2:
        of_a, of_b = f"transpose_a={not transpose_a}", f"transpose_b={not transpose_b}"
        fitting = {
            of_a: not one_row and m == k2,
            of_b: not one_column and k == n,
            f"{of_a} and {of_b}": not one_row and not one_column and m == n,
        }
        how = next((how for how, fits in fitting.items() if fits), None)
        raise GraphError(
            "the operands of matmul do not fit",
            expected="as many columns in a as rows in b",
            got=f"a {a.shape}{' transposed' if transpose_a else ''} has {k}, "
            f"b {b.shape}{' transposed' if transpose_b else ''} has {k2}",
            fix=f"with {how} they agree" if how else None,
        )
    try:
        lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise GraphError(
            "the leading dimensions of matmul's operands do not broadcast",
            got=f"{a.shape} and {b.shape}",
        ) from None
    result = (*lead, *(() if one_row else (m,)), *(() if one_column else (n,)))
    lead_as_rows = math.prod(b.shape[:-2]) == 1 and not transpose_a
    if lead_as_rows:
        a = a.reshape(*(1,) * (len(lead) + 2 - a.ndim), *a.shape)
        b = b.reshape(b.shape[-2:])
    else:
        a, b = (_batched(x, lead) for x in (a, b))
    orders = tuple(
        (*range(x.ndim - 2), *((x.ndim - 1, x.ndim - 2) if t else (x.ndim - 2, x.ndim - 1)))
        for x, t in ((a, transpose_a), (b, transpose_b))
    )
    full = (*lead, m, n)
    terms = Terms.of(
        scale, bias, residual, activation, shape=result, features=n, rank=len(full), axis=-1
    )
    if terms.residual is not None:
        terms = terms._replace(residual=terms.residual.reshape(full))
    y = product(
        chosen(MATMUL, options, precision, implementation),
        *_upright(a, b, (transpose_a, transpose_b)),
        terms,
        out=_out_dtype(a, b, preferred_element_type, terms.given),
        batched=0 if lead_as_rows else len(lead),
        orders=orders,
    )
    return y.reshape(result)


def _upright(
    a: jax.Array, b: jax.Array, transposed: tuple[bool, bool]
) -> tuple[jax.Array, jax.Array]:
    """As (..., m, k) and (..., k, n)."""
    a, b = (jnp.swapaxes(x, -2, -1) if t else x for x, t in zip((a, b), transposed, strict=True))
    return a, b


def _matrix(x: jax.Array, transposed: bool) -> tuple[int, int]:
    rows, columns = x.shape[-2:]
    return (columns, rows) if transposed else (rows, columns)


def _batched(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """With all leading dimensions, of the full sizes or of size 1, which broadcast."""
    if math.prod(x.shape[:-2]) == 1:
        return x.reshape(*(1,) * len(lead), *x.shape[-2:])
    return jnp.broadcast_to(x, (*lead, *x.shape[-2:]))


def _out_dtype(a: jax.Array, b: jax.Array, preferred: Any, epilogue: bool) -> str:
    names = {str(a.dtype), str(b.dtype)}
    wide = names & {"bfloat16", "float16"}
    if len(names) == 2 and wide and names <= {*PRODUCTS}:  # 8 bits with 16 bits
        return preferred_dtype(preferred) if preferred is not None else wide.pop()
    return out_dtype(a, b, preferred, epilogue)
