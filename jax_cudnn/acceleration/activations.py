"""Activations, recognised by their values, however they are written."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops.attention.score_mod.value import unwatched
from .known import elementwise
from .scores import computed, constant, number
from .values import CASTS, CUSTOM, Equation, Value

_FAR = np.asarray([20.0, 60.0, 1e3, 1e4, 1e6, 1e12, 1e30])
_GRID = np.concatenate([np.linspace(-12, 12, 4801), _FAR, -_FAR])
_RELATIVE, _ROUNDING = 1e-5, 1e-14
"""By how much values in float64 may differ: for constants of six digits, and for sums near 0."""
_KINKS = np.asarray([0.0, 6.0], "float32")
_KINKED = {"relu": (0.0, 1.0), "relu6": (0.0, 0.0), "leaky_relu": (0.01, 1.0)}
"""The derivatives of cuDNN's activations at the kinks."""
_GUARDS = ("eq", "ne", "is_finite", "stop_gradient")
"""What asks for NaN and infinities, or stops a derivative: values on a grid do not show it."""
_CONSTANTS = 1e-3, 1e3
"""Between what a constant of an activation lies. An epsilon is smaller: whoever adds it does not
want 0."""


def activation(value: Value, equations: list[Equation]) -> str | None:
    """The name of the activation that equations compute of a value; None if cuDNN has none."""
    places = {value: -1, **{e.outs[0]: i for i, e in enumerate(equations)}}
    key = (
        str(value.dtype),
        tuple(
            (e.name, str(e.params), _is_own(e), *(places.get(v, number(v)) for v in e.ins))
            for e in equations
        ),
    )
    if key not in _seen:
        _seen[key] = _recognised(value, equations)
    return _seen[key]


_seen: dict[Any, str | None] = {}


def _recognised(value: Value, equations: list[Equation]) -> str | None:
    got = None if any(map(_guards, equations)) else _evaluated(value, equations)
    if got is None:
        return None
    finite = np.isfinite(got)  # one written by hand may overflow, far away
    if not finite[np.abs(_GRID) <= 60].all():
        return None
    x, got = _GRID[finite], got[finite]
    own = all(e.casts or _is_own(e) for e in equations)
    for name, values in _activations(str(value.dtype)):
        y = values[finite]
        allowed = _RELATIVE * np.abs(y) + _ROUNDING * (1 + np.abs(x))
        if (np.abs(got - y) <= allowed).all():
            kinked = name in _KINKED and not own
            return None if kinked and not _same_kinks(value, equations, name) else name
    return None


def _is_own(equation: Equation) -> bool:
    """Whether it is a part of one of JAX's own functions with a derivative, as ``jax.nn.relu``."""
    return any(call.eqn.primitive.name == CUSTOM for call in equation.calls)


def _guards(equation: Equation) -> bool:
    """Whether it is there for values that a grid does not show."""
    if _is_own(equation):
        return False
    known = [abs(c) for v in equation.ins if (c := number(v))]
    low, high = _CONSTANTS
    return equation.name in _GUARDS or not all(low < c < high for c in known)


def _same_kinks(value: Value, equations: list[Equation], name: str) -> bool:
    """Whether the derivative where an activation has none is cuDNN's: at 0 ``jnp.maximum(x, 0)``
    has 0.5, ``jax.nn.relu`` and cuDNN's 0."""
    with unwatched():
        at = jnp.asarray(_KINKS)
        last = equations[-1].outs[0]
        run = lambda x: computed(equations, {value: x}, constant)[last]  # noqa: E731
        got = jax.jvp(run, (at,), (jnp.ones_like(at),))[1]
        return bool(np.allclose(got, _KINKED[name], atol=2e-3))


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


@functools.cache
def _activations(dtype: str) -> list[tuple[str, np.ndarray]]:
    """Values on the grid, with constants in float64 and as a program in this dtype rounds them."""
    x = _GRID

    def held(constant: float) -> set[float]:
        return {constant, float(np.asarray(constant, jnp.dtype(dtype)))}

    with np.errstate(over="ignore"):
        sigmoid, half, erf = 1 / (1 + np.exp(-x)), x / 2, np.vectorize(math.erf)
        found = [
            ("relu", np.maximum(x, 0)),
            ("relu6", np.clip(x, 0, 6)),
            ("silu", x * sigmoid),
            ("sigmoid", sigmoid),
            ("tanh", np.tanh(x)),
            ("elu", np.where(x > 0, x, np.expm1(np.minimum(x, 0)))),
            ("softplus", np.logaddexp(x, 0)),
        ]
        for scale, cubed in itertools.product(held(math.sqrt(2 / math.pi)), held(0.044715)):
            found.append(("gelu", half * (1 + np.tanh(scale * (x + cubed * x**3)))))
        for scale in held(math.sqrt(0.5)) | {1 / root for root in held(math.sqrt(2))}:
            found.append(("gelu_exact", half * (1 + erf(x * scale))))
        return found + [("leaky_relu", np.where(x >= 0, x, slope * x)) for slope in held(0.01)]
