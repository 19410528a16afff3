"""fp8 attention in jnp: that of the descaled operands, with cuDNN's rounding and amax values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.dtypes import FP8
from ..._core.graph.reference import rounded
from .reference import Arrays, Attention

_WEIGHTS = 256.0  # the scale of the softmax weights with block scaling


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def stored(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 values rounded to fp8, with saturation; unchanged for other dtypes. The derivative is
    1 everywhere (a straight-through estimator)."""
    return rounded(x, str(dtype)).astype(jnp.float32) if str(dtype) in FP8 else x


@stored.defjvp
def _stored_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return stored(*primals, dtype), tangents[0]


@dataclass(frozen=True)
class Fp8Attention(Attention):
    """Attention of fp8 operands times their descales, in float32, with the other scales.
    ``weights`` and ``slopes`` are the dtypes of the softmax weights and of the scores' gradient in
    the products; empty without rounding."""

    weights: str = ""
    slopes: str = ""

    def results(self, arrays: Arrays) -> dict[str, jax.Array]:
        """O times its scale, Stats, and the largest absolute values of the weights and of O."""
        return self.named(arrays, *self.forward(arrays))

    def named(
        self, arrays: Arrays, o: jax.Array, total: jax.Array, largest: jax.Array
    ) -> dict[str, jax.Array]:
        """The results from those of :meth:`forward`."""
        found = {"O": o * arrays.get("scale_o", 1), "Stats": total}
        return found | {"Amax_S": _amax(largest), "Amax_O": _amax(o)}

    def gradients(self, arrays: Arrays) -> dict[str, jax.Array]:
        """The gradients times their scales, and their largest absolute values and dP's before
        scaling."""
        found = self.backward(arrays)
        largest = {f"amax_{name}": _amax(value) for name, value in found.items()}
        for name in ("dQ", "dK", "dV"):
            found[name] = found[name] * arrays.get(f"scale_{name}", 1)
        return found | largest

    def _of_rows(self, rows: Arrays, arrays: Arrays, first: jax.Array) -> tuple[jax.Array, ...]:
        """As in a kernel with a single pass over the keys, weights are rounded relative to the
        largest one in their row."""
        weights, total = self._softmax(rows, arrays, first)
        largest = jnp.max(weights, axis=-1, keepdims=True, initial=0)
        safe = jax.lax.stop_gradient(jnp.where(largest > 0, largest, 1))
        narrow = self._weights_of(weights / safe, arrays)
        return self._product("bngst,bnte->bngse", narrow, arrays["v"]) * safe, total, largest

    def _weights_of(self, weights: jax.Array, arrays: Arrays) -> jax.Array:
        scale, descale = _factors(arrays, "s", _WEIGHTS)
        return stored(weights * scale, self.weights) * descale

    def _slope_of(
        self, slope: jax.Array, arrays: Arrays
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        slope = slope * self.scale
        scale, descale = _factors(arrays, "dP", 1.0)
        largest = jnp.max(jnp.abs(slope), axis=-1, keepdims=True, initial=0)
        return stored(slope * scale, self.slopes) * descale, 1.0, {"dP": largest}


def _factors(arrays: Arrays, of: str, otherwise: float) -> tuple[Any, Any]:
    """The scale and the descale of a result that is rounded within the kernel."""
    scale = arrays.get(f"scale_{of}", jnp.full((), otherwise))
    return scale.reshape(()), arrays.get(f"descale_{of}", 1 / scale).reshape(())


def _amax(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), initial=0).reshape(1, 1, 1, 1)
