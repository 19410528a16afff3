"""Named graphs with shapes: what tests check, CI plans and the benchmark times."""

from __future__ import annotations

from .case import Case, case, node_cases

_IMAGE, _WEIGHT, _BIAS = (8, 64, 28, 28), (64, 64, 3, 3), (1, 64, 1, 1)
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


@case(
    (_IMAGE, "float32"),
)
def lower_triangles(g, x):
    return g.binary_select(x, -1e9, g.cmp_ge(g.gen_index(x, axis=2), g.gen_index(x, axis=3)))


@case(((1, 16, 64), "bfloat16"), ((1, 64, 96), "bfloat16"))
def matmul_product_of_rows(g, x, w):
    return g.reduction(g.matmul(x, w), mode="MUL", out_dims=[1, 1, 96])


@case(((1, 128, 64), "bfloat16"), ((1, 64, 96), "bfloat16"))
def matmul_and_its_largest_magnitude(g, x, w):
    y = g.matmul(x, w)
    return y, g.reduction(y, mode="AMAX")


FUSIONS: tuple[Case, ...] = (
    volume,
    conv_times_product_of_scales,
    conv_rounded_bias,
    relu_matmul,
    square,
    vectors,
    conv_bias_relu,
    conv_bias_add_relu,
    conv_scale_bias_swish,
    conv_bias_sigmoid,
    conv_bias_gelu_with_preactivation,
    matmul_bias_gelu,
    matmul_scale_bias_relu,
    matmul_bias,
    add_gelu,
    mul_sum_over_channels,
    conv_relu_backward,
    conv_masked,
    relu_backward_and_bias_gradient,
    logic,
    lower_triangles,
    matmul_product_of_rows,
    matmul_and_its_largest_magnitude,
    matmul_of_transposed,
    matmul_of_int8_weights,
    conv_concatenated,
    conv_then_matmul_of_its_pixels,
    conv_with_statistics,
    normalized_conv_with_statistics,
)


def all_cases() -> tuple[Case, ...]:
    return (*node_cases(), *FUSIONS)
