"""The transpose of a graph in the operands in which it is linear: of a tangent, the backward."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

from ..errors import GraphError
from ..graph import by_reference
from ..graph.dtypes import itemsize
from ..graph.spec import BACKWARD, TANGENT, Call, GraphSpec, Origin
from ..graph.tensor import GraphTensor
from .derivation import Derivation
from .derived import Derived

VALUE, COTANGENT = "value", "cotangent"


@functools.lru_cache(maxsize=2048)
def transpose(spec: GraphSpec, linear: tuple[str, ...], given: tuple[str, ...]) -> Derived:
    """Cotangents of the operands ``linear``, from those of the results ``given``.

    Keys are (VALUE, name) of the other operands and (COTANGENT, name) of results.
    """
    g = Derivation(spec)
    keys: dict[str, tuple[str, str]] = {}
    values: dict[str, GraphTensor] = {}
    for t in spec.tensors:
        if t.value is not None:
            values[t.name] = g.constant(t, len(t.shape))
        elif t.name in spec.inputs and t.name not in linear:
            values[t.name] = g.declare(t)
            keys[values[t.name].name] = (VALUE, t.name)
    terms: dict[str, list[GraphTensor]] = {}
    for name in given:
        x = g.declare(replace(spec.tensor(name), name=f"d({name})"))
        keys[x.name] = (COTANGENT, name)
        terms[name] = [x]
    moving, calls = {*linear}, []
    for call in spec.calls:
        ports = [port for port, name in call.inputs if name in moving]
        if ports:
            _check_linear(call, ports, linear)
            moving |= {name for _, name in call.outputs}
            calls.append(call)
        else:
            values |= g.replay(spec, call, values)

    def cotangent(name: str) -> GraphTensor:
        tensor = spec.tensor(name)
        total = g.sum(terms[name])
        if itemsize(tensor.dtype) == 2 and name not in linear:
            total = g.rounded(total, tensor.dtype)
        terms[name] = [total]
        return total

    for call in reversed(calls):
        received = {port: cotangent(name) for port, name in call.outputs if name in terms}
        if not received:
            continue
        inputs = {port: values[name] for port, name in call.inputs if name not in moving}
        tensors = {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
        passed = call.node.transpose(g, received, inputs, tensors)
        if passed is NotImplemented:
            passed = by_reference.transpose(call.node, g, received, inputs, tensors)
        for port, name in call.inputs:
            if name in moving and port in passed:
                terms.setdefault(name, []).append(passed[port])
    totals = [cotangent(name) if name in terms else None for name in linear]
    found = [
        None
        if x is None
        else g.rounded(
            x, spec.tensor(name).dtype, alone=sum(x is y for y in totals) == 1 and not g.is_used(x)
        )
        for name, x in zip(linear, totals, strict=True)
    ]
    for name, x in zip(linear, found, strict=True):
        if x is not None:
            g.like(x, spec.tensor(name))
    role = BACKWARD if spec.origin.role == TANGENT else f"transpose of {spec.origin.role}"
    origin = Origin(role if spec.origin.role else "transpose", (), spec.origin.family)
    derived = g.finished([x for x in found if x is not None], origin)
    return Derived.of(derived, keys, [None if x is None else x.name for x in found])


def _check_linear(call: Call, ports: Collection[str], linear: Collection[str]) -> None:
    if not call.node.linear_in(ports):
        raise GraphError(
            f"{call.name} is not linear in {' and '.join(ports)}",
            expected=f"a graph that is linear in {', '.join(linear)}",
            got=f"{call.node.method} of them",
            why="only linear functions have a transpose",
            fix="jax.vjp(function, ...)[1] gives cotangents at a point",
        )
