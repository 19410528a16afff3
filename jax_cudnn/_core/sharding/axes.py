"""Which axes of a graph's tensors must be sharded together, and what becomes of the results.

Each node's reference says it: its axes are followed through the traced operations (:mod:`.traced`).
The sets of all calls are joined where calls share a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from ..errors import JaxCudnnError
from ..graph.by_reference import Batched, ByReference, Tangent, Transposed
from ..graph.dims import Shape, assigned
from ..graph.dtypes import itemsize
from ..graph.node import Draws, Node
from ..graph.promotion import inferred
from ..graph.reference import applied, in_one_part
from ..graph.spec import Call, GraphSpec, Tensor
from .operations import ADD, Classes
from .traced import Trace, Value

PASS, SUM, WHOLE = "pass", "sum", "whole"


@dataclass(frozen=True)
class Factor:
    """Axes that must be sharded together, over the same mesh axes.

    Attributes:
        axes: names of tensors (operands, intermediates and results), each with a dimension.
        size: what the number of shards must divide.
        role: PASS if each shard computes its part of the results; SUM if it also computes
            partial results; WHOLE if the axes cannot be sharded.
        partial: each tensor that is partial, with "add", "max" or "min", the operation that makes
            it whole.
        ahead: those that must be whole before later calls read them, see :func:`.shards.parts`.
    """

    axes: frozenset[tuple[str, int]]
    size: int
    role: str
    partial: tuple[tuple[str, str], ...] = ()
    ahead: frozenset[str] = frozenset()

    def axis(self, name: str) -> int | None:
        """The dimension of a tensor that is sharded."""
        return next((axis for tensor, axis in self.axes if tensor == name), None)


class _Local(NamedTuple):
    """A factor of one node, by ports."""

    axes: tuple[tuple[str, int], ...]
    size: int
    whole: bool
    partial: tuple[tuple[str, str], ...] = ()


_Port = tuple[str, Shape, str]
_Kind = tuple[str, str]


@functools.lru_cache(maxsize=2048)
def factors(spec: GraphSpec) -> tuple[Factor, ...]:
    """The factors of a graph with more than one element; none for symbolic shapes."""
    if not spec.is_static:
        return ()
    classes = Classes()
    ids = {
        (tensor.name, axis): classes.new(size)
        for tensor in spec.tensors
        for axis, size in enumerate(tensor.shape)
    }
    named: list[list[tuple[int, _Local]]] = []
    random = drawing(spec)
    for i, call in enumerate(spec.calls):
        at, found = dict((*call.inputs, *call.outputs)), []
        ports = _ports(spec, call.inputs), _ports(spec, call.outputs)
        for local in (
            _of_drawing(call.node, *ports, random[i])
            if i in random
            else _of_node(call.node, *ports)
        ):
            first, *others = (ids[at[port], axis] for port, axis in local.axes)
            assert first is not None
            classes.join(first, *others, size=local.size)
            if local.whole:
                classes.keep_whole(first)
            found.append((first, local))
        named.append(found)
    for offsets, names in with_offsets(spec).items():
        rows = [[ids[n, axis] for axis in range(1, len(spec.tensor(n).shape))] for n in names]
        alone = all(
            port in call.node.indices.offsets.values() for call, port in _reads(spec)[offsets]
        )
        alike = len({spec.tensor(n).shape[1:] for n in names}) == 1
        if alone and alike and offsets in spec.inputs:
            classes.join_all(*rows)
        else:
            classes.keep_whole(*(axis for row in rows for axis in row))
    for tensor in spec.tensors:
        classes.keep_diagonals_whole(ids[tensor.name, axis] for axis in range(len(tensor.shape)))
    sets: dict[int, set[tuple[str, int]]] = {}
    for axis, known in ids.items():
        if known is not None:
            sets.setdefault(classes.find(known), set()).add(axis)
    made = []
    for root, axes in sets.items():
        here = [[local for axis, local in found if classes.find(axis) == root] for found in named]
        sums = None if classes.whole(root) else _sums(spec, here)
        partial, ahead = sums or ((), frozenset())
        role = WHOLE if sums is None else SUM if partial else PASS
        made.append(Factor(frozenset(axes), classes.size(root), role, partial, ahead))
    return tuple(made)


def _sums(
    spec: GraphSpec, named: list[list[_Local]]
) -> tuple[tuple[tuple[str, str], ...], frozenset[str]] | None:
    """The partial tensors for one factor, and those of them that must be summed ahead of a call;
    None if the factor is WHOLE. ``named`` holds each call's part of the factor."""
    ahead: set[str] = set()
    while True:
        partial: dict[str, str] = {}
        for call, mine in zip(spec.calls, named, strict=True):
            at = dict(call.outputs)
            given = {port: name for port, name in call.inputs if name in partial.keys() - ahead}
            if not given and len(mine) > 1:
                return None
            found = dict(mine[0].partial) if mine else {}
            if given:
                kinds = tuple((port, partial[name]) for port, name in given.items())
                sides = _ports(spec, call.inputs), _ports(spec, call.outputs)
                found = None if mine else _of_partial(call.node, *sides, kinds)
            made = None if found is None else {at[port]: kind for port, kind in found.items()}
            if made is None or any(
                kind == ADD and itemsize(spec.tensor(name).dtype) < 2 for name, kind in made.items()
            ):
                if not given:
                    return None
                ahead |= {*given.values()}
                break
            partial |= made
        else:
            read = {*spec.outputs, *ahead}
            return tuple((name, k) for name, k in partial.items() if name in read), frozenset(ahead)


