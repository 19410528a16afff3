"""What a program is made of, values, equations and calls, and what is known of a value while the
function is traced."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._core import compat
from .._core.graph.source import users_place
from ..ops.attention.score_mod.value import unwatched

CUSTOM = "custom_jvp_call"
VARYING = ("pvary", "pcast")
"""Operations whose result is the operand, as a value that differs between devices."""
CASTS = ("convert_element_type", "copy", "copy_p", *VARYING)
LAYOUT = ("transpose", "broadcast_in_dim", "reshape", "squeeze")

_erf = np.vectorize(math.erf, otypes="d")
_SAME = ("add", "abs", "floor", "ceil", "sign", "square", "exp", "exp2", "expm1", "log", "log1p")
_SAME += ("sqrt", "tanh", "sin", "cos", "tan")
_OTHERS = ("select_n", "integer_pow", "rem", "round", "nextafter", "reduce_precision", "cbrt")
_OTHERS += ("shift_left", "shift_right_logical", "erf_inv", "asin", "acos", "atan", "atan2", "sinh")
_OTHERS += ("cosh", "asinh", "acosh", "atanh")
ELEMENTWISE: dict[str, Callable[..., Any] | None] = {
    **dict.fromkeys(_OTHERS),
    **{name: getattr(np, name) for name in _SAME},
    **dict.fromkeys((*CASTS, "stop_gradient"), lambda x: x),
    **{"sub": np.subtract, "mul": np.multiply, "neg": np.negative, "add_any": np.add},
    **{"div": np.divide, "pow": np.power},
    **{"max": np.maximum, "min": np.minimum, "is_finite": np.isfinite},
    **{"ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less},
    **{"eq": np.equal, "ne": np.not_equal},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert},
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "one_minus_square": lambda x: 1 - np.square(x),
    "erf": _erf,
    "erfc": lambda x: 1 - _erf(x),
    "clamp": lambda low, x, high: np.clip(x, low, high),
}
"""Operations each of whose elements depends on the elements at its own place alone, and what they
compute in NumPy; None where only JAX knows, or :func:`elementwise`."""

_DEEPEST = 200
_MOST = 1 << 24  # elements of a value that is not computed in blocks
_ROWS = 256  # of a block
_NUMBERS = "biufV"  # kinds of NumPy's dtypes; V are bfloat16 and the like


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

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def is_known(self) -> bool:
        """Whether it depends on nothing that is passed to the program."""
        return self.depth is not None

    def follow(self, equation: Equation) -> None:
        """Records that an equation makes it."""
        self.made_by = equation
        self.varies = tuple(
            one and size != 1 for one, size in zip(_varies(self, equation), self.shape, strict=True)
        )
        deepest = 0
        for value in equation.ins:
            if value.depth is None:
                return
            deepest = max(deepest, value.depth)
        plain = not (equation.inner or equation.eqn.effects or len(equation.outs) != 1)
        plain &= not jnp.issubdtype(self.dtype, jax.dtypes.extended)  # NumPy has no random keys
        given = equation.params.values()
        if plain and not any(hasattr(x, "eqns") or hasattr(x, "jaxpr") for x in given):
            self.depth = deepest + 1 if deepest < _DEEPEST else None


def _varies(value: Value, made: Equation) -> Sequence[bool]:
    rank = len(value.shape)
    if made.name in ELEMENTWISE:
        given = [v.varies for v in made.ins if v.shape]
        return [any(axes) for axes in zip(*given, strict=True)] if given else [False] * rank
    if made.name in LAYOUT:
        if made.sources is not None:
            return [i is not None and made.ins[0].varies[i] for i in made.sources]
        return [any(made.ins[0].varies)] * rank
    if made.name == "iota":
        return [axis == made.params["dimension"] for axis in range(rank)]
    return made.ins[0].varies if made.name in ("slice", "dynamic_slice") else [True] * rank


@dataclass(eq=False, repr=False)
class Equation:
    """An equation that runs as a whole. ``inner``: where it is a loop, branches or the like, the
    Program of each of its jaxprs."""

    jaxpr: Any
    eqn: Any
    ins: list[Value]
    outs: list[Value]
    calls: tuple[Call, ...]
    at: int
    inner: dict[tuple[str, int | None], Any] = field(default_factory=dict)

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
        floats = [v.dtype for v in (*self.ins, *self.outs) if v.is_float]
        return self.name in CASTS and all(dtype.itemsize > 1 for dtype in floats)

    @functools.cached_property
    def sources(self) -> tuple[int | None, ...] | None:
        """Where it moves dimensions, for each of the result the operand's, or None where it is of
        one element, repeated. None where it mixes dimensions."""
        if self.name == "transpose":
            return tuple(self.params["permutation"])
        old, new = self.ins[0].shape, self.outs[0].shape
        if self.name == "broadcast_in_dim":
            places = {a: i for i, a in enumerate(self.params["broadcast_dimensions"])}
            found = (places.get(axis) for axis in range(len(new)))
            pairs = zip(found, new, strict=True)
            return tuple(i if i is not None and old[i] == n else None for i, n in pairs)
        turned = self.name == "reshape" and self.params["dimensions"] is not None
        if turned or [n for n in old if n != 1] != [n for n in new if n != 1]:
            return None
        wide = (i for i, n in enumerate(old) if n != 1)
        return tuple(next(wide) if n != 1 else None for n in new)

    @functools.cached_property
    def operation(self) -> str:
        """Its name, or one name for all ways to write a sum, a square, a root or a reciprocal."""
        name, ins = self.name, self.ins
        if name == "add_any":
            return "add"
        if name == "mul" and ins[0] is ins[1]:
            return "square"
        if name == "integer_pow":
            return {2: "square", -1: "reciprocal"}.get(self.params["y"], name)
        if name == "pow":
            return {2: "square", 0.5: "sqrt", -0.5: "rsqrt"}.get(number(ins[1]), name)
        return "reciprocal" if name == "div" and number(ins[0]) == 1 else name

    @property
    def growth(self) -> int:
        """By how many bytes an element of its result is wider than one of its operand."""
        return self.outs[0].dtype.itemsize - self.ins[0].dtype.itemsize

    def factor_of(self, value: Value) -> float | None:
        """The known number by which it multiplies an operand; None where it does something else."""
        others = [v for v in self.ins if v is not value]
        known = number(others[0]) if len(others) == 1 and len(self.ins) == 2 else None
        if self.name == "mul" or known is None:
            return known if self.name == "mul" else None
        return 1 / known if self.name == "div" and self.ins[0] is value and known else None

    @property
    def is_differentiated(self) -> bool:
        """Whether JAX's automatic differentiation made it, or a call around it."""
        return any(compat.is_differentiated(x.eqn) for x in (self, *self.calls))

    @property
    def own_calls(self) -> list[Call]:
        """The calls around it of JAX's own functions with a derivative, as ``jax.nn.relu``."""
        return [call for call in self.calls if call.eqn.primitive.name == CUSTOM]

    @property
    def written(self) -> Any:
        """The equation with the user's line: that of the outermost call that has one, as JAX traces
        an inner function once for several."""
        calls = (call.eqn for call in self.calls)
        return next((eqn for eqn in calls if users_place(compat.user_frames(eqn))), self.eqn)

    def __repr__(self) -> str:
        return f"<{self.name} at {self.at}>"


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


