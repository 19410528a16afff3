"""Random calls of the public functions, and what they mean, in jnp, lax and Flax.

An entry of ``TABLE`` draws the operands and options of one function, and gives these with the
function and its meaning, as the arguments of :class:`calls.Call`.
"""

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax_cases import CASES
from jax import lax

import jax_cudnn as jc

from . import attentions
from .calls import FIRST, SECOND, Call, Draw, Entry, entry

ACTIVATIONS = {
    **{name: getattr(jax.nn, name) for name in ("relu", "relu6", "leaky_relu", "silu", "sigmoid")},
    **{name: getattr(jax.nn, name) for name in ("tanh", "elu", "softplus")},
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}
# The channels of images and of weights first, last, and as lax.conv_transpose has them.
_ORDERS = (("NC{0}", "OI{0}"), ("N{0}C", "O{0}I"), ("N{0}C", "{0}IO"))


def _followed(
    draw: Draw, function: Any, exact: Any, operands: Entry, options: Entry, axis: int | None = -1
) -> Entry:
    """A product and what may follow it, with features at an axis, or without any."""
    shape = jax.eval_shape(functools.partial(exact, **options), **operands).shape
    of = () if draw.chance(0.2) else (1 if axis is None else shape[axis],)
    dtype = draw.of(draw.dtype, "float32")
    operands |= draw.some(0.3, scale=draw.floats(*of, dtype=dtype))
    operands |= draw.some(0.4, bias=draw.floats(*of, dtype=dtype))
    operands |= draw.some(0.3 * (axis is not None), residual=draw.floats(*shape))
    options |= draw.some(0.4, activation=draw.of(*ACTIVATIONS))
    return entry(function, exact, operands, options)


def _after(y: Any, bias: Any, scale: Any, residual: Any, activation: Any, axis: int = -1) -> Any:
    of = [-1 if i == axis % max(y.ndim, 1) else 1 for i in range(y.ndim)]
    bias, scale = (x.reshape(of) if getattr(x, "ndim", 0) else x for x in (bias, scale))
    y = y * scale + bias + residual
    return ACTIVATIONS[activation](y) if activation else y


def _matmul(
    a: Any, b: Any, bias: Any = 0.0, scale: Any = 1.0, residual: Any = 0.0, activation: Any = None,
    transpose_a: bool = False, transpose_b: bool = False, **_: Any,
) -> Any:  # fmt: skip
    a, b = (
        jnp.swapaxes(x, -2, -1) if t and x.ndim > 1 else x
        for x, t in ((a, transpose_a), (b, transpose_b))
    )
    return _after(jnp.matmul(a, b), bias, scale, residual, activation)


def matmul(draw: Draw) -> Entry:
    m, k, n = (draw.size(8, 16, 24, 33, 5) for _ in "mkn")
    lead = [draw.size(2, 3) for _ in range(draw.of(0, 0, 1, 2))]
    leads = [
        [draw.of(size, size, size, 1) for size in lead[draw.of(0, 0, len(lead)) :]] for _ in "ab"
    ]
    options = draw.some(0.2, transpose_a=True, transpose_b=True, preferred_element_type="float32")
    a = [*leads[0], *((k, m) if "transpose_a" in options else (m, k))]
    b = [*leads[1], *((n, k) if "transpose_b" in options else (k, n))]
    a, b = [k] if draw.chance(0.08) else a, [k] if draw.chance(0.08) else b
    operands = {"a": draw.floats(*a), "b": draw.floats(*b, scale=max(k, 1) ** -0.5)}
    return _followed(draw, jc.ops.matmul, _matmul, operands, options, -1 if len(b) > 1 else None)


def _conv(
    x: Any, w: Any, bias: Any = 0.0, scale: Any = 1.0, residual: Any = 0.0, activation: Any = None,
    *, strides: Any, padding: Any, dilation: Any, groups: int = 1, dimension_numbers: Any, **_: Any,
) -> Any:  # fmt: skip
    y = lax.conv_general_dilated(
        x, w, strides, padding, None, dilation, dimension_numbers, feature_group_count=groups
    )
    return _after(y, bias, scale, residual, activation, dimension_numbers[2].index("C"))


