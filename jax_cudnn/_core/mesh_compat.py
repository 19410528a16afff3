"""The part of JAX's internals that :mod:`.partition` uses: programs that XLA partitions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_bridge as _xla_bridge
from jax._src.custom_partitioning_sharding_rule import (
    CompoundFactor,
    SdyShardingRule,
    sdy_sharding_rule_to_mlir,
)
from jax._src.interpreters import mlir
from jax._src.lib import xla_client as _xla_client  # pyright: ignore[reportPrivateImportUsage]


def is_exported(ctx: Any) -> bool:
    """Whether a lowering rule makes a program that other processes may run."""
    return ctx.module_context.lowering_parameters.for_export


def keep_alive(ctx: Any, value: Any) -> None:
    """Keeps a value as long as the compiled program."""
    ctx.module_context.add_keepalive(value)


def module_platforms(ctx: Any) -> tuple[Any, Any]:
    """The platforms and the client for which a module is lowered."""
    return ctx.module_context.platforms, ctx.module_context.backend


def register_partitioner(name: str, wanted: Any, partition: Any, inferred: Any) -> None:
    """Has XLA call these for custom calls of a name."""
    register = functools.partial(
        _xla_client.register_custom_call_partitioner,
        name=name,
        prop_user_sharding=wanted,
        partition=partition,
        infer_sharding_from_operands=inferred,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    _xla_bridge.register_plugin_callbacks(register)


def partitioned_call(
    ctx: Any,
    target: str,
    key: bytes,
    operands: Any,
    factors_in: Any,
    factors_out: Any,
    reduced: Any,
) -> Any:
    """The custom call that XLA partitions, with Shardy's rule for it."""
    ir: Any = mlir.ir  # pyright: ignore[reportPrivateImportUsage]
    types = [
        ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
        for aval in ctx.avals_out
    ]
    call = mlir.custom_call(
        target, result_types=types, operands=operands, backend_config=key.decode(), api_version=2
    )
    if _config.use_shardy_partitioner.value:
        alone = itertools.count()
        whole: list[str] = []
        sizes: dict[str, int] = {}

        def letter(factor: Any, size: int) -> Any:
            """A factor's letter; the dimension may have more elements than shards."""
            rest = size if factor is None else size // factor[1]
            if factor is not None and rest == 1:
                return f"f{factor[0]}"
            whole.append(f"w{next(alone)}")
            if factor is None:
                return whole[-1]
            sizes[f"f{factor[0]}"], sizes[whole[-1]] = factor[1], rest
            return CompoundFactor(f"f{factor[0]}", whole[-1])

        given = [ir.RankedTensorType(x.type) for x in operands]
        ins, outs = (
            tuple(tuple(map(letter, dims, t.shape)) for dims, t in zip(side, found, strict=True))
            for side, found in ((factors_in, given), (factors_out, types))
        )
        alone_too = {name for dims in (*ins, *outs) for name in dims if isinstance(name, str)}
        order = dict.fromkeys(f[0] for dims in factors_in for f in dims if f and f[0] in reduced)
        rule_of: Any = SdyShardingRule  # its annotations do not hold
        rule = rule_of(
            ins,
            outs,
            reduction_factors=tuple(f"f{f}" for f in order),  # Shardy wants its own order
            need_replication_factors=tuple(whole),
            **{name: size for name, size in sizes.items() if name not in alone_too},
        )
        call.attributes["sdy.sharding_rule"] = sdy_sharding_rule_to_mlir(rule, given, types)
    return [
        mlir.lower_with_sharding_in_types(ctx, x, aval)
        for x, aval in zip(call.results, ctx.avals_out, strict=True)
    ]


def is_explicit(ctx: Any, mesh: Any) -> bool:
    """Whether the types of operands say all of how a mesh shards them."""
    meshes = [aval.sharding.mesh for aval in ctx.avals_in]
    kinds = jax.sharding.AxisType
    return any(
        m.axis_names == mesh.axis_names and {*m.axis_types} == {kinds.Explicit} for m in meshes
    )


def lower_explicit(ctx: Any, mesh: Any, function: Any, operands: Any) -> Any:
    """Lowers a function of a mesh with explicit axes, abstract values and arrays."""
    types = (jax.sharding.AxisType.Explicit,) * len(mesh.axis_names)
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    else:
        mesh = mesh.update(axis_types=types)
    run = functools.partial(function, mesh, ctx.avals_in)
    with _mesh.use_abstract_mesh(getattr(mesh, "abstract_mesh", mesh)):
        return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def automatic_axes(ctx: Any, mesh: Any) -> Any:
    """A mesh of the axes that a shard_map around leaves out, without devices. XLA numbers the
    devices in a callback's shardings along these alone."""
    manual = getattr(ctx.module_context.axis_context, "manual_axes", frozenset())
    names = tuple(axis for axis in mesh.axis_names if axis not in manual)
    return jax.sharding.AbstractMesh(tuple(mesh.shape[axis] for axis in names), names)


def unflattened(devices: Any, sizes: Any) -> Iterator[Any]:
    """The axes, given with their sizes, in the order in which they number these devices."""
    return iter(_sharding_impls.unflatten_array(sizes, devices))


def hlo_sharding(mesh: Any, spec: Any, rank: int) -> Any:
    return jax.sharding.NamedSharding(mesh, spec)._to_xla_hlo_sharding(rank)


def packed_shardings(shape: Any, shardings: Any) -> Any:
    if shape.is_tuple():
        return _xla_client.HloSharding.tuple_sharding(shape, shardings)
    return shardings[0]


def replicated(shape: Any) -> Any:
    whole = _xla_client.HloSharding.replicate()
    return packed_shardings(shape, [whole] * len(shape.tuple_shapes() if shape.is_tuple() else [0]))


def local_module(body: Any, avals: Any, mesh: Any, platforms: Any, backend: Any) -> bytes:
    """What each device of a mesh runs, as a module."""
    with (
        _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh),
        _core.extend_axis_env_nd(mesh.shape.items()),
    ):
        jaxpr = jax.make_jaxpr(body)(*avals)
        module = mlir.build_mlir_module_helper(
            jaxpr,
            name="jax_cudnn_local",
            platforms=platforms,
            backend=backend,
            axis_context=_sharding_impls.SPMDAxisContext(mesh, frozenset(mesh.axis_names)),
        )
    return mlir.module_to_bytecode(module)
