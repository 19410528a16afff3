"""Matrix products with a fused epilogue, with the conventions of jnp and lax."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._core.errors import GraphError
from .._core.graph.dims import packed_strides
from .._core.graph.dtypes import FLOATS, PRODUCTS
from .._core.graph.options import Options, lax_precision
from .._core.graph.promotion import product_operands
from .._core.graph.trace import GraphFunction
from .._core.implementation import CUDNN
from . import epilogue
from .arguments import chosen, out_dtype, preferred_dtype, promoted
from .epilogue import Activation, Terms
from .sharded import merged_or_plain


def _product(g, a, b, scale, bias, residual, *, orders, activation, out):
    dtypes = {str(a.dtype), str(b.dtype)}
    (wide,) = dtypes & {*FLOATS} if len(dtypes) == 2 and dtypes & {*FLOATS} else (None,)
    for operand, order in zip((a, b), orders, strict=True):
        operand.set_stride(packed_strides(operand.shape, order))
    if wide is not None:  # one operand has 8 bits: cuDNN converts it in the same kernel
        a, b = (x if str(x.dtype) == wide else g.identity(x).set_data_type(wide) for x in (a, b))
    y = epilogue.apply(g, g.matmul(a, b), scale, bias, residual, activation)
    return y.set_data_type(out)


_MATMUL = GraphFunction(_product, name="matmul")
DOT_GENERAL = GraphFunction(_product, name="dot_general")
_ROW_MAJOR = (0, 1, 2)
_TRANSPOSED = (0, 2, 1)


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

    On a mesh, merged dimensions may be sharded. With explicit axes, if the merge is not a valid
    reshape, the product falls back to ``jnp.matmul`` with its sharding of the result: the product
    is rounded to the result's dtype, and the epilogue follows. With automatic axes, whose sharding
    types do not show, a product without an epilogue or with only a bias falls back to XLA, unless
    ``options`` or the implementation "cudnn" is given; with any other epilogue, XLA gathers the
    dimensions that it cannot merge. The logger ``jax_cudnn`` reports fallbacks at debug level.
    Inside ``jax.shard_map`` neither applies.

    Raises:
        GraphError, GraphTypeError: the shapes, dtypes or arguments do not fit.
        UnsupportedGraphError: with ``implementation="cudnn"``, when compiled for a GPU on which
            cuDNN has no engine for this product.

    Source: ``jax.numpy.matmul``; cuDNN documentation, ``CUDNN_BACKEND_OPERATION_MATMUL``.

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
    terms = Terms.of(scale, bias, residual, activation, shape=result, features=n, rank=3, axis=2)
    product = _Product(
        chosen(_MATMUL, options, precision, implementation),
        a,
        b,
        terms,
        (transpose_a, transpose_b),
        lead,
        result,
        _out_dtype(a, b, preferred_element_type, terms.given),
    )
    return merged_or_plain(
        "matmul",
        product.fused,
        product.plain,
        groups=[(*lead, m) if product.one_matrix else lead],
        operands=[a, b, terms.residual],
        auto=options is None and implementation != CUDNN and not terms._replace(bias=None).given,
    )


class _Product(NamedTuple):
    """A matrix product with its epilogue, with two implementations."""

    function: GraphFunction
    a: jax.Array
    b: jax.Array
    terms: Terms
    transposed: tuple[bool, bool]
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the result."""
    out: str

    @property
    def one_matrix(self) -> bool:
        """Whether the leading dimensions of a can become rows of one product."""
        return math.prod(self.b.shape[:-2]) == 1 and not self.transposed[0]

    def fused(self) -> jax.Array:
        """Runs the graph, whose arrays have rank 3: merges leading dimensions."""
        a, b, terms = self.a, self.b, self.terms
        if self.one_matrix:
            rows = math.prod(a.shape[:-1])
            a, b = a.reshape(1, rows, a.shape[-1]), b.reshape(1, *b.shape[-2:])
        else:
            a, b = (_batched(x, self.lead) for x in (a, b))
        a, b = _upright(a, b, self.transposed)
        if terms.residual is not None:
            batch = 1 if self.one_matrix else math.prod(self.lead)
            residual = terms.residual.reshape(batch, a.shape[1], b.shape[2])
            terms = terms._replace(residual=residual)
        orders = tuple(_TRANSPOSED if t else _ROW_MAJOR for t in self.transposed)
        activation, out = terms.activation, self.out
        y = self.function(a, b, *terms[:3], orders=orders, activation=activation, out=out)
        return y.reshape(self.shape)

    def plain(self) -> jax.Array:
        """Runs jnp.matmul without merging dimensions. 16-bit products round before their epilogue,
        so that their gradients are 16-bit products, too."""
        a, b = product_operands(*_upright(self.a, self.b, self.transposed))
        precision = self.function.options.precision
        precision = precision and lax_precision(precision)
        dtype = a.dtype if a.dtype.name in (self.out, "int32", "float64") else "float32"
        y = jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)
        terms = self.terms
        if terms.residual is not None:
            terms = terms._replace(residual=terms.residual.reshape(y.shape))
        for name in ("scale", "bias"):  # of rank 3
            if isinstance(x := getattr(terms, name), jax.Array):
                terms = terms._replace(**{name: x.reshape(*(1,) * (y.ndim - 1), x.shape[-1])})
        bias, others = terms.bias, terms._replace(bias=None)
        if isinstance(bias, jax.Array) and bias.dtype == y.dtype == self.out and not others.given:
            return (y + bias).reshape(
                self.shape
            )  # XLA's matmul library adds it in float32, then rounds
        return epilogue.apply_outside(y, terms, self.out).reshape(self.shape)


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
    """Rank 3: one batch dimension, of the full size or of size 1, which broadcasts."""
    if math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:])
    return jnp.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(math.prod(lead), *x.shape[-2:])


def _out_dtype(a: jax.Array, b: jax.Array, preferred: Any, epilogue: bool) -> str:
    names = {str(a.dtype), str(b.dtype)}
    wide = names & {"bfloat16", "float16"}
    if len(names) == 2 and wide and names <= {*PRODUCTS}:  # 8 bits with 16 bits
        return preferred_dtype(preferred) if preferred is not None else wide.pop()
    return out_dtype(a, b, preferred, epilogue)
