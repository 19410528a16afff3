"""Products of groups of rows with a matrix each, whose sizes only the device knows."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from .._core import compat
from .._core.errors import GraphError, GraphTypeError, one_of, shown
from .._core.graph.dtypes import FLOATS
from .._core.graph.reference import rounded
from .._core.primitive import (
    align_varying,
    dims_of,
    each_in_turn,
    product_spec,
    resharded,
    without_explicit_axes,
)
from .._core.user_context import TARGET
from .arguments import flags, floating, int32, integral, preferred_dtype, promoted
from .epilogue import Activation, Terms, activation_name, apply_outside

log = logging.getLogger("jax_cudnn")

ROWS, TURNED, WEIGHTS = "rows", "turned", "weights"
"""The products: (M, K) with (E, K, N), (M, K) with (E, N, K), and (M, K) with (M, N), summed over
the rows of each group. The derivatives of each of them are the other two."""
_CONTRACTED = {ROWS: ((1,), (1,)), TURNED: ((1,), (2,)), WEIGHTS: ((0,), (0,))}
_BLOCK_K, _STEPS, _GRID_BLOCK = 64, 4, 8
"""The kernels' fastest settings on an H200, for 8 and for 64 experts."""
_LONG_GROUP = 1024
"""Rows of a group, on average, from which blocks of 192 rows are faster than those of 128."""
_MOST_ROWS = 2**30
"""A running sum of sizes above this is past the last row, and may not fit an int32."""
_MOST_GROUPS = 256
"""The kernels unroll a loop over the groups."""
_ROWS_TILED = 8
"""The kernels read rows in tiles of this height."""


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    bias: jax.Array | None = None,
    activation: Activation = None,
    gate: jax.Array | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: None = None,
    transpose_rhs: bool = False,
    implementation: Literal["xla", "mosaic"] = "mosaic",
) -> jax.Array:
    r"""The product of each group of rows with its own matrix: ``jax.lax.ragged_dot``, and what
    follows it in a layer of experts.

    Row :math:`m` of group :math:`e` gives :math:`a(\sum_k l_{mk} r_{ekn} + b_{en})`, and with a
    gate :math:`a(g_{mn}) (\sum_k l_{mk} r_{ekn} + b_{en})`. The groups follow each other in
    ``lhs``; rows after the last one give 0.

    Args:
        lhs: (M, K), float.
        rhs: (E, K, N), or (E, N, K) with ``transpose_rhs``, which is read as it lies.
        group_sizes: (E,), integers, which only the device needs to know. Negative ones count as 0,
            and groups end at row M.
        bias: (E, N), float, one row for each group.
        activation: as for :func:`jax_cudnn.ops.matmul`.
        gate: (M, N), float, which the activation is then applied to: with
            ``gate=ragged_dot(lhs, other, group_sizes)`` and ``activation="silu"`` this is SwiGLU.
        precision: as for ``jax.lax.ragged_dot``.
        preferred_element_type: the result's dtype; None for that of the operands.
        group_offset: None, as in ``jax.lax.ragged_dot``, which has no other yet.
        transpose_rhs: whether ``rhs`` is (E, N, K).
        implementation: ``"mosaic"`` for JAX's own kernels where they apply, or ``"xla"``.

    Returns:
        (M, N). 16-bit operands are accumulated in float32. The product is rounded to the result's
        dtype; bias, activation and gate are computed in float32 and rounded once.

    On GPUs with compute capability 9.0 (Hopper) JAX's own Mosaic kernels compute it, and its
    derivatives, without waiting for the sizes on the host: for bfloat16 and float16 with a result
    of the same dtype, K and N multiples of 64, M a multiple of 8 from 64 on, and at most 256
    groups. Otherwise, and where XLA partitions the program, ``jax.lax.ragged_dot_general`` does;
    the kernels run in a ``jax.shard_map``. The kernel of the gradient of ``rhs`` multiplies rows of
    other groups with 0: where they are not finite, the gradients of groups next to them are not,
    either. Under ``vmap`` the products run sequentially.

    Raises:
        GraphError: shapes do not fit, there is a ``group_offset``, or the implementation is not
            known.
        GraphTypeError: a dtype is not supported.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> sizes = jnp.array([3, 0, 2])
        >>> jc.ops.ragged_dot(jnp.ones((6, 4)), jnp.ones((3, 4, 2)), sizes)[:, 0]
        Array([4., 4., 4., 4., 4., 0.], dtype=float32)
    """
    lhs, rhs = promoted(lhs, rhs, ("lhs", "rhs"))
    sizes = sizes_of(group_sizes)
    (turned,) = flags(transpose_rhs=transpose_rhs)
    _check(lhs, rhs, sizes, group_offset, turned)
    out = (
        str(lhs.dtype)
        if preferred_element_type is None
        else preferred_dtype(preferred_element_type)
    )
    rows = lhs.shape[0]
    sizes = within(sizes, rows)
    chosen = one_of("implementation of ragged_dot", implementation, ("xla", "mosaic"))
    how = {"precision": precision, "mosaic": chosen == "mosaic"}
    terms = _terms(bias, gate, (rows, rhs.shape[1 if turned else 2]), rhs.shape[0])
    name = activation_name(activation)
    y = _product(TURNED if turned else ROWS, lhs, rhs, sizes, out, **how)
    if name is None and not terms:
        return y
    if "bias" in terms:  # of each row: a product whose derivatives are those of the others
        one, kind = jnp.ones((rows, 1), terms["bias"].dtype), terms["bias"].dtype
        exact = {"precision": lax.Precision.HIGHEST, "mosaic": False}
        terms["bias"] = _product(ROWS, one, terms["bias"][:, None], sizes, kind, **exact)
    return _finished(y, sizes.sum(), terms, name, out)


