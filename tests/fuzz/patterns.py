"""Graphs as people write them, to stand inside random ones: each adds some operations.

They start at a value of the graph where one fits, and their results are values for what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.node import REGISTRY

from . import layers
from .drawing import Drawing, Operand, Value
from .nodes import DRAWS, Window
from .operands import CHANNELS, HEADS, heads, new_operand, pick, weight


class Writer:
    """Writes operations: its methods are g's, of operands in the order of their ports; they give
    the first result."""

    def __init__(self, drawing: Drawing):
        self.drawing, self.rng, self.dtype = drawing, drawing.rng, drawing.dtype

    def __getattr__(self, method: str) -> Callable[..., Value]:
        def add(*operands: Any, dtype: str | None = None, **attributes: Any) -> Value:
            ports = dict(zip(REGISTRY[method].ports.input_names, operands, strict=True))
            return self.drawing.add(method, ports, attributes, dtype)[0]

        return add

    def any(self, *methods: str) -> Callable[..., Value]:
        return getattr(self, self.rng.choice(methods))

    def start(self, method: str, *ranks: int) -> Value:
        """A value that the method takes, of one of these ranks."""
        found = pick(self.drawing, REGISTRY[method], lambda rank: rank in ranks)
        return self.drawing.take(found)

    def queries(self) -> Value:
        return self.drawing.take(layers.queries(self.drawing))

    def new(self, *shape: int, dtypes: tuple[str, ...] = ()) -> Operand:
        return new_operand(self.drawing, shape, *([dtypes] if dtypes else []))

    def weight(self, beside: Value, *shape: int) -> Operand:
        return weight(self.drawing, beside, shape)

    def per_channel(self, x: Value) -> Operand:
        return self.new(1, x.shape[1], *[1] * (len(x.shape) - 2))

    def channels(self) -> int:
        return self.rng.choice(CHANNELS)

    def rounded(self) -> str | None:
        return self.rng.choice((self.dtype, None))

    def over_rows(self, x: Value, mode: str) -> Value:
        return self.reduction(x, mode=mode, out_dims=[*x.shape[:-1], 1])

    def conv(self, x: Value, k: int) -> Value:
        """A 3x3 convolution that keeps the spatial sizes."""
        rank = len(x.shape) - 2
        filter = self.weight(x, k, x.shape[1], *[3] * rank)
        return self.conv_fprop(x, filter, padding=[1] * rank, dtype=self.dtype)

    def norm(self, x: Value, *methods: str, dtype: str | None = None, **given: Any) -> list[Value]:
        """A normalization of one of these kinds, mostly layernorm or rmsnorm; its results."""
        usual = ("rmsnorm", "layernorm", "rmsnorm", "layernorm", "adalayernorm")
        method = self.rng.choice(methods or usual)
        ports, attributes = layers.normalization(self.drawing, REGISTRY[method], x)
        return self.drawing.add(method, ports, attributes | given, dtype)

    def attend(self, q: Value, **given: Any) -> list[Value]:
        """Attention of these queries, rounded to their dtype; its results that may be read."""
        ports, attributes = layers.attention(self.drawing, REGISTRY["sdpa"], q)
        found = self.drawing.add("sdpa", ports, attributes | given, q.dtype)
        return [value for value in found if value not in self.drawing.hidden]


Pattern = Callable[[Writer], object]

_EPILOGUE = (
    *("bias", "scale", "add", "mul", "sub", "max", "relu_backward", "swish_backward"),
    *("relu", "gelu", "gelu_approx_tanh", "swish", "sigmoid", "tanh", "elu", "abs", "identity"),
)
_EACH_BACKWARD = [
    method
    for method, node in REGISTRY.items()
    if method.endswith("_backward") and node.ports.is_elementwise and "leaky" not in method
]


def _fusion(size: int) -> Pattern:
    """A product and operations on each element of its result, for one plan of cuDNN's."""

    def pattern(g: Writer) -> None:
        method = g.rng.choice(("matmul", "conv_fprop", "conv_fprop", "conv_dgrad", "conv_wgrad"))
        value = g.drawing.add(method, *DRAWS[method](g.drawing, REGISTRY[method]))[0]
        for position in range(1, size):
            method = g.rng.choice(_EPILOGUE)
            operands: list[Any] = [value]
            if len(REGISTRY[method].ports.inputs) > 1:
                same = method.endswith("_backward") or g.rng.random() < 0.4
                full = Operand(value.shape, g.dtype)
                operands.append(full if same else g.per_channel(value))
            dtype = g.dtype if position == size - 1 else None
            value = getattr(g, method)(*operands, dtype=dtype)

    return pattern


