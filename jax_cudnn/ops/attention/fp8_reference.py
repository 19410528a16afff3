"""fp8 attention in jnp, with cuDNN's scales, rounding and amax values; chunked like attention.

A scale multiplies a value before it is rounded to fp8; a descale undoes that afterwards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.dtypes import FP8
from ..._core.graph.reference import rounded
from . import extras as extras
from .reference import Arrays, Attention, _grouped, _heads, _over_rows, within_lengths

_ONE = (1, 1, 1, 1)
_WEIGHTS = 256.0  # the scale of the softmax weights with block scaling


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def stored(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 values rounded to fp8, with saturation; unchanged for other dtypes. The derivative is
    1 everywhere (a straight-through estimator)."""
    name = str(dtype)
    if name not in FP8:
        return x
    # The rounding is a separate operation: XLA may remove a conversion and its inverse.
    kept = rounded(x, name).astype(jnp.float32)
    return jax.lax.reduce_precision(kept, 8, jnp.finfo(name).nmant)


@stored.defjvp
def _stored_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return stored(*primals, dtype), tangents[0]


@dataclass(frozen=True)
class Fp8Attention(Attention):
    """Attention of fp8 arrays with one scale each. ``weights`` is the dtype of the softmax weights
    in the second product, by default q's."""

    weights: str = ""

    def forward(self, arrays: Arrays) -> tuple[jax.Array, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """O times its scale, Stats, and the largest absolute values of the weights and of O.

        As in a kernel with a single pass over the keys, weights are rounded relative to the
        largest one in their row.
        """
        x = _wide(arrays)
        kind = self.weights or arrays["q"].dtype

        def block(rows: Arrays, first: jax.Array) -> tuple[jax.Array, ...]:
            weights, total = self._softmax(rows, x, first)
            largest = jnp.max(weights, axis=-1, keepdims=True, initial=0)
            safe = jax.lax.stop_gradient(jnp.where(largest > 0, largest, 1))
            narrow = stored(weights / safe * x["scale_s"], kind)
            return self._product("bngst,bnte->bngse", narrow, x["v"]) * safe, total, largest

        o, total, largest = _over_rows(jax.checkpoint(block), _grouped(x), x["k"].shape[2])
        o = _heads(o) * (x["descale_s"] * x["descale_v"])
        return o * x["scale_o"], _heads(total), _amax(largest), _amax(o)

    def backward(self, arrays: Arrays) -> dict[str, jax.Array]:
        """The gradients times their scales, and their largest absolute values and dP's before
        scaling."""
        x = _wide(arrays)
        weights_kind, slopes_kind = arrays["q"].dtype, arrays["dO"].dtype

        def block(rows: Arrays, first: jax.Array) -> tuple[dict[str, jax.Array], ...]:
            scores = self._scores(rows, x, first)
            weights = extras.weights(scores, rows["stats"])
            mean = jnp.sum(rows["dO"] * rows["o"], axis=-1, keepdims=True) * x["descale_o"][0]
            along = self._product("bngse,bnte->bngst", rows["dO"], x["v"]) * x["descale_v"][0]
            slope = weights * (along - mean) * (x["descale_dO"][0] * self.scale)
            narrow = stored(slope * x["scale_dP"][0], slopes_kind)
            grad = stored(weights * x["scale_s"][0], weights_kind)
            each = {
                "dQ": self._product("bngst,bntd->bngsd", narrow, x["k"]),
                "dP": jnp.max(jnp.abs(slope), axis=-1, keepdims=True, initial=0),
            }
            summed = {
                "dK": self._product("bngst,bngsd->bntd", narrow, rows["q"]),
                "dV": self._product("bngst,bngse->bnte", grad, rows["dO"]),
            }
            return each, summed

        each, summed = _over_rows(block, _grouped(x), x["k"].shape[2], sums=True)
        found = {
            # k holds the descales of both operands of the scores.
            "dQ": _heads(each["dQ"]) * (x["descale_dP"] / x["descale_q"]),
            "dK": summed["dK"] * (x["descale_dP"] * x["descale_q"]),
            "dV": summed["dV"] * (x["descale_s"] * x["descale_dO"]),
        }
        largest = {f"amax_{name}": _amax(value) for name, value in found.items()}
        scaled = {name: value * x[f"scale_{name}"] for name, value in found.items()}
        return {**scaled, **largest, "amax_dP": _amax(each["dP"])}


@dataclass(frozen=True)
class MxAttention(Attention):
    """Attention of fp8 arrays with block scales, which are already applied: all operands are
    float32. ``weights`` is the dtype of the softmax weights in the second product."""

    weights: str = ""

    def forward(self, arrays: Arrays) -> tuple[jax.Array, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """O, Stats, and the largest absolute value of O."""
        one = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), jnp.ones(_ONE))
        factors = {
            **one,
            "descale_s": jnp.full(_ONE, 1 / _WEIGHTS),
            "scale_s": jnp.full(_ONE, _WEIGHTS),
        }
        attention = Fp8Attention(self.scale, self.band, weights=self.weights)
        o, total, _, amax = attention.forward({**arrays, **factors})
        return o, total, amax

    def backward(self, arrays: Arrays) -> dict[str, jax.Array]:
        """The gradients and their largest absolute values."""
        arrays = within_lengths(arrays, arrays)

        def block(rows: Arrays, first: jax.Array) -> tuple[dict[str, jax.Array], ...]:
            q, turned, grad, grad_turned, o, grad_o = jnp.split(rows["q"], ends, axis=-1)
            scores = self._scores({**rows, "q": q}, {**arrays, "q": arrays["q"]}, first)
            weights = extras.weights(scores, rows["stats"])
            mean = jnp.sum(grad_o * o, axis=-1, keepdims=True)
            slope = weights * (self._product("bngse,bnte->bngst", grad, arrays["v"]) - mean)
            each = {"dQ": self.scale * self._product("bngst,bntd->bngsd", slope, arrays["k_T"])}
            return each, {
                "dK": self.scale * self._product("bngst,bngsd->bntd", slope, turned),
                "dV": self._product("bngst,bngse->bnte", weights, grad_turned),
            }

        # Concatenate the arrays with rows of queries, so that they are split into blocks together.
        sides = [arrays[n] for n in ("q", "q_T", "dO", "dO_T", "o_f16", "dO_f16")]
        ends = [sum(x.shape[-1] for x in sides[:i]) for i in range(1, len(sides))]
        rows = {"q": jnp.concatenate(sides, -1), "k": arrays["k"], "stats": arrays["stats"]}
        each, summed = _over_rows(block, _grouped(rows), arrays["k"].shape[2], sums=True)
        found = {"dQ": _heads(each["dQ"]), **summed}
        return found | {f"amax_{name}": _amax(value) for name, value in found.items()}


def _wide(arrays: Arrays) -> dict[str, jax.Array]:
    """All arrays in float32, with the descales of the scores multiplied into k."""
    lengths = {name: x for name, x in arrays.items() if name.startswith("seq_len")}
    wide = {n: x.astype(jnp.float32) for n, x in arrays.items() if n not in lengths}
    wide["k"] = wide["k"] * (wide["descale_q"] * wide["descale_k"])
    return {**within_lengths(wide, lengths), **lengths}


def _amax(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), initial=0).reshape(1, 1, 1, 1)
