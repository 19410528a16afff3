"""Linear layers in float8, and the state of their delayed scaling."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax

from .._core.errors import GraphError, shown
from ..ops import epilogue, float8
from ..ops.scaling import DelayedScaling, amax_of, check_scaling


class ScalingState(nnx.Variable):
    """A part of the state of delayed scaling: a Variable for filters, as ``nnx.BatchStat``.

    Example:
        >>> import jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.Linear(16, 32, float8="delayed", rngs=nnx.Rngs(0))
        >>> [path[-1] for path, _ in nnx.to_flat_state(nnx.state(layer, jnn.ScalingState))]
        ['amax_history', 'scale']
    """


class Float8Scaling(nnx.Module):
    """The state of delayed scaling of a layer, a ``jax_cudnn.ops.DelayedScaling`` in Variables.

    Args:
        state: the first state.

    Each call of the layer enters the largest values of its input and its kernel, as BatchNorm does
    its statistics, unless ``use_running_average`` is set, which ``model.eval()`` does. The gradient
    of the result is known only in the backward pass: it has a current scale, unless these Variables
    are differentiated, too. Then their gradient is the next state, with all three tensors::

        trained = nnx.Any(nnx.Param, jnn.ScalingState)
        grads = nnx.grad(loss, argnums=nnx.DiffState(0, trained))(model)
        grads, scaling = nnx.split_state(grads, nnx.Param, jnn.ScalingState)
        optimizer.update(model, grads)
        nnx.update(model, scaling)

    Attributes:
        scale: (3,) in float32, the factors of the input, the kernel and the result's gradient.
        amax_history: (length, 3) in float32.

    Source: :class:`jax_cudnn.ops.DelayedScaling`.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.Linear(16, 32, float8="delayed", rngs=nnx.Rngs(0))
        >>> y = layer(jnp.ones((4, 16)))
        >>> float(layer.scaling.scale[0])
        448.0
    """

    def __init__(self, state: DelayedScaling):
        self.margin, self.grad_dtype = state.margin, state.grad_dtype
        self.scale = ScalingState(jnp.array(state.scale))  # copies: layers may share the given ones
        self.amax_history = ScalingState(jnp.array(state.amax_history))
        self.use_running_average = False

    def state(self) -> DelayedScaling:
        """As an argument of ``jax_cudnn.ops.float8_matmul``."""
        arrays = self.scale[...], self.amax_history[...]
        return DelayedScaling(*arrays, self.margin, self.grad_dtype, "matmul")

    def replace(self, state: DelayedScaling) -> None:
        """Writes a state with the same options into the Variables."""
        self.scale[...], self.amax_history[...] = state.scale, state.amax_history


def keep(layer: Any, given: Any) -> None:
    """Sets a layer's ``float8`` and, for delayed scaling, its ``scaling``."""
    layer.float8 = None
    if given is None:
        return
    if not isinstance(given, DelayedScaling) and given not in ("current", "delayed"):
        raise GraphError(
            "float8 is not valid",
            expected='None, "current", "delayed", or a DelayedScaling of operation="matmul"',
            got=shown(given),
        )
    if layer.dot_general is not lax.dot_general or layer.precision is not None:
        raise GraphError(
            "a layer in float8 has no dot_general and no precision",
            got=f"dot_general={shown(layer.dot_general)}, precision={shown(layer.precision)}",
            fix="leave both out, or float8",
        )
    layer.float8 = "current" if given == "current" else "delayed"
    if layer.float8 == "current" or layer.scaling is not None:  # of a layer like this
        return
    state = given if isinstance(given, DelayedScaling) else None
    state = state or DelayedScaling.create(operation="matmul")
    check_scaling(state, "matmul")
    layer.scaling = Float8Scaling(state.updated({"w": amax_of(layer.kernel[...])}))


def product(layer: Any, x: jax.Array, out_sharding: Any) -> jax.Array:
    """``activation(x W + b)`` of a Linear layer, with its product in float8."""
    kernel, bias = layer.kernel[...], None if layer.bias is None else layer.bias[...]
    x, narrow, bias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
    if layer.promote_dtype is not promote_dtype:
        kernel = narrow
    dtype = layer.preferred_element_type or narrow.dtype
    held: Float8Scaling | None = layer.scaling
    state = None if held is None else held.state()
    y, state = float8.product(x, kernel, state, dtype, out_sharding)
    if held is not None and state is not None and not held.use_running_average:
        held.replace(state)
    y = y if bias is None else y + bias
    return y if layer.activation is None else gated(y, layer.activation)


def gated(y: jax.Array, activation: Any, by: jax.Array | None = None) -> jax.Array:
    """``activation(y) * by`` in their dtype. It is computed again in the backward pass and where
    it is rounded to float8: XLA would write and read more than what it is computed from."""

    @jax.checkpoint
    def run(y: jax.Array, by: jax.Array | None) -> jax.Array:
        y = epilogue.activated(y, activation)
        return y if by is None else y * by

    return run(_unfused(y), by)


@jax.custom_jvp
def _unfused(y: jax.Array) -> jax.Array:
    """A product whose activation XLA fuses with it, unless it is differentiated: in float8
    cuBLASLt has no kernels that return both."""
    return y


_unfused.defjvp(lambda y, tangent: (lax.optimization_barrier(*y), *tangent))