def _two_convolutions(g: Writer) -> None:
    y = g.conv(g.start("conv_fprop", 4), g.channels())
    y = g.relu(g.bias(y, g.per_channel(y)), dtype=g.rounded())
    g.conv(y, g.channels())


def _residual_block(g: Writer) -> None:
    x = g.start("conv_fprop", 4)
    y = g.conv(x, g.channels())
    y = g.conv(g.relu(g.bias(y, g.per_channel(y))), x.shape[1])
    g.relu(g.add(g.bias(y, g.per_channel(y)), x))


def _backward_of_convolution(g: Writer) -> None:
    """The gradient of an activation for the gradients of image, weight and bias."""
    loss = g.start("conv_dgrad", 4)
    n, k, *y = loss.shape
    loss = g.any(*_EACH_BACKWARD)(loss, g.new(*loss.shape), dtype=g.rounded())
    window, c = Window(g.rng, len(y)), g.channels()
    image, filter = (n, c, *window.image(tuple(y), g.rng)), (k, c, *window.sizes)
    same = window.attributes
    g.conv_dgrad(loss, g.weight(loss, *filter), **same, out_dims=list(image))
    g.conv_wgrad(g.weight(loss, *image), loss, **same, out_dims=list(filter))
    g.reduction(loss, mode="ADD", out_dims=[1, k, *[1] * len(y)])


def _backward_of_matmul(g: Writer) -> None:
    loss, k = g.start("matmul", 3), g.channels()
    b, m, n = loss.shape
    loss = g.gelu_backward(loss, g.new(b, m, n), dtype=g.dtype)
    g.matmul(loss, g.transpose(g.weight(loss, b, k, n), permutation=[0, 2, 1]))
    g.matmul(g.weight(loss, b, k, m), loss)
    g.reduction(loss, mode="ADD", out_dims=[1, 1, n])


def _statistics_of_convolution(g: Writer) -> None:
    g.genstats(g.conv(g.start("conv_fprop", 4), g.channels()))


def _gate_of_channels(g: Writer) -> None:
    x = g.start("conv_fprop", 4)
    g.mul(x, g.sigmoid(g.reduction(x, mode="AVG", out_dims=[*x.shape[:2], 1, 1])))


def _pixels_as_rows(g: Writer) -> None:
    x = g.start("reshape", 4)
    n, c, h, w = x.shape
    rows = g.transpose(g.reshape(x, out_dims=[n, c, h * w]), permutation=[0, 2, 1])
    g.matmul(rows, g.weight(rows, 1, c, g.channels()))


def _choice_by_conditions(g: Writer) -> None:
    x = g.start("abs", 1, 2, 3, 4, 5)
    y = g.drawing.take(g.new(*x.shape))
    methods = [method for method in REGISTRY if method.startswith("cmp_")]
    conditions = g.any(*methods)(x, y), g.any(*methods)(y, g.rng.choice((0.5, -0.25)))
    g.binary_select(x, y, g.any("logical_and", "logical_or")(*conditions))


