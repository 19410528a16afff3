"""Operations that move elements and compute nothing: reshape and transpose."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._core.builder import register
from .._core.dims import Shape, integers
from .._core.dtypes import NUMBERS
from .._core.errors import GraphError
from .._core.node import Example, Node

if TYPE_CHECKING:
    from .._core.spec import Tensor


@dataclass(frozen=True)
class Movement(Node):
    """An operation that XLA runs, of elements of any type."""

    moves = True
    leftover = True
    dtypes = (*NUMBERS, "bool")
    requires = (
        "XLA runs it in the same program: no graph with it has an engine on Hopper (cuDNN 9.22 to "
        "9.28; older versions have no such operation)"
    )


RESHAPE_MODES = ("VIEW_ONLY", "LOGICAL")


@register
@dataclass(frozen=True)
class Reshape(Movement):
    """Other dimensions for the same elements, in lexicographic order as in ``jnp.reshape``.

    Args:
        input: any shape.
        reshape_mode: "VIEW_ONLY" or "LOGICAL". Both give the same values: where they lie in
            memory is the layout's concern.
        out_dims: the new shape, of as many elements; ``.set_dim([...])`` on the result does the
            same, as in pygraph.

    Any element type. Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR``.
    """

    method = "reshape"
    dims = "input: *x -> OUT_0: *y"
    jax_names = ("reshape", "ravel", "expand_dims", "squeeze")
    examples = (
        Example({"input": (4, 6, 8)}, "bfloat16", {"out_dims": [4, 48, 1]}),
        Example(
            {"input": (2, 3, 4, 5)},
            "float32",
            {"reshape_mode": "LOGICAL", "out_dims": [6, 20]},
        ),
    )

    reshape_mode: str = "VIEW_ONLY"
    out_dims: tuple[int, ...] | None = None

    @classmethod
    def create(
        cls, reshape_mode: Any = "VIEW_ONLY", *, out_dims: Sequence[int] | None = None
    ) -> Reshape:
        mode = getattr(reshape_mode, "name", reshape_mode)
        if mode not in RESHAPE_MODES:
            raise GraphError(
                "unknown reshape_mode",
                expected=" or ".join(map(repr, RESHAPE_MODES)),
                got=repr(reshape_mode),
            )
        return cls(mode, None if out_dims is None else integers("out_dims", out_dims))

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.sizes(inputs)
        source = inputs["input"]
        shape = source.shape if self.out_dims is None else self.out_dims
        if math.prod(shape) != math.prod(source.shape):
            raise GraphError(
                "the new shape has another number of elements",
                expected=f"{math.prod(source.shape)} elements, as {list(source.shape)} has",
                got=f"out_dims={list(shape)}, {math.prod(shape)} elements",
            )
        return {"OUT_0": (shape, source.dtype)}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (input if self.out_dims is None else input.reshape(self.out_dims),)


@register
@dataclass(frozen=True)
class Transpose(Movement):
    """Permutes dimensions: dimension ``i`` of the output is ``permutation[i]`` of the input.

    Args:
        input: any shape.
        permutation: each dimension's number once.

    Any element type. Source: cuDNN documentation,
    ``CUDNN_BACKEND_OPERATION_TRANSPOSE_DESCRIPTOR``.
    """

    method = "transpose"
    dims = "input: *x -> OUT_0: *y"
    jax_names = ("transpose", "swapaxes", "moveaxis", "permute_dims")
    examples = (
        Example({"input": (4, 6, 8)}, "bfloat16", {"permutation": [0, 2, 1]}),
        Example({"input": (2, 3, 4, 5)}, "float32", {"permutation": [2, 0, 3, 1]}),
    )

    permutation: tuple[int, ...]

    @classmethod
    def create(cls, permutation: Sequence[int]) -> Transpose:
        return cls(integers("permutation", permutation))

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.sizes(inputs)
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
