"""What graphs mean, in NumPy float64: written apart from the nodes' own references."""

import jax.numpy as jnp
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def _conv(image, weight, node):
    rank = image.ndim - 2
    pre = node.pre_padding or (0,) * rank
    post = node.post_padding or (0,) * rank
    stride = node.stride or (1,) * rank
    dilation = node.dilation or (1,) * rank
    if node.convolution_mode == "CONVOLUTION":
        weight = weight[(slice(None), slice(None), *[slice(None, None, -1)] * rank)]
    image = np.pad(image, [(0, 0), (0, 0), *zip(pre, post, strict=True)])
    window = [d * (r - 1) + 1 for d, r in zip(dilation, weight.shape[2:], strict=True)]
    axes = tuple(range(2, 2 + rank))
    views = sliding_window_view(image, window, axis=axes)
    views = views[(slice(None), slice(None), *(slice(None, None, s) for s in stride))]
    views = views[(..., *(slice(None, None, d) for d in dilation))]
    groups = image.shape[1] // weight.shape[1]
    out = []
    for x, w in zip(np.split(views, groups, 1), np.split(weight, groups, 0), strict=True):
        taps = tuple(range(2 + rank, 2 + 2 * rank))
        out.append(np.tensordot(x, w, axes=((1, *taps), (1, *axes))))
    return np.moveaxis(np.concatenate(out, -1), -1, 1)


def _relu(x, node):
    low = node.lower_clip or 0.0
    slope = node.negative_slope or 0.0
    y = np.where(x <= low, low + slope * (x - low), x)
    return y if node.upper_clip is None else np.minimum(y, node.upper_clip)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _reduction(x, node):
    axes = tuple(i for i, (o, s) in enumerate(zip(node.out_dims, x.shape, strict=True)) if o != s)
    return x.sum(axis=axes, keepdims=True)


OPERATIONS = {
    "conv_fprop": lambda node, image, weight: _conv(image, weight, node),
    "matmul": lambda node, A, B: A @ B,
    "bias": lambda node, input, bias: input + bias,
    "add": lambda node, a, b: a + b,
    "mul": lambda node, a, b: a * b,
    "relu": lambda node, input: _relu(input, node),
    "gelu_approx_tanh": lambda node, input: (
        0.5 * input * (1 + np.tanh(np.sqrt(2 / np.pi) * (input + 0.044715 * input**3)))
    ),
    "sigmoid": lambda node, input: _sigmoid(input),
    "swish": lambda node, input: input * _sigmoid((node.swish_beta or 1.0) * input),
    "reduction": lambda node, input: _reduction(input, node),
}


def evaluate(spec, operands, store=lambda value, tensor: value):
    """The outputs of a spec in float64, without any rounding unless ``store`` does it."""
    values = dict(zip(spec.inputs, (np.asarray(x, np.float64) for x in operands), strict=True))
    for constant in spec.constants:
        values[constant.name] = np.full(constant.shape, constant.value)
    for call in spec.calls:
        ports = {port: values[name] for port, name in call.inputs}
        ((_, name),) = call.outputs
        exact = OPERATIONS[call.node.method](call.node, **ports)
        assert exact.shape == spec.tensor(name).shape
        values[name] = store(exact, spec.tensor(name))
    return [values[name] for name in spec.outputs]


def rounded(spec, operands):
    """The same with each value rounded to its tensor's dtype, as the spec states it."""

    def store(value, tensor):
        return value.astype(jnp.dtype(tensor.dtype)).astype(np.float64)

    return evaluate(spec, operands, store)


# Errors of a computation in float32, relative: accumulated products, exp and tanh; on a GPU
# float32 operands of a product may be cut to TF32's 10 bits (7.7e-4 seen with cuDNN 9.19).
FLOAT32 = 3e-6
TF32 = 1e-3


def tolerance(spec, operands, on_gpu):
    """For each output: a small factor of what rounding as the spec says costs, and float32's."""
    anchored = [t for call in spec.calls if call.node.anchor for _, t in call.inputs]
    tf32 = on_gpu and any(spec.tensor(name).dtype == "float32" for name in anchored)
    exact = evaluate(spec, operands)
    return [
        1.3 * distance(r, e) + (TF32 if tf32 else FLOAT32)
        for r, e in zip(rounded(spec, operands), exact, strict=True)
    ]


def distance(got, want):
    """Relative difference in the Frobenius norm."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / (np.linalg.norm(want) + 1e-30)


def check_outputs(spec, operands, outputs, on_gpu):
    """Compare arrays with the spec's exact outputs; every element must be finite."""
    errors = []
    limits = tolerance(spec, operands, on_gpu)
    for got, want, limit in zip(outputs, evaluate(spec, operands), limits, strict=True):
        got = np.asarray(got, np.float64)
        assert got.shape == want.shape
        assert np.isfinite(got).all()
        errors.append(float(distance(got, want)))
        assert errors[-1] <= limit, f"relative error {errors[-1]:.2e}, at most {limit:.2e}"
    return errors
