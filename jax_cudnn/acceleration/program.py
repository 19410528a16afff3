"""A jaxpr as a graph of values: calls are seen through, and regions are replaced by functions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.core

from .._core import compat
from .._core.graph.spec import GraphSpec
from .._core.graph.xla_form import NARROW, evaluate
from .._core.primitive import cudnn_p
from .._core.user_context import AUTO
from .region import Region, as_aval
from .values import CUSTOM, Call, Equation, Value, read, run_together

Missed = list[tuple[Equation, str]]
"""What is nearly a region, and why it is none."""


class Program:
    """The equations of a jaxpr, in order, with those of the calls inside."""

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        outside: Sequence[Value | None],
        differentiated: bool = False,
    ) -> None:
        self.jaxpr = jaxpr
        self.differentiated = differentiated  # so that values are kept for a backward elsewhere
        self.equations: list[Equation] = []
        self.found: list[Region] = []
        self.regions: list[Region] = []  # those of them that are replaced
        self._operands: set[Value] = set()  # of those that are found
        self._inside: set[Value] = set()  # what is in them, but their results
        env: dict[Any, Value] = {}
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            array = None if isinstance(const, jax.core.Tracer) else const
            env[variable] = Value(variable.aval, known=array)
        around = outside or [None] * len(jaxpr.invars)
        for variable, value in zip(jaxpr.invars, around, strict=True):
            env[variable] = Value(variable.aval, outside=value)
        self.inputs = [*env.values()]
        self.body = self._flat(jaxpr, env, ())
        self.outs = [_value(env, v) for v in jaxpr.outvars]
        live = self._needed({}, set())
        for equation in self.equations:
            for value in equation.ins:
                value.users = [user for user in value.users if user in live]

    def _flat(self, jaxpr: Any, env: dict, calls: tuple[Call, ...]) -> list[Equation | Call]:
        body: list[Equation | Call] = []
        for eqn in jaxpr.eqns:
            ins = [_value(env, v) for v in eqn.invars]
            seen = _seen_through(eqn)
            if seen is None:
                item = Equation(jaxpr, eqn, ins, [Value(v.aval) for v in eqn.outvars], calls, 0)
                item.inner = _inner(item, self.differentiated)
                item.at = len(self.equations)
                self.equations.append(item)
                for value in ins:
                    value.users.append(item)
                for value in item.outs:
                    value.follow(item)
            else:
                item = Call(jaxpr, eqn, ins, [], [])
                inner, consts = seen
                pairs = zip(inner.constvars, consts, strict=True)
                held = {v: Value(v.aval, known=c) for v, c in pairs}
                held |= dict(zip(inner.invars, ins, strict=True))
                item.body = self._flat(inner, held, (*calls, item))
                item.outs = [_value(held, v) for v in inner.outvars]
            env.update(zip(eqn.outvars, item.outs, strict=True))
            body.append(item)
        return body

    # -- with regions replaced -------------------------------------------------------------------

    @property
    def holds_regions(self) -> bool:
        return any(program.regions for program in self.programs)

    @property
    def programs(self) -> Iterator[Program]:
        """This one and those of the loops, branches and devices inside."""
        yield self
        for equation in self.equations:
            for program in equation.inner.values():
                yield from program.programs

    def _splits_a_derivative(self, region: Region) -> bool:
        """Whether a function with a custom derivative is replaced in part."""
        replaced = region.replaced
        calls = {call for e in replaced for call in e.own_calls}
        others = (e for e in self.equations if e.calls and e not in replaced) if calls else ()
        others = (e for e in others if not calls.isdisjoint(e.calls))
        return any(not value.is_known for e in others for value in e.outs)

    def used_outside(self, region: set[Equation], value: Value) -> bool:
        """Whether a value is read by other equations than these, or is a result."""
        return self.is_read(value) or any(user not in region for user in value.users)

    def is_read(self, value: Value) -> bool:
        """Whether a value is a result, or an operand of a region that is found already."""
        return value in self.outs or value in self._operands

    def last_of(self, values: Sequence[Value], dtype: Any, but: Sequence[str] = ()) -> Value:
        """The last of values each of which the next one alone reads, by other operations than
        these; before it was cast to more bits than ``dtype`` has: whoever reads the result casts
        for less than writing it so would cost."""
        last = min(values, key=lambda v: v.made_by.at if v.made_by else 0)
        while not self.is_read(last) and len({*last.users}) == 1:
            after = last.users[0]
            if len(after.outs) != 1 or after.outs[0] not in values or after.name in but:
                break
            (last,) = after.outs
        while last.dtype.itemsize > dtype.itemsize and (cast := last.made_by) is not None:
            if not cast.casts or cast.ins[0] not in values or cast.ins[0].dtype == last.dtype:
                break
            last = cast.ins[0]
        return last

    def add(self, region: Region) -> None:
        """Adds a region that was found, unless it reads what is inside of another one, or the other
        way round, or is a part of a function with a custom derivative."""
        inside, reads = region.inside, {*region.reads}
        if reads & self._inside or inside & self._operands or self._splits_a_derivative(region):
            return
        self.found.append(region)
        self._inside |= inside
        self._operands |= reads

    def run(self, *arrays: Any) -> list[Any]:
        """The results, for constants and inputs. An equation that only a replaced one needed is
        left out, as dead ones are; every other one runs as it stands."""
        env = dict(zip(self.inputs, arrays, strict=True))
        ends = {region.last: region for region in self.regions}
        ends |= {r.backward.first: r for r in self.regions if r.backward}
        gone = {e for region in self.regions for e in region.replaced}
        needed = self._needed(ends, gone)
        opened = self._opened(needed)
        wanted = needed | {call for equation in needed for call in equation.calls}
        self._run(self.body, env, ends, wanted, opened)
        return [read(env, v) for v in self.outs]

    def traced(self) -> Any:
        """The closed jaxpr with regions replaced."""
        return jax.make_jaxpr(self.run)(*(v.aval for v in self.inputs))

    def _opened(self, needed: set[Equation]) -> set[Call]:
        """The calls of which a part is replaced or left out, or a value inside is read, and those
        that get a value that is not computed, as nothing reads it."""
        touched, made = self._needed({}, set()) - needed, {*self.inputs}
        for region in self.regions:
            touched |= region.replaced | {v.made_by for v in region.reads if v.made_by is not None}
            made |= {region.output, *(region.backward.values if region.backward else ())}
        made |= {v for equation in needed for v in equation.outs}
        calls = {call for equation in needed for call in equation.calls}
        missing = {c for c in calls if any(v.known is None and v not in made for v in c.ins)}
        return missing | {call for equation in touched for call in equation.calls}

    def _needed(self, ends: dict[Equation, Region], gone: set[Equation]) -> set[Equation]:
        wanted = {*self.outs}
        needed: set[Equation] = set()
        for equation in reversed(self.equations):
            region = ends.get(equation)
            made, reads, always = equation.outs, equation.ins, bool(equation.eqn.effects)
            if region is not None and region.last is equation:
                made, reads, always = [region.output], region.inputs, False
            elif region is not None and region.backward is not None:
                backward = region.backward
                made, reads = backward.values, [backward.cotangent, region.output]
                always = False
            elif equation in gone:
                continue
            if always or not wanted.isdisjoint(made):
                wanted |= {*reads}
                needed.add(equation)
        return needed

    def _run(self, body: Any, env: dict, ends: Any, wanted: set[Any], opened: set[Call]) -> None:
        plain: list[Equation | Call] = []  # that follow each other

        def flush() -> None:
            if plain:
                run_together(plain, env)
                plain.clear()

        for item in body:
            if item not in wanted:
                continue
            programs = item.inner.values() if isinstance(item, Equation) else ()
            holds = any(program.holds_regions for program in programs)
            if item not in ends and item not in opened and not holds:
                plain.append(item)
                continue
            flush()
            if isinstance(item, Call):
                with compat.in_place_of(item.eqn, item.eqn):
                    self._run(item.body, env, ends, wanted, opened)
            elif item in ends:
                self._emit(ends[item], item, env)
            else:
                made = _rewritten(item, [read(env, v) for v in item.ins])
                env.update(zip(item.outs, made, strict=True))
        flush()

    def _emit(self, region: Region, at: Equation, env: dict) -> None:
        """The results of a region, or of its derivative, instead of an equation."""
        backward, first = region.backward, region.first
        if backward is not None and at is not region.last:
            with compat.in_place_of(at.eqn, at.written):
                gradients = env[region](read(env, backward.cotangent))
            env.update(zip(backward.values, gradients, strict=True))
            return
        given = [read(env, v) for v in region.inputs]
        with compat.in_place_of(first.eqn, first.written):
            if backward is None:
                made = region.emit(*given)
            else:
                made, env[region] = region.differentiated(*given)
        env[region.output] = as_aval(made, region.output.aval)


def _value(env: dict, variable: Any) -> Value:
    return Value(variable.aval, known=variable.val) if hasattr(variable, "val") else env[variable]


# -- equations with jaxprs inside ------------------------------------------------------------------


def _seen_through(eqn: Any) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr of a call that does not say where and how it runs; and that of
    JAX's own functions with a derivative, as relu and softmax."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit", "closed_call", "core_call"):
        closed = params.get("jaxpr", params.get("call_jaxpr"))
        plain = compat.is_plain_call(params)
    elif name == CUSTOM:
        closed = params["call_jaxpr"]
        plain = compat.is_own_derivative(closed)
    elif eqn.primitive is cudnn_p:
        closed = _of_a_product(params["spec"], tuple(v.aval for v in eqn.invars))
        return None if closed is None else (closed.jaxpr, closed.consts)
    else:
        return None
    if not plain or any(isinstance(const, jax.core.Tracer) for const in closed.consts):
        return None
    return closed.jaxpr, closed.consts


@functools.lru_cache(maxsize=1024)
def _of_a_product(spec: GraphSpec, avals: tuple[Any, ...]) -> Any:
    """The jaxpr of a graph that is a product with a bias, as of a Linear layer of ours, which what
    follows it may join; None for other graphs."""
    methods, options = [call.node.method for call in spec.calls], spec.options
    free = options.implementation in (None, AUTO) and options.engine is None
    if not free or options.deterministic or spec.origin.role or methods != ["matmul", "add"]:
        return None
    joint = getattr(spec.calls[0].node, "columns", 1) > 2  # of heads, which a mesh may shard
    if joint or len(spec.outputs) != 1 or spec.constants or not spec.is_static:
        return None
    try:
        return jax.make_jaxpr(functools.partial(evaluate, spec, products=NARROW))(*avals)
    except compat.ShardingTypeError:  # along explicit axes jnp asks where ours decides
        return None


def _inner(equation: Equation, inside: bool) -> dict[tuple[str, int | None], Program]:
    """The programs of a loop, of branches, of what is computed again or on each device; ``inside``:
    of a program that is differentiated."""
    params, ins = equation.params, equation.ins
    places: Sequence[tuple[str, int | None]] = [("jaxpr", None)]
    match equation.name:
        case "scan":
            shared = ins[: compat.scan_sizes(params)[0]]
        case "while":
            test = params["cond_nconsts"]
            places, shared = [("body_jaxpr", None)], ins[test : test + params["body_nconsts"]]
        case "cond":
            places, shared = [("branches", i) for i in range(len(params["branches"]))], ins[1:]
        case "checkpoint" | "remat" | "remat2" | "shard_map" | "jit" | "pjit":
            shared = ins
        case _:
            return {}
    found, differentiated = {}, inside or equation.is_differentiated
    for key, index in places:
        jaxpr = params[key] if index is None else params[key][index]
        inner, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        outside: list[Value | None] = [None] * len(inner.invars)
        for i, (value, x) in enumerate(zip(shared, inner.invars, strict=False)):
            outside[i] = value if value.aval.shape == x.aval.shape else None
        found[key, index] = Program(inner, consts, outside, differentiated)
    return found


def _rewritten(equation: Equation, values: list[Any]) -> list[Any]:
    """The results of an equation with the regions of its programs replaced."""
    params = dict(equation.params)
    program = next(iter(equation.inner.values()))
    if equation.name == "shard_map":
        names = ("mesh", "in_specs", "out_specs", "check_vma")
        given = {name: params[name] for name in names}
        manual = frozenset(compat.manual_axes(params))
        run = jax.shard_map(lambda *x: tuple(program.run(*x)), axis_names=manual, **given)
        return [*run(*values)]
    if equation.name in ("checkpoint", "remat", "remat2"):
        made = program.traced()
        inputs = [*made.jaxpr.constvars, *made.jaxpr.invars]
        params["jaxpr"] = made.jaxpr.replace(constvars=[], invars=inputs)
        params["policy"] = _policy(params["policy"])
        with compat.in_place_of(equation.eqn, equation.eqn):
            return equation.eqn.primitive.bind(*made.consts, *values, **params)
    for (key, index), program in equation.inner.items():
        if program.holds_regions:
            was = params[key] if index is None else params[key][index]
            made, held = program.traced(), len(was.consts)
            held_by, inputs = made.jaxpr.invars[:held], made.jaxpr.invars[held:]
            jaxpr = made.jaxpr.replace(constvars=[*made.jaxpr.constvars, *held_by], invars=inputs)
            closed = was.replace(jaxpr=jaxpr, consts=[*made.consts, *was.consts])
            several = params[key]
            params[key] = (
                closed if index is None else (*several[:index], closed, *several[index + 1 :])
            )
    found = dict(zip(equation.ins, values, strict=True))
    run_together([replace(equation, eqn=equation.eqn.replace(params=params))], found)
    return [found.get(v) for v in equation.outs]


def _policy(policy: Any) -> Any:
    """A policy of ``jax.checkpoint`` that takes a graph for the operation whose work it does."""

    def of(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is cudnn_p:
            methods = [call.node.method for call in params["spec"].anchors]
            primitive, params = _work_of(methods[0] if methods else "")
        return policy(primitive, *avals, **params)

    return None if policy is None else of


def _work_of(method: str) -> tuple[Any, dict[str, Any]]:
    """A primitive of JAX for an operation, with the parameters that policies look at."""
    if method.startswith("conv"):
        return jax.lax.conv_general_dilated_p, {}
    if method.startswith(("matmul", "sdpa")):
        batch = ((), ()) if method == "matmul" else ((0,), (0,))
        return jax.lax.dot_general_p, {"dimension_numbers": (((1,), (0,)), batch)}
    return jax.lax.reduce_sum_p, {}
