"""Graphs that merge dimensions which a mesh may shard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from .._core import compat
from .._core.implementation import CUDNN, current

log = logging.getLogger("jax_cudnn")

_tried: ContextVar[bool] = ContextVar("tried", default=False)
"""Whether this is a trial that only determines the sharding of a result."""


def merged_or_plain(
    name: str,
    merged: Callable[[], jax.Array],
    plain: Callable[[], jax.Array],
    *,
    groups: Sequence[Sequence[int]],
    operands: Sequence[jax.Array | None],
    auto: bool,
) -> jax.Array:
    """The result of ``merged``, or of ``plain`` if a mesh may shard the merged dimensions.

    Args:
        name: the operation, for the debug log.
        merged: computes with some dimensions merged.
        plain: computes the same without merging, and shards the result by lax's rules.
        groups: for each merged dimension, the sizes of its parts.
        operands: the operands of both.
        auto: whether to use ``plain`` with Auto mesh axes, too. Types do not show what these
            shard, and XLA gathers a sharded dimension that is merged after another one.
    """
    if not any(sum(size != 1 for size in group) > 1 for group in groups):
        return merged()
    if _tried.get():
        return _by_lax(merged, plain)
    avals = [jax.typeof(x) for x in operands if x is not None]
    meshes = {jax.sharding.get_abstract_mesh(), *(aval.sharding.mesh for aval in avals)}
    if any(axis for aval in avals for axis in aval.sharding.spec) and not _alike(merged, plain):
        reason = "a mesh shards dimensions that would be merged"
    elif auto and current() != CUDNN and any(map(_partitions, meshes)):
        reason = "XLA partitions it along a mesh"
    else:
        return merged()
    log.debug("%s: XLA runs it: %s", name, reason)
    return plain()


def _alike(merged: Callable[[], jax.Array], plain: Callable[[], jax.Array]) -> bool:
    """Whether both shard their results equally on explicit axes. True if only ``plain`` has no
    rule; False if neither has one, so that the user sees lax's error."""
    made = _spec(merged)
    return made is not None and _spec(plain) in (made, None)


def _spec(function: Callable[[], jax.Array]) -> PartitionSpec | None:
    """The sharding of a result, or None if there is no rule for it."""
    token = _tried.set(True)
    try:
        return jax.typeof(jax.eval_shape(function)).sharding.spec
    except compat.ShardingTypeError:
        return None
    finally:
        _tried.reset(token)


def _by_lax(merged: Callable[[], jax.Array], plain: Callable[[], jax.Array]) -> jax.Array:
    """A result with the right sharding, for a trial of an enclosing function."""
    try:
        return plain()
    except compat.ShardingTypeError:
        return merged()


def _partitions(mesh: AbstractMesh) -> bool:
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind is AxisType.Auto for size, kind in axes)