def sizes_of(group_sizes: Any) -> jax.Array:
    """Sizes of groups in int32; GraphTypeError if they are not integers."""
    return int32("group_sizes", integral("group_sizes", group_sizes, "an array of integers, (E,)"))


def within(sizes: jax.Array, rows: Any) -> jax.Array:
    """Sizes of groups that end at the last row; negative ones are 0."""

    def run(sizes: jax.Array) -> jax.Array:
        sizes = jnp.clip(sizes, 0, rows)
        wraps = jnp.cumsum(sizes.astype(jnp.float32)) > _MOST_ROWS
        ends = jnp.where(wraps, rows, jnp.minimum(jnp.cumsum(sizes, dtype=jnp.int32), rows))
        return jnp.diff(ends, prepend=0)

    return without_explicit_axes(run, (sizes,), jax.P(None))(sizes)


def _terms(bias: Any, gate: Any, shape: Any, groups: Any) -> dict[str, jax.Array]:
    """The operands after the product that are given."""
    expected = {
        "bias": ((groups, shape[1]), "(E, N), one row for each group"),
        "gate": (shape, "(M, N), as the result"),
    }
    given = {"bias": bias, "gate": gate}
    terms = {name: floating(name, x) for name, x in given.items() if x is not None}
    for name, term in terms.items():
        if term.shape != expected[name][0]:
            raise GraphError(
                f"{name} of ragged_dot does not fit",
                expected=f"{expected[name][1]}: {expected[name][0]}",
                got=f"shape {term.shape}",
            )
    return terms


def _finished(y: jax.Array, end: Any, terms: Any, activation: str | None, out: str) -> jax.Array:
    """The product of rows with what follows it, in float32; rows from ``end`` on are 0."""
    wide = str(jnp.promote_types(y.dtype, jnp.float32))

    def run(y: jax.Array, end: Any, bias: Any, gate: Any) -> jax.Array:
        if gate is None:
            y = apply_outside(y, Terms(None, bias, None, activation), wide)
        else:
            y = apply_outside(y, Terms(None, bias, None, None), wide)
            y = y * apply_outside(gate, Terms(None, None, None, activation), wide)
        return rounded(jnp.where(jnp.arange(y.shape[0])[:, None] < end, y, 0), out)

    arrays = y, end, terms.get("bias"), terms.get("gate")
    run = without_explicit_axes(run, arrays, jax.typeof(y).sharding.spec, kept=True)
    # The derivative keeps the operands, and computes the float32 values again.
    return jax.checkpoint(run, prevent_cse=False)(*arrays)


def _check(lhs: Any, rhs: Any, sizes: Any, offset: Any, turned: bool) -> None:
    got = f"lhs {lhs.dtype}{list(lhs.shape)}, rhs {rhs.dtype}{list(rhs.shape)}, group_sizes "
    got += f"{sizes.dtype}{list(sizes.shape)}"
    if lhs.dtype != rhs.dtype or str(lhs.dtype) not in FLOATS:
        raise GraphTypeError(
            "ragged_dot multiplies floats",
            expected=", ".join(FLOATS),
            got=got,
            fix="cast them with .astype",
        )
    letters = "(E, N, K)" if turned else "(E, K, N)"
    fits = (lhs.ndim, rhs.ndim, sizes.ndim) == (2, 3, 1)
    if not fits or lhs.shape[1] != rhs.shape[2 if turned else 1] or sizes.shape != rhs.shape[:1]:
        other = fits and lhs.shape[1] == rhs.shape[1 if turned else 2]
        raise GraphError(
            "the operands of ragged_dot do not fit each other",
            expected=f"lhs (M, K), rhs {letters}, group_sizes (E,)",
            got=got,
            why="each group of rows of lhs is multiplied by its own matrix of rhs",
            fix=f"pass transpose_rhs={not turned}" if other else "merge batch dimensions into M",
        )
    if offset is not None:
        raise GraphError(
            "ragged_dot has no group_offset",
            expected="None",
            got=shown(offset),
            why="jax.lax.ragged_dot does not implement it either",
            fix="slice rhs and group_sizes, and the rows of lhs",
        )