def _weights_of_8_bits(g: Writer) -> None:
    a = g.start("matmul", 3)
    w = Operand((a.shape[0], a.shape[2], g.rng.choice((16, 32, 64))), "int8")
    w = g.identity(w, dtype=a.dtype)
    g.mul(g.matmul(a, g.mul(w, 0.1)), g.new(1, 1, w.shape[2]))


# -- attention -------------------------------------------------------------------------------------


def _softmax_of(g: Writer, x: Value) -> Value:
    raised = g.exp(g.sub(x, g.over_rows(x, "MAX")))
    return g.div(raised, g.over_rows(raised, "ADD"), dtype=g.dtype)


def _softmax(g: Writer) -> None:
    _softmax_of(g, g.start("reduction", 2, 3, 4))


def _attention_of_matmuls(g: Writer) -> None:
    """Scaled, masked, normalised and applied; queries, keys and values are matrices by head."""
    q = g.start("matmul", 3)
    h, _, size = q.shape
    length = g.rng.choice(HEADS[2])
    scores = g.mul(g.matmul(q, Operand((h, size, length), q.dtype)), size**-0.5)
    scores = g.binary_select(scores, -30.0, g.new(*scores.shape, dtypes=("bool",)))
    g.matmul(_softmax_of(g, scores), Operand((h, length, size), g.dtype))


def _attention_of_projections(g: Writer) -> None:
    """As in a transformer: queries are projected, and heads are put together again."""
    x = g.start("matmul", 3)
    b, s, c = x.shape
    _, h, _, d = heads(g.rng)
    q = g.matmul(x, g.weight(x, 1, c, h * d), dtype=g.dtype)
    q = g.transpose(g.reshape(q, out_dims=[b, s, h, d]), permutation=[0, 2, 1, 3])
    o = g.transpose(g.attend(q)[0], permutation=[0, 2, 1, 3])
    o = g.reshape(o, out_dims=[b, s, h * o.shape[3]])
    g.matmul(o, g.weight(o, 1, o.shape[2], g.channels()), dtype=g.dtype)


def _gated_attention(g: Writer) -> None:
    q, *_ = g.norm(g.queries(), "rmsnorm", dtype=g.dtype)
    o, *_ = g.attend(q)
    g.mul(o, g.sigmoid(g.new(*o.shape)), dtype=g.dtype)


def _attention_of_two_parts(g: Writer) -> None:
    """Of keys in two arrays, put together by the statistics, as where GPUs have parts of them."""
    q = g.queries()
    parts = [g.attend(q, generate_stats=True) for _ in range(2)]
    if any(len(results) < 2 for results in parts):
        raise GraphError("a query sees no key of a part")
    (first, total), (second, other) = parts
    share = g.sigmoid(g.sub(total, other))
    g.add(second, g.mul(g.sub(first, second), share), dtype=g.dtype)


def _backward_of_attention(g: Writer) -> None:
    o, *_ = g.attend(g.queries(), generate_stats=True)
    step = g.drawing.steps[-1]
    loss = g.sub(o, g.new(*o.shape), dtype=g.dtype)
    ports, attributes = layers.of_attention(g.drawing, step)
    g.drawing.add("sdpa_backward", ports | {"dO": loss}, attributes)


def _causal_mask(g: Writer) -> None:
    x = g.start("gen_index", 3, 4, 5)
    row, column = (g.gen_index(x, axis=len(x.shape) - i) for i in (2, 1))
    g.binary_select(x, -30.0, g.cmp_ge(row, column))


# -- normalizations --------------------------------------------------------------------------------


def _layer_norm(g: Writer) -> None:
    x = g.start("reduction", 2, 3, 4)
    x = g.sub(x, g.over_rows(x, "AVG"))
    variance = g.over_rows(g.mul(x, x), "AVG")
    x = g.mul(x, g.rsqrt(g.add(variance, 1e-3)))
    row = (*[1] * (len(x.shape) - 1), x.shape[-1])
    g.bias(g.scale(x, g.new(*row)), g.new(*row), dtype=g.dtype)


