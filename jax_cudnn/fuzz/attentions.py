"""Attention of small heads, mostly of new operands; its backward mostly of one of the graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .._core.graph.node import Node
from .drawing import Drawing, Operand, Step, Value
from .operands import Proposal

_SIZES, _LENGTHS = (8, 16, 32, 64), (16, 24, 48, 64, 33)


def forward(drawing: Drawing, node: type[Node]) -> Proposal:
    """Queries that are a value so far, where one has rank 4; keys, values and biases are new."""
    rng = drawing.rng
    dtype = drawing.dtype if rng.random() < 0.9 else "float16"
    known = [v for v in drawing.values if len(v.shape) == 4 and v.dtype == dtype]
    known = [v for v in known if v.shape[3] >= 4 and v.shape[0] * v.shape[1] <= 64]
    if known and rng.random() < 0.4:
        q = rng.choice(known)
    else:
        heads = rng.choice((1, 2, 4, 6))
        q = Operand((rng.choice((1, 2, 3)), heads, rng.choice(_LENGTHS), rng.choice(_SIZES)), dtype)
    b, h, s, d = q.shape
    of = b, rng.choice([n for n in range(1, h + 1) if h % n == 0]), rng.choice((s, *_LENGTHS))
    ports: dict[str, Any] = {"q": q, "k": Operand((*of, d), dtype)}
    ports["v"] = Operand((*of, d if rng.random() < 0.8 else rng.choice(_SIZES)), dtype)
    if rng.random() < 0.3:
        full = b, h, s, of[2]
        ports["bias"] = Operand(tuple(rng.choice((1, size)) for size in full), dtype, 0.5)
    return ports, _attributes(rng, d)


def backward(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    steps = [s for s in drawing.steps if s.method == "sdpa" and len(s.results) > 1]
    if steps and rng.random() < 0.7:
        return of_step(drawing, rng.choice(steps))
    ports, attributes = forward(drawing, node)
    q, v = ports["q"].shape, ports["v"].shape
    dtype = ports["v"].dtype
    for name in ("o", "dO"):
        ports[name] = Operand((*q[:3], v[3]), dtype, 0.5)
    ports["stats"] = Operand((*q[:3], 1), "float32", 1.0, positive=True)
    return ports, _gradients(rng, ports, attributes)


def of_step(drawing: Drawing, step: Step) -> Proposal:
    """The gradients of attention in the graph, from its result and statistic."""
    values = {value.name: value for value in drawing.values}
    ports: dict[str, Any] = {port: values[name] for port, name in step.ports.items()}
    out, stats = (values[name] for name in step.results)
    ports |= {"o": out, "stats": stats, "dO": Operand(out.shape, str(ports["q"].dtype))}
    kept = {name: value for name, value in step.attributes.items() if name != "generate_stats"}
    return ports, _gradients(drawing.rng, ports, kept)


def _gradients(
    rng: random.Random, ports: dict[str, Value | Operand], attributes: dict[str, Any]
) -> dict[str, Any]:
    kept = {name: value for name, value in attributes.items() if name != "generate_stats"}
    return kept | ({"dBias": True} if "bias" in ports and rng.random() < 0.7 else {})


def _attributes(rng: random.Random, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"attn_scale": round(size**-0.5, 4)}
    if rng.random() < 0.5:
        found["diagonal_band_right_bound"] = rng.choice((0, 0, 0, 5))
        if rng.random() < 0.4:
            found["diagonal_band_left_bound"] = rng.choice((1, 8, 20))
        if rng.random() < 0.3:
            found["diagonal_alignment"] = "BOTTOM_RIGHT"
    if rng.random() < 0.3:
        found["generate_stats"] = False
    return found


DRAWS: dict[str, Callable[[Drawing, type[Node]], Proposal]] = {
    "sdpa": forward,
    "sdpa_backward": backward,
}
