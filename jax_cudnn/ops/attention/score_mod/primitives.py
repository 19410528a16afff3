"""JAX's elementwise operations as cuDNN's, for score_mod.

All values are float32 here, including integers, and booleans are 1 and 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._core.errors import GraphError
from ...._core.graph.dtypes import is_floating
from ...._core.graph.tensor import GraphTensor

if TYPE_CHECKING:
    from .trace import Traced

TAKEN = (
    "elementwise operations: operators, comparisons, jnp.where, minimum, maximum, clip, abs, exp, "
    "log, tanh, sigmoid, sqrt, power, sin, cos, floor, and functions composed of them"
)


def _as(method: str) -> Callable[..., GraphTensor]:
    return lambda g, eqn, *operands: g.made(method, *operands)


def _of_truths(method: str) -> Callable[..., GraphTensor]:
    def write(g: Traced, eqn: Any, *operands: Any) -> GraphTensor:
        if any(str(x.aval.dtype) != "bool" for x in eqn.invars):
            raise GraphError("bitwise operations on integers are not supported", expected=TAKEN)
        return g.made(method, *operands)

    return write


def _not(g: Traced, eqn: Any, x: Any) -> GraphTensor:
    return _of_truths("cmp_eq")(g, eqn, x, 0.0)


def _is_whole(eqn: Any) -> bool:
    return not is_floating(str(eqn.invars[0].aval.dtype))


def _sign(g: Traced, eqn: Any, x: Any) -> Any:
    if not isinstance(x, GraphTensor):
        return np.sign(x)
    return g.made("sub", g.made("cmp_gt", x, 0.0), g.made("cmp_lt", x, 0.0))


def _towards_zero(g: Traced, x: Any) -> GraphTensor:
    lower, higher = g.made("floor", x), g.made("ceil", x)
    return g.made("binary_select", higher, lower, g.made("cmp_lt", x, 0.0))


def _quotient(g: Traced, eqn: Any, a: Any, b: Any) -> GraphTensor:
    if not _is_whole(eqn):
        return g.made("div", a, b)
    away = g.made("mul", _sign(g, eqn, a), 0.5)  # rounding errors then do not cross an integer
    return _towards_zero(g, g.made("div", g.made("add", a, away), b))


def _floor_divided(g: Traced, a: Any, b: Any) -> GraphTensor:
    """Floor division of integers; exact for positive divisors."""
    sign = _sign(g, None, b)
    half = g.made("mul", sign, 0.5) if isinstance(sign, GraphTensor) else 0.5 * sign
    return g.made("floor", g.made("div", g.made("add", a, half), b))


def _modulo(g: Traced, a: Any, b: Any) -> GraphTensor:
    return g.made("sub", a, g.made("mul", _floor_divided(g, a, b), b))


def _remainder(g: Traced, eqn: Any, a: Any, b: Any) -> GraphTensor:
    return g.made("mod", a, b)


def _converted(g: Traced, eqn: Any, x: Any) -> Any:
    old, new = str(eqn.invars[0].aval.dtype), str(eqn.params["new_dtype"])
    if new == "bool":
        return x if old == "bool" else g.made("cmp_neq", x, 0.0)
    if new in ("float32", "float64"):
        return x
    if is_floating(new):
        raise GraphError(
            f"casts to {new} are not supported",
            expected="float32 throughout",
            why="scores and all values computed from them stay in float32",
            fix="remove the cast",
        )
    return _towards_zero(g, x) if is_floating(old) else x


def _power(g: Traced, eqn: Any, x: Any) -> GraphTensor:
    exponent = eqn.params["y"]
    if exponent == 0:
        return g.made("add", g.made("mul", x, 0.0), 1.0)
    power = x
    for _ in range(abs(exponent) - 1):
        power = g.made("mul", power, x)
    return power if exponent > 0 else g.made("reciprocal", power)


def _exponential_less_one(g: Traced, eqn: Any, x: Any) -> GraphTensor:
    """``tanh(x / 2) (exp(x) + 1)``: near 0, ``exp(x) - 1`` would lose precision."""
    half = g.made("tanh", g.made("mul", x, 0.5))
    return g.made("mul", half, g.made("add", g.made("exp", x), 1.0))


def _logarithm_of_more_than_one(g: Traced, eqn: Any, x: Any) -> GraphTensor:
    """Near 0 the series of ``2 artanh(x / (2 + x))``, because ``1 + x`` would lose precision. Both
    parts are added, each 0 where the other applies, because the derivative of a selection would
    have a scalar as its first operand.
    """
    size = g.made("abs", x)
    near = g.made("mul", x, g.made("cmp_lt", size, 0.1))
    far = g.made("mul", x, g.made("cmp_ge", size, 0.1))
    ratio = g.made("div", near, g.made("add", near, 2.0))
    square = g.made("mul", ratio, ratio)
    series = g.made("add", g.made("mul", square, 2 / 5), 2 / 3)
    series = g.made("add", g.made("mul", square, series), 2.0)
    return g.made("add", g.made("mul", ratio, series), g.made("log", g.made("add", far, 1.0)))


def _picked(g: Traced, eqn: Any, which: Any, *cases: Any) -> Any:
    if len(cases) != 2:
        raise GraphError(
            f"selecting from {len(cases)} cases is not supported", expected="two, as in jnp.where"
        )
    return g.made("binary_select", cases[1], cases[0], which)


def _between(g: Traced, eqn: Any, low: Any, x: Any, high: Any) -> GraphTensor:
    return g.made("min", g.made("max", x, low), high)


PRIMITIVES: dict[str, Callable[..., Any]] = {
    **{
        name: _as(name)
        for name in ("add", "sub", "mul", "max", "min", "pow", "neg", "abs", "exp", "log", "tanh")
    },
    **{name: _as(name) for name in ("erf", "sqrt", "rsqrt", "sin", "cos", "tan", "floor", "ceil")},
    **{
        name: _as(f"cmp_{method}")
        for name, method in {
            "eq": "eq", "ne": "neq", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
        }.items()
    },
    "add_any": _as("add"),
    "logistic": _as("sigmoid"),
    "and": _of_truths("mul"),
    "or": _of_truths("max"),
    "xor": _of_truths("cmp_neq"),
    "not": _not,
    "div": _quotient,
    "rem": _remainder,
    "sign": _sign,
    "square": lambda g, eqn, x: g.made("mul", x, x),
    "integer_pow": _power,
    "erfc": lambda g, eqn, x: g.made("add", g.made("neg", g.made("erf", x)), 1.0),
    "exp2": lambda g, eqn, x: g.made("exp", g.made("mul", x, math.log(2))),
    "expm1": _exponential_less_one,
    "log1p": _logarithm_of_more_than_one,
    "select_n": _picked,
    "clamp": _between,
    "is_finite": lambda g, eqn, x: g.made("cmp_lt", g.made("abs", x), math.inf),
    "convert_element_type": _converted,
    "copy": lambda g, eqn, x: x,
    "copy_p": lambda g, eqn, x: x,
}  # fmt: skip

# jnp functions of integers that consist of several primitives.
SHORT: dict[str, Callable[..., GraphTensor]] = {
    "floor_divide": _floor_divided,
    "remainder": _modulo,
}
