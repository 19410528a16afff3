"""Graphs as people write them, to stand inside random ones: each adds some operations.

They start at a value of the graph where one fits, and their results are values for what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._core.errors import GraphError
from .._core.graph.node import REGISTRY
from . import attentions, normalizations
from .attributes import DRAWS, Window
from .drawing import Drawing, Operand, Value
from .operands import CHANNELS, heads, new_operand, pick, weight

Pattern = Callable[[Drawing], object]


def _one(
    drawing: Drawing, method: str, *operands: Any, dtype: str | None = None, **attributes: Any
) -> Value:
    """Adds an operation of the operands in the order of its ports; its first result."""
    ports = dict(zip(REGISTRY[method].ports.input_names, operands, strict=True))
    return drawing.add(method, ports, attributes, dtype)[0]


def _norm(
    drawing: Drawing, x: Value, *methods: str, dtype: str | None = None, **attributes: Any
) -> list[Value]:
    """Adds a normalization of one of these kinds, mostly layernorm or rmsnorm; its results."""
    rng = drawing.rng
    method = rng.choice(methods or ("rmsnorm", "layernorm", "rmsnorm", "layernorm", "adalayernorm"))
    ports, drawn = normalizations.forward(drawing, REGISTRY[method], x)
    return drawing.add(method, ports, drawn | attributes, dtype)


def _attend(drawing: Drawing, q: Value, **attributes: Any) -> list[Value]:
    """Adds attention of these queries, rounded to their dtype; its results that may be read."""
    ports, drawn = attentions.forward(drawing, REGISTRY["sdpa"], q)
    found = drawing.add("sdpa", ports, drawn | attributes, q.dtype)
    return [value for value in found if value not in drawing.hidden]


def _start(drawing: Drawing, method: str, *ranks: int) -> Value:
    """A value that the method takes, of one of these ranks."""
    return _taken(drawing, pick(drawing, REGISTRY[method], lambda rank: rank in ranks))


def _queries(drawing: Drawing) -> Value:
    """A value with heads."""
    return _taken(drawing, attentions.queries(drawing))


def _taken(drawing: Drawing, found: Value | Operand) -> Value:
    return drawing.take(found) if isinstance(found, Operand) else found


def _per_channel(drawing: Drawing, x: Value) -> Operand:
    return new_operand(drawing, (1, x.shape[1], *[1] * (len(x.shape) - 2)))


def _last(x: Value) -> list[int]:
    """The shape of what is left when the last dimension is reduced."""
    return [*x.shape[:-1], 1]


def _conv(drawing: Drawing, x: Value, k: int) -> Value:
    """A 3x3 convolution that keeps the spatial sizes."""
    of = (k, x.shape[1], *[3] * (len(x.shape) - 2))
    padding = [1] * (len(x.shape) - 2)
    filter = weight(drawing, x, of)
    return _one(drawing, "conv_fprop", x, filter, padding=padding, dtype=drawing.dtype)


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
                operands.append(full if one_shape else _per_channel(drawing, value))
            value = _one(drawing, method, *operands, dtype=drawing.dtype if ends else None)

    return pattern


def two_convolutions(drawing: Drawing) -> None:
    x = _start(drawing, "conv_fprop", 4)
    y = _conv(drawing, x, drawing.rng.choice(CHANNELS))
    y = _one(drawing, "bias", y, _per_channel(drawing, y))
    y = _one(drawing, "relu", y, dtype=drawing.rng.choice((drawing.dtype, None)))
    _conv(drawing, y, drawing.rng.choice(CHANNELS))


def residual_block(drawing: Drawing) -> None:
    x = _start(drawing, "conv_fprop", 4)
    y = _conv(drawing, x, drawing.rng.choice(CHANNELS))
    y = _one(drawing, "relu", _one(drawing, "bias", y, _per_channel(drawing, y)))
    y = _conv(drawing, y, x.shape[1])
    y = _one(drawing, "bias", y, _per_channel(drawing, y))
    _one(drawing, "relu", _one(drawing, "add", y, x))


def backward_of_convolution(drawing: Drawing) -> None:
    """The gradient of an activation for the gradients of image, weight and bias."""
    rng = drawing.rng
    loss = _start(drawing, "conv_dgrad", 4)
    n, k, *y = loss.shape
    before = new_operand(drawing, loss.shape)
    method = rng.choice([m for m in _EACH_BACKWARD if "leaky" not in m])
    loss = _one(drawing, method, loss, before, dtype=rng.choice((drawing.dtype, None)))
    window, c = Window(rng, len(y)), rng.choice(CHANNELS)
    image, filter = (n, c, *window.image(tuple(y), rng)), (k, c, *window.sizes)
    same = window.attributes
    _one(drawing, "conv_dgrad", loss, weight(drawing, loss, filter), **same, out_dims=list(image))
    _one(drawing, "conv_wgrad", weight(drawing, loss, image), loss, **same, out_dims=list(filter))
    _one(drawing, "reduction", loss, mode="ADD", out_dims=[1, k, *[1] * len(y)])


def backward_of_matmul(drawing: Drawing) -> None:
    rng = drawing.rng
    loss = _start(drawing, "matmul", 3)
    b, m, n = loss.shape
    k = rng.choice(CHANNELS)
    before = new_operand(drawing, loss.shape)
    loss = _one(drawing, "gelu_backward", loss, before, dtype=drawing.dtype)
    right = _one(drawing, "transpose", weight(drawing, loss, (b, k, n)), permutation=[0, 2, 1])
    _one(drawing, "matmul", loss, right)
    _one(drawing, "matmul", weight(drawing, loss, (b, k, m)), loss)
    _one(drawing, "reduction", loss, mode="ADD", out_dims=[1, 1, n])


def softmax(drawing: Drawing) -> None:
    _softmax(drawing, _start(drawing, "reduction", 2, 3, 4))


def _softmax(drawing: Drawing, x: Value) -> Value:
    largest = _one(drawing, "reduction", x, mode="MAX", out_dims=_last(x))
    raised = _one(drawing, "exp", _one(drawing, "sub", x, largest))
    total = _one(drawing, "reduction", raised, mode="ADD", out_dims=_last(x))
    return _one(drawing, "div", raised, total, dtype=drawing.dtype)


def attention_of_matmuls(drawing: Drawing) -> None:
    """Scaled, masked, normalised and applied; queries, keys and values are matrices by head."""
    rng = drawing.rng
    q = _start(drawing, "matmul", 3)
    heads, _, size = q.shape
    length = rng.choice((16, 32, 48))
    scores = _one(drawing, "matmul", q, Operand((heads, size, length), q.dtype))
    scores = _one(drawing, "mul", scores, size**-0.5)
    mask = new_operand(drawing, scores.shape, ("bool",))
    scores = _one(drawing, "binary_select", scores, -30.0, mask)
    _one(
        drawing, "matmul", _softmax(drawing, scores), Operand((heads, length, size), drawing.dtype)
    )


def attention_of_projections(drawing: Drawing) -> None:
    """As in a transformer: queries are projected, and heads are put together again."""
    rng = drawing.rng
    x = _start(drawing, "matmul", 3)
    b, s, c = x.shape
    _, h, _, d = heads(rng)
    q = _one(drawing, "matmul", x, weight(drawing, x, (1, c, h * d)), dtype=drawing.dtype)
    q = _one(drawing, "reshape", q, out_dims=[b, s, h, d])
    q = _one(drawing, "transpose", q, permutation=[0, 2, 1, 3])
    o, *_ = _attend(drawing, q)
    o = _one(drawing, "transpose", o, permutation=[0, 2, 1, 3])
    o = _one(drawing, "reshape", o, out_dims=[b, s, h * o.shape[3]])
    of = (1, o.shape[2], rng.choice(CHANNELS))
    _one(drawing, "matmul", o, weight(drawing, o, of), dtype=drawing.dtype)


def gated_attention(drawing: Drawing) -> None:
    """Normalized queries; what they give is gated."""
    q, *_ = _norm(drawing, _queries(drawing), "rmsnorm", dtype=drawing.dtype)
    o, *_ = _attend(drawing, q)
    gate = _one(drawing, "sigmoid", new_operand(drawing, o.shape))
    _one(drawing, "mul", o, gate, dtype=drawing.dtype)


def attention_of_two_parts(drawing: Drawing) -> None:
    """Of keys that lie in two arrays, put together by the statistics, as where a ring of GPUs has
    parts of the keys."""
    q = _queries(drawing)
    parts = [_attend(drawing, q, generate_stats=True) for _ in range(2)]
    if any(len(results) < 2 for results in parts):
        raise GraphError("a query sees no key of a part")
    (first, total), (second, other) = parts
    share = _one(drawing, "sigmoid", _one(drawing, "sub", total, other))
    difference = _one(drawing, "sub", first, second)
    more = _one(drawing, "mul", difference, share)
    _one(drawing, "add", second, more, dtype=drawing.dtype)


def backward_of_attention(drawing: Drawing) -> None:
    """Attention, and its gradients for a loss of its result."""
    o, *_ = _attend(drawing, _queries(drawing), generate_stats=True)
    step = drawing.steps[-1]
    loss = _one(drawing, "sub", o, new_operand(drawing, o.shape), dtype=drawing.dtype)
    ports, attributes = attentions.of_step(drawing, step)
    drawing.add("sdpa_backward", ports | {"dO": loss}, attributes)


def layer_norm(drawing: Drawing) -> None:
    x = _start(drawing, "reduction", 2, 3, 4)
    mean = _one(drawing, "reduction", x, mode="AVG", out_dims=_last(x))
    x = _one(drawing, "sub", x, mean)
    variance = _one(drawing, "reduction", _one(drawing, "mul", x, x), mode="AVG", out_dims=_last(x))
    spread = _one(drawing, "rsqrt", _one(drawing, "add", variance, 1e-3))
    x = _one(drawing, "mul", x, spread)
    row = (*[1] * (len(x.shape) - 1), x.shape[-1])
    x = _one(drawing, "scale", x, new_operand(drawing, row))
    _one(drawing, "bias", x, new_operand(drawing, row), dtype=drawing.dtype)


def normalized_sum(drawing: Drawing) -> None:
    """As in a transformer: a residual is added, and the sum, which goes on, normalized for what
    follows."""
    x = _start(drawing, "matmul", 3)
    x = _one(drawing, "add", x, new_operand(drawing, x.shape), dtype=drawing.dtype)
    y, *_ = _norm(drawing, x, dtype=drawing.dtype)
    of = (drawing.rng.choice((1, y.shape[0])), y.shape[2], drawing.rng.choice(CHANNELS))
    _one(drawing, "matmul", y, weight(drawing, y, of))


def normalized_convolution(drawing: Drawing) -> None:
    """As in a residual network, in training or not."""
    x = _start(drawing, "conv_fprop", 4)
    y = _conv(drawing, x, drawing.rng.choice(CHANNELS))
    y, *_ = _norm(
        drawing,
        y,
        *("batchnorm", "batchnorm", "batchnorm_inference", "instancenorm"),
        dtype=drawing.rng.choice((drawing.dtype, None)),
    )
    y = _one(drawing, "add", y, new_operand(drawing, y.shape))
    _one(drawing, "relu", y, dtype=drawing.dtype)


def normalized_gate(drawing: Drawing) -> None:
    x = _start(drawing, "swish", 2, 3, 4)
    y, *_ = _norm(drawing, x)
    gate = drawing.take(new_operand(drawing, y.shape))
    _one(drawing, "mul", _one(drawing, "swish", y), gate, dtype=drawing.dtype)


def loss_of_statistics(drawing: Drawing) -> None:
    """Statistics of a normalization are kept near 0 and 1."""
    x = _start(drawing, "relu", 2, 3, 4, 5)
    method = drawing.rng.choice(("layernorm", "instancenorm", "batchnorm"))
    if method == "instancenorm" and len(x.shape) < 3:
        method = "batchnorm"
    training = {} if method == "batchnorm" else {"norm_forward_phase": "TRAINING"}
    _, mean, inv_var, *_ = _norm(drawing, x, method, **training)
    loss = _one(drawing, "add_square", _one(drawing, "log", inv_var), mean)
    _one(drawing, "reduction", loss, mode="AVG", out_dims=[1] * len(loss.shape))


def backward_of_normalization(drawing: Drawing) -> None:
    """A normalization, and its gradients for that of its result."""
    x = _start(drawing, "relu", 3, 4, 5)
    method = drawing.rng.choice(
        ("rmsnorm", "layernorm", "adalayernorm", "instancenorm", "batchnorm")
    )
    training = {} if method == "batchnorm" else {"norm_forward_phase": "TRAINING"}
    _norm(drawing, x, method, **training)
    node = REGISTRY[f"{method}_backward"]
    drawing.add(node.method, normalizations.of_step(drawing, node, drawing.steps[-1]))


def group_norm(drawing: Drawing) -> None:
    """Groups of channels, normalized as channels; scale and bias are each channel's."""
    x = _start(drawing, "reshape", 4)
    n, c, h, w = x.shape
    groups = drawing.rng.choice([k for k in (1, 2, 4, 8, c) if c % k == 0])
    y = _one(drawing, "reshape", x, out_dims=[n, groups, c // groups * h, w])
    y, *_ = _norm(drawing, y, "instancenorm")
    y = _one(drawing, "reshape", y, out_dims=[n, c, h, w])
    y = _one(drawing, "scale", y, _per_channel(drawing, y))
    _one(drawing, "bias", y, _per_channel(drawing, y), dtype=drawing.dtype)


def statistics_of_convolution(drawing: Drawing) -> None:
    x = _start(drawing, "conv_fprop", 4)
    _one(drawing, "genstats", _conv(drawing, x, drawing.rng.choice(CHANNELS)))


def gate_of_channels(drawing: Drawing) -> None:
    x = _start(drawing, "conv_fprop", 4)
    out = [*x.shape[:2], 1, 1]
    mean = _one(drawing, "reduction", x, mode="AVG", out_dims=out)
    _one(drawing, "mul", x, _one(drawing, "sigmoid", mean))


def pixels_as_rows(drawing: Drawing) -> None:
    x = _start(drawing, "reshape", 4)
    n, c, h, w = x.shape
    rows = _one(drawing, "reshape", x, out_dims=[n, c, h * w])
    rows = _one(drawing, "transpose", rows, permutation=[0, 2, 1])
    _one(drawing, "matmul", rows, weight(drawing, rows, (1, c, drawing.rng.choice(CHANNELS))))


def causal_mask(drawing: Drawing) -> None:
    x = _start(drawing, "gen_index", 3, 4, 5)
    row = _one(drawing, "gen_index", x, axis=len(x.shape) - 2)
    column = _one(drawing, "gen_index", x, axis=len(x.shape) - 1)
    _one(drawing, "binary_select", x, -30.0, _one(drawing, "cmp_ge", row, column))


def choice_by_conditions(drawing: Drawing) -> None:
    rng = drawing.rng
    x = _start(drawing, "abs", 1, 2, 3, 4, 5)
    y = drawing.take(new_operand(drawing, x.shape))
    methods = [method for method in REGISTRY if method.startswith("cmp_")]
    first = _one(drawing, rng.choice(methods), x, y)
    second = _one(drawing, rng.choice(methods), y, rng.choice((0.5, -0.25)))
    both = _one(drawing, rng.choice(("logical_and", "logical_or")), first, second)
    _one(drawing, "binary_select", x, y, both)


def weights_of_8_bits(drawing: Drawing) -> None:
    a = _start(drawing, "matmul", 3)
    b, _, k = a.shape
    w = Operand((b, k, drawing.rng.choice((16, 32, 64))), "int8")
    w = _one(drawing, "identity", w, dtype=a.dtype)
    scale = new_operand(drawing, (1, 1, w.shape[2]))
    _one(drawing, "mul", _one(drawing, "matmul", a, _one(drawing, "mul", w, 0.1)), scale)


PATTERNS: dict[Pattern, int] = {
    **{fusion(size): size for size in range(3, 9)},
    two_convolutions: 4,
    residual_block: 7,
    backward_of_convolution: 4,
    backward_of_matmul: 5,
    softmax: 5,
    attention_of_matmuls: 9,
    attention_of_projections: 7,
    gated_attention: 4,
    attention_of_two_parts: 7,
    backward_of_attention: 3,
    layer_norm: 9,
    normalized_sum: 3,
    normalized_convolution: 4,
    normalized_gate: 3,
    loss_of_statistics: 4,
    backward_of_normalization: 2,
    group_norm: 5,
    statistics_of_convolution: 2,
    gate_of_channels: 3,
    pixels_as_rows: 3,
    causal_mask: 4,
    choice_by_conditions: 4,
    weights_of_8_bits: 4,
}
"""Each pattern with the number of its operations."""
