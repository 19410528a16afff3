"""What the values of a random graph are like, from what those before them are like.

A sample is 64 numbers distributed like a tensor's elements. It says nothing of shapes and costs
the same for every graph, so a graph is known to have tame values (finite, neither huge nor
vanishing) before anything of its size is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError
from .._core.graph.dims import Shape
from .._core.graph.dtypes import INTEGERS, is_floating
from .._core.graph.node import Node
from .._core.graph.reference import rounded

SIZE = 64
_LARGEST, _LEAST_RMS = 500.0, 2e-3
_TERMS = 4096  # of a sum, drawn for its sample


class Untamed(GraphError):
    """Values that would be too large, vanish, or not be finite."""


def check(sample: np.ndarray, dtype: str) -> None:
    """Raises Untamed for values with which no comparison would mean something."""
    if dtype == "bool":
        return
    with np.errstate(all="ignore"):
        largest, rms = np.max(np.abs(sample)), root_mean_square(sample)
    limit = 2.0**20 if dtype == "int32" else _LARGEST
    if not largest <= limit or (is_floating(dtype) and rms < _LEAST_RMS):
        raise Untamed("the values are not tame", got=f"largest {largest:g}, mean square {rms:g}")


def root_mean_square(sample: np.ndarray) -> float:
    return float(np.sqrt(np.mean(sample * sample)))


def stored(sample: np.ndarray, dtype: str) -> np.ndarray:
    """The sample as a tensor of this dtype keeps it."""
    return np.asarray(rounded(jnp.asarray(sample), dtype)).astype(np.float32)


def results(
    node: Node,
    inputs: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    noise: np.random.Generator,
) -> list[np.ndarray]:
    """Samples of a node's results.

    Args:
        node: the operation.
        inputs: for each port the sample, or a number.
        shapes: of the tensors at all ports.
        noise: where random choices come from.
    """
    arrays = {port: np.broadcast_to(np.float32(x), SIZE) for port, x in inputs.items()}
    outputs = node.results
    if node.method in _KNOWN:
        (name, array), *_ = arrays.items()
        return _KNOWN[node.method](node, array, shapes[name], shapes[outputs[0]], noise)
    if attends(node):
        known = _attention_gradients if "dO" in arrays else _attended
        found = known(node, arrays, shapes, noise)
        return [found[port].astype(np.float32) for port in outputs]
    if hasattr(node, "extent"):
        known = _gradients if "grad" in arrays else _normalized
        found = known(node, arrays, shapes, noise)
        return [found[port].astype(np.float32) for port in outputs]
    if node.ports.is_elementwise or node.method in _BY_PLACE:
        compute = jnp.dtype(node.default_compute({}))
        with np.errstate(all="ignore"):
            found = node.reference(**{p: jnp.asarray(a.astype(compute)) for p, a in arrays.items()})
        return [np.asarray(x).astype(np.float32) for x in found]
    if node.product:
        found = _products(noise, terms(node, shapes), (SIZE,), *arrays.values())
        return [found.astype(np.float32)]
    return [noise.choice(np.concatenate(list(arrays.values())), SIZE) for _ in outputs]


def attends(node: Node) -> bool:
    """Whether a node is attention or its backward."""
    return hasattr(node, "band")


def is_hidden(node: Node, sample: np.ndarray) -> bool:
    """Whether a result is a statistic of attention that is -inf, for queries that see no key."""
    return attends(node) and bool(np.isneginf(sample).any())


def terms(node: Node, shapes: Mapping[str, Shape]) -> int:
    """How many products an anchor adds up for an element of its result."""
    return max(node.flops(shapes) // 2 // math.prod(shapes[node.ports.output_names[0]]), 1)


def weight_scale(node: Node, shapes: Mapping[str, Shape], others: list[np.ndarray]) -> float:
    """What normal elements of an anchor's operand are to be multiplied by, beside the others, so
    that its result has about unit variance."""
    return (terms(node, shapes) * math.prod(map(_square, others))) ** -0.5


def _products(
    noise: np.random.Generator, count: int, shape: Shape, *samples: np.ndarray
) -> np.ndarray:
    """Sums of so many products, of elements of each sample."""
    scale = math.sqrt(count * math.prod(map(_square, samples)))
    mean = count * math.prod(float(np.mean(sample)) for sample in samples)
    spread = math.sqrt(max(scale * scale - mean * mean / count, 0.0))
    return mean + spread * noise.standard_normal(shape)


def _square(sample: np.ndarray) -> float:
    return float(np.mean(np.square(sample))) + 1e-12


# The modes of reductions over the last axis: their references would be compiled for each number
# of terms.
_REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ADD": lambda x: x.sum(-1),
    "MUL": lambda x: x.prod(-1),
    "MIN": lambda x: x.min(-1),
    "MAX": lambda x: x.max(-1),
    "AMAX": lambda x: np.abs(x).max(-1),
    "AVG": lambda x: x.mean(-1),
    "NORM1": lambda x: np.abs(x).sum(-1),
    "NORM2": lambda x: np.sqrt((x * x).sum(-1)),
    "MUL_NO_ZEROS": lambda x: np.where(x == 0, 1, x).prod(-1),
}


def _reduction(
    node: Any, sample: np.ndarray, shape: Shape, out: Shape, noise: np.random.Generator
) -> list[np.ndarray]:
    return [_reduced(node.mode, sample, math.prod(shape) // math.prod(out), noise)]


def _genstats(
    node: Any, sample: np.ndarray, shape: Shape, out: Shape, noise: np.random.Generator
) -> list[np.ndarray]:
    count = math.prod(shape) // math.prod(out)
    return [_reduced("ADD", values, count, noise) for values in (sample, sample * sample)]


def _gen_index(
    node: Any, sample: np.ndarray, shape: Shape, out: Shape, noise: np.random.Generator
) -> list[np.ndarray]:
    found = noise.integers(0, shape[node.axis], SIZE).astype(np.float32)
    found[0] = 0  # what follows may be finite of all others alone
    return [found]


def _reduced(mode: str, sample: np.ndarray, count: int, noise: np.random.Generator) -> np.ndarray:
    drawn = min(count, _TERMS)
    with np.errstate(all="ignore"):
        found = _REDUCTIONS[mode](noise.choice(sample, (SIZE, drawn)).astype(np.float64))
        more = count / drawn if mode in ("ADD", "NORM1") else 1.0
        return (found * more).astype(np.float32)


_KNOWN = {"reduction": _reduction, "genstats": _genstats, "gen_index": _gen_index}
_BY_PLACE = ("batchnorm_inference",)  # its reference takes any shapes


# -- normalizations --------------------------------------------------------------------------------


def _normalized(
    node: Any,
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, Shape],
    noise: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Results by port: each sample is that of a row of its own."""
    count = _row(node, shapes)
    rows = noise.choice(arrays["input"].astype(np.float64), (SIZE, min(count, _TERMS)))
    mean = rows.mean(-1) if node.extent.centred else np.zeros(SIZE)
    variance = np.square(rows - mean[:, None]).mean(-1)
    with np.errstate(divide="ignore"):
        inv_var = (variance + arrays["epsilon"]) ** -0.5
    y = (rows[:, 0] - mean) * inv_var * arrays["scale"] + arrays.get("bias", 0)
    found = {"Y": y, "mean": mean, "inv_var": inv_var}
    if "momentum" in arrays:
        unbiased = variance * count / max(count - 1, 1)
        for name, new in (("mean", mean), ("var", unbiased)):
            old = arrays[f"in_running_{name}"]
            found[f"next_running_{name}"] = old + arrays["momentum"] * (new - old)
    return found


