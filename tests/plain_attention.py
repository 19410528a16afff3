"""Attention of one example, and of several packed ones: what tests of attention compare with."""

import jax
import jax.numpy as jnp
import numpy as np


def seen(queries, keys, causal=False, window=None, bottom_right=False):
    """Whether a query sees a key, (queries, keys)."""
    at = np.arange(queries)[:, None] + (keys - queries if bottom_right else 0)
    j = np.arange(keys)[None]
    found = np.ones((queries, keys), bool)
    if causal:
        found &= j <= at
    if window is not None:
        found &= (j >= at - window[0]) & (causal | (j <= at + window[1]))
    return found


def attention(q, k, v, sees, bias=None):
    """The result in jnp, of (T, N, H), (S, K, H) and (S, K, E); each query sees some key."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    with jax.default_matmul_precision("highest"):
        scores = q.shape[-1] ** -0.5 * jnp.einsum("tnh,snh->nts", q, k)
        scores = jnp.where(sees, scores if bias is None else scores + bias, -jnp.inf)
        return jnp.einsum("nts,sne->tne", jax.nn.softmax(scores), v)


def exact(q, k, v, sees, dout, dlogs, bias=0.0):
    """In NumPy float64: the result and the logarithm of each row's sum (T, N), and the gradients
    by q, k, v and the scores (N, T, S) for cotangents of both."""
    groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    wide_k, wide_v = (np.repeat(x, groups, axis=1) for x in (k, v))
    scores = np.where(sees, scale * np.einsum("tnh,snh->nts", q, wide_k) + bias, -np.inf)
    some = sees.any(1)
    largest = np.where(some, scores.max(-1, initial=-np.inf), 0)[..., None]
    each = np.exp(scores - largest)
    total = np.where(some, each.sum(-1), 1)[..., None]
    weights = each / total
    out = np.einsum("nts,sne->tne", weights, wide_v)
    logs = np.where(some, (largest + np.log(total))[..., 0], -np.inf).T
    along = np.einsum("tne,sne->nts", dout, wide_v) - (dout * out).sum(-1).T[..., None]
    slope = weights * (along + np.where(some, dlogs.T, 0)[..., None])
    dk = scale * np.einsum("nts,tnh->snh", slope, q)
    dv = np.einsum("nts,tne->sne", weights, dout)
    dk, dv = (x.reshape(len(x), -1, groups, x.shape[2]).sum(2) for x in (dk, dv))
    return out, logs, scale * np.einsum("nts,snh->tnh", slope, wide_k), dk, dv, slope


def exact_packed(q, k, v, queries, keys, dout, dlogs, bias=None, **band):
    """The same one example after the other, and the gradient of the bias, if there is one."""
    q, k, v, dout, dlogs = (np.asarray(x, np.float64) for x in (q, k, v, dout, dlogs))
    out, logs = np.zeros(dout.shape), np.full(dlogs.shape, -np.inf)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    batch = len(queries) - 1
    dbias = None
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        longest = [int(np.diff(ends).max()) for ends in (queries, keys)]
        dbias = np.zeros((batch, q.shape[1], *longest))
        whole = np.broadcast_to(bias, dbias.shape)
    for i in range(batch):
        (a, b), (c, d) = (tuple(map(int, ends[i : i + 2])) for ends in (queries, keys))
        if a == b or c == d:
            continue
        part = 0.0 if bias is None else whole[i, :, : b - a, : d - c]
        sees = seen(b - a, d - c, **band)
        given = q[a:b], k[c:d], v[c:d], sees, dout[a:b], dlogs[a:b]
        out[a:b], logs[a:b], dq[a:b], dk[c:d], dv[c:d], slope = exact(*given, part)
        if bias is not None:
            dbias[i, :, : b - a, : d - c] = slope
    if bias is None:
        return out, logs, dq, dk, dv
    axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
    return out, logs, dq, dk, dv, dbias.sum(axes, keepdims=True)


def with_gradients(function, operands, dout, dlogs=None):
    """Results (the result and the logarithms) and gradients of a function, in one program; without
    ``dlogs`` the logarithms have no cotangent."""

    @jax.jit
    def run(*operands):
        if dlogs is None:
            out, pull, logs = jax.vjp(function, *operands, has_aux=True)
            return out, logs, *pull(dout.astype(out.dtype))
        (out, logs), pull = jax.vjp(function, *operands)
        return out, logs, *pull((dout.astype(out.dtype), dlogs))

    return run(*operands)
