"""Normalizations of values so far: over any dimensions, with scales, biases and statistics.

A backward mostly stands on a forward of the graph and its statistics, as in a training step; else
on operands that may be such: their ``inv_variance`` is positive.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.dtypes import FLOATS
from jax_cudnn._core.graph.node import Node

from .drawing import Drawing, Operand, Step, Value
from .operands import Proposal, layout, new_operand, pick

_EPSILONS = (1e-5, 1e-5, 1e-6, 1e-3, 0.1)
_MOMENTA = (0.1, 0.1, 0.01, 0.9, 1)
_BACKWARD = "_backward"
_POSITIVE = ("inv_variance", "in_running_var")
_LEAST_RANK = {"adalayernorm": 2, "instancenorm": 3, "batchnorm": 2, "batchnorm_inference": 2}


def forward(drawing: Drawing, node: type[Node], x: Value | Operand | None = None) -> Proposal:
    """A normalization of ``x``, or of any value."""
    rng, kind = drawing.rng, node.method
    x = x or pick(drawing, node, lambda rank: rank >= _LEAST_RANK.get(kind, 1))
    scale = _scale_shape(rng, kind, x.shape)
    dtype = _dtype(drawing, x)
    ports: dict[str, Any] = {"input": x}
    for port in node.ports.inputs:
        if port.name == "input" or (port.optional and rng.random() < 0.5):
            continue
        if port.name == "epsilon":
            ports[port.name] = _number(rng, _EPSILONS)
        elif port.name == "momentum":
            ports[port.name] = _number(rng, _MOMENTA)
        elif port.name in ("scale", "bias"):
            ports[port.name] = _parameter(drawing, port.name, scale, dtype)
        else:  # statistics
            ports[port.name] = _statistic(drawing, port.name, scale)
    if kind in ("batchnorm", "batchnorm_inference"):
        return ports, {}
    phase = rng.choices((None, "TRAINING", "INFERENCE"), (6, 1, 3))[0]
    return ports, {} if phase is None else {"norm_forward_phase": phase}


def backward(drawing: Drawing, node: Any) -> Proposal:
    """Gradients of a normalization of the graph, or of one that is not in it."""
    rng, kind = drawing.rng, node.method.removesuffix(_BACKWARD)
    dbias = {}
    if kind == "rmsnorm" and rng.random() < 0.7:
        dbias = {"has_dbias": rng.random() < 0.5}
    steps = [s for s in drawing.steps if s.method == kind and len(s.results) > 1]
    if steps and rng.random() < 0.7:
        return of_step(drawing, node, rng.choice(steps)), dbias
    x = pick(drawing, node, lambda rank: rank >= _LEAST_RANK.get(kind, 1))
    scale = _scale_shape(rng, kind, x.shape)
    reduced = node.extent.reduced(x.shape, scale)
    of = tuple(1 if i in reduced else size for i, size in enumerate(x.shape))
    ports = {"grad": _gradient(drawing, x), "input": x}
    ports["scale"] = _parameter(drawing, "scale", scale, _dtype(drawing, x))
    for port in ("mean", "inv_variance"):
        if port in node.ports.input_names:
            ports[port] = _statistic(drawing, port, of)
    return ports, dbias


def of_step(drawing: Drawing, node: type[Node], step: Step) -> dict[str, Any]:
    """What stands at the ports of the backward ``node`` of a normalization of the graph, which
    gives its statistics."""
    values = {value.name: value for value in drawing.values}
    made = {name.partition("_")[2]: values[name] for name in step.results}
    known = {port: values[step.ports[port]] for port in ("input", "scale")}
    known |= {"grad": _gradient(drawing, known["input"]), "inv_variance": made["inv_var"]}
    return {port: (known | made)[port] for port in node.ports.input_names}


def _gradient(drawing: Drawing, x: Value | Operand) -> Value | Operand:
    """A value of an input's shape, but another one; or an operand."""
    rng = drawing.rng
    known = [v for v in drawing.values if v.shape == x.shape and v is not x and v.dtype in FLOATS]
    if known and rng.random() < 0.6:
        return rng.choice(known)
    dtype = x.dtype if rng.random() < 0.9 else rng.choice(FLOATS)
    return Operand(x.shape, dtype, layout=layout(rng))


def _scale_shape(rng: random.Random, kind: str, shape: Shape) -> Shape:
    """The scale's, and so the dimensions that are normalized: mostly the last or the last ones."""
    rank = len(shape)
    if kind not in ("rmsnorm", "layernorm", "adalayernorm"):
        return (1, shape[1], *[1] * (rank - 2))
    first = 1 if kind == "adalayernorm" else 0
    kind_of_rows = rng.random()
    if kind_of_rows < 0.55:
        axes = [rank - 1]
    elif kind_of_rows < 0.9:
        axes = [*range(rng.randrange(first, rank), rank)]
    else:
        axes = rng.sample(range(first, rank), rng.randint(1, rank - first))
    return tuple(size if i < first or i in axes else 1 for i, size in enumerate(shape))


def _dtype(drawing: Drawing, x: Value | Operand) -> str:
    """Of scale and bias: mostly the input's, for cuDNN's fast engines, or float32."""
    return drawing.rng.choices((x.dtype, "float32", drawing.rng.choice(FLOATS)), (6, 3, 1))[0]


def _parameter(drawing: Drawing, port: str, of: Shape, dtype: str) -> Value | Operand:
    """A scale or bias: an operand, now and then one that has been used, or any value."""
    rng = drawing.rng
    known = [v for v in drawing.values if v.shape == of and v.dtype in FLOATS]
    if known and rng.random() < 0.25:
        return rng.choice(known)
    dtype = dtype if rng.random() < 0.95 else rng.choice(FLOATS)
    return Operand(of, dtype, 0.5, positive=port == "scale" and rng.random() < 0.5)


def _statistic(drawing: Drawing, port: str, of: Shape) -> Value | Operand:
    rng, positive = drawing.rng, port in _POSITIVE
    known = [v for v in drawing.values if v.shape == of and v.dtype == "float32"]
    known = [v for v in known if v.positive or not positive]
    if known and rng.random() < 0.5:
        return rng.choice(known)
    if rng.random() < 0.1:
        return new_operand(drawing, of, positive=positive)
    return Operand(of, "float32", 1.0 if positive else 0.3, positive)


def _number(rng: random.Random, numbers: tuple[float, ...]) -> float | Operand:
    """Mostly a number; else an operand without dimensions."""
    return (
        Operand((), "float32", 0.2, positive=True) if rng.random() < 0.05 else rng.choice(numbers)
    )


_KINDS = ("rmsnorm", "layernorm", "adalayernorm", "instancenorm", "batchnorm")
DRAWS: dict[str, Callable[[Drawing, type[Node]], Proposal]] = {
    **dict.fromkeys((*_KINDS, "batchnorm_inference"), forward),
    **dict.fromkeys((kind + _BACKWARD for kind in _KINDS), backward),
}