def _gradients(
    node: Any,
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, Shape],
    noise: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Those of a backward by port."""
    count = min(_row(node, shapes), _TERMS)
    shared = math.prod(shapes["input"]) // math.prod(shapes["scale"])
    wide = {port: x.astype(np.float64) for port, x in arrays.items()}
    grad = noise.choice(wide["grad"], (SIZE, max(count, min(shared, _TERMS))))
    inv_var = wide["inv_variance"][:, None]
    x = noise.choice(wide["input"], grad.shape)
    xhat = (x - wide.get("mean", np.zeros(SIZE))[:, None]) * inv_var
    slope = (grad * noise.choice(wide["scale"], grad.shape))[:, :count]
    row = xhat[:, :count]
    dx = slope - (slope * row).mean(-1, keepdims=True) * row
    dx = dx - slope.mean(-1, keepdims=True) * node.extent.centred

    def total(terms: np.ndarray) -> np.ndarray:
        terms = terms[:, : min(shared, _TERMS)]
        unknown = np.std(terms) / math.sqrt(SIZE) * noise.standard_normal(SIZE)
        return (terms.mean(-1) + unknown) * shared  # the sample's mean is not that of the tensor

    dscale = total(grad * noise.permuted(xhat))
    return {"DX": (inv_var * dx)[:, 0], "DScale": dscale, "DBias": total(grad)}


def _row(node: Any, shapes: Mapping[str, Shape]) -> int:
    """The elements over which a normalization takes its mean."""
    shape = shapes["input"]
    return math.prod(shape[axis] for axis in node.extent.reduced(shape, shapes["scale"]))


# -- attention -------------------------------------------------------------------------------------


def _attended(
    node: Any,
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, Shape],
    noise: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Results by port: each sample is that of a query of its own."""
    each = np.exp(_scores(node, arrays, shapes, noise))
    total = each.sum(-1)
    o = (each * noise.choice(arrays["v"], each.shape)).sum(-1)
    if "sink_token" in arrays:  # padding sees none
        there = (total > 0) | ("seq_len_q" not in arrays)
        total = total + there * np.exp(arrays["sink_token"])
    with np.errstate(divide="ignore"):
        return {"O": o / np.where(total > 0, total, 1), "Stats": np.log(total)}


