"""The primitive's transformation rules: each rule derives another graph and binds it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.interpreters import ad
from jax.sharding import PartitionSpec

from ..errors import GraphTypeError, UnsupportedGraphError
from ..graph.dtypes import E8M0
from ..graph.spec import GraphSpec, intern
from ..primitive import each_in_turn, without_explicit_axes
from ..user_context import CUDNN
from .batch import NoFold, batch
from .derived import Derived, Key
from .linearize import TANGENT, VALUE, linearize
from .transpose import COTANGENT, transpose

log = logging.getLogger("jax_cudnn")

Bind = Callable[..., list[Any]]
"""``bind(spec, name, *operands)`` gives the results of a graph."""


def jvp_rule(
    bind: Bind, primals: Sequence[Any], tangents: Sequence[Any], *, spec: GraphSpec, name: str
) -> Any:
    """Results from the forward, which keeps residuals, and tangents from another graph."""
    moving = {n: t for n, t in zip(spec.inputs, tangents, strict=True) if type(t) is not ad.Zero}
    for n in moving:
        if spec.tensor(n).dtype == E8M0:
            raise GraphTypeError(
                f"{name} has no derivative with respect to {n}",
                got=E8M0,
                why="it holds powers of two only, which cannot be zero or negative tangents",
                fix="differentiate with respect to the array before quantization, or to the values "
                "alone",
            )
    linear = linearize(spec, frozenset(moving)) if moving else None
    forward = spec if linear is None else linear.forward
    results = bind(forward, name, *primals)
    outputs = results[: len(spec.outputs)]
    found: list[Any] = [None] * len(outputs)
    if linear is not None:
        arrays: dict[Key, Any] = {
            (VALUE, n): x for n, x in zip(forward.inputs, primals, strict=True)
        }
        arrays |= {(VALUE, n): x for n, x in zip(forward.outputs, results, strict=True)}
        arrays |= {(TANGENT, n): t for n, t in moving.items()}
        placed = [jax.typeof(out).sharding for out in outputs]
        found = _run(linear.tangent, arrays, bind, name, placed)
    return outputs, [
        ad.Zero(jax.typeof(out).to_tangent_aval()) if t is None else t
        for out, t in zip(outputs, found, strict=True)
    ]


def transpose_rule(
    bind: Bind, cotangents: Sequence[Any], *operands: Any, spec: GraphSpec, name: str
) -> list[Any]:
    """Cotangents of the unknown operands, from those of the results."""
    known, unknown = {}, {}
    for n, x in zip(spec.inputs, operands, strict=True):
        (unknown if ad.is_undefined_primal(x) else known)[n] = x
    given = {n: t for n, t in zip(spec.outputs, cotangents, strict=True) if type(t) is not ad.Zero}
    backward = transpose(spec, tuple(unknown), tuple(given))
    arrays: dict[Key, Any] = {(VALUE, n): x for n, x in known.items()}
    arrays |= {(COTANGENT, n): t for n, t in given.items()}
    placed = [x.aval.sharding for x in unknown.values()]
    found = dict(zip(unknown, _run(backward, arrays, bind, name, placed), strict=True))
    return [
        None if n in known else ad.Zero(unknown[n].aval) if found[n] is None else found[n]
        for n in spec.inputs
    ]


def _run(
    derived: Derived, arrays: Mapping[Key, Any], bind: Bind, name: str, shardings: Sequence[Any]
) -> list[Any | None]:
    """The results of a derived graph. On a mesh with explicit axes it runs with automatic axes and
    the given shardings of the results: its reshapes and sums have no rule for explicit ones."""

    def run(*values: Any) -> list[Any | None]:
        named = dict(zip(arrays, values, strict=True))
        return derived.run(named, lambda graph, *xs: bind(graph, name, *xs))

    if not any(axis for x in arrays.values() for axis in jax.typeof(x).sharding.spec):
        return run(*arrays.values())
    there = [i for i, source in enumerate(derived.results) if source is not None]
    some = without_explicit_axes(
        lambda *values: [x for x in run(*values) if x is not None],
        [*arrays.values()],
        [shardings[i].spec for i in there],
    )
    made: dict[int, Any] = dict(zip(there, some(*arrays.values()), strict=True)) if there else {}
    return [made.get(i) for i in range(len(derived.results))]


def batch_rule(
    bind: Bind, operands: Sequence[Any], dims: Sequence[Any], *, spec: GraphSpec, name: str
) -> tuple[list[Any], list[Any]]:
    """Folds the dimension into the graph, or runs sequentially if a node has no fold."""
    mapped = {n for n, d in zip(spec.inputs, dims, strict=True) if d is not None}
    arrays, size = {}, 1
    for n, x, d in zip(spec.inputs, operands, dims, strict=True):
        arrays[n] = x
        if n in mapped:
            arrays[n], size = jax.numpy.moveaxis(x, d, 0), x.shape[d]
    if size == 0:
        shapes = [((0, *t.shape), t.dtype) for t in spec.output_tensors]
        return [jax.numpy.zeros(*shape) for shape in shapes], [0] * len(shapes)
    try:
        folded, batched = batch(spec, size, frozenset(mapped))
    except NoFold as error:
        return _in_turn(bind, error, arrays, mapped, size, spec, name)
    types = _batched_types(functools.partial(bind, spec, name), arrays, mapped, batched)
    results = _run(folded, arrays, bind, name, types)
    return results, [0 if b else None for b in batched]


def _batched_types(
    run: Callable[..., Any], arrays: Mapping[str, Any], mapped: set[str], batched: Sequence[bool]
) -> list[Any]:
    """How results of a vmap are sharded on explicit axes: as those of each element, and along the
    mapped dimension as the operands are."""
    types = {n: jax.typeof(x) for n, x in arrays.items()}
    if not any(axis for x in types.values() for axis in x.sharding.spec):
        return []
    lead = next(filter(None, (types[n].sharding.spec[0] for n in mapped)), None)
    one = [
        x.update(
            shape=x.shape[n in mapped :],
            sharding=x.sharding.update(spec=PartitionSpec(*x.sharding.spec[n in mapped :])),
        )
        for n, x in types.items()
    ]
    made: Any = jax.make_jaxpr(run)(*one).out_avals
    own = [out.sharding for out in made]
    return [
        x.update(spec=(*[lead] * b, *(None if axis == lead else axis for axis in x.spec)))
        for x, b in zip(own, batched, strict=True)
    ]


def _in_turn(
    bind: Bind,
    error: NoFold,
    arrays: dict[str, Any],
    mapped: set[str],
    size: int,
    spec: GraphSpec,
    name: str,
) -> tuple[list[Any], list[Any]]:
    why = f"{error.call.name} takes no dimension of vmap for {', '.join(sorted(mapped))}"
    if spec.options.implementation == CUDNN:
        raise UnsupportedGraphError(
            f"{name}: vmap would run the graph {size} times sequentially",
            why=why,
            fix="add the dimension to the graph, or remove implementation='cudnn'",
            graph=str(spec),
        )
    log.debug("%s: runs %d times sequentially: %s", name, size, why)
    title = f"{name} ({size} times sequentially: {why})"

    def one(each: dict[str, Any]) -> list[Any]:
        return bind(spec, title, *({**arrays, **each}[n] for n in spec.inputs))

    results = each_in_turn(one, {n: arrays[n] for n in mapped})
    return results, [0] * len(results)


def dce_rule(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """The equation with only the used results and the operands that they need."""
    equation = rest[-1]  # newer versions of JAX first pass which operands stay in use
    spec = equation.params["spec"]
    if all(used):
        return [True] * len(spec.inputs), equation
    if not any(used):
        return [False] * len(spec.inputs), None
    left = pruned(spec, tuple(n for n, u in zip(spec.outputs, used, strict=True) if u))
    left._cache["line"] = spec._cache.get("line", "")
    live = [n in left.inputs for n in spec.inputs]
    return live, equation.replace(
        invars=[v for v, keep in zip(equation.invars, live, strict=True) if keep],
        outvars=[v for v, keep in zip(equation.outvars, used, strict=True) if keep],
        params=dict(equation.params, spec=left),
    )


@functools.lru_cache(maxsize=2048)
def pruned(spec: GraphSpec, outputs: tuple[str, ...]) -> GraphSpec:
    """The graph that computes only these results, from the operands that they need."""
    needed, calls = {*outputs}, []
    for call in reversed(spec.calls):
        if needed & {name for _, name in call.outputs}:
            calls.insert(0, call)
            needed |= {name for _, name in (*call.inputs, *call.outputs)}
    residuals = tuple(name for name in spec.origin.residuals if name in outputs)
    left = replace(
        spec,
        tensors=tuple(t for t in spec.tensors if t.name in needed),
        calls=tuple(calls),
        inputs=tuple(name for name in spec.inputs if name in needed),
        outputs=outputs,
        origin=replace(spec.origin, residuals=residuals),
    )
    return intern(left)
