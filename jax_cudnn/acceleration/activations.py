"""Activations, recognised by their values, however they are written."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.score_mod import unwatched
from .known import elementwise
from .scores import computed, constant, number
from .values import CASTS, CUSTOM, Equation, Value

_FAR = np.asarray([20.0, 60.0, 1e3, 1e4, 1e6, 1e12, 1e30])


_GRID = np.concatenate([np.linspace(-12, 12, 4801), _FAR, -_FAR])


_ROUNDINGS = 2  # of constants in the dtype of the program, by which an activation may differ


_KINKS = np.asarray([0.0, 6.0], "float32")


_KINKED = ("relu", "relu6", "leaky_relu")


def activation(value: Value, equations: list[Equation]) -> str | None:
    """The name of the activation that equations compute of a value; None if cuDNN has none."""
    places = {value: -1, **{e.outs[0]: i for i, e in enumerate(equations)}}
    own = any(call.eqn.primitive.name == CUSTOM for e in equations for call in e.calls)
    key = (
        str(value.dtype),
        own,
        tuple(
            (e.name, str(e.params), *(places.get(v, number(v)) for v in e.ins)) for e in equations
        ),
    )
    if key not in _seen:
        _seen[key] = _recognised(value, equations, own)
    return _seen[key]


_seen: dict[Any, str | None] = {}


def _recognised(value: Value, equations: list[Equation], own: bool) -> str | None:
    got = _evaluated(value, equations)
    if got is None:
        return None
    unit = float(jnp.finfo(value.dtype).eps) * _ROUNDINGS
    finite = np.isfinite(got)  # one written by hand may overflow, far away
    if not finite[np.abs(_GRID) <= 60].all():
        return None
    errors = {
        name: np.max((np.abs(got - y) / (1 + np.abs(got)))[finite])
        for name, y in _activations().items()
    }
    best = min(errors, key=lambda name: errors[name])
    if errors[best] > max(unit, 1e-5):
        return None
    return best if own or best not in _KINKED or _same_kinks(value, equations, best) else None


def _same_kinks(value: Value, equations: list[Equation], name: str) -> bool:
    """Whether the derivative where an activation has none is the same: ``jnp.maximum(x, 0)`` has
    0.5 at 0, and ``jax.nn.relu`` 0."""
    with unwatched():
        at = jnp.asarray(_KINKS)
        ones = jnp.ones_like(at)
        last = equations[-1].outs[0]
        run = lambda x: computed(equations, {value: x}, constant)[last]  # noqa: E731
        got = jax.jvp(run, (at,), (ones,))[1]
        want = jax.jvp(_named(name), (at,), (ones,))[1]
        return bool(np.allclose(got, want, atol=0.02))


def _evaluated(value: Value, equations: list[Equation]) -> np.ndarray | None:
    """What equations compute of a value, in float64; None where only JAX knows."""
    env: dict[Value, np.ndarray] = {value: _GRID}
    for equation in equations:
        out = equation.outs[0]
        dtype = np.float64 if jnp.issubdtype(out.dtype, jnp.floating) else out.dtype
        given = [env[v] if v in env else np.asarray(number(v)) for v in equation.ins]
        found = elementwise(equation, given, dtype) if _keeps_values(equation) else None
        if found is None:
            return None
        env[out] = np.broadcast_to(found, _GRID.shape)
    return env[equations[-1].outs[0]]


def _keeps_values(equation: Equation) -> bool:
    return equation.casts or equation.name not in CASTS


def _named(name: str) -> Any:
    return getattr(jax.nn, name)


@functools.cache
def _activations() -> dict[str, np.ndarray]:
    x = _GRID
    with np.errstate(over="ignore"):
        cube = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
        sigmoid, half = 1 / (1 + np.exp(-x)), x / 2
        erf = np.vectorize(math.erf)(x / np.sqrt(2))
        return {
            "relu": np.maximum(x, 0),
            "relu6": np.clip(x, 0, 6),
            "leaky_relu": np.where(x >= 0, x, 0.01 * x),
            "gelu": half * (1 + np.tanh(cube)),
            "gelu_exact": half * (1 + erf),
            "silu": x * sigmoid,
            "sigmoid": sigmoid,
            "tanh": np.tanh(x),
            "elu": np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
            "softplus": np.logaddexp(x, 0),
        }