def _attention_gradients(
    node: Any,
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, Shape],
    noise: np.random.Generator,
) -> dict[str, np.ndarray]:
    """Those of a backward by port."""
    scores, (*_, size) = _scores(node, arrays, shapes, noise), shapes["v"]
    stats = np.where(np.isneginf(arrays["stats"]), np.inf, arrays["stats"])
    weights = np.exp(scores - stats[:, None])
    mean = _products(noise, size, (SIZE, 1), arrays["dO"], arrays["o"])
    slope = weights * (_products(noise, size, scores.shape, arrays["dO"], arrays["v"]) - mean)
    queries = math.prod(shapes["q"][1:3]) // shapes["k"][1]

    def total(terms: np.ndarray, count: int, *others: np.ndarray) -> np.ndarray:
        of = (SIZE, min(count, _TERMS))
        found = noise.choice(terms.ravel(), of)
        for other in others:
            found = found * noise.choice(other, of)
        return found.sum(-1)

    found = {
        "dQ": node.attn_scale * (slope * noise.choice(arrays["k"], slope.shape)).sum(-1),
        "dK": node.attn_scale * total(slope, queries, arrays["q"]),
        "dV": total(weights, queries, arrays["dO"]),
    }
    if "bias" in arrays:
        scores_of_all = math.prod(shapes["q"][:3]) * shapes["k"][2]
        found["dBias"] = total(slope, scores_of_all // math.prod(shapes["bias"]))
    if "sink_token" in arrays:
        of_sink = np.exp(arrays["sink_token"] - stats)
        found["dSink_token"] = -total(of_sink * mean[:, 0], math.prod(shapes["q"][::2]))
    return found


def _scores(
    node: Any,
    arrays: Mapping[str, np.ndarray],
    shapes: Mapping[str, Shape],
    noise: np.random.Generator,
) -> np.ndarray:
    """Those of some queries, from the first to the last, -inf where a key is not seen."""
    (*_, queries, size), keys = shapes["q"], shapes["k"][2]
    i, j = np.linspace(0, queries - 1, SIZE).round()[:, None], np.arange(keys)
    lengths = [
        arrays.get(name, np.full(SIZE, whole))[:, None]
        for name, whole in (("seq_len_q", queries), ("seq_len_kv", keys))
    ]
    scores = node.attn_scale * _products(noise, size, (SIZE, keys), arrays["q"], arrays["k"])
    if "bias" in arrays:
        scores = scores + noise.choice(arrays["bias"], scores.shape)
    seen = (i < lengths[0]) & (j < lengths[1])
    at, band = i + (lengths[1] - lengths[0]) * node.band.bottom_right, node.band
    if band.left is not None:
        seen &= j > at - band.left
    if band.right is not None:
        seen &= j <= at + band.right
    return np.where(seen, scores, -np.inf)


def draw(
    noise: np.random.Generator,
    shape: Shape,
    dtype: str,
    scale: float = 1.0,
    positive: bool = False,
    largest: int = 4,
) -> np.ndarray:
    """An operand: normal floats times ``scale``, integers up to ``largest``, or fair booleans;
    magnitudes of at least 0.25 (of integers, 1) where ``positive``."""
    if dtype == "bool":
        return noise.random(shape) < 0.5
    if dtype in INTEGERS:
        values = noise.integers(0 if dtype.startswith("u") else -largest, largest + 1, shape)
    else:
        values = noise.standard_normal(shape, np.float32) * np.float32(scale)
    if positive:
        values = np.abs(values) + (1 if dtype in INTEGERS else 0.25)
    return values.astype(jnp.dtype(dtype))
