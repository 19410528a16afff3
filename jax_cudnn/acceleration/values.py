"""What a program is made of: values, equations and calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp

from .._core import compat
from .._core.graph.source import users_place

if TYPE_CHECKING:
    from .program import Program

CUSTOM = "custom_jvp_call"
_DEEPEST = 200
VARYING = ("pvary", "pcast")
"""Operations whose result is the operand, as a value that differs between devices."""
CASTS = ("convert_element_type", "copy", "copy_p", *VARYING)
ELEMENTWISE = {
    *("add", "sub", "mul", "neg", "max", "min", "abs", "floor", "ceil", "sign", "exp", "sqrt"),
    *("ge", "gt", "le", "lt", "eq", "ne", "and", "or", "xor", "not"),
    *(
        "div",
        "rem",
        "pow",
        "integer_pow",
        "square",
        "one_minus_square",
        "log",
        "log1p",
        "exp2",
        "expm1",
        "tanh",
    ),
    *("logistic", "erf", "erfc", "erf_inv", "rsqrt", "cbrt", "sin", "cos", "tan", "round"),
    *("select_n", "clamp", "convert_element_type", "is_finite", "copy", "copy_p", "nextafter"),
    *("reduce_precision", "stop_gradient", "shift_left", "shift_right_logical", "atan2"),
    *("add_any", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *VARYING,
}
"""Operations each of whose elements depends on the elements at its own place alone."""


class Value:
    """A variable or a literal. Variables that a call hands through are one value.

    ``made_by``: its equation; None for inputs, constants and literals. ``known``: the array of a
    constant or a literal. ``outside``: the equal value of the program around. ``varies``: along
    which dimensions its elements may differ. ``depth``: how many equations compute it from
    constants and positions alone; None if it depends on an input.
    """

    __slots__ = ("aval", "depth", "known", "made_by", "outside", "users", "varies")

    def __init__(self, aval: Any, known: Any = None, outside: Value | None = None) -> None:
        self.aval, self.known, self.outside = aval, known, outside
        self.made_by: Equation | None = None
        self.users: list[Equation] = []
        self.depth: int | None = None if known is None else 0
        self.varies = tuple(size != 1 for size in self.shape)
        if outside is not None:
            self.depth, self.varies = outside.depth, outside.varies

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    def follow(self, equation: Equation) -> None:
        """Records that an equation makes it."""
        self.made_by = equation
        self.varies = tuple(
            one and size != 1 for one, size in zip(_varies(self), self.shape, strict=True)
        )
        deepest = 0
        for value in equation.ins:
            if value.depth is None:
                return
            deepest = max(deepest, value.depth)
        plain = not (equation.inner or equation.eqn.effects or len(equation.outs) != 1)
        if plain and not any(
            hasattr(x, "eqns") or hasattr(x, "jaxpr") for x in equation.params.values()
        ):
            self.depth = deepest + 1 if deepest < _DEEPEST else None


def _varies(value: Value) -> Sequence[bool]:
    made, rank = value.made_by, len(value.shape)
    assert made is not None
    params = made.params
    if made.name in ELEMENTWISE:
        given = [v.varies for v in made.ins if v.shape]
        return [any(axes) for axes in zip(*given, strict=True)] if given else [False] * rank
    match made.name:
        case "iota":
            return [axis == params["dimension"] for axis in range(rank)]
        case "broadcast_in_dim":
            found = dict(zip(params["broadcast_dimensions"], made.ins[0].varies, strict=True))
            return [found.get(axis, False) for axis in range(rank)]
        case "transpose":
            return [made.ins[0].varies[axis] for axis in params["permutation"]]
        case "slice" | "dynamic_slice":
            return made.ins[0].varies
        case "reshape" | "squeeze" | "expand_dims":
            if not any(made.ins[0].varies):
                return [False] * rank
            if same_order(value, made.ins[0]):
                pairs = zip(made.ins[0].shape, made.ins[0].varies, strict=True)
                wide = iter(one for size, one in pairs if size != 1)
                return [size != 1 and next(wide) for size in value.shape]
    return [True] * rank


def same_order(a: Value, b: Value) -> bool:
    """Whether two shapes differ in dimensions of one element alone."""
    return [n for n in a.shape if n != 1] == [n for n in b.shape if n != 1]


@dataclass(eq=False, repr=False)
class Equation:
    """An equation that runs as a whole, or one whose jaxprs are programs of their loops and
    branches."""

    jaxpr: Any
    eqn: Any
    ins: list[Value]
    outs: list[Value]
    calls: tuple[Call, ...]
    at: int
    inner: dict[tuple[str, int | None], Program] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @functools.cached_property
    def casts(self) -> bool:
        """Whether its result is its operand in another dtype. A float of fewer than 16 bits is not
        the same value: whoever casts to it wants the rounding."""
        floats = [v.dtype for v in (*self.ins, *self.outs) if jnp.issubdtype(v.dtype, jnp.floating)]
        return self.name in CASTS and all(dtype.itemsize > 1 for dtype in floats)

    @property
    def is_differentiated(self) -> bool:
        """Whether JAX's automatic differentiation made it, or a call around it."""
        return any(compat.is_differentiated(x.eqn) for x in (self, *self.calls))

    def __repr__(self) -> str:
        return f"<{self.name} at {self.at}>"

    @property
    def written(self) -> Any:
        """The equation with the user's line: that of the outermost call that has one, as JAX traces
        an inner function once for several."""
        calls = (call.eqn for call in self.calls)
        return next((eqn for eqn in calls if users_place(compat.user_frames(eqn))), self.eqn)


@dataclass(eq=False)
class Call:
    """A call whose equations stand in the program that calls."""

    jaxpr: Any
    eqn: Any
    ins: list[Value]
    outs: list[Value]
    body: list[Equation | Call]


def between(last: Value, inside: Callable[[Value], bool]) -> set[Equation]:
    """The equations that make ``last`` out of values that are not ``inside``."""
    found: set[Equation] = set()
    todo = [last]
    while todo:
        value = todo.pop()
        made = value.made_by
        if made is not None and made not in found and inside(value):
            found.add(made)
            todo += made.ins
    return found


def free_dims(product: Equation) -> list[list[int]]:
    """For both operands of a ``dot_general`` the dimensions that are neither summed nor shared."""
    contract, batch = product.params["dimension_numbers"]
    return [
        [i for i in range(len(v.shape)) if i not in (*contract[k], *batch[k])]
        for k, v in enumerate(product.ins)
    ]


def run_together(items: Sequence[Equation | Call], env: dict[Value, Any]) -> None:
    """Computes what equations that follow each other do, under their names and settings."""
    given: dict[Any, Any] = {}
    made: dict[Any, Value] = {}
    for item in items:
        for variable, value in zip(item.eqn.invars, item.ins, strict=True):
            if not hasattr(variable, "val") and variable not in made:
                given[variable] = read(env, value)
        pairs = zip(item.eqn.outvars, item.outs, strict=True)
        made |= {v: value for v, value in pairs if type(v).__name__ != "DropVar"}
    eqns = [item.eqn for item in items]
    piece = items[0].jaxpr.replace(constvars=[], invars=[*given], outvars=[*made], eqns=eqns)
    env.update(zip(made.values(), jax.core.eval_jaxpr(piece, (), *given.values()), strict=True))


def read(env: dict[Value, Any], value: Value) -> Any:
    return env[value] if value.known is None or value in env else value.known
