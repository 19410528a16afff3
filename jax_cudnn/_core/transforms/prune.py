"""Removes unused results, and what only they need, from a graph."""

from __future__ import annotations

import functools
from dataclasses import replace

from ..graph.spec import GraphSpec, intern


@functools.lru_cache(maxsize=2048)
def pruned(spec: GraphSpec, outputs: tuple[str, ...]) -> GraphSpec:
    """The graph that computes only these results, from the operands that they need."""
    needed, calls = {*outputs}, []
    for call in reversed(spec.calls):
        if needed & {name for _, name in call.outputs}:
            calls.insert(0, call)
            needed |= {name for _, name in (*call.inputs, *call.outputs)}
    residuals = tuple(name for name in spec.origin.residuals if name in outputs)
    left = replace(
        spec,
        tensors=tuple(t for t in spec.tensors if t.name in needed),
        calls=tuple(calls),
        inputs=tuple(name for name in spec.inputs if name in needed),
        outputs=outputs,
        origin=replace(spec.origin, residuals=residuals),
    )
    return intern(left)
