"""Operations that only move elements: reshape, transpose and broadcast_to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from .._core.errors import GraphError
from .._core.graph.builder import register
from .._core.graph.dims import Dims, Shape
from .._core.graph.dtypes import E8M0, FP4, NUMBERS
from .._core.graph.node import LEAD, Algebra, Fold, Node, choice, frozen, int_tuple, matched
from .._core.graph.planned import XLA_ONLY, About, Example
from .._core.rules import Derivation, Tensor, Tensors, Values
from .._core.transforms.derivation import Vocabulary, register_vocabulary
from .pointwise.arithmetic import add
from .pointwise.elementary import Identity
from .reduction import Reduction
from .transformations import anywhere, grown


class Movement(Node):
    """An operation on elements of any type that runs in XLA."""

    algebra = Algebra(moves=True)
    xla_only = XLA_ONLY
    dtypes = (*NUMBERS, E8M0, FP4, "bool")
    about = About(
        requires="runs in XLA, in the same program: cuDNN 9.22 to 9.28 has no engine for it on "
        "Hopper; older versions do not have the operation",
    )


RESHAPE_MODES = ("VIEW_ONLY", "LOGICAL")


@register
@frozen
class Reshape(Movement):
    """Changes the shape and keeps the elements in row-major order, as ``jnp.reshape``.

    Args:
        input: any shape.
        reshape_mode: "VIEW_ONLY" or "LOGICAL". Both give the same values; they differ only in the
            memory layout.
        out_dims: the new shape, with the same number of elements. ``.set_dim([...])`` on the
            result is equivalent, as in pygraph.

    Any element type. Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR``.
    """

    method = "reshape"
    ports = Dims.parse("input: *x -> OUT_0: *y")
    about = Movement.about._replace(jax_names=("reshape", "ravel", "expand_dims", "squeeze"))
    examples = (
        Example.of("input: 4 6 8", out_dims=[4, 48, 1]),
        Example.of("input: 2 3 4 5", "float32", reshape_mode="LOGICAL", out_dims=[6, 20]),
    )

    reshape_mode: str = choice(RESHAPE_MODES, default="VIEW_ONLY")
    out_dims: tuple[int, ...] | None = int_tuple(default=None, kw_only=True)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        source = inputs["input"]
        shape = source.shape if self.out_dims is None else self.out_dims
        if math.prod(shape) != math.prod(source.shape):
            raise GraphError(
                "the new shape has a different number of elements",
                expected=f"{math.prod(source.shape)} elements, as {list(source.shape)} has",
                got=f"out_dims={list(shape)}, {math.prod(shape)} elements",
            )
        return {"OUT_0": (shape, source.dtype)}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (input if self.out_dims is None else input.reshape(self.out_dims),)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        return {"input": g.reshaped(cotangents["OUT_0"], tensors["input"].shape)}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        node = replace(self, out_dims=(size, *tensors["OUT_0"].shape))
        yield Fold(dict.fromkeys(tensors, LEAD), node)


@register
@frozen
class Transpose(Movement):
    """Permutes dimensions: dimension ``i`` of the output is ``permutation[i]`` of the input.

    Args:
        input: any shape.
        permutation: the index of each dimension, once.

    Any element type. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_TRANSPOSE_DESCRIPTOR``.
    """

    method = "transpose"
    ports = Dims.parse("input: *x -> OUT_0: *y")
    about = Movement.about._replace(jax_names=("transpose", "swapaxes", "moveaxis", "permute_dims"))
    examples = (
        Example.of("input: 4 6 8", permutation=[0, 2, 1]),
        Example.of("input: 2 3 4 5", "float32", permutation=[2, 0, 3, 1]),
    )

    permutation: tuple[int, ...] = int_tuple()

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        source = inputs["input"]
        if sorted(self.permutation) != list(range(len(source.shape))):
            raise GraphError(
                "permutation is not valid",
                expected=f"each of 0 to {len(source.shape) - 1} once",
                got=f"permutation={list(self.permutation)}",
            )
        return {"OUT_0": (tuple(source.shape[axis] for axis in self.permutation), source.dtype)}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.transpose(input, self.permutation),)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        back = sorted(range(len(self.permutation)), key=lambda axis: self.permutation[axis])
        return {"input": g.transposed(cotangents["OUT_0"], back)}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        for out, axis in enumerate(self.permutation):
            yield Fold({"input": axis, "OUT_0": out})
        moved = replace(self, permutation=(0, *(axis + 1 for axis in self.permutation)))
        yield Fold(dict.fromkeys(tensors, LEAD), moved)


@register
@frozen
class BroadcastTo(Movement):
    """Repeats the elements of dimensions of size 1, as ``jnp.broadcast_to`` at equal rank.

    Args:
        input: any shape.
        out_dims: the new shape, with the rank of ``input``; only dimensions of size 1 may change.

    Any element type. Runs in XLA, between the plans before and after it. Element-wise operations
    broadcast without it. Source: ``jax.numpy.broadcast_to``.
    """

    method = "broadcast_to"
    ports = Dims.parse("input: *x -> OUT_0: *y")
    about = About(
        requires="runs in XLA: cuDNN graphs have no such operation",
        jax_names=("broadcast_to", "broadcast_in_dim", "tile", "repeat"),
    )
    algebra = Algebra(moves=True, recomputed=True)
    examples = (
        Example.of("input: 4 1 8", out_dims=[4, 6, 8]),
        Example.of("input: 3 1", "float32", out_dims=[3, 5]),
    )

    out_dims: tuple[int, ...] = int_tuple()

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        source = inputs["input"]
        fits = len(source.shape) == len(self.out_dims)
        if not fits or any(
            size not in (1, out) for size, out in zip(source.shape, self.out_dims, strict=True)
        ):
            raise GraphError(
                "the new shape does not fit",
                expected=f"the dimensions of {list(source.shape)}, where 1 may become any size",
                got=f"out_dims={list(self.out_dims)}",
                fix="to add dimensions, reshape first",
            )
        return {"OUT_0": (self.out_dims, source.dtype)}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.broadcast_to(input, self.out_dims),)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        return {"input": g.reduced(cotangents["OUT_0"], tensors["input"].shape)}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        sizes = zip(tensors["input"].shape, self.out_dims, strict=True)
        kept = (axis for axis, (old, new) in enumerate(sizes) if old == new)
        return anywhere(tensors, kept, lambda axis: BroadcastTo(grown(self.out_dims, axis, size)))


register_vocabulary(
    Vocabulary(
        add=add(),
        cast=Identity(),
        reshape=lambda shape: Reshape(out_dims=shape),
        transpose=Transpose,
        broadcast=BroadcastTo,
        sum=lambda shape: Reduction("ADD", out_dims=shape),
        moves=(Reshape, Transpose),
        repeats=(BroadcastTo,),
    )
)
