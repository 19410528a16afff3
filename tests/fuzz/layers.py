"""Random attention and normalizations of values so far, with all that they may take.

A backward mostly stands on a forward of the graph and its statistics, as in a training step. There
is no dropout: the reference's masks are others than cuDNN's.
"""

import random
from typing import Any

import numpy as np

from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.dtypes import FLOATS

from . import operands
from .drawing import Drawing, Operand, Step, Value
from .operands import HEADS, Array, Proposal, alike, heads, layout, pick, rather_new, weight

_SCORES, _CAP = 40_000, 4.0  # of an attention, and of a bias' size, at most


def _steps(drawing: Drawing, method: str, share: float) -> list[Step]:
    """With this probability one of the graph's operations that give statistics."""
    found = [s for s in drawing.steps if s.method == method and len(s.results) > 1]
    return [drawing.rng.choice(found)] if found and drawing.rng.random() < share else []


def _made(drawing: Drawing, step: Step) -> tuple[dict[str, Any], list[Any]]:
    """What stands at an operation's ports, and its results."""
    values: dict[Any, Any] = {v.name: v for v in (*drawing.values, *drawing.hidden)}
    ports = {port: values.get(x, x) for port, x in step.ports.items()}
    return ports, [values[name] for name in step.results]


def _floats(drawing: Drawing, rank: int) -> list[Value]:
    return drawing.known(lambda v: len(v.shape) == rank and v.dtype in FLOATS)


def _one_of(drawing: Drawing, known: list[Value], share: float, new: Array) -> Array:
    return drawing.rng.choice(known) if known and drawing.rng.random() < share else new


# -- attention -------------------------------------------------------------------------------------


def attention(drawing: Drawing, node: Any = None, q: Array | None = None) -> Proposal:
    """Of ``q``, or of any queries; to keys and values of which some are in the graph."""
    rng, known = drawing.rng, _floats(drawing, 4)
    q = q or queries(drawing)
    b, h, s, d = q.shape
    heads_of_keys = h if rng.random() < 0.5 else rng.choice([n for n in (1, 2, h) if h % n == 0])
    length = s if rng.random() < 0.5 else rng.choice(HEADS[2])
    new = q if rng.random() < 0.1 else weight(drawing, q, (b, heads_of_keys, length, d))
    fit = [v for v in known if v.shape[::3] == (b, d) and h % v.shape[1] == 0]
    k = _one_of(drawing, [v for v in fit if b * h * s * v.shape[2] <= _SCORES], 0.5, new)
    size = d if rng.random() < 0.8 else rng.choice(HEADS[3])
    new = k if rng.random() < 0.1 else weight(drawing, k, (*k.shape[:3], size))
    v = _one_of(drawing, [v for v in known if v.shape[:3] == k.shape[:3]], 0.5, new)
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


def attention_backward(drawing: Drawing, node: Any = None, step: Step | None = None) -> Proposal:
    """Gradients of attention of the graph, or of one that is not in it."""
    rng = drawing.rng
    for known in [step] if step else _steps(drawing, "sdpa", 0.8):
        ports, (o, stats, *_) = _made(drawing, known)
        attributes = known.attributes
        break
    else:
        ports, attributes = attention(drawing)
        q = ports["q"]
        o = Operand((*q.shape[:3], ports["v"].shape[3]), q.dtype, 0.5)
        stats = Operand((*q.shape[:3], 1), "float32", positive=True)
    ports |= {"o": o, "stats": stats}
    ports["dO"] = _gradient(drawing, o, ports["q"].dtype)
    found = {name: value for name, value in attributes.items() if name != "generate_stats"}
    for port, name in (("bias", "dBias"), ("sink_token", "dSink_token")):
        if port in ports and rng.random() < 0.7:
            found[name] = True
    return ports, found


def queries(drawing: Drawing) -> Array:
    """A value of rank four, or a new one. Sizes of heads are mostly multiples of 8."""
    rng, step = drawing.rng, 8 if drawing.rng.random() < 0.8 else 1
    known = [v for v in _floats(drawing, 4) if v.shape[3] % step == 0]
    known = [v for v in known if v.shape[0] * v.shape[1] * v.shape[2] ** 2 <= _SCORES]
    if known and rng.random() < 0.7:
        return rather_new(rng, known)
    dtype = drawing.dtype if rng.random() < 0.95 else rng.choice(FLOATS)
    return Operand(heads(rng), dtype, layout=layout(rng))


def _bias(drawing: Drawing, q: Array, scores: Shape) -> Array:
    """Of the scores' shape, or with any of its dimensions 1."""
    rng = drawing.rng
    known = [v for v in _floats(drawing, 4) if alike(v.shape, scores) and _size(v) < _CAP]
    kept = rng.choice(((0, 1, 2, 3), (2, 3), (1, 2, 3), (0, 3)))
    if rng.random() < 0.2:
        kept = tuple(axis for axis in range(4) if rng.random() < 0.5)
    new = weight(drawing, q, tuple(n if axis in kept else 1 for axis, n in enumerate(scores)))
    return _one_of(drawing, known, 0.5, new)


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

