"""Attention of any values of rank four, or of new ones with heads; and its backward.

A backward mostly stands on a forward of the graph and its statistic, as in a training step. There
is no dropout: the reference's masks are others than cuDNN's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.dtypes import FLOATS
from jax_cudnn._core.graph.node import Node

from .drawing import Drawing, Operand, Step, Value
from .operands import HEADS, Proposal, heads, layout
from .samples import root_mean_square

_LENGTHS = ("seq_len_q", "seq_len_kv")
_SCORES = 40_000  # at most
_CAP = 4.0  # of a bias, at most


def forward(drawing: Drawing, node: type[Node], q: Value | Operand | None = None) -> Proposal:
    """Attention of ``q``, or of any queries; to keys and values of which some are in the graph."""
    rng = drawing.rng
    q = q or queries(drawing)
    k = _keys(drawing, q)
    v = _values(drawing, q, k)
    ports: dict[str, Any] = {"q": q, "k": k, "v": v}
    if rng.random() < 0.3:
        ports["bias"] = _bias(drawing, q, k)
    if rng.random() < 0.2:
        for port, of in zip(_LENGTHS, (q, k), strict=True):
            shape = (of.shape[0], 1, 1, 1)
            ports[port] = Operand(shape, "int32", positive=True, largest=of.shape[2] - 1)
    if rng.random() < 0.08:
        ports["sink_token"] = Operand((1, q.shape[1], 1, 1), "float32")
    attributes = {"attn_scale": _scale(rng, q, k), **_band(rng)}
    if attributes.get("diagonal_band_right_bound") == 0 and rng.random() < 0.1:
        attributes["use_alibi_mask"] = True
    return ports, attributes | ({"generate_stats": False} if rng.random() < 0.25 else {})


def backward(drawing: Drawing, node: type[Node]) -> Proposal:
    """Gradients of attention of the graph, or of one that is not in it."""
    rng = drawing.rng
    steps = [s for s in drawing.steps if s.method == "sdpa" and len(s.results) > 1]
    if steps and rng.random() < 0.8:
        return of_step(drawing, rng.choice(steps))
    ports, attributes = forward(drawing, node)
    q, v = ports["q"], ports["v"]
    out = (*q.shape[:3], v.shape[3])
    ports |= {"o": Operand(out, q.dtype, 0.5), "dO": _gradient(drawing, out, q.dtype)}
    ports["stats"] = Operand((*q.shape[:3], 1), "float32", positive=True)
    return ports, _wanted(rng, ports, attributes)


def of_step(drawing: Drawing, step: Step) -> Proposal:
    """The gradients of attention of the graph, which gives its statistic."""
    values = {value.name: value for value in (*drawing.values, *drawing.hidden)}
    ports: dict[str, Any] = {port: values[name] for port, name in step.ports.items()}
    o, stats = (values[name] for name in step.results)
    ports |= {"o": o, "stats": stats, "dO": _gradient(drawing, o.shape, ports["q"].dtype)}
    return ports, _wanted(drawing.rng, ports, step.attributes)


def _wanted(rng: random.Random, ports: dict[str, Any], attributes: Any) -> dict[str, Any]:
    """The forward's attributes for the backward, with gradients of what is optional."""
    found = {name: value for name, value in attributes.items() if name != "generate_stats"}
    if "bias" in ports and rng.random() < 0.7:
        found["dBias"] = True
    if "sink_token" in ports and rng.random() < 0.7:
        found["dSink_token"] = True
    return found


# -- operands --------------------------------------------------------------------------------------


def queries(drawing: Drawing) -> Value | Operand:
    """A value of rank four, rather one that nothing uses yet; or a new one. Sizes of heads are
    mostly multiples of 8, which cuDNN takes."""
    rng = drawing.rng
    step = 8 if rng.random() < 0.8 else 1
    known = [v for v in _known(drawing) if v.shape[3] % step == 0]
    known = [v for v in known if v.shape[0] * v.shape[1] * v.shape[2] ** 2 <= _SCORES]
    if known and rng.random() < 0.7:
        weights = [0.2 if v.operand else 1.0 if v.uses or v.aside else 5.0 for v in known]
        return rng.choices(known, weights)[0]
    dtype = drawing.dtype if rng.random() < 0.95 else rng.choice(FLOATS)
    return Operand(heads(rng), dtype, layout=layout(rng))


