"""The graph as it is planned and called: its inputs and outputs where XLA and cuDNN differ.

**Unused results.** Nodes drop them if they can. A kernel that writes all of its results gets memory
for the unused ones, which are dropped after the call.

**Booleans** take a byte each in XLA and a bit each in cuDNN. Measured on an H200 with cuDNN 9.19: a
plan that reads or writes an array of booleans packs eight of them into a byte. Plans therefore
never do: at the edge of a graph booleans are float32, the only type that compiles together with
every other dtype; inside they are cuDNN booleans. XLA broadcasts a smaller mask before the call,
because cuDNN would read its comparison out of bounds.

**Operands that cuDNN would read wrongly** in their shapes (``Edge.shapes``): XLA broadcasts
them before the call. Results that cuDNN would write wrongly are summed after the call. Parts that
run in XLA use the original shapes.

**Products of any dimensions** become those of three dimensions (``merging.py``).

**Bit masks** (``ops/pointwise/masks.py``) are packed booleans by design: to XLA they are bytes of
eight channels each. cuDNN computes or reads one as a comparison or a product with a boolean; a
boolean at the edge of a planned graph is always a bit mask.

**Values of 4 bits** are packed by XLA, two in a byte along the innermost dimension.

**Integers that index other operands** (offsets, lengths, pages; ``Indices``) are clipped to
their bounds before every call, because a plan would access other memory with wrong ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from .dims import Shape
from .dtypes import FP4
from .merging import is_reread, merged, reread, widened
from .node import Node
from .planned import MATRICES, Edge, Planned
from .spec import Call, GraphSpec, Tensor, intern

BITS = 8  # of a byte, along the channels

_conversions: dict[str, Node] = {}


def register_conversions(to_boolean: Node, from_boolean: Node) -> None:
    """The nodes that compare a number with another, and that pick one of two numbers by a mask."""
    _conversions.update(to_boolean=to_boolean, from_boolean=from_boolean)


def stored(tensor: Tensor) -> tuple[Shape, str]:
    """Shape and dtype of the XLA array for a tensor at the edge of a planned graph."""
    if tensor.dtype == FP4:
        shape = [*tensor.shape]
        shape[_inner(tensor)] //= 2
        return tuple(shape), "uint8"
    if tensor.dtype != "bool":
        return tensor.shape, tensor.dtype
    n, c, *spatial = tensor.shape
    return (n, c // BITS, *spatial), "uint8"


_NONE = Edge()


class Boundary:
    """What XLA does around the plan of a graph (:func:`boundary`).

    Attributes:
        edges: what each call's node says of its tensors.
        planned: the graph as it is planned and called: with numbers for the booleans at its edge,
            and with all results that a kernel writes, after those of the graph.
        initial: the value of the elements of a result that a plan does not write, by name.
        indexes: whether operands index others, and are clipped to them.
    """

    def __init__(self, spec: GraphSpec) -> None:
        self._spec = spec
        self.edges = tuple(
            call.node.boundary(at) if type(call.node).boundary is not Planned.boundary else _NONE
            for call, at in spec.at_ports
        )
        self.indexes = any(
            port in call.node.indices.positions for call in spec.calls for port, _ in call.inputs
        )

    @cached_property
    def planned(self) -> GraphSpec:
        spec = self._spec
        products = any(call.node.anchor.order == MATRICES for call in spec.calls)
        planned = _planned(merged(spec) if products else spec)
        return planned if planned is spec else intern(planned)

    @cached_property
    def initial(self) -> dict[str, float]:
        return {
            name: edge.initial[port]
            for call, edge in zip(self.planned.calls, boundary(self.planned).edges, strict=True)
            for port, name in call.outputs
            if port in edge.initial
        }

    def sent(self, operands: Sequence[Any]) -> list[Any]:
        """What a plan reads for the operands of the graph."""
        wide = widened(self._spec).input_tensors
        tensors = zip(self.clipped(operands), wide, self.planned.input_tensors, strict=True)
        found = ((x if own is t else _sent(x, t, own), own) for x, t, own in tensors)
        return [_packed(x, _inner(own)) if own.dtype == FP4 else x for x, own in found]

    def received(self, results: Sequence[jax.Array]) -> list[jax.Array]:
        """The results of the graph, of what a plan has written; further ones are dropped."""
        wide, planned = widened(self._spec).output_tensors, self.planned.output_tensors
        fours = zip(results, planned, strict=True)
        results = [_unpacked(y, _inner(t)) if t.dtype == FP4 else y for y, t in fours]
        tensors = zip(results, planned, wide, strict=False)
        return [y if own is t else _received(y, own, t) for y, own, t in tensors]

    def clipped(self, operands: Sequence[Any]) -> list[Any]:
        """The operands, with integers clipped to what they index (``Edge.clipped``). An operand at
        several ports is clipped to the bounds of all. Integers that the graph computes stay as they
        are: no plan holds such a graph (``planning/limits.py``)."""
        spec = self._spec
        values = dict(zip(spec.inputs, operands, strict=True))
        for call, edge in zip(spec.calls, self.edges, strict=True):
            positions = call.node.indices.positions
            names = {port: name for port, name in call.inputs if port in positions}
            given = {port: values[name] for port, name in names.items() if name in values}
            if not given or len(given) < len(names):
                continue
            found: dict[str, Any] = {}
            bounded = edge.clipped(given)
            for port in given:  # each of them must come back
                name, x = names[port], bounded[port]
                found[name] = jnp.minimum(found[name], x) if name in found else x
            values |= found
        return [values[name] for name in spec.inputs]


def boundary(spec: GraphSpec) -> Boundary:
    """That of a graph, computed once."""
    if "boundary" not in spec._cache:
        spec._cache["boundary"] = Boundary(spec)
    return spec._cache["boundary"]


def _sent(x: jax.Array, tensor: Tensor, planned: Tensor) -> jax.Array:
    if is_reread(tensor, planned):
        x = reread(jnp.broadcast_to(x, tensor.shape), tensor, planned)
    shape, dtype = stored(planned)
    return jnp.broadcast_to(x.astype(dtype), shape)


def _inner(tensor: Tensor) -> int:
    return tensor.order[-1] if tensor.order else len(tensor.shape) - 1


def _packed(x: jax.Array, inner: int) -> jax.Array:
    """Values of 4 bits as bytes of two, the first one in the lower bits: XLA's arrays may take a
    byte for each, and its bit cast is defined either way."""
    rows = jnp.moveaxis(x, inner, -1)
    pairs = rows.reshape(*rows.shape[:-1], -1, 2)
    return jnp.moveaxis(jax.lax.bitcast_convert_type(pairs, jnp.uint8), -1, inner)


def _unpacked(x: jax.Array, inner: int) -> jax.Array:
    rows = jnp.moveaxis(x, inner, -1)
    pairs = jax.lax.bitcast_convert_type(rows, jnp.dtype(FP4))
    return jnp.moveaxis(pairs.reshape(*rows.shape[:-1], -1), -1, inner)


def _received(x: jax.Array, planned: Tensor, tensor: Tensor) -> jax.Array:
    """Added up where the result has one element, and a boolean again."""
    x = reread(x, planned, tensor) if is_reread(tensor, planned) else x
    pairs = zip(x.shape, tensor.shape, strict=True)
    axes = tuple(i for i, (own, wanted) in enumerate(pairs) if own != wanted)
    x = jnp.sum(x, axes, dtype=jnp.float32, keepdims=True) if axes else x
    return x.astype(tensor.dtype)


def _planned(spec: GraphSpec) -> GraphSpec:
    edge = (*spec.inputs, *spec.outputs)
    sent = spec
    if any(spec.tensor(name).dtype == "bool" for name in edge):
        sent = _converted(sent)
    if shapes := _stretched(spec):
        tensors = (replace(t, shape=shapes.get(t.name, t.shape)) for t in sent.tensors)
        sent = replace(sent, tensors=tuple(tensors))
    anchors = [call.node.anchor for call in spec.calls]
    if any(anchor.bit_masks for anchor in anchors):
        sent = _with_bits(sent)
    if any(anchor.writes_all for anchor in anchors):
        sent = _with_all_results(sent)
    return sent


def _stretched(spec: GraphSpec) -> dict[str, Shape]:
    """The operands that are broadcast for the node that reads them, and its results that are
    summed."""
    found: dict[str, Shape] = {}
    for (call, tensors), edge in zip(spec.at_ports, boundary(spec).edges, strict=True):
        shapes = edge.shapes
        if not shapes:
            continue
        others = {n for c in spec.calls for p, n in c.inputs if c is not call or p not in shapes}
        for port, shape in shapes.items():
            if tensors[port].name in {*spec.inputs, *spec.outputs} - others:
                found[tensors[port].name] = shape
    return found


def _with_bits(spec: GraphSpec) -> GraphSpec:
    """Masks as booleans, unless a node reads them as bytes."""
    masks: dict[str, Shape] = {}
    taken: set[str] = set()  # as bytes
    own_edges = boundary(spec).edges
    for call, edge in zip(spec.calls, own_edges, strict=True):
        for port, name in (*call.inputs, *call.outputs):
            if port in edge.masks:
                masks[name] = spec.tensor(call.inputs[0][1]).shape
            elif (port, name) in call.inputs:
                taken.add(name)
    read = {*spec.outputs, *(name for call in spec.calls for _, name in call.inputs)}
    tensors = {t.name: t for t in spec.tensors}
    calls: list[Call] = []
    further: dict[str, None] = {}
    for call, edge in zip(spec.calls, own_edges, strict=True):
        ports = dict((*call.inputs, *call.outputs))
        own = {ports[port] for port in edge.masks if port in ports}
        if not edge.masks or own & taken:
            calls.append(call)
            continue
        wanted, made = {*read}, []
        for node, operands, result in reversed(edge.bits):
            if ports.get(result) not in wanted:
                continue
            if ports[result] not in read:  # cuDNN makes masks only of tensors it writes
                further[ports[result]] = None
            names = []
            for operand in operands:
                name = f"{call.name}::{operand}"
                if isinstance(operand, str):
                    name = ports[operand]
                else:
                    shape = (1,) * len(spec.tensor(ports[result]).shape)
                    tensors[name] = Tensor(name, shape, "float32", float(operand).hex())
                names.append(name)
            wanted.update(names)
            made.insert(0, _call(node, call.name, names, ports[result]))
        calls += made
    used = {name for call in calls for _, name in (*call.inputs, *call.outputs)}
    for name in masks.keys() - taken:
        tensors[name] = Tensor(name, masks[name], "bool")
    kept = tuple(t for t in tensors.values() if t.name in used)
    return GraphSpec(kept, tuple(calls), spec.inputs, (*spec.outputs, *further), spec.options)


def _call(node: Node, name: str, operands: Sequence[str], result: str) -> Call:
    inputs = zip(node.ports.input_names, operands, strict=True)
    outputs = zip(node.ports.output_names, [result], strict=True)
    return Call(node, f"{node.method}.{name}", tuple(inputs), tuple(outputs))


def _with_all_results(spec: GraphSpec) -> GraphSpec:
    read = {*spec.outputs, *(name for call in spec.calls for _, name in call.inputs)}
    calls, dropped, further = [], set(), {}
    for call in spec.calls:
        unread = [port for port, name in call.outputs if name not in read]
        if call.node.anchor.writes_all and unread:
            node = call.node.without(unread)
            outputs = tuple((port, name) for port, name in call.outputs if port in node.results)
            dropped |= {name for port, name in call.outputs if port not in node.results}
            found = node.infer({port: spec.tensor(name) for port, name in call.inputs})
            for port, name in outputs:
                if port in unread:
                    further[name] = replace(spec.tensor(name), dtype=found[port][1])
            call = replace(call, node=node, outputs=outputs)
        calls.append(call)
    return GraphSpec(
        tuple(further.get(t.name, t) for t in spec.tensors if t.name not in dropped),
        tuple(calls),
        spec.inputs,
        (*spec.outputs, *further),
        spec.options,
    )


def _converted(spec: GraphSpec) -> GraphSpec:
    edge = {name: spec.tensor(name) for name in (*spec.inputs, *spec.outputs)}
    inside = {name: _whole(spec, t) for name, t in edge.items() if t.dtype == "bool"}
    numbers = {
        name: replace(tensor, name=f"{name}::number", dtype="float32")
        for name, tensor in inside.items()
    }
    tensors = [*(inside.get(t.name, t) for t in spec.tensors), *numbers.values()]
    before, after = [], []

    def constant(value: float, like: Tensor) -> str:
        made = Tensor(f"{like.name}::{value}", (1,) * len(like.shape), "float32", value.hex())
        tensors.append(made)
        return made.name

    for name, number in numbers.items():
        if name in spec.inputs:
            operands, result, calls = [number.name, constant(0.5, number)], name, before
            node = _conversions["to_boolean"]
        else:
            operands = [constant(1.0, number), constant(0.0, number), name]
            node, result, calls = _conversions["from_boolean"], number.name, after
        calls.append(_call(node, name, operands, result))
    return GraphSpec(
        tuple(replace(t, order=None) if t.name in numbers else t for t in tensors),
        (*before, *spec.calls, *after),
        tuple(numbers[n].name if n in numbers else n for n in spec.inputs),
        tuple(numbers[n].name if n in numbers else n for n in spec.outputs),
        spec.options,
    )


def _whole(spec: GraphSpec, tensor: Tensor) -> Tensor:
    """The tensor in the shape it is broadcast to, unless there are several or an anchor's graph
    broadcasts it."""
    uses = [call for call in spec.calls if tensor.name in dict(call.inputs).values()]
    shapes = {spec.tensor(call.outputs[0][1]).shape for call in uses}
    elementwise = all(call.node.ports.is_elementwise for call in uses)
    if tensor.name in spec.outputs or len(shapes) != 1 or not elementwise:
        return tensor
    if spec.anchors:
        return tensor
    return replace(tensor, shape=shapes.pop(), order=None)
