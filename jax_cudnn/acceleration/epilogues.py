"""Products and convolutions with what follows on each element: ``activation(y * scale + bias +
residual)``; transposed convolutions. An activation is recognised by its values, however it is
written."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import conv, conv_transpose, matmul
from ..ops.attention.score_mod.value import unwatched
from .following import Side, computed, constant, folded, side
from .program import Missed, Program
from .region import Region
from .values import CASTS, ELEMENTWISE, Equation, Value, elementwise, free_dims, number

_LONGEST = 40  # operations of an activation, and of what follows it
_FLOATS = ("float32", "bfloat16", "float16")
_VOLUME = 3  # dimensions of a convolution that is taken alone: XLA has slow ones of volumes


def find(
    program: Program, kinds: Collection[str], taken: set[Equation], missed: Missed
) -> Iterator[Region]:
    """The products and convolutions of a program that something follows which cuDNN fuses."""
    for equation in program.equations:
        region = None
        if equation in taken:
            continue
        if equation.name == "dot_general" and "product" in kinds:
            region = _product(program, equation, taken)
        elif equation.name == "conv_general_dilated" and "convolution" in kinds:
            region = _convolution(program, equation, taken)
        if region is not None:
            yield region


def _product(program: Program, equation: Equation, taken: set[Equation]) -> Region | None:
    (contract, batch), free = equation.params["dimension_numbers"], free_dims(equation)
    (a, b), out, equations = equation.ins, equation.outs[0], {equation}
    precision = _precision(equation)
    if batch[0] or precision is False:
        return None
    turned = _turned(program, out, len(free[0]))
    if turned is not None:  # weights on the left, as under vmap of a layer for one token
        a, b, contract, free, out = b, a, contract[::-1], free[::-1], turned.outs[0]
        equations.add(turned)
    summed, others = (
        zip(*sorted(zip(*contract, strict=True)), strict=True) if contract[0] else contract
    )
    b, others, columns = _as_held(b, others, free[1])
    deep = len(summed)
    in_order = [*summed] == [*range(len(a.shape) - deep, len(a.shape))]
    last = [*others] == [*range(len(b.shape) - deep, len(b.shape))]
    first = [*others] == [*range(deep)]
    if not (in_order and (first or last) and free[0] and columns and deep):
        return None
    rows, wide = tuple(a.shape[i] for i in free[0]), tuple(b.shape[i] for i in columns)
    features = range(len(rows), len(rows) + len(wide))
    found = _Epilogue(program, out, equations, features, taken)
    if not (found.fuses and found.is_float):
        return None
    depth, count = math.prod(a.shape[i] for i in summed), math.prod(wide)

    def emit(x: Any, w: Any, *rest: Any) -> Any:
        y = matmul(
            x.reshape((*rows, depth)),
            w.reshape((depth, count) if first else (count, depth)),
            transpose_b=not first,
            precision=precision,
            **found.given(rest, wide, (*rows, count)),
        )
        return y.reshape(found.last.shape)

    what = f"{a.dtype} [{math.prod(rows)}, {depth}] x [{depth}, {count}]{found}"
    return Region("product", found.equations, [a, b, *found.operands], found.last, emit, what)


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


def _turned(program: Program, out: Value, lefts: int) -> Equation | None:
    """The transpose that moves the dimensions of the left operand after those of the right one."""
    if program.is_read(out) or len(out.users) != 1 or out.users[0].name != "transpose":
        return None
    (after,), rank = out.users, len(out.shape)
    order = (*range(lefts, rank), *range(lefts))
    return after if 0 < lefts < rank and after.params["permutation"] == order else None


def _convolution(program: Program, equation: Equation, taken: set[Equation]) -> Region | None:
    params, (x, w), out = equation.params, equation.ins, equation.outs[0]
    precision, numbers = _precision(equation), params["dimension_numbers"]
    if precision is False or params["batch_group_count"] != 1:
        return None
    given: dict[str, Any] = {"padding": params["padding"], "dilation": params["rhs_dilation"]}
    given |= {"dimension_numbers": numbers, "precision": precision}
    what = f"{x.dtype} {[*x.shape]} with {[*w.shape]}"
    if {*params["lhs_dilation"]} - {1}:  # XLA multiplies its zeros, too. What follows stays
        if {*params["window_strides"]} - {1} or params["feature_group_count"] != 1:
            return None
        given |= {"strides": params["lhs_dilation"], "preferred_element_type": str(out.dtype)}
        turned = functools.partial(conv_transpose, **given)
        return Region("convolution", {equation}, [x, w], out, turned, f"{what}, transposed")
    axis = numbers.out_spec[1]
    found = _Epilogue(program, out, {equation}, (axis,), taken)
    alone = len(params["window_strides"]) >= _VOLUME
    if not (found.fuses or alone) or not found.is_float:
        return None
    given |= {"strides": params["window_strides"], "groups": params["feature_group_count"]}

    def emit(x: Any, w: Any, *rest: Any) -> Any:
        return conv(x, w, **found.given(rest, (out.shape[axis],), out.shape), **given)

    inputs = [x, w, *found.operands]
    return Region("convolution", found.equations, inputs, found.last, emit, f"{what}{found}")


def _precision(equation: Equation) -> Any:
    """The precision as ``ops`` take it; False for one that they do not have, or operands."""
    precision, (a, b) = equation.params["precision"], equation.ins
    if a is b or a.dtype != b.dtype or str(a.dtype) not in _FLOATS:
        return False
    one = {*precision} if isinstance(precision, tuple) else {precision}
    found = one.pop() if len(one) == 1 else False
    return found if found is None or isinstance(found, jax.lax.Precision) else False


# -- what follows ----------------------------------------------------------------------------------


class _Epilogue:
    """What follows a product on each element that cuDNN fuses, up to ``last``. ``affine``: terms,
    arrays of the features or numbers, in order."""

    def __init__(
        self,
        program: Program,
        last: Value,
        equations: set[Equation],
        features: Sequence[int],
        taken: set[Equation],
    ) -> None:
        self.program, self.last, self.equations = program, last, equations
        self.features, self.taken = features, taken
        self.affine: list[tuple[str, Side | float]] = []
        self.residual: list[Value] = []
        self.activation: str | None = None
        while self.last.users and not program.is_read(self.last):
            users = {*self.last.users}
            if len(users) == 1:
                (user,) = users
                if user in taken or user.inner or len(user.outs) != 1:
                    break
                if self._takes(user):
                    self.equations.add(user)
                    (self.last,) = user.outs
                    continue
            if self.activation is not None or not self._activates():
                break
        while (cast := self.last.made_by) and cast.casts and cast.growth > 0:
            self.equations.discard(cast)  # whoever reads the result casts for less than this costs
            self.last = cast.ins[0]

    @property
    def fuses(self) -> bool:
        return bool(self.operands) or self.activation is not None

    @property
    def is_float(self) -> bool:
        return str(self.last.dtype) in _FLOATS

    @property
    def operands(self) -> list[Value]:
        terms = (term.value for _, term in self.affine if isinstance(term, Side))
        return [*terms, *self.residual]

    def __str__(self) -> str:
        words = [{"mul": "scale", "add": "bias"}[kind] for kind, _ in self.affine]
        words += ["residual"] * bool(self.residual)
        words += [self.activation] if self.activation else []
        return "".join(f" + {word}" for word in dict.fromkeys(words))

    def given(self, arrays: Sequence[Any], sizes: Any, shape: Any) -> dict[str, Any]:
        """The arguments of an operation whose features have these sizes, and its result a shape."""
        terms = iter(arrays)

        def value(term: Side | float) -> Any:
            if not isinstance(term, Side):
                return term
            x = jnp.broadcast_to(term.along(next(terms), self.features), sizes)
            x = x.reshape(-1).astype("float32")
            return 1 / x if term.factor == -1 else -x if term.negated else x

        scale, bias = folded((kind, value(term)) for kind, term in self.affine)
        residual = arrays[-1].reshape(shape) if self.residual else None
        given = {"scale": scale, "bias": bias, "residual": residual, "activation": self.activation}
        return {**given, "preferred_element_type": str(self.last.dtype)}

    def _takes(self, user: Equation) -> bool:
        """Takes a cast, a factor, a bias or a residual into the epilogue."""
        value, name = self.last, user.operation
        if user.casts and user.outs[0].is_float:
            return True
        others = [v for v in user.ins if v is not value]
        linear = name in ("mul", "div", "add", "sub") and len(others) == 1
        if self.activation is not None or not linear:
            return False
        (other,), scales = others, name in ("mul", "div")
        if name in ("div", "sub") and user.ins[0] is not value:
            return False
        term: Any = side(
            other, (*range(len(value.shape)),), -1.0 if name == "div" else 1.0, name == "sub"
        )
        if term.axes <= {*self.features}:
            known = number(other)
            if (name == "div" and known == 0) or (scales and self.residual):
                return False
            if known is not None:
                term = 1 / known if name == "div" else -known if name == "sub" else known
            self.affine.append(("mul" if scales else "add", term))
            return True
        full = {i for i, n in enumerate(value.shape) if n != 1}
        adds = name == "add" and not self.residual and other.shape == value.shape
        if not adds or term.axes != full or not other.is_float:
            return False
        self.residual = [other]
        return True

    def _activates(self) -> bool:
        """Takes a function of the value alone into the epilogue, if cuDNN has it."""
        closure: list[Equation] = []
        values, todo = {self.last}, {*self.last.users}
        while todo and len(closure) < _LONGEST:
            equation = min(todo, key=lambda e: e.at)
            todo.remove(equation)
            alone = all(v in values or number(v) is not None for v in equation.ins)
            if equation.name in ELEMENTWISE and alone and equation not in self.taken:
                closure.append(equation)
                values |= {*equation.outs}
                todo |= {user for v in equation.outs for user in v.users if user not in closure}
        # The longest part of it with one value that others read, which is an activation.
        for end in reversed(closure):
            part = [e for e in closure if e.at <= end.at]
            inner = {self.last, *(v for e in part[:-1] for v in e.outs)}
            if any(self.program.used_outside({*part}, v) for v in inner):
                continue
            self.activation = _activation(self.last, part)
            if self.activation is not None:
                self.equations |= {*part}
                (self.last,) = end.outs
                return True
        return False


# -- activations, by their values ------------------------------------------------------------------

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
_seen: dict[Any, str | None] = {}


def _activation(value: Value, equations: list[Equation]) -> str | None:
    """The name of the activation that equations compute of a value; or None."""
    places = {value: -1, **{e.outs[0]: i for i, e in enumerate(equations)}}
    written = (
        (e.name, str(e.params), bool(e.own_calls), *(places.get(v, number(v)) for v in e.ins))
        for e in equations
    )
    key = str(value.dtype), *written
    if key not in _seen:
        _seen[key] = _recognised(value, equations)
    return _seen[key]


def _recognised(value: Value, equations: list[Equation]) -> str | None:
    got = None if any(map(_guards, equations)) else _evaluated(value, equations)
    if got is None:
        return None
    finite = np.isfinite(got)  # one written by hand may overflow, far away
    if not finite[np.abs(_GRID) <= 60].all():
        return None
    x, got = _GRID[finite], got[finite]
    own = all(e.casts or e.own_calls for e in equations)
    for name, values in _activations(str(value.dtype)):
        y = values[finite]
        allowed = _RELATIVE * np.abs(y) + _ROUNDING * (1 + np.abs(x))
        if (np.abs(got - y) <= allowed).all():
            kinked = name in _KINKED and not own
            return None if kinked and not _same_kinks(value, equations, name) else name
    return None


def _guards(equation: Equation) -> bool:
    """Whether it is there for values that a grid does not show; JAX's own functions have none."""
    known = [abs(c) for v in equation.ins if (c := number(v))]
    low, high = _CONSTANTS
    guards = equation.name in _GUARDS or not all(low < c < high for c in known)
    return guards and not equation.own_calls


def _same_kinks(value: Value, equations: list[Equation], name: str) -> bool:
    """Whether the derivative where an activation has none is as in cuDNN: at 0
    ``jnp.maximum(x, 0)`` has 0.5, ``jax.nn.relu`` and cuDNN's 0."""
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
        (out,) = equation.outs
        dtype = np.float64 if out.is_float else out.dtype
        given = [env[v] if v in env else np.asarray(number(v)) for v in equation.ins]
        keeps = equation.casts or equation.name not in CASTS
        found = elementwise(equation, given, dtype) if keeps else None
        if found is None:
            return None
        env[out] = np.broadcast_to(found, _GRID.shape)
    return env[equations[-1].outs[0]]


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