def _product(kind: str, lhs: Any, rhs: Any, sizes: Any, out: Any, **how: Any) -> jax.Array:
    lhs, rhs = promoted(lhs, rhs)  # a cotangent may be wider
    operands = align_varying((lhs, rhs, sizes))
    return ragged_p.bind(*operands, kind=kind, out=str(out), **how)[0]


def _reference(
    lhs: Any, rhs: Any, sizes: Any, *, kind: str, out: str, precision: Any, mosaic: bool
) -> list[jax.Array]:
    dtype = jnp.dtype(out)

    def run(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        if lhs.shape[1] == 1:
            return _of_one(lhs, rhs, sizes, kind, precision).astype(dtype)
        numbers = lax.RaggedDotDimensionNumbers(
            (_CONTRACTED[kind], ((), ())), [0], [] if kind == WEIGHTS else [0]
        )
        return lax.ragged_dot_general(lhs, rhs, sizes, numbers, precision, dtype).astype(dtype)

    (rows, features), (*_, before, last) = dims_of(lhs), dims_of(rhs)
    spec = {
        ROWS: product_spec((rows,), last),
        TURNED: product_spec((rows,), before),
        WEIGHTS: product_spec((None, features), last),
    }[kind]
    return [without_explicit_axes(run, (lhs, rhs, sizes), spec)(lhs, rhs, sizes)]


def _of_one(lhs: Any, rhs: Any, sizes: Any, kind: str, precision: Any) -> jax.Array:
    """The product of rows of one element: lax would multiply all rows for each group."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(lhs.shape[0])[:, None]
    if kind == WEIGHTS:
        within = jnp.where((row < ends) & (row >= ends - sizes), lhs, 0)
        wide = jnp.promote_types(lhs.dtype, jnp.float32)
        y = jnp.einsum("me,mn->en", within, rhs, precision=precision, preferred_element_type=wide)
        return y[:, None]
    group = (row >= ends).sum(1)
    of_row = (
        rhs.reshape(rhs.shape[0], rhs.shape[1] * rhs.shape[2])
        .at[group]
        .get(mode="fill", fill_value=0)
    )
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    return jnp.where(group[:, None] < len(ends), lhs.astype(wide) * of_row.astype(wide), 0)


def _abstract_eval(*avals: Any, **params: Any) -> list[Any]:
    return list(jax.make_jaxpr(functools.partial(_reference, **params))(*avals).out_avals)


def _jvp(primals: Any, tangents: Any, *, kind: str, out: str, **how: Any) -> Any:
    lhs, rhs, sizes = primals
    result = _product(kind, lhs, rhs, sizes, out, **how)
    terms = [
        _product(kind, left, right, sizes, out, **how)
        for left, right, moving in ((tangents[0], rhs, 0), (lhs, tangents[1], 1))
        if not isinstance(tangents[moving], ad.Zero)
    ]
    return [result], [sum(terms[1:], terms[0])]


def _transpose(
    cotangents: Any, lhs: Any, rhs: Any, sizes: Any, *, kind: str, out: str, **how: Any
) -> list[Any]:
    (ct,) = cotangents
    of_lhs = ad.is_undefined_primal(lhs)
    moving = lhs.aval if of_lhs else rhs.aval
    if isinstance(ct, ad.Zero):
        gradient = ad.Zero(moving)
    else:
        turned, one, other = {
            (ROWS, True): (TURNED, ct, rhs),
            (ROWS, False): (WEIGHTS, lhs, ct),
            (TURNED, True): (ROWS, ct, rhs),
            (TURNED, False): (WEIGHTS, ct, lhs),
            (WEIGHTS, True): (TURNED, rhs, ct),
            (WEIGHTS, False): (ROWS, lhs, ct),
        }[kind, of_lhs]
        gradient = _product(turned, one, other, sizes, moving.dtype, **how)
        gradient = resharded(gradient, moving.sharding)
    return [gradient, None, None] if of_lhs else [None, gradient, None]


def in_turn(primitive: Any, operands: Any, dims: Any, **params: Any) -> Any:
    """The batching rule of a primitive that runs one element after the other."""
    each = enumerate(zip(operands, dims, strict=True))
    moved = {i: jnp.moveaxis(x, d, 0) for i, (x, d) in each if d is not None}

    def one(given: Any) -> Any:
        whole = tuple(given.get(i, x) for i, x in enumerate(operands))
        return primitive.bind(*align_varying(whole), **params)

    return each_in_turn(one, moved), [0]


@functools.cache
def _kernels() -> Any:
    """JAX's kernels, or None: their modules import JAX's test utilities, which need absl."""
    try:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot as rows
        from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import (
            transposed_ragged_dot as weights,
        )
    except ImportError as error:
        log.debug("ragged_dot: jax.lax's, because JAX's kernels cannot be imported: %s", error)
        return None
    return rows, weights


def _dividing(size: int) -> int:
    """The largest block that divides a size, or 0."""
    return next((block for block in (128, 64) if size % block == 0), 0)


def _blocks(lhs: Any, rhs: Any, sizes: Any, kind: str, out: str) -> tuple[int, int] | None:
    """The blocks of the kernel's result, or None for operands that it does not take."""
    dims = (*lhs.shape, *rhs.shape, *sizes.shape)
    if not all(isinstance(n, int) and n for n in dims):  # of symbolic shapes nothing is known
        return None
    if {str(lhs.dtype), str(rhs.dtype), out} not in ({"bfloat16"}, {"float16"}):
        return None
    (rows, features), (groups,) = lhs.shape, sizes.shape
    side = _dividing(rhs.shape[1 if kind != ROWS else 2])
    fits = rows >= _BLOCK_K and rows % _ROWS_TILED == 0 and groups <= _MOST_GROUPS
    if not (_dividing(features) and side and fits):
        return None
    if kind == WEIGHTS:  # it has 64-bit offsets with x64, and asks the first device for its SMs
        known = hasattr(jax.devices()[0], "core_count") and not jax.config.read("jax_enable_x64")
        return (_dividing(features), side) if known else None
    high = 192 if rows >= groups * _LONG_GROUP and side == 128 else 128
    return (high if rows >= high else 64), side


def _is_hopper(ctx: Any) -> bool:
    """Whether a program is lowered for GPUs of compute capability 9.0 alone."""
    if TARGET.value is not None:
        return TARGET.value.sm_version == 90
    devices = compat.lowering_devices(ctx)
    return {getattr(device, "compute_capability", None) for device in devices} == {"9.0"}


def _by_kernel(lhs: Any, rhs: Any, sizes: Any, *, kind: str, blocks: Any) -> list[jax.Array]:
    of_rows, of_weights = _kernels()
    settings = {"block_m": blocks[0], "block_n": blocks[1], "block_k": _BLOCK_K}
    settings |= {"max_concurrent_steps": _STEPS, "grid_block_n": _GRID_BLOCK}
    inside = jnp.arange(lhs.shape[0])[:, None] < sizes.sum()
    if kind == WEIGHTS:  # of rows after the last group the kernel reads some, times 0
        lhs, rhs = (jnp.where(inside, x, 0) for x in (lhs, rhs))
        return [of_weights(lhs, rhs, group_sizes=sizes, **settings)]
    y = of_rows(lhs, rhs, group_sizes=sizes, transpose_rhs=kind == TURNED, **settings)
    return [jnp.where(inside, y, 0)]


def _lower_cuda(ctx: Any, *operands: Any, mosaic: bool, **params: Any) -> Any:
    kind = params["kind"]
    lhs, rhs, sizes = ctx.avals_in
    blocks = _blocks(lhs, rhs, sizes, kind, params["out"]) if mosaic else None
    if blocks and _is_hopper(ctx) and compat.partitioning_mesh(ctx) is None and _kernels():
        run = functools.partial(_by_kernel, kind=kind, blocks=blocks)
        ctx = compat.without_types(ctx)
    else:
        log.debug("ragged_dot of %s: jax.lax's", ", ".join(map(str, ctx.avals_in)))
        run = functools.partial(_reference, mosaic=mosaic, **params)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


ragged_p = compat.new_primitive("ragged_dot", lambda **params: "ragged_dot")
ragged_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(ragged_p, mlir.lower_fun(_reference, multiple_results=True))
mlir.register_lowering(ragged_p, _lower_cuda, platform="cuda")
ad.primitive_jvps[ragged_p] = _jvp
ad.primitive_transposes[ragged_p] = _transpose
batching.primitive_batchers[ragged_p] = functools.partial(in_turn, ragged_p)
