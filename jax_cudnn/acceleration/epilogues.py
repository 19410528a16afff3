"""Products and convolutions with what follows on each element: ``activation(y * scale + bias +
residual)``; transposed convolutions. An activation is recognised by its values, however it is
written."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import conv, conv_transpose, matmul
from .activations import activation
from .program import Missed, Program
from .region import Region
from .scores import Side, narrowed, number
from .values import ELEMENTWISE, Equation, Value

_LONGEST = 40  # operations of an activation, and of what follows it
_FLOATS = ("float32", "bfloat16", "float16")
_VOLUME = 3  # dimensions of a convolution that is taken alone: XLA has slow ones of volumes


@dataclass
class _Epilogue:
    """What follows a product, up to ``last``. Terms are arrays of the features, or numbers."""

    last: Value
    equations: set[Equation]
    affine: list[tuple[str, Side | float]] = field(default_factory=list)
    residual: Value | None = None
    activation: str | None = None

    @property
    def fuses(self) -> bool:
        arrays = any(isinstance(term, Side) for _, term in self.affine)
        return arrays or self.residual is not None or self.activation is not None


def find(
    program: Program, kinds: Collection[str], taken: set[Equation], missed: Missed
) -> list[Region]:
    """The products and convolutions of a program that something follows which cuDNN fuses."""
    regions = []
    for equation in program.equations:
        if equation in taken:
            continue
        region = None
        if equation.name == "dot_general" and "product" in kinds:
            region = _product(program, equation, taken)
        elif equation.name == "conv_general_dilated" and "convolution" in kinds:
            region = _convolution(program, equation, taken)
        if region is not None:
            taken |= region.equations
            regions.append(region)
    return regions


def _product(program: Program, equation: Equation, taken: set[Equation]) -> Region | None:
    (contract, batch), params = equation.params["dimension_numbers"], equation.params
    (a, b), out, equations = equation.ins, equation.outs[0], {equation}
    if batch[0] or str(a.dtype) not in _FLOATS or a.dtype != b.dtype or a is b:
        return None
    turned = _turned(program, equation, len(a.shape) - len(contract[0]))
    if turned is not None:  # weights on the left, as under vmap of a layer for one token
        a, b, contract, out = b, a, contract[::-1], turned.outs[0]
        equations.add(turned)
    contract = [*zip(*sorted(zip(*contract, strict=True)), strict=True)] or contract
    free = [
        [i for i in range(len(v.shape)) if i not in c]
        for v, c in zip((a, b), contract, strict=True)
    ]
    b, summed, free[1] = _as_held(b, contract[1], free[1])
    contract = [contract[0], summed]
    deep = len(contract[0])
    in_order = [*contract[0]] == [*range(len(a.shape) - deep, len(a.shape))]
    last = [*contract[1]] == [*range(len(b.shape) - deep, len(b.shape))]
    first = [*contract[1]] == [*range(deep)]
    precision = _precision(params)
    if not (in_order and (first or last) and free[0] and free[1] and deep) or precision is False:
        return None
    features = frozenset(range(len(free[0]), len(free[0]) + len(free[1])))
    found = _epilogue(program, _Epilogue(out, equations), features, taken)
    if not found.fuses or str(found.last.dtype) not in _FLOATS:
        return None
    rows = tuple(a.shape[i] for i in free[0])
    depth = math.prod(a.shape[i] for i in contract[0])
    wide = tuple(b.shape[i] for i in free[1])
    columns = math.prod(wide)
    out = str(found.last.dtype)
    residual = () if found.residual is None else (found.residual,)
    sides = [term for _, term in found.affine if isinstance(term, Side)]

    def emit(x: Any, w: Any, *rest: Any) -> Any:
        x = x.reshape((*rows, depth))
        w = w.reshape((depth, columns) if first else (columns, depth))
        terms = iter(rest[: len(sides)])
        scale, bias = _terms(found, terms, wide, {i: i - len(rows) for i in features})
        more = rest[-1].reshape((*rows, columns)) if residual else None
        y = matmul(
            x, w, scale=scale, bias=bias, residual=more, activation=found.activation,
            transpose_b=not first, precision=precision, preferred_element_type=out,
        )  # fmt: skip
        return y.reshape(found.last.shape)

    inputs = [a, b, *(side.value for side in sides), *residual]
    what = f"{a.dtype} [{math.prod(rows)}, {depth}] x [{depth}, {columns}]{_words(found)}"
    return Region("product", found.equations, inputs, found.last, emit, what)


def _as_held(
    value: Value, contract: Sequence[int], free: list[int]
) -> tuple[Value, Sequence[int], list[int]]:
    """An operand before it was transposed, which a product does itself, and its dimensions."""
    made = value.made_by
    if made is None or made.name != "transpose":
        return value, contract, free
    order = made.params["permutation"]
    summed, kept = ([order[i] for i in axes] for axes in (contract, free))
    if summed != sorted(summed) or kept != sorted(kept):
        return value, contract, free
    return made.ins[0], summed, kept


def _turned(program: Program, product: Equation, lefts: int) -> Equation | None:
    """The transpose that moves the dimensions of the left operand behind those of the right one."""
    (out,) = product.outs
    if program.is_read(out) or len(out.users) != 1 or out.users[0].name != "transpose":
        return None
    (after,), rank = out.users, len(out.shape)
    order = (*range(lefts, rank), *range(lefts))
    return after if 0 < lefts < rank and after.params["permutation"] == order else None


def _convolution(program: Program, equation: Equation, taken: set[Equation]) -> Region | None:
    params, (x, w) = equation.params, equation.ins
    precision = _precision(params)
    fits = str(x.dtype) in _FLOATS and x.dtype == w.dtype and params["batch_group_count"] == 1
    if not fits or precision is False or x is w:
        return None
    if {*params["lhs_dilation"]} - {1}:
        return _transposed(equation, precision)
    numbers = params["dimension_numbers"]
    axis = numbers.out_spec[1]
    found = _Epilogue(equation.outs[0], {equation})
    found = _epilogue(program, found, frozenset({axis}), taken)
    alone = len(params["window_strides"]) >= _VOLUME
    if not (found.fuses or alone) or str(found.last.dtype) not in _FLOATS:
        return None
    channels = (equation.outs[0].shape[axis],)
    out = str(found.last.dtype)
    residual = () if found.residual is None else (found.residual,)
    sides = [term for _, term in found.affine if isinstance(term, Side)]

    def emit(x: Any, w: Any, *rest: Any) -> Any:
        terms = iter(rest[: len(sides)])
        scale, bias = _terms(found, terms, channels, {axis: 0})
        return conv(
            x, w, scale=scale, bias=bias, residual=rest[-1] if residual else None,
            activation=found.activation, strides=params["window_strides"],
            padding=params["padding"], dilation=params["rhs_dilation"],
            groups=params["feature_group_count"], dimension_numbers=numbers,
            precision=precision, preferred_element_type=out,
        )  # fmt: skip

    inputs = [x, w, *(side.value for side in sides), *residual]
    what = f"{x.dtype} {[*x.shape]} with {[*w.shape]}{_words(found)}"
    return Region("convolution", found.equations, inputs, found.last, emit, what)


def _transposed(equation: Equation, precision: Any) -> Region | None:
    """A convolution of a dilated image: XLA multiplies its zeros, too. What follows stays."""
    params, (x, w), (out,) = equation.params, equation.ins, equation.outs
    if {*params["window_strides"]} - {1} or params["feature_group_count"] != 1:
        return None

    def emit(x: Any, w: Any) -> Any:
        return conv_transpose(
            x, w, strides=params["lhs_dilation"], padding=params["padding"],
            dilation=params["rhs_dilation"], dimension_numbers=params["dimension_numbers"],
            precision=precision, preferred_element_type=str(out.dtype),
        )  # fmt: skip

    what = f"{x.dtype} {[*x.shape]} with {[*w.shape]}, transposed"
    return Region("convolution", {equation}, [x, w], out, emit, what)


def _precision(params: Any) -> Any:
    """The precision as ``ops`` take it; False for one that they do not have."""
    asked = params["precision"]
    if asked is None or isinstance(asked, jax.lax.Precision):
        return asked
    one = {*asked} if isinstance(asked, tuple) else set()
    return one.pop() if len(one) == 1 and isinstance(asked[0], jax.lax.Precision) else False


def _words(found: _Epilogue) -> str:
    words = [{"mul": "scale", "add": "bias"}[kind] for kind, _ in found.affine]
    words += ["residual"] * (found.residual is not None)
    words += [found.activation] if found.activation else []
    return "".join(f" + {word}" for word in dict.fromkeys(words))


def _terms(found: _Epilogue, arrays: Any, sizes: tuple[int, ...], place: Any) -> tuple[Any, Any]:
    """Scale and bias of ``y``, each one value per feature, a number, or None."""
    scale, bias = None, None
    for kind, term in found.affine:
        value: Any = term
        if isinstance(term, Side):
            value = _per_feature(next(arrays), term, sizes, place)
        if kind == "add":
            bias = value if bias is None else bias + value
        else:
            scale = value if scale is None else scale * value
            bias = None if bias is None else bias * value
    return scale, bias


def _per_feature(x: Any, side: Side, sizes: tuple[int, ...], place: dict[int, int]) -> Any:
    x = x[tuple(slice(None) if d is not None else 0 for d in side.dims)]
    axes = [place[d] for d in side.dims if d is not None]
    x = jnp.transpose(x, [*np.argsort(axes)])
    x = x.reshape([n if i in axes else 1 for i, n in enumerate(sizes)])
    x = jnp.broadcast_to(x, sizes).reshape(-1).astype("float32")
    return 1 / x if side.factor == -1 else -x if side.negated else x


# -- what follows ----------------------------------------------------------------------------------


def _epilogue(
    program: Program, found: _Epilogue, features: frozenset[int], taken: set[Equation]
) -> _Epilogue:
    """What follows a product that cuDNN fuses."""
    while found.last.users and not program.is_read(found.last):
        users = {*found.last.users}
        if len(users) == 1:
            (user,) = users
            if user in taken or user.inner or len(user.outs) != 1:
                break
            if _linear(found, user, features):
                continue
        if found.activation is not None or not _activated(program, found, taken):
            break
    while (cast := found.last.made_by) and cast.casts and _widens(cast):
        found.equations.discard(cast)  # whoever reads the result casts for less than it would cost
        found.last = cast.ins[0]
    return found


def _widens(cast: Equation) -> bool:
    return cast.outs[0].dtype.itemsize > cast.ins[0].dtype.itemsize


def _linear(found: _Epilogue, user: Equation, features: frozenset[int]) -> bool:
    """Takes a cast, a factor, a bias or a residual into the epilogue."""
    value, name = found.last, user.name
    if user.casts and jnp.issubdtype(user.outs[0].dtype, jnp.floating):
        pass
    elif found.activation is not None or name not in ("mul", "div", "add", "sub", "add_any"):
        return False
    else:
        others = [v for v in user.ins if v is not value]
        if len(others) != 1:
            return False
        (other,) = others
        small, dims = narrowed(other, (*range(len(value.shape)),) if other.shape else ())
        known = number(other)
        turned = name in ("div", "sub") and user.ins[0] is not value
        along = {d for d in dims if d is not None}
        if turned:
            return False
        if along <= features:
            term: Side | float
            if known is not None:
                if name == "div" and not known:
                    return False
                term = 1 / known if name == "div" else -known if name == "sub" else known
            else:
                term = Side(small, dims, -1.0 if name == "div" else 1.0, name == "sub")
            kind = "mul" if name in ("mul", "div") else "add"
            if kind == "mul" and found.residual is not None:
                return False
            found.affine.append((kind, term))
        elif name in ("add", "add_any") and found.residual is None and other.shape == value.shape:
            full = {i for i, n in enumerate(value.shape) if n != 1}
            if along != full or not jnp.issubdtype(other.dtype, jnp.floating):
                return False
            found.residual = other
        else:
            return False
    found.equations.add(user)
    found.last = user.outs[0]
    return True


def _activated(program: Program, found: _Epilogue, taken: set[Equation]) -> bool:
    """Takes a function of the value alone into the epilogue, if cuDNN has it."""
    closure: list[Equation] = []
    values, todo = {found.last}, {*found.last.users}
    while todo and len(closure) < _LONGEST:
        equation = min(todo, key=lambda e: e.at)
        todo.remove(equation)
        alone = all(v in values or number(v) is not None for v in equation.ins)
        if equation.name in ELEMENTWISE and alone and equation not in taken:
            closure.append(equation)
            values |= {*equation.outs}
            todo |= {user for v in equation.outs for user in v.users if user not in closure}
    # The longest part of it with one value that others read, which is an activation.
    for end in reversed(closure):
        part = [e for e in closure if e.at <= end.at]
        inner = {found.last, *(v for e in part[:-1] for v in e.outs)}
        needed = {*part}
        if any(program.used_outside(needed, v) for v in inner):
            continue
        name = activation(found.last, part)
        if name is not None:
            found.activation = name
            found.equations |= needed
            found.last = end.outs[0]
            return True
    return False
