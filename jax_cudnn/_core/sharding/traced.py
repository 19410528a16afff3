"""Follows axes through the operations of a function that JAX has traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .. import compat
from .operations import ADD, MAX, MIN, RULES, Classes, Range, Value, known_range, unknown

_MOVES = {
    *"convert_element_type reshape transpose broadcast_in_dim squeeze expand_dims copy".split()
}
_MOVES |= {*"copy_p slice rev split stop_gradient reduce_precision".split()}


_CALLS = {
    **dict.fromkeys(("jit", "pjit", "closed_call", "remat", "remat2", "checkpoint"), ("jaxpr",)),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), ("call_jaxpr", "fun_jaxpr")),
    "core_call": ("call_jaxpr",),
}
"""Calls of functions, with the names of the parameter that holds the function."""


class _Step(NamedTuple):
    """An operation. ``reduced`` holds the axes over which it takes a sum (or the largest or
    smallest element). A loop has a ``body``, and in ``loop`` its operands, the same values in the
    body, the body's results, and how many of these are carried."""

    name: str
    params: Mapping[str, Any]
    ins: list[Value]
    outs: list[Value]
    reduced: list[tuple[int | None, str]]
    body: Trace | None = None
    loop: Any = None


class Trace:
    """The steps of a function, with the sets of its axes."""

    def __init__(self, classes: Classes) -> None:
        self.classes = classes
        self.steps: list[_Step] = []

    def value(self, shape: Sequence[int], range: Range | None = None) -> Value:
        return Value(shape, [self.classes.new(size) for size in shape], range)

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr; ``consts`` are values or arrays."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = const if isinstance(const, Value) else self._constant(const)

        def read(var: Any) -> Value:
            return self._constant(var.val) if hasattr(var, "val") else known[var]

        for eqn in jaxpr.eqns:
            made = self._add(eqn, [read(var) for var in eqn.invars])
            known.update(zip(eqn.outvars, made, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _constant(self, array: Any) -> Value:
        """Its elements differ, so its axes are whole."""
        shape = getattr(array, "shape", ())
        try:
            known = None if shape else (float(array), float(array))
        except TypeError:  # a random key
            known = None
        made = self.value(shape, known)
        self.classes.keep_whole(*made.axes)
        return made

    def _add(self, eqn: Any, ins: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        if name == "optimization_barrier":
            return ins
        if name == "scan":
            return self._loop(params, ins)
        if name in _CALLS:
            inner = next(params[key] for key in _CALLS[name] if key in params)
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), ins)
        if name == "select_n" and ins[0].constant is not None:
            return [ins[1 + int(ins[0].constant)]]
        shapes = [var.aval.shape for var in eqn.outvars]
        found = known_range(name, params, [x.range for x in ins], eqn.outvars[0].aval)
        outs = [self.value(shape, found) for shape in shapes]
        if outs[0].constant is not None:  # the same on every shard
            return outs
        for out in outs:
            out.is_offset = any(x.is_offset for x in ins) and all(
                x.is_offset or x.constant is not None for x in ins
            )
        reduced = RULES.get(name, unknown)(self.classes, params, ins, outs) or []
        self.steps.append(_Step(name, params, ins, outs, reduced))
        return outs

    def _loop(self, params: Mapping[str, Any], ins: list[Value]) -> list[Value]:
        first, count = compat.scan_sizes(params)
        body, classes = Trace(self.classes), self.classes
        inside = []
        for x in ins[first:]:
            carried = len(inside) < count
            classes.keep_whole(*() if carried else x.axes[:1])
            at = 0 if carried else 1
            inside.append(Value(x.shape[at:], x.axes[at:], None if carried else x.range))
        closed = params["jaxpr"]
        made = body.run(closed.jaxpr, closed.consts, [*ins[:first], *inside])
        outs = []
        for i, x in enumerate(made):
            if i < count:
                classes.join_all(x.axes, inside[i].axes)
                outs.append(Value(x.shape, x.axes))
            else:
                outs.append(self.value((params["length"], *x.shape)))
                classes.keep_whole(*outs[-1].axes[:1])
                classes.join_all(x.axes, outs[-1].axes[1:])
        loop = ins[first:], inside, made, count
        self.steps.append(_Step("scan", params, ins, outs, [], body, loop))
        return outs

    def described(self) -> list[Any]:
        """The operations, with the operands that are constants, but for arithmetic of offsets."""
        return [
            (
                step.name,
                [x.constant for x in step.ins if not step.outs[0].is_offset],
                step.body and step.body.described(),
            )
            for step in self.steps
        ]

    # -- partial sums ---------------------------------------------------------------------------

    def resolve(self) -> None:
        """Determines partial sums, and keeps whole what no rule shards."""
        self._resolve(self.steps)

    def _resolve(self, steps: list[_Step]) -> None:
        for step in steps:
            if step.body is not None:
                self._resolve_loop(step, step.body.steps)
                continue
            for x in (*step.ins, *step.outs):
                self.classes.keep_diagonals_whole(x.axes)
            reduced: dict[int, str] = {}
            for axis, how in step.reduced:
                if axis is not None:
                    reduced[self.classes.find(axis)] = how
            for root in {*reduced, *(root for x in step.ins for root in x.partial)}:
                how = self._after(step, root, reduced.get(root))
                for out in step.outs:
                    if how is None or root in self.classes.roots(out.axes):
                        self.classes.keep_whole(root)
                    else:
                        out.partial[root] = how

    def _after(self, step: _Step, root: int, reduced: str | None) -> str | None:
        """What a step makes of shards along a set: the kind of partial result, None if none."""
        given = [x.partial.get(root) for x in step.ins]
        kinds = {*given} - {None}
        if not kinds:
            return reduced
        if len(kinds) > 1 or any(root in self.classes.roots(x.axes) for x in step.ins):
            return None
        (kind,) = kinds
        if step.name in _MOVES:
            return kind if kind != ADD or _sums_fit(step.params.get("new_dtype")) else None
        if kind == ADD:
            return kind if _is_linear(step, [x is not None for x in given]) else None
        if step.name == "neg":
            return MIN if kind == MAX else MAX
        if step.name in ("max", "min"):  # both are monotone
            alone = given.count(None) == len(given) - 1
            return kind if alone or step.name == kind else None
        return kind if step.name == f"reduce_{kind}" else None

    def _resolve_loop(self, step: _Step, body: list[_Step]) -> None:
        init, inside, made, carried = step.loop
        for outer, inner in zip(init, inside, strict=True):
            inner.partial = dict(outer.partial)
        for _ in range(2):
            self._resolve(body)
            for outer, inner, after in zip(init, inside, made, strict=False):
                for root in {*inner.partial, *after.partial} if inner in inside[:carried] else ():
                    how = after.partial.get(root)
                    if inner.partial.get(root) != how:
                        if outer.constant != 0 or how != ADD:
                            self.classes.keep_whole(root)
                        inner.partial[root] = how or ADD
        for out, x in zip(step.outs, made, strict=True):
            out.partial = dict(x.partial)


def _sums_fit(dtype: Any) -> bool:
    """Whether a sum of values rounded to a dtype is near their sum."""
    return dtype is None or jnp.dtype(dtype).itemsize > 1


def _is_linear(step: _Step, given: list[bool]) -> bool:
    """Whether a step is linear in the operands ``given``, and the others are 0 where it must be."""
    name, ins = step.name, step.ins
    filled = [g or x.constant == 0 for g, x in zip(given, ins, strict=True)]
    if name in ("add", "sub", "add_any", "concatenate"):
        return all(filled)
    if name in ("neg", "reduce_sum", "cumsum", "reduce_window_sum"):
        return True
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return sum(given) == 1
    if name == "div":
        return given == [True, False]
    if name == "select_n":
        return not given[0] and all(filled[1:])
    if name == "dynamic_update_slice":
        return all(filled[:2]) and not any(given[2:])
    if name == "pad":
        return given[0] and filled[1]
    return name in ("dynamic_slice", "gather") and given[0] and not any(given[1:])
