"""Graphs as people write them, to stand inside random ones, at a value of these where one fits."""

from collections.abc import Callable
from typing import Any

from jax_cudnn._core.graph.node import REGISTRY

from . import layers
from .drawing import Drawing, Operand, Value
from .nodes import DRAWS, Window
from .operands import CHANNELS, HEADS, heads, new_operand, pick, weight


class Writer:
    """Its methods are g's, of operands in the order of their ports; they give the first result."""

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
        return self.drawing.take(pick(self.drawing, REGISTRY[method], ranks))

    def queries(self) -> Value:
        return self.drawing.take(layers.queries(self.drawing))

    def new(self, *shape: int, dtypes: Any = ("float32", "float16", "bfloat16")) -> Operand:
        return new_operand(self.drawing, shape, dtypes)

    def weight(self, beside: Value, *shape: int) -> Operand:
        return weight(self.drawing, beside, shape)

    def with_bias(self, x: Value, method: str = "bias", **given: Any) -> Value:
        bias = self.new(1, x.shape[1], *[1] * (len(x.shape) - 2))
        return getattr(self, method)(x, bias, **given)

    def channels(self) -> int:
        return self.rng.choice(CHANNELS)

    def over_rows(self, x: Value, mode: str) -> Value:
        return self.reduction(x, mode=mode, out_dims=[*x.shape[:-1], 1])

    def conv(self, x: Value, k: int) -> Value:
        """A 3x3 convolution that keeps the spatial sizes."""
        filter = self.weight(x, k, x.shape[1], 3, 3)
        return self.conv_fprop(x, filter, padding=[1, 1], dtype=self.dtype)

    def layer(self, x: Value, *methods: str, dtype: str | None = None, **given: Any) -> list[Value]:
        """Attention of these queries or a normalization; its results that may be read."""
        method = self.rng.choice(methods)
        draw = layers.attention if method == "sdpa" else layers.normalization
        ports, attributes = draw(self.drawing, REGISTRY[method], x)
        found = self.drawing.add(method, ports, attributes | given, dtype)
        return [value for value in found if value not in self.drawing.hidden]


Pattern = Callable[[Writer], object]