def _keys(drawing: Drawing, q: Value | Operand) -> Value | Operand:
    """Of as many heads, or of fewer; also the queries themselves."""
    rng = drawing.rng
    b, h, s, d = q.shape
    fitting = [
        v
        for v in _known(drawing)
        if v.shape[0] == b and v.shape[3] == d and h % v.shape[1] == 0
        if b * h * s * v.shape[2] <= _SCORES
    ]
    if fitting and rng.random() < 0.5:
        return rng.choice(fitting)
    if rng.random() < 0.1:
        return q
    shared = h if rng.random() < 0.5 else rng.choice([n for n in range(1, h + 1) if h % n == 0])
    length = s if rng.random() < 0.5 else rng.choice(HEADS[2])
    return _new(drawing, q, (b, shared, length, d))


def _values(drawing: Drawing, q: Value | Operand, k: Value | Operand) -> Value | Operand:
    """As many as there are keys; their size is mostly the queries'."""
    rng = drawing.rng
    fitting = [v for v in _known(drawing) if v.shape[:3] == k.shape[:3]]
    if fitting and rng.random() < 0.5:
        return rng.choice(fitting)
    if rng.random() < 0.1:
        return k
    size = k.shape[3] if rng.random() < 0.8 else rng.choice(HEADS[3])
    return _new(drawing, q, (*k.shape[:3], size))


def _bias(drawing: Drawing, q: Value | Operand, k: Value | Operand) -> Value | Operand:
    """Of the scores' shape, or with any of its dimensions 1."""
    rng = drawing.rng
    scores = (*q.shape[:3], k.shape[2])
    fitting = [
        v
        for v in _known(drawing)
        if all(a in (1, b) for a, b in zip(v.shape, scores, strict=True))
        if root_mean_square(v.sample) < _CAP
    ]
    if fitting and rng.random() < 0.5:
        return rng.choice(fitting)
    kept = rng.choices(((0, 1, 2, 3), (2, 3), (1, 2, 3), (0, 3)), (2, 2, 2, 1))[0]
    if rng.random() < 0.2:
        kept = tuple(axis for axis in range(4) if rng.random() < 0.5)
    of = tuple(size if axis in kept else 1 for axis, size in enumerate(scores))
    return _new(drawing, q, of)


def _gradient(drawing: Drawing, of: Shape, dtype: str) -> Value | Operand:
    """A value of the result's shape; or an operand."""
    known = [v for v in _known(drawing) if v.shape == of]
    if known and drawing.rng.random() < 0.6:
        return drawing.rng.choice(known)
    return Operand(of, dtype, layout=layout(drawing.rng))


def _known(drawing: Drawing) -> Sequence[Value]:
    return [v for v in drawing.values if len(v.shape) == 4 and v.dtype in FLOATS]


def _new(drawing: Drawing, beside: Value | Operand, of: Shape) -> Operand:
    """Nearly always of the dtype of the queries."""
    dtype = beside.dtype if drawing.rng.random() < 0.95 else drawing.rng.choice(FLOATS)
    return Operand(of, dtype, layout=layout(drawing.rng))


# -- attributes ------------------------------------------------------------------------------------


def _scale(rng: random.Random, q: Value | Operand, k: Value | Operand) -> float:
    """What gives scores a deviation of about 1, and those of equal queries and keys about that
    size: softmax of much larger ones is a choice of one."""
    sizes = [root_mean_square(x.sample) for x in (q, k) if isinstance(x, Value)]
    scale = rng.choice((0.5, 1.0, 1.0, 2.0)) / q.shape[3] ** (1.0 if q is k else 0.5)
    for size in sizes:
        scale /= max(size, 1e-3)
    return float(f"{scale:.3g}")


def _band(rng: random.Random) -> dict[str, Any]:
    """Mostly none, or causal; also windows, and positions from the last query and key."""
    found: dict[str, Any] = {}
    if rng.random() < 0.5:
        found["diagonal_band_right_bound"] = rng.choice((0, 0, 0, 5))
    if rng.random() < (0.4 if found else 0.1):
        found["diagonal_band_left_bound"] = rng.choice((1, 8, 20))
    if found and rng.random() < 0.3:
        found["diagonal_alignment"] = "BOTTOM_RIGHT"
    return found


DRAWS: dict[str, Callable[[Drawing, type[Node]], Proposal]] = {
    "sdpa": forward,
    "sdpa_backward": backward,
}
