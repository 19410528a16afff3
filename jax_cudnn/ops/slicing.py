"""Slice and concatenate."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError, shown
from .._core.graph.builder import register
from .._core.graph.dims import Dims, Shape
from .._core.graph.dtypes import NUMBERS
from .._core.graph.node import LEAD, Algebra, Fold, Node, frozen, matched
from .._core.graph.planned import XLA_ONLY, About, Example, Seen
from .._core.rules import Derivation, Handles, Tensor, Tensors, Values
from .transformations import anywhere


@register
@frozen
class Slice(Node):
    """A slice of a tensor, as ``input[slices]`` with Python slices.

    Args:
        input: any shape.
        slices: one Python slice per dimension, with positive steps.

    Any element type. A plan reads the slice directly from the operand, without a copy.
    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_SLICE_DESCRIPTOR``.
    """

    method = "slice"
    ports = Dims.parse("input: *x -> OUT_0: *y")
    about = About(
        requires="cuDNN 9.22 or newer; it slices an operand of the graph, with steps of 1, for a "
        "matmul; otherwise slice arrays before the call, or results after it",
        jax_names=("slice", "dynamic_slice", "slice_in_dim"),
    )
    algebra = Algebra(moves=True)
    dtypes = (*NUMBERS, "bool")
    examples = (
        Example(
            {"input": (4, 16, 8)},
            "bfloat16",
            {"slices": [slice(0, 4), slice(2, 14, 3), slice(None)]},
            alone=False,
        ),
        Example(
            {"input": (2, 16, 8, 5)},
            "float32",
            {"slices": [slice(None), slice(8, None), slice(-6, -1), slice(1, 5, 2)]},
            alone=False,
        ),
    )

    slices: tuple[tuple[int | None, int | None, int | None], ...]
    """(start, stop, step): slices are not hashable before Python 3.12."""

    @classmethod
    def create(cls, slices: Sequence[slice]) -> Slice:
        try:
            bounds = tuple((s.start, s.stop, s.step) for s in slices)
            numbers = (
                tuple(None if n is None else operator.index(n) for n in bound) for bound in bounds
            )
            return cls(tuple(numbers))  # pyright: ignore[reportArgumentType]
        except (TypeError, AttributeError):
            raise GraphTypeError(
                "slices is not valid",
                expected="a list of Python slices of integers, one per dimension",
                got=shown(slices),
            ) from None

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        source = inputs["input"]
        if len(self.slices) != len(source.shape) or any((s[2] or 1) < 1 for s in self.slices):
            raise GraphError(
                "the slices do not fit",
                expected=f"{len(source.shape)} slices with steps of at least 1, one per dimension "
                f"of {list(source.shape)}",
                got=str([slice(*bounds) for bounds in self.slices]),
            )
        ranges = self._ranges(source.shape)
        return {"OUT_0": (tuple(len(part) for part in ranges), source.dtype)}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (input[tuple(slice(*bounds) for bounds in self.slices)],)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        shape, part = tensors["input"].shape, tensors["OUT_0"].shape
        whole, slices = ((None, None, None),), self.slices

        def node(axis: int) -> Node:
            if axis == LEAD:
                return Slice(whole + slices)
            return Slice(slices[:axis] + whole + slices[axis + 1 :])

        return anywhere(tensors, (i for i, n in enumerate(part) if n == shape[i]), node)

    def keywords(self) -> dict[str, Any]:
        return {"slices": [slice(*bounds) for bounds in self.slices]}

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        parts = self._ranges(tensors["input"].get_dim())
        slices = [slice(part.start, part.stop, part.step) for part in parts]
        return (pygraph.slice(**tensors, slices=slices, **common),)

    def layout(self, tensors: Tensors, order: Sequence[int]) -> Seen:
        return Seen(steps=[part.step for part in self._ranges(tensors["input"].shape)])

    def _ranges(self, dims: Sequence[int]) -> list[range]:
        """The indices per dimension; cuDNN's view may have more dimensions, of size 1."""
        missing = len(dims) - len(self.slices)
        bounds = [*self.slices[:2], *((None, None, None),) * missing, *self.slices[2:]]
        return [range(*slice(*b).indices(size)) for b, size in zip(bounds, dims, strict=True)]


