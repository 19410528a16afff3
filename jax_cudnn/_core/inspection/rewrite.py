"""Traces a jaxpr anew, with a comparison and a callback after each graph."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from .. import compat
from ..graph.spec import GraphSpec
from ..primitive import cudnn_local_p, cudnn_p
from .compare import measure

See = Callable[..., None]
"""Receives the equation of a graph and its :class:`Place`; then, for each run on each device, the
numbers of run and device, the figures for :func:`.compare.judge`, and the operands."""


@dataclass(frozen=True)
class Place:
    """What is around an equation: the names in its path, for each loop its number followed by that
    of the step, and the sizes of the mesh axes of ``shard_map``."""

    names: tuple[str, ...] = ()
    numbers: tuple[Any, ...] = ()
    axes: Mapping[str, int] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    def within(self, name: str, *numbers: Any) -> Place:
        return replace(self, names=(*self.names, name), numbers=(*self.numbers, *numbers))

    def path(self, run: Sequence[int]) -> str:
        """Where in the program a run was, from its numbers."""
        return "/".join(self.names).format(*(max(i, ~i) for i in run[1::2]))


class Rewriter:
    """``unseen`` lists what contains graphs that run without a comparison."""

    def __init__(self, see: See) -> None:
        self.unseen: dict[str, None] = {}
        self._see = see
        self._count = itertools.count()
        self._rules = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
        }

    def run(self, jaxpr: Any, args: Sequence[Any], place: Place = Place()) -> list[Any]:
        """The results of a jaxpr, for tracers."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), _open(jaxpr)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(variables: Sequence[Any]) -> list[Any]:
            return [v.val if hasattr(v, "val") else env[v] for v in variables]

        for equation in jaxpr.eqns:
            with equation.ctx.manager:
                results = self._results(equation, read(equation.invars), place)
            env.update(zip(equation.outvars, results, strict=True))
        return read(jaxpr.outvars)

    def _results(self, equation: Any, values: list[Any], place: Place) -> list[Any]:
        primitive, params = equation.primitive, equation.params
        if primitive in (cudnn_p, cudnn_local_p):
            return self._graph(equation, values, place)
        if holds_graph(equation):
            if rule := self._rules.get(primitive.name):
                return rule(params, values, place)
            inner = [*compat.inner_jaxprs(equation)]
            if len(inner) == 1 and _same_types(inner[0], equation):
                (closed,) = (p for p in params.values() if _open(p) is inner[0])
                return self.run(closed, values, place)
            path = "/".join((*place.names, primitive.name))
            self.unseen[path.replace("[{}]", "")] = None
        results = primitive.bind(*values, **primitive.get_bind_params(params))
        return results if primitive.multiple_results else [results]

    def _graph(self, equation: Any, values: list[Any], place: Place) -> list[Any]:
        # XLA neither shares operations of graph and reference, nor keeps more bits of a value.
        values = lax.optimization_barrier(values)
        results = lax.optimization_barrier(equation.primitive.bind(*values, **equation.params))
        run = (*place.numbers, next(self._count))
        device = lax.axis_index((*place.axes,)) if place.axes else 0
        figures = _measure(equation.params["spec"])(values, results)
        see = functools.partial(self._see, equation, place)
        jax.debug.callback(see, run, device, figures, values)
        return results

    def _scan(self, params: Any, values: list[Any], place: Place) -> list[Any]:
        fixed, carried = compat.scan_sizes(params)
        consts, carry, xs = _split(values, fixed, carried)
        loop, reverse = next(self._count), params["reverse"]

        def step(carry: Any, each: Any) -> Any:
            i, *xs = each  # ~i falls as i rises: runs of a reversed scan in their order
            inside = place.within("scan[{}]", loop, ~i if reverse else i)
            return _split(self.run(params["jaxpr"], [*consts, *carry, *xs], inside), carried)

        xs = [jnp.arange(params["length"], dtype="int32"), *xs]
        carry, ys = lax.scan(step, carry, xs, length=params["length"], reverse=reverse)
        return [*carry, *ys]

    def _while(self, params: Any, values: list[Any], place: Place) -> list[Any]:
        test, body = params["cond_jaxpr"], params["body_jaxpr"]
        fixed = params["cond_nconsts"], params["body_nconsts"]
        test_consts, body_consts, carry = _split(values, *fixed)
        loop = next(self._count)

        def go_on(state: Any) -> Any:
            i, carry = state
            inside = place.within("while[{}]", loop, i)
            return jnp.any(self.run(test, [*test_consts, *carry], inside)[0])

        def step(state: Any) -> Any:
            i, carry = state
            inside = place.within("while[{}]", loop, i)
            after = self.run(body, [*body_consts, *carry], inside)
            if test.out_avals[0].ndim:  # under vmap some elements keep their values
                (on,) = jax.core.eval_jaxpr(_open(test), test.consts, *test_consts, *carry)
                kept = [on.reshape(*on.shape, *[1] * (x.ndim - on.ndim)) for x in after]
                after = [*map(jnp.where, kept, after, carry)]
            return i + 1, after

        return lax.while_loop(go_on, step, (jnp.int32(0), carry))[1]

    def _cond(self, params: Any, values: list[Any], place: Place) -> list[Any]:
        def branch(i: int, jaxpr: Any) -> Any:
            return lambda *operands: self.run(jaxpr, operands, place.within(f"cond[{i}]"))

        branches = [branch(i, jaxpr) for i, jaxpr in enumerate(params["branches"])]
        return lax.switch(values[0], branches, *values[1:])

    def _shard_map(self, params: Any, values: list[Any], place: Place) -> list[Any]:
        manual = {axis: params["mesh"].shape[axis] for axis in compat.manual_axes(params)}
        inside = replace(place.within("shard_map"), axes={**place.axes, **manual})
        mapped = jax.shard_map(
            lambda *shards: self.run(params["jaxpr"], shards, inside),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=[*params["out_specs"]],
            axis_names={*manual},
            check_vma=params["check_vma"],
        )
        return mapped(*values)


@functools.lru_cache(maxsize=64)
def _measure(spec: GraphSpec) -> Any:
    """Equal graphs are traced and lowered once."""
    return jax.jit(functools.partial(measure, spec))


def holds_graph(equation: Any) -> bool:
    """Whether an equation is a graph of ours, or has one inside."""
    if equation.primitive in (cudnn_p, cudnn_local_p):
        return True
    return any(holds_graph(e) for jaxpr in compat.inner_jaxprs(equation) for e in jaxpr.eqns)


def _same_types(jaxpr: Any, equation: Any) -> bool:
    """Whether an equation only evaluates its jaxpr for its operands."""
    types = [
        [(v.aval.shape, v.aval.dtype) for v in variables]
        for variables in (jaxpr.invars, equation.invars, jaxpr.outvars, equation.outvars)
    ]
    return types[0] == types[1] and types[2] == types[3]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _split(values: Sequence[Any], *sizes: int) -> tuple[list[Any], ...]:
    bounds = (0, *itertools.accumulate(sizes), len(values))
    return tuple([*values[i:j]] for i, j in itertools.pairwise(bounds))
