"""A gated MLP: SwiGLU, GEGLU and similar."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from .._core.graph.trace import GraphFunction
from ..ops import epilogue
from ..ops.arguments import chosen
from ..ops.epilogue import Activation
from ..ops.matmul.nodes import contracted
from .layer import finished
from .linear import Linear, of_rows


def _gated(g, x, kernel, bias, gate, *, activation, out):
    y = contracted(g, x, kernel, batched=0, depth=1)
    up = epilogue.apply(g, y, None, bias, None, None)
    return g.mul(epilogue.apply(g, gate, None, None, None, activation), up).set_data_type(out)


GATED = GraphFunction(_gated, name="gated_mlp")


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``, with the gate in the epilogue of the second product.

    Args:
        in_features: features of x.
        hidden_features: features of the gate.
        out_features: features of the result; None for in_features.
        activation: as for ``jax_cudnn.ops.matmul``: "silu" for SwiGLU, "gelu" for GEGLU, "sigmoid"
            for GLU, None for a bilinear layer.
        use_bias: whether the three ``nnx.Linear`` have a bias.
        rngs: as for ``nnx.Linear``.
        **linear: other arguments of each ``nnx.Linear``.

    Shapes: x (..., in_features), result (..., out_features). Parameters are those of three
    ``nnx.Linear``: ``gate`` and ``up`` (in_features, hidden_features), ``down`` (hidden_features,
    out_features).

    Each product is one cuDNN plan. The first product is rounded to the result's dtype before the
    activation; the rest of the second is computed in float32 and rounded once. If ``up`` is not a
    :class:`Linear` without an activation, the layers run sequentially.

    Source: Shazeer 2020, arXiv:2002.05202.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> jnn.GatedMLP(8, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Activation = "silu",
        use_bias: bool = False,
        rngs: nnx.Rngs,
        **linear: Any,
    ):
        linear |= {"use_bias": use_bias, "rngs": rngs}
        self.activation = epilogue.activation_name(activation)
        self.gate = Linear(in_features, hidden_features, **linear)
        self.up = Linear(in_features, hidden_features, **linear)
        self.down = Linear(hidden_features, out_features or in_features, **linear)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate(x), self.up
        found = of_rows(up, x) if type(up) is Linear and up.activation is None else None
        if found is None or gate.dtype.name != found.out or gate.shape != found.shape:
            return self.down(finished(gate, self.activation) * self.up(x))
        bias = found.bias
        gated = chosen(GATED, precision=up.precision)(
            found.x,
            found.kernel,
            None if bias is None else bias.reshape(*(1,) * (gate.ndim - 1), -1),
            gate,
            activation=self.activation,
            out=found.out,
        )
        return self.down(gated)
