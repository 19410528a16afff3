"""Derivatives of a graph. For now those of its reference: the tangents are jnp operations."""

from __future__ import annotations

import logging
from typing import Any

import jax
from jax.interpreters import ad

from .reference import evaluate
from .spec import GraphSpec

log = logging.getLogger("jax_cudnn")


def jvp(primitive: Any, primals: Any, tangents: Any, *, spec: GraphSpec, name: str) -> Any:
    """The outputs from the primitive itself, their tangents from the reference."""
    outputs = primitive.bind(*primals, spec=spec, name=name)
    active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if not active:
        return outputs, [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outputs]
    log.debug("%s: the derivative is computed by XLA from the graph's reference", name)

    def reference(*moving: Any) -> list[Any]:
        operands = list(primals)
        for i, value in zip(active, moving, strict=True):
            operands[i] = value
        return evaluate(spec, *operands)

    _, out_tangents = jax.jvp(
        reference,
        [primals[i] for i in active],
        [ad.instantiate_zeros(tangents[i]) for i in active],
    )
    return outputs, out_tangents
