"""A mixture of experts."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from .._core.errors import GraphError, one_of
from .._core.primitive import without_explicit_axes
from ..ops import epilogue
from ..ops.arguments import integer
from ..ops.epilogue import Activation
from ..ops.experts import expert_parallel
from ..ops.ragged import ragged_dot

_INIT = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)


class MoE(nnx.Module):
    """Each token's ``top_k`` experts, ``down(activation(gate(x)) * up(x))``, weighted by a router.

    Args:
        features: features of x and of the result.
        hidden_features: features of each expert's gate.
        num_experts: how many experts there are.
        top_k: experts of a token, those with the largest logits; their weights are the softmax of
            these.
        activation: as for :class:`GatedMLP`.
        use_bias: whether the experts' three products have a bias.
        expert_axis: the axis of the mesh over which the experts are sharded, or None.
        implementation: of ``jax_cudnn.ops.ragged_dot``.
        dtype: what the experts compute in; None for the promoted dtype of x and the parameters.
        param_dtype: of the parameters.
        kernel_init: initializer of the experts' parameters.
        precision: as for ``jax_cudnn.ops.ragged_dot``.
        rngs: as for ``nnx.Linear``.

    Shapes: x (..., features), as the result. Parameters: the ``router``, an ``nnx.Linear`` without
    a bias, which computes in float32; ``gate`` and ``up`` (num_experts, features, hidden_features),
    ``down`` (num_experts, hidden_features, features), with ``use_bias`` also ``gate_bias``,
    ``up_bias`` (num_experts, hidden_features) and ``down_bias`` (num_experts, features).

    No expert has a capacity, so no token is dropped: tokens are sorted by expert, and each product
    is a ``jax_cudnn.ops.ragged_dot``.

    With an ``expert_axis`` the layer runs in a ``jax.shard_map`` of the mesh that ``jax.set_mesh``
    sets, or that x has explicitly: tokens are split over all of its axes, and go to the devices
    that hold their experts and back (``jax_cudnn.ops.expert_parallel``). Experts are sharded over
    this axis alone; of another axis they are gathered. A device holds room for all choices of an
    expert on it: D T min(top_k, num_experts / D) rows, of D devices on the axis and T tokens on
    each. In a ``jax.shard_map`` over the axis x and the parameters are those of the device.

    Raises GraphError if there are fewer experts than ``top_k``, if the devices of the axis do not
    divide them, if there is no such axis, or if parameters in a ``jax.shard_map`` over it are not
    those of the device.

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
        activation: Activation = "silu",
        use_bias: bool = False,
        expert_axis: str | None = None,
        implementation: Literal["xla", "mosaic"] = "mosaic",
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
        one_of("implementation of MoE", implementation, ("xla", "mosaic"))
        self.dtype, self.precision, self.implementation = dtype, precision, implementation
        self.activation, self.expert_axis = epilogue.activation_name(activation), expert_axis
        kinds: Any = {"dtype": jnp.float32, "param_dtype": param_dtype}
        self.router = nnx.Linear(features, num_experts, use_bias=False, rngs=rngs, **kinds)
        for name, sizes in {
            "gate": (features, hidden_features),
            "up": (features, hidden_features),
            "down": (hidden_features, features),
        }.items():
            kernel = kernel_init(rngs.params(), (num_experts, *sizes), param_dtype)
            setattr(self, name, nnx.Param(kernel))
            bias = jnp.zeros((num_experts, sizes[1]), param_dtype) if use_bias else None
            setattr(self, f"{name}_bias", None if bias is None else nnx.Param(bias))

    @overload
    def __call__(self, x: jax.Array, return_loss: Literal[False] = False) -> jax.Array: ...
    @overload
    def __call__(self, x: jax.Array, return_loss: Literal[True]) -> tuple[jax.Array, jax.Array]: ...
    def __call__(self, x: jax.Array, return_loss: bool = False) -> Any:
        """The result, and with ``return_loss`` also the loss that balances the experts: E times the
        sum over experts of the share of their tokens and their mean probability, 1 at balance."""
        weights = {
            name: getattr(self, name)[...]
            for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
            if getattr(self, name) is not None
        }
        dtype = self.dtype or jnp.result_type(x, *weights.values())
        weights = {name: weight.astype(dtype) for name, weight in weights.items()}
        logits = self.router(x)
        mesh = None if self.expert_axis is None else self._mesh(x)
        run: Any = functools.partial(self._run, mapped=mesh is not None)
        arrays, specs = (x, logits, *weights.values()), (jax.typeof(x).sharding.spec, jax.P())
        run = without_explicit_axes(run, arrays, specs, kept=True)
        y, loss = run(x.astype(dtype), logits, weights)
        return (y, loss) if return_loss else y

    def _mesh(self, x: jax.Array) -> Any:
        """The mesh over whose expert axis to map; None inside of such a map."""
        mesh: Any = jax.sharding.get_abstract_mesh()
        mesh = jax.typeof(x).sharding.mesh if mesh.empty else mesh
        if self.expert_axis not in mesh.axis_names:
            raise GraphError(
                "there is no mesh with the expert_axis of this MoE",
                expected=f"a mesh with the axis {self.expert_axis!r}",
                got=f"axes {mesh.axis_names}",
                fix="call it with jax.set_mesh(mesh)",
            )
        if self.num_experts % mesh.shape[self.expert_axis]:
            raise GraphError(
                "the devices of the expert_axis do not divide the experts",
                expected=f"num_experts to be a multiple of {mesh.shape[self.expert_axis]}",
                got=f"num_experts={self.num_experts}",
            )
        return None if self.expert_axis in mesh.manual_axes else mesh

    def _run(self, x: jax.Array, logits: jax.Array, weights: Any, mapped: bool) -> Any:
        """The result and the loss; ``mapped``: in a shard_map of all axes."""
        given = x.reshape(-1, x.shape[-1]), logits.reshape(-1, self.num_experts)
        count = given[0].shape[0]
        if mapped:
            mesh: Any = jax.sharding.get_abstract_mesh()
            axes = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
            more = -count % math.prod(mesh.shape[name] for name in axes)
            padded = (jnp.pad(a, ((0, more), (0, 0))) for a in given)
            split = jax.P(axes)
            specs: Any = split, split, jax.P(self.expert_axis), split
            local: Any = jax.shard_map(
                self._local, in_specs=specs, out_specs=split, axis_names={*axes}
            )
            y, chosen = local(*padded, weights, jnp.arange(count + more) < count)
            y, chosen = y[:count], chosen[:count]
        else:
            y, chosen = self._local(*given, weights)
        counts = jax.nn.one_hot(chosen, self.num_experts).sum((0, 1))
        shares = counts / max(chosen.size, 1)
        loss = self.num_experts * (shares * jax.nn.softmax(given[1]).sum(0) / max(count, 1)).sum()
        return y.reshape(x.shape), loss

    def _local(self, tokens: jax.Array, logits: jax.Array, weights: Any, valid: Any = None) -> Any:
        """This device's tokens, and their experts; those that are not valid have none."""
        best, chosen = lax.top_k(logits, self.top_k)
        if valid is not None:
            chosen = jnp.where(valid[:, None], chosen, self.num_experts)
        order = jnp.argsort(chosen.reshape(-1))  # of the tokens' choices, by expert
        sizes = jnp.bincount(chosen.reshape(-1), length=self.num_experts)

        def experts(rows: jax.Array, sizes: jax.Array) -> jax.Array:
            how: Any = {"precision": self.precision, "implementation": self.implementation}

            def product(rows: jax.Array, name: str, **more: Any) -> jax.Array:
                bias = weights.get(f"{name}_bias")
                return ragged_dot(rows, weights[name], sizes, bias=bias, **how, **more)

            gate = product(rows, "gate")
            return product(product(rows, "up", gate=gate, activation=self.activation), "down")

        rows = tokens[order // self.top_k]
        if self.expert_axis is None:
            rows = experts(rows, sizes)
        else:  # the experts of a token are different ones
            held = self.num_experts // lax.axis_size(self.expert_axis)
            if (gate := weights["gate"].shape)[0] != held:
                raise GraphError(
                    "inside a shard_map this MoE has not the experts of one device",
                    expected=f"gate with {held} of the {self.num_experts} experts",
                    got=f"gate {gate}",
                    fix=f"in_specs=P({self.expert_axis!r}) for all parameters but the router's",
                )
            most = tokens.shape[0] * min(self.top_k, held)
            rows = expert_parallel(experts, rows, sizes, self.expert_axis, most_rows=most)
        each = rows.at[jnp.argsort(order)].get(unique_indices=True, mode="promise_in_bounds")
        each = each.reshape(*chosen.shape, rows.shape[-1]) * jax.nn.softmax(best)[..., None]
        return each.sum(1).astype(tokens.dtype), chosen
