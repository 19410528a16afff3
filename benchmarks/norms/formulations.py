"""Normalizations in plain JAX, in the ways in which users write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Function = Callable[..., dict[str, Any]]
"""Of operands by name: results by name."""
Statistics = Callable[["Norm", Array], tuple[Array, Array]]

F32 = jnp.float32
MOMENTUM = 0.9
"""The share of old running statistics."""
_STAGES = 64  # of sums over rows in two stages


@dataclass(frozen=True)
class Norm:
    """What is normalized.

    Attributes:
        axes: mean and variance are taken over these.
        shared: the axes along which scale and bias are the same: all but the last, or those that
            are not normalized.
        centred: whether the mean is subtracted.
        epsilon: added to the variance.
        relu: whether that is behind it.
    """

    axes: tuple[int, ...]
    shared: tuple[int, ...]
    centred: bool = True
    epsilon: float = 1e-5
    relu: bool = False


def two_passes(norm: Norm, x: Array) -> tuple[Array, Array]:
    """The mean, then the mean square distance from it."""
    mean = jnp.mean(x, norm.axes, keepdims=True) if norm.centred else jnp.zeros((), F32)
    return mean, jnp.mean(jnp.square(x - mean), norm.axes, keepdims=True)


def one_pass(norm: Norm, x: Array) -> tuple[Array, Array]:
    """Both sums at once, as Flax does: less exact where the mean is large."""
    mean = jnp.mean(x, norm.axes, keepdims=True)
    square = jnp.mean(jnp.square(x), norm.axes, keepdims=True)
    return mean, jnp.maximum(0.0, square - jnp.square(mean))


def plain(norm: Norm, statistics: Statistics = two_passes) -> Function:
    """In float32; JAX chooses what is kept for the backward."""

    def function(x, scale, bias=None, residual=None, **running):
        mean, var = statistics(norm, x.astype(F32))
        y = _normalized(norm, x, mean, var, scale, bias, residual)
        return {"y": y, **_moved(norm, x, mean, var, **running)}

    return function


def multiplied(norm: Norm, statistics: Statistics = two_passes) -> Function:
    """As Flax does: scale and inverse deviation are multiplied first."""

    def function(x, scale, bias=None, residual=None, **running):
        mean, var = statistics(norm, x.astype(F32))
        y = (x - mean) * (jax.lax.rsqrt(var + norm.epsilon) * scale)
        y = y if bias is None else y + bias
        y = _finished(norm, y, residual).astype(x.dtype)
        return {"y": y, **_moved(norm, x, mean, var, **running)}

    return function


def standardized(norm: Norm) -> Function:
    """By ``jax.nn.standardize``."""

    def function(x, scale, bias=None, residual=None, **running):
        y = jax.nn.standardize(x.astype(F32), norm.axes, epsilon=norm.epsilon) * scale
        y = y if bias is None else y + bias
        y = _finished(norm, y, residual)
        moved = _moved(norm, x, *one_pass(norm, x.astype(F32)), **running) if running else {}
        return {"y": y.astype(x.dtype), **moved}

    return function


def recomputed(function: Function) -> Function:
    """Nothing is kept but the operands."""

    def again(**operands):
        # Without a barrier against common subexpressions: forward and backward are two programs.
        return jax.checkpoint(lambda o: function(**o), prevent_cse=False)(operands)

    return again


def by_hand(norm: Norm, statistics: Statistics = two_passes, stages: int = 1) -> Function:
    """With a backward of few passes, for which the statistics are kept; the sums over rows in so
    many parts."""

    @jax.custom_vjp
    def inner(x, scale, bias, residual):
        return forward(x, scale, bias, residual)[0]

    def forward(x, scale, bias, residual):
        mean, var = statistics(norm, x.astype(F32))
        y = _normalized(norm, x, mean, var, scale, bias, residual)
        added = None if residual is None else ()
        return (y, mean, var), (x, scale, bias, mean, var, y if norm.relu else None, added)

    def backward(kept, cotangents):
        x, scale, bias, mean, var, y, added = kept
        dy = cotangents[0].astype(F32)
        dy = dy if y is None else jnp.where(y > 0, dy, 0)
        inv = jax.lax.rsqrt(var + norm.epsilon)
        xhat = (x.astype(F32) - mean) * inv
        dscale, dbias = (_total(norm, v, stages) for v in (dy * xhat, dy))
        if norm.axes == norm.shared:  # of what is normalized together: the sums are there
            count = x.size // scale.size
            dx = inv * scale * (dy - dbias / count - xhat * (dscale / count))
        else:
            slope = dy * scale
            dx = slope - xhat * jnp.mean(slope * xhat, norm.axes, keepdims=True)
            dx = inv * (dx - jnp.mean(slope, norm.axes, keepdims=True) if norm.centred else dx)
        return (
            dx.astype(x.dtype),
            dscale.astype(scale.dtype),
            None if bias is None else dbias.astype(bias.dtype),
            None if added is None else dy.astype(x.dtype),
        )

    inner.defvjp(forward, backward)

    def function(x, scale, bias=None, residual=None, **running):
        y, mean, var = inner(x, scale, bias, residual)
        return {"y": y, **_moved(norm, x, mean, var, **running)}

    return function


def _normalized(norm, x, mean, var, scale, bias, residual):
    y = (x.astype(F32) - mean) * jax.lax.rsqrt(var + norm.epsilon) * scale
    y = y if bias is None else y + bias
    return _finished(norm, y, residual).astype(x.dtype)


def _finished(norm, y, residual):
    y = y if residual is None else y + residual
    return jax.nn.relu(y) if norm.relu else y


def _moved(norm, x, mean, var, running_mean=None, running_var=None) -> dict[str, Array]:
    """Running statistics towards the mean and the unbiased variance; none where there are none."""
    if running_mean is None:
        return {}
    count = x.size // running_mean.size
    found = {
        "running_mean": (running_mean, mean),
        "running_var": (running_var, var * (count / (count - 1))),
    }
    return {
        name: MOMENTUM * old + (1 - MOMENTUM) * new.reshape(old.shape)
        for name, (old, new) in found.items()
    }


def _total(norm: Norm, x: Array, stages: int) -> Array:
    if stages > 1 and x.shape[0] % stages == 0:
        x = jnp.sum(x.reshape(stages, -1, *x.shape[1:]), 1)
    return jnp.sum(x, norm.shared)


def formulations(norm: Norm) -> tuple[dict[str, Function], dict[str, Function]]:
    """How plain JAX computes it: ways that differ in the forward, and all others."""
    forwards: dict[str, Function] = {"two passes": plain(norm)}
    if norm.centred:
        forwards |= {
            "one pass": plain(norm, one_pass),
            "one pass, multiplied as in Flax": multiplied(norm, one_pass),
            "jax.nn.standardize": standardized(norm),
        }
    else:
        forwards["multiplied as in Flax"] = multiplied(norm)
    others = {"by hand": by_hand(norm)}
    if norm.centred:
        others["by hand, one pass"] = by_hand(norm, one_pass)
    if norm.axes != norm.shared:
        others["by hand, sums in two stages"] = by_hand(norm, stages=_STAGES)
    others |= {f"{name}, checkpoint": recomputed(f) for name, f in forwards.items()}
    return forwards, others
