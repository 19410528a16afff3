"""Random attention and normalizations of values so far, with all that they may take.

A backward mostly stands on a forward of the graph and its statistics, as in a training step. There
is no dropout: the reference's masks are others than cuDNN's.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.dtypes import FLOATS
from jax_cudnn._core.graph.node import Node

from .drawing import Drawing, Operand, Step, Value
from .operands import (
    HEADS,
    Array,
    Proposal,
    heads,
    layout,
    new_operand,
    of_shape,
    pick,
    rather_new,
    weight,
)

_SCORES, _CAP = 40_000, 4.0  # of an attention, and of a bias' size, at most


def _steps(drawing: Drawing, method: str, share: float) -> list[Step]:
    """With this probability one of the graph's operations that give statistics."""
    found = [s for s in drawing.steps if s.method == method and len(s.results) > 1]
    return [drawing.rng.choice(found)] if found and drawing.rng.random() < share else []


def _named(drawing: Drawing) -> dict[str, Value]:
    return {value.name: value for value in (*drawing.values, *drawing.hidden)}


# -- attention -------------------------------------------------------------------------------------


def attention(drawing: Drawing, node: type[Node], q: Array | None = None) -> Proposal:
    """Of ``q``, or of any queries; to keys and values of which some are in the graph."""
    rng = drawing.rng
    q = q or queries(drawing)
    b, h, s, d = q.shape

    def part_of_keys(v: Value) -> bool:
        fits = v.shape[0] == b and v.shape[3] == d and h % v.shape[1] == 0
        return fits and b * h * s * v.shape[2] <= _SCORES

    shared = h if rng.random() < 0.5 else rng.choice([n for n in range(1, h + 1) if h % n == 0])
    length = s if rng.random() < 0.5 else rng.choice(HEADS[2])
    k = _one_of(drawing, part_of_keys, q, (b, shared, length, d))
    size = d if rng.random() < 0.8 else rng.choice(HEADS[3])
    v = _one_of(drawing, lambda v: v.shape[:3] == k.shape[:3], k, (*k.shape[:3], size))
    ports: dict[str, Any] = {"q": q, "k": k, "v": v}
    if rng.random() < 0.3:
        ports["bias"] = _bias(drawing, q, (b, h, s, k.shape[2]))
    if rng.random() < 0.2:
        for port, of in (("seq_len_q", q), ("seq_len_kv", k)):
            most = of.shape[2] - 1
            ports[port] = Operand((b, 1, 1, 1), "int32", positive=True, largest=most)
    if rng.random() < 0.08:
        ports["sink_token"] = Operand((1, h, 1, 1), "float32")
    attributes = {"attn_scale": _scale(rng, q, k), **_band(rng)}
    if attributes.get("diagonal_band_right_bound") == 0 and rng.random() < 0.1:
        attributes["use_alibi_mask"] = True
    return ports, attributes | ({"generate_stats": False} if rng.random() < 0.25 else {})


def attention_backward(drawing: Drawing, node: type[Node]) -> Proposal:
    """Gradients of attention of the graph, or of one that is not in it."""
    if steps := _steps(drawing, "sdpa", 0.8):
        return of_attention(drawing, *steps)
    ports, attributes = attention(drawing, node)
    q, out = ports["q"], (*ports["q"].shape[:3], ports["v"].shape[3])
    ports |= {"o": Operand(out, q.dtype, 0.5)}
    ports["stats"] = Operand((*q.shape[:3], 1), "float32", positive=True)
    return _with_gradients(drawing, ports, attributes)


def of_attention(drawing: Drawing, step: Step) -> Proposal:
    """The gradients of attention of the graph, which gives its statistic."""
    values = _named(drawing)
    ports: dict[str, Any] = {port: values[name] for port, name in step.ports.items()}
    ports |= {"o": values[step.results[0]], "stats": values[step.results[1]]}
    return _with_gradients(drawing, ports, step.attributes)


def _with_gradients(drawing: Drawing, ports: dict[str, Any], attributes: Any) -> Proposal:
    of, rng = ports["o"].shape, drawing.rng
    gradient = Operand(of, ports["q"].dtype, layout=layout(rng))
    ports["dO"] = of_shape(drawing, of, 0.6, gradient)
    found = {name: value for name, value in attributes.items() if name != "generate_stats"}
    for port, name in (("bias", "dBias"), ("sink_token", "dSink_token")):
        if port in ports and rng.random() < 0.7:
            found[name] = True
    return ports, found


