"""Clips operands that index other operands (offsets, lengths, pages) to their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .spec import GraphSpec


def bounded(spec: GraphSpec, operands: Sequence[Any]) -> list[Any]:
    """The operands of a graph, with integers clipped to what they index (``Edge.clipped``).

    Functions and wrapped graphs clip them before they bind a graph; code that runs a plan directly
    does so here. An operand at several ports is clipped to the bounds of all. Integers that the
    graph computes stay as they are.
    """
    values = dict(zip(spec.inputs, operands, strict=True))
    for call, tensors in spec.at_ports:
        edge = call.node.boundary(tensors)
        names = {port: name for port, name in call.inputs if port in edge.integers}
        given = {port: values[name] for port, name in names.items() if name in values}
        if not given or len(given) < len(names):
            continue
        found: dict[str, Any] = {}
        for port, x in edge.clipped(given).items():
            name = names[port]
            found[name] = jnp.minimum(found[name], x) if name in found else x
        values |= found
    return [values[name] for name in spec.inputs]


def has_bounds(spec: GraphSpec) -> bool:
    """Whether :func:`bounded` has anything to do."""
    return any(call.node.boundary(tensors).integers for call, tensors in spec.at_ports)
