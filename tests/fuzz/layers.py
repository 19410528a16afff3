"""Random attention and normalizations of values so far, with all that they may take.

A backward mostly stands on a forward of the graph and its statistics, as in a training step. There
is no dropout: the reference's masks are others than cuDNN's.
"""

import random
from typing import Any

import numpy as np

from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.dtypes import CUDNN_FLOATS as FLOATS

from .drawing import Drawing, Operand, Value
from .operands import HEADS, Array, Proposal, heads, layout, pick, rather_new, weight

_SCORES = 40_000  # of an attention, at most


def _forward(drawing: Drawing, method: str) -> Any:
    """Of one of the graph's operations that give statistics, if there is one: what stands at its
    ports, its results and attributes."""
    steps = [s for s in drawing.steps if s.method == method and len(s.results) > 1]
    if not steps:
        return None
    step = drawing.rng.choice(steps)
    values: dict[Any, Any] = {v.name: v for v in (*drawing.values, *drawing.hidden)}
    ports = {port: values.get(x, x) for port, x in step.ports.items()}
    return ports, [values[name] for name in step.results], step.attributes


def attention(drawing: Drawing, node: Any) -> Proposal:
    """Of any queries, to new keys and values, or to the queries themselves."""
    rng, q = drawing.rng, queries(drawing)
    b, h, s, d = q.shape
    heads_of_keys = h if rng.random() < 0.5 else rng.choice([n for n in (1, 2, h) if h % n == 0])
    length = s if rng.random() < 0.5 else rng.choice(HEADS[2])
    k = q if rng.random() < 0.1 else weight(drawing, q, (b, heads_of_keys, length, d))
    size = d if rng.random() < 0.8 else rng.choice(HEADS[3])
    v = k if rng.random() < 0.1 else weight(drawing, k, (*k.shape[:3], size))
    ports: dict[str, Any] = {"q": q, "k": k, "v": v}
    if rng.random() < 0.3:  # of the scores' shape, or with any of its dimensions 1
        kept = rng.choice(((0, 1, 2, 3), (2, 3), (1, 2, 3), (0, 3), (1,), (0, 2)))
        scores = enumerate((b, h, s, k.shape[2]))
        of = tuple(n if axis in kept else 1 for axis, n in scores)
        ports["bias"] = weight(drawing, q, of)
    if rng.random() < 0.2:
        for port, x in (("seq_len_q", q), ("seq_len_kv", k)):
            most = x.shape[2] - 1
            ports[port] = Operand((b, 1, 1, 1), "int32", positive=True, largest=most)
    if rng.random() < 0.08:
        ports["sink_token"] = Operand((1, h, 1, 1), "float32")
    # Scores have a deviation of about 1: softmax of much larger ones is a choice of one.
    scale = rng.choice((0.5, 1.0, 1.0, 2.0)) / d ** (1.0 if q is k else 0.5)
    for x in (q, k):
        scale /= max(np.sqrt(np.mean(x.array**2)), 1e-3) if isinstance(x, Value) else 1.0
    attributes = {"attn_scale": float(f"{scale:.3g}"), **_band(rng)}
    if attributes.get("diagonal_band_right_bound") == 0 and rng.random() < 0.1:
        attributes["use_alibi_mask"] = True
    return ports, attributes | ({"generate_stats": False} if rng.random() < 0.25 else {})


def attention_backward(drawing: Drawing, node: Any) -> Proposal:
    """Gradients of attention of the graph, which is added where there is none."""
    if not _forward(drawing, "sdpa"):
        if len(drawing.steps) > 9:
            raise GraphError("no room for attention and its gradients")
        ports, attributes = attention(drawing, node)
        drawing.add("sdpa", ports, attributes | {"generate_stats": True}, ports["q"].dtype)
    ports, (o, stats, *_), attributes = _forward(drawing, "sdpa")
    ports |= {"o": o, "stats": stats, "dO": Operand(o.shape, ports["q"].dtype)}
    found = {name: value for name, value in attributes.items() if name != "generate_stats"}
    for port, name in (("bias", "dBias"), ("sink_token", "dSink_token")):
        if port in ports and drawing.rng.random() < 0.7:
            found[name] = True
    return ports, found


