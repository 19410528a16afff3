"""What normalizations mean, in NumPy float64: one row, channel or image after the other."""

import numpy as np


def _rows(scale, first=0):
    return tuple(i for i in range(first, scale.ndim) if scale.shape[i] != 1)


def _axes(kind, scale):
    spatial = tuple(range(2, scale.ndim))
    return {
        "rmsnorm": _rows(scale),
        "layernorm": _rows(scale),
        "adalayernorm": _rows(scale, 1),
        "instancenorm": spatial,
        "batchnorm": (0, *spatial),
    }[kind]


def _statistics(kind, x, scale, epsilon):
    axes = _axes(kind, scale)
    if kind == "rmsnorm":
        return np.zeros_like(x), 1 / np.sqrt(np.mean(x**2, axes, keepdims=True) + epsilon)
    mean = np.mean(x, axes, keepdims=True)
    return mean, 1 / np.sqrt(np.var(x, axes, keepdims=True) + epsilon)


def forward(kind):
    def run(node, input, scale, epsilon, bias=0.0):
        mean, inv_var = _statistics(kind, input, scale, epsilon)
        y = (input - mean) * inv_var * scale + bias
        given = {"Y": y, "mean": mean, "inv_var": inv_var}
        return tuple(given[port] for port in node.results)

    return run


def batchnorm(node, input, scale, bias, in_running_mean, in_running_var, epsilon, momentum):
    axes = _axes("batchnorm", scale)
    mean, inv_var = _statistics("batchnorm", input, scale, epsilon)
    y = (input - mean) * inv_var * scale + bias
    count = input.size // scale.size
    unbiased = np.var(input, axes, keepdims=True) * count / max(count - 1, 1)
    running = (in_running_mean, mean), (in_running_var, unbiased)
    return y, mean, inv_var, *((1 - momentum) * old + momentum * new for old, new in running)


def backward(kind):
    """The transposed Jacobian of a row's xhat, as a matrix, times the row's gradient."""

    def run(node, grad, input, scale, inv_variance, mean=0.0):
        axes = _axes(kind, scale)
        xhat = (input - mean) * inv_variance
        keep = [i for i in range(input.ndim) if i not in axes]
        order = (*keep, *axes)
        size = int(np.prod([input.shape[i] for i in axes]))
        flat = np.transpose(xhat, order).reshape(-1, size)
        slope = np.transpose(grad * scale, order).reshape(-1, size)
        rows = np.zeros_like(slope)
        for i, (row, s) in enumerate(zip(flat, slope, strict=True)):
            jacobian = np.eye(size) - np.outer(row, row) / size
            if kind != "rmsnorm":
                jacobian -= 1 / size
            rows[i] = jacobian.T @ s
        back = np.transpose(rows.reshape([input.shape[i] for i in order]), np.argsort(order))
        shared = tuple(i for i, n in enumerate(scale.shape) if n == 1)
        given = {
            "DX": back * inv_variance,
            "DScale": np.sum(grad * xhat, shared, keepdims=True),
            "DBias": np.sum(grad, shared, keepdims=True),
        }
        return tuple(given[port] for port in node.results)

    return run


KINDS = ("rmsnorm", "layernorm", "adalayernorm", "instancenorm")
OPERATIONS = {
    **{kind: forward(kind) for kind in KINDS},
    **{f"{kind}_backward": backward(kind) for kind in (*KINDS, "batchnorm")},
    "batchnorm": batchnorm,
    "batchnorm_inference": lambda node, input, mean, inv_variance, scale, bias: (
        (input - mean) * inv_variance * scale + bias
    ),
}