KINDS = ("rmsnorm", "layernorm", "adalayernorm", "instancenorm", "batchnorm")
_NUMBERS = {"epsilon": (1e-5, 1e-5, 1e-6, 1e-3, 0.1), "momentum": (0.1, 0.1, 0.01, 0.9, 1)}
_LEAST_RANK = {"adalayernorm": 2, "instancenorm": 3, "batchnorm": 2, "batchnorm_inference": 2}


def normalization(drawing: Drawing, node: Any, x: Array | None = None) -> Proposal:
    """Of ``x``, or of any value."""
    rng, name = drawing.rng, node.method
    x = x or pick(drawing, node, range(_LEAST_RANK.get(name, 1), 9))
    scale = _scale_shape(rng, name, x.shape)
    dtype = rng.choices((x.dtype, "float32", rng.choice(FLOATS)), (6, 3, 1))[0]
    ports: dict[str, Any] = {"input": x}
    for port in node.ports.inputs:
        if port.name == "input" or (port.optional and rng.random() < 0.5):
            continue
        if port.name in _NUMBERS:
            array = Operand((), "float32", 0.2, positive=True)
            ports[port.name] = array if rng.random() < 0.05 else rng.choice(_NUMBERS[port.name])
        else:
            ports[port.name] = _parameter(drawing, port.name, scale, dtype)
    phase = rng.choices((None, "TRAINING", "INFERENCE"), (6, 1, 3))[0]
    has_phase = phase and not name.startswith("batchnorm")
    return ports, {"norm_forward_phase": phase} if has_phase else {}


def normalization_backward(drawing: Drawing, node: Any, step: Step | None = None) -> Proposal:
    """Gradients of a normalization of the graph, or of one that is not in it."""
    rng, name = drawing.rng, node.method.removesuffix("_backward")
    has_dbias = name == "rmsnorm" and rng.random() < 0.7
    attributes = {"has_dbias": rng.random() < 0.5} if has_dbias else {}
    for known in [step] if step else _steps(drawing, name, 0.7):
        made, results = _made(drawing, known)
        made |= {result.name.partition("_")[2]: result for result in results}
        made["inv_variance"] = made["inv_var"]
        break
    else:
        x = pick(drawing, node, range(_LEAST_RANK.get(name, 1), 9))
        scale = _scale_shape(rng, name, x.shape)
        reduced = node.extent.reduced(x.shape, scale)
        of = tuple(1 if i in reduced else size for i, size in enumerate(x.shape))
        made = {"input": x, "scale": _parameter(drawing, "scale", scale, x.dtype)}
        made |= {p: _parameter(drawing, p, of, "float32") for p in ("mean", "inv_variance")}
    made["grad"] = _gradient(drawing, made["input"], made["input"].dtype)
    return {port: made[port] for port in node.ports.input_names}, attributes


def _gradient(drawing: Drawing, x: Array, dtype: str) -> Array:
    """A value of this one's shape, but another one; or an operand."""
    dtype = dtype if drawing.rng.random() < 0.9 else drawing.rng.choice(FLOATS)
    known = [v for v in _floats(drawing, len(x.shape)) if v.shape == x.shape and v is not x]
    return _one_of(drawing, known, 0.6, Operand(x.shape, dtype, layout=layout(drawing.rng)))


def _scale_shape(rng: random.Random, name: str, shape: Shape) -> Shape:
    """The scale's, and so the dimensions that are normalized: mostly the last or the last ones."""
    rank = len(shape)
    if name not in KINDS[:3]:
        return (1, shape[1], *[1] * (rank - 2))
    first, rows = name == "adalayernorm", rng.random()
    axes = [rank - 1] if rows < 0.55 else [*range(rng.randrange(first, rank), rank)]
    if rows > 0.9:
        axes = rng.sample(range(first, rank), rng.randint(1, rank - first))
    return tuple(size if i < first or i in axes else 1 for i, size in enumerate(shape))


def _parameter(drawing: Drawing, port: str, of: Shape, dtype: str) -> Array:
    """A scale, a bias, or what may be a statistic: its reciprocal deviation is positive."""
    rng, positive = drawing.rng, port in ("inv_variance", "in_running_var")
    known = [v for v in _floats(drawing, len(of)) if v.shape == of and v.positive >= positive]
    if port not in ("scale", "bias"):
        known, dtype = [v for v in known if v.dtype == "float32"], "float32"
    if rng.random() < 0.05:
        return operands.new_operand(drawing, of, positive=positive)
    positive |= port == "scale" and rng.random() < 0.5
    return _one_of(drawing, known, 0.3, Operand(of, dtype, 1.0 if positive else 0.4, positive))


DRAWS = {
    "sdpa": attention,
    "sdpa_backward": attention_backward,
    **dict.fromkeys((*KINDS, "batchnorm_inference"), normalization),
    **dict.fromkeys((f"{kind}_backward" for kind in KINDS), normalization_backward),
}
