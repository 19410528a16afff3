"""Attention in a program, by its meaning: two products around a softmax over the axis that the
second one sums.

:mod:`.softmax` says what every value that depends on the first product is. Order of axes, grouped
queries and casts follow from the equations; what stands between product and softmax is read by
:mod:`.scores`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..ops import dot_product_attention
from .derivative import backward
from .known import is_known
from .masks import Positions, Seen, band, conjuncts, lengths
from .operands import Operand, operand
from .program import Missed, Program
from .region import Region
from .scores import Dims, Scores, Side, Unclear, added, all_of, narrowed, read, score_mod, unwidened
from .softmax import OUT, SCORES, Follower, State
from .values import Equation, Value, between, free_dims

_USED = (
    "its {} are used elsewhere, too; if that is a backward pass, put accelerate around the "
    "function that is differentiated: jax.grad(jc.accelerate(loss))"
)


@dataclass(frozen=True)
class _Found:
    """Attention: operands, the axes of the scores by role, and what modifies the scores."""

    q: Operand
    k: Operand
    v: Operand
    sizes: tuple[int, ...]
    batch: tuple[int, ...]
    heads: tuple[int, ...]
    groups: tuple[int, ...]
    query: int
    key: int
    of_query: int
    """The side of the product that has the queries."""

    def size(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def order(self, along: int, heads_first: bool) -> list[int]:
        """The axes of an operand of queries or keys."""
        heads = *self.heads, *self.groups
        return [*self.batch, *heads, along] if heads_first else [*self.batch, along, *heads]


def find(
    program: Program, kinds: Collection[str], taken: set[Equation], missed: Missed
) -> list[Region]:
    """The attention of a program; ``missed`` gets what is nearly one."""
    regions: list[Region] = []
    if "attention" not in kinds:
        return regions
    for equation in _before_exponentials(program):
        if equation in taken:
            continue
        follower = Follower(equation)
        if not follower.dropped and OUT not in {s.kind for s in follower.states.values()}:
            continue
        try:
            region = _region(program, follower)
        except Unclear as why:
            missed.append((equation, str(why)))
            continue
        if not region.replaced & taken:
            taken |= region.replaced
            regions.append(region)
    return regions


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


def _region(program: Program, follower: Follower) -> Region:
    outs = [v for v, s in follower.states.items() if s.kind == OUT]
    if not outs:
        raise Unclear(*follower.dropped[:1])
    last = min(outs, key=lambda v: v.made_by.at if v.made_by else 0)
    while not program.is_read(last) and len(last.users) == 1:
        after = last.users[0].outs
        if len(after) != 1 or after[0] not in outs:
            break
        (last,) = after
    last = unwidened(last, follower.product.ins[0].dtype, follower.states)
    equations = between(last, follower.states.__contains__)
    inside = {v for e in equations for v in e.outs} - {last}
    read_elsewhere = [v for v in inside if program.used_outside(equations, v)]
    state = follower.states[last]
    assert state.of is not None
    assert state.axis is not None
    dims_of = {v: s.dims for v, s in follower.states.items() if s.kind == SCORES}
    found, derivative = _roles(follower, state.axis, not read_elsewhere), None
    scores = read(state.of, follower.product.outs[0], dims_of)
    scores.masks += [Side(mask, dims, negated=not kept) for mask, dims, kept in state.hidden]
    scores.infinite |= bool(state.hidden)
    if read_elsewhere:
        operands = found.q, found.k, found.v
        biases = [*enumerate(scores.biases, len(operands))]
        try:
            derivative = backward(
                program, follower, equations, last, found.of_query, operands, biases
            )
        except Unclear as why:
            kinds = sorted(follower.states[v].kind for v in read_elsewhere)
            raise Unclear(f"{_USED.format(kinds[0])} ({why})") from None
    region = _built(found, scores, dims_of, follower, equations, last, state)
    if derivative is not None:
        region.backward, region.what = derivative, f"{region.what}, and its gradient"
    return region


def _roles(follower: Follower, key: int, repeats: bool) -> _Found:
    product, second = follower.product, follower.second
    assert second is not None
    free, count = free_dims(product), len(product.params["dimension_numbers"][1][0])
    axes = [
        [*range(count, count + len(free[0]))],
        [*range(count + len(free[0]), count + len(free[0]) + len(free[1]))],
    ]
    of_key = 0 if key in axes[0] else 1
    if key not in axes[of_key]:
        raise Unclear("the softmax is over an axis that both operands of the product have")
    sizes = product.outs[0].shape
    if any(sizes[a] != 1 for a in axes[of_key] if a != key):
        raise Unclear("the keys have several dimensions")
    of_query = 1 - of_key
    rows = [a for a in axes[of_query] if sizes[a] != 1] or axes[of_query][-1:]
    k, q = (operand(product.ins[i], repeats and i == of_key) for i in (of_key, of_query))
    side = next(i for i, v in enumerate(second.ins) if v in follower.states)
    v = operand(second.ins[1 - side], repeats)
    if not rows:
        raise Unclear("there is no dimension of queries")
    masked = _masked_axes(follower)
    query = max(rows, key=lambda a: (a in masked, sizes[a], a))
    groups = tuple(a for a in rows if a != query)
    batches, heads = (*range(count),), ()
    if count > 1:
        batches, heads = batches[:-1], batches[-1:]
    return _Found(q, k, v, sizes, batches, heads, groups, query, key, of_query)


def _masked_axes(follower: Follower) -> set[Any]:
    """Axes of the scores along which known masks vary."""
    found: set[Any] = set()
    for value, state in follower.states.items():
        made = value.made_by
        if state.kind == SCORES and made is not None and made is not follower.product:
            for v in made.ins:
                if v.shape and v not in follower.states and is_known(v):
                    found |= {*narrowed(v, state.dims)[1]} - {None}
    return found


def _built(
    found: _Found,
    scores: Scores,
    dims_of: dict[Value, Dims],
    follower: Follower,
    equations: set[Equation],
    last: Value,
    state: State,
) -> Region:
    product, second = follower.product, follower.second
    assert second is not None
    f = found
    q, k, v = f.q, f.k, f.v
    dtype = q.value.dtype
    if not (dtype == k.value.dtype == v.value.dtype):
        raise Unclear(f"queries, keys, values are {dtype}, {k.value.dtype}, {v.value.dtype}")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise Unclear(f"its dtype is {dtype}")
    if last.dtype.itemsize > dtype.itemsize:
        raise Unclear(
            f"the result of {dtype} operands is kept in {last.dtype}: cast it to {dtype}. A NumPy "
            "scalar, as of np.sqrt, makes it wider; a Python float does not"
        )

    contract, _ = product.params["dimension_numbers"]
    of_key = 0 if _axes_of(product, 0).get(f.key) is not None else 1
    q_axes, k_axes = _axes_of(product, 1 - of_key), _axes_of(product, of_key)
    side = next(i for i, x in enumerate(second.ins) if x in follower.states)
    v_axes, v_key, v_free = _axes_of_values(second, side, follower)
    repeats = math.prod(k.groups)
    if k.groups != (1,) * len(k.groups) or v.groups != (1,) * len(v.groups):
        ok = len(f.heads) == 1 and not f.groups
        ok &= k.groups[k_axes[f.heads[0]]] == repeats == math.prod(v.groups)
        ok &= v.groups[v_axes[f.heads[0]]] == repeats
        if not ok:
            k = operand(product.ins[of_key], False)
            v = operand(second.ins[1 - side], False)
            repeats = 1
    b, kn, g = f.size(f.batch), f.size(f.heads) // repeats, f.size(f.groups) * repeats
    t, s = f.sizes[f.query], f.sizes[f.key]
    h = math.prod(product.ins[0].shape[i] for i in contract[0])
    e = math.prod(second.ins[1 - side].shape[i] for i in v_free)
    v_axes[f.key] = v_key
    places = ((q, q_axes, f.query), (k, k_axes, f.key), (v, v_axes, f.key))
    heads_first = sum(_heads_first(f, *each) for each in places) > 1  # as they lie in memory
    q_order, k_order, v_order = (
        [axes[a] for a in f.order(along, heads_first) if a in axes] for _, axes, along in places
    )
    q_order += contract[1 - of_key]
    k_order += contract[of_key]
    v_order += v_free

    def sized(length: int, heads: int, features: int) -> tuple[int, ...]:
        return (b, heads, length, features) if heads_first else (b, length, heads, features)

    factor = q.factor * k.factor
    at = Positions(f.query, f.key, t, s)
    seen, lens, masks = _masks(scores, f, at)
    mod, operands = None, []
    if scores.rest is not None:
        mod, operands = score_mod(scores.rest, scores.rest_factor, product.outs[0], dims_of)
    zeroing = [Side(x, dims, negated=not kept) for x, dims, kept in state.zeroed]
    zeroing = [x for x in zeroing if not is_known(x.value) or band(x, at) is None]
    sides = [scores.biases, operands, masks, zeroing, [lens] if lens else []]
    flat = [side for group in sides for side in group]
    for side_ in flat:
        if {d for d in side_.dims if d is not None} - {*range(len(f.sizes))}:
            raise Unclear("an array meets the scores along an axis that they do not have")
    inputs = [q.value, k.value, v.value, *(x.value for x in flat)]

    def emit(*arrays: Any) -> Any:
        qa = q.arranged(arrays[0], q_order, sized(t, kn * g, h))
        ka = k.arranged(arrays[1], k_order, sized(s, kn, h))
        va = v.arranged(arrays[2], v_order, sized(s, kn, e))
        rest = iter(arrays[3:])
        met = [[_to_scores(next(rest), side_, f) for side_ in group] for group in sides]
        bias, mask = added(met[0], scores.biases), all_of(met[2], masks)
        count = None
        if lens is not None:
            count = jnp.broadcast_to(met[4][0].reshape(-1), (b,))
            held = jnp.iinfo(count.dtype)  # which one more, or the number of keys, may exceed
            count = jnp.clip(count, max(held.min, -1), min(held.max, s)).astype("int32")
            count = jnp.clip(count + int(lens.factor), 0, s)
        scale = factor * (1.0 if mod is not None else scores.scale)
        given = {"bias": bias, "mask": mask, "scale": scale, "heads_first": heads_first}
        if seen is not None:
            given |= _band_arguments(seen)
        if count is not None:
            given |= {"key_value_seq_lengths": count}
        if mod is not None:
            given |= {"score_mod": mod, "score_mod_operands": tuple(met[1])}
        out = dot_product_attention(qa, ka, va, **given)
        if count is not None:
            mean = va.mean(2 if heads_first else 1, keepdims=True)
            blank = jnp.nan if scores.infinite else jnp.repeat(mean, g, 1 if heads_first else 2)
            out = jnp.where((count > 0)[:, None, None, None], out, jnp.asarray(blank, out.dtype))
        if zeroing:  # a query that sees no key has the result 0
            sees = all_of(met[3], zeroing).any(-1)[..., None]
            sees = sees if heads_first else jnp.swapaxes(sees, 1, 2)
            out = jnp.where(sees, out, jnp.asarray(0, out.dtype))
        if v.factor != 1:
            out = out * jnp.asarray(v.factor, out.dtype)
        axes = [*f.order(f.query, heads_first), *(("E", j) for j in range(len(v_free)))]
        return _from_heads(out.astype(last.dtype), f, axes, state.dims, second, v_free, side, last)

    kinds = [] if seen is None else ["causal" if seen.right == 0 else "a band"]
    if seen is not None and seen.right == 0 and seen.left is not None:
        kinds = [f"a causal window of {seen.left}"]
    kinds += ["lengths"] * (lens is not None) + ["a mask"] * bool(masks)
    kinds += ["a bias"] * bool(scores.biases) + ["a score_mod"] * (mod is not None)
    what = f"{dtype} q [{b}, {kn * g}, {t}, {h}], k [{b}, {kn}, {s}, {h}]"
    what += f", {', '.join(kinds)}" if kinds else ""
    return Region("attention", equations, inputs, last, emit, what)


def _heads_first(f: _Found, x: Operand, axes: dict[int, int], along: int) -> bool:
    """Whether the heads of an operand come before its queries or keys where it lies."""
    heads = [x.at[axes[a]] for a in (*f.heads, *f.groups) if a in axes]
    return not heads or min(heads) < x.at[axes[along]]


def _axes_of(product: Equation, side: int) -> dict[int, int]:
    """Axis of the scores -> dimension of an operand of their product."""
    (_, batch), free = product.params["dimension_numbers"], free_dims(product)
    start = len(batch[0]) + (len(free[0]) if side else 0)
    return {**dict(enumerate(batch[side])), **{start + i: d for i, d in enumerate(free[side])}}


def _axes_of_values(
    second: Equation, side: int, follower: Follower
) -> tuple[dict[int, int], int, list[int]]:
    contract, batch = second.params["dimension_numbers"]
    state, other = follower.states[second.ins[side]], 1 - side
    pairs = zip(batch[side], batch[other], strict=True)
    axes = {state.dims[i]: j for i, j in pairs if state.dims[i] is not None}
    return axes, contract[other][0], free_dims(second)[other]


def _masks(scores: Scores, f: _Found, at: Positions) -> tuple[Seen | None, Side | None, list[Side]]:
    seen, lens, left = None, None, []
    for mask in scores.masks:
        for one in conjuncts(mask):
            if {d for d in one.dims if d is not None} - {*range(len(f.sizes))}:
                raise Unclear("a mask varies along an axis that the scores do not have")
            if is_known(one.value):
                fits = band(one, at)
                if fits == Seen():
                    continue
                if fits is not None and seen is None:
                    seen = fits
                    continue
                if fits is not None and seen is not None:
                    both = _both(seen, fits)
                    if both is not None:
                        seen = both
                        continue
            elif lens is None:
                lens = lengths(one, at, frozenset(f.batch))
                if lens is not None:
                    continue
            left.append(one)
    return seen, lens, left


def _both(a: Seen, b: Seen) -> Seen | None:
    """Two bands at once."""
    if a.bottom_right != b.bottom_right:
        return None
    least = lambda x, y: y if x is None else x if y is None else min(x, y)  # noqa: E731
    return Seen(least(a.left, b.left), least(a.right, b.right), a.bottom_right)


def _band_arguments(seen: Seen) -> dict[str, Any]:
    given: dict[str, Any] = {"bottom_right": seen.bottom_right}
    if seen.right == 0:
        given["is_causal"] = True
        if seen.left is not None:
            given["local_window_size"] = (seen.left - 1, 0)
    else:
        most = 2**30
        left = most if seen.left is None else seen.left - 1
        given["local_window_size"] = (left, most if seen.right is None else seen.right)
    return given


def _to_scores(x: Any, side: Side, f: _Found) -> Any:
    """An array that meets the scores, as (B, N, T, S) or 1 in each place."""
    axes = [d for d in side.dims if d is not None]
    x = x[tuple(slice(None) if d is not None else 0 for d in side.dims)]
    order = (*f.batch, *f.heads, *f.groups, f.query, f.key)
    places = sorted(range(len(axes)), key=lambda i: order.index(axes[i]))
    x = jnp.transpose(x, places)
    x = x.reshape([f.sizes[a] if a in axes else 1 for a in order])
    shape = []
    at = 0
    for group in (f.batch, (*f.heads, *f.groups)):
        part = x.shape[at : at + len(group)]
        if any(n != 1 for n in part):
            full = [f.sizes[a] for a in group]
            x = jnp.broadcast_to(x, (*x.shape[:at], *full, *x.shape[at + len(group) :]))
            shape.append(math.prod(full))
        else:
            shape.append(1)
        at += len(group)
    return x.reshape((*shape, *x.shape[at:]))


def _from_heads(
    out: Any,
    f: _Found,
    axes: list[Any],
    dims: Dims,
    second: Equation,
    v_free: list[int],
    side: int,
    last: Value,
) -> Any:
    """The result, with these axes, as the dimensions of the value that it replaces."""
    ends = [second.ins[1 - side].shape[i] for i in v_free]
    sizes = [f.sizes[a] if not isinstance(a, tuple) else ends[a[1]] for a in axes]
    out = out.reshape(sizes)
    order = [axes.index(d) for d in dims if d is not None]
    rest = [i for i in range(len(axes)) if i not in order]
    return jnp.transpose(out, (*rest, *order)).reshape(last.shape)
