"""Graphs that are never sent to cuDNN: it would refuse them, or accept and compute them wrongly.

The second kind was found on an H200 with cuDNN 9.19, by running every pattern of broadcasts
(``tests/gpu/test_broadcasts_on_the_gpu.py``) and random graphs (``python -m fuzz`` in ``tests``).

Broadcasts. After a matmul every one is correct. After fprop and dgrad those of (1, C, 1, 1),
(N, 1, H, W) and (1, 1, 1, 1) are; after wgrad only that of (1, 1, 1, 1). Others are read out of
bounds. Without a convolution or matmul, operations of two operands broadcast as after fprop; those
of three (a selection) and those of rank three take scalars only, and values computed in the graph
are not broadcast.

Structure. cuDNN accepts graphs with more operations than an engine computes: it leaves results
unwritten, or reads an operand in place of a value computed from it. Operations before the anchor
therefore compute its operands, where ``Anchor.prologue`` allows them, and nothing else. All others
come after the anchor; what they compute independently of it (from biases, for example) is used
there. Without an anchor, all operations have one shape, up to the reductions at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ..graph import planned
from ..graph.dims import Shape
from ..graph.dtypes import E8M0, FP4, FP8
from ..graph.layout import layout
from ..graph.merging import is_split
from ..graph.spec import FLOAT64, Call, GraphSpec
from ..reasons import Kind, Reason, Reasons
from .call_sets import CallSets, members

_MERGED = (
    "cuDNN sees the dimensions of its batch, rows, columns and sum as one each, and those of some "
    "tensor in this graph do not merge so (some are broadcast, or not contiguous)"
)
_Found = Iterator[tuple[str, str | Reason]]


def known_reasons(spec: GraphSpec) -> Reasons:
    """Why this graph is not planned, by operation; empty if cuDNN may plan it."""
    for rules in (_never, _mixed_ranks, _no_matrices, _calls, _structure):
        if found := dict(rules(spec)):  # the rules behind are about graphs that pass those before
            return {who: r if isinstance(r, Reason) else Reason(r) for who, r in found.items()}
    return {}


def _never(spec: GraphSpec) -> _Found:
    if spec.is_empty:
        yield "shape", "a tensor has no elements (under jit XLA runs such a graph)"
    if spec.has_float64:
        yield "dtype", FLOAT64
    for call, tensors in spec.at_ports:
        counts = {t.dtype: math.prod(t.shape) for t in tensors.values()}
        scales = min(counts.get(dtype, math.inf) for dtype in (E8M0, FP8[0]))
        if FP4 in counts and scales >= counts[FP4]:  # one scale is of many values
            yield call.name, "float4 without the scales of its blocks"
    for call in spec.calls:
        if call.node.xla_only:
            yield call.name, call.node.about.requires
        if is_split(call.node):
            yield call.name, _MERGED


def _mixed_ranks(spec: GraphSpec) -> _Found:
    """Why cuDNN cannot see all tensors of a graph with one rank of at least three."""
    seen = layout(spec)
    ranks = {
        len(shape)
        for tensor in spec.tensors
        if tensor.literal is None
        for shape in [v.dims for v in seen.parts.get(tensor.name, ())] or [tensor.shape]
    }
    orders = {call.node.anchor.order for call in spec.anchors}
    least = {4 if order == planned.CHANNELS_LAST else 0 for order in orders}
    free = all(
        call.node.ports.is_elementwise or call.node.anchor.order == planned.MERGED
        for call in spec.calls
    )
    free = free or seen.has_matrices
    if len(ranks) == 1 and len(least) < 2 and (free or min(ranks) > 2):
        return
    first, *others = map(str, sorted(ranks | least - {0}))
    if others:
        yield "ranks", f"tensors of ranks {', '.join([first, *others])} in one plan"
    elif len(least) > 1:
        which = ", ".join(f"{call.name} {call.node.anchor.order}" for call in spec.anchors)
        yield "order", f"operations of different memory orders in one plan: {which}"
    else:
        named = next(c.name for c in spec.calls if not c.node.ports.is_elementwise)
        yield "ranks", f"tensors of rank {first}, but {named} takes at least three dimensions"


def _no_matrices(spec: GraphSpec) -> _Found:
    """Why cuDNN cannot see the tensors around a matmul as a batch of matrices."""
    among = [call.name for call in spec.calls if call.node.anchor.order == planned.MATRICES]
    if not among or {len(tensor.shape) for tensor in spec.tensors} == {3}:
        return
    if not layout(spec).has_matrices:
        what = f"it is in a plan with {among[0]}, which has several batch dimensions"
        for call in spec.calls:
            if call.node.anchor.order != planned.MATRICES and not call.node.ports.is_elementwise:
                yield call.name, what
        return
    for tensor in spec.tensors:
        if layout(spec).matrices[tensor.name] is None:
            what = "cuDNN sees all leading dimensions of a matrix as one, and those of "
            cannot = "cannot be merged (some are broadcast, or not contiguous)"
            yield tensor.name, f"{what}{list(tensor.shape)} {cannot}"


def _calls(spec: GraphSpec) -> _Found:
    """What single operations cannot do, and what their tensors cannot be."""
    seen = layout(spec)
    for call in spec.calls:  # slices of another tensor's memory that a plan would have to copy
        source, out = call.inputs[0][1], call.outputs[0][1]
        if out in seen.slices:
            what = f"it is a slice of {source}, which is not an operand of the graph"
            if source in spec.inputs:
                what = "its result leaves the graph or has its own layout, and so needs a copy"
            kept = out in spec.outputs or spec.tensor(out).order is not None
            if source not in spec.inputs or kept:
                yield call.name, f"{what} ({call.node.about.requires})"
    if any(call.node.anchor.order == planned.MERGED for call in spec.calls) and seen.merged is None:
        yield "order", "its tensors have different memory orders"
    if not spec.anchors:
        yield from _small_intermediates(spec)
    refusals = [call.node.support(tensors, spec) for call, tensors in spec.at_ports]
    for call, refused in zip(spec.calls, refusals, strict=True):
        if refused := refused or _broadcasts(spec, call, seen.views):
            yield call.name, refused


def _small_intermediates(spec: GraphSpec) -> _Found:
    """Values computed in the graph with a smaller shape, and then broadcast: without a convolution
    or matmul in the graph cuDNN reads them out of bounds."""
    made = {name for call in spec.calls for _, name in call.outputs}
    for call in spec.calls:
        if len(call.inputs) < 2 or not call.node.ports.is_elementwise:
            continue  # nothing is broadcast
        out = spec.tensor(call.outputs[0][1]).shape
        for port, name in call.inputs:
            if name in made and (own := spec.tensor(name).shape) != out:
                what = f"{port} is computed in the graph with shape {list(own)} and then broadcast"
                yield call.name, f"{what} to {list(out)}: compute it before the call"


def _broadcasts(
    spec: GraphSpec, call: Call, views: Mapping[str, tuple[Shape, list[int]]]
) -> Reason | None:
    """Why an elementwise operation cannot broadcast its operands like this, or None."""
    if not call.node.ports.is_elementwise or len(call.inputs) < 2:
        return None
    out = views[call.outputs[0][1]][0]
    small = len(call.inputs) == 2 and len(out) != 3
    alone = planned.ROWS_AND_CHANNELS if small else planned.NUMBERS_ONLY
    kind = next((c.node.anchor.broadcasts for c in spec.anchors), alone)
    arrays = [views[name][0] for _, name in call.inputs if spec.tensor(name).literal is None]
    (n, c, *spatial), ones = out, [1] * len(out[2:])
    allowed = [] if kind == planned.NUMBERS_ONLY else [[1, 1, *ones]]
    if kind == planned.ROWS_AND_CHANNELS:
        allowed = [[1, c, *ones], [n, 1, *spatial], *allowed]
    wrong = [list(dims) for dims in arrays if dims != out and list(dims) not in allowed]
    if kind == planned.ANY or (not wrong and out in arrays):
        return None
    given = " and ".join(map(str, wrong or map(list, arrays)))
    what = f"broadcasting {given} to {list(out)} is not supported: next to a full operand cuDNN "
    return Reason(f"{what}takes {', '.join(map(str, allowed)) or 'Python scalars'}", Kind.BROADCAST)


def _structure(spec: GraphSpec) -> _Found:
    """With several anchors cuDNN's own refusals apply as well."""
    sets = CallSets(spec)
    if len(sets.connected(sets.all)) > 1:
        return iter([("graph", "the graph is disconnected")])
    anchors = members(sets.anchors)
    if anchors:
        return _side_by_side(spec, sets) if anchors[1:] else _around(spec, sets, *anchors)
    extents = {call.name: _extent(spec, call) for call in spec.calls}
    unlike = extents if len({*extents.values()}) > 1 else {}
    return ((name, f"over {list(x)}, unlike other operations") for name, x in unlike.items())


