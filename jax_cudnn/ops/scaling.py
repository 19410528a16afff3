"""Scales that map arrays into the range of fp8: current and delayed scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .._core.compat import varying_axes
from .._core.errors import GraphTypeError, one_of, shown
from .._core.graph.dtypes import FP8
from .arguments import integer

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
_FORWARD = {"attention": ("q", "k", "v", "o"), "matmul": ("x", "w")}
_BACKWARD = {"attention": ("dO", "dP", "dQ", "dK", "dV"), "matmul": ("dy",)}
_LARGEST = 2.0**120  # a scale whose inverse underflows in float32 would make zeros infinite


def fp8_name(argument: str, dtype: Any) -> str:
    """The name of an fp8 dtype; GraphTypeError for other dtypes."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in FP8:
        raise GraphTypeError(f"{argument} is not valid", expected=" or ".join(FP8), got=name)
    return name


def largest(dtype: str) -> float:
    """The largest finite value of an fp8 dtype: 448 or 57344."""
    return float(jnp.finfo(dtype).max)


def amax_of(x: jax.Array) -> jax.Array:
    """The largest absolute value, in float32."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def quantizable(x: jax.Array) -> jax.Array:
    """An array in float32 with infinity replaced by NaN, which would otherwise saturate in fp8."""
    x = x.astype(jnp.float32)
    return x + (x - x)  # no mask, which XLA would transpose in a pass of its own


def scale_of(amax: jax.Array, dtype: str, margin: float = 0.0, otherwise: Any = 1.0) -> jax.Array:
    """``max / amax / 2**margin`` with the dtype's largest finite value; ``otherwise`` if amax is 0
    or not finite."""
    usable = (amax > 0) & jnp.isfinite(amax)
    scale = largest(dtype) / 2.0**margin / jnp.where(usable, amax, 1)
    return jnp.where(usable, jnp.minimum(scale, _LARGEST), otherwise)


@dataclass(frozen=True)
class DelayedScaling:
    """Scales of one fp8 operation from the largest absolute values of earlier steps; a pytree.

    A tensor's scale is ``max / amax / 2**margin``, with the largest finite value of its fp8 dtype
    and the largest value in its ``amax_history``. If that is 0 or not finite, the scale does not
    change. The softmax weights are at most 1 and have a constant scale.

    The backward pass also contributes values, so :func:`jax.grad` with respect to the state returns
    the state of the next step, as with Flax's ``OVERWRITE_WITH_GRADIENT``: replace the state by it,
    and do not pass it to an optimizer. A state belongs to one call, used once per step:
    JAX would sum the new states of several uses, of elements under :func:`jax.vmap` and of
    accumulated gradients. Each layer needs a state, stacked for :func:`jax.lax.scan`. Under
    :func:`jax.shard_map`, devices that share a state (``P()``) use the maximum over all of them;
    that requires the default ``check_vma=True``.

    Attributes:
        scale: in float32, the factors of q, k, v, o, dO, dP, dQ, dK, dV of attention, (9,), or of
            x, w, dy of a matrix product, (3,).
        amax_history: (length, 9) or (length, 3) in float32, newest first; 0 for steps not yet
            taken.
        margin: how many powers of 2 to keep free above the largest value.
        grad_dtype: the dtype of dO, dP, dQ, dK, dV and dy; the other tensors are float8_e4m3fn.
        operation: "attention" for :func:`dot_product_attention_fp8`, "matmul" for
            :func:`float8_matmul`.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; Transformer Engine's ``DelayedScaling``.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> x = jnp.ones((1, 64, 2, 128), "bfloat16")
        >>> state = jc.ops.DelayedScaling.create(amax_history_length=16)
        >>> loss = lambda x, state: jc.ops.dot_product_attention_fp8(x, x, x, state).sum()
        >>> gradient, state = jax.jit(jax.grad(loss, (0, 1)))(x, state)
        >>> float(state.scale[0])
        448.0
    """

    scale: jax.Array
    amax_history: jax.Array
    margin: float = 0.0
    grad_dtype: str = E5M2
    operation: str = "attention"

    @classmethod
    def create(
        cls,
        amax_history_length: int = 1024,
        *,
        margin: float = 0.0,
        grad_dtype: Any = E5M2,
        operation: Literal["attention", "matmul"] = "attention",
    ) -> DelayedScaling:
        """The state before the first step: scales of 1 and an empty history.

        Args:
            amax_history_length: the number of steps in the history.
            margin: how many powers of 2 to keep free above the largest value.
            grad_dtype: the fp8 dtype of gradients.
            operation: whose state it is.

        Raises:
            GraphError: the length is below 1, or there is no such operation.
            GraphTypeError: grad_dtype is not fp8.
        """
        length = integer("amax_history_length", amax_history_length, 1)
        name = fp8_name("grad_dtype", grad_dtype)
        one_of("operation", operation, _FORWARD)
        count = len(_FORWARD[operation] + _BACKWARD[operation])
        return cls(
            jnp.ones(count, jnp.float32),
            jnp.zeros((length, count), jnp.float32),
            float(margin),
            name,
            operation,
        )

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors, in the order of ``scale``."""
        return _FORWARD[self.operation] + _BACKWARD[self.operation]

    def dtype_of(self, tensor: str) -> str:
        """The fp8 dtype of a tensor."""
        return E4M3 if tensor in _FORWARD[self.operation] else self.grad_dtype

    def scales(self) -> dict[str, jax.Array]:
        """Each tensor's scale. A scale of 0 becomes 1: the gradient is 0 after a step that did not
        run the attention (a branch of :func:`jax.lax.cond` that was not taken)."""
        scale = jnp.where(self.scale > 0, self.scale, 1)
        return dict(zip(self.tensors, scale, strict=True))

    def updated(self, amax: Mapping[str, jax.Array]) -> DelayedScaling:
        """The state after a step with these largest absolute values; the scales and histories of
        other tensors do not change."""
        given = [name in amax for name in self.tensors]
        newest = [jnp.reshape(amax.get(name, 0), ()).astype(jnp.float32) for name in self.tensors]
        newest = jnp.stack(newest)
        newest = _of_all_devices(newest, self.scale)
        before = jnp.max(self.amax_history, axis=0)
        newest = jnp.where(jnp.isfinite(newest), newest, before)  # ignore one bad step
        history = jnp.roll(self.amax_history, 1, axis=0).at[0].set(newest)
        if not all(given):
            history = jnp.where(jnp.array(given), history, self.amax_history)
        scale = [
            scale_of(most, self.dtype_of(name), self.margin, old)
            for (name, old), most in zip(
                self.scales().items(), jnp.max(history, axis=0), strict=True
            )
        ]
        return dataclasses.replace(self, scale=jnp.stack(scale), amax_history=history)


def check_scaling(scaling: Any, operation: str) -> None:
    """GraphTypeError if this is not None or a state of the operation."""
    given = isinstance(scaling, DelayedScaling)
    if scaling is None or (given and scaling.operation == operation):
        return
    raise GraphTypeError(
        "scaling is not valid",
        expected=f"a DelayedScaling of operation={operation!r}, or None for current scaling",
        got=f"one of operation={scaling.operation!r}" if given else shown(scaling),
    )


def _of_all_devices(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Under :func:`jax.shard_map`, the maximum over the devices that share this state."""
    axes = varying_axes(jax.typeof(amax)) - varying_axes(jax.typeof(state))
    return jax.lax.pmax(amax, tuple(axes)) if axes else amax


jax.tree_util.register_dataclass(
    DelayedScaling,
    data_fields=["scale", "amax_history"],
    meta_fields=["margin", "grad_dtype", "operation"],
)
