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

from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.dtypes import INTEGERS, is_floating
from jax_cudnn._core.graph.node import Node
from jax_cudnn._core.graph.reference import rounded

from . import sampled_attention, sampled_normalization
from .sampled import SIZE as SIZE
from .sampled import TERMS, Sampled, mean_square

_LARGEST, _LEAST_RMS = 500.0, 2e-3


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
    of = Sampled(node, arrays, shapes, noise)
    if node.method in _KNOWN:
        return _KNOWN[node.method](of)
    if attends(node) or hasattr(node, "extent"):
        kind = sampled_attention if attends(node) else sampled_normalization
        is_backward = "dO" in arrays or "grad" in arrays
        found = kind.gradients(of) if is_backward else kind.results(of)
        return [found[port].astype(np.float32) for port in node.results]
    if node.ports.is_elementwise or node.method in _BY_PLACE:
        compute = jnp.dtype(node.default_compute({}))
        with np.errstate(all="ignore"):
            found = node.reference(**{p: jnp.asarray(a.astype(compute)) for p, a in arrays.items()})
        return [np.asarray(x).astype(np.float32) for x in found]
    if node.product:
        return [of.products(terms(node, shapes), (SIZE,), *arrays).astype(np.float32)]
    return [noise.choice(np.concatenate(list(arrays.values())), SIZE) for _ in node.results]


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
    return (terms(node, shapes) * math.prod(map(mean_square, others))) ** -0.5


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


def _reduction(of: Sampled) -> list[np.ndarray]:
    (sample,) = of.arrays.values()
    return [_reduced(of, of.node.mode, sample)]


def _genstats(of: Sampled) -> list[np.ndarray]:
    (sample,) = of.arrays.values()
    return [_reduced(of, "ADD", values) for values in (sample, sample * sample)]


def _gen_index(of: Sampled) -> list[np.ndarray]:
    (port,) = of.arrays
    found = of.noise.integers(0, of.shapes[port][of.node.axis], SIZE).astype(np.float32)
    found[0] = 0  # what follows may be finite of all others alone
    return [found]


def _reduced(of: Sampled, mode: str, sample: np.ndarray) -> np.ndarray:
    (port,), out = of.arrays, of.node.results[0]
    count = math.prod(of.shapes[port]) // math.prod(of.shapes[out])
    drawn = min(count, TERMS)
    with np.errstate(all="ignore"):
        found = _REDUCTIONS[mode](of.noise.choice(sample, (SIZE, drawn)).astype(np.float64))
        more = count / drawn if mode in ("ADD", "NORM1") else 1.0
        return (found * more).astype(np.float32)


_KNOWN = {"reduction": _reduction, "genstats": _genstats, "gen_index": _gen_index}
_BY_PLACE = ("batchnorm_inference",)  # its reference takes any shapes


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
