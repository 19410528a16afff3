"""What graphs mean, in NumPy float64: written apart from the nodes' own references."""

import math

import jax.numpy as jnp
import numpy as np
import oracle_attention
import oracle_norms
import oracle_shapes


def _clips(node):
    high = np.inf if node.upper_clip is None else node.upper_clip
    return node.negative_slope or 0.0, node.lower_clip or 0.0, high


def _relu(x, node):
    slope, low, high = _clips(node)
    return np.minimum(np.where(x <= low, low + slope * (x - low), x), high)


def _relu_backward(loss, x, node):
    slope, low, high = _clips(node)
    return loss * np.select([x <= low, (x >= high) & (high < np.inf)], [slope, 0.0], 1.0)


_BITS = {"axis": 1, "bitorder": "little"}  # along the channels, the first of eight the lowest bit


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


_erf = np.vectorize(math.erf)


def _distribution(x):
    return 0.5 * (1 + _erf(x / np.sqrt(2)))


def _gelu_approx_tanh_backward(x):
    c = np.sqrt(2 / np.pi)
    u = c * (x + 0.044715 * x**3)
    return 0.5 * (1 + np.tanh(u)) + 0.5 * x / np.cosh(u) ** 2 * c * (1 + 3 * 0.044715 * x**2)


def _swish_backward(x, beta):
    return _sigmoid(beta * x) * (1 + beta * x * _sigmoid(-beta * x))


REDUCTIONS = {
    "ADD": np.add.reduce,
    "MUL": np.multiply.reduce,
    "MIN": np.minimum.reduce,
    "MAX": np.maximum.reduce,
    "AMAX": lambda x, **axes: np.maximum.reduce(np.abs(x), **axes),
    "AVG": np.mean,
    "NORM1": lambda x, **axes: np.add.reduce(np.abs(x), **axes),
    "NORM2": lambda x, **axes: np.add.reduce(x**2, **axes) ** 0.5,
    "MUL_NO_ZEROS": lambda x, **axes: np.multiply.reduce(x, where=x != 0, **axes),
}


def _reduction(x, node):
    out = node.out_dims or (1,) * x.ndim
    axes = tuple(i for i, (o, s) in enumerate(zip(out, x.shape, strict=True)) if o != s)
    return REDUCTIONS[node.mode](x, axis=axes, keepdims=True)


_SCALES = {32: (-127, 127, 0), 16: (-6, 8, 3)}  # least and largest exponents, bits of the mantissa


