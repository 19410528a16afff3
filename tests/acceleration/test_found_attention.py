"""Attention is found however it is written, with what stands between scores and softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from acceleration.test_program import arrays, check, replaced
from jax import nn

from jax_cudnn.acceleration.api import search

B, T, N, H = 2, 12, 4, 8


def weights(scores, mask=None, how="softmax", least=-1e30):
    if mask is not None:
        scores = jnp.where(mask, scores, least)
    if how == "softmax":
        return nn.softmax(scores)
    if how == "float32":
        return nn.softmax(scores.astype("float32")).astype(scores.dtype)
    if how == "by hand":
        e = jnp.exp(scores - scores.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    if how == "inverse":
        e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        return e * (1 / e.sum(-1, keepdims=True))
    if how == "unshifted":
        e = jnp.exp(scores)
        return e / e.sum(-1)[..., None]
    if how == "log-sum-exp":
        return jnp.exp(scores - nn.logsumexp(scores, -1, keepdims=True))
    assert how == "log-softmax"
    return jnp.exp(nn.log_softmax(scores))


def attend(q, k, v, mask=None, how="softmax", least=-1e30):
    p = weights(jnp.einsum("bthd,bshd->bhts", q, k) * H**-0.5, mask, how, least)
    return jnp.einsum("bhts,bshd->bthd", p, v)


def rows_and_columns():
    return jnp.arange(T)[:, None], jnp.arange(T)[None]


def causal(q, k, v, **how):
    rows, columns = rows_and_columns()
    return attend(q, k, v, rows >= columns, **how)


def grouped(q, k, v, repeat):
    return causal(q, repeat(k[:, :, :2]), repeat(v[:, :, :2]))


def online(q, k, v):
    e = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k) / 3)
    return jnp.einsum("bhts,bshd->bthd", e, v) / e.sum(-1).swapaxes(1, 2)[..., None]


def of_one_head(q, k, v):
    return nn.softmax(q @ k.T / 4) @ v


def with_mask_buffer(q, k, v):
    buffer = jnp.tril(jnp.ones((1, 1, 32, 32), bool))
    return attend(q, k, v, jax.lax.dynamic_slice(buffer, (0, 0, 0, 0), (1, 1, T, T)))


def in_groups(q, k, v):
    q = q.reshape(B, T, 2, 2, H)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k[:, :, :2])
    out = jnp.einsum("bkgts,bskd->btkgd", weights(s), v[:, :, :2])
    return out.reshape(B, T, N, H)


def biased(q, k, v, bias):
    s = jnp.einsum("bthd,bshd->bhts", q, k) + bias
    return jnp.einsum("bhts,bshd->bthd", nn.softmax(s), v)


def softcapped(q, k, v):
    s = 5 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) / 5)
    return jnp.einsum("bhts,bshd->bthd", weights(s, jnp.tril(jnp.ones((T, T), bool))), v)


def relative(q, k, v):
    rows, columns = rows_and_columns()
    s = jnp.einsum("bthd,bshd->bhts", q, k) - 0.1 * jnp.abs(rows - columns)
    return jnp.einsum("bhts,bshd->bthd", nn.softmax(s), v)


def masked_in_softmax(q, k, v, mask):
    p = nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), where=mask)
    return jnp.einsum("bhts,bshd->bthd", p, v)


def masked_after_exp(q, k, v, mask):
    s = jnp.einsum("bthd,bshd->bhts", q, k) / 3
    e = jnp.where(mask, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return jnp.einsum("bhts,bshd->bthd", e / e.sum(-1, keepdims=True), v)


LOW = float(jnp.finfo("float32").min)
CASES = {
    **{how: (lambda q, k, v, h=how: causal(q, k, v, how=h), "causal") for how in (
        "softmax", "float32", "by hand", "inverse", "unshifted", "log-sum-exp", "log-softmax",
    )},
    "plain": (attend, ""),
    "of jax.nn": (lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True), "causal"),
    "window of jax.nn": (
        lambda q, k, v: nn.dot_product_attention(q, k, v, local_window_size=(3, 0)),
        "a causal window of 4"),
    "added mask": (
        lambda q, k, v: biased(q, k, v, jnp.where(jnp.tril(jnp.ones((T, T))) > 0, 0.0, LOW)),
        "causal"),
    "mask of numbers": (
        lambda q, k, v: biased(q, k, v, (1 - jnp.tril(jnp.ones((T, T)))) * -1e9), "causal"),
    "comparison of a difference": (
        lambda q, k, v: attend(q, k, v, (lambda r, c: r - c >= 0)(*rows_and_columns())), "causal"),
    "infinite": (lambda q, k, v: causal(q, k, v, least=-jnp.inf), "causal"),
    "the other way around": (
        lambda q, k, v: attend(q, k, v, ~(lambda r, c: r < c)(*rows_and_columns())), "causal"),
    "buffer": (with_mask_buffer, "causal"),
    "both sides": (
        lambda q, k, v: attend(q, k, v, (lambda r, c: abs(r - c) <= 2)(*rows_and_columns())),
        "a band"),
    "repeat": (lambda q, k, v: grouped(q, k, v, lambda x: jnp.repeat(x, 2, 2)), "causal"),
    "broadcast": (
        lambda q, k, v: grouped(q, k, v, lambda x: jnp.broadcast_to(
            x[:, :, :, None], (B, T, 2, 2, H)).reshape(B, T, N, H)), "causal"),
    "groups": (in_groups, ""),
    "online": (online, ""),
    "vmap": (lambda q, k, v: jax.vmap(jax.vmap(of_one_head, 1, 1))(q, k, v), ""),
    "one head": (lambda q, k, v: of_one_head(q[0, :, 0], k[0, :, 0], v[0, :, 0]), ""),
    "heads first": (
        lambda q, k, v: jnp.swapaxes(nn.softmax(jnp.swapaxes(q, 1, 2) @ jnp.moveaxis(k, 1, -1))
                                     @ jnp.swapaxes(v, 1, 2), 1, 2), ""),
    "fewer queries": (lambda q, k, v: attend(q[:, :5], k, v), ""),
    "bottom right": (
        lambda q, k, v: attend(q[:, :5], k, v, jnp.tril(jnp.ones((5, T), bool), T - 5)), "causal"),
    "scaled before": (lambda q, k, v: attend(q * 0.25, k, v), ""),
    "where of softmax": (
        lambda q, k, v: masked_in_softmax(q, k, v, jnp.tril(jnp.ones((T, T), bool))), "causal"),
    "exponentials masked": (
        lambda q, k, v: masked_after_exp(q, k, v, jnp.tril(jnp.ones((T, T), bool))), "causal"),
    "softcap": (softcapped, "causal, a score_mod"),
    "relative": (relative, "a bias"),
}  # fmt: skip


def found(fn, *args):
    program, missed = search(jax.make_jaxpr(fn)(*args), ("attention",))
    return [r.what for inner in program.programs for r in inner.found], [why for _, why in missed]


@pytest.mark.parametrize("name", CASES)
def test_spellings(name):
    fn, words = CASES[name]
    args = arrays(*[(B, T, N, H)] * 3)
    (what,), _ = found(fn, *args)
    assert what.partition("], k [")[2].partition("]")[2].lstrip(", ") == words
    fast = replaced(fn)
    np.testing.assert_allclose(jax.jit(fast)(*args), fn(*args), rtol=1e-5, atol=1e-5)
    grads = [jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)) for f in (fn, fast)]
    for want, got in zip(grads[0](*args), jax.jit(grads[1])(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_grouped_keys_are_not_repeated_in_memory():
    args = arrays(*[(B, T, N, H)] * 3)
    for name in ("repeat", "broadcast", "groups"):
        (what,), _ = found(CASES[name][0], *args)
        assert f"k [{B}, 2, {T}, {H}]" in what


def test_lengths_and_masks_of_the_batch():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    length, padding = jnp.array([3, 0]), jnp.arange(T)[None] < jnp.array([[5], [T]])
    at = jnp.arange(T)

    def by_length(q, k, v, length):
        return attend(q, k, v, (at < length[:, None])[:, None, None])

    def by_padding(q, k, v, padding):
        mask = (padding[:, None, None] > 0) & jnp.tril(jnp.ones((T, T), bool))
        return biased(q, k, v, jnp.where(mask, 0.0, LOW))

    for fn, mask, words in (
        (by_length, length, "lengths"),
        (by_padding, padding, "causal, a mask"),
    ):
        (what,), _ = found(fn, q, k, v, mask)
        assert what.endswith(words)
        got = jax.jit(replaced(fn))(q, k, v, mask)
        np.testing.assert_allclose(got, fn(q, k, v, mask), rtol=1e-5, atol=1e-5)


def test_biases_meet_the_scores_in_any_shape():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    for shape in ((B, N, T, T), (N, 1, T), (1, N, T, T), (T, T), (B, 1, 1, T)):
        (bias,) = arrays(shape, seed=3)
        (what,), _ = found(biased, q, k, v, bias)
        assert what.endswith("a bias")
        grads = [
            jax.grad(lambda b, f=f: (f(q, k, v, b) ** 2).sum()) for f in (biased, replaced(biased))
        ]
        np.testing.assert_allclose(grads[1](bias), grads[0](bias), rtol=1e-4, atol=1e-4)


def test_a_mask_outside_of_a_scan_is_known_inside():
    q, k, v = arrays(*[(B, T, N, H)] * 3)

    def layers(q, k, v):
        mask = jnp.tril(jnp.ones((T, T), bool))
        return jax.lax.scan(lambda c, _: (attend(c, k, v, mask), None), q, None, 3)[0]

    assert found(layers, q, k, v)[0][0].endswith("causal")


def test_near_misses_say_what_to_change():
    q, k, v = arrays(*[(B, T, N, H)] * 3)

    def dropped(q, k, v):
        p = nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        p = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, p.shape), p, 0) / 0.9
        return jnp.einsum("bhts,bshd->bthd", p, v)

    whats, (missed,) = found(dropped, q, k, v)
    assert whats == []
    assert "another array (select_n), as in dropout" in missed
    half = [x.astype("bfloat16") for x in (q, k, v)]
    wide = lambda q, k, v: jnp.einsum(  # noqa: E731
        "bhts,bshd->bthd", nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v,
        preferred_element_type="float32",
    )  # fmt: skip
    assert "cast it to bfloat16" in found(wide, *half)[1][0]


def test_a_softmax_over_blocks_of_keys_is_a_near_miss():
    q, k, v = arrays(*[(T, H)] * 3)

    def blocks(q, k, v):
        def step(carry, block):
            most, total, out = carry
            s = q @ block[0].T
            new = jnp.maximum(most, s.max(-1))
            e, past = jnp.exp(s - new[:, None]), jnp.exp(most - new)
            total = total * past + e.sum(-1)
            return (new, total, out * past[:, None] + e @ block[1]), None

        start = jnp.full(T, -jnp.inf), jnp.zeros(T), jnp.zeros((T, H))
        parts = [x.reshape(3, T // 3, H) for x in (k, v)]
        (_, total, out), _ = jax.lax.scan(step, start, parts)
        return out / total[:, None]

    whats, (missed,) = found(blocks, q, k, v)
    assert whats == []
    assert "over blocks of keys" in missed
    np.testing.assert_array_equal(replaced(blocks)(q, k, v), blocks(q, k, v))


def test_a_query_that_sees_no_key_is_zero_where_softmax_makes_it_zero():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    at = jnp.arange(T)
    padding = (at >= 4)[None, None, None] & jnp.ones((B, 1, 1, 1), bool)
    lengths = (at < jnp.array([3, 0])[:, None])[:, None, None]

    def both(q, k, v, mask):
        return masked_in_softmax(q, k, v, mask & jnp.tril(jnp.ones((T, T), bool)))

    for fn in (masked_in_softmax, both):
        for mask in (padding, lengths, jnp.zeros((B, N, T, T), bool)):
            want, got = fn(q, k, v, mask), jax.jit(replaced(fn))(q, k, v, mask)
            assert len(found(fn, q, k, v, mask)[0]) == 1
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    want = jax.grad(lambda *x: (both(*x, padding) ** 2).sum(), (0, 1, 2))(q, k, v)
    got = jax.grad(lambda *x: (replaced(both)(*x, padding) ** 2).sum(), (0, 1, 2))(q, k, v)
    for a, b in zip(want, got, strict=True):
        assert np.isfinite(np.asarray(b)).all()
        np.testing.assert_allclose(b, jnp.nan_to_num(a), rtol=1e-4, atol=1e-4)


def test_biases_of_numbers_that_are_chosen_are_compared_as_they_are():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    rows, columns = rows_and_columns()

    def prefix(q, k, v):
        return biased(q, k, v, jnp.where(columns <= rows, 0.0, jnp.where(columns < 5, 0.0, -1e9)))

    def growing(q, k, v):
        return biased(q, k, v, jnp.where(columns <= rows, 0.0, -1e9 * (1.0 + columns)))

    def scaled(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k)
        s = (s * -1e-9 + (columns > rows).astype("float32")) * -1e9
        return jnp.einsum("bhts,bshd->bthd", nn.softmax(s), v)

    for fn in (prefix, growing, scaled):
        assert len(found(fn, q, k, v)[0]) == 1
        np.testing.assert_allclose(replaced(fn)(q, k, v), fn(q, k, v), rtol=1e-4, atol=1e-4)


def test_roundings_to_8_bits_stay():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    roundings = (
        lambda x: jax.lax.reduce_precision(x, 8, 3),
        lambda x: x.astype("float8_e4m3fn").astype("float32"),
    )
    for rounded in roundings:

        def quantized(q, k, v, rounded=rounded):
            p = nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
            return jnp.einsum("bhts,bshd->bthd", rounded(p), v)

        assert not found(quantized, q, k, v)[0]
        w = q[0, 0, :, :]
        dense = lambda x, w, r=rounded: nn.relu(r(x @ w.T) + 1.0)  # noqa: E731
        np.testing.assert_allclose(replaced(dense)(q, w), dense(q, w), rtol=1e-5, atol=1e-5)


def test_what_only_looks_like_attention_is_left():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    other_axis = lambda q, k, v: jnp.einsum(  # noqa: E731
        "bhts,bshd->bthd", nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k), axis=2), v
    )
    wrong_sum = lambda q, k, v: jnp.einsum(  # noqa: E731
        "bhts,bthd->bshd", nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v
    )

    def other_total(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k)
        e = jnp.exp(s)
        return jnp.einsum("bhts,bshd->bthd", e / jnp.exp(2 * s).sum(-1, keepdims=True), v)

    def with_a_one(q, k, v):
        e = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshd->bthd", e / (1 + e.sum(-1, keepdims=True)), v)

    mask = jnp.arange(T) < 5

    def zeroed(q, k, v):  # the others are not made larger
        p = nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshd->bthd", jnp.where(mask, p, 0), v)

    def another_mask(q, k, v):
        e = jnp.exp(jnp.einsum("bthd,bshd->bhts", q, k))
        p = jnp.where(mask, e, 0) / jnp.where(mask[::-1], e, 0).sum(-1, keepdims=True)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    def turned(q, k, v):
        square = mask[:, None] & mask
        s = jnp.einsum("bthd,bshd->bhts", q, k)
        e = jnp.exp(jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -jnp.inf))
        p = jnp.where(jnp.tril(jnp.ones((T, T), bool)).T | square, e / e.sum(-1, keepdims=True), 0)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    for fn in (other_axis, wrong_sum, other_total, with_a_one, zeroed, another_mask, turned):
        assert not found(fn, q, k, v)[0]
        np.testing.assert_allclose(replaced(fn)(q, k, v), fn(q, k, v), rtol=1e-5, atol=1e-5)


def test_long_masks_are_compared_in_blocks(monkeypatch):
    from jax_cudnn.acceleration import values

    biggest = 0
    computed = values._computed

    def watched(value, block, done):
        nonlocal biggest
        made = computed(value, block, done)
        owned = made if made.base is None else made.base
        biggest = max(biggest, owned.nbytes)
        return made

    monkeypatch.setattr(values, "_computed", watched)
    x = jax.ShapeDtypeStruct((1, 8192, 1, 64), "bfloat16")

    def odd(q, k, v):  # neither a comparison of positions nor a short one
        rows, columns = jnp.arange(8192)[:, None], jnp.arange(8192)[None]
        s = jnp.einsum("bthd,bshd->bhts", q, k)
        mask = ((rows - columns) * 2 >= -1) & (rows + 1 > columns)
        return jnp.einsum("bhts,bshd->bthd", weights(s, mask, least=-1e9), v)

    assert found(odd, x, x, x)[0][0].endswith("causal")
    assert 0 < biggest <= 20e6


def test_known_arrays_are_computed_whole():
    """Also from arrays that are the same along a dimension, which are held with one element."""
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    ones, some = jnp.ones, T // 2
    masks = (
        lambda: jnp.cumsum(ones(T, "int32")) <= some,
        lambda: jnp.concatenate([ones(some, bool), jnp.zeros(T - some, bool)]),
        lambda: jnp.concatenate([ones((T, some), bool), jnp.zeros((T, T - some), bool)], 1),
    )
    for mask in masks:

        def attention(q, k, v, mask=mask):
            s = jnp.einsum("bthd,bshd->bhts", q, k)
            return jnp.einsum("bhts,bshd->bthd", weights(s, mask(), least=-1e9), v)

        check(attention, q, k, v)


def test_scores_that_are_rounded_to_integers_stay():
    def attention(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k).astype("int32").astype("float32")
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)

    assert not found(attention, *arrays(*[(B, T, N, H)] * 3))[0]


def test_differences_of_positions_that_wrap():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    for dtype, least, off in (("uint32", 0, 0), ("int8", 3, 120)):

        def attention(q, k, v, dtype=dtype, least=least, off=off):
            at = jax.lax.iota(dtype, T)
            far, near = jnp.asarray(off, dtype), jnp.asarray(off // 6, dtype)
            mask = (at[:, None] + far) - (at - near) >= least
            s = jnp.einsum("bthd,bshd->bhts", q, k)
            return jnp.einsum("bhts,bshd->bthd", weights(s, mask, least=-1e9), v)

        check(attention, q, k, v)


def test_a_reshape_that_turns_dimensions_is_no_other_shape():
    q, k, v, bias = arrays(*[(B, T, N, H)] * 3, (T, T))

    def attention(q, k, v, bias):
        s = jnp.einsum("bthd,bshd->bhts", q, k) + jax.lax.reshape(bias, (T, T), (1, 0))
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)

    check(attention, q, k, v, bias)


ORDERS = ("btnh,bsnh,bsnh->btnh", "bnth,bsnh,bnsh->btnh", "tbnh,sbnh,sbnh->tbnh",
          "hbnt,nbhs,bshn->ntbh", "bnth,bnsh,bnsh->bnth", "tnh,snh,snh->tnh", "th,sh,sh->th",
          "btkgh,bskh,bskh->btkgh", "bgkth,bksh,bshk->tbkgh", "kgbth,kbsh,bksh->bkgth")  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_operands_in_any_order_of_axes(order):
    given, out = order.split("->")
    q, k, v = given.split(",")
    rows = "".join(c for c in "bnkgt" if c in q)

    def attention(*x):
        scores = jnp.einsum(f"{q},{k}->{rows}s", *x[:2]) / 3
        return jnp.einsum(f"{rows}s,{v}->{out}", jax.nn.softmax(scores), x[2])

    sizes = {"b": 2, "t": 6, "s": 10, "n": 4, "h": 8, "g": 2, "k": 3}
    check(attention, *arrays(*(tuple(sizes[c] for c in axes) for axes in (q, k, v))))
