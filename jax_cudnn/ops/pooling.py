"""Pooling: cuDNN's Python frontend does not offer it, so it runs in XLA."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError
from .._core.graph.builder import register
from .._core.graph.dims import Dims, Shape
from .._core.graph.dtypes import FLOATS, arithmetic
from .._core.graph.node import Fold, Node, choice, frozen, int_tuple, matched
from .._core.graph.planned import XLA_ONLY, About, Example, Work
from .._core.graph.promotion import result_dtype
from .._core.rules import Tensor, Tensors
from .transformations import along

MODES = ("MAXPOOL", "AVGPOOL_INCLUDE_PADDING", "AVGPOOL_EXCLUDE_PADDING")


@register
@frozen
class Resample(Node):
    """Pooling over windows of the spatial dimensions.

    ``Y[n,c,y]`` is the maximum or the mean of ``input[n, c, stride*y + w - pre_padding]`` over
    ``w`` in the window. Elements beyond the input count as -inf in MAXPOOL, as 0 in
    AVGPOOL_INCLUDE_PADDING, and not at all in AVGPOOL_EXCLUDE_PADDING. A spatial dimension of Y
    has the size ``(x + pre_padding + post_padding - window) // stride + 1``.

    Args:
        input: (N, C, *spatial).
        resample_mode: "MAXPOOL", "AVGPOOL_INCLUDE_PADDING" or "AVGPOOL_EXCLUDE_PADDING".
        window: the window size, one integer per spatial dimension.
        stride: one integer per spatial dimension; default 1.
        pre_padding, post_padding: elements before and after, fewer than the window; default 0.

    Means accumulate in float32; the maximum is exact and keeps NaN. Runs in XLA, between the
    plans before and after it. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_RESAMPLE_FWD_DESCRIPTOR``.
    """

    method = "resample"
    ports = Dims.parse("input: n c *x -> Y: n c *y")
    about = About(
        requires="runs in XLA: nvidia-cudnn-frontend offers it in C++ only",
        jax_names=("reduce_window", "max_pool", "avg_pool"),
    )
    dtypes = FLOATS
    xla_only = XLA_ONLY
    examples = (
        Example(
            {"input": (8, 64, 28, 28)},
            "bfloat16",
            {"resample_mode": "MAXPOOL", "window": [3, 3], "stride": [2, 2], "pre_padding": [1, 1]},
            alone=False,
        ),
        Example(
            {"input": (4, 16, 15, 17)},
            "float32",
            {"resample_mode": "AVGPOOL_EXCLUDE_PADDING", "window": [3, 2], "post_padding": [1, 1]},
            alone=False,
        ),
        Example(
            {"input": (2, 8, 30)},
            "float16",
            {"resample_mode": "AVGPOOL_INCLUDE_PADDING", "window": [4], "pre_padding": [3]},
            alone=False,
        ),
    )

    resample_mode: str = choice(MODES)
    window: tuple[int, ...] = int_tuple(1)
    stride: tuple[int, ...] = int_tuple(1, default=())
    pre_padding: tuple[int, ...] = int_tuple(0, default=())
    post_padding: tuple[int, ...] = int_tuple(0, default=())

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        return along(self, "n c", batched, tensors)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        n, c, *x = inputs["input"].shape
        y = []
        for axis, (size, (window, stride, before, after)) in enumerate(
            zip(x, self._spatial(len(x)), strict=True)
        ):
            padded = size + before + after
            if max(before, after) >= window or (isinstance(padded, int) and padded < window):
                raise GraphError(
                    f"the window does not fit spatial dimension {axis}",
                    expected=f"padding less than the window, which is at most the padded {padded}",
                    got=f"window {window}, size {size}, padding {before} + {after}",
                    why="a window that contains only padding has no maximum or mean",
                )
            y.append((padded - window) // stride + 1)
        return {"Y": ((n, c, *y), result_dtype(inputs))}

    def work(self, tensors: Tensors) -> Work:
        return Work(math.prod((*tensors["Y"].shape, *self.window)), self.method)

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        spatial = self._spatial(input.ndim - 2)
        window = (1, 1, *(w for w, _, _, _ in spatial))
        stride = (1, 1, *(s for _, s, _, _ in spatial))
        padding = ((0, 0), (0, 0), *((b, a) for _, _, b, a in spatial))
        if self.resample_mode == "MAXPOOL":
            lowest = np.array(-np.inf, input.dtype)  # a constant, so that JAX recognizes a maximum
            out = jax.lax.reduce_window(input, lowest, jax.lax.max, window, stride, padding)
            return (out,)

        def total(x: jax.Array) -> jax.Array:
            return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, stride, padding)

        if self.resample_mode == "AVGPOOL_INCLUDE_PADDING":
            return (total(input.astype(arithmetic(self.compute_data_type))) / math.prod(window),)
        ones = jnp.ones((1, 1, *input.shape[2:]), arithmetic(self.compute_data_type))
        return (total(input.astype(arithmetic(self.compute_data_type))) / total(ones),)

    def _spatial(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Window, stride and padding per spatial dimension; checks their rank."""
        columns = []
        for name, default in (
            ("window", 1),
            ("stride", 1),
            ("pre_padding", 0),
            ("post_padding", 0),
        ):
            value = getattr(self, name) or (default,) * rank
            if len(value) != rank or not rank or not self.window:
                raise GraphError(
                    f"{name} has the wrong length",
                    expected=f"{rank} integers, one per spatial dimension of (N, C, *spatial)",
                    got=f"{name}={list(getattr(self, name))}",
                )
            columns.append(value)
        return list(zip(*columns, strict=True))