def queries(drawing: Drawing) -> Array:
    """A value of rank four, or a new one. Sizes of heads are mostly multiples of 8."""
    rng, step = drawing.rng, 8 if drawing.rng.random() < 0.8 else 1
    known = drawing.known(lambda v: len(v.shape) == 4 and v.dtype in FLOATS)
    known = [v for v in known if v.shape[3] % step == 0]
    known = [v for v in known if v.shape[0] * v.shape[1] * v.shape[2] ** 2 <= _SCORES]
    if known and rng.random() < 0.7:
        return rather_new(rng, known)
    dtype = drawing.dtype if rng.random() < 0.95 else rng.choice(FLOATS)
    return Operand(heads(rng), dtype, layout=layout(rng))


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


KINDS = ("rmsnorm", "layernorm", "adalayernorm", "instancenorm", "batchnorm")
_NUMBERS = {"epsilon": (1e-5, 1e-5, 1e-6, 1e-3, 0.1), "momentum": (0.1, 0.1, 0.01, 0.9, 1)}
_LEAST_RANK = {"adalayernorm": 2, "instancenorm": 3, "batchnorm": 2, "batchnorm_inference": 2}


def normalization(drawing: Drawing, node: Any) -> Proposal:
    rng, name = drawing.rng, node.method
    x = pick(drawing, node, range(_LEAST_RANK.get(name, 1), 9))
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
            ports[port.name] = _parameter(rng, port.name, scale, dtype)
    phase = rng.choices((None, "TRAINING", "INFERENCE"), (6, 1, 3))[0]
    has_phase = phase and not name.startswith("batchnorm")
    return ports, {"norm_forward_phase": phase} if has_phase else {}


def normalization_backward(drawing: Drawing, node: Any) -> Proposal:
    """Gradients of a normalization of the graph, or of one that is not in it."""
    rng, name = drawing.rng, node.method.removesuffix("_backward")
    has_dbias = name == "rmsnorm" and rng.random() < 0.7
    attributes = {"has_dbias": rng.random() < 0.5} if has_dbias else {}
    if known := _forward(drawing, name):
        made, results, _ = known
        made |= {result.name.partition("_")[2]: result for result in results}
        made["inv_variance"] = made["inv_var"]
    else:
        x = pick(drawing, node, range(_LEAST_RANK.get(name, 1), 9))
        scale = _scale_shape(rng, name, x.shape)
        reduced = node.extent.reduced(x.shape, scale)
        of = tuple(1 if i in reduced else size for i, size in enumerate(x.shape))
        made = {"input": x, "scale": _parameter(rng, "scale", scale, x.dtype)}
        made |= {p: _parameter(rng, p, of, "float32") for p in ("mean", "inv_variance")}
    made["grad"] = Operand(made["input"].shape, made["input"].dtype, layout=layout(rng))
    return {port: made[port] for port in node.ports.input_names}, attributes


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


def _parameter(rng: random.Random, port: str, of: Shape, dtype: str) -> Operand:
    """A scale, a bias, or what may be a statistic: its reciprocal deviation is positive."""
    if port in ("scale", "bias"):
        positive = port == "scale" and rng.random() < 0.5
    else:
        dtype, positive = "float32", port in ("inv_variance", "in_running_var")
    return Operand(of, dtype, 1.0 if positive else 0.4, positive)


DRAWS = {
    "sdpa": attention,
    "sdpa_backward": attention_backward,
    **dict.fromkeys((*KINDS, "batchnorm_inference"), normalization),
    **dict.fromkeys((f"{kind}_backward" for kind in KINDS), normalization_backward),
}