_EPILOGUE = (
    *("bias", "scale", "add", "mul", "sub", "max", "relu_backward", "swish_backward"),
    *("relu", "gelu", "gelu_approx_tanh", "swish", "sigmoid", "tanh", "elu", "abs", "identity"),
)
_BACKWARD = [
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
            dtype = g.dtype if position == size - 1 else None
            if len(REGISTRY[method].ports.inputs) == 1:
                value = getattr(g, method)(value, dtype=dtype)
            elif method.endswith("_backward") or g.rng.random() < 0.4:
                value = getattr(g, method)(value, Operand(value.shape, g.dtype), dtype=dtype)
            else:
                value = g.with_bias(value, method, dtype=dtype)

    return pattern


def _residual_block(g: Writer) -> None:
    x = g.start("conv_fprop", 4)
    y = g.relu(g.with_bias(g.conv(x, g.channels())), dtype=g.dtype)
    g.relu(g.add(g.with_bias(g.conv(y, x.shape[1])), x))


def _backward_of_convolution(g: Writer) -> None:
    """The gradient of an activation for the gradients of image, weight and bias."""
    loss = g.start("conv_dgrad", 4)
    n, k, *y = loss.shape
    loss = g.any(*_BACKWARD)(loss, g.new(*loss.shape), dtype=g.dtype)
    window, c = Window(g.rng, len(y)), g.channels()
    image, filter = [n, c, *window.image(y, g.rng)], [k, c, *window.sizes]
    g.conv_dgrad(loss, g.weight(loss, *filter), **window.attributes, out_dims=image)
    g.conv_wgrad(g.weight(loss, *image), loss, **window.attributes, out_dims=filter)
    g.reduction(loss, mode="ADD", out_dims=[1, k, *[1] * len(y)])


def _backward_of_matmul(g: Writer) -> None:
    loss, k = g.start("matmul", 3), g.channels()
    b, m, n = loss.shape
    loss = g.gelu_backward(loss, g.new(b, m, n), dtype=g.dtype)
    g.matmul(loss, g.transpose(g.weight(loss, b, k, n), permutation=[0, 2, 1]))
    g.matmul(g.weight(loss, b, k, m), loss)
    g.reduction(loss, mode="ADD", out_dims=[1, 1, n])


def _weights_of_8_bits(g: Writer) -> None:
    a = g.start("matmul", 3)
    w = Operand((a.shape[0], a.shape[2], g.rng.choice((16, 32, 64))), "int8")
    w = g.identity(w, dtype=a.dtype)
    g.mul(g.matmul(a, g.mul(w, 0.1)), g.new(1, 1, w.shape[2]))


def _softmax(g: Writer, x: Value | None = None) -> Value:
    x = x or g.start("reduction", 2, 3, 4)
    raised = g.exp(g.sub(x, g.over_rows(x, "MAX")))
    return g.div(raised, g.over_rows(raised, "ADD"), dtype=g.dtype)


def _attention_of_matmuls(g: Writer) -> None:
    """Scaled, masked, normalised and applied; queries, keys and values are matrices by head."""
    q = g.start("matmul", 3)
    h, _, size = q.shape
    length = g.rng.choice(HEADS[2])
    scores = g.mul(g.matmul(q, Operand((h, size, length), q.dtype)), size**-0.5)
    scores = g.binary_select(scores, -30.0, g.new(*scores.shape, dtypes=("bool",)))
    g.matmul(_softmax(g, scores), Operand((h, length, size), g.dtype))


def _attention_of_projections(g: Writer) -> None:
    """As in a transformer: queries are projected, and heads are put together again."""
    x = g.start("matmul", 3)
    b, s, c = x.shape
    _, h, _, d = heads(g.rng)
    q = g.matmul(x, g.weight(x, 1, c, h * d), dtype=g.dtype)
    q = g.transpose(g.reshape(q, out_dims=[b, s, h, d]), permutation=[0, 2, 1, 3])
    o = g.transpose(g.layer(q, "sdpa", dtype=g.dtype)[0], permutation=[0, 2, 1, 3])
    o = g.reshape(o, out_dims=[b, s, h * o.shape[3]])
    g.matmul(o, g.weight(o, 1, o.shape[2], g.channels()), dtype=g.dtype)


def _backward_of_attention(g: Writer) -> None:
    q = g.queries()
    o, *_ = g.layer(q, "sdpa", dtype=q.dtype, generate_stats=True)
    step = g.drawing.steps[-1]
    loss = g.sub(o, g.new(*o.shape), dtype=g.dtype)
    ports, attributes = layers.attention_backward(g.drawing, step=step)
    g.drawing.add("sdpa_backward", ports | {"dO": loss}, attributes)


def _layer_norm(g: Writer) -> None:
    x = g.start("reduction", 2, 3, 4)
    x = g.sub(x, g.over_rows(x, "AVG"))
    variance = g.over_rows(g.mul(x, x), "AVG")
    x = g.mul(x, g.rsqrt(g.add(variance, 1e-3)))
    row = (*[1] * (len(x.shape) - 1), x.shape[-1])
    g.bias(g.scale(x, g.new(*row)), g.new(*row), dtype=g.dtype)


def _normalized_convolution(g: Writer) -> None:
    """As in a residual network, in training or not."""
    y = g.conv(g.start("conv_fprop", 4), g.channels())
    methods = "batchnorm", "batchnorm", "batchnorm_inference", "instancenorm"
    y, *_ = g.layer(y, *methods, dtype=g.dtype)
    g.relu(g.add(y, g.new(*y.shape)), dtype=g.dtype)


def _backward_of_normalization(g: Writer) -> None:
    method = g.rng.choice(layers.KINDS)
    training = {} if method == "batchnorm" else {"norm_forward_phase": "TRAINING"}
    g.layer(g.start("relu", 3, 4, 5), method, **training)
    node, step = REGISTRY[f"{method}_backward"], g.drawing.steps[-1]
    g.drawing.add(node.method, *layers.normalization_backward(g.drawing, node, step))


def _group_norm(g: Writer) -> None:
    """Groups of channels, normalized as channels; scale and bias are each channel's."""
    x = g.start("reshape", 4)
    n, c, h, w = x.shape
    groups = g.rng.choice([k for k in (1, 2, 4, 8, c) if c % k == 0])
    y, *_ = g.layer(g.reshape(x, out_dims=[n, groups, c // groups * h, w]), "instancenorm")
    y = g.reshape(y, out_dims=[n, c, h, w])
    g.with_bias(g.with_bias(y, "scale"), dtype=g.dtype)


PATTERNS: dict[Pattern, int] = {
    **{_fusion(size): size for size in range(3, 9)},
    **{_backward_of_normalization: 2, _backward_of_attention: 3, _backward_of_convolution: 4},
    **{_weights_of_8_bits: 4, _normalized_convolution: 4, _backward_of_matmul: 5, _softmax: 5},
    **{_group_norm: 5, _residual_block: 7, _attention_of_projections: 7},
    **{_attention_of_matmuls: 9, _layer_norm: 9},
}
"""Each pattern with the number of its operations."""
