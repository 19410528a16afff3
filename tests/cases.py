"""Named graphs with shapes: what tests check, CI plans and the benchmark times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_cudnn._core.graph.layout import packed_strides
from jax_cudnn._core.graph.node import Node, registry
from jax_cudnn._core.graph.planned import Example
from jax_cudnn._core.graph.trace import GraphFunction, graph


@dataclass(frozen=True)
class Case:
    """A graph function with the shapes and dtypes of its operands.

    ``planned`` is False for graphs that cuDNN refuses, in words. ``positive`` holds the positions
    of operands that are at least 0.25.
    """

    name: str
    function: GraphFunction
    avals: tuple[jax.ShapeDtypeStruct, ...]
    planned: bool = True
    positive: frozenset[int] = frozenset()

    def operands(self, key: jax.Array) -> list[jax.Array]:
        """Random operands; weights of products are scaled so that results have unit variance."""
        _, trace = self.function.trace(*self.avals)
        fan_in = {}
        for call in trace.spec.calls:
            # (image, weight) or (A, B): the second is the weight.
            if call.node.anchor.product and len(call.inputs) == 2:
                (_, image), (_, weight) = call.inputs
                shape = trace.spec.tensor(weight).shape
                contracted = shape[-2] if len(trace.spec.tensor(image).shape) == 3 else None
                fan_in[weight] = contracted or math.prod(shape[1:])
        names = dict(zip(trace.operands, trace.spec.inputs, strict=True))
        # Drawn by NumPy: jax.random compiles a program for each shape.
        random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return [
            _drawn(random, aval, fan_in.get(names.get(i, ""), 1) ** -0.5, i in self.positive)
            for i, aval in enumerate(self.avals)
        ]


def _drawn(
    random: np.random.Generator, aval: jax.ShapeDtypeStruct, scale: float, positive: bool
) -> jax.Array:
    """Normal floats times ``scale``, small integers, or fair booleans."""
    if aval.dtype == jnp.bool_:
        values = random.random(aval.shape) < 0.5
    elif jnp.issubdtype(aval.dtype, jnp.integer):
        least = 0 if jnp.issubdtype(aval.dtype, jnp.unsignedinteger) else -8
        values = random.integers(least, 9, aval.shape)
    else:
        values = random.standard_normal(aval.shape, np.float32) * np.float32(scale)
    if positive or aval.dtype == jnp.float8_e8m0fnu:
        values = np.abs(values) + 0.25
    return jnp.asarray(values.astype(aval.dtype))


def case(*avals: tuple[tuple[int, ...], str]) -> Callable[[Callable[..., Any]], Case]:
    """Decorator: a function of ``g`` and arrays of these shapes and dtypes becomes a Case."""

    def make(fn: Callable[..., Any]) -> Case:
        structs = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in avals)
        return Case(fn.__name__, graph(fn), structs)

    return make


def node_cases() -> Iterator[Case]:
    """One case for each example of each registered node."""
    for method, node in registry().items():
        for number, example in enumerate(node.examples):
            yield _of_example(method, node, number, example)


def _of_example(method: str, node: type[Node], number: int, example: Example) -> Case:
    given = {n: example.inputs[n] for n in node.ports.input_names if n in example.inputs}
    numbers = {name: value for name, value in given.items() if isinstance(value, float)}
    shapes = {name: value for name, value in given.items() if name not in numbers}
    variadic = {port.name for port in node.ports.inputs if port.variadic}

    def fn(g: Any, *operands: Any) -> Any:
        left = iter(operands)
        ports = {
            name: [next(left) for _ in shape] if name in variadic else next(left)
            for name, shape in shapes.items()
        }
        result = getattr(g, method)(**ports, **numbers, **example.attributes)
        return result.set_data_type(example.out) if example.out else result

    fn.__name__ = f"{method}_{number}_{example.dtype}"
    avals = [
        (shape, example.dtypes.get(name, example.dtype))
        for name, given in shapes.items()
        for shape in (given if name in variadic else [given])
    ]
    positive = frozenset(list(shapes).index(port) for port in example.positive)
    return dataclasses.replace(case(*avals)(fn), planned=example.alone, positive=positive)


_IMAGE, _WEIGHT, _BIAS = (8, 64, 28, 28), (64, 64, 3, 3), (1, 64, 1, 1)
_A, _B = (1, 128, 256), (1, 256, 512)
_E4M3, _E5M2, _E8M0 = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
_E2M1 = "float4_e2m1fn"
_SAME = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}


@case((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_BIAS, "bfloat16"))
def conv_bias_relu(g, x, w, b):
    return g.relu(g.bias(g.conv_fprop(x, w, **_SAME), b))


@case((_IMAGE, "float16"), (_WEIGHT, "float16"), (_BIAS, "float16"), (_IMAGE, "float16"))
def conv_bias_add_relu(g, x, w, b, residual):
    return g.relu(g.add(g.bias(g.conv_fprop(x, w, **_SAME), b), residual))


@case((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_BIAS, "bfloat16"), (_BIAS, "bfloat16"))
def conv_scale_bias_swish(g, x, w, scale, b):
    return g.swish(g.bias(g.mul(g.conv_fprop(x, w, **_SAME), scale), b))


@case((_IMAGE, "float32"), (_WEIGHT, "float32"), (_BIAS, "float32"))
def conv_bias_sigmoid(g, x, w, b):
    return g.sigmoid(g.bias(g.conv_fprop(x, w, **_SAME), b))


@case((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_BIAS, "bfloat16"))
def conv_bias_gelu_with_preactivation(g, x, w, b):
    y = g.bias(g.conv_fprop(x, w, **_SAME), b)
    return {"preactivation": y, "y": g.gelu_approx_tanh(y)}


@case(((1, 256, 512), "bfloat16"), ((1, 512, 384), "bfloat16"), ((1, 1, 384), "bfloat16"))
def matmul_bias_gelu(g, x, w, b):
    return g.gelu_approx_tanh(g.bias(g.matmul(x, w), b))


@case(((4, 128, 64), "float16"), ((4, 64, 96), "float16"), ((1, 1, 96), "float16"))
def matmul_scale_bias_relu(g, x, w, b):
    return g.relu(g.matmul(x, w) * 0.125 + b)


@case(((1, 512, 64), "float32"), ((1, 64, 10), "float32"), ((1, 1, 10), "float32"))
def matmul_bias(g, x, w, b):
    return g.bias(g.matmul(x, w), b)


@case((_IMAGE, "bfloat16"), (_IMAGE, "bfloat16"))
def add_gelu(g, x, y):
    return g.gelu_approx_tanh(g.add(x, y))


@case((_IMAGE, "bfloat16"), (_IMAGE, "bfloat16"))
def mul_sum_over_channels(g, x, y):
    product = g.mul(x, y)
    return g.reduction(product, mode="ADD", out_dims=[8, 1, 28, 28])


@case((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_BIAS, "bfloat16"), (_BIAS, "bfloat16"))
def conv_times_product_of_scales(g, x, w, s, t):
    return g.mul(g.conv_fprop(x, w, **_SAME), g.mul(s, t))


@case((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_BIAS, "float32"))
def conv_rounded_bias(g, x, w, b):
    return g.bias(g.conv_fprop(x, w, **_SAME).set_data_type("bfloat16"), b)


@case(((1, 256, 128), "bfloat16"), ((1, 128, 64), "bfloat16"))
def relu_matmul(g, x, w):
    return g.matmul(g.relu(x).set_data_type("bfloat16"), w)


@case(((64, 128), "float16"))
def square(g, x):
    return g.mul(x, x)


@case(((4096,), "float32"), ((4096,), "float32"))
def vectors(g, x, y):
    return g.swish(x * 0.5 + y)


@case(((2, 16, 3, 4, 5), "bfloat16"))
def volume(g, x):
    return g.swish(x * 0.5)


_GEMM = (((1, 64, 128), "bfloat16"), ((1, 128, 96), "bfloat16"))


@case(*_GEMM)
def matmul_of_transposed(g, x, w):
    x = x.set_stride([64 * 128, 1, 64])
    return g.matmul(x, w.set_stride([128 * 96, 1, 128])).set_stride([64 * 96, 1, 64])


@case(((1, 64, 128), "bfloat16"), ((1, 128, 96), "int8"))
def matmul_of_int8_weights(g, x, w):
    return g.matmul(x, g.identity(w).set_data_type("bfloat16"))


_HALF_CONV = ((_IMAGE, "float16"), (_WEIGHT, "float16"))


@case(*_HALF_CONV, ((8, 32, 28, 28), "float16"))
def conv_concatenated(g, x, w, skip):
    y = g.conv_fprop(x, w, **_SAME).set_data_type("float16")
    return g.concatenate([y, skip], axis=1)


@case((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), ((1, 64, 32), "bfloat16"))
def conv_then_matmul_of_its_pixels(g, x, w, v):
    y = g.relu(g.conv_fprop(x, w, **_SAME)).set_data_type("bfloat16")
    pixels = g.transpose(g.reshape(y, out_dims=[8, 64, 784]), [0, 2, 1])
    return y, g.matmul(pixels, v)


@case(*_HALF_CONV)
def conv_with_statistics(g, x, w):
    y = g.conv_fprop(x, w, **_SAME).set_data_type("float16")
    return (y, *g.genstats(y))


@case(*_HALF_CONV, (_BIAS, "float16"), (_BIAS, "float16"))
def normalized_conv_with_statistics(g, x, w, scale, b):
    x = g.mul(x, scale).set_data_type("float16")
    x = g.relu(g.add(x, b).set_data_type("float16")).set_data_type("float16")
    y = g.conv_fprop(x, w, **_SAME).set_data_type("float16")
    return (y, *g.genstats(y))


@case((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_IMAGE, "bfloat16"))
def conv_relu_backward(g, x, w, activated):
    return g.relu_backward(g.conv_fprop(x, w, **_SAME), activated)


@case((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_IMAGE, "bool"))
def conv_masked(g, x, w, mask):
    return g.binary_select(g.conv_fprop(x, w, **_SAME), 0.0, mask)


@case((_IMAGE, "bfloat16"), (_IMAGE, "bfloat16"))
def relu_backward_and_bias_gradient(g, gradient, x):
    dx = g.relu_backward(gradient, x)
    return dx, g.reduction(dx, mode="ADD", out_dims=[1, 64, 1, 1])


@case((_IMAGE, "bfloat16"), (_IMAGE, "bfloat16"), (_IMAGE, "bool"))
def logic(g, x, y, mask):
    chosen = g.logical_and(g.logical_or(g.cmp_gt(x, y), mask), g.logical_not(g.cmp_lt(x, -1.0)))
    return g.binary_select(x, y, chosen)


@case((_IMAGE, "float32"))
def lower_triangles(g, x):
    return g.binary_select(x, -1e9, g.cmp_ge(g.gen_index(x, axis=2), g.gen_index(x, axis=3)))


@case(((1, 16, 64), "bfloat16"), ((1, 64, 96), "bfloat16"))
def matmul_product_of_rows(g, x, w):
    return g.reduction(g.matmul(x, w), mode="MUL", out_dims=[1, 1, 96])


@case(((1, 128, 64), "bfloat16"), ((1, 64, 96), "bfloat16"))
def matmul_and_its_largest_magnitude(g, x, w):
    y = g.matmul(x, w)
    return y, g.reduction(y, mode="AMAX")


@case(((2, 128, 128), _E4M3), ((2, 128, 4), _E8M0), ((2, 128, 64), _E5M2), ((2, 4, 128), _E8M0))
def matmul_mxfp8(g, a, a_scale, b, b_scale):
    a = g.block_scale_dequantize(a, a_scale, block_size=[1, 32])
    b = g.block_scale_dequantize(b, b_scale, block_size=[32, 1])
    return g.matmul(a, b).set_data_type("bfloat16")


@case(
    ((1, 128, 64), _E2M1),
    ((1, 128, 4), _E4M3),
    ((1, 64, 128), _E2M1),
    ((1, 4, 128), _E4M3),
    ((1, 1, 1), "float32"),
)
def matmul_nvfp4_gelu_to_nvfp4(g, a, a_scale, b, b_scale, scale):
    a = g.block_scale_dequantize(a, a_scale, block_size=[1, 16])
    b = g.block_scale_dequantize(b.set_stride([64 * 128, 1, 64]), b_scale, block_size=[16, 1])
    y = g.gelu_approx_tanh(g.matmul(a, b) * scale)
    y, y_scale = g.block_scale_quantize(y, block_size=16, axis=2)
    return {"y": y, "scale": y_scale}


FUSIONS: tuple[Case, ...] = tuple(x for x in [*globals().values()] if isinstance(x, Case))


def all_cases() -> tuple[Case, ...]:
    return (*node_cases(), *FUSIONS)


def dtype_cases() -> Iterator[Case]:
    """All of them, named by what they multiply and what leaves the graph."""
    yield _named("conv_int8_to_float32", ((_IMAGE, "int8"), (_WEIGHT, "int8")), _conv("float32"))
    yield _named(
        "conv_int8_scale_bias_relu_to_int8",
        ((_IMAGE, "int8"), (_WEIGHT, "int8"), (_BIAS, "float32"), (_BIAS, "float32")),
        lambda g, x, w, s, b: g.relu(
            g.conv_fprop(x, w, padding=[1, 1]) * s * 0.01 + b
        ).set_data_type("int8"),
    )
    yield _named("matmul_int8", ((_A, "int8"), (_B, "int8")), lambda g, a, b: g.matmul(a, b))
    yield _named(
        "matmul_int8_scale_to_bfloat16",
        ((_A, "int8"), (_B, "int8"), ((1, 1, 512), "float32")),
        lambda g, a, b, s: (g.matmul(a, b) * s).set_data_type("bfloat16"),
    )
    for wide in ("bfloat16", "float16"):
        yield _named(
            f"matmul_{wide}_by_int8",
            ((_A, wide), (_B, "int8")),
            lambda g, a, b, wide=wide: g.matmul(a, g.identity(b).set_data_type(wide)),
        )
    for first, second in ((_E4M3, _E4M3), (_E4M3, _E5M2), (_E5M2, _E5M2)):
        name = f"{first[7:11]}_by_{second[7:11]}"
        yield _named(f"matmul_{name}", ((_A, first), (_B, second)), lambda g, a, b: g.matmul(a, b))
        yield _named(f"conv_{name}", ((_IMAGE, first), (_WEIGHT, second)), _conv("float32"))
    yield _named(
        "matmul_float8_scale_bias_gelu_to_float8",
        ((_A, _E4M3), (_B, _E4M3), ((1, 1, 512), "float32")),
        lambda g, a, b, bias: g.gelu_approx_tanh(
            g.bias(g.matmul(a, b.set_stride(_transposed(b))) * 0.5, bias)
        ).set_data_type(_E4M3),
    )
    yield _named(
        "conv_float8_fast_scale_relu_to_float8",
        ((_IMAGE, _E4M3), (_WEIGHT, _E4M3)),
        lambda g, x, w: g.relu(
            g.conv_fprop(x, w, padding=[1, 1], compute_data_type="fast_float_for_fp8") * 0.5
        ).set_data_type(_E4M3),
    )
    yield _named(
        "conv_float32_highest",
        ((_IMAGE, "float32"), (_WEIGHT, "float32"), (_BIAS, "float32")),
        lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b)),
        precision="highest",
    )
    yield _named(
        "conv_float16_accumulated_in_float16",
        ((_IMAGE, "float16"), (_WEIGHT, "float16")),
        lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1], compute_data_type="float16"),
    )
    yield _named(
        "conv_bias_relu_intermediates_bfloat16",
        ((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_BIAS, "bfloat16")),
        lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b)),
        intermediate_data_type="bfloat16",
    )
    yield _named(
        "matmul_of_transposed_operands",
        ((_A, "bfloat16"), (_B, "bfloat16")),
        lambda g, a, b: g.matmul(a.set_stride(_transposed(a)), b.set_stride(_transposed(b))),
    )
    yield _named(
        "conv_nchw",
        ((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16")),
        lambda g, x, w: _row_major(g.conv_fprop(_row_major(x), _row_major(w), padding=[1, 1])),
    )


def _named(name: str, avals: tuple[Any, ...], fn: Callable[..., Any], **options: Any) -> Case:
    fn.__name__ = name
    made = case(*avals)(fn)
    return dataclasses.replace(made, function=made.function.with_options(**options))


def _conv(out: str) -> Callable[..., Any]:
    return lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1]).set_data_type(out)


def _transposed(x: Any) -> list[int]:
    return packed_strides(x.shape, (0, 2, 1))


def _row_major(x: Any) -> Any:
    return x.set_stride(packed_strides(x.shape, tuple(range(x.ndim))))
