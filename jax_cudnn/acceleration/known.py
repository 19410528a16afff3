"""Values that are the same in every run: computed from constants and positions, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..ops.attention.score_mod.value import unwatched
from .values import ELEMENTWISE, VARYING, Equation, Value, same_order

Block = tuple[tuple[int, int], ...]
_Done = dict[tuple[Value, Block], np.ndarray]
_MOST = 1 << 24  # elements of a value that is not computed in blocks
_ROWS = 256

_erf = np.vectorize(math.erf, otypes="d")
_NUMPY: dict[str, Any] = {
    **{name: getattr(np, name) for name in ("add", "abs", "floor", "ceil", "sign", "square")},
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "log", "log1p", "sqrt")},
    **{name: getattr(np, name) for name in ("tanh", "sin", "cos", "tan")},
    **{"sub": np.subtract, "mul": np.multiply, "neg": np.negative, "add_any": np.add},
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
"""The meaning of elementwise operations in NumPy; all others are JAX's, of one block."""


def is_known(value: Value) -> bool:
    """Whether a value depends on nothing that is passed to the program."""
    return value.depth is not None


def array(value: Value) -> np.ndarray:
    """A known value, with one element along the dimensions in which it does not vary."""
    return _block(value, _ranges(value), {})


def rows(value: Value, axis: int) -> Iterator[tuple[int, np.ndarray]]:
    """As :func:`array`, in blocks along a dimension: where each begins, and the block."""
    whole = _ranges(value)
    for at in range(0, whole[axis][1], _ROWS):
        ranges = [*whole]
        ranges[axis] = at, min(at + _ROWS, whole[axis][1])
        yield at, _block(value, tuple(ranges), {})


def _ranges(value: Value) -> Block:
    return tuple((0, n if v else 1) for n, v in zip(value.shape, value.varies, strict=True))


def is_small(value: Value) -> bool:
    return math.prod(value.shape) <= _MOST


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
    equation, params = value.made_by, value.made_by.params
    if equation.name in ELEMENTWISE:
        operands = [_block(v, block if v.shape else (), done) for v in equation.ins]
        return _elementwise(equation, operands, shape)
    match equation.name:
        case "iota":
            low, high = block[params["dimension"]]
            along = np.arange(low, high, dtype=value.dtype)
            ones = [1] * len(shape)
            ones[params["dimension"]] = high - low
            return np.broadcast_to(along.reshape(ones), shape)
        case "broadcast_in_dim":
            (operand,) = equation.ins[:1]
            ranges, ones = [], [1] * len(shape)
            for size, axis in zip(operand.shape, params["broadcast_dimensions"], strict=True):
                ranges.append(block[axis] if size == value.shape[axis] else (0, 1))
                ones[axis] = ranges[-1][1] - ranges[-1][0]
            return np.broadcast_to(_block(operand, tuple(ranges), done).reshape(ones), shape)
        case "transpose":
            (operand,), order = equation.ins, params["permutation"]
            ranges = [(0, 0)] * len(order)
            for axis, source in enumerate(order):
                ranges[source] = block[axis]
            return _block(operand, tuple(ranges), done).transpose(order)
        case "reshape" | "squeeze" | "expand_dims" if same_order(value, equation.ins[0]):
            wide = iter(pair for pair, size in zip(block, value.shape, strict=True) if size != 1)
            ranges = [next(wide) if size != 1 else (0, 1) for size in equation.ins[0].shape]
            return _block(equation.ins[0], tuple(ranges), done).reshape(shape)
        case "slice" if not params["strides"] or {*params["strides"]} == {1}:
            starts = params["start_indices"]
            moved = tuple((a + s, b + s) for (a, b), s in zip(block, starts, strict=True))
            return _block(equation.ins[0], moved, done)
        case "dynamic_slice":
            operand, *at = equation.ins
            moved = []
            for (a, b), start, size, whole in zip(
                block, at, value.shape, operand.shape, strict=True
            ):
                s = min(max(int(array(start)), 0), whole - size)
                moved.append((a + s, b + s))
            return _block(operand, tuple(moved), done)
    if not all(is_small(v) for v in (value, *equation.ins)):
        raise MemoryError
    whole = _with_jax(equation, [array(v) for v in equation.ins])
    return whole[tuple(slice(*pair) for pair in block)]


def elementwise(equation: Equation, operands: list[np.ndarray], dtype: Any) -> Any:
    """What an elementwise operation computes of arrays, as ``dtype``; None where only JAX knows."""
    name = equation.name
    with np.errstate(all="ignore"):
        if name == "select_n" and len(operands) == 3:
            which, first, second = operands
            return np.where(which, second, first).astype(dtype, copy=False)
        if name in ("convert_element_type", "copy", "copy_p", "stop_gradient", *VARYING):
            return operands[0].astype(dtype)
        if name == "integer_pow":
            return np.power(operands[0], equation.params["y"]).astype(dtype, copy=False)
        if name in ("div", "pow") and all(x.dtype.kind == "f" for x in operands):
            return (np.divide if name == "div" else np.power)(*operands).astype(dtype, copy=False)
        if name in _NUMPY:
            return np.asarray(_NUMPY[name](*operands)).astype(dtype, copy=False)
    return None


def _elementwise(equation: Equation, operands: list[np.ndarray], shape: Any) -> np.ndarray:
    found = elementwise(equation, operands, equation.outs[0].dtype)
    if found is None:
        found = _with_jax(equation, [np.broadcast_to(x, shape) for x in operands])
    return found


def _with_jax(equation: Equation, operands: list[np.ndarray]) -> np.ndarray:
    with unwatched():
        given = [jnp.asarray(x, v.dtype) for x, v in zip(operands, equation.ins, strict=True)]
        made = equation.eqn.primitive.bind(*given, **equation.params)
        return np.asarray(made[0] if equation.eqn.primitive.multiple_results else made)
