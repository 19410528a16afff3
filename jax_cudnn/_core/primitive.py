"""The primitives, parameterised by a GraphSpec: bind, abstract evaluation, lowering.

``cudnn_p`` is what a user's program holds: batching, derivatives and partitioning see it.
``cudnn_local_p`` is the same graph on the shapes of one device: where lowering starts.
"""

from __future__ import annotations

import contextlib
import functools
from contextvars import ContextVar
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from . import compat, ffi
from .errors import GraphError
from .graph.reference import WIDE, evaluate
from .graph.source import user_line
from .graph.spec import GraphSpec


def title(*, spec: GraphSpec, name: str) -> str:
    """What a graph is called where JAX says which operation made a NaN."""
    return name + spec.origin.suffix


cudnn_p = compat.new_primitive("cudnn", title)
cudnn_local_p = compat.new_primitive("cudnn_local", title)


_line: ContextVar[str] = ContextVar("line", default="")
"""The line of the graph that a rule is transforming."""


def bind(spec: GraphSpec, name: str, *operands: Any) -> list[jax.Array]:
    """Apply a graph to arrays in the order of ``spec.inputs``; ``name`` is the user's function."""
    spec._cache["line"] = _line.get() or user_line()  # where it was traced last, for warnings
    with jax.named_scope(name):
        return cudnn_p.bind(*_align_varying(operands), spec=spec, name=name)


def _align_varying(operands: tuple[Any, ...]) -> list[Any]:
    """Inside shard_map all operands must vary over the same mesh axes, as jnp's own do."""
    varying = [compat.varying_axes(jax.typeof(operand)) for operand in operands]
    union = frozenset().union(*varying)
    return [
        operand if axes == union else jax.lax.pcast(operand, tuple(union - axes), to="varying")
        for operand, axes in zip(operands, varying, strict=True)
    ]


def _abstract_eval(*avals: Any, spec: GraphSpec, name: str) -> list[Any]:
    compat.checkify_nans(cudnn_p, title)
    for tensor, aval in zip(spec.input_tensors, avals, strict=True):
        if (aval.shape, aval.dtype.name) != (tensor.shape, tensor.dtype):
            raise GraphError(
                f"{name}: operand {tensor.name!r} does not fit the graph",
                expected=str(tensor),
                got=f"{aval.dtype.name}{list(aval.shape)}",
                why="a traced graph has fixed shapes and dtypes",
            )
    # A derived graph may be one of constants alone.
    template = avals[0] if avals else jax.typeof(jax.numpy.float32(0))
    shardings = [PartitionSpec(*[None] * len(tensor.shape)) for tensor in spec.output_tensors]
    sharded = [aval for aval in avals if any(axis is not None for axis in aval.sharding.spec)]
    if sharded:  # along explicit axes
        from .sharding.work import is_left_whole, sharding_types

        template = sharded[0]
        given = [aval.sharding.spec for aval in avals]
        if is_left_whole(spec, given):  # jnp's rules say how its reference's results are sharded
            with contextlib.suppress(compat.ShardingTypeError):
                return list(jax.make_jaxpr(functools.partial(evaluate, spec))(*avals).out_avals)
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


def _local(*operands: Any, spec: GraphSpec, name: str) -> list[Any]:
    return cudnn_local_p.bind(*operands, spec=spec, name=name)


lower_local = mlir.lower_fun(_local, multiple_results=True)


Seen = dict[Any, list[tuple[str, GraphSpec, str]]]
observer: ContextVar[Seen | None] = ContextVar("observer", default=None)
"""Is given the graphs that one device computes, by calls, in the order in which a program is
lowered: their names, and how a mesh shards them."""


def observe(key: Any, *graphs: tuple[str, GraphSpec, str]) -> None:
    seen = observer.get()
    if seen is not None:
        seen.setdefault(key, []).extend(graphs)


def _lower(ctx: Any, *operands: Any, spec: GraphSpec, name: str) -> Any:
    if compat.partitioning_mesh(ctx) is None:
        observe((spec, name), (title(spec=spec, name=name), spec, ""))
        return lower_local(ctx, *operands, spec=spec, name=name)
    from . import partition  # which programs for one device do without

    return partition.lower(ctx, *operands, spec=spec, name=name)


def _reference(*operands: Any, spec: GraphSpec, name: str, products: str = "") -> list[Any]:
    return evaluate(spec, *operands, products=products)


lower_reference = mlir.lower_fun(_reference, multiple_results=True)


def _lower_cuda(ctx: Any, *operands: Any, spec: GraphSpec, name: str) -> Any:
    from . import auto, lowering  # and all of planning: importing jax_cudnn does without

    plan = auto.of_lowering(ctx, spec, name)
    run = functools.partial(lowering.run, plan, name, ffi.call)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _transformed(rule: str, *args: Any, **params: Any) -> Any:
    from .transforms import rules  # which importing jax_cudnn does without

    token = _line.set(params["spec"]._cache.get("line", "") if "spec" in params else "")
    try:
        return getattr(rules, rule)(*args, **params)
    finally:
        _line.reset(token)


def save_cudnn(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy for ``jax.checkpoint``: saves the results of cuDNN graphs and the residuals that
    their backwards need, and recomputes everything else.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> block = jax.checkpoint(lambda x: jnp.sin(relu(x)), policy=jc.save_cudnn)
        >>> jax.grad(lambda x: block(x).sum())(jnp.ones((8, 16))).shape
        (8, 16)
    """
    return primitive is cudnn_p


for _primitive in (cudnn_p, cudnn_local_p):
    _primitive.def_abstract_eval(_abstract_eval)
# Not cached: a cached lowering does not see that an operand is a transpose. cudnn_local_p's is.
mlir.register_lowering(cudnn_p, _lower, cacheable=False)
mlir.register_lowering(cudnn_local_p, lower_reference)
mlir.register_lowering(
    cudnn_local_p,
    mlir.lower_fun(functools.partial(_reference, products=WIDE), multiple_results=True),
    platform="cpu",
)
mlir.register_lowering(cudnn_local_p, _lower_cuda, platform="cuda")
ad.primitive_jvps[cudnn_p] = functools.partial(_transformed, "jvp_rule", bind)
ad.primitive_transposes[cudnn_p] = functools.partial(_transformed, "transpose_rule", bind)
batching.primitive_batchers[cudnn_p] = functools.partial(_transformed, "batch_rule", bind)
compat.dce_rules[cudnn_p] = functools.partial(_transformed, "dce_rule")