def queries(drawing: Drawing) -> Array:
    """A value of rank four, or a new one. Sizes of heads are mostly multiples of 8."""
    rng = drawing.rng
    step = 8 if rng.random() < 0.8 else 1
    known = drawing.known(
        lambda v: (
            len(v.shape) == 4
            and v.dtype in FLOATS
            and v.shape[3] % step == 0
            and v.shape[0] * v.shape[1] * v.shape[2] ** 2 <= _SCORES
        )
    )
    if known and rng.random() < 0.7:
        return rather_new(rng, known)
    dtype = drawing.dtype if rng.random() < 0.95 else rng.choice(FLOATS)
    return Operand(heads(rng), dtype, layout=layout(rng))


def _one_of(drawing: Drawing, fits: Any, same: Array, of: Shape) -> Array:
    """A value that fits, now and then the same as another operand, or a new one."""
    rng = drawing.rng
    known = drawing.known(lambda v: len(v.shape) == 4 and v.dtype in FLOATS and fits(v))
    if known and rng.random() < 0.5:
        return rng.choice(known)
    return same if rng.random() < 0.1 else weight(drawing, same, of)


def _bias(drawing: Drawing, q: Array, scores: Shape) -> Array:
    """Of the scores' shape, or with any of its dimensions 1."""
    rng = drawing.rng
    known = drawing.known(
        lambda v: (
            len(v.shape) == 4
            and v.dtype in FLOATS
            and all(a in (1, b) for a, b in zip(v.shape, scores, strict=True))
            and _size(v) < _CAP
        )
    )
    if known and rng.random() < 0.5:
        return rng.choice(known)
    kept = rng.choices(((0, 1, 2, 3), (2, 3), (1, 2, 3), (0, 3)), (2, 2, 2, 1))[0]
    if rng.random() < 0.2:
        kept = tuple(axis for axis in range(4) if rng.random() < 0.5)
    return weight(drawing, q, tuple(n if axis in kept else 1 for axis, n in enumerate(scores)))


def _size(value: Value) -> float:
    return float(np.sqrt(np.mean(value.array * value.array)))


def _scale(rng: random.Random, q: Array, k: Array) -> float:
    """What gives scores a deviation of about 1: softmax of much larger ones is a choice of one."""
    scale = rng.choice((0.5, 1.0, 1.0, 2.0)) / q.shape[3] ** (1.0 if q is k else 0.5)
    for x in (q, k):
        scale /= max(_size(x), 1e-3) if isinstance(x, Value) else 1.0
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


# -- normalizations --------------------------------------------------------------------------------

_NUMBERS = {"epsilon": (1e-5, 1e-5, 1e-6, 1e-3, 0.1), "momentum": (0.1, 0.1, 0.01, 0.9, 1)}
_LEAST_RANK = {"adalayernorm": 2, "instancenorm": 3, "batchnorm": 2, "batchnorm_inference": 2}


def normalization(drawing: Drawing, node: type[Node], x: Array | None = None) -> Proposal:
    """Of ``x``, or of any value."""
    rng, name = drawing.rng, node.method
    x = x or pick(drawing, node, lambda rank: rank >= _LEAST_RANK.get(name, 1))
    scale, dtype = _scale_shape(rng, name, x.shape), _dtype(drawing, x)
    ports: dict[str, Any] = {"input": x}
    for port in node.ports.inputs:
        if port.name == "input" or (port.optional and rng.random() < 0.5):
            continue
        if port.name in _NUMBERS:
            array = Operand((), "float32", 0.2, positive=True)
            ports[port.name] = array if rng.random() < 0.05 else rng.choice(_NUMBERS[port.name])
        elif port.name in ("scale", "bias"):
            ports[port.name] = _parameter(drawing, port.name, scale, dtype)
        else:
            ports[port.name] = _statistic(drawing, port.name, scale)
    phase = rng.choices((None, "TRAINING", "INFERENCE"), (6, 1, 3))[0]
    has_phase = phase and not name.startswith("batchnorm")
    return ports, {"norm_forward_phase": phase} if has_phase else {}


