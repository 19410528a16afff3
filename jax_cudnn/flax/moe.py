"""A mixture of experts."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .._core.errors import GraphError
from ..ops.arguments import integer
from ..ops.ragged import ragged_dot

_INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)


class MoE(nnx.Module):
    """Each token's ``top_k`` experts, ``down(silu(gate(x)) * up(x))``, weighted by a router.

    Args:
        features: features of x and of the result.
        hidden_features: features of each expert's gate.
        num_experts: how many experts there are.
        top_k: experts of a token, those with the largest logits; their weights are the softmax of
            these.
        dtype: what the experts compute in; None for the promoted dtype of x and the parameters.
        param_dtype: of the parameters.
        kernel_init: initializer of the experts' parameters.
        precision: as for ``jax_cudnn.ops.ragged_dot``.
        rngs: as for ``nnx.Linear``.

    Shapes: x (..., features), as the result. Parameters: the ``router``, an ``nnx.Linear`` without
    a bias, which computes in float32; ``gate`` and ``up`` (num_experts, features, hidden_features),
    ``down`` (num_experts, hidden_features, features).

    No expert has a capacity, so no token is dropped: tokens are sorted by expert, and each product
    is a ``jax_cudnn.ops.ragged_dot``.

    Raises GraphError if there are fewer experts than ``top_k``.

    Source: Shazeer 2017, arXiv:1701.06538; the loss: Fedus 2021, arXiv:2101.03961.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> moe = jnn.MoE(8, 32, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
        >>> y, loss = moe(jnp.ones((2, 5, 8)), return_loss=True)
        >>> y.shape
        (2, 5, 8)
    """

    def __init__(
        self,
        features: int,
        hidden_features: int,
        num_experts: int,
        top_k: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _INIT,
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        self.num_experts = integer("num_experts", num_experts, 1)
        self.top_k = integer("top_k", top_k, 1)
        if top_k > num_experts:
            raise GraphError(
                "a token has more experts than there are",
                expected=f"top_k of at most num_experts={num_experts}",
                got=f"top_k={top_k}",
            )
        self.dtype, self.precision = dtype, precision
        kinds: Any = {"dtype": jnp.float32, "param_dtype": param_dtype}
        self.router = nnx.Linear(features, num_experts, use_bias=False, rngs=rngs, **kinds)
        shape = num_experts, features, hidden_features
        turned = num_experts, hidden_features, features
        self.gate = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.up = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.down = nnx.Param(kernel_init(rngs.params(), turned, param_dtype))

    @overload
    def __call__(self, x: jax.Array, return_loss: Literal[False] = False) -> jax.Array: ...
    @overload
    def __call__(self, x: jax.Array, return_loss: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
    def __call__(self, x: jax.Array, return_loss: bool = False) -> Any:
        """The result, and with ``return_loss`` also the loss that balances the experts: E times the
        sum over experts of the share of their tokens and their mean probability, 1 at balance."""
        kernels = self.gate[...], self.up[...], self.down[...]
        dtype = self.dtype or jnp.result_type(x, *kernels)
        gate, up, down = (kernel.astype(dtype) for kernel in kernels)
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.router(tokens)
        best, chosen = lax.top_k(logits, self.top_k)
        order = jnp.argsort(chosen.reshape(-1))  # of the tokens' choices, by expert
        sizes = jnp.bincount(chosen.reshape(-1), length=self.num_experts)

        def product(rows: jax.Array, kernel: jax.Array) -> jax.Array:
            return ragged_dot(rows, kernel, sizes, precision=self.precision)

        rows = tokens.astype(dtype)[order // self.top_k]
        rows = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)
        each = rows.at[jnp.argsort(order)].get(unique_indices=True, mode="promise_in_bounds")
        weights = jax.nn.softmax(best)[..., None]
        y = (each.reshape(*chosen.shape, -1) * weights).sum(1).astype(dtype).reshape(x.shape)
        if not return_loss:
            return y
        shares = sizes / max(chosen.size, 1)
        return y, self.num_experts * (shares * jax.nn.softmax(logits).mean(0)).sum()
