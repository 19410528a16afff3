"""Shared by the attention tests: operands, options, and the comparison with float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from fuzz.attentions import attention
from helpers import exactly
from transformations import relative_error

import jax_cudnn as jc
from jax_cudnn.ops.attention import extras as attention_extras

S = jax.ShapeDtypeStruct
KEY = jax.random.key(7)
CAUSAL = {"is_causal": True}
LAST = {"is_causal": True, "bottom_right": True}
ours = jc.ops.dot_product_attention


def drawing(key):
    """A function of a shape (and a dtype) that draws new normal values in each call."""
    rng = np.random.default_rng(int(jax.random.bits(key)))
    return lambda shape, dtype="float32": jnp.asarray(rng.standard_normal(shape), dtype)


def qkv(normal, b=2, t=24, s=24, n=4, k=4, h=16, e=None, v=None, dtype="float32"):
    shapes = (b, t, n, h), (b, s, k, h), (b, s, v or k, e or h)
    return [normal(shape, dtype) for shape in shapes]


def lengths(queries, keys):
    ends = jnp.array([queries, keys], "int32")
    return {"query_seq_lengths": ends[0], "key_value_seq_lengths": ends[1]}


def made(normal, sizes, has, dtype="float32", **given):
    """A function of (query, key, value, bias, sink), what it means, and its operands."""
    q, k, v = qkv(normal, **sizes, dtype=dtype)
    (_, t, n, _), s = q.shape, k.shape[1]
    has, exact = dict(has), {}
    if "rate" in has:
        rate = has.pop("rate")
        given |= {"dropout_rate": rate, "dropout_rng": KEY}
        exact["keep"] = np.asarray(kept(q, k, rate, given.get("implementation"))) / (1 - rate)
    if "tiles" in has:
        tiles = normal((*has.pop("tiles"), *attention_extras.tiles(t, s))) < 0.3
        has["block_mask"] = tiles.at[:, :, 1].set(False)  # queries that see nothing
    named = {"bias": normal(has.pop("bias"), dtype)} if "bias" in has else {}
    if has.pop("sink", False):
        named["sink"] = 2 * normal((n,))

    def of(attend, more):
        def function(q, k, v, *others):
            others = dict(zip(named, others, strict=True))
            return attend(q, k, v, **others, **has, **more, return_residual=True)

        return function

    return of(ours, given), of(attention, exact), [q, k, v, *named.values()]


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


def check(normal, function, exact, operands, limit=1e-5, of_logs=True):
    """Compares results and gradients with float64, by default also the statistic's."""
    q, _, v, *_ = operands
    dout, dlogs = normal((*q.shape[:3], v.shape[3]), q.dtype), normal(q.shape[:3])
    out, logs, *found = outcome(function, operands, dout, dlogs if of_logs else None)
    (want, stats), gradients = exactly(exact, operands, (dout, dlogs * of_logs))
    for a, b in zip((out, *found), (want, *gradients), strict=True):
        a = np.asarray(a, np.float64)
        assert a.shape == b.shape
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b).max()))
    np.testing.assert_allclose(logs, stats, atol=limit, rtol=limit)


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
