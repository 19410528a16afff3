"""Attention in plain JAX, in the ways in which users write it.

Arrays are (B, S, N, H); keys and values have K heads, each of which serves N / K neighbouring heads
of queries. ``lengths`` is (B,) in int32: rows behind an example's length are not seen, nor wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
F32 = jnp.float32
_BLOCK = 1024
_dot = functools.partial(jnp.einsum, preferred_element_type=F32)


@dataclass(frozen=True)
class Attended:
    """Which keys a query sees, and what becomes of their scores.

    Attributes:
        causal: those up to its own position.
        window: only the last so many of them, its own with them.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def seen(self, i: Array, j: Array, lengths: Array | None) -> Array:
        """Of positions of queries and of keys: (B or 1, 1, 1, S, T)."""
        i, j = i[:, None], j[None, :]
        found = jnp.broadcast_to(j <= i if self.causal else True, (1, 1, 1, i.size, j.size))
        if self.window is not None:
            found &= j > i - self.window
        return found if lengths is None else found & (j < lengths.reshape(-1, 1, 1, 1, 1))

    def blocks(self, size: int, block: int) -> np.ndarray:
        """Pairs of blocks of queries and of keys, of which some see each other: (pairs, 2)."""
        count = size // block
        reach = count if self.window is None else -(-(self.window - 1) // block)
        return np.array(
            [
                (i, j)
                for i in range(count)
                for j in range(count)
                if (not self.causal or j <= i) and i - j <= reach
            ]
        )

    def pairs(self, size: int) -> float:
        """How many pairs of a query and a key are computed: half of all where it is causal, as the
        field counts."""
        if self.window is not None and self.window < size:
            return size * self.window - self.window**2 / 2
        return size * size / (2 if self.causal else 1)


def in_jax_nn(of: Attended, implementation: Any) -> Callable[..., dict[str, Array]]:
    """By ``jax.nn.dot_product_attention``."""
    assert of.softcap is None

    def function(q, k, v, bias=None, lengths=None):
        y = jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias,
            is_causal=of.causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            local_window_size=None if of.window is None else (of.window - 1, 0),
            implementation=implementation,
        )
        return {"y": y}

    return function