def renamed(x: Any, old: Sequence[Any], new: Sequence[Any]) -> Any:
    """An array with its axes in another order, and one element where it has none. Axes that are
    None, or not in ``new``, have one element."""
    kept = [d for d in old if d is not None and d in new]
    x = x.reshape([n for n, d in zip(x.shape, old, strict=True) if d in kept])
    x = x.transpose([kept.index(d) for d in new if d in kept])
    sizes = iter(x.shape)
    return x.reshape([next(sizes) if d in kept else 1 for d in new])


def laid_out(equation: Equation, x: Any) -> Any:
    """What an operation that moves dimensions makes of an array, which it does not repeat."""
    assert equation.sources is not None
    return renamed(x, range(x.ndim), equation.sources)


def run_together(items: Sequence[Equation | Call], env: dict[Value, Any]) -> None:
    """Computes what equations that follow each other do, under their names and settings."""
    given: dict[Any, Any] = {}
    made: dict[Any, Value] = {}
    names: dict[Value, Any] = {}
    eqns = []
    for item in items:
        reads = [*item.eqn.invars]
        for i, (variable, value) in enumerate(zip(reads, item.ins, strict=True)):
            if value in names:  # a call between may have returned it as it is
                reads[i] = names[value]
            elif not hasattr(variable, "val"):
                given[variable] = read(env, value)
        eqns.append(item.eqn.replace(invars=reads))
        pairs = zip(item.eqn.outvars, item.outs, strict=True)
        own = {v: value for v, value in pairs if type(v).__name__ != "DropVar"}
        made |= own
        names |= {value: v for v, value in own.items()}
    piece = items[0].jaxpr.replace(constvars=[], invars=[*given], outvars=[*made], eqns=eqns)
    env.update(zip(made.values(), jax.core.eval_jaxpr(piece, (), *given.values()), strict=True))


def read(env: dict[Value, Any], value: Value) -> Any:
    return env[value] if value.known is None or value in env else value.known