def _image(draw: Draw) -> tuple[Any, ...]:
    """The letters of the spatial dimensions, sizes, windows, strides, dilations and padding."""
    letters = draw.of("HW", "HW", "W", "DHW")
    most = {1: (12, 16, 27), 2: (5, 6, 8), 3: (3, 4, 5)}[len(letters)]
    sizes = [draw.of(*most) for _ in letters]
    window = [draw.of(1, 3, 3, 2) for _ in letters]
    strides = [draw.of(1, 1, 2)] * len(letters)
    dilation = [draw.of(1, 1, 1, 2)] * len(letters)
    pads = [(draw.of(0, 1), draw.of(0, 1, 2)) for _ in letters]
    reach = [(r - 1) * d + 1 for r, d in zip(window, dilation, strict=True)]
    sizes = [max(x, r) for x, r in zip(sizes, reach, strict=True)]
    return letters, sizes, window, strides, dilation, draw.of("SAME", "SAME", "VALID", pads)


def _in_order(order: str, letters: str, spatial: Any, **others: int) -> list[int]:
    return [{**others, **dict(zip(letters, spatial, strict=True))}[letter] for letter in order]


def conv(draw: Draw) -> Entry:
    letters, sizes, window, strides, dilation, padding = _image(draw)
    groups, c = draw.of(1, 1, 1, 2), draw.size(8, 8, 16, 3)
    c, k = c * groups, draw.size(8, 16, 5) * groups
    image, weight = (order.format(letters) for order in draw.of(*_ORDERS))
    x = _in_order(image, letters, sizes, N=draw.size(1, 2, 3), C=c)
    w = _in_order(weight, letters, window, O=k, I=c // groups)
    operands = {"x": draw.floats(*x), "w": draw.floats(*w, scale=0.2)}
    options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    options["dimension_numbers"] = (image, weight, image)
    return _followed(draw, jc.ops.conv, _conv, operands, options, image.index("C"))


def _conv_transpose(
    x: Any, w: Any, bias: Any = 0.0, scale: Any = 1.0, residual: Any = 0.0, activation: Any = None,
    *, strides: Any, padding: Any, dilation: Any, dimension_numbers: Any, transpose_kernel: bool,
) -> Any:  # fmt: skip
    y = lax.conv_transpose(x, w, strides, padding, dilation, dimension_numbers, transpose_kernel)
    return _after(y, bias, scale, residual, activation)


def conv_transpose(draw: Draw) -> Entry:
    letters, sizes, window, strides, dilation, padding = _image(draw)
    c, k, turned = draw.size(8, 16, 3), draw.size(8, 16, 5), draw.chance(0.3)
    x = [draw.size(1, 2, 3), *sizes, c]
    w = [*window, *((k, c) if turned else (c, k))]
    operands = {"x": draw.floats(*x), "w": draw.floats(*w, scale=0.2)}
    options = {"strides": strides, "padding": padding, "dilation": dilation}
    image = f"N{letters}C"
    options |= {"dimension_numbers": (image, f"{letters}IO", image), "transpose_kernel": turned}
    return _followed(draw, jc.ops.conv_transpose, _conv_transpose, operands, options)


def conv_general_dilated(draw: Draw) -> Entry:
    letters, sizes, window, strides, dilation, padding = _image(draw)
    groups, batches = draw.of((1, 1), (1, 1), (2, 1), (1, 2))
    c, k = draw.of(8, 4, 6), draw.of(8, 4)
    image, weight = (order.format(letters) for order in draw.of(*_ORDERS))
    x = _in_order(image, letters, sizes, N=2 * batches, C=c)
    w = _in_order(weight, letters, window, O=k, I=c // groups)
    options = {"window_strides": strides, "padding": padding, "rhs_dilation": dilation}
    if not isinstance(padding, str):
        options["lhs_dilation"] = [draw.of(1, 1, 2)] * len(letters)
    options |= {"dimension_numbers": (image, weight, image), "feature_group_count": groups}
    options |= {"batch_group_count": batches}
    operands = {"lhs": draw.floats(*x), "rhs": draw.floats(*w, scale=0.2)}
    return entry(jc.ops.conv_general_dilated, lax.conv_general_dilated, operands, options)


def dot_general(draw: Draw) -> Entry:
    """Of axes in any order, of which some are summed and some are batches."""
    kinds = [draw.of("batch", "sum", "sum", "lhs", "rhs", "lhs", "rhs") for _ in range(5)]
    sizes = [draw.size(2, 3, 8, 5) for _ in kinds]
    sides = [[i for i, kind in enumerate(kinds) if kind != other] for other in ("rhs", "lhs")]
    for side in sides:
        draw.rng.shuffle(side)
    numbers = tuple(
        tuple([side.index(i) for i, kind in enumerate(kinds) if kind == of] for side in sides)
        for of in ("sum", "batch")
    )
    lhs, rhs = (draw.floats(*(sizes[i] for i in side), scale=0.5) for side in sides)
    options = {"dimension_numbers": numbers, **draw.some(0.2, preferred_element_type="float32")}
    exact = lambda lhs, rhs, dimension_numbers, **_: lax.dot_general(lhs, rhs, dimension_numbers)  # noqa: E731
    return entry(jc.ops.dot_general, exact, {"lhs": lhs, "rhs": rhs}, options)


def _normalized(x: Any, axes: Any, epsilon: float, centred: bool = True) -> tuple[Any, ...]:
    mean = jnp.mean(x, axes, keepdims=True) if centred else 0.0
    inv_std = lax.rsqrt(jnp.mean((x - mean) ** 2, axes, keepdims=True) + epsilon)
    return (x - mean) * inv_std, mean, inv_std


def _of_rows(centred: bool) -> Any:
    def exact(
        x: Any, scale: Any = None, bias: Any = 0.0, *, axis: Any = -1, epsilon: float,
        zero_centered_scale: bool = False, return_statistics: bool = False,
    ) -> Any:  # fmt: skip
        axes = [a % x.ndim for a in ((axis,) if isinstance(axis, int) else axis)]
        y, mean, inv_std = _normalized(x, tuple(axes), epsilon, centred)
        of = [size if i in axes else 1 for i, size in enumerate(x.shape)]
        if scale is not None:
            y = y * (scale.reshape(of) + zero_centered_scale)
        y = y + (bias.reshape(of) if hasattr(bias, "ndim") else bias)
        return (y, (mean, inv_std) if centred else inv_std) if return_statistics else y

    return exact


def _norm(draw: Draw, *of: int) -> tuple[Entry, Entry]:
    """A scale and a bias of a shape, and options."""
    dtype = draw.of(draw.dtype, "float32")
    more = draw.some(0.7, scale=draw.floats(*of, dtype=dtype), bias=draw.floats(*of, dtype=dtype))
    return more, {"epsilon": draw.of(1e-5, 1e-3, 0.1)} | draw.some(0.3, return_statistics=True)


def _rows(name: str) -> Any:
    def draws(draw: Draw) -> Entry:
        shape = [draw.size(2, 3, 4) for _ in range(draw.of(0, 1, 2, 3))] + [draw.size(8, 16, 33)]
        axes = sorted(draw.rng.sample(range(len(shape)), draw.of(1, 1, 1, min(2, len(shape)))))
        axes = [len(shape) - 1] if draw.chance(0.6) else axes
        more, options = _norm(draw, *(shape[axis] for axis in axes))
        options |= {"axis": tuple(axes)} | draw.some(0.2, zero_centered_scale=True)
        if name == "rms_norm":
            more.pop("bias", None)
        exact = _of_rows(name == "layer_norm")
        operands = {"x": draw.floats(*shape), **more}
        return entry(getattr(jc.ops, name), exact, operands, options)

    return draws


def _ada(x: Any, scale: Any, bias: Any = 0.0, **options: Any) -> Any:
    def one(x: Any, scale: Any, bias: Any) -> Any:
        return _of_rows(True)(x[None], scale, bias, **options)

    return jax.tree.map(lambda y: y[:, 0], jax.vmap(one)(x, scale, bias + jnp.zeros_like(scale)))


def ada_layer_norm(draw: Draw) -> Entry:
    inner = [draw.size(3, 4) for _ in range(draw.of(1, 2))]
    shape = [draw.of(1, 2, 3), *inner, draw.size(8, 16, 33)]
    more, options = _norm(draw, shape[0], shape[-1])
    operands = {"x": draw.floats(*shape), "scale": draw.floats(shape[0], shape[-1]), **more}
    options |= draw.some(0.3, zero_centered_scale=True)
    return entry(jc.ops.ada_layer_norm, _ada, operands, options)


def _grouped(
    x: Any, num_groups: Any = None, scale: Any = None, bias: Any = None, *, axis: int,
    epsilon: float, return_statistics: bool = False,
) -> Any:  # fmt: skip
    last = jnp.moveaxis(x, axis, -1)
    n, c = x.shape[0], last.shape[-1]
    groups = c if num_groups is None else num_groups
    split = last.reshape(n, math.prod(last.shape[1:-1]), groups, c // groups)
    y, *statistics = _normalized(split, (1, 3), epsilon)
    y = y.reshape(last.shape) * (1 if scale is None else scale) + (0 if bias is None else bias)
    y = jnp.moveaxis(y, -1, axis)
    of = [size if i in (0, axis % x.ndim) else 1 for i, size in enumerate(x.shape)]
    of = of if num_groups is None else [n, groups]
    return (y, tuple(s.reshape(of) for s in statistics)) if return_statistics else y


def _channels(name: str) -> Any:
    def draws(draw: Draw) -> Entry:
        spatial, c = [draw.of(3, 4, 5) for _ in range(draw.of(1, 2, 2, 3))], draw.of(8, 16, 6)
        axis = draw.of(-1, -1, 1)
        shape = [draw.size(2, 3), *([*spatial, c] if axis == -1 else [c, *spatial])]
        more, options = _norm(draw, c)
        options |= {"axis": axis}
        if name == "group_norm":
            options["num_groups"] = draw.of(1, 2, 2, c)
        return entry(getattr(jc.ops, name), _grouped, {"x": draw.floats(*shape), **more}, options)

    return draws


def _batch_norm(
    x: Any, running_mean: Any, running_var: Any, scale: Any = None, bias: Any = None,
    residual: Any = 0.0, *, training: bool, momentum: float, epsilon: float, axis: int,
    activation: Any = None,
) -> Any:  # fmt: skip
    last = jnp.moveaxis(x, axis, -1)
    mean, var = running_mean, running_var
    if training:
        axes = tuple(range(x.ndim - 1))
        mean, var = jnp.mean(last, axes), jnp.var(last, axes)
        pairs = (running_mean, mean), (running_var, var)
        running_mean, running_var = (momentum * a + (1 - momentum) * b for a, b in pairs)
    y = (last - mean) * lax.rsqrt(var + epsilon) * (1 if scale is None else scale)
    y = jnp.moveaxis(y + (0 if bias is None else bias), -1, axis) + residual
    return (ACTIVATIONS[activation](y) if activation else y), (running_mean, running_var)


def _statistics(draw: Draw, c: int) -> tuple[Entry, Entry]:
    floats = functools.partial(draw.floats, c, dtype="float32")
    running = {"running_mean": floats(scale=0.3)}
    running["running_var"] = abs(floats()) + np.float32(0.5)
    options = {"training": draw.chance(0.7), "momentum": draw.of(0.9, 0.5)}
    options |= {"epsilon": draw.of(1e-5, 1e-3)} | draw.some(0.4, activation=draw.of(*ACTIVATIONS))
    more = {n: floats() if draw.chance(0.7) else None for n in ("scale", "bias")}
    options |= {name: None for name, x in more.items() if x is None}
    return running | {name: x for name, x in more.items() if x is not None}, options


def batch_norm(draw: Draw) -> Entry:
    spatial, c = [draw.of(3, 4, 5) for _ in range(draw.of(0, 1, 2, 2, 3))], draw.of(8, 16, 5)
    axis = draw.of(-1, -1, 1)
    shape = [draw.of(3, 4), *([*spatial, c] if axis == -1 else [c, *spatial])]
    more, options = _statistics(draw, c)
    more |= draw.some(0.3, residual=draw.floats(*shape))
    options |= {"axis": axis}
    return entry(jc.ops.batch_norm, _batch_norm, {"x": draw.floats(*shape), **more}, options)


def _conv_batch_norm(x: Any, w: Any, **more: Any) -> Any:
    of = ("strides", "padding", "dilation", "groups", "dimension_numbers")
    y = _conv(x, w, **{name: more.pop(name) for name in of})
    return _batch_norm(y, axis=-1, **more)


def conv_batch_norm(draw: Draw) -> Entry:
    letters, sizes, window, strides, dilation, padding = _image(draw)
    k, image = draw.of(8, 16), f"N{letters}C"
    operands = {"x": draw.floats(3, *sizes, 8), "w": draw.floats(k, *window, 8, scale=0.2)}
    options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": 1}
    options["dimension_numbers"] = (image, f"O{letters}I", image)
    shape = jax.eval_shape(functools.partial(_conv, **options), **operands).shape
    more, of_norm = _statistics(draw, k)
    more |= draw.some(0.3, residual=draw.floats(*shape))
    options |= of_norm
    return entry(jc.ops.conv_batch_norm, _conv_batch_norm, operands | more, options)


def layer(draw: Draw) -> Entry:
    """One of our layers and Flax's, as functions of all floats that they hold, to their result and
    new statistics."""
    name = draw.of(*CASES)
    case, seed = CASES[name], draw.rng.randrange(1000)
    named = {"dtype": jnp.dtype(draw.dtype)} if draw.dtype != "float32" else {}
    ours, flaxs = (
        case.made(cls, seed, **more) for cls, more in ((case.ours, named), (case.ours.flaxs(), {}))
    )
    moving = lambda path, x: hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731

    def function(made: Any) -> Any:
        graphdef, state, rest = nnx.split(made, moving, ...)
        leaves, structure = jax.tree.flatten(state)

        def run(x: Any, **floats: Any) -> Any:
            state = jax.tree.unflatten(structure, [floats[f"p{i}"] for i in range(len(leaves))])
            model = nnx.merge(graphdef, state, rest)
            y = model(x)
            return y, jax.tree.leaves(nnx.state(model, nnx.BatchStat))

        return run, {f"p{i}": np.asarray(x) for i, x in enumerate(leaves)}

    (ours, floats), (flaxs, _) = function(ours), function(flaxs)
    operands = {"x": draw.floats(*case.shape), **floats}
    return entry(ours, flaxs, operands, {}) | {"text": f"{name} {draw.dtype} {seed}"}


TABLE = {
    **{f.__name__: f for f in (matmul, conv, conv_transpose, conv_general_dilated, dot_general)},
    **{name: _rows(name) for name in ("layer_norm", "rms_norm")},
    **{name: _channels(name) for name in ("group_norm", "instance_norm")},
    **{f.__name__: f for f in (ada_layer_norm, batch_norm, conv_batch_norm, layer)},
    **attentions.TABLE,
}
NAMES = sorted(TABLE)


def random_call(seed: int, run: Any) -> Call:
    """The call of a seed; consecutive seeds take one function after the other. ``run`` runs what
    must be known of it."""
    draw = Draw(seed, run)
    with warnings.catch_warnings(action="ignore"):
        made = TABLE[NAMES[seed % len(NAMES)]](draw)
        count, without = made.pop("count", 3), made.pop("without", ())
        names = draw.rng.sample(FIRST, count) + draw.rng.sample(SECOND, draw.chance(0.5))
        return Call(seed, **made, names=[name for name in names if name not in without])
