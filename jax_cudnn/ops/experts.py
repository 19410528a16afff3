"""Experts that are sharded over a mesh axis: rows go to the device that holds their expert."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from .._core import compat
from .._core.errors import GraphError, shown
from .._core.primitive import align_varying
from .arguments import floating, integer
from .ragged import in_turn, sizes_of, within

Experts = Callable[[jax.Array, jax.Array], jax.Array]


def expert_parallel(
    experts: Experts,
    rows: jax.Array,
    group_sizes: jax.Array,
    axis_name: str,
    *,
    most_rows: int | None = None,
) -> jax.Array:
    """Applies experts that are sharded over a mesh axis, in ``jax.shard_map``.

    Each row is sent to the device that holds its expert, and its result comes back. Weights stay
    where they are, and no row is dropped.

    Args:
        experts: the function of this device's experts. It takes rows (R, K), sorted by expert, and
            the number of rows of each (E / D,), as ``jax_cudnn.ops.ragged_dot`` does, and returns
            (R, N), each row from its own row. Rows after the last group are 0 or repeat others.
        rows: (M, K), float: this device's rows, sorted by expert.
        group_sizes: (E,), integers: how many of them each of all E experts gets. Negative sizes
            count as 0, and groups end at row M.
        axis_name: the axis with D devices; the first holds the first E / D experts, and so on.
        most_rows: how many rows this device sends to another one at most, for example the tokens
            times the experts of a token that one device may hold; None for M. Rows above it give 0.

    Returns:
        (M, N), in the order of ``rows``; rows after the last group give 0.

    The rows that a device may receive, R = D ``most_rows``, are what it holds in memory: how many
    come is known on the devices only. On GPUs ``jax.lax.ragged_all_to_all`` moves the rows that
    there are; elsewhere ``jax.lax.all_to_all`` moves R.

    Raises:
        GraphError: shapes do not fit, the devices do not divide the experts, or there is no such
            axis here.
        GraphTypeError: a dtype is not supported.

    Source: Lepikhin 2020, arXiv:2006.16668, without its capacity.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "expert")
        >>> def layer(rows, sizes, weights):  # weights: this device's
        ...     product = lambda rows, sizes: jc.ops.ragged_dot(rows, weights, sizes)
        ...     return jc.ops.expert_parallel(product, rows, sizes, "expert")
        >>> mapped = jax.shard_map(layer, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
        >>> mapped(jnp.ones((6, 4)), jnp.array([4, 0, 2]), jnp.ones((3, 4, 8))).shape
        (6, 8)
    """
    rows, sizes = floating("rows", rows), sizes_of(group_sizes)
    devices = _check(rows, sizes, axis_name)
    count = rows.shape[0] if most_rows is None else integer("most_rows", most_rows, 0)
    most = min(count, rows.shape[0])
    tables = _tables(within(sizes, rows.shape[0]), axis_name, devices, most)
    how = {"axis": axis_name, "devices": devices, "most": most, "rows": rows.shape[0]}
    received = _move(rows, tables, back=False, **how)
    results = experts(received, tables[1, 1].reshape(devices, -1).sum(0))
    if results.shape[:1] != received.shape[:1] or results.ndim != 2:
        raise GraphError(
            "experts do not return a row for each row",
            expected=f"({received.shape[0]}, N)",
            got=f"{results.shape}",
        )
    return _move(results, tables, back=True, **how)


def _check(rows: Any, sizes: Any, axis_name: Any) -> int:
    """How many devices the axis has."""
    try:
        devices = lax.axis_size(axis_name)
    except (NameError, TypeError, ValueError) as error:
        raise GraphError(
            "expert_parallel has no such mesh axis here",
            expected="the name of an axis of a jax.shard_map around the call",
            got=shown(axis_name),
            why=str(error),
            fix="call it in a function that jax.shard_map maps over the axis",
        ) from error
    if rows.ndim != 2 or sizes.ndim != 1 or sizes.shape[0] % devices:
        raise GraphError(
            "the operands of expert_parallel do not fit",
            expected=f"rows (M, K), group_sizes (E,) with E a multiple of {devices} devices",
            got=f"rows {rows.shape}, group_sizes {sizes.shape}",
            why="group_sizes are the sizes for the experts of all devices",
        )
    return devices


def _tables(sizes: jax.Array, axis: str, devices: int, most: int) -> jax.Array:
    """What this device exchanges, (2, 3, E): the first row of each piece here, how many it has, and
    where it starts on the other device; of the pieces that it sends, one for each expert, and of
    those that it receives, from each device one for each expert here."""
    every = lax.all_gather(sizes, axis).reshape(devices, devices, -1)  # source, holder, its experts
    first = jnp.cumsum(every.reshape(devices, -1), axis=1).reshape(every.shape) - every
    ends = jnp.minimum(jnp.cumsum(every, axis=2), most)  # of the rows for a holder
    every = jnp.diff(ends, axis=2, prepend=0)
    by_expert = every.transpose(1, 2, 0)  # a holder's experts, and of each the sources
    ends = jnp.cumsum(by_expert.reshape(devices, -1), axis=1).reshape(by_expert.shape)
    place = (ends - by_expert).transpose(2, 0, 1)
    here = lax.axis_index(axis)
    sent, received = ([x[i] for x in (first, every, place)] for i in (here, (slice(None), here)))
    return jnp.stack([*sent, *received[::-1]]).reshape(2, 3, -1)


def _move(x: jax.Array, tables: jax.Array, **how: Any) -> jax.Array:
    return exchange_p.bind(*align_varying((x, tables)), **how)[0]


def _ragged(x: Any, tables: Any, *, axis: str, devices: int, most: int, rows: int, back: bool):
    """The rows for the experts here, sorted by expert, from all devices, and 0 after them; or,
    ``back``, the rows that were sent, in their places."""
    (first, sent, place), (_, received, _) = tables[::-1] if back else tables
    out = jnp.zeros((rows if back else devices * most, x.shape[1]), x.dtype)
    out, x = align_varying((out, x))
    return [lax.ragged_all_to_all(x, out, first, sent, place, received, axis_name=axis)]


def _padded(x: Any, tables: Any, *, axis: str, devices: int, most: int, rows: int, back: bool):
    """The same with as many rows between two devices as there may be."""
    (first, sent, _), (_, received, _) = tables.reshape(2, 3, devices, -1)
    row = jnp.arange(most)
    valid = row < sent.sum(1, keepdims=True)
    place = jnp.where(valid, first[:, :1] + row, rows)  # (D, most): past the end where padded
    expert = (row[:, None] >= jnp.cumsum(received, axis=1)[:, None]).sum(2)
    order = jnp.argsort(expert.reshape(-1), stable=True)
    exchange = functools.partial(
        lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True
    )
    if not back:
        padded = x.at[place].get(mode="fill", fill_value=0)
        return [exchange(padded).reshape(-1, x.shape[1])[order]]
    moved = exchange(x[jnp.argsort(order)].reshape(devices, most, -1))
    out = jnp.zeros((rows, x.shape[1]), x.dtype)
    return [out.at[place].set(moved, mode="drop")]


def _transpose(cotangents: Any, x: Any, tables: Any, *, back: bool, **how: Any) -> list[Any]:
    (ct,) = cotangents
    zero = isinstance(ct, ad.Zero)
    return [ad.Zero(x.aval) if zero else _move(ct, tables, back=not back, **how), None]


def _jvp(primals: Any, tangents: Any, **how: Any) -> Any:
    (x, tables), (moving, _) = primals, tangents
    zero = isinstance(moving, ad.Zero)
    y = _move(x, tables, **how)
    return [y], [ad.Zero(jax.typeof(y)) if zero else _move(moving, tables, **how)]


def _batch(operands: Any, dims: Any, **how: Any) -> Any:
    """Of equal tables one exchange with wider rows, otherwise sequentially."""
    if dims[1] is not None:
        return in_turn(exchange_p, operands, dims, **how)
    x = jnp.moveaxis(operands[0], dims[0], 1)
    y = _move(x.reshape(x.shape[0], -1), operands[1], **how)
    return [y.reshape(y.shape[0], *x.shape[1:])], [1]


exchange_p = compat.new_primitive("expert_exchange", lambda **how: "expert_exchange")
exchange_p.def_abstract_eval(
    lambda *avals, **how: [*jax.make_jaxpr(functools.partial(_padded, **how))(*avals).out_avals]
)
mlir.register_lowering(exchange_p, mlir.lower_fun(_padded, multiple_results=True))
mlir.register_lowering(exchange_p, mlir.lower_fun(_ragged, multiple_results=True), platform="cuda")
ad.primitive_jvps[exchange_p] = _jvp
ad.primitive_transposes[exchange_p] = _transpose
batching.primitive_batchers[exchange_p] = _batch