def _ports(spec: GraphSpec, named: Iterable[tuple[str, str]]) -> tuple[_Port, ...]:
    tensors = ((port, spec.tensor(name)) for port, name in named)
    return tuple((port, tensor.shape, tensor.dtype) for port, tensor in tensors)


@functools.lru_cache(maxsize=2048)
def with_offsets(spec: GraphSpec) -> Mapping[str, set[str]]:
    """The arrays into which each tensor holds offsets."""
    found: dict[str, set[str]] = {}
    for call in spec.calls:
        at = dict((*call.inputs, *call.outputs))
        for array, offsets in call.node.indices.offsets.items():
            if array in at and offsets in at:
                found.setdefault(at[offsets], set()).add(at[array])
    return found


@functools.lru_cache(maxsize=2048)
def drawing(spec: GraphSpec) -> Mapping[int, Draws]:
    """The calls that draw random numbers of which a shard of the batch can draw its part, by
    index: those with an offset that they alone read, for one batch."""
    found, reads = {}, _reads(spec)
    for i, call in enumerate(spec.calls):
        at, draws = dict(call.inputs), call.node.draws
        if call.is_paired and draws and at.get(draws.offset) in spec.inputs:
            batch, _ = draws.axes[0]
            others = [
                dict(other.inputs).get(batch) if port == draws.offset else None
                for other, port in reads[at[draws.offset]]
            ]
            if {*others} == {at[batch]}:
                found[i] = draws
    return found


def _reads(spec: GraphSpec) -> Mapping[str, list[tuple[Call, str]]]:
    """The calls and ports that read each tensor."""
    found: dict[str, list[tuple[Call, str]]] = {}
    for call in spec.calls:
        for port, name in call.inputs:
            found.setdefault(name, []).append((call, port))
    return found


def _of_drawing(
    node: Node, inputs: tuple[_Port, ...], outs: tuple[_Port, ...], draws: Draws
) -> Iterator[_Local]:
    """The factors of a node that draws: those of the node that is given what it draws, but that
    the drawn array is sharded along its batch alone."""
    words = draws.seed, draws.offset
    given = tuple(port for port in inputs if port[0] not in words)
    shape = draws.shape({port: shape for port, shape, _ in inputs})
    for local in _of_node(node, (*given, (draws.drawn, shape, "float32")), outs):
        drawn = {axis for port, axis in local.axes if port == draws.drawn}
        axes = tuple(at for at in local.axes if at[0] != draws.drawn)
        if axes:
            yield local._replace(axes=axes, whole=local.whole or bool(drawn - {0}))
    yield from (_Local(((word, 3),), 2, True) for word in words)


@functools.lru_cache(maxsize=4096)
def _of_node(node: Node, inputs: tuple[_Port, ...], outs: tuple[_Port, ...]) -> tuple[_Local, ...]:
    """A node's factors."""
    given = {port: shape for port, shape, _ in inputs}
    if node.ports.is_elementwise and len(outs) == 1:
        ((out, shape, _),) = outs
        if shape == tuple(map(max, zip(*given.values(), strict=True))):
            return tuple(
                _Local(
                    tuple((p, axis) for p, s in {**given, out: shape}.items() if s[axis] != 1),
                    size,
                    size == 0,
                )
                for axis, size in enumerate(shape)
                if size != 1
            )
    trace, values = _traced(node, inputs, outs)
    trace.resolve()
    classes, sets = trace.classes, {}
    for port, x in values.items():
        for axis, known in enumerate(x.axes):
            if known is not None:
                sets.setdefault(classes.find(known), []).append((port, axis))

    def alike(*roots: int) -> bool:
        return _alike(node, inputs, outs, trace, values, [x for root in roots for x in sets[root]])

    free = [root for root in sets if not classes.whole(root)]
    classes.keep_whole(*(root for root in free if not alike(root)))
    return tuple(
        _Local(tuple(axes), classes.size(root), classes.whole(root), _partial(values, outs, root))
        for root, axes in sets.items()
    )


def _alike(
    node: Node,
    inputs: tuple[_Port, ...],
    outs: tuple[_Port, ...],
    trace: Trace,
    alone: Mapping[str, Value],
    doubled: Collection[tuple[str, int]],
) -> bool:
    """Whether the reference takes the same steps, with the same numbers, if these axes are twice
    as large. A mean divides by a size, for example."""

    def larger(ports: tuple[_Port, ...]) -> tuple[_Port, ...]:
        return tuple(
            (port, tuple(s * (1 + ((port, i) in doubled)) for i, s in enumerate(shape)), dtype)
            for port, shape, dtype in ports
        )

    inputs, outs = larger(inputs), larger(outs)
    shapes = {port: shape for port, shape, _ in (*inputs, *outs)}
    bigger = resized(node, shapes)
    try:
        made = inferred(bigger, {p: Tensor(p, shape, dtype) for p, shape, dtype in inputs})
        other, values = _traced(bigger, inputs, outs)
    except (JaxCudnnError, TypeError, ValueError, ZeroDivisionError):
        return False  # they do not fit other axes
    return trace.described() == other.described() and all(
        x.shape == made[port][0] == shapes[port] and x.constant == alone[port].constant
        for port, x in values.items()
        if port in made
    )


