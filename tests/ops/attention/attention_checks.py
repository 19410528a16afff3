"""Shared by the attention tests: operands, options, and the comparison with the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
from transformations import relative_error

import jax_cudnn as jc
from jax_cudnn.ops import attention_extras

S = jax.ShapeDtypeStruct
KEY = jax.random.key(7)
CAUSAL = {"is_causal": True}
LAST = {"is_causal": True, "bottom_right": True}
ours = jc.ops.dot_product_attention


def drawing(key):
    """A function of a shape (and a dtype) that draws new normal values in each call."""
    rng = np.random.default_rng(int(jax.random.bits(key)))
    return lambda shape, dtype="float32": jnp.asarray(rng.standard_normal(shape), dtype)


def qkv(normal, b=2, t=24, s=24, n=4, k=4, h=16, e=None, dtype="float32"):
    return [normal(shape, dtype) for shape in ((b, t, n, h), (b, s, k, h), (b, s, k, e or h))]


def made(normal, sizes, has, dtype="float32", **given):
    """A function of (query, key, value, bias, sink), its operands, and the oracle's arguments."""
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
    given |= {name: has.pop(name) for name in ("score_mod",) if name in has}
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
    """The dropout mask, as the forward pass writes it."""
    graph = jc.graph(
        lambda g, q, k, seed, offset: g.sdpa(
            q, k, k, seed=seed, offset=offset, dropout_probability=rate, rng_dump=True
        )[-1]
    ).with_options(implementation=implementation)
    seed = jax.random.key_data(KEY)[::-1].reshape(1, 1, 1, 2)
    return jax.jit(graph)(*(jnp.swapaxes(x, 1, 2) for x in (q, k)), seed, jnp.zeros_like(seed))


def outcome(function, operands, dout, dlogs=None):
    """Results (the output and the statistic) and gradients of a function, in one program; without
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
    """Compares results and gradients with the oracle, by default also the statistic's."""
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
    """(B, N, T, S) from the forward and backward passes: values and cotangent are identities."""
    q, k = (x.astype(dtype) for x in jax.random.normal(jax.random.key(3), (2, 2, t, 4, 64)))
    v = jnp.broadcast_to(jnp.eye(t, dtype=dtype)[:, None], (2, t, 4, t))

    @jax.jit
    def both(key):
        dropped = {"dropout_rate": rate, "dropout_rng": key} if rate else {}
        function = functools.partial(ours, q, k, implementation=implementation, **dropped)
        out, pull = jax.vjp(function, v)
        return jnp.moveaxis(out, 2, 1), jnp.moveaxis(pull(v)[0], 1, 3)

    return [np.asarray(x, np.float64) for x in both(key)]


def check_masks(limit=1e-5, **arguments):
    """Forward and backward passes drop the same weights, which depend on key and position."""
    rate, (whole, _) = 0.3, weights_of(0.0, KEY, **arguments)
    masks = []
    for key in (KEY, jax.random.key(8), jnp.array([1, 7], "uint32")):  # the last one as raw data
        forward, backward = weights_of(rate, key, **arguments)
        mask = forward != 0
        np.testing.assert_array_equal(mask, backward != 0)
        assert relative_error(backward, forward) < limit
        assert relative_error(forward, whole * mask / (1 - rate)) < limit
        assert abs(mask.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / mask.size) ** 0.5
        masks.append(mask)
    mask, *others = masks
    for other in (*others, mask[::-1], mask[:, ::-1], np.roll(mask, 1, axis=2)):
        assert abs((mask != other).mean() - 2 * rate * (1 - rate)) < 0.03
    return mask