def plain(of: Attended) -> Callable[..., dict[str, Array]]:
    """All scores in memory; the softmax in float32."""

    def function(q, k, v, bias=None, lengths=None):
        grouped, k, v = _heads_first(q, k.shape[2]), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        scores = q.shape[-1] ** -0.5 * _dot("bngsd,bntd->bngst", grouped, k)
        if of.softcap is not None:
            scores = of.softcap * jnp.tanh(scores / of.softcap)
        if bias is not None:
            scores = scores + bias.reshape(bias.shape[0], *scores.shape[1:])
        seen = of.seen(jnp.arange(q.shape[1]), jnp.arange(k.shape[2]), lengths)
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(v.dtype)
        y = _dot("bngst,bntd->bngsd", weights, v)
        return {"y": _tokens_first(y).astype(q.dtype)}

    return function


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is kept but the operands."""

    def again(**operands):
        # Without a barrier against common subexpressions: forward and backward are two programs.
        return jax.checkpoint(lambda o: function(**o), prevent_cse=False)(operands)

    return again


def by_blocks(
    of: Attended, precision: Any = None, block: int | None = None
) -> Callable[..., dict[str, Array]]:
    """As flash attention: blocks of queries and of keys, those alone that see each other, with a
    running softmax; the backward computes the scores again. In float32 and with the highest
    precision it is what all sides are held against.
    """

    @jax.custom_vjp
    def attend(q, k, v, bias, lengths):
        return forward(q, k, v, bias, lengths)[0]

    def forward(q, k, v, bias, lengths):
        of_blocks = _Blocks(of, q, k, v, bias, lengths, precision, block)
        y, total = of_blocks.forward()
        y = _tokens_first(y).astype(q.dtype)
        return y, (q, k, v, bias, lengths, y, total)

    def backward(kept, dy):
        q, k, v, bias, lengths, y, total = kept
        of_blocks = _Blocks(of, q, k, v, bias, lengths, precision, block)
        dq, dk, dv, dbias = of_blocks.backward(y, total, dy)
        return (
            _tokens_first(dq).astype(q.dtype),
            jnp.swapaxes(dk, 1, 2).astype(k.dtype),
            jnp.swapaxes(dv, 1, 2).astype(v.dtype),
            None if bias is None else dbias.reshape(bias.shape).astype(bias.dtype),
            None,
        )

    attend.defvjp(forward, backward)

    def function(q, k, v, bias=None, lengths=None):
        return {"y": attend(q, k, v, bias, lengths)}

    return function


class _Blocks:
    """One attention's arrays, (B, K, N / K, S, H) and (B, K, T, H), and its loops over blocks."""

    def __init__(self, of, q, k, v, bias, lengths, precision, block) -> None:
        self.of, self.lengths, self.precision = of, lengths, precision
        self.q, self.k, self.v = (
            _heads_first(q, k.shape[2]),
            jnp.swapaxes(k, 1, 2),
            jnp.swapaxes(v, 1, 2),
        )
        size = q.shape[1]
        self.block = block or min(_BLOCK, max(size // 2, 1))
        self.scale = q.shape[-1] ** -0.5
        self.bias = None if bias is None else bias.reshape(-1, *self.q.shape[1:4], k.shape[1])
        self.pairs = jnp.asarray(of.blocks(size, self.block), jnp.int32)

    def forward(self) -> tuple[Array, Array]:
        """The result in float32, and the logarithm of each row's sum of exponentials."""
        rows = (*self.q.shape[:4], 1)
        start = (
            jnp.zeros(self.q.shape, F32),
            jnp.full(rows, -jnp.inf, F32),
            jnp.zeros(rows, F32),
        )

        def step(carry, pair):
            i, j = pair
            out, largest, total = (self._cut(x, i) for x in carry)
            scores, _ = self._scores(i, j)
            new = jnp.maximum(largest, jnp.max(scores, -1, keepdims=True))
            base = jnp.where(jnp.isneginf(new), 0, new)
            weights, old = jnp.exp(scores - base), jnp.exp(largest - base)
            total = old * total + jnp.sum(weights, -1, keepdims=True)
            out = old * out + self._dot("bngst,bntd->bngsd", weights, self._cut(self.v, j))
            parts = (out, new, total)
            return tuple(self._put(x, p, i) for x, p in zip(carry, parts, strict=True)), None

        (out, largest, total), _ = jax.lax.scan(step, start, self.pairs)
        some = jnp.where(total > 0, total, 1)
        return out / some, jnp.where(total > 0, largest + jnp.log(some), jnp.inf)

    def backward(self, y: Array, total: Array, dy: Array) -> tuple[Array, ...]:
        """The gradients by q, k, v and the bias, in float32."""
        mean = jnp.sum(dy.astype(F32) * y.astype(F32), -1, keepdims=True)
        mean, dy = (_heads_first(x, self.k.shape[1]) for x in (mean, dy))
        start = [jnp.zeros(x.shape, F32) for x in (self.q, self.k, self.v)]
        start.append(jnp.zeros(() if self.bias is None else self.bias.shape, F32))

        def step(carry, pair):
            i, j = pair
            dq, dk, dv, dbias = carry
            scores, slope = self._scores(i, j)
            weights = jnp.exp(scores - self._cut(total, i))
            along = self._cut(dy, i)
            through = self._dot("bngsd,bntd->bngst", along, self._cut(self.v, j))
            grad = weights * (through - self._cut(mean, i))
            if self.bias is not None:
                at = (0, 0, 0, i * self.block, j * self.block)
                summed = jnp.sum(grad, 0, keepdims=True) if self.bias.shape[0] == 1 else grad
                dbias = jax.lax.dynamic_update_slice(dbias, summed, at)
            grad = self.scale * (grad if slope is None else grad * slope)
            grad = grad.astype(self.q.dtype)
            dq = self._add(dq, self._dot("bngst,bntd->bngsd", grad, self._cut(self.k, j)), i)
            dk = self._add(dk, self._dot("bngst,bngsd->bntd", grad, self._cut(self.q, i)), j)
            dv = self._add(dv, self._dot("bngst,bngsd->bntd", weights, along), j)
            return (dq, dk, dv, dbias), None

        return jax.lax.scan(step, tuple(start), self.pairs)[0]

    def _scores(self, i: Array, j: Array) -> tuple[Array, Array | None]:
        """Of a pair of blocks, -inf where a key is not seen; and their slope by the product."""
        scores = self._dot("bngsd,bntd->bngst", self._cut(self.q, i), self._cut(self.k, j))
        scores, slope = self.scale * scores, None
        if self.of.softcap is not None:
            bent = jnp.tanh(scores / self.of.softcap)
            scores, slope = self.of.softcap * bent, 1 - bent * bent
        if self.bias is not None:
            at = (0, 0, 0, i * self.block, j * self.block)
            size = (*self.bias.shape[:3], self.block, self.block)
            scores = scores + jax.lax.dynamic_slice(self.bias, at, size)
        here = jnp.arange(self.block)
        seen = self.of.seen(i * self.block + here, j * self.block + here, self.lengths)
        return jnp.where(seen, scores, -jnp.inf), slope

    def _cut(self, x: Array, block: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, block * self.block, self.block, -2)

    def _put(self, x: Array, part: Array, block: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, block * self.block, -2)

    def _add(self, x: Array, part: Array, block: Array) -> Array:
        return self._put(x, self._cut(x, block) + part, block)

    def _dot(self, equation: str, a: Array, b: Array) -> Array:
        return _dot(equation, a.astype(b.dtype), b, precision=self.precision)


def _heads_first(x: Array, heads: int) -> Array:
    """(B, S, N, H) as (B, K, N / K, S, H)."""
    b, s, _, h = x.shape
    return jnp.moveaxis(x.reshape(b, s, heads, -1, h), 1, 3)


def _tokens_first(x: Array) -> Array:
    return jnp.moveaxis(x, 3, 1).reshape(x.shape[0], x.shape[3], -1, x.shape[4])


# -- a cache in pages ------------------------------------------------------------------------------


def gathered(q, key_pages, value_pages, page_table, lengths):
    """Keys and values out of their pages, (B, T, K, H)."""
    return {
        "q": q,
        "k": _from_pages(key_pages, page_table),
        "v": _from_pages(value_pages, page_table),
        "lengths": lengths,
    }


def in_pages(q, key_pages, value_pages, page_table, lengths):
    """One query an example, against keys and values in the order of pages."""
    b, _, _, h = q.shape
    heads, size = key_pages.shape[1:3]
    keys, values = key_pages[page_table], value_pages[page_table]  # (B, pages, K, P, H)
    grouped = q.reshape(b, heads, -1, h)
    scores = h**-0.5 * _dot("bngd,bmnpd->bngmp", grouped, keys)
    at = jnp.arange(page_table.shape[1])[:, None] * size + jnp.arange(size)
    scores = jnp.where(at < lengths.reshape(-1, 1, 1, 1, 1), scores, -1e30)
    weights = jax.nn.softmax(scores, (-2, -1)).astype(values.dtype)
    y = _dot("bngmp,bmnpd->bngd", weights, values)
    return {"y": y.reshape(q.shape).astype(q.dtype)}


def _from_pages(pages: Array, table: Array) -> Array:
    found = jnp.swapaxes(pages[table], 2, 3)  # (B, pages, P, K, H)
    return found.reshape(table.shape[0], -1, *found.shape[3:])