@functools.lru_cache(maxsize=1024)
def _of_partial(
    node: Node, inputs: tuple[_Port, ...], outs: tuple[_Port, ...], given: tuple[_Kind, ...]
) -> dict[str, str] | None:
    """The kinds of a node's partial results for partial operands; None if the results are not
    partial in the same way."""
    trace, values = _traced(node, inputs, outs)
    over = trace.classes.new(2)
    assert over is not None
    for port, kind in given:
        values[port].partial[over] = kind
    trace.resolve()
    return None if trace.classes.whole(over) else dict(_partial(values, outs, over))


def _partial(values: Mapping[str, Value], outs: tuple[_Port, ...], root: int) -> tuple[_Kind, ...]:
    return tuple(
        (port, values[port].partial[root]) for port, *_ in outs if root in values[port].partial
    )


def _traced(
    node: Node, inputs: tuple[_Port, ...], outs: tuple[_Port, ...]
) -> tuple[Trace, dict[str, Value]]:
    """The steps of a node's reference, and the values at its ports."""
    trace = Trace(Classes())
    values = {port: trace.value(shape) for port, shape, _ in inputs}
    for port in node.indices.offsets.values():
        if port in values:
            values[port].is_offset = True
    assert not values.keys() & {port for port, *_ in outs}, node

    def reference(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        named = dict(zip(values, arrays, strict=True))
        return node.reference(**named) if node.anchor.product else applied(node, named)

    # With explicit axes, jnp adds operations for them.
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with no_mesh, jax.numpy_rank_promotion("allow"), in_one_part():
        avals = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in inputs]
        closed = jax.make_jaxpr(reference)(*avals)
    made = trace.run(closed.jaxpr, closed.consts, [*values.values()])
    values |= {port: x for (port, *_), x in zip(outs, made, strict=True)}
    letters: dict[tuple[str, int], int | None] = {}
    for port in (*node.ports.inputs, *node.ports.outputs):
        if port.name in values:  # the same letters have the same sizes
            axes = iter(values[port.name].axes)
            for letter, size in assigned(port, values[port.name].shape):
                for i in range(len(size) if isinstance(size, tuple) else 1):
                    axis = next(axes)
                    if axis is not None:
                        trace.classes.join(letters.setdefault((letter, i), axis), axis)
    if isinstance(node, Batched):
        trace.classes.join(*(values[port].axes[0] for port in (*node.mapped, *node.outs)))
    for port, other in _tangents(node):
        if port in values and other in values:  # of a vmap, one may have no leading axis
            a, b = values[port].axes, values[other].axes
            rank = min(len(a), len(b))
            trace.classes.join_all(a[len(a) - rank :], b[len(b) - rank :])
    for x in values.values():
        trace.classes.keep_diagonals_whole(x.axes)
    return trace, values


def _tangents(node: Node) -> Iterable[tuple[str, str]]:
    """Pairs of ports of one shape, an operand and its tangent or cotangent: a reference may need
    the operand for its shape only."""
    if isinstance(node, Tangent):
        yield from node.given.items()
    if isinstance(node, (Batched, Transposed)):
        made = node.made if isinstance(node, Transposed) else {}
        yield from ((made.get(a, a), made.get(b, b)) for a, b in _tangents(node.base))


def resized(node: Node, shapes: Mapping[str, Shape]) -> Node:
    """A node with the attributes for other shapes of its ports."""
    changes: dict[str, Any] = {}
    held: Any = node
    if getattr(held, "out_dims", None) is not None:
        changes["out_dims"] = shapes[node.results[0]]
    if hasattr(held, "slices"):
        sizes = zip(held.slices, shapes["input"], shapes["OUT_0"], strict=True)
        changes["slices"] = tuple((None,) * 3 if a == b else part for part, a, b in sizes)
    if isinstance(node, ByReference):
        inner = dict(shapes)
        if isinstance(node, Batched):
            changes["size"] = shapes[node.outs[0]][0]
            inner = {p: s[1:] if p in (*node.mapped, *node.outs) else s for p, s in shapes.items()}
        elif isinstance(node, (Tangent, Transposed)):
            also = {**node.made, **(node.given if isinstance(node, Transposed) else {})}
            inner |= {port: shapes[name] for port, name in also.items() if name in shapes}
        if isinstance(node, Transposed):
            changes["linear"] = tuple((port, inner[port], dtype) for port, _, dtype in node.linear)
        changes["base"] = resized(node.base, inner)
    return replace(node, **changes) if changes else node
