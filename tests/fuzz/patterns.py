"""Graphs as people write them, to stand inside random ones: each adds some operations.

They start at a value of the graph where one fits, and their results are values for what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_cudnn._core.graph.node import REGISTRY

from . import patterns_of_attention, patterns_of_normalizations
from .attributes import DRAWS, Window
from .drawing import Drawing, Operand
from .operands import CHANNELS, new_operand, weight
from .steps import conv, one, per_channel, start

Pattern = Callable[[Drawing], object]

_EPILOGUE = (
    *("bias", "scale", "add", "mul", "sub", "max", "relu_backward", "swish_backward"),
    *("relu", "gelu", "gelu_approx_tanh", "swish", "sigmoid", "tanh", "elu", "abs", "identity"),
)
_EACH_BACKWARD = [
    method
    for method, node in REGISTRY.items()
    if method.endswith("_backward") and node.ports.is_elementwise
]


def fusion(size: int) -> Pattern:
    """A product and operations on each element of its result, for one plan of cuDNN's."""

    def pattern(drawing: Drawing) -> None:
        rng = drawing.rng
        method = rng.choice(("matmul", "conv_fprop", "conv_fprop", "conv_dgrad", "conv_wgrad"))
        value = drawing.add(method, *DRAWS[method](drawing, REGISTRY[method]))[0]
        for position in range(1, size):
            ends = position == size - 1
            method = rng.choice(_EPILOGUE)
            operands: list[Any] = [value]
            if len(REGISTRY[method].ports.inputs) > 1:
                one_shape = method.endswith("_backward") or rng.random() < 0.4
                full = Operand(value.shape, drawing.dtype)
                operands.append(full if one_shape else per_channel(drawing, value))
            value = one(drawing, method, *operands, dtype=drawing.dtype if ends else None)

    return pattern


def two_convolutions(drawing: Drawing) -> None:
    x = start(drawing, "conv_fprop", 4)
    y = conv(drawing, x, drawing.rng.choice(CHANNELS))
    y = one(drawing, "bias", y, per_channel(drawing, y))
    y = one(drawing, "relu", y, dtype=drawing.rng.choice((drawing.dtype, None)))
    conv(drawing, y, drawing.rng.choice(CHANNELS))


def residual_block(drawing: Drawing) -> None:
    x = start(drawing, "conv_fprop", 4)
    y = conv(drawing, x, drawing.rng.choice(CHANNELS))
    y = one(drawing, "relu", one(drawing, "bias", y, per_channel(drawing, y)))
    y = conv(drawing, y, x.shape[1])
    y = one(drawing, "bias", y, per_channel(drawing, y))
    one(drawing, "relu", one(drawing, "add", y, x))


def backward_of_convolution(drawing: Drawing) -> None:
    """The gradient of an activation for the gradients of image, weight and bias."""
    rng = drawing.rng
    loss = start(drawing, "conv_dgrad", 4)
    n, k, *y = loss.shape
    before = new_operand(drawing, loss.shape)
    method = rng.choice([m for m in _EACH_BACKWARD if "leaky" not in m])
    loss = one(drawing, method, loss, before, dtype=rng.choice((drawing.dtype, None)))
    window, c = Window(rng, len(y)), rng.choice(CHANNELS)
    image, filter = (n, c, *window.image(tuple(y), rng)), (k, c, *window.sizes)
    same = window.attributes
    one(drawing, "conv_dgrad", loss, weight(drawing, loss, filter), **same, out_dims=list(image))
    one(drawing, "conv_wgrad", weight(drawing, loss, image), loss, **same, out_dims=list(filter))
    one(drawing, "reduction", loss, mode="ADD", out_dims=[1, k, *[1] * len(y)])


def backward_of_matmul(drawing: Drawing) -> None:
    rng = drawing.rng
    loss = start(drawing, "matmul", 3)
    b, m, n = loss.shape
    k = rng.choice(CHANNELS)
    before = new_operand(drawing, loss.shape)
    loss = one(drawing, "gelu_backward", loss, before, dtype=drawing.dtype)
    right = one(drawing, "transpose", weight(drawing, loss, (b, k, n)), permutation=[0, 2, 1])
    one(drawing, "matmul", loss, right)
    one(drawing, "matmul", weight(drawing, loss, (b, k, m)), loss)
    one(drawing, "reduction", loss, mode="ADD", out_dims=[1, 1, n])


def statistics_of_convolution(drawing: Drawing) -> None:
    x = start(drawing, "conv_fprop", 4)
    one(drawing, "genstats", conv(drawing, x, drawing.rng.choice(CHANNELS)))


def gate_of_channels(drawing: Drawing) -> None:
    x = start(drawing, "conv_fprop", 4)
    out = [*x.shape[:2], 1, 1]
    mean = one(drawing, "reduction", x, mode="AVG", out_dims=out)
    one(drawing, "mul", x, one(drawing, "sigmoid", mean))


def pixels_as_rows(drawing: Drawing) -> None:
    x = start(drawing, "reshape", 4)
    n, c, h, w = x.shape
    rows = one(drawing, "reshape", x, out_dims=[n, c, h * w])
    rows = one(drawing, "transpose", rows, permutation=[0, 2, 1])
    one(drawing, "matmul", rows, weight(drawing, rows, (1, c, drawing.rng.choice(CHANNELS))))


def choice_by_conditions(drawing: Drawing) -> None:
    rng = drawing.rng
    x = start(drawing, "abs", 1, 2, 3, 4, 5)
    y = drawing.take(new_operand(drawing, x.shape))
    methods = [method for method in REGISTRY if method.startswith("cmp_")]
    first = one(drawing, rng.choice(methods), x, y)
    second = one(drawing, rng.choice(methods), y, rng.choice((0.5, -0.25)))
    both = one(drawing, rng.choice(("logical_and", "logical_or")), first, second)
    one(drawing, "binary_select", x, y, both)


def weights_of_8_bits(drawing: Drawing) -> None:
    a = start(drawing, "matmul", 3)
    b, _, k = a.shape
    w = Operand((b, k, drawing.rng.choice((16, 32, 64))), "int8")
    w = one(drawing, "identity", w, dtype=a.dtype)
    scale = new_operand(drawing, (1, 1, w.shape[2]))
    one(drawing, "mul", one(drawing, "matmul", a, one(drawing, "mul", w, 0.1)), scale)


PATTERNS: dict[Pattern, int] = {
    **{fusion(size): size for size in range(3, 9)},
    two_convolutions: 4,
    residual_block: 7,
    backward_of_convolution: 4,
    backward_of_matmul: 5,
    patterns_of_attention.softmax: 5,
    patterns_of_attention.attention_of_matmuls: 9,
    patterns_of_attention.attention_of_projections: 7,
    patterns_of_attention.gated_attention: 4,
    patterns_of_attention.attention_of_two_parts: 7,
    patterns_of_attention.backward_of_attention: 3,
    patterns_of_normalizations.layer_norm: 9,
    patterns_of_normalizations.normalized_sum: 3,
    patterns_of_normalizations.normalized_convolution: 4,
    patterns_of_normalizations.normalized_gate: 3,
    patterns_of_normalizations.loss_of_statistics: 4,
    patterns_of_normalizations.backward_of_normalization: 2,
    patterns_of_normalizations.group_norm: 5,
    statistics_of_convolution: 2,
    gate_of_channels: 3,
    pixels_as_rows: 3,
    patterns_of_attention.causal_mask: 4,
    choice_by_conditions: 4,
    weights_of_8_bits: 4,
}
"""Each pattern with the number of its operations."""
