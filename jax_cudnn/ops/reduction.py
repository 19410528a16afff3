"""Reductions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError
from .._core.graph.builder import register
from .._core.graph.dims import Dims, Shape
from .._core.graph.dtypes import FLOATS, FP8, arithmetic, is_floating, itemsize
from .._core.graph.node import Algebra, Fold, Node, choice, frozen, int_tuple, matched
from .._core.graph.planned import About, Example, Work
from .._core.rules import Derivation, Handles, Tensor, Tensors, Values
from .transformations import anywhere, grown


def _over_magnitudes(reduce: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, **axes: reduce(jnp.abs(x), **axes)


def _norm2(x: jax.Array, **axes: Any) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x, **axes))


def _product_of_nonzeros(x: jax.Array, **axes: Any) -> jax.Array:
    return jnp.prod(jnp.where(x == 0, 1, x), **axes)


def _largest(x: jax.Array, **axes: Any) -> jax.Array:
    """cuDNN ignores NaN; jnp.max would return it."""
    return jnp.max(jnp.where(jnp.isnan(x), -jnp.inf, x), **axes)


def _smallest(x: jax.Array, **axes: Any) -> jax.Array:
    return -_largest(-x, **axes)


def _largest_magnitude(x: jax.Array, **axes: Any) -> jax.Array:
    return jnp.max(jnp.where(jnp.isnan(x), 0.0, jnp.abs(x)), **axes)


IN_XLA = {
    "MIN": jnp.min,
    "MAX": jnp.max,
    "AMAX": _over_magnitudes(jnp.max),
}
"""Modes without the test of each element for NaN, which costs XLA a third of its speed."""

MODES = {
    "ADD": jnp.sum,
    "MUL": jnp.prod,
    "MIN": _smallest,
    "MAX": _largest,
    "AMAX": _largest_magnitude,
    "AVG": jnp.mean,
    "NORM1": _over_magnitudes(jnp.sum),
    "NORM2": _norm2,
    "MUL_NO_ZEROS": _product_of_nonzeros,
}


@register
@frozen
class Reduction(Node):
    """Reduces ``input`` over the dimensions that are 1 in ``out_dims``.

    Args:
        input: any shape.
        mode: a string or a member of ``cudnn.reduction_mode``: "ADD" (sum), "MUL" (product),
            "MIN", "MAX", "AMAX" (largest magnitude; all three ignore NaN, except where XLA runs
            them on a GPU), "AVG" (mean),
            "NORM1" (sum of magnitudes), "NORM2" (root of the sum of squares), "MUL_NO_ZEROS"
            (product of the nonzero elements).
        out_dims: the shape of the output: the rank of the input, each dimension 1 or equal to that
            of the input; default all 1. ``.set_dim([...])`` on the result is equivalent, as in
            pygraph.

    The result is float32, the only type that cuDNN writes here. cuDNN has engines for ADD, MIN, MAX
    and AMAX, and for MUL after a convolution or matmul; other modes run in XLA.
    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_REDUCTION``.
    """

    method = "reduction"
    ports = Dims.parse("input: ... -> Y: ...")
    about = About(
        requires="it is the last node of a graph; alone in a graph it reduces the last dimension "
        "(C of NCHW), all but the last, or everything; cuDNN has engines for the modes ADD, MIN, "
        "MAX and AMAX, and for MUL after a convolution or matmul (for NORM1 reduce abs(x) with "
        "ADD; for AVG and NORM2 reduce x, or its square, with ADD, and divide or take the root in "
        "jnp)",
        jax_names=("sum", "reduce_sum", "max", "min", "amax", "amin", "mean", "prod"),
        rounding="cuDNN chooses the order of summation; MIN, MAX and AMAX ignore NaN, in XLA on a "
        "GPU not",
    )
    dtypes = (*FLOATS, *FP8, "int8", "uint8", "int32")
    examples = (
        Example.of("input: 8 64 28 28", mode="ADD", out_dims=[1, 64, 1, 1]),
        Example.of("input: 512 256", "float32", mode="ADD", out_dims=[512, 1]),
        Example.of("input: 4 96 128", mode="ADD", out_dims=[1, 1, 128]),
        Example.of("input: 8 32 14 14", "float16", mode="ADD", out_dims=[8, 1, 14, 14]),
        *(
            Example({"input": shape}, dtype, {"mode": mode, "out_dims": out})
            for mode in ("MIN", "MAX", "AMAX")
            for shape, dtype, out in (
                ((8, 64, 14, 14), "bfloat16", [1, 64, 1, 1]),
                ((512, 256), "float32", [512, 1]),
            )
        ),
        Example.of("input: 8 64 14 14", "float32", mode="AMAX", out_dims=[1, 1, 1, 1]),
        *(
            Example.of("input: 64 16", "float32", alone=False, mode=mode, out_dims=[64, 1])
            for mode in ("MUL", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS")
        ),
    )

    mode: str = choice(MODES, default="ADD")
    out_dims: tuple[int, ...] | None = int_tuple(1, default=None, kw_only=True)

    @property
    def algebra(self) -> Algebra:  # pyright: ignore[reportIncompatibleVariableOverride]
        of_shape = lambda node, shape: dataclasses.replace(node, out_dims=shape)  # noqa: E731
        return Algebra(sums=self.mode == "ADD", merged=of_shape)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        shape = inputs["input"].shape
        out = (1,) * len(shape) if self.out_dims is None else self.out_dims
        if len(out) != len(shape) or any(o not in (1, s) for o, s in zip(out, shape, strict=True)):
            raise GraphError(
                "the output shape of the reduction does not fit",
                expected=f"the rank of {list(shape)}, each dimension 1 or equal to it",
                got=f"out_dims={list(out)}",
            )
        return {"Y": (tuple(out), "float32")}

    def work(self, tensors: Tensors) -> Work:
        return Work(math.prod(tensors["input"].shape), f"reduction of {self._which(tensors)}")

    def _which(self, tensors: Tensors) -> str:
        input, output = tensors["input"], tensors["Y"]
        order = input.order or range(len(input.shape))
        # Whether each dimension is reduced, from the slowest in memory to the fastest.
        reduced = [output.shape[i] == 1 for i in order if input.shape[i] > 1]
        if all(reduced):
            return "everything"
        if reduced == sorted(reduced):
            return "rows"
        return "columns" if reduced == sorted(reduced, reverse=True) else "some dimensions"

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return self._reduced(MODES[self.mode], input)

    def xla(self, input: jax.Array) -> tuple[jax.Array, ...] | None:
        if self.mode not in IN_XLA or not is_floating(str(input.dtype)):
            return None
        if itemsize(input.dtype.name) != 2:  # of 16 bits one is chosen exactly
            input = input.astype(arithmetic(self.compute_data_type))
        return self._reduced(IN_XLA[self.mode], input)

    def _reduced(self, reduce: Callable[..., jax.Array], input: jax.Array) -> tuple[jax.Array, ...]:
        out = (1,) * input.ndim if self.out_dims is None else self.out_dims
        axes = tuple(i for i, (o, s) in enumerate(zip(out, input.shape, strict=True)) if o != s)
        return (reduce(input, axis=axes, keepdims=True),)

    def linear_in(self, ports: Collection[str]) -> bool:
        return self.mode in ("ADD", "AVG")

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        shape, out = tensors["input"].shape, cotangents["Y"]
        if self.mode == "AVG":
            if not all(isinstance(size, int) for size in shape):
                return super().transpose(g, cotangents, inputs, tensors)
            out = g.mul(out, math.prod(out.shape) / max(math.prod(shape), 1))
        return {"input": g.broadcast(out, shape)}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        sizes = zip(tensors["input"].shape, tensors["Y"].shape, strict=True)
        kept = (axis for axis, (old, new) in enumerate(sizes) if old == new)

        def node(axis: int) -> Node:
            return dataclasses.replace(self, out_dims=grown(tensors["Y"].shape, axis, size))

        return anywhere(tensors, kept, node)

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        import cudnn

        mode = getattr(cudnn.reduction_mode, self.mode)
        return (pygraph.reduction(tensors["input"], mode=mode, **common),)
