"""The sums that a batch normalization needs of a convolution's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from .._core.errors import GraphError
from .._core.graph.builder import register
from .._core.graph.dims import Shape
from .._core.graph.example import Example
from .._core.graph.node import Node

if TYPE_CHECKING:
    from .._core.graph.node import Values
    from .._core.graph.spec import Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation


@register
class Genstats(Node):
    """Sums over all dimensions but the channels, for the statistics of a batch normalization.

    ``SUM[c] = sum over n, x of input[n,c,x]`` and ``SQ_SUM[c] = sum over n, x of
    input[n,c,x]**2``, both (1, C, 1, ...) in float32.

    Args:
        input: (N, C, *spatial).

    Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR``.
    """

    method = "genstats"
    dims = "input: n c *x -> SUM: n c *x, SQ_SUM: n c *x"
    batch = "c"
    requires = (
        "it follows a float16 convolution whose result is float16 (.set_data_type) and is also "
        "returned; in other graphs, two reductions compute the same sums"
    )
    examples = (
        Example({"input": (8, 64, 28, 28)}, "float16", alone=False),
        Example({"input": (2, 16, 5, 6)}, "float32", alone=False),
    )

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.sizes(inputs)
        shape = inputs["input"].shape
        if len(shape) < 3:
            raise GraphError(
                "the input has no spatial dimensions",
                expected="(N, C, *spatial)",
                got=f"shape {list(shape)}",
            )
        sums = (1, shape[1], *(1,) * (len(shape) - 2))
        return {"SUM": (sums, "float32"), "SQ_SUM": (sums, "float32")}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        axes = (0, *range(2, input.ndim))
        return (
            jnp.sum(input, axis=axes, keepdims=True),
            jnp.sum(input * input, axis=axes, keepdims=True),
        )

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        t, x, shape = tangents["input"], inputs["input"], outputs["SUM"].shape
        return {"SUM": g.reduced(t, shape), "SQ_SUM": g.reduced(g.mul(t, g.add(x, x)), shape)}
