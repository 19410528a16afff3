"""What a forward keeps for its derivatives: the fewest bytes from which they can be computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from ..graph.dtypes import itemsize
from ..graph.spec import GraphSpec

_FINEST = 1 << 20


def choose(
    spec: GraphSpec, needed: Collection[str], stored: Mapping[str, str]
) -> tuple[frozenset[str], tuple[int, ...]]:
    """The tensors to keep, and the calls to recompute from these, for the ``needed`` tensors.

    Operands cost nothing to keep, and neither do results that the forward writes anyway in the kept
    dtype. Only calls whose node is ``recomputed`` are recomputed. The tensors are a minimum cut of
    the graph, the one nearest to the needed tensors, so that no call is recomputed unnecessarily.
    """
    free = {*spec.inputs, *_written(spec)}
    free = {n for n in free if stored[n] == spec.tensor(n).dtype}
    maker = {name: i for i, call in enumerate(spec.calls) for _, name in call.outputs}
    needed = {n for n in needed if spec.tensor(n).value is None}
    if all(n in free or not spec.calls[maker[n]].node.algebra.recomputed for n in needed):
        return frozenset(needed), ()
    cut = _cut(spec, needed - free, free, stored, maker) | (needed & free)
    kept, again, todo = set(cut), set(), [*needed]
    while todo:
        name = todo.pop()
        if name in kept or spec.tensor(name).value is not None:
            continue
        if name in free:
            kept.add(name)
        elif maker[name] not in again:
            again.add(maker[name])
            todo += [n for _, n in spec.calls[maker[name]].inputs]
    return frozenset(kept), tuple(sorted(again))


def _written(spec: GraphSpec) -> set[str]:
    """Results, and tensors that one convolution or matmul computes for another: no plan holds
    both."""
    found, computed = {*spec.outputs}, set()
    for call in spec.calls:
        reads = {name for _, name in call.inputs}
        if call.node.anchor:
            found |= reads & computed
        if call.node.anchor or reads & computed:
            computed |= {name for _, name in call.outputs}
    return found


def _cut(
    spec: GraphSpec,
    needed: Collection[str],
    free: Collection[str],
    stored: Mapping[str, str],
    maker: Mapping[str, int],
) -> set[str]:
    """The cheapest set of tensors that cuts every path from what cannot be recomputed to a needed
    tensor."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    costly = [t for t in spec.tensors if t.name in maker and t.name not in free]
    place = {t.name: 2 * i for i, t in enumerate(costly)}
    source, sink = 2 * len(costly), 2 * len(costly) + 1
    known = ([n for n in t.shape if isinstance(n, int)] for t in costly)
    sizes = [math.prod(n) * itemsize(stored[t.name]) for n, t in zip(known, costly, strict=True)]
    # Capacities are 32-bit integers.
    unit = max(1.0, sum(sizes) / _FINEST)
    costs = [max(1, round(size / unit)) for size in sizes]
    no_limit = sum(costs) + 1
    edges: dict[tuple[int, int], int] = {}
    for t, cost in zip(costly, costs, strict=True):
        at = place[t.name]
        edges[at, at + 1] = cost
        if t.name in needed:
            edges[at + 1, sink] = no_limit
        call = spec.calls[maker[t.name]]
        if not call.node.algebra.recomputed:
            edges[source, at] = no_limit
            continue
        for _, name in call.inputs:
            if name in place:
                edges[place[name] + 1, at] = no_limit
    rows, columns = zip(*edges, strict=True)
    capacities = np.array([*edges.values()], np.int32)
    graph = csr_array((capacities, (rows, columns)), shape=(sink + 1, sink + 1))
    flow = maximum_flow(graph, source, sink).flow
    # Nodes from which the sink can be reached in the residual flow network.
    left = csr_array(graph - flow)
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = {*breadth_first_order(csr_array(left.T), sink, return_predecessors=False).tolist()}
    return {t.name for t in costly if place[t.name] not in reached and place[t.name] + 1 in reached}
