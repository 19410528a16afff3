"""The tangent of a graph, as a graph that is linear in the tangents, and the forward that keeps
its residuals."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import cast

from ..errors import JaxCudnnError
from ..graph import by_reference
from ..graph.dtypes import is_floating, itemsize
from ..graph.promotion import inferred
from ..graph.spec import FORWARD, Call, GraphSpec, Origin, Tensor, intern
from ..graph.spec import TANGENT as TANGENT_ROLE
from ..graph.tensor import GraphTensor
from .derivation import Derivation, vocabulary
from .derived import Derived
from .residuals import choose
from .transpose import transpose

VALUE, TANGENT = "value", "tangent"


@dataclass(frozen=True)
class Linearized:
    """``forward`` gives the graph's results first, then the residuals. ``tangent`` has keys
    (VALUE, name of an operand or result of ``forward``) and (TANGENT, name of an operand)."""

    forward: GraphSpec
    tangent: Derived


@functools.lru_cache(maxsize=2048)
def linearize(spec: GraphSpec, active: frozenset[str]) -> Linearized:
    """The derivative of a graph with respect to its operands ``active``."""
    g = Derivation(spec)
    values = {
        t.name: g.declare(t) if t.value is None else g.constant(t, len(t.shape))
        for t in spec.tensors
    }
    first = {
        name: g.declare(replace(spec.tensor(name), name=f"d({name})"))
        for name in spec.inputs
        if name in active
    }
    tangents = _pushed(g, spec, values, first)
    outputs = [tangents.get(name) for name in spec.outputs]
    for name, x in zip(spec.outputs, outputs, strict=True):
        if x is not None:
            g.like(x, spec.tensor(name))
    made = [x for x in outputs if x is not None]
    role = spec.origin.role
    origin = Origin(TANGENT_ROLE if role in ("", FORWARD) else f"{TANGENT_ROLE} of {role}")
    draft = g.finished(made, origin)
    own = {x.name: name for name, x in first.items()}
    primal = {x.name: name for name, x in values.items()}
    needed = {primal[name] for name in (draft.inputs if draft else ()) if name in primal}
    kept, again = choose(spec, needed, _stored(spec))
    forward, names = _forward(spec, kept)
    results = [None if x is None else x.name for x in outputs]
    keys: dict[str, tuple[str, str]] = {n: (TANGENT, name) for n, name in own.items()}
    if draft is None:
        return Linearized(forward, Derived.of(None, keys, results))
    tangent, rename, stored = _completed(spec, draft, primal, names, again, forward)
    keys = {rename.get(n, n): key for n, key in keys.items()} | stored
    results = [None if name is None else rename.get(name, name) for name in results]
    return _family(Linearized(forward, Derived.of(tangent, keys, results)))


def _family(made: Linearized) -> Linearized:
    """The same, with the family of graphs set in each if they must run in the same place."""
    tangent = made.tangent.spec
    if tangent is None or not (made.forward.is_paired or tangent.is_paired):
        return made
    sources = zip(tangent.inputs, made.tangent.inputs, strict=True)
    linear = tuple(n for n, source in sources if cast(tuple, source.of)[0] == TANGENT)
    backward = transpose(tangent, linear, tangent.outputs).spec
    members = (made.forward, tangent, backward)
    family = tuple(replace(m, origin=Origin()) for m in members if m is not None)

    def belonging(spec: GraphSpec) -> GraphSpec:
        return intern(replace(spec, origin=replace(spec.origin, family=family)))

    derived = replace(made.tangent, spec=belonging(tangent))
    return Linearized(belonging(made.forward), derived)


def _pushed(
    g: Derivation,
    spec: GraphSpec,
    values: Mapping[str, GraphTensor],
    first: Mapping[str, GraphTensor],
) -> dict[str, GraphTensor]:
    """The tangents of all tensors that have one."""
    tangents = dict(first)
    for call in spec.calls:
        moving = {port: tangents[name] for port, name in call.inputs if name in tangents}
        if not moving:
            continue
        inputs = {port: values[name] for port, name in call.inputs}
        outputs = {port: values[name] for port, name in call.outputs}
        if call.node.algebra.recomputed and any(
            itemsize(x._state.dtype) == 1 for x in outputs.values()
        ):
            # 8-bit results are too coarse to compute derivatives from.
            outputs = dict(zip(outputs, g.apply(call.node, **inputs), strict=True))
        results = call.node.jvp(g, moving, inputs, outputs)
        if results is NotImplemented:
            results = by_reference.jvp(call.node, g, moving, inputs, outputs)
        for port, name in call.outputs:
            tensor = spec.tensor(name)
            if port not in results or not is_floating(tensor.dtype):
                continue
            x = g.broadcast(results[port], tensor.shape)
            exact = name in spec.outputs or itemsize(tensor.dtype) == 2
            tangents[name] = g.rounded(x, tensor.dtype) if exact else x
    return tangents


def _stored(spec: GraphSpec) -> dict[str, str]:
    """The dtype in which each tensor is kept for a derivative: that of its array."""
    dtypes = {t.name: t.dtype for t in spec.tensors}
    for call in spec.calls:
        inputs = {
            port: replace(spec.tensor(name), dtype=dtypes[name]) for port, name in call.inputs
        }
        try:
            results = inferred(call.node, inputs)
        except JaxCudnnError:  # the user's arrays had other dtypes than these values
            continue
        for port, name in call.outputs:
            natural = results[port][1]
            if dtypes[name] == "float32" and is_floating(natural) and itemsize(natural) == 2:
                dtypes[name] = natural
    return dtypes


def _forward(spec: GraphSpec, kept: Collection[str]) -> tuple[GraphSpec, dict[str, str]]:
    """The graph with residuals as additional results, and the name of each."""
    stored = _stored(spec)
    tensors, calls, outputs = list(spec.tensors), list(spec.calls), list(spec.outputs)
    names = {}
    for name in (t.name for t in spec.tensors if t.name in kept):
        names[name] = name
        if name in spec.inputs:
            continue
        tensor = spec.tensor(name)
        if stored[name] != tensor.dtype:
            names[name] = f"{name}:{stored[name]}"
        if names[name] not in (t.name for t in spec.tensors):
            copy = vocabulary().cast
            tensors.append(Tensor(names[name], tensor.shape, stored[name], order=tensor.order))
            title = f"{copy.method}.{sum(c.node.method == copy.method for c in calls)}"
            ports = (
                ((copy.ports.input_names[0], name),),
                ((copy.ports.output_names[0], names[name]),),
            )
            calls.append(Call(copy, title, *ports))
        if names[name] not in outputs:
            outputs.append(names[name])
    residuals = tuple(outputs[len(spec.outputs) :])
    role = spec.origin.role or FORWARD
    forward = replace(
        spec,
        tensors=tuple(tensors),
        calls=tuple(calls),
        outputs=tuple(outputs),
        origin=Origin(role, residuals),
    )
    return intern(forward), names


def _completed(
    spec: GraphSpec,
    draft: GraphSpec,
    primal: Mapping[str, str],
    names: Mapping[str, str],
    again: Collection[int],
    forward: GraphSpec,
) -> tuple[GraphSpec | None, dict[str, str], dict[str, tuple[str, str]]]:
    """A tangent that reads any values of ``spec``, rewritten to read the kept ones: the graph, the
    new names of its operands and results, and the keys of the values."""
    g = Derivation(spec)
    keys, values = {}, {}
    for name, kept in names.items():
        tensor = forward.tensor(kept)
        values[name] = g.declare(replace(tensor, name=name))
        keys[values[name].name] = (VALUE, kept)
    for t in spec.constants:
        values[t.name] = g.constant(t, len(t.shape))
    for i in again:
        values |= g.replay(spec, spec.calls[i], values)
    inside = {name: values[primal[name]] for name in draft.inputs if name in primal}
    inside |= {n: g.declare(draft.tensor(n)) for n in draft.inputs if n not in primal}
    inside |= {t.name: g.constant(t, len(t.shape)) for t in draft.constants}
    for call in draft.calls:
        inside |= g.replay(draft, call, inside)
    rename = {name: x.name for name, x in inside.items()}
    tangent = g.finished([inside[name] for name in draft.outputs], draft.origin)
    return tangent, rename, keys
