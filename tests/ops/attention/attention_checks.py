"""What tests of attention share: operands, options, and the comparison with the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
from transformations import relative_error

import jax_cudnn as jc
from jax_cudnn.ops import attention_extras, attention_reference

S = jax.ShapeDtypeStruct
KEY = jax.random.key(7)
CAUSAL = {"is_causal": True}
LAST = {"is_causal": True, "bottom_right": True}
ours = jc.ops.dot_product_attention


def drawing(key):
    """A function of a shape (and a dtype) that draws normal numbers, others in each call."""
    rng = np.random.default_rng(int(jax.random.bits(key)))
    return lambda shape, dtype="float32": jnp.asarray(rng.standard_normal(shape), dtype)


def qkv(normal, b=2, t=24, s=24, n=4, k=4, h=16, e=None, dtype="float32"):
    return [normal(shape, dtype) for shape in ((b, t, n, h), (b, s, k, h), (b, s, k, e or h))]


def made(normal, sizes, has, dtype="float32", **given):
    """A function of (query, key, value, bias, sink), these, and the oracle's arguments."""
    q, k, v = qkv(normal, **sizes, dtype=dtype)
    (b, t, n, _), s = q.shape, k.shape[1]
    has, exact = dict(has), {}
    if "rate" in has:
        rate = has.pop("rate")
        given |= {"dropout_rate": rate, "dropout_rng": KEY}
        exact["keep"] = np.asarray(kept(q, k, rate, given.get("implementation"))) / (1 - rate)
    for name, argument in (("queries", "query_seq_lengths"), ("keys", "key_value_seq_lengths")):
        if name in has:
            exact[name] = has.pop(name)
            given[argument] = jnp.array(exact[name], "int32")
    if "tiles" in has:
        shape = (*has.pop("tiles"), *attention_extras.tiles(t, s))
        tiles = np.asarray(normal(shape)) < 0.3
        tiles[:, :, 1] = False  # queries that see nothing
        exact["tiles"] = np.broadcast_to(tiles, (b, n, *shape[2:]))
        given["block_mask"] = jnp.asarray(tiles)
    named = {}
    if "bias" in has:
        named["bias"] = exact["bias"] = normal(has.pop("bias"), dtype)
    if has.pop("sink", False):
        named["sink"] = exact["sink"] = 2 * normal((n,))
    exact |= bounds(**has)

    def function(q, k, v, *others):
        others = dict(zip(named, others, strict=True))
        return ours(q, k, v, **others, **given, **has, return_residual=True)

    return function, [q, k, v, *named.values()], exact


def bounds(*, is_causal=False, local_window_size=None, bottom_right=False, alibi=False):
    left, right = local_window_size or (None, None)
    found = {"left": None if left is None else left + 1, "right": 0 if is_causal else right}
    return {**found, "bottom_right": bottom_right, "alibi": alibi}


def kept(q, k, rate, implementation=None):
    """The mask of the weights, as the forward writes it."""
    graph = jc.graph(
        lambda g, q, k, seed, offset: g.sdpa(
            q, k, k, seed=seed, offset=offset, dropout_probability=rate, rng_dump=True
        )[-1]
    ).with_options(implementation=implementation)
    seed = jax.random.key_data(KEY)[::-1].reshape(1, 1, 1, 2)
    return jax.jit(graph)(*(jnp.swapaxes(x, 1, 2) for x in (q, k)), seed, jnp.zeros_like(seed))


def outcome(function, operands, dout, dlogs=None):
    """Results (the result and the statistic) and gradients of a function, in one program; without
    ``dlogs`` the statistic has no cotangent."""

    @jax.jit
    def run(*operands):
        if dlogs is None:
            out, pull, logs = jax.vjp(function, *operands, has_aux=True)
            return out, logs, *pull(dout.astype(out.dtype))
        (out, logs), pull = jax.vjp(function, *operands)
        return out, logs, *pull((dout.astype(out.dtype), dlogs))

    return run(*operands)


def turned(x):
    return np.swapaxes(np.asarray(x, np.float64), 1, 2)