def normalization_backward(drawing: Drawing, node: Any) -> Proposal:
    """Gradients of a normalization of the graph, or of one that is not in it."""
    rng, name = drawing.rng, node.method.removesuffix("_backward")
    has_dbias = name == "rmsnorm" and rng.random() < 0.7
    attributes = {"has_dbias": rng.random() < 0.5} if has_dbias else {}
    if steps := _steps(drawing, name, 0.7):
        return of_normalization(drawing, node, *steps), attributes
    x = pick(drawing, node, lambda rank: rank >= _LEAST_RANK.get(name, 1))
    scale = _scale_shape(rng, name, x.shape)
    reduced = node.extent.reduced(x.shape, scale)
    of = tuple(1 if i in reduced else size for i, size in enumerate(x.shape))
    ports = {"grad": _gradient(drawing, x), "input": x}
    ports["scale"] = _parameter(drawing, "scale", scale, _dtype(drawing, x))
    for port in ("mean", "inv_variance"):
        if port in node.ports.input_names:
            ports[port] = _statistic(drawing, port, of)
    return ports, attributes


def of_normalization(drawing: Drawing, node: type[Node], step: Step) -> dict[str, Any]:
    """What stands at the ports of the backward ``node`` of a normalization of the graph."""
    values = _named(drawing)
    made = {name.partition("_")[2]: values[name] for name in step.results}
    made |= {port: values[step.ports[port]] for port in ("input", "scale")}
    made |= {"grad": _gradient(drawing, made["input"]), "inv_variance": made["inv_var"]}
    return {port: made[port] for port in node.ports.input_names}


def _gradient(drawing: Drawing, x: Array) -> Array:
    """A value of an input's shape, but another one; or an operand."""
    dtype = x.dtype if drawing.rng.random() < 0.9 else drawing.rng.choice(FLOATS)
    new = Operand(x.shape, dtype, layout=layout(drawing.rng))
    return of_shape(drawing, x.shape, 0.6, new, but=x)


def _scale_shape(rng: random.Random, name: str, shape: Shape) -> Shape:
    """The scale's, and so the dimensions that are normalized: mostly the last or the last ones."""
    rank = len(shape)
    if name not in ("rmsnorm", "layernorm", "adalayernorm"):
        return (1, shape[1], *[1] * (rank - 2))
    first = 1 if name == "adalayernorm" else 0
    rows = rng.random()
    axes = [rank - 1] if rows < 0.55 else [*range(rng.randrange(first, rank), rank)]
    if rows > 0.9:
        axes = rng.sample(range(first, rank), rng.randint(1, rank - first))
    return tuple(size if i < first or i in axes else 1 for i, size in enumerate(shape))


def _dtype(drawing: Drawing, x: Array) -> str:
    """Of scale and bias: mostly the input's, for cuDNN's fast engines, or float32."""
    return drawing.rng.choices((x.dtype, "float32", drawing.rng.choice(FLOATS)), (6, 3, 1))[0]


def _parameter(drawing: Drawing, port: str, of: Shape, dtype: str) -> Array:
    rng = drawing.rng
    dtype = dtype if rng.random() < 0.95 else rng.choice(FLOATS)
    new = Operand(of, dtype, 0.5, positive=port == "scale" and rng.random() < 0.5)
    return of_shape(drawing, of, 0.25, new)


def _statistic(drawing: Drawing, port: str, of: Shape) -> Array:
    """What may be a statistic: its reciprocal deviation is positive."""
    rng, positive = drawing.rng, port in ("inv_variance", "in_running_var")
    known = drawing.known(
        lambda v: v.shape == of and v.dtype == "float32" and v.positive >= positive
    )
    if known and rng.random() < 0.5:
        return rng.choice(known)
    if rng.random() < 0.1:
        return new_operand(drawing, of, positive=positive)
    return Operand(of, "float32", 1.0 if positive else 0.3, positive)


_KINDS = ("rmsnorm", "layernorm", "adalayernorm", "instancenorm", "batchnorm")
DRAWS = {
    "sdpa": attention,
    "sdpa_backward": attention_backward,
    **dict.fromkeys((*_KINDS, "batchnorm_inference"), normalization),
    **dict.fromkeys((f"{kind}_backward" for kind in _KINDS), normalization_backward),
}
