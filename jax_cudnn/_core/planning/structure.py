"""Rules for the structure of a graph that becomes one cuDNN plan.

cuDNN 9.19 accepts graphs with more operations than an engine computes: it then leaves results
unwritten, or reads an operand in place of a value computed from it. This was found on an H200 with
random graphs; ``python -m fuzz`` in ``tests`` runs more. A graph is therefore arranged around its
anchor:

- Operations before the anchor compute its operands, where ``Node.prologue`` allows them; their
  results neither leave the graph nor are used elsewhere.
- All other operations come after the anchor; what they compute independently of it (from biases,
  for example) is used there.

Without an anchor, all operations have one shape, up to the reductions at the end.
"""

from __future__ import annotations

import math

from ..graph import layout
from ..graph.dims import Shape
from ..graph.planned import ANY
from ..graph.spec import Call, GraphSpec
from .call_sets import CallSets, members


def mixed_ranks(spec: GraphSpec) -> dict[str, str]:
    """Why cuDNN cannot see all tensors of a graph with one rank of at least three."""
    ranks = {
        len(shape)
        for tensor in spec.tensors
        if tensor.value is None
        for shape in [v.dims for v in layout.views(spec, tensor)] or [tensor.shape]
    }
    least = {call.node.least_rank for call in spec.calls if call.node.anchor}
    free = all(call.node.ports.is_elementwise or call.node.merges for call in spec.calls)
    free = free or layout.has_matrices(spec)
    if len(ranks) == 1 and len(least) < 2 and (free or min(ranks) > 2):
        return {}
    shown = ", ".join(map(str, sorted(ranks | least - {0})))
    if len(ranks | least - {0}) > 1:
        return {"ranks": f"tensors of ranks {shown} in one plan"}
    named = next(c.name for c in spec.calls if not c.node.ports.is_elementwise)
    return {"ranks": f"tensors of rank {shown}, but {named} takes at least three dimensions"}


def reasons(spec: GraphSpec) -> dict[str, str]:
    """The violations of these rules by operation; with several anchors cuDNN's own refusals apply
    as well."""
    sets = CallSets(spec)
    if len(sets.connected(sets.all)) > 1:
        return {"graph": "the graph is disconnected"}
    if not sets.anchors:
        return _alike(spec)
    (anchor, *others) = members(sets.anchors)
    if others:
        return _side_by_side(spec, sets)
    return _around(spec, spec.calls[anchor], sets)


def _side_by_side(spec: GraphSpec, sets: CallSets) -> dict[str, str]:
    """Measured on an H200 with cuDNN 9.19: two independent matmuls, as in the gradient of one, give
    wrong matrices (relative error 1.7). cuDNN 9.28 accepts some chains, which nobody has
    verified."""
    found = {}
    for i in members(sets.anchors):
        related = sets.before(1 << i) | sets.after(1 << i) | 1 << i
        for other in members(sets.anchors & ~related):
            name = spec.calls[other].name
            found[spec.calls[i].name] = f"independent of {name}: one plan holds one anchor"
        for other in members(sets.anchors & sets.before(1 << i)):
            first, second = spec.calls[other], spec.calls[i]
            if first.node.matrices and second.node.matrices:
                found[second.name] = f"it needs {first.name}, and such chains are not verified"
    return found


def _around(spec: GraphSpec, anchor: Call, sets: CallSets) -> dict[str, str]:
    before = sets.before(sets.anchors)
    after = sets.after(sets.anchors)
    found = {}
    methods = {call.node.method for call in spec.calls}
    if before and anchor.node.prologue not in (ANY, *methods):
        for i in members(before):
            found[spec.calls[i].name] = f"{anchor.name} takes no operand computed in the same plan"
    further = {name: port for port, name in anchor.outputs[1:]}
    for call in spec.calls:
        for _, name in call.inputs:
            if name in further:
                found[call.name] = f"it reads {further[name]} of {anchor.name}"
    for i in members(after):
        if _extent(spec, spec.calls[i]) != spec.tensor(anchor.outputs[0][1]).shape:
            found[spec.calls[i].name] = f"its shape differs from the result of {anchor.name}"
    for i in members(sets.all & ~sets.anchors & ~after):
        users = sets.users(1 << i)
        allowed = before | sets.anchors if before >> i & 1 else ~(before | sets.anchors)
        free = anchor.node.returns_prologue and before >> i & 1
        if not users or users & ~allowed or (sets.is_returned(1 << i) and not free):
            what = "computes an operand of" if before >> i & 1 else "is independent of"
            found[spec.calls[i].name] = f"it {what} {anchor.name} and is used elsewhere"
    return found


def _alike(spec: GraphSpec) -> dict[str, str]:
    extents = {call.name: _extent(spec, call) for call in spec.calls}
    if len({*extents.values()}) > 1:
        return {
            name: f"over {list(extent)}, unlike other operations"
            for name, extent in extents.items()
        }
    return {}


def _extent(spec: GraphSpec, call: Call) -> Shape:
    """The shape over which a call iterates: for a reduction, that of its operand."""
    shapes = (spec.tensor(name).shape for _, name in (*call.inputs, *call.outputs))
    return max(shapes, key=math.prod)
