"""What stands between scores and their softmax: scale, bias, masks, a function of the scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from .known import array, is_known, rows
from .values import ELEMENTWISE, VARYING, Equation, Value, between

Dims = tuple[Any, ...]
"""For each dimension of an array the axis of the scores along which it varies, or None."""

_NUMBERS = "biufV"  # kinds of NumPy's dtypes; V are bfloat16 and the like
HIDING = -1e4
"""A score of at most this is taken for that of a hidden key: ``exp`` of it is 0."""
LAYOUT = ("transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims")


class Unclear(Exception):
    """Why equations are not attention that can be replaced, and what to change."""


@dataclass(frozen=True)
class Side:
    """An array that meets the scores, and along which of their axes it varies."""

    value: Value
    dims: Dims
    factor: float = 1.0
    negated: bool = False


@dataclass
class Scores:
    """``softcap``-like function of the scaled scores, plus biases, under masks; or -inf."""

    scale: float = 1.0
    biases: list[Side] = field(default_factory=list)
    masks: list[Side] = field(default_factory=list)
    infinite: bool = False
    """Whether hidden scores are -inf, so that a query that sees no key has no result."""
    rest: Value | None = None
    """What is left, as a function of the product."""
    rest_factor: float = 1.0


def moved(equation: Equation, dims: Dims) -> Dims | None:
    """The dims of the result of an operation that moves dimensions; None if it mixes them."""
    operand, result = equation.ins[0], equation.outs[0]
    match equation.name:
        case "transpose":
            return tuple(dims[axis] for axis in equation.params["permutation"])
        case "broadcast_in_dim":
            new: list[Any] = [None] * len(result.shape)
            places = zip(equation.params["broadcast_dimensions"], operand.shape, dims, strict=True)
            for axis, size, dim in places:
                new[axis] = dim if size == result.shape[axis] else None
            return tuple(new)
        case "reshape" | "squeeze" | "expand_dims":
            wide = [(n, d) for n, d in zip(operand.shape, dims, strict=True) if n != 1]
            if [n for n, _ in wide] != [n for n in result.shape if n != 1]:
                return None
            left = iter(wide)
            return tuple(next(left)[1] if n != 1 else None for n in result.shape)
    return None


def follow(start: Value, meaning: Callable[[Equation], Any]) -> None:
    """Asks for the meaning of each equation that reads ``start``, or a result that has a meaning,
    in order."""
    todo, seen = {*start.users}, set()
    while todo:
        equation = min(todo, key=lambda e: e.at)
        todo.remove(equation)
        seen.add(equation)
        if not equation.inner and len(equation.outs) == 1 and meaning(equation) is not None:
            todo |= {user for user in equation.outs[0].users if user not in seen}


def computed(equations: Sequence[Equation], env: dict[Value, Any], other: Any) -> dict[Value, Any]:
    """Elementwise equations in float32, for values in ``env`` and those that ``other`` gives."""
    for equation in equations:
        name, out = equation.name, equation.outs[0]
        if name in (*LAYOUT, *VARYING) or (equation.casts and _is_float(out)):
            env[out] = env[equation.ins[0]]
            if equation.casts and env[out].dtype == bool:
                env[out] = env[out].astype("float32")
        else:
            given = jnp.broadcast_arrays(*(env[v] if v in env else other(v) for v in equation.ins))
            env[out] = equation.eqn.primitive.bind(*given, **equation.params)
    return env


def _is_float(value: Value) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def constant(value: Value) -> Any:
    """A known number as an array; floats are float32."""
    return jnp.asarray(number(value), "float32" if _is_float(value) else value.dtype)


def unwidened(last: Value, dtype: Any, known: Container[Value]) -> Value:
    """The value that is cast to more bits than ``dtype`` has, in the place of the cast: whoever
    reads the result casts for less than writing it so would cost."""
    while last.dtype.itemsize > dtype.itemsize and (cast := last.made_by) is not None:
        if not cast.casts or cast.ins[0] not in known or cast.ins[0].dtype == last.dtype:
            break
        last = cast.ins[0]
    return last


def narrowed(value: Value, dims: Dims) -> tuple[Value, Dims]:
    """The array before it was broadcast, and its dims. ``dims``: the axis of the scores at each
    dimension; where the array is as large as one element, it varies along none."""
    dims = tuple(d if n != 1 else None for d, n in zip(dims, value.shape, strict=True))
    while (made := value.made_by) is not None:
        operand = made.ins[0] if made.ins else None
        if made.name == "broadcast_in_dim":
            assert operand is not None
            axes, sizes = made.params["broadcast_dimensions"], operand.shape
            dims = tuple(dims[a] if n != 1 else None for a, n in zip(axes, sizes, strict=True))
        elif made.name in ("reshape", "squeeze", "expand_dims"):
            assert operand is not None
            wide = [n for n in value.shape if n != 1]
            if [n for n in operand.shape if n != 1] != wide:
                break
            left = iter(d for d, n in zip(dims, value.shape, strict=True) if n != 1)
            dims = tuple(next(left) if n != 1 else None for n in operand.shape)
        elif made.name == "transpose":
            assert operand is not None
            old = [None] * len(dims)
            for axis, source in enumerate(made.params["permutation"]):
                old[source] = dims[axis]
            dims = tuple(old)
        else:
            break
        value = operand
    return value, tuple(d if v else None for d, v in zip(dims, value.varies, strict=True))


def number(value: Value) -> float | None:
    """A value that is one known number in all places."""
    if any(value.varies) or not is_known(value) or value.dtype.kind not in _NUMBERS:
        return None
    return float(array(value).reshape(()).astype("float64"))


def unchanged(equation: Equation) -> int | None:
    """The operand that an elementwise result is equal to: of an addition of 0, a product with 1, a
    choice that is known; None for all others."""
    name, ins = equation.name, equation.ins
    if name == "select_n" and len(ins) == 3:
        which = number(ins[0])
        return None if which is None else 1 + int(which)
    nothing = {"add": 0.0, "add_any": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}.get(name)
    if nothing is None or len(ins) != 2:
        return None
    if number(ins[1]) == nothing:
        return 0
    return 1 if name in ("add", "add_any", "mul") and number(ins[0]) == nothing else None


def read(z: Value, product: Value, dims_of: Mapping[Value, Dims]) -> Scores:
    """What ``z`` is as a function of ``product``. Raises Unclear."""
    found, value, factor = Scores(), z, 1.0

    def side(v: Value) -> Side:
        small, dims = narrowed(v, dims_of[value] if v.shape else ())
        return Side(small, dims, factor)

    while value is not product:
        made = value.made_by
        assert made is not None
        inner = [v for v in made.ins if v in dims_of]
        if made.casts or made.name in LAYOUT:
            value = made.ins[0]
            continue
        if len(inner) != 1:
            break
        (below,) = inner
        others = [v for v in made.ins if v is not below]
        known = number(others[0]) if len(others) == 1 else None
        if made.name == "neg":
            factor = -factor
        elif made.name == "mul" and known is not None:
            factor *= known
        elif made.name == "div" and known and made.ins[0] is below:
            factor /= known
        elif made.name in ("add", "sub", "add_any"):
            sign = -1.0 if made.name == "sub" and made.ins[1] is not below else 1.0
            if made.name == "sub" and made.ins[1] is below:
                found.biases.append(side(made.ins[0]))
                factor = -factor
            else:
                (other,) = others
                if known != 0:
                    added = side(other)
                    signed = Side(added.value, added.dims, factor * sign)
                    for one in _terms(signed):
                        mask = _hiding_bias(one)
                        if mask is None:
                            found.biases.append(one)
                        else:
                            found.masks.append(mask[0])
                            found.infinite |= mask[1]
        elif made.name == "select_n" and len(made.ins) == 3 and made.ins[0] is not below:
            hidden = made.ins[1] if made.ins[2] is below else made.ins[2]
            least = number(hidden)
            if least is None or not least * factor <= HIDING:
                break
            found.infinite |= math.isinf(least)
            which = side(made.ins[0])
            found.masks.append(Side(which.value, which.dims, negated=made.ins[2] is not below))
        elif made.name == "max" and known is not None and known <= HIDING:
            pass
        else:
            break
        value = below
    if value is product:
        found.scale = factor
    else:
        found.rest, found.rest_factor = value, factor
    return found


def _terms(side: Side) -> Iterator[Side]:
    """The arrays whose sum is added to the scores."""
    value, dims = side.value, side.dims
    made = value.made_by
    while made is not None and made.casts and not is_known(value):
        value, dims = narrowed(made.ins[0], dims)
        made = value.made_by
    if made is not None and made.name == "add" and not is_known(value):
        for v in made.ins:
            small, axes = narrowed(v, dims if v.shape else ())
            yield from _terms(Side(small, axes, side.factor))
    else:
        yield side


def _hiding_bias(side: Side) -> tuple[Side, bool] | None:
    """The mask that a bias of zeros and large negative numbers is; None for other biases."""
    value, dims = side.value, side.dims
    while (made := value.made_by) is not None and made.casts:
        value, dims = narrowed(made.ins[0], dims)
    if made is not None and made.name == "select_n" and len(made.ins) == 3:
        numbers = [number(v) for v in made.ins[1:]]
        low = [n is not None and n * side.factor <= HIDING for n in numbers]
        if None not in numbers and sorted(low) == [False, True] and 0 in numbers:
            which, dims = narrowed(made.ins[0], dims)
            infinite = any(math.isinf(n) for n in numbers if n is not None)
            return Side(which, dims, negated=low[1]), infinite
    if is_known(value):
        if not any(value.varies):
            return None
        lowest = -math.inf
        for _, block in rows(value, value.varies.index(True)):
            seen = block.astype("float32") * side.factor
            if not np.all((seen == 0) | (seen <= HIDING)):
                return None
            if np.any(seen < 0):
                lowest = max(lowest, float(seen[seen < 0].max()))
        hides = value.dtype == bool  # where it is True; a number hides where it is not 0
        return Side(value, dims, side.factor, negated=hides), lowest == -math.inf
    return None


def all_of(arrays: list[Any], sides: list[Side]) -> Any:
    """The mask that is True where all are; None without one."""
    mask = None
    for x, side in zip(arrays, sides, strict=True):
        one = (x != 0) ^ side.negated if side.value.dtype == bool else x == 0
        mask = one if mask is None else mask & one
    return mask


def added(arrays: list[Any], sides: list[Side]) -> Any:
    total = None
    for x, side in zip(arrays, sides, strict=True):
        x = x * jnp.asarray(side.factor, x.dtype) if side.factor != 1 else x
        total = x if total is None else total + x
    return total


# -- the rest, as a score_mod ----------------------------------------------------------------------


def score_mod(
    rest: Value, factor: float, product: Value, dims_of: Mapping[Value, Dims]
) -> tuple[Callable[..., Any], list[Side]]:
    """``f(score, b, h, q, kv, *operands)`` that computes ``factor * rest``, and its operands."""
    made = between(rest, lambda v: v in dims_of and v is not product)
    for equation in made:
        if equation.name not in (*ELEMENTWISE, *LAYOUT):
            raise Unclear(f"{equation.name} between the scores and their softmax")
    chain = sorted(made, key=lambda e: e.at)
    sides: dict[Value, int] = {}
    operands: list[Side] = []
    for equation in chain:
        for v in equation.ins:
            if v not in dims_of and v not in sides and number(v) is None:
                sides[v] = len(operands)
                dims = dims_of[equation.outs[0]] if v.shape else ()
                operands.append(Side(*narrowed(v, dims)))

    def modified(score: Any, b: Any, h: Any, q: Any, kv: Any, *arrays: Any) -> Any:
        def other(v: Value) -> Any:
            return arrays[sides[v]] if v in sides else constant(v)

        found = computed(chain, {product: score}, other)[rest]
        return found * factor if factor != 1 else found

    return modified, operands