def _normalized_sum(g: Writer) -> None:
    """As in a transformer: a residual is added, and the sum goes on and is normalized."""
    x = g.start("matmul", 3)
    y, *_ = g.norm(g.add(x, g.new(*x.shape), dtype=g.dtype), dtype=g.dtype)
    g.matmul(y, g.weight(y, g.rng.choice((1, y.shape[0])), y.shape[2], g.channels()))


def _normalized_convolution(g: Writer) -> None:
    """As in a residual network, in training or not."""
    y = g.conv(g.start("conv_fprop", 4), g.channels())
    methods = "batchnorm", "batchnorm", "batchnorm_inference", "instancenorm"
    y, *_ = g.norm(y, *methods, dtype=g.rounded())
    g.relu(g.add(y, g.new(*y.shape)), dtype=g.dtype)


def _normalized_gate(g: Writer) -> None:
    y, *_ = g.norm(g.start("swish", 2, 3, 4))
    g.mul(g.swish(y), g.new(*y.shape), dtype=g.dtype)


def _trained(g: Writer, x: Value, *methods: str) -> tuple[str, list[Value]]:
    """A normalization that gives its statistics."""
    method = g.rng.choice(methods if len(x.shape) > 2 else ("batchnorm",))
    training = {} if method == "batchnorm" else {"norm_forward_phase": "TRAINING"}
    return method, g.norm(x, method, **training)


def _loss_of_statistics(g: Writer) -> None:
    """Statistics of a normalization are kept near 0 and 1."""
    x = g.start("relu", 2, 3, 4, 5)
    _, (_, mean, inv_var, *_) = _trained(g, x, "layernorm", "instancenorm", "batchnorm")
    loss = g.add_square(g.log(inv_var), mean)
    g.reduction(loss, mode="AVG", out_dims=[1] * len(loss.shape))


def _backward_of_normalization(g: Writer) -> None:
    kinds = "rmsnorm", "layernorm", "adalayernorm", "instancenorm", "batchnorm"
    method, _ = _trained(g, g.start("relu", 3, 4, 5), *kinds)
    node, step = REGISTRY[f"{method}_backward"], g.drawing.steps[-1]
    g.drawing.add(node.method, layers.of_normalization(g.drawing, node, step))


def _group_norm(g: Writer) -> None:
    """Groups of channels, normalized as channels; scale and bias are each channel's."""
    x = g.start("reshape", 4)
    n, c, h, w = x.shape
    groups = g.rng.choice([k for k in (1, 2, 4, 8, c) if c % k == 0])
    y, *_ = g.norm(g.reshape(x, out_dims=[n, groups, c // groups * h, w]), "instancenorm")
    y = g.reshape(y, out_dims=[n, c, h, w])
    g.bias(g.scale(y, g.per_channel(y)), g.per_channel(y), dtype=g.dtype)


PATTERNS: dict[Pattern, int] = {
    **{_fusion(size): size for size in range(3, 9)},
    **dict.fromkeys((_backward_of_normalization, _statistics_of_convolution), 2),
    **dict.fromkeys((_gate_of_channels, _pixels_as_rows, _backward_of_attention), 3),
    **dict.fromkeys((_normalized_sum, _normalized_gate), 3),
    **dict.fromkeys((_two_convolutions, _backward_of_convolution, _choice_by_conditions), 4),
    **dict.fromkeys((_weights_of_8_bits, _gated_attention, _causal_mask), 4),
    **dict.fromkeys((_normalized_convolution, _loss_of_statistics), 4),
    **dict.fromkeys((_backward_of_matmul, _softmax, _group_norm), 5),
    **dict.fromkeys((_residual_block, _attention_of_projections, _attention_of_two_parts), 7),
    **dict.fromkeys((_attention_of_matmuls, _layer_norm), 9),
}
"""Each pattern with the number of its operations."""