@register
@frozen
class Concatenate(Node):
    """Concatenates the inputs along an axis, as ``jnp.concatenate``.

    Args:
        inputs: a list of tensors of equal rank and dtype that differ in size along ``axis`` only.
        axis: the dimension; negative values count from the end.
        in_place_index: accepted for compatibility with pygraph, where it names the input that
            shares memory with the result. JAX arrays are immutable, so the result is always new.

    Any element type. Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_CONCAT_DESCRIPTOR``.
    """

    method = "concatenate"
    ports = Dims.parse("*inputs: *x -> OUT_0: *y")
    about = About(
        requires="runs in XLA, in the same program: cuDNN accepts it only with a convolution, and "
        "then does not write the other operands' part of the result (measured: H200, cuDNN 9.19)",
        jax_names=("concatenate", "concat", "stack", "hstack", "vstack"),
    )
    algebra = Algebra(moves=True)
    dtypes = (*NUMBERS, "bool")
    xla_only = XLA_ONLY
    examples = (
        Example({"inputs": [(2, 3, 5), (2, 4, 5)]}, "bfloat16", {"axis": 1}),
        Example(
            {"inputs": [(2, 8, 4, 4), (2, 8, 4, 2), (2, 8, 4, 3)]},
            "float32",
            {"axis": -1, "in_place_index": 0},
        ),
    )

    axis: int
    in_place_index: int | None = None

    @classmethod
    def create(cls, axis: int, in_place_index: int | None = None) -> Concatenate:
        try:
            index = None if in_place_index is None else operator.index(in_place_index)
            return cls(operator.index(axis), index)
        except TypeError:
            raise GraphTypeError(
                "axis and in_place_index must be integers",
                got=f"axis={axis!r}, in_place_index={in_place_index!r}",
            ) from None

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        first = next(iter(inputs.values()))
        rank = len(first.shape)
        listed = ", ".join(f"{t.name}: {t.dtype}{list(t.shape)}" for t in inputs.values())
        if not -rank <= self.axis < rank:
            raise GraphError(
                "axis is out of range", expected=f"{-rank} to {rank - 1}", got=f"axis={self.axis}"
            )
        others = {(t.dtype, len(t.shape), self._others(t.shape)) for t in inputs.values()}
        if len(others) > 1:
            raise GraphError(
                "the inputs do not fit each other",
                expected=f"equal dtypes, and equal shapes except in dimension {self.axis}",
                got=listed,
            )
        if self.in_place_index is not None and not 0 <= self.in_place_index < len(inputs):
            raise GraphError(
                "in_place_index is out of range",
                expected=f"0 to {len(inputs) - 1}",
                got=f"in_place_index={self.in_place_index}",
            )
        shape = list(first.shape)
        shape[self.axis] = sum(tensor.shape[self.axis] for tensor in inputs.values())
        return {"OUT_0": (tuple(shape), first.dtype)}

    def reference(self, **inputs: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.concatenate(list(inputs.values()), self.axis),)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        out, passed, start = cotangents["OUT_0"], {}, 0
        axis, whole = self.axis % out.ndim, [slice(None)] * out.ndim
        for port in (port for port in tensors if port != "OUT_0"):
            stop = start + tensors[port].shape[axis]
            if port not in inputs:
                passed[port] = g.slice(out, [*whole[:axis], slice(start, stop), *whole[axis + 1 :]])
            start = stop
        return passed

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        rank = len(tensors["OUT_0"].shape)
        own = self.axis % rank

        def node(axis: int) -> Node:
            return Concatenate(own + (axis == LEAD), self.in_place_index)

        return anywhere(tensors, (axis for axis in range(rank) if axis != own), node)

    def _others(self, shape: Shape) -> Shape:
        axis = self.axis % len(shape) if shape else 0
        return (*shape[:axis], *shape[axis + 1 :])
