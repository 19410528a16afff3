"""Runs a jaxpr step by step: compiles the operations between our graphs, and unrolls loops."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..primitive import cudnn_local_p, cudnn_p
from .places import HERE, Mapped, Place

Path = tuple[str, ...]
Observer = Callable[[Any, Place, Path, list[Any], list[Any]], None]
"""Receives the equation of each graph, where it runs, its operands and its results."""


@dataclass(frozen=True)
class _Step:
    """Equations that run together: one that is entered, or all up to the next such equation."""

    equations: tuple[Any, ...]
    inside: bool
    """Whether the only equation is a graph of ours, or holds one."""
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    later: frozenset[Any]
    """The variables that later equations read."""


class Interpreter:
    """Runs jaxprs and passes each of our graphs to an observer.

    ``unseen`` lists the equations that contain graphs, but run as a whole, without the observer.
    """

    def __init__(self, observer: Observer) -> None:
        self.unseen: dict[str, None] = {}
        self._observer = observer
        self._steps: dict[int, tuple[Any, tuple[_Step, ...]]] = {}
        self._compiled: dict[Any, Callable[..., list[Any]]] = {}
        self._mapped: dict[int, tuple[Any, Mapped]] = {}
        self._rules = {
            "scan": self._scan,
            "while": self._while,
            "cond": self._cond,
            "shard_map": self._shard_map,
        }

    def run(self, jaxpr: Any, args: Sequence[Any], path: Path = (), place: Place = HERE) -> list:
        """The results of a jaxpr for concrete arguments that ``place`` holds."""
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        consts = [place.lifted(x, v.aval) for x, v in zip(consts, jaxpr.constvars, strict=True)]
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for step in self._program(jaxpr):
            if step.inside:
                results = self._look_into(jaxpr, step, env, path, place)
            else:
                results = self._compile(jaxpr, step, place)(*(env[v] for v in step.reads))
            env.update(zip(step.writes, results, strict=True))
            env = {v: x for v, x in env.items() if v in step.later}
        return [_read(env, v, place) for v in jaxpr.outvars]

    def _look_into(self, jaxpr: Any, step: _Step, env: dict, path: Path, place: Place) -> list:
        (equation,) = step.equations
        values = [_read(env, v, place) for v in equation.invars]

        whole = functools.partial(self._bound, equation, place)
        if equation.primitive in (cudnn_p, cudnn_local_p):
            results = whole(*values)
            self._observer(equation, place, path, values, results)
            return results
        rule = self._rules.get(equation.primitive.name)
        if rule is not None:
            return rule(equation, values, path, place, whole)
        inner = [*compat.inner_jaxprs(equation)]
        closed = [p for p in equation.params.values() if len(inner) == 1 and _open(p) is inner[0]]
        if closed and _same_types(inner[0], equation):
            return self.run(closed[0], values, path, place)
        return self._blindly(equation, values, path, whole)

    def _blindly(self, equation: Any, values: list, path: Path, whole: Any) -> list:
        self.unseen["/".join((*path, equation.primitive.name))] = None
        return whole(*values)

    # -- control flow ---------------------------------------------------------------------------

    def _scan(self, equation: Any, values: list, path: Path, place: Place, whole: Any) -> list:
        params, (fixed, carried) = equation.params, compat.scan_sizes(equation.params)
        consts, carry, xs = _split(values, fixed, carried)
        length = params["length"]
        if not length:
            return whole(*values)
        columns: list[list[Any]] = [[]] * length
        for i in reversed(range(length)) if params["reverse"] else range(length):
            at = [_element(x, i, place.lead) for x in xs]
            results = self.run(
                params["jaxpr"], [*consts, *carry, *at], (*path, f"scan[{i}]"), place
            )
            carry, columns[i] = results[:carried], results[carried:]
        return [*carry, *(jnp.stack(ys, place.lead) for ys in zip(*columns, strict=True))]

    def _while(self, equation: Any, values: list, path: Path, place: Place, whole: Any) -> list:
        params = equation.params
        fixed = params["cond_nconsts"], params["body_nconsts"]
        test_consts, body_consts, carry = _split(values, *fixed)
        for i in itertools.count():
            here = (*path, f"while[{i}]")
            (test,) = self.run(params["cond_jaxpr"], [*test_consts, *carry], here, place)
            go_on = place.common(jnp.any(test, tuple(range(place.lead, test.ndim))))
            if go_on is None:
                self.unseen["/".join((*here, "the rest: devices go on for different times"))] = None
                return whole(*test_consts, *body_consts, *carry)
            if not go_on:
                break
            after = self.run(params["body_jaxpr"], [*body_consts, *carry], here, place)
            # Under vmap some elements continue while others keep their values.
            stays = test.ndim > place.lead
            carry = self._selected(equation, place, test, carry, after) if stays else after
        return carry

    def _selected(
        self, equation: Any, place: Place, test: Any, before: list[Any], after: list[Any]
    ) -> list[Any]:
        key = "selected", id(equation), place
        if key not in self._compiled:
            carry = [v.aval for v in equation.outvars]
            (tested,) = _open(equation.params["cond_jaxpr"]).outvars
            self._compiled[key] = place.jit(_select, [tested.aval, *carry, *carry], carry)
        return self._compiled[key](test, *before, *after)

    def _cond(self, equation: Any, values: list, path: Path, place: Place, whole: Any) -> list:
        index, *operands = values
        chosen = place.common(index)
        if chosen is None:
            self.unseen["/".join((*path, "cond: devices take different branches"))] = None
            return whole(*values)
        branch = equation.params["branches"][int(chosen)]
        return self.run(branch, operands, (*path, f"cond[{int(chosen)}]"), place)

    def _shard_map(self, equation: Any, values: list, path: Path, place: Place, whole: Any) -> list:
        if place is not HERE:
            return self._blindly(equation, values, path, whole)
        if id(equation) not in self._mapped:
            self._mapped[id(equation)] = equation, Mapped(equation.params)
        inside = self._mapped[id(equation)][1]
        entered = inside.enter(*values)
        results = self.run(equation.params["jaxpr"], entered, (*path, "shard_map"), inside)
        return inside.leave(*results)

    # -- steps ----------------------------------------------------------------------------------

    def _program(self, jaxpr: Any) -> tuple[_Step, ...]:
        if id(jaxpr) not in self._steps:
            self._steps[id(jaxpr)] = jaxpr, _steps(jaxpr)  # kept, so that its id is not reused
        return self._steps[id(jaxpr)][1]

    def _compile(self, jaxpr: Any, step: _Step, place: Place) -> Callable[..., list[Any]]:
        """The function that runs several equations that are not entered."""
        key = id(step), place
        if key not in self._compiled:
            piece = jaxpr.replace(
                constvars=[], invars=[*step.reads], outvars=[*step.writes], eqns=[*step.equations]
            )

            def run(*args: Any) -> list[Any]:
                return jax.core.eval_jaxpr(piece, (), *args)

            avals = ([v.aval for v in variables] for variables in (step.reads, step.writes))
            self._compiled[key] = place.jit(run, *avals)
        return self._compiled[key]

    def _bound(self, equation: Any, place: Place, *values: Any) -> list[Any]:
        """The results of one equation. Equal graphs are compiled once."""
        primitive, params = equation.primitive, equation.params
        inputs, outputs = ([v.aval for v in vs] for vs in (equation.invars, equation.outvars))
        key: Any = id(equation), place
        if primitive in (cudnn_p, cudnn_local_p):
            key = primitive, params["spec"], params["name"], place, place.kinds(inputs)
        if key not in self._compiled:

            def run(*args: Any) -> list[Any]:
                with equation.ctx.manager:
                    return primitive.bind(*args, **primitive.get_bind_params(params))

            self._compiled[key] = place.jit(run, inputs, outputs)
        return self._compiled[key](*values)


def _steps(jaxpr: Any) -> tuple[_Step, ...]:
    groups: list[tuple[bool, list[Any]]] = []
    for equation in jaxpr.eqns:
        inside = holds_graph(equation)
        if inside or not groups or groups[-1][0]:
            groups.append((inside, []))
        groups[-1][1].append(equation)
    later = {v for v in jaxpr.outvars if not _is_literal(v)}
    steps = []
    for inside, equations in reversed(groups):
        made = [v for equation in equations for v in equation.outvars]
        used = dict.fromkeys(v for e in equations for v in e.invars if not _is_literal(v))
        reads = tuple(v for v in used if v not in {*made})
        writes = tuple(made) if inside else tuple(v for v in made if v in later)
        steps.append(_Step(tuple(equations), inside, reads, writes, frozenset(later)))
        later = (later - {*made}) | {*reads}
    return tuple(reversed(steps))


def holds_graph(equation: Any) -> bool:
    """Whether an equation is a graph of ours, or has one inside."""
    if equation.primitive in (cudnn_p, cudnn_local_p):
        return True
    return any(holds_graph(e) for jaxpr in compat.inner_jaxprs(equation) for e in jaxpr.eqns)


def _same_types(jaxpr: Any, equation: Any) -> bool:
    """Whether an equation only evaluates its jaxpr for its operands."""

    def types(variables: Sequence[Any]) -> list[Any]:
        return [(v.aval.shape, v.aval.dtype) for v in variables]

    pairs = (jaxpr.invars, equation.invars), (jaxpr.outvars, equation.outvars)
    return all(types(a) == types(b) for a, b in pairs)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def _read(env: dict, variable: Any, place: Place) -> Any:
    if _is_literal(variable):
        return place.lifted(variable.val, variable.aval)
    return env[variable]


def _split(values: Sequence[Any], *sizes: int) -> tuple[list[Any], ...]:
    parts, at = [], 0
    for size in sizes:
        parts.append([*values[at : at + size]])
        at += size
    return (*parts, [*values[at:]])


def _select(test: Any, *values: Any) -> list[Any]:
    """From two concatenated lists of arrays: the second where ``test`` is true, else the first."""
    half = len(values) // 2
    pairs = zip(values[:half], values[half:], strict=True)
    return [
        jnp.where(test.reshape(*test.shape, *[1] * (x.ndim - test.ndim)), y, x) for x, y in pairs
    ]


def _element(x: Any, i: int, axis: int) -> Any:
    return _take(x, np.int32(i), axis)


def _dynamic(x: Any, i: Any, axis: int) -> Any:
    return jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False)


_take = jax.jit(_dynamic, static_argnums=2)
