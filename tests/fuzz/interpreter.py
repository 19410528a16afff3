"""Runs a function of JAX in NumPy, one primitive after the other.

A random graph's program runs once, and compiling it takes a second: most of what a check of it
would cost. Here only the few primitives that NumPy has no counterpart for are compiled.
"""

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

    What no result needs is left out, as jit does it. Graphs run as their references. Given
    ``noise``, all that is computed and multiplied is moved by it.
    """
    traced = jax.jit(function)

    @functools.cache
    def program(structure: Any, avals: tuple[Any, ...]) -> tuple[Any, Sequence[Any], Any]:
        made = traced.trace(*jax.tree.unflatten(structure, avals))
        return *compat.live_program(made.jaxpr), jax.tree.structure(made.out_info)

    def run(*arguments: Any, noise: Any = None) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        arrays = [np.asarray(leaf) for leaf in leaves]
        avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
        with jax.default_device(jax.local_devices(backend="cpu")[0]), np.errstate(all="ignore"):
            jaxpr, constants, results = program(structure, avals)
            return jax.tree.unflatten(results, _run(jaxpr, [*constants, *arrays], noise))

    return run


def _run(jaxpr: Any, arguments: Sequence[Array], noise: Any) -> list[Array]:
    values = dict(zip(jaxpr.invars, map(np.asarray, arguments), strict=True))

    def value(x: Any) -> Array:  # of a variable or a literal
        return np.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else values[x]

    for equation in jaxpr.eqns:
        inputs = [value(x) for x in equation.invars]
        if noise and equation.primitive.name in _PRODUCTS:
            inputs = [noise.moved(x, noise.cut) for x in inputs]
        exact = not noise or equation.primitive.name in (*_WITHOUT_ROUNDING, *_CALLS)
        for x, result in zip(equation.outvars, _results(equation, inputs, noise), strict=True):
            shape, made = x.aval.shape, np.asarray(result)
            made = made if made.size == math.prod(shape) else np.broadcast_to(made, shape)
            made = made if exact else noise.moved(made, noise.amount)
            values[x] = made.astype(x.aval.dtype, copy=False).reshape(shape)
    return [value(x) for x in jaxpr.outvars]


def _results(equation: Any, inputs: list[Array], noise: Any) -> Sequence[Array]:
    name, params = equation.primitive.name, equation.params
    inner = params.get("jaxpr") or params.get("call_jaxpr")
    if name in _CALLS and inner is not None:
        jaxpr, constants = compat.live_program(inner)
        return _run(jaxpr, [*constants, *inputs], noise)
    if name == "scan":
        return _steps(params, inputs, noise)
    if equation.primitive is cudnn_p:
        return interpreted(functools.partial(evaluate, params["spec"]))(*inputs, noise=noise)
    if name == "optimization_barrier":
        return inputs
    if name in _FUNCTIONS:
        return [_FUNCTIONS[name](*inputs)]
    if name in _WITH_PARAMETERS:
        return [_WITH_PARAMETERS[name](params, *inputs)]
    results = equation.primitive.bind(*map(jnp.asarray, inputs), **params)
    return results if equation.primitive.multiple_results else [results]


def _steps(params: Any, inputs: list[Array], noise: Any) -> list[Array]:
    fixed, kept = compat.scan_sizes(params)
    constants, state, rows = inputs[:fixed], inputs[fixed : fixed + kept], inputs[fixed + kept :]
    jaxpr, found, places = params["jaxpr"], [], range(params["length"])
    for i in reversed(places) if params["reverse"] else places:
        made = _run(jaxpr.jaxpr, [*constants, *state, *(x[i] for x in rows)], noise)
        state = made[:kept]
        found.append(made[kept:])
    stacked = zip(*(found[::-1] if params["reverse"] else found), strict=True)
    return [*state, *map(np.stack, stacked)]


_PRODUCTS = ("dot_general", "conv_general_dilated")
_WITHOUT_ROUNDING = (
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "transpose", "rev", "neg"),
    *("concatenate", "slice", "pad", "select_n", "max", "min", "reduce_max", "reduce_min", "iota"),
    *("sign", "abs", "gather", "scatter", "dynamic_slice", "stop_gradient"),
)
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2")
_SAME = (
    *("abs", "ceil", "cos", "exp", "expm1", "floor", "log", "log1p", "sign", "sin", "sqrt"),
    *("square", "tan", "tanh", "add"),
)
_OTHERS = {
    **{"add_any": "add", "sub": "subtract", "mul": "multiply", "neg": "negative"},
    **{"max": "maximum", "min": "minimum", "pow": "power", "eq": "equal", "ne": "not_equal"},
    **{"lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "rem": "fmod"},
    **{"is_finite": "isfinite", "and": "bitwise_and", "or": "bitwise_or", "not": "invert"},
    "shift_right_arithmetic": "right_shift",
}
_FUNCTIONS: dict[str, Function] = {
    **{name: getattr(np, name) for name in _SAME},
    **{name: getattr(np, other) for name, other in _OTHERS.items()},
    "logistic": scipy.special.expit,
    "erf": scipy.special.erf,
    "erfc": scipy.special.erfc,
    "one_minus_square": lambda x: 1 - x * x,
    "polynomial": lambda x, *coefficients: np.polynomial.polynomial.polyval(x, coefficients),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: (
        np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)
    ),
}


def _reduced(reduce: Any, start: float | None = None) -> Function:
    def function(params: Any, x: Array) -> Array:
        wide = x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "iub" else x
        empty = {} if wide.size or start is None else {"initial": start}
        return reduce(wide, axis=tuple(params["axes"]), **empty)

    return function


def _broadcast(params: Any, x: Array, *_: Array) -> Array:
    new = {*range(len(params["shape"]))} - {*params["broadcast_dimensions"]}
    return np.broadcast_to(np.expand_dims(x, tuple(new)), params["shape"])


def _cut(params: Any, x: Array) -> Array:
    bfloat16 = (params["exponent_bits"], params["mantissa_bits"]) == (8, 7)
    return x.astype(jnp.bfloat16) if bfloat16 else np.asarray(jax.lax.reduce_precision(x, **params))


def _round(params: Any, x: Array) -> Array:
    to_even = params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return np.rint(x) if to_even else np.copysign(np.floor(np.abs(x) + 0.5), x)


def _slice(params: Any, x: Array) -> Array:
    strides = params["strides"] or [None] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _pad(params: Any, x: Array, value: Array) -> Array:
    config = params["padding_config"]
    gaps = [gap for *_, gap in config]
    sizes = [max((n - 1) * (gap + 1) + 1, 0) for n, gap in zip(x.shape, gaps, strict=True)]
    spread = np.full(sizes, value, x.dtype)
    spread[tuple(slice(None, None, gap + 1) for gap in gaps)] = x
    bounds = zip(sizes, config, strict=True)
    cut = tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in bounds)
    width = [(max(low, 0), max(high, 0)) for low, high, _ in config]
    return np.pad(spread[cut], width, constant_values=value)


def _dot(params: Any, a: Array, b: Array) -> Array:
    (over_a, over_b), (batch_a, batch_b) = params["dimension_numbers"]
    free_a = [i for i in range(a.ndim) if i not in (*over_a, *batch_a)]
    free_b = [i for i in range(b.ndim) if i not in (*over_b, *batch_b)]
    batch, count = [a.shape[i] for i in batch_a], math.prod(a.shape[i] for i in over_a)
    rows, columns = (math.prod(x.shape[i] for i in of) for x, of in ((a, free_a), (b, free_b)))
    left = a.transpose(*batch_a, *free_a, *over_a).reshape(*batch, rows, count)
    right = b.transpose(*batch_b, *over_b, *free_b).reshape(*batch, count, columns)
    return np.matmul(_wide(left), _wide(right))


def _wide(x: Array) -> Array:
    """For the sums of a product: at least in float32, or the integers themselves."""
    return x if x.dtype.kind in "iub" or x.dtype == float else x.astype(np.float32, copy=False)


def _convolution(params: Any, image: Array, weight: Array) -> Array:
    numbers, dilation = params["dimension_numbers"], params["rhs_dilation"]
    image = _wide(image).transpose(numbers.lhs_spec)
    weight = _wide(weight).transpose(numbers.rhs_spec)
    rank = image.ndim - 2
    gaps = zip(params["padding"], params["lhs_dilation"], strict=True)
    padding = [(0, 0, 0)] * 2 + [(*pads, gap - 1) for pads, gap in gaps]
    image = _pad({"padding_config": padding}, image, np.zeros((), image.dtype))
    reach = [d * (r - 1) + 1 for d, r in zip(dilation, weight.shape[2:], strict=True)]
    views = sliding_window_view(image, reach, axis=tuple(range(2, 2 + rank)))
    steps = (slice(None, None, s) for s in params["window_strides"])
    views = views[(slice(None), slice(None), *steps)]
    views = views[(..., *(slice(None, None, d) for d in dilation))]
    groups = params["feature_group_count"]
    count, axis = max(groups, params["batch_group_count"]), 1 if groups > 1 else 0
    axes = (1, *range(2 + rank, 2 + 2 * rank)), (1, *range(2, 2 + rank))
    pieces = zip(np.split(views, count, axis), np.split(weight, count, 0), strict=True)
    result = np.concatenate([np.tensordot(x, w, axes=axes) for x, w in pieces], -1)
    result = np.moveaxis(result, -1, 1)
    return result.transpose(sorted(range(result.ndim), key=lambda axis: numbers.out_spec[axis]))


_WITH_PARAMETERS: dict[str, Function] = {
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "integer_pow": lambda params, x: x ** np.asarray(params["y"], np.float32).astype(x.dtype),
    "broadcast_in_dim": _broadcast,
    "reshape": lambda params, x, *_: x.transpose(params["dimensions"] or range(x.ndim)),
    **dict.fromkeys(("squeeze", "expand_dims", "copy", "stop_gradient"), lambda params, x: x),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "concatenate": lambda params, *x: np.concatenate(x, params["dimension"]),
    "slice": _slice,
    "pad": _pad,
    "bitcast_convert_type": lambda params, x: x.view(params["new_dtype"]),
    "reduce_precision": _cut,
    "round": _round,
    "iota": lambda params: np.indices(params["shape"], sparse=True)[params["dimension"]],
    "reduce_sum": _reduced(np.sum),
    "reduce_max": _reduced(np.max, -np.inf),
    "reduce_min": _reduced(np.min, np.inf),
    "reduce_prod": _reduced(np.prod),
    "div": lambda params, a, b: (
        a / b if a.dtype.kind not in "iu" else np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
    ),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}
