"""Operands that say where elements of others lie, kept inside of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .spec import GraphSpec


def bounded(spec: GraphSpec, operands: Sequence[Any]) -> list[Any]:
    """The operands of a graph, with integers that a plan can follow (:meth:`Node.bounded`).

    Functions and wrapped graphs bound them before they bind a graph; what runs a plan independently
    does so here. An operand of several ports keeps the bounds of all.
    """
    values = dict(zip(spec.inputs, operands, strict=True))
    for call in spec.calls:
        names = {port: name for port, name in call.inputs if port in call.node.integers}
        tensors = {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
        given = {port: values[name] for port, name in names.items()}
        found: dict[str, Any] = {}
        for port, x in call.node.bounded(given, tensors).items() if given else ():
            name = names[port]
            found[name] = jnp.minimum(found[name], x) if name in found else x
        values |= found
    return [values[name] for name in spec.inputs]


def has_bounds(spec: GraphSpec) -> bool:
    """Whether :func:`bounded` has anything to do."""
    return any(port in call.node.integers for call in spec.calls for port, _ in call.inputs)
