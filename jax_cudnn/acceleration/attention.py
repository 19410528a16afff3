"""Attention in a program, by its meaning: two products around a softmax over the axis that the
second one sums.

:mod:`.softmax` says what every value that depends on the first product is, :mod:`.scores` what
stands between product and softmax. Order of axes, grouped queries and casts follow from the
equations. :mod:`.derivative` finds its derivative in the same program.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from ..ops import dot_product_attention
from .derivative import backward
from .following import Dims, Operand, Side, Unclear, side
from .program import Missed, Program
from .region import USED, Backward, Region
from .scores import Roles, Scores, added, all_of, band, read, score_mod, sorted_out
from .softmax import OUT, SCORES, Softmax
from .values import Equation, Value, between, free_dims, renamed


def find(
    program: Program, kinds: Collection[str], taken: set[Equation], missed: Missed
) -> Iterator[Region]:
    """The attention of a program; ``missed`` gets what is nearly one."""
    for equation in _before_exponentials(program) if "attention" in kinds else ():
        if equation in taken:
            continue
        softmax = Softmax(equation)
        if not softmax.dropped and not softmax.all_of(OUT):
            continue
        try:
            region = _region(program, softmax)
        except Unclear as why:
            missed.append((equation, str(why)))
            continue
        if not region.replaced & taken:
            yield region


def _before_exponentials(program: Program) -> list[Equation]:
    """The products that an exponential follows, with no other product between."""
    leads, found = set[Value](), []
    for equation in reversed(program.equations):
        onwards = not leads.isdisjoint(equation.outs)
        if equation.name == "dot_general":
            if onwards:
                found.append(equation)
        elif onwards or equation.name == "exp":
            leads |= {*equation.ins}
    return [*reversed(found)]


def _region(program: Program, softmax: Softmax) -> Region:
    outs, product = softmax.all_of(OUT), softmax.product
    if not outs:
        raise Unclear(*softmax.dropped[:1])
    last = program.last_of(outs, product.ins[0].dtype)
    equations = between(last, softmax.states.__contains__)
    inside = {v for e in equations for v in e.outs} - {last}
    read_elsewhere = [v for v in inside if program.used_outside(equations, v)]
    state = softmax.states[last]
    assert state.of is not None
    dims_of = {v: softmax.states[v].dims for v in softmax.all_of(SCORES)}
    roles, operands = _operands(softmax, state.axis, not read_elsewhere)
    scores = read(state.of, product.outs[0], dims_of)
    scores.masks += [Side(mask, dims, negated=not kept) for mask, dims, kept in state.hidden]
    scores.infinite |= bool(state.hidden)
    derivative = None
    if read_elsewhere:
        try:
            derivative = backward(program, softmax, equations, last, operands, scores.biases)
        except Unclear as why:
            kinds = sorted(softmax.states[v].kind for v in read_elsewhere)
            raise Unclear(f"{USED.format(f'{kinds[0]} are')} ({why})") from None
    return _built(roles, operands, scores, dims_of, softmax, equations, last, derivative)


# -- queries, keys and values ----------------------------------------------------------------------


def _operands(softmax: Softmax, key: int | None, repeats: bool) -> tuple[Roles, list[Operand]]:
    """The roles of the axes; queries, keys and values, with ``repeats`` before these two were
    repeated."""
    product, second = softmax.product, softmax.second
    assert second is not None
    (contract, batch), free = product.params["dimension_numbers"], free_dims(product)
    count, sizes = len(batch[0]), dict[Any, int](enumerate(product.outs[0].shape))
    axes = [*range(count, count + len(free[0]))], [*range(count + len(free[0]), len(sizes))]
    of_key = 0 if key in axes[0] else 1
    if key is None or key not in axes[of_key]:
        raise Unclear("the softmax is over an axis that both operands of the product have")
    if any(sizes[a] != 1 for a in axes[of_key] if a != key):
        raise Unclear("the keys have several dimensions")
    rows = [a for a in axes[1 - of_key] if sizes[a] != 1] or axes[1 - of_key][-1:]
    if not rows:
        raise Unclear("there is no dimension of queries")
    masked = _masked_axes(softmax)
    query = max(rows, key=lambda a: (a in masked, sizes[a], a))
    heads = (count - 1,) if count > 1 else ()
    groups = tuple(a for a in rows if a != query)

    def named(value: Value, *places: tuple[Sequence[int], Sequence[Any]]) -> Dims:
        dims: list[Any] = [None] * len(value.shape)
        for where, names in places:
            for axis, name in zip(where, names, strict=True):
                dims[axis] = name
        sizes.update((d, n) for d, n in zip(dims, value.shape, strict=True) if type(d) is tuple)
        return tuple(dims)

    found = []
    for i in (1 - of_key, of_key):
        x, features = product.ins[i], [("H", j) for j in range(len(contract[i]))]
        dims = named(x, (batch[i], range(count)), (free[i], axes[i]), (contract[i], features))
        found.append(operand(x, dims, repeats and i == of_key))
    side = next(i for i, v in enumerate(second.ins) if v in softmax.states)
    probabilities, x = softmax.states[second.ins[side]].dims, second.ins[1 - side]
    pairs = [
        (pair[1 - side], [probabilities[axis] for axis in pair[side]])
        for pair in second.params["dimension_numbers"]
    ]
    own = free_dims(second)[1 - side]
    dims = named(x, *pairs, (own, [("E", j) for j in range(len(own))]))
    found.append(operand(x, dims, repeats))
    return Roles(sizes, (*range(count - len(heads)),), heads, groups, query, key), found


def _masked_axes(softmax: Softmax) -> set[Any]:
    """Axes of the scores along which known masks vary."""
    found: set[Any] = set()
    for value in softmax.all_of(SCORES):
        made = value.made_by
        if made is not None and made is not softmax.product:
            for v in made.ins:
                if v.shape and v not in softmax.states and v.is_known:
                    found |= side(v, softmax.states[value].dims).axes
    return found


def operand(value: Value, dims: Dims, repeats: bool) -> Operand:
    """What a value with these dims is; with ``repeats``, before heads were repeated."""
    given, given_dims, factor, repeated = value, dims, 1.0, {}
    while (made := value.made_by) is not None:
        first = made.ins[0] if made.ins else value
        if made.name == "convert_element_type" and _is_wider(value, first):
            value = first
        elif scaled := [v for v in made.ins if v.shape == value.shape and made.factor_of(v)]:
            factor *= made.factor_of(scaled[0]) or 1.0
            value = scaled[0]
        elif made.name == "transpose":
            order = made.params["permutation"]
            value, dims = first, tuple(dims[order.index(i)] for i in range(len(dims)))
        elif repeats and made.name == "reshape" and (found := _repeated(made, dims)) is not None:
            (value, dims, repeated), repeats = found, False
        else:
            break
    return Operand(given, given_dims, value, dims, factor, repeated)


def _is_wider(wide: Value, narrow: Value) -> bool:
    floats = wide.is_float and narrow.is_float
    return floats and wide.dtype.itemsize >= narrow.dtype.itemsize


def _repeated(reshape: Equation, dims: Dims) -> tuple[Value, Dims, dict[Any, int]] | None:
    """The array that ``jnp.repeat`` along dimensions, or a broadcast that was flattened, repeats;
    its dims, and how often it is repeated along which."""
    spread = reshape.ins[0].made_by
    if spread is None or spread.name != "broadcast_in_dim" or reshape.params["dimensions"]:
        return None
    source, wide, sources = spread.ins[0], spread.outs[0].shape, spread.sources
    assert sources is not None
    found: list[Any] = [None] * len(source.shape)
    repeated: dict[Any, int] = {}
    j = 0
    for size, name in zip(reshape.outs[0].shape, dims, strict=True):
        at = sources[j] if j < len(wide) else None
        if at is None:
            return None
        if wide[j] == size:
            j += 1
        elif j + 1 < len(wide) and wide[j] * wide[j + 1] == size:
            if sources[j + 1] is not None and wide[j + 1] != 1:
                return None
            repeated[name] = wide[j + 1]
            j += 2
        else:
            return None
        found[at] = name
    return (source, tuple(found), repeated) if j == len(wide) else None


# -- the region ------------------------------------------------------------------------------------


def _built(
    roles: Roles,
    operands: Sequence[Operand],
    scores: Scores,
    dims_of: dict[Value, Dims],
    softmax: Softmax,
    equations: set[Equation],
    last: Value,
    derivative: Backward | None,
) -> Region:
    q, k, v = operands
    state, dtype = softmax.states[last], q.value.dtype
    if not (dtype == k.value.dtype == v.value.dtype):
        raise Unclear(f"queries, keys, values are {dtype}, {k.value.dtype}, {v.value.dtype}")
    if not q.value.is_float:
        raise Unclear(f"its dtype is {dtype}")
    if last.dtype.itemsize > dtype.itemsize:
        raise Unclear(
            f"the result of {dtype} operands is kept in {last.dtype}: cast it to {dtype}. A NumPy "
            "scalar, as of np.sqrt, makes it wider; a Python float does not"
        )
    repeats = math.prod(k.repeated.values())
    if k.repeated or v.repeated:
        alone = len(roles.heads) == 1 and not roles.groups
        if not alone or not k.repeated == v.repeated == {roles.heads[0]: repeats}:
            k, v = (operand(x.given, x.given_dims, False) for x in (k, v))
            repeats = 1
    features, results = (
        [d for d in roles.sizes if type(d) is tuple and d[0] == kind] for kind in "HE"
    )
    n, g = roles.size(*roles.heads) // repeats, roles.size(*roles.groups) * repeats
    b, t, s = roles.size(*roles.batch), roles.queries, roles.keys
    h, e = roles.size(*features), roles.size(*results)
    places = (q, roles.query), (k, roles.key), (v, roles.key)
    heads_first = sum(_heads_first(roles, *each) for each in places) > 1  # as they lie in memory

    seen, lens, masks = sorted_out(scores.masks, roles)
    scale, mod, met = q.factor * k.factor, None, []
    if scores.rest is None:
        scale *= scores.scale
    else:
        mod, met = score_mod(scores.rest, scores.scale, softmax.product.outs[0], dims_of)
    zeroing = [Side(x, dims, negated=not kept) for x, dims, kept in state.zeroed]
    zeroing = [x for x in zeroing if not x.value.is_known or band(x, roles) is None]
    sides = [scores.biases, met, masks, zeroing, [lens] if lens else []]
    flat = [one for group in sides for one in group]
    if any(not one.axes <= roles.sizes.keys() for one in flat):
        raise Unclear("an array meets the scores along an axis that they do not have")

    def emit(*arrays: Any) -> Any:
        def arranged(i: int, heads: int, last: int, own: list[Any]) -> Any:
            x, along = places[i]
            y = renamed(arrays[i], x.dims, [*roles.order(along, heads_first), *own])
            length = roles.sizes[along]
            return y.reshape((b, heads, length, last) if heads_first else (b, length, heads, last))

        qa, ka, va = (
            arranged(0, n * g, h, features),
            arranged(1, n, h, features),
            arranged(2, n, e, results),
        )
        rest = iter(arrays[3:])
        biases, met, kept, sees, count = (
            [roles.met(next(rest), one) for one in group] for group in sides
        )
        given: dict[str, Any] = {"bias": added(biases, scores.biases), "mask": all_of(kept, masks)}
        given |= seen.arguments if seen is not None else {}
        if lens is not None:
            x = jnp.broadcast_to(count[0].reshape(-1), (b,))
            held = jnp.iinfo(x.dtype)  # which one more, or the number of keys, may exceed
            x = jnp.clip(x, max(held.min, -1), min(held.max, s)).astype("int32")
            given["key_value_seq_lengths"] = jnp.clip(x + int(lens.factor), 0, s)
        if mod is not None:
            given |= {"score_mod": mod, "score_mod_operands": tuple(met)}
        out = dot_product_attention(qa, ka, va, scale=scale, heads_first=heads_first, **given)
        if lens is not None:
            mean = va.mean(2 if heads_first else 1, keepdims=True)
            blank = jnp.nan if scores.infinite else jnp.repeat(mean, g, 1 if heads_first else 2)
            some = (given["key_value_seq_lengths"] > 0)[:, None, None, None]
            out = jnp.where(some, out, jnp.asarray(blank, out.dtype))
        if zeroing:  # a query that sees no key has the result 0
            any_key = all_of(sees, zeroing).any(-1)[..., None]
            any_key = any_key if heads_first else jnp.swapaxes(any_key, 1, 2)
            out = jnp.where(any_key, out, jnp.asarray(0, out.dtype))
        if v.factor != 1:
            out = out * jnp.asarray(v.factor, out.dtype)
        axes = [*roles.order(roles.query, heads_first), *results]
        out = out.astype(last.dtype).reshape([roles.sizes[a] for a in axes])
        return renamed(out, axes, state.dims).reshape(last.shape)

    words = [str(seen)] if seen is not None else []
    words += ["lengths"] * (lens is not None) + ["a mask"] * bool(masks)
    words += ["a bias"] * bool(scores.biases) + ["a score_mod"] * (mod is not None)
    what = f"{dtype} q [{b}, {n * g}, {t}, {h}], k [{b}, {n}, {s}, {h}]"
    words += ["and its gradient"] * (derivative is not None)
    inputs = [q.value, k.value, v.value, *(one.value for one in flat)]
    return Region("attention", equations, inputs, last, emit, ", ".join([what, *words]), derivative)


def _heads_first(roles: Roles, x: Operand, along: int) -> bool:
    """Whether the heads of an operand come before its queries or keys where it lies."""
    heads = [x.dims.index(a) for a in (*roles.heads, *roles.groups) if a in x.dims]
    return not heads or min(heads) < x.dims.index(along)
