"""What patterns are made of: values to start at, and operations that are added."""

from __future__ import annotations

from typing import Any

from jax_cudnn._core.graph.node import REGISTRY

from . import attentions, normalizations
from .drawing import Drawing, Operand, Value
from .operands import new_operand, pick, weight


def one(
    drawing: Drawing, method: str, *operands: Any, dtype: str | None = None, **attributes: Any
) -> Value:
    """Adds an operation of the operands in the order of its ports; its first result."""
    ports = dict(zip(REGISTRY[method].ports.input_names, operands, strict=True))
    return drawing.add(method, ports, attributes, dtype)[0]


def norm(
    drawing: Drawing, x: Value, *methods: str, dtype: str | None = None, **attributes: Any
) -> list[Value]:
    """Adds a normalization of one of these kinds, mostly layernorm or rmsnorm; its results."""
    rng = drawing.rng
    method = rng.choice(methods or ("rmsnorm", "layernorm", "rmsnorm", "layernorm", "adalayernorm"))
    ports, drawn = normalizations.forward(drawing, REGISTRY[method], x)
    return drawing.add(method, ports, drawn | attributes, dtype)


def attend(drawing: Drawing, q: Value, **attributes: Any) -> list[Value]:
    """Adds attention of these queries, rounded to their dtype; its results that may be read."""
    ports, drawn = attentions.forward(drawing, REGISTRY["sdpa"], q)
    found = drawing.add("sdpa", ports, drawn | attributes, q.dtype)
    return [value for value in found if value not in drawing.hidden]


def start(drawing: Drawing, method: str, *ranks: int) -> Value:
    """A value that the method takes, of one of these ranks."""
    return _taken(drawing, pick(drawing, REGISTRY[method], lambda rank: rank in ranks))


def queries(drawing: Drawing) -> Value:
    """A value with heads."""
    return _taken(drawing, attentions.queries(drawing))


def _taken(drawing: Drawing, found: Value | Operand) -> Value:
    return drawing.take(found) if isinstance(found, Operand) else found


def per_channel(drawing: Drawing, x: Value) -> Operand:
    return new_operand(drawing, (1, x.shape[1], *[1] * (len(x.shape) - 2)))


def without_last(x: Value) -> list[int]:
    """The shape of what is left when the last dimension is reduced."""
    return [*x.shape[:-1], 1]


def conv(drawing: Drawing, x: Value, k: int) -> Value:
    """A 3x3 convolution that keeps the spatial sizes."""
    of = (k, x.shape[1], *[3] * (len(x.shape) - 2))
    padding = [1] * (len(x.shape) - 2)
    filter = weight(drawing, x, of)
    return one(drawing, "conv_fprop", x, filter, padding=padding, dtype=drawing.dtype)
