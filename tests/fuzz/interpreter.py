"""Runs a function of JAX in NumPy, one primitive after the other.

A random graph's program runs once, and compiling it takes a second: most of what a check of it
would cost. Here nothing is compiled but the few primitives that NumPy has no counterpart for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from numpy.lib.stride_tricks import sliding_window_view

from jax_cudnn._core import compat
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.primitive import cudnn_p

Array = Any
Function = Callable[..., Any]


def interpreted(function: Function) -> Function:
    """``function`` of trees of arrays, run in NumPy; traced once for the shapes of each call.

    What no result needs is left out, as jit does it. Graphs run as their references.
    """
    traced = jax.jit(function)

    @functools.cache
    def program(structure: Any, avals: tuple[Any, ...]) -> tuple[Any, Sequence[Any], Any]:
        made = traced.trace(*jax.tree.unflatten(structure, avals))
        return *compat.live_program(made.jaxpr), jax.tree.structure(made.out_info)

    def run(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        arrays = [np.asarray(leaf) for leaf in leaves]
        avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        with jax.default_device(jax.local_devices(backend="cpu")[0]), np.errstate(all="ignore"):
            jaxpr, constants, results = program(structure, avals)
            return jax.tree.unflatten(results, _run(jaxpr, [*constants, *arrays]))

    return run


def _run(jaxpr: Any, arguments: Sequence[Array]) -> list[Array]:
    values = dict(zip(jaxpr.invars, map(np.asarray, arguments), strict=True))

    def value(x: Any) -> Array:  # of a variable or a literal
        return np.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else values[x]

    for equation in jaxpr.eqns:
        results = _results(equation, [value(x) for x in equation.invars])
        for x, result in zip(equation.outvars, results, strict=True):
            values[x] = np.asarray(result).astype(x.aval.dtype, copy=False).reshape(x.aval.shape)
    return [value(x) for x in jaxpr.outvars]


def _results(equation: Any, inputs: list[Array]) -> Sequence[Array]:
    name, params = equation.primitive.name, equation.params
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    if name in _CALLS and inner is not None:
        jaxpr, constants = compat.live_program(inner)
        return _run(jaxpr, [*constants, *inputs])
    if name == "scan":
        return _scan(params, inputs)
    if name == "optimization_barrier":
        return inputs
    if equation.primitive is cudnn_p:
        return interpreted(functools.partial(evaluate, params["spec"]))(*inputs)
    if name in _FUNCTIONS:
        return [_FUNCTIONS[name](*inputs)]
    if name in _WITH_PARAMETERS:
        return [_WITH_PARAMETERS[name](params, *inputs)]
    results = equation.primitive.bind(*map(jnp.asarray, inputs), **params)
    return results if equation.primitive.multiple_results else [results]


_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")


def _scan(params: Any, inputs: list[Array]) -> list[Array]:
    fixed, carried = compat.scan_sizes(params)
    jaxpr, constants = compat.live_program(params["jaxpr"])
    constants += inputs[:fixed]
    state, rows = inputs[fixed : fixed + carried], inputs[fixed + carried :]
    steps = range(params["length"])
    each = []
    for i in reversed(steps) if params["reverse"] else steps:
        results = _run(jaxpr, [*constants, *state, *(x[i] for x in rows)])
        state = results[:carried]
        each.append(results[carried:])
    stacks = each[::-1] if params["reverse"] else each
    return [*state, *map(np.stack, zip(*stacks, strict=True))]


_FUNCTIONS: dict[str, Function] = {
    **{name: getattr(np, name) for name in ("abs", "ceil", "cos", "exp", "expm1", "floor", "log")},
    **{name: getattr(np, name) for name in ("log1p", "sign", "sin", "sqrt", "square", "tan")},
    "tanh": np.tanh,
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "pow": np.power,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "is_finite": np.isfinite,
    "rem": np.fmod,
    "logistic": scipy.special.expit,
    "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "one_minus_square": lambda x: 1 - x * x,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "shift_right_arithmetic": np.right_shift,
    "polynomial": lambda x, *coefficients: np.polynomial.polynomial.polyval(x, coefficients),
    "select_n": lambda which, *cases: (
        np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)
    ),
}


def _broadcast(params: Any, x: Array, *_: Array) -> Array:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _reduced(reduce: Any, dtype: Any = None) -> Function:
    def function(params: Any, x: Array) -> Array:
        wide = x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x
        return reduce(wide, axis=tuple(params["axes"]))

    return function


def _cut(params: Any, x: Array) -> Array:
    """Floats with fewer bits of mantissa, rounded to the nearest, even ones first."""
    if x.dtype != np.float32 or params["exponent_bits"] != 8:
        return np.asarray(jax.lax.reduce_precision(x, **params))
    bits, unit = x.view(np.uint32), 1 << 23 - params["mantissa_bits"]
    last = (bits // np.uint32(unit)) & np.uint32(1)
    nearest = bits + np.uint32(max(unit // 2 - 1, 0)) + (last if unit > 1 else np.uint32(0))
    return np.where(np.isfinite(x), (nearest - nearest % np.uint32(unit)).view(np.float32), x)


def _iota(params: Any) -> Array:
    shape = [1] * len(params["shape"])
    shape[params["dimension"]] = -1
    values = np.arange(params["shape"][params["dimension"]]).reshape(shape)
    return np.broadcast_to(values, params["shape"])


def _round(params: Any, x: Array) -> Array:
    if params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.rint(x)
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def _windows(params: Any, x: Array, value: Any) -> Array:
    """Views of the windows of ``x``, their elements along the last half of the axes."""
    low_high = zip(params["padding"], params["base_dilation"], strict=True)
    x = _pad({"padding_config": [(*p, d - 1) for p, d in low_high]}, x, value)
    sizes = zip(params["window_dimensions"], params["window_dilation"], strict=True)
    views = sliding_window_view(x, [d * (r - 1) + 1 for r, d in sizes])
    views = views[tuple(slice(None, None, s) for s in params["window_strides"])]
    return views[(..., *(slice(None, None, d) for d in params["window_dilation"]))]


def _over_windows(reduce: Any, start: Callable[[Any], Any]) -> Function:
    def function(params: Any, x: Array) -> Array:
        value = np.asarray(start(x.dtype), x.dtype)
        return reduce(_windows(params, x, value), axis=tuple(range(x.ndim, 2 * x.ndim)))

    return function


def _lowest(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


def _slice(params: Any, x: Array) -> Array:
    strides = params["strides"] or [1] * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _pad(params: Any, x: Array, value: Array) -> Array:
    for axis, (low, high, inside) in enumerate(params["padding_config"]):
        size = (x.shape[axis] - 1) * (inside + 1) + 1 if x.shape[axis] else 0
        shape = list(x.shape)
        shape[axis] = size
        spread = np.full(shape, value, x.dtype)
        spread[(*[slice(None)] * axis, slice(None, None, inside + 1))] = x
        if low < 0 or high < 0:
            cut = slice(max(-low, 0), size - max(-high, 0))
            spread = spread[(*[slice(None)] * axis, cut)]
        width = [(0, 0)] * x.ndim
        width[axis] = max(low, 0), max(high, 0)
        x = np.pad(spread, width, constant_values=value)
    return x


def _dot(params: Any, a: Array, b: Array) -> Array:
    (contracted_a, contracted_b), (batch_a, batch_b) = params["dimension_numbers"]
    free_a = [i for i in range(a.ndim) if i not in (*contracted_a, *batch_a)]
    free_b = [i for i in range(b.ndim) if i not in (*contracted_b, *batch_b)]
    batch = [a.shape[i] for i in batch_a]
    count = math.prod(a.shape[i] for i in contracted_a)
    left = a.transpose(*batch_a, *free_a, *contracted_a).reshape(*batch, -1, count)
    right = b.transpose(*batch_b, *contracted_b, *free_b).reshape(*batch, count, -1)
    shape = (*batch, *(a.shape[i] for i in free_a), *(b.shape[i] for i in free_b))
    return np.matmul(_wide(left), _wide(right)).reshape(shape)


def _wide(x: Array) -> Array:
    """For the sums of a product: in float32, or the integers themselves."""
    return x if x.dtype.kind in "iub" else x.astype(np.float32, copy=False)


def _convolution(params: Any, image: Array, weight: Array) -> Array:
    numbers = params["dimension_numbers"]
    image = _wide(image).transpose(numbers.lhs_spec)
    weight = _wide(weight).transpose(numbers.rhs_spec)
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    ones = (1, 1)
    views = _windows(
        {
            "padding": ((0, 0), (0, 0), *params["padding"]),
            "base_dilation": (*ones, *params["lhs_dilation"]),
            "window_dimensions": (*ones, *weight.shape[2:]),
            "window_dilation": (*ones, *params["rhs_dilation"]),
            "window_strides": (*ones, *params["window_strides"]),
        },
        image,
        np.zeros((), image.dtype),
    )
    axes = tuple(range(2, image.ndim))
    views = views.reshape(*views.shape[: image.ndim], *weight.shape[2:])
    taps = tuple(range(image.ndim, views.ndim))
    count = max(groups, batches)
    pieces = np.split(views, count, 1 if groups > 1 else 0)
    results = [
        np.tensordot(x, w, axes=((1, *taps), (1, *axes)))
        for x, w in zip(pieces, np.split(weight, count, 0), strict=True)
    ]
    result = np.moveaxis(np.concatenate(results, -1), -1, 1)
    back = sorted(range(result.ndim), key=lambda axis: numbers.out_spec[axis])
    return result.transpose(back)


_WITH_PARAMETERS: dict[str, Function] = {
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "integer_pow": lambda params, x: x ** np.asarray(params["y"], np.float32).astype(x.dtype),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda params, x, *_: x.transpose(params["dimensions"] or range(x.ndim)).reshape(
        params["new_sizes"]
    ),
    "squeeze": lambda params, x: np.squeeze(x, tuple(params["dimensions"])),
    "expand_dims": lambda params, x: np.expand_dims(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "concatenate": lambda params, *x: np.concatenate(x, params["dimension"]),
    "slice": _slice,
    "pad": _pad,
    "copy": lambda params, x: x,
    "bitcast_convert_type": lambda params, x: x.view(params["new_dtype"]),
    "reduce_precision": _cut,
    "round": _round,
    "iota": _iota,
    "reduce_window_sum": _over_windows(np.sum, lambda dtype: 0),
    "reduce_window_max": _over_windows(np.max, _lowest),
    "stop_gradient": lambda params, x: x,
    "reduce_sum": _reduced(np.sum),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_prod": _reduced(np.prod),
    "div": lambda params, a, b: a / b if a.dtype.kind not in "iu" else a // b,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}