def check(normal, function, operands, exact, limit=1e-5, of_logs=True):
    """Results and gradients beside the oracle, also those of the statistic unless told not to."""
    q, _, v, *others = operands
    dout = normal((*q.shape[:3], v.shape[3]), q.dtype)
    dlogs = normal(q.shape[:3]) if of_logs else None
    out, logs, *found = outcome(function, operands, dout, dlogs)
    oracle = oracle_attention.Attention(*map(turned, operands[:3]), **exact)
    bias = exact["bias"].shape if "bias" in exact else (1,) * 4
    want = oracle.gradients(
        turned(dout), 0.0 if dlogs is None else turned(dlogs[..., None]), bias=bias
    )
    pairs = [
        (out, turned(oracle.out)),
        *zip(found, map(turned, map(want.get, "qkv")), strict=False),
    ]
    names = [name for name in ("bias", "sink") if name in exact]
    assert len(names) == len(others)
    pairs += zip(found[3:], map(want.get, names), strict=True)
    for a, b in pairs:
        a = np.asarray(a, np.float64)
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b).max()))
    np.testing.assert_allclose(logs, turned(oracle.stats)[..., 0], atol=limit, rtol=limit)


def weights_of(rate, key, implementation=None, dtype="float32", t=64):
    """(B, N, T, S) by the forward, and by the backward: values and cotangent are identities."""
    q, k = (x.astype(dtype) for x in jax.random.normal(jax.random.key(3), (2, 2, t, 4, 64)))
    v = jnp.broadcast_to(jnp.eye(t, dtype=dtype)[:, None], (2, t, 4, t))

    @jax.jit
    def both(key):
        dropped = {"dropout_rate": rate, "dropout_rng": key} if rate else {}
        function = functools.partial(ours, q, k, implementation=implementation, **dropped)
        out, pull = jax.vjp(function, v)
        return jnp.moveaxis(out, 2, 1), jnp.moveaxis(pull(v)[0], 1, 3)

    return [np.asarray(x, np.float64) for x in both(key)]


def check_masks(monkeypatch=None, limit=1e-5, **arguments):
    """Forward and backward drop the same weights, of each key, example, head and query others."""
    rate, (whole, _) = 0.3, weights_of(0.0, KEY, **arguments)

    def mask_of(key):
        forward, backward = weights_of(rate, key, **arguments)
        np.testing.assert_array_equal(forward != 0, backward != 0)
        assert relative_error(backward, forward) < limit
        mask = forward != 0
        assert relative_error(forward, whole * mask / (1 - rate)) < limit
        assert abs(mask.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / mask.size) ** 0.5
        return mask

    mask = mask_of(KEY)
    keys = jax.random.key(8), jnp.array([1, 7], "uint32")  # which differs in its first word
    others = [*map(mask_of, keys), mask[::-1], mask[:, ::-1], np.roll(mask, 1, axis=2)]
    for other in others:
        assert abs((mask != other).mean() - 2 * rate * (1 - rate)) < 0.03
    if monkeypatch:  # nor does it depend on the rows computed at a time
        monkeypatch.setattr(attention_reference, "_SCORES", 2**24)
        jax.clear_caches()
        np.testing.assert_array_equal(mask_of(KEY), mask)


# -- what is planned, and run on the GPU -----------------------------------------------------------

LARGE = {"b": 2, "t": 256, "s": 256, "n": 4, "k": 4, "h": 64}
SHORT = {"queries": [256, 128], "keys": [253, 133]}
PLANNED = {
    "grouped heads, causal": ({"n": 8, "k": 2}, CAUSAL),
    "odd lengths": ({"t": 100, "s": 77, "h": 32}, {}),
    "from the last": ({"t": 128, "h": 128}, LAST),
    "window, lengths": ({}, {**SHORT, **CAUSAL, "local_window_size": (64, 0)}),
    "bias": ({}, {"bias": (1, 4, 256, 256)}),
    "a row of bias": ({"k": 2}, {"bias": (2, 1, 1, 256)}),
    "sink": ({"k": 2}, {**CAUSAL, "sink": True}),
    "sink, lengths": ({"b": 3}, {"sink": True, "queries": [256, 9, 256], "keys": [0, 133, 256]}),
    "alibi of six heads": ({"n": 6, "k": 2}, {**CAUSAL, "alibi": True}),
    "dropout, bias": ({}, {"rate": 0.1, "bias": (1, 4, 256, 256)}),
    "dropout and all": ({"k": 2}, {**SHORT, **CAUSAL, "rate": 0.1, "sink": True, "alibi": True}),
}


