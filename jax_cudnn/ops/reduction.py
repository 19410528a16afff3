"""Reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._core.builder import register
from .._core.dims import Shape, integers
from .._core.errors import GraphError
from .._core.node import Example, Node

if TYPE_CHECKING:
    from .._core.spec import Tensor

MODES = {"ADD": jnp.sum}


@register
@dataclass(frozen=True)
class Reduction(Node):
    """Reduces ``input`` over the dimensions that are 1 in ``out_dims``.

    Args:
        input: any shape.
        mode: "ADD" (a string or ``cudnn.reduction_mode.ADD``).
        out_dims: the shape of the output, of input's rank: each dimension 1 or input's; all 1
            when omitted. ``.set_dim([...])`` on the result does the same, as in pygraph.

    The result is the float32 accumulator: cuDNN writes no other type. Source: cuDNN
    documentation, ``CUDNN_BACKEND_OPERATION_REDUCTION``.
    """

    method = "reduction"
    dims = "input: ... -> Y: ..."
    jax_names = ("sum", "reduce_sum")
    requires = (
        "alone it reduces the last dimension (C of NCHW), or all the others, or everything; "
        "it must be the last node of a graph"
    )
    examples = (
        Example({"input": (8, 64, 28, 28)}, "bfloat16", {"mode": "ADD", "out_dims": [1, 64, 1, 1]}),
        Example({"input": (512, 256)}, "float32", {"mode": "ADD", "out_dims": [512, 1]}),
        Example({"input": (4, 96, 128)}, "bfloat16", {"mode": "ADD", "out_dims": [1, 1, 128]}),
        Example({"input": (8, 32, 14, 14)}, "float16", {"mode": "ADD", "out_dims": [8, 1, 14, 14]}),
    )

    mode: str = "ADD"
    out_dims: tuple[int, ...] | None = None

    @classmethod
    def create(cls, mode: Any = "ADD", *, out_dims: Sequence[int] | None = None) -> Reduction:
        name = getattr(mode, "name", mode)
        if name not in MODES:
            raise GraphError(
                "unknown reduction mode", expected=", ".join(map(repr, MODES)), got=repr(mode)
            )
        return cls(name, None if out_dims is None else integers("out_dims", out_dims, 1))

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.sizes(inputs)
        shape = inputs["input"].shape
        out = (1,) * len(shape) if self.out_dims is None else self.out_dims
        if len(out) != len(shape) or any(o not in (1, s) for o, s in zip(out, shape, strict=True)):
            raise GraphError(
                "the dimensions of the reduction's output do not fit",
                expected=f"the rank of {list(shape)}, each dimension 1 or the same",
                got=f"out_dims={list(out)}",
            )
        return {"Y": (tuple(out), "float32")}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        out = (1,) * input.ndim if self.out_dims is None else self.out_dims
        axes = tuple(i for i, (o, s) in enumerate(zip(out, input.shape, strict=True)) if o != s)
        return (MODES[self.mode](input.astype(jnp.float32), axis=axes, keepdims=True),)

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        import cudnn

        mode = getattr(cudnn.reduction_mode, self.mode)
        return (pygraph.reduction(tensors["input"], mode=mode, **common),)
