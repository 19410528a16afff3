"""Convolutions and their gradients, pooling and movement in NumPy float64, for oracle.py."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def _spatial(node, rank):
    """Padding before and after, stride, dilation."""
    usual = (node.pre_padding, 0), (node.post_padding, 0), (node.stride, 1), (node.dilation, 1)
    return [given or (n,) * rank for given, n in usual]


def _terms(node, weight, channels, sizes):
    """Of each group and element of a weight: itself, and what it joins of image and result."""
    k, i, *window = weight
    _, _, stride, dilation = _spatial(node, len(window))
    for tap in np.ndindex(*window):
        first = [r * d for r, d in zip(tap, dilation, strict=True)]
        where = tuple(
            slice(b, b + s * (y - 1) + 1, s) for b, s, y in zip(first, stride, sizes, strict=True)
        )
        if node.convolution_mode == "CONVOLUTION":
            tap = tuple(size - 1 - r for r, size in zip(tap, window, strict=True))
        per = k * i // channels
        for g in range(channels // i):
            ks, cs = slice(g * per, (g + 1) * per), slice(g * i, (g + 1) * i)
            yield (ks, slice(None), *tap), (slice(None), cs, *where), (slice(None), ks)


def fprop(image, weight, node):
    pre, post, stride, dilation = _spatial(node, image.ndim - 2)
    image = np.pad(image, [(0, 0), (0, 0), *zip(pre, post, strict=True)])
    sizes = zip(image.shape[2:], weight.shape[2:], stride, dilation, strict=True)
    sizes = [(x - d * (r - 1) - 1) // s + 1 for x, r, s, d in sizes]
    result = np.zeros((len(image), len(weight), *sizes))
    for w, x, y in _terms(node, weight.shape, image.shape[1], sizes):
        result[y] += np.moveaxis(np.tensordot(image[x], weight[w], axes=(1, 1)), -1, 1)
    return result


def dgrad(loss, filter, node):
    _, i, *r = filter.shape
    pre, post, stride, dilation = _spatial(node, len(r))
    x = [
        (n - 1) * s + d * (w - 1) + 1 - b - a
        for n, s, d, w, b, a in zip(loss.shape[2:], stride, dilation, r, pre, post, strict=True)
    ]
    n, c, *x = node.out_dims or (len(loss), i, *x)
    image = np.zeros((n, c, *(s + b + a for s, b, a in zip(x, pre, post, strict=True))))
    for w, here, y in _terms(node, filter.shape, c, loss.shape[2:]):
        image[here] += np.moveaxis(np.tensordot(loss[y], filter[w], axes=(1, 0)), -1, 1)
    inner = (slice(b, b + s) for b, s in zip(pre, x, strict=True))
    return image[(slice(None), slice(None), *inner)]


def wgrad(image, loss, node):
    k, c, rank = loss.shape[1], image.shape[1], loss.ndim - 2
    pre, post, stride, dilation = _spatial(node, rank)
    image = np.pad(image, [(0, 0), (0, 0), *zip(pre, post, strict=True)])
    r = [
        (x - (y - 1) * s - 1) // d + 1
        for x, y, s, d in zip(image.shape[2:], loss.shape[2:], stride, dilation, strict=True)
    ]
    weight = np.zeros(node.out_dims or (k, c, *r))
    rest = (0, *range(2, rank + 2))
    for w, x, y in _terms(node, weight.shape, c, loss.shape[2:]):
        weight[w] = np.tensordot(loss[y], image[x], axes=(rest, rest))
    return weight


def pool(x, node):
    rank = x.ndim - 2
    before, after = (pads or (0,) * rank for pads in (node.pre_padding, node.post_padding))
    beyond = {"MAXPOOL": -np.inf, "AVGPOOL_INCLUDE_PADDING": 0.0}.get(node.resample_mode, np.nan)
    pads = [(0, 0), (0, 0), *zip(before, after, strict=True)]
    axes = tuple(range(2, 2 + rank))
    x = sliding_window_view(np.pad(x, pads, constant_values=beyond), node.window, axis=axes)
    x = x[(slice(None), slice(None), *(slice(None, None, s) for s in node.stride or (1,) * rank))]
    reduce = np.max if node.resample_mode == "MAXPOOL" else np.nanmean
    return reduce(x, axis=tuple(range(-rank, 0)))


def genstats(x):
    axes = (0, *range(2, x.ndim))
    return x.sum(axis=axes, keepdims=True), np.square(x).sum(axis=axes, keepdims=True)


def take(x, node):
    for axis, bounds in enumerate(node.slices):
        x = np.take(x, np.arange(x.shape[axis])[slice(*bounds)], axis)
    return x


def join(parts, node):
    axis = node.axis % parts[0].ndim
    moved = [row for part in parts for row in np.moveaxis(part, axis, 0)]
    return np.moveaxis(np.stack(moved), 0, axis)


OPERATIONS = {
    "conv_fprop": lambda node, image, weight: fprop(image, weight, node),
    "conv_dgrad": lambda node, loss, filter: dgrad(loss, filter, node),
    "conv_wgrad": lambda node, image, loss: wgrad(image, loss, node),
    "resample": lambda node, input: pool(input, node),
    "genstats": lambda node, input: genstats(input),
    "reshape": lambda node, input: np.fromiter(input.flat, float).reshape(node.out_dims),
    "broadcast_to": lambda node, input: input + np.zeros(node.out_dims),
    "transpose": lambda node, input: np.einsum(input, range(input.ndim), node.permutation),
    "slice": lambda node, input: take(input, node),
    "concatenate": lambda node, **inputs: join(list(inputs.values()), node),
}