def planned(normal, name, dtype="bfloat16", **given):
    sizes, has = PLANNED[name]
    return made(normal, {**LARGE, **sizes}, has, dtype, **given)


def of_several_dtypes(normal, port, dtype):
    """A graph of attention or of its backward with one operand in another dtype, and arrays."""

    def forward(g, q, k, v):
        return g.sdpa(q, k, v, attn_scale=0.125)[0]

    def backward(g, *operands):
        return g.sdpa_backward(*operands, attn_scale=0.125)

    given = {name: normal((2, 4, 64, 64), "bfloat16") for name in ("q", "k", "v", "o", "dO")}
    given["stats"] = normal((2, 4, 64, 1)) + 4
    given[port] = given[port].astype(dtype)
    function = forward if port == "v" else backward
    return jc.graph(function), [*given.values()][: 3 if port == "v" else 6]


# The scale is small: of equal queries and keys nearly all weight would be on the own key, and
# gradients would be nothing but rounding.
ONE_ARRAY = {
    "keys and values": lambda g, q, k, *bias: g.sdpa(q, k, k, *bias, attn_scale=0.03)[0],
    "queries and keys": lambda g, q, k, *bias: g.sdpa(q, q, k, *bias, attn_scale=0.03)[0],
    "all": lambda g, q, k, *bias: g.sdpa(k, k, k, *bias, attn_scale=0.03)[0],
}


def of_one_array(name, implementation):
    """Results and gradients as a function; the engines with and without a bias differ."""
    graph = jc.graph(ONE_ARRAY[name]).with_options(implementation=implementation)

    def run(along, *operands):
        out, pull = jax.vjp(graph, *operands)
        return out, *pull(along)

    return run


# Queries that only a band hides all keys of: sizes, arguments, lengths of queries and of keys.
UNSEEING = {
    "window": ({"t": 256, "s": 128}, {"local_window_size": (16, 0)}, None),
    "window of all lengths": (
        {"t": 256, "s": 128}, {"local_window_size": (16, 0)}, ([256, 256], [128, 128]),
    ),
    "more queries than keys": ({}, LAST, ([256, 200], [99, 200])),
}  # fmt: skip


def unseeing(normal, name, implementation, dtype):
    """Results, residual and gradients of q, k and v by both, as a function; operands, and those of
    a call that takes the residual for a result of its own."""
    sizes, options, lengths = UNSEEING[name]
    options = dict(options, implementation=implementation, return_residual=True)
    for port, given in zip(("query", "key_value"), lengths or (), strict=False):
        options[f"{port}_seq_lengths"] = jnp.array(given, "int32")

    def run(q, k, v):
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        (out, logs), pull = jax.vjp(functools.partial(ours, **options), q, k, v)
        return out, logs, *pull((jnp.cos(out), jnp.zeros_like(logs)))

    return run, qkv(normal, **{**LARGE, "k": 2, **sizes}, dtype="bfloat16"), options


def of_kind(kind, length=96, keys=160, width=64, heads=4):
    """Attention by array for each of q, k and v, by one array, packed, or in fp8; avals, and the
    shape of its scores."""
    if length > keys:
        keys = length
    avals = [S((2, size, heads, width), "bfloat16") for size in (length, keys, keys)]
    if kind == "qkv":

        def attend(qkv, bias=None, **named):
            return jc.ops.dot_product_attention_qkv(qkv, heads, bias, **named)

        return attend, [S((2, length, 3 * heads, width), "bfloat16")], (2, heads, length, length)
    if kind == "packed":
        of_queries, of_keys = length - length // 3, keys - keys // 3
        attend = functools.partial(
            jc.ops.packed_dot_product_attention,
            query_offsets=jnp.array([0, of_queries, length], "int32"),
            key_value_offsets=jnp.array([0, of_keys, keys], "int32"),
            max_query_length=of_queries,
            max_key_value_length=of_keys,
        )
        return attend, [S(a.shape[1:], a.dtype) for a in avals], (2, heads, of_queries, of_keys)
    attend = jc.ops.dot_product_attention_fp8 if kind == "fp8" else ours
    return attend, avals, (2, heads, length, keys)
