"""What JAX does with the primitives, in one block; graph/trace.py imports it with ``bind``."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from . import compat, primitive
from .errors import GraphError
from .graph.reference import WIDE, evaluate
from .graph.spec import GraphSpec


def _abstract_eval(*avals: Any, spec: GraphSpec, name: str) -> list[Any]:
    compat.checkify_nans(primitive.cudnn_p, primitive.title)
    for tensor, aval in zip(spec.input_tensors, avals, strict=True):
        if (aval.shape, aval.dtype.name) != (tensor.shape, tensor.dtype):
            raise GraphError(
                f"{name}: operand {tensor.name!r} does not fit the graph",
                expected=str(tensor),
                got=f"{aval.dtype.name}{list(aval.shape)}",
                why="a traced graph has fixed shapes and dtypes",
            )
        if not aval.sharding.mesh.empty:
            primitive.dims_of_type(aval, f"{name}: operand {tensor.name!r}")
    # A derived graph may be one of constants alone.
    template = avals[0] if avals else jax.typeof(jax.numpy.float32(0))
    shardings = [PartitionSpec(*[None] * len(tensor.shape)) for tensor in spec.output_tensors]
    sharded = [aval for aval in avals if any(axis is not None for axis in aval.sharding.spec)]
    if sharded:  # along explicit axes
        from .sharding.work import first_stays, is_left_whole, sharding_types

        template = sharded[0]
        if len({aval.sharding.mesh for aval in sharded}) > 1:
            raise GraphError(
                f"{name}: operands are on several meshes",
                got=", ".join(str(aval.sharding) for aval in sharded),
                fix="put all arrays of a program on one mesh",
            )
        given = [aval.sharding.spec for aval in avals]
        if is_left_whole(spec, given):  # jnp's rules say how its reference's results are sharded
            kept = [
                aval.update(sharding=aval.sharding.update(spec=own))
                for aval, own in zip(avals, first_stays(spec, given), strict=True)
            ]
            for types in (avals, kept):
                with contextlib.suppress(compat.ShardingTypeError):
                    return list(jax.make_jaxpr(functools.partial(evaluate, spec))(*types).out_avals)
        shardings = sharding_types(spec, given, template.sharding.mesh)
    return [
        template.update(
            shape=tensor.shape,
            dtype=jax.numpy.dtype(tensor.dtype),
            weak_type=False,
            sharding=template.sharding.update(spec=sharding),
        )
        for tensor, sharding in zip(spec.output_tensors, shardings, strict=True)
    ]


def _lower(ctx: Any, *operands: Any, spec: GraphSpec, name: str) -> Any:
    if compat.partitioning_mesh(ctx) is None:
        if primitive.observer.get() is not None:
            primitive.observe((spec, name), (primitive.title(spec=spec, name=name), spec, ""))
        return primitive.lower_local(compat.without_types(ctx), *operands, spec=spec, name=name)
    from . import partition  # which programs for one device do without

    return partition.lower(ctx, *operands, spec=spec, name=name)


def _lower_cuda(ctx: Any, *operands: Any, spec: GraphSpec, name: str) -> Any:
    from . import auto, execution  # and all of planning: importing jax_cudnn does without

    plan = auto.of_lowering(ctx, spec, name)
    run = functools.partial(execution.run, plan, name)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _transformed(rule: str, *args: Any, **params: Any) -> Any:
    from .transforms import rules  # which importing jax_cudnn does without

    token = primitive.line.set(params["spec"]._cache.get("line", "") if "spec" in params else "")
    try:
        return getattr(rules, rule)(*args, **params)
    finally:
        primitive.line.reset(token)


for _primitive in (primitive.cudnn_p, primitive.cudnn_local_p):
    _primitive.def_abstract_eval(_abstract_eval)
# Not cached: a cached lowering does not see that an operand is a transpose. cudnn_local_p's is.
mlir.register_lowering(primitive.cudnn_p, _lower, cacheable=False)
mlir.register_lowering(primitive.cudnn_local_p, primitive.lower_reference)
mlir.register_lowering(
    primitive.cudnn_local_p,
    mlir.lower_fun(
        functools.partial(primitive.run_reference, products=WIDE), multiple_results=True
    ),
    platform="cpu",
)
mlir.register_lowering(primitive.cudnn_local_p, _lower_cuda, platform="cuda")
ad.primitive_jvps[primitive.cudnn_p] = functools.partial(_transformed, "jvp_rule", primitive.bind)
ad.primitive_transposes[primitive.cudnn_p] = functools.partial(
    _transformed, "transpose_rule", primitive.bind
)
batching.primitive_batchers[primitive.cudnn_p] = functools.partial(
    _transformed, "batch_rule", primitive.bind
)
compat.dce_rules[primitive.cudnn_p] = functools.partial(_transformed, "dce_rule")
