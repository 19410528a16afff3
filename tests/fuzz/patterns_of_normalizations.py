"""Normalizations as people write them: by their nodes and of reductions, in training or not."""

from __future__ import annotations

from jax_cudnn._core.graph.node import REGISTRY

from . import normalizations
from .drawing import Drawing
from .operands import CHANNELS, new_operand, weight
from .steps import conv, norm, one, per_channel, start, without_last


def layer_norm(drawing: Drawing) -> None:
    x = start(drawing, "reduction", 2, 3, 4)
    mean = one(drawing, "reduction", x, mode="AVG", out_dims=without_last(x))
    x = one(drawing, "sub", x, mean)
    squares = one(drawing, "mul", x, x)
    variance = one(drawing, "reduction", squares, mode="AVG", out_dims=without_last(x))
    spread = one(drawing, "rsqrt", one(drawing, "add", variance, 1e-3))
    x = one(drawing, "mul", x, spread)
    row = (*[1] * (len(x.shape) - 1), x.shape[-1])
    x = one(drawing, "scale", x, new_operand(drawing, row))
    one(drawing, "bias", x, new_operand(drawing, row), dtype=drawing.dtype)


def normalized_sum(drawing: Drawing) -> None:
    """As in a transformer: a residual is added, and the sum, which goes on, normalized for what
    follows."""
    x = start(drawing, "matmul", 3)
    x = one(drawing, "add", x, new_operand(drawing, x.shape), dtype=drawing.dtype)
    y, *_ = norm(drawing, x, dtype=drawing.dtype)
    of = (drawing.rng.choice((1, y.shape[0])), y.shape[2], drawing.rng.choice(CHANNELS))
    one(drawing, "matmul", y, weight(drawing, y, of))


def normalized_convolution(drawing: Drawing) -> None:
    """As in a residual network, in training or not."""
    x = start(drawing, "conv_fprop", 4)
    y = conv(drawing, x, drawing.rng.choice(CHANNELS))
    y, *_ = norm(
        drawing,
        y,
        *("batchnorm", "batchnorm", "batchnorm_inference", "instancenorm"),
        dtype=drawing.rng.choice((drawing.dtype, None)),
    )
    y = one(drawing, "add", y, new_operand(drawing, y.shape))
    one(drawing, "relu", y, dtype=drawing.dtype)


def normalized_gate(drawing: Drawing) -> None:
    x = start(drawing, "swish", 2, 3, 4)
    y, *_ = norm(drawing, x)
    gate = drawing.take(new_operand(drawing, y.shape))
    one(drawing, "mul", one(drawing, "swish", y), gate, dtype=drawing.dtype)


def loss_of_statistics(drawing: Drawing) -> None:
    """Statistics of a normalization are kept near 0 and 1."""
    x = start(drawing, "relu", 2, 3, 4, 5)
    method = drawing.rng.choice(("layernorm", "instancenorm", "batchnorm"))
    if method == "instancenorm" and len(x.shape) < 3:
        method = "batchnorm"
    training = {} if method == "batchnorm" else {"norm_forward_phase": "TRAINING"}
    _, mean, inv_var, *_ = norm(drawing, x, method, **training)
    loss = one(drawing, "add_square", one(drawing, "log", inv_var), mean)
    one(drawing, "reduction", loss, mode="AVG", out_dims=[1] * len(loss.shape))


def backward_of_normalization(drawing: Drawing) -> None:
    """A normalization, and its gradients for that of its result."""
    x = start(drawing, "relu", 3, 4, 5)
    method = drawing.rng.choice(
        ("rmsnorm", "layernorm", "adalayernorm", "instancenorm", "batchnorm")
    )
    training = {} if method == "batchnorm" else {"norm_forward_phase": "TRAINING"}
    norm(drawing, x, method, **training)
    node = REGISTRY[f"{method}_backward"]
    drawing.add(node.method, normalizations.of_step(drawing, node, drawing.steps[-1]))


def group_norm(drawing: Drawing) -> None:
    """Groups of channels, normalized as channels; scale and bias are each channel's."""
    x = start(drawing, "reshape", 4)
    n, c, h, w = x.shape
    groups = drawing.rng.choice([k for k in (1, 2, 4, 8, c) if c % k == 0])
    y = one(drawing, "reshape", x, out_dims=[n, groups, c // groups * h, w])
    y, *_ = norm(drawing, y, "instancenorm")
    y = one(drawing, "reshape", y, out_dims=[n, c, h, w])
    y = one(drawing, "scale", y, per_channel(drawing, y))
    one(drawing, "bias", y, per_channel(drawing, y), dtype=drawing.dtype)