def _side_by_side(spec: GraphSpec, sets: CallSets) -> _Found:
    """Two independent matmuls, as in the gradient of one, give wrong matrices (relative error 1.7).
    cuDNN 9.28 accepts some chains, which nobody has verified. Integers that index operands are
    clipped before the plan, so it must not compute them."""
    made = {name: call.name for call in spec.calls for _, name in call.outputs}
    for call in spec.anchors:
        for port, name in call.inputs:
            if port in call.node.indices.positions and name in made:
                yield made[name], f"it computes {port} of {call.name}, which is clipped before"
    for i in members(sets.anchors):
        related = sets.before(1 << i) | sets.after(1 << i) | 1 << i
        for other in members(sets.anchors & ~related):
            what = f"independent of {spec.calls[other].name}: one plan holds one anchor"
            yield spec.calls[i].name, what
        for other in members(sets.anchors & sets.before(1 << i)):
            first, second = spec.calls[other], spec.calls[i]
            if first.node.anchor.order == second.node.anchor.order == planned.MATRICES:
                what = f"it needs {first.name}, and such chains are not verified"
                yield second.name, what


def _around(spec: GraphSpec, sets: CallSets, place: int) -> _Found:
    anchor = spec.calls[place]
    before, after = sets.before(sets.anchors), sets.after(sets.anchors)
    behind, beside = members(after), members(sets.all & ~sets.anchors & ~after)
    methods = {call.node.method for call in spec.calls}
    if before and anchor.node.anchor.prologue not in (planned.ANY, *methods):
        what = f"{anchor.name} takes no operand computed in the same plan"
        yield from ((spec.calls[i].name, what) for i in members(before))
    further = {name: port for port, name in anchor.outputs[1:]}
    read = ((call.name, name) for call in spec.calls for _, name in call.inputs)
    yield from ((who, f"it reads {further[x]} of {anchor.name}") for who, x in read if x in further)
    for i in behind:
        if _extent(spec, spec.calls[i]) != spec.tensor(anchor.outputs[0][1]).shape:
            yield spec.calls[i].name, f"its shape differs from the result of {anchor.name}"
    for i in beside:
        users = sets.users(1 << i)
        allowed = before | sets.anchors if before >> i & 1 else ~(before | sets.anchors)
        free = anchor.node.anchor.returns_prologue and before >> i & 1
        if not users or users & ~allowed or (sets.is_returned(1 << i) and not free):
            what = "computes an operand of" if before >> i & 1 else "is independent of"
            yield spec.calls[i].name, f"it {what} {anchor.name} and is used elsewhere"


def _extent(spec: GraphSpec, call: Call) -> Shape:
    """The shape over which a call iterates: for a reduction, that of its operand."""
    shapes = (spec.tensor(name).shape for _, name in (*call.inputs, *call.outputs))
    return max(shapes, key=math.prod)
