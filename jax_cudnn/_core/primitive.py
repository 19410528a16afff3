"""The primitives, parameterised by a GraphSpec: registrations.py has their rules.

``cudnn_p`` is what a user's program holds: batching, derivatives and partitioning see it.
``cudnn_local_p`` is the same graph on the shapes of one device: where lowering starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.interpreters import mlir

from . import compat
from .errors import GraphError
from .graph.boundary import boundary
from .graph.reference import evaluate
from .graph.source import user_line, users_place
from .graph.spec import GraphSpec


def title(*, spec: GraphSpec, name: str) -> str:
    """What a graph is called where JAX says which operation made a NaN."""
    return name + spec.origin.suffix


cudnn_p = compat.new_primitive("cudnn", title)
cudnn_local_p = compat.new_primitive("cudnn_local", title)


line: ContextVar[str] = ContextVar("line", default="")
"""The line of the graph that a rule is transforming."""


def bind(spec: GraphSpec, name: str, *operands: Any) -> list[jax.Array]:
    """Apply a graph to arrays in the order of ``spec.inputs``; ``name`` is the user's function."""
    place = line.get() or users_place(compat.user_frames()) or user_line()
    spec._cache["line"] = place  # where it was traced last, for warnings
    with jax.named_scope(name):
        return cudnn_p.bind(*align_varying(operands), spec=spec, name=name)


def align_varying(operands: tuple[Any, ...]) -> list[Any]:
    """Inside shard_map all operands must vary over the same mesh axes, as jnp's own do."""
    varying = [compat.varying_axes(jax.typeof(operand)) for operand in operands]
    union = frozenset().union(*varying)
    return [
        operand if axes == union else jax.lax.pcast(operand, tuple(union - axes), to="varying")
        for operand, axes in zip(operands, varying, strict=True)
    ]


def dims_of(x: Any) -> tuple[Any, ...]:
    """The mesh axes of each dimension of an array, by its type."""
    return dims_of_type(jax.typeof(x), "an operand")


def dims_of_type(aval: Any, name: str) -> tuple[Any, ...]:
    """Those of an abstract value, which an error calls ``name``."""
    if any(getattr(aval.sharding.spec, kind, None) for kind in ("reduced", "unreduced")):
        raise GraphError(
            f"{name} is reduced or unreduced over mesh axes",
            got=str(aval),
            why="there is no rule for its gradient, or for the sum that is left to do",
            fix="reshard it before the call, without these: jax.sharding.reshard(x, jax.P(...))",
        )
    return tuple(aval.sharding.spec)


def without_explicit_axes(
    function: Any, operands: Sequence[Any], specs: Any, kept: bool = False
) -> Any:
    """The function with automatic axes in place of explicit ones: what it does may have no rule for
    them. ``operands``: its arrays, or None; ``specs``: the shardings of its results.

    The mesh is that of the operands' types, the only one without ``jax.set_mesh``; if they have
    none, it is the one that is set. A derivative computes anew what it needs, unless residuals are
    ``kept``: their types have automatic axes, so no other program with a graph can take them, as it
    would in ``jax.grad(jax.jit(f))``."""
    operands = [x for x in operands if x is not None]
    meshes: list[Any] = [jax.typeof(x).sharding.mesh for x in operands]
    found = [mesh for mesh in meshes if not mesh.empty] or [jax.sharding.get_abstract_mesh()]
    mesh = next((mesh for mesh in found if mesh.explicit_axes), None)
    if mesh is None:
        return function
    for x in operands:
        dims_of(x)
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs)
    run = jax.sharding.auto_axes(function, axes=mesh.explicit_axes, out_sharding=shardings)
    return run if kept else jax.checkpoint(run, prevent_cse=False)


def product_spec(rows: Sequence[Any], columns: Any) -> jax.P:
    """How a product is sharded of rows and columns sharded so: an axis of both stays with rows."""
    taken = {axis for axes in rows for axis in (axes if isinstance(axes, tuple) else (axes,))}
    free = taken.isdisjoint(columns if isinstance(columns, tuple) else (columns,))
    return jax.P(*rows, columns if free else None)


def resharded(x: jax.Array, sharding: Any) -> jax.Array:
    """On explicit axes, an array with the sharding that its type is to have."""
    same = sharding.mesh.empty or jax.typeof(x).sharding.spec == sharding.spec
    return x if same else jax.sharding.reshard(x, sharding)


def broadcasting(like: jax.Array, *terms: Any) -> list[Any]:
    """On explicit axes, what broadcasts against an array, sharded as that is."""

    def placed(x: Any) -> Any:
        if x is None or not jax.numpy.ndim(x):
            return x
        own, dims = jax.typeof(like).sharding, dims_of(like)[like.ndim - x.ndim :]
        if not any((*dims, *dims_of(x))):
            return x
        split = (axes if n > 1 else None for n, axes in zip(x.shape, dims, strict=True))
        return resharded(x, own.update(spec=jax.P(*split)))

    return [*map(placed, terms)]


def each_in_turn(run: Any, arrays: Mapping[Any, jax.Array]) -> list[jax.Array]:
    """A function of each element of the first dimension, in turn. On explicit axes each device has
    all elements in the loop, and results are sharded as the arrays are."""

    def in_front(x: jax.Array, axes: Any) -> jax.Array:
        own = jax.typeof(x).sharding
        return resharded(x, own.update(spec=jax.P(axes, *dims_of(x)[1:])))

    axes = next((dims_of(x)[0] for x in arrays.values() if dims_of(x)[0]), None)
    results = jax.lax.map(run, {key: in_front(x, None) for key, x in arrays.items()})
    return [in_front(y, axes) for y in results]


def _local(*operands: Any, spec: GraphSpec, name: str) -> list[Any]:
    return cudnn_local_p.bind(*operands, spec=spec, name=name)


lower_local = mlir.lower_fun(_local, multiple_results=True)


def in_jaxpr(jaxpr: Any) -> Iterator[tuple[str, GraphSpec]]:
    """All graphs of a jaxpr with their names, equal ones too."""
    return ((title(**call.params), call.params["spec"]) for call, _ in calls_in(jaxpr))


def calls_in(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """The equation of each call, and how often it runs; once in a while loop and in each branch of
    a conditional, where that is unknown."""
    for equation in jaxpr.eqns:
        if equation.primitive in (cudnn_p, cudnn_local_p):
            yield equation, times
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in compat.inner_jaxprs(equation):
            yield from calls_in(inner, times * turns)


Seen = dict[Any, list[tuple[str, GraphSpec, str]]]
observer: ContextVar[Seen | None] = ContextVar("observer", default=None)
"""Is given the graphs that one device computes, by calls, in the order in which a program is
lowered: their names, and how a mesh shards them."""


def observe(key: Any, *graphs: tuple[str, GraphSpec, str]) -> None:
    seen = observer.get()
    if seen is not None:
        seen.setdefault(key, []).extend(graphs)


def run_reference(*operands: Any, spec: GraphSpec, name: str, products: str = "") -> list[Any]:
    return evaluate(spec, *boundary(spec).clipped(operands), products=products)


lower_reference = mlir.lower_fun(run_reference, multiple_results=True)


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