# -- known values, computed block by block ---------------------------------------------------------

Block = tuple[tuple[int, int], ...]
_Done = dict[tuple[Value, Block], np.ndarray]


def array(value: Value) -> np.ndarray:
    """A known value, with one element along the dimensions in which it does not vary."""
    return _block(value, _ranges(value), {})


def rows(value: Value, axis: int) -> Iterator[tuple[int, np.ndarray]]:
    """As :func:`array`, in blocks along a dimension: where each begins, and the block."""
    whole = _ranges(value)
    for at in range(0, whole[axis][1], _ROWS):
        ends = at, min(at + _ROWS, whole[axis][1])
        yield at, _block(value, (*whole[:axis], ends, *whole[axis + 1 :]), {})


def number(value: Value) -> float | None:
    """A value that is one known number in all places."""
    if any(value.varies) or not value.is_known or value.dtype.kind not in _NUMBERS:
        return None
    found = array(value) if value.shape or value.known is None else value.known
    return float(np.asarray(found, value.dtype).reshape(()).astype("float64"))


def _ranges(value: Value) -> Block:
    return tuple((0, n if v else 1) for n, v in zip(value.shape, value.varies, strict=True))


def _block(value: Value, block: Block, done: _Done) -> np.ndarray:
    """A block of a known value; ``done`` holds those that are computed already."""
    key = value, block
    if key not in done:
        done[key] = _computed(value, block, done)
    return done[key]


def _computed(value: Value, block: Block, done: _Done) -> np.ndarray:
    shape = tuple(high - low for low, high in block)
    if value.known is not None:
        found = np.asarray(value.known, value.dtype)
        return np.broadcast_to(found, value.shape)[tuple(slice(*pair) for pair in block)]
    if value.made_by is None:
        assert value.outside is not None
        return _block(value.outside, block, done)
    equation, params, ins = value.made_by, value.made_by.params, value.made_by.ins
    if equation.name in ELEMENTWISE:
        operands = [_block(v, block if v.shape else (), done) for v in ins]
        found = elementwise(equation, operands, value.dtype)
        if found is None:
            found = _with_jax(equation, [np.broadcast_to(x, shape) for x in operands])
        return found
    if equation.name in LAYOUT and equation.sources is not None:
        ranges = [(0, 1)] * len(ins[0].shape)
        for axis, source in enumerate(equation.sources):
            if source is not None:
                ranges[source] = block[axis]
        return np.broadcast_to(laid_out(equation, _block(ins[0], tuple(ranges), done)), shape)
    match equation.name:
        case "iota":
            axis = params["dimension"]
            along = np.arange(*block[axis], dtype=value.dtype)
            return np.broadcast_to(along.reshape([-1] + [1] * (len(shape) - axis - 1)), shape)
        case "slice" if not params["strides"] or {*params["strides"]} == {1}:
            starts = params["start_indices"]
        case "dynamic_slice":
            most = (n - size for n, size in zip(ins[0].shape, value.shape, strict=True))
            starts = [min(max(int(array(v)), 0), m) for v, m in zip(ins[1:], most, strict=True)]
        case _:
            starts = None
    if starts is not None:
        moved = tuple((a + s, b + s) for (a, b), s in zip(block, starts, strict=True))
        return _block(ins[0], moved, done)
    if any(math.prod(v.shape) > _MOST for v in (value, *ins)):
        raise MemoryError
    whole = _with_jax(equation, [np.broadcast_to(array(v), v.shape) for v in ins])
    return whole[tuple(slice(*pair) for pair in block)]


def elementwise(equation: Equation, operands: list[np.ndarray], dtype: Any) -> Any:
    """What an elementwise operation computes of arrays, as ``dtype``; None where only JAX knows."""
    name, function = equation.name, ELEMENTWISE.get(equation.name)
    with np.errstate(all="ignore"):
        if name == "select_n" and len(operands) == 3:
            found = np.where(operands[0], operands[2], operands[1])
        elif name == "integer_pow":
            found = np.power(operands[0], equation.params["y"])
        elif function is None or (
            name in ("div", "pow") and {x.dtype.kind for x in operands} - {"f"}
        ):
            return None
        else:
            found = function(*operands)
        return np.asarray(found).astype(dtype, copy=False)


def _with_jax(equation: Equation, operands: list[np.ndarray]) -> np.ndarray:
    with unwatched():
        given = [jnp.asarray(x, v.dtype) for x, v in zip(operands, equation.ins, strict=True)]
        made = equation.eqn.primitive.bind(*given, **equation.params)
        return np.asarray(made[0] if equation.eqn.primitive.multiple_results else made)