def _block_scale_quantize(node, input):
    """Scales are the least numbers of their format that keep each block in range."""
    largest = float(jnp.finfo(node.out_data_type).max)
    rows = input if node.axis == 2 else np.swapaxes(input, 1, 2)
    *lead, size = rows.shape
    room = np.zeros((*lead, -(-size // node.block_size) * node.block_size))
    room[..., :size] = rows
    most = np.abs(room.reshape(*lead, -1, node.block_size)).max(-1) / largest
    low, high, bits = _SCALES[node.block_size]
    exponent = np.frexp(most)[1] - 1
    if node.block_size == 16:
        step = 2.0 ** (np.clip(exponent, low, high) - bits)
        scale = np.minimum(np.ceil(most / step) * step, 448)
    else:
        scale = 2.0 ** np.clip(np.ceil(np.log2(most)), low, high)
    values = rows / np.repeat(scale, node.block_size, axis=-1)[..., :size]
    count, blocks = scale.shape[1:]
    m, n = -(-count // 128) * 128, -(-blocks // 4) * 4
    flat = np.full((len(scale), m * n), 2.0**-127 if node.block_size == 32 else 0.0)
    i, j = np.indices((count, blocks))
    tile = (i // 128) * (n // 4) + j // 4
    flat[:, tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4] = scale
    shape = (m, n) if node.axis == 2 else (n, m)
    values = values if node.axis == 2 else np.swapaxes(values, 1, 2)
    return values, flat.reshape(-1, *shape)


def _block_scale_dequantize(node, input, descale):
    axis, block = (-1 if node.block_size[0] == 1 else -2), max(node.block_size)
    each = oracle_attention.scales_of_blocks(descale[:, None], (1, *input.shape), axis, block)
    return input * each[:, 0]


def _groups(offsets, rows, experts):
    """The expert and the rows of each group."""
    starts = np.maximum.accumulate([0, *np.clip(np.ravel(offsets)[1:], 0, rows)]).astype(int)
    if experts == 1 or len(starts) % experts:
        *starts, end = starts
    else:
        end = rows
    ends = [*starts[1:], end]
    for i, (start, stop) in enumerate(zip(starts, ends, strict=True)):
        yield i % experts, slice(start, stop)


def _grouped(node, token, weight, first_token_offset, token_index=None, token_ks=None):
    rows, index = token[0], None if token_index is None else np.ravel(token_index).astype(int)
    if node.mode == "GATHER":
        rows = rows[np.clip(index, 0, len(rows) - 1)]
    product, place = np.zeros((1, len(rows), weight.shape[2])), np.arange(len(rows))
    if node.mode == "SCATTER":
        slot = np.clip(np.ravel(token_ks).astype(int), 0, node.top_k - 1)
        place = np.clip(index, 0, len(rows) // node.top_k - 1) * node.top_k + slot
    for expert, own in _groups(first_token_offset, len(rows), len(weight)):
        product[0, place[own]] = rows[own] @ weight[expert]
    return product


def _grouped_bwd(node, doutput, token, first_token_offset):
    shape = node.out_dims or (len(first_token_offset), token.shape[2], doutput.shape[2])
    result = np.zeros(shape)
    for expert, own in _groups(first_token_offset, token.shape[1], shape[0]):
        result[expert] += token[0, own].T @ doutput[0, own]
    return result


OPERATIONS = {
    "block_scale_quantize": _block_scale_quantize,
    "block_scale_dequantize": _block_scale_dequantize,
    **oracle_shapes.OPERATIONS,
    "matmul": lambda node, A, B: A @ B,
    "moe_grouped_matmul": _grouped,
    "moe_grouped_matmul_bwd": _grouped_bwd,
    "bias": lambda node, input, bias: input + bias,
    "add": lambda node, a, b: a + b,
    "mul": lambda node, a, b: a * b,
    "sub": lambda node, a, b: a - b,
    "div": lambda node, a, b: a / b,
    "min": lambda node, input0, input1: np.minimum(input0, input1),
    "max": lambda node, input0, input1: np.maximum(input0, input1),
    "mod": lambda node, input0, input1: input0 - input1 * np.trunc(input0 / input1),
    "pow": lambda node, input0, input1: input0**input1,
    "add_square": lambda node, a, b: a + b**2,
    "scale": lambda node, input, scale: input * scale,
    "identity": lambda node, input: input,
    "abs": lambda node, input: np.where(input < 0, -input, input),
    "neg": lambda node, input: 0.0 - input,
    "ceil": lambda node, input: -np.floor(-input),
    "floor": lambda node, input: np.floor(input),
    "cos": lambda node, input: np.cos(input),
    "sin": lambda node, input: np.sin(input),
    "tan": lambda node, input: np.sin(input) / np.cos(input),
    "erf": lambda node, input: _erf(input),
    "exp": lambda node, input: np.exp(input),
    "log": lambda node, input: np.log(input),
    "reciprocal": lambda node, input: input**-1.0,
    "rsqrt": lambda node, input: input**-0.5,
    "sqrt": lambda node, input: input**0.5,
    "relu_backward": lambda node, loss, input: _relu_backward(loss, input, node),
    "leaky_relu": lambda node, input: input * np.where(input > 0, 1.0, node.negative_slope),
    "leaky_relu_backward": lambda node, loss, input: (
        loss * np.where(input > 0, 1.0, node.negative_slope)
    ),
    "elu": lambda node, input: np.where(input > 0, input, np.expm1(input)),
    "elu_backward": lambda node, loss, input: loss * np.where(input > 0, 1.0, np.exp(input)),
    "gelu": lambda node, input: input * _distribution(input),
    "gelu_backward": lambda node, loss, input: (
        loss * (_distribution(input) + input * np.exp(-(input**2) / 2) / np.sqrt(2 * np.pi))
    ),
    "gelu_approx_tanh_backward": lambda node, loss, input: loss * _gelu_approx_tanh_backward(input),
    "sigmoid_backward": lambda node, loss, input: loss * _sigmoid(input) * _sigmoid(-input),
    "softplus": lambda node, input: np.log1p(np.exp(input)),
    "softplus_backward": lambda node, loss, input: loss * _sigmoid(input),
    "swish_backward": lambda node, loss, input: (
        loss * _swish_backward(input, node.swish_beta or 1.0)
    ),
    "tanh": lambda node, input: np.tanh(input),
    "tanh_backward": lambda node, loss, input: loss / np.cosh(input) ** 2,
    "cmp_eq": lambda node, input, comparison: input == comparison,
    "cmp_neq": lambda node, input, comparison: input != comparison,
    "cmp_gt": lambda node, input, comparison: input > comparison,
    "cmp_ge": lambda node, input, comparison: input >= comparison,
    "cmp_lt": lambda node, input, comparison: input < comparison,
    "cmp_le": lambda node, input, comparison: input <= comparison,
    "logical_and": lambda node, a, b: a * b != 0,
    "logical_or": lambda node, a, b: a + b != 0,
    "logical_not": lambda node, input: input == 0,
    "binary_select": lambda node, input0, input1, mask: np.where(mask != 0, input0, input1),
    "gen_index": lambda node, input: np.indices(input.shape)[node.axis],
    "relu": lambda node, input: _relu(input, node),
    "relu_mask": lambda node, input: (np.maximum(input, 0), np.packbits(input > 0, **_BITS)),
    "masked": lambda node, input, mask: input * np.unpackbits(mask.astype(np.uint8), **_BITS),
    "gelu_approx_tanh": lambda node, input: (
        0.5 * input * (1 + np.tanh(np.sqrt(2 / np.pi) * (input + 0.044715 * input**3)))
    ),
    "sigmoid": lambda node, input: _sigmoid(input),
    "swish": lambda node, input: input * _sigmoid((node.swish_beta or 1.0) * input),
    "reduction": lambda node, input: _reduction(input, node),
    **oracle_norms.OPERATIONS,
    **oracle_attention.OPERATIONS,
}


def evaluate(spec, operands, store=lambda value, tensor: value):
    """The outputs of a spec in float64, without any rounding unless ``store`` does it."""
    values = dict(zip(spec.inputs, (np.asarray(x, np.float64) for x in operands), strict=True))
    for constant in spec.constants:
        values[constant.name] = np.full(constant.shape, constant.value)
    for call in spec.calls:
        ports = {port: values[name] for port, name in call.inputs}
        exact = OPERATIONS[call.node.method](call.node, **ports)
        results = exact if isinstance(exact, tuple) else (exact,)
        for (_, name), result in zip(call.outputs, results, strict=True):
            assert result.shape == spec.tensor(name).shape
            values[name] = store(np.asarray(result, np.float64), spec.tensor(name))
    return [values[name] for name in spec.outputs]


def stored(x, dtype):
    """As an array of this dtype has it: integers to the nearest even; these and float8 saturate."""
    if jnp.issubdtype(jnp.dtype(dtype), jnp.integer):
        x = np.clip(np.rint(x), jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    if dtype.startswith("float8"):
        x = np.clip(x, float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max))
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(jnp.dtype(dtype))


def rounded(spec, operands):
    """The same with each value rounded to its tensor's dtype, as the spec states it."""
    return evaluate(spec, operands, lambda x, t: stored(x, t.dtype).astype(np.float64))


# Errors of a computation in float32, relative: accumulated products, exp and tanh; on a GPU
# float32 operands of a product may be cut to TF32's 10 bits (7.7e-4 seen with cuDNN 9.19); the
# tensor cores of SM90 keep fewer bits of a float8 product (1e-4 seen); cuDNN's tan loses digits
# beside its poles (7e-3 seen); an accumulator of float16 has 11 bits (9e-4 seen over 576 terms).
FLOAT32, TF32, FLOAT8, TAN, HALF_ACCUMULATOR = 1e-5, 1e-3, 3e-4, 2e-2, 3e-3


def tolerance(spec, operands, on_gpu):
    """For each output: a small factor of what rounding as the spec says costs, and float32's."""
    anchored = [t for call in spec.calls if call.node.anchor.product for _, t in call.inputs]
    dtypes = {spec.tensor(name).dtype for name in anchored} if on_gpu else set()
    arithmetic = max(
        FLOAT32,
        TF32 if "float32" in dtypes and spec.options.precision == "default" else 0,
        FLOAT8 if any(dtype.startswith("float8") for dtype in dtypes) else 0,
        TAN if on_gpu and any(c.node.method == "tan" for c in spec.calls) else 0,
        oracle_attention.second_product(spec),
        HALF_ACCUMULATOR if any(c.node.compute_data_type == "float16" for c in spec.calls) else 0,
    )
    exact = evaluate(spec, operands)
    # Attention's weights are rounded too: 1.31 seen. XLA's form rounds an epilogue at each step.
    factor = 2.5 if on_gpu and any(call.node.anchor.product for call in spec.calls) else 1.4
    return [
        factor * distance(r, e) + arithmetic
        for r, e in zip(rounded(spec, operands), exact, strict=True)
    ]


def distance(got, want):
    """Relative difference in the Frobenius norm."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / (np.linalg.norm(want) + 1e-30)


def check_outputs(spec, operands, outputs, on_gpu):
    """Compare arrays with the spec's exact outputs; every element must be finite."""
    limits = tolerance(spec, operands, on_gpu)
    for got, want, limit in zip(outputs, evaluate(spec, operands), limits, strict=True):
        got = np.asarray(got, np.float64)
        assert got.shape == want.shape
        assert np.isfinite(got).all()
        error = distance(got, want)
        assert error <= limit, f"relative error {error:.2e}, at most {limit:.2e}"
