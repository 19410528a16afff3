"""The graphs in a JAX function: their cost, and the function with references in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from .._core import context
from .._core.auto import place
from .._core.errors import GraphError
from .._core.graph.spec import GraphSpec
from .._core.graph.xla_form import NARROW, evaluate
from .._core.planning.cost import Cost, cost
from .._core.plans.plan import Plan

# Primitives that run an inner program once on the same operands.
_INLINED = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
_INLINED += ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


_LOOPS = ("scan", "while")


def graphs(function: Callable[..., Any], *operands: Any) -> list[tuple[GraphSpec, str, int]]:
    """Each graph in the traced function: its spec, its name, and how often it runs.

    Graphs in a scan run once per iteration. Graphs in a while loop and in each branch of a
    conditional count once, because how often they run is unknown.
    """
    return of_jaxpr(jax.make_jaxpr(function)(*operands).jaxpr)


def of_jaxpr(jaxpr: Any) -> list[tuple[GraphSpec, str, int]]:
    """The same for a jaxpr."""
    return list(_graphs(jaxpr, 1))


def placed(graphs: list[tuple[GraphSpec, str, int]]) -> list[Plan]:
    """The plan of each graph for this machine's GPU or for ``jax_cudnn.target``. Raises TargetError
    if there is neither."""
    site = context.site(jax.local_devices(), "bench")
    return [Plan.of(place(spec, site, name)) for spec, name, _ in graphs]


def loops(jaxpr: Any) -> int:
    """The number of loops in a jaxpr whose bodies hold graphs."""
    count = 0
    for equation in jaxpr.eqns:
        inner = [jaxpr for jaxpr, _ in _inner(equation)]
        if equation.primitive.name in _LOOPS:
            count += any(map(of_jaxpr, inner))
        else:
            count += sum(map(loops, inner))
    return count


def graphs_cost(function: Callable[..., Any], *operands: Any) -> Cost:
    """The total cost of the function's graphs, without what XLA runs around them."""
    found = graphs(function, *operands)
    return sum((cost(spec) * times for spec, _, times in found), Cost())


def with_references(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with the jnp reference of each graph in its place.

    This is the function without cuDNN, also on a GPU. It raises GraphError for a graph in a loop,
    conditional or shard_map.
    """

    def reference(*operands: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*operands)
        leaves = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return reference


def _spec(equation: Any) -> GraphSpec | None:
    spec = equation.params.get("spec")
    return spec if isinstance(spec, GraphSpec) else None


def _inner(equation: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The programs in an equation's parameters, with their constants."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns") and not hasattr(item, "jaxpr"):
                yield item, []
            elif hasattr(item, "jaxpr") and hasattr(item, "consts"):
                yield item.jaxpr, item.consts


def _graphs(jaxpr: Any, times: int) -> Iterator[tuple[GraphSpec, str, int]]:
    for equation in jaxpr.eqns:
        spec = _spec(equation)
        if spec is not None:
            yield spec, equation.params.get("name", ""), times
            continue
        repeated = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner, _ in _inner(equation):
            yield from _graphs(inner, times * repeated)


def _evaluate(jaxpr: Any, consts: list[Any], operands: list[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if hasattr(variable, "val") else values[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        spec = _spec(equation)
        if spec is not None:
            results = evaluate(spec, *given, products=NARROW)
        elif any(True for inner, _ in _inner(equation) for _ in _graphs(inner, 1)):
            results = _inlined(equation, given)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            results = equation.primitive.bind(*given, **parameters)
            results = results if equation.primitive.multiple_results else [results]
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _inlined(equation: Any, operands: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name not in _INLINED:
        raise GraphError(
            f"cannot replace a graph inside of {name} by its reference",
            why="graphs are replaced only outside of control flow",
            fix="pass a function to compare with: --against module:function",
        )
    jaxpr, consts = next(_inner(equation))
    return _evaluate(jaxpr, consts, operands)
