"""MultiHeadAttention: flash attention between projections that run on cuDNN, too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops
from .._core.errors import GraphError
from . import decoding, joint
from .layer import Layer, stand_in, unknown
from .paged_cache import PagedCache, check_page_size

_FLAXS = nnx.dot_product_attention
_ROPE = getattr(nnx, "dot_product_attention_with_rope", None)  # from Flax 0.12.9 on


class MultiHeadAttention(Layer, nnx.MultiHeadAttention):
    """``flax.nnx.MultiHeadAttention`` on cuDNN's flash attention.

    It projects the inputs to q, k and v, computes ``softmax(q k^T / sqrt(head_dim)) v`` for each
    head, and projects the result.

    Args:
        is_causal: each query attends to keys up to its own position, without a mask in memory. The
            argument of the same name of a call overrides it.
        local_window_size: as for ``jax_cudnn.ops.dot_product_attention``, or None.
        page_size: tokens per page of the cache for calls with ``decode=True``, a
            :class:`PagedCache` in ``paged_cache``; None for Flax's cache. ``init_cache`` makes
            either cache; ``nnx.view(layer, batch_size=..., max_length=...)`` makes none, as in
            Flax. Calls with ``decode=False`` neither read nor write pages.
        *args, **named: the arguments of ``nnx.MultiHeadAttention``.

    Shapes: inputs (*batch, length, in_features), result (*batch, length, out_features). Parameters
    are Flax's: those of the four projections and of the two norms of normalize_qk.

    With ``decode``, the cache has Flax's Variables (``cached_key``, ``cached_value``,
    ``cache_index``), and attention reads them up to a length instead of through a mask. Flax takes
    one token per call; this layer takes several, each of which attends to those before it. Tokens
    past the end of the cache overwrite its last ones, as in Flax: the caller must prevent this.
    Keys are cast to the cache's dtype. For a query whose mask hides every key, the result is the
    mean of the values in the cache; in Flax, the mean over the whole cache, including empty places.

    Attention falls back to Flax's implementation for a custom ``attention_fn`` (except
    ``nnx.dot_product_attention_with_rope`` without decoding), for sown weights, and for training
    with a ``dropout_rate`` and ``broadcast_dropout``. With ``broadcast_dropout=False`` cuDNN draws
    the dropout mask, which differs from Flax's.

    The projections are layers of this package in any case. Projections of the same inputs in 16
    bits are one matrix product, which attention reads in place, if

    - nothing else reads them: normalize_qk, dropout, a mask, a cache, ``nnx.capture``;
    - there are at least as many tokens as features; and
    - every device is known to hold whole kernels: JAX has one device, or the kernels' sharding
      (for traced kernels, the types under an explicit mesh) says so.

    Raises:
        GraphError: ``local_window_size`` where attention falls back to Flax (a custom
            ``attention_fn``, a precision that cuDNN does not support, rotary embeddings with
            ``decode`` or ``input_positions``); ``page_size`` below 1, or with an ``attention_fn``
            other than Flax's default or ``jax_cudnn.ops.attention_fn``; a mask or dropout with
            pages; more tokens in one call than the cache has room for.

    Source: ``flax.nnx.MultiHeadAttention``; Vaswani et al. 2017, arXiv:1706.03762.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.MultiHeadAttention(4, 32, is_causal=True, decode=False, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 16, 32))).shape
        (2, 16, 32)
    """

    own: ClassVar = {"is_causal": False, "local_window_size": None, "page_size": None}
    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    page_size: int | None
    paged_cache: PagedCache | None = None

    def _keep(self, own: Any) -> None:
        super()._keep(own)
        for name, inner in vars(self).items():
            vars(self)[name] = stand_in(inner)
        self._check_pages()

    @property
    def unfused(self) -> str | None:
        if self._attention() is None:
            return "it has a custom attention_fn"
        return unknown(None, self.precision)

    @property
    def kept(self) -> str | None:
        return self.unfused or unknown(self.dtype)

    @property
    def remark(self) -> str | None:
        if self.dropout_rate and self.broadcast_dropout:
            return "in training, dropout with broadcast_dropout=True falls back to Flax"
        return None

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> jax.Array:
        """Attends; the arguments are those of ``nnx.MultiHeadAttention``."""
        inputs = inputs_q, inputs_k, inputs_v
        is_causal = self.is_causal if is_causal is None else is_causal
        decode = self.decode if decode is None else decode
        attention: Any = self._attention()
        flaxs = self._flaxs_reason(attention, decode, others)
        if flaxs or decode is None or (decode and self._lacks_cache()):  # an error that Flax raises
            self._check_no_window(flaxs)
            named = {"mask": mask, "sow_weights": sow_weights, "decode": decode}
            return super().__call__(*inputs, is_causal=is_causal, **named, **others)
        named = {"mask": mask, "decode": False, "is_causal": is_causal, **others}
        alone = mask is None and not (decode or sow_weights) and attention is ops.attention_fn
        if alone and (projected := self._joint(*inputs, **others)) is not None:
            return self._of_joint(projected, is_causal)(*inputs, **named)
        if decode:
            cached = decoding.cached if self.paged_cache is None else decoding.paged
            attention, is_causal = functools.partial(cached, self, attention), False
        if sow_weights:
            attention = functools.partial(_sown, attention, self)
        if self.local_window_size is not None:
            attention = functools.partial(attention, local_window_size=self.local_window_size)
        return self._with(attention_fn=attention)(*inputs, **{**named, "is_causal": is_causal})

    def init_cache(self, input_shape: Any, dtype: Any = jnp.float32) -> None:
        """Makes the cache for inputs of this shape, in pages if ``page_size`` is set."""
        if self.page_size is None:
            return super().init_cache(input_shape, dtype)
        self._check_pages()
        *batch, length, _ = input_shape
        self.paged_cache = PagedCache(
            math.prod(batch),
            length,
            self.num_kv_heads,
            self.head_dim,
            page_size=self.page_size,
            dtype=dtype,
        )
        return None

    def _attention(self) -> Callable[..., jax.Array] | None:
        """The attention function that runs on cuDNN, or None for a custom one."""
        function = self.attention_fn
        whole = function if isinstance(function, functools.partial) else functools.partial(function)
        if whole.func is ops.attention_fn:
            return function
        if function is _FLAXS:
            return ops.attention_fn
        if whole.func is _ROPE is not None and {*whole.keywords} == {"rope"} and not whole.args:
            return functools.partial(_attention_with_rope, **whole.keywords)
        return None

    def _flaxs_reason(self, attention: Any, decode: bool | None, others: Any) -> str | None:
        """Why this call falls back to Flax's implementation, or None."""
        rotates = getattr(attention, "func", None) is _attention_with_rope
        if rotates and (decode or others.get("input_positions") is not None):
            return "rotary embeddings with decode or input_positions fall back to Flax"
        return self.unfused

    def _lacks_cache(self) -> bool:
        return self.paged_cache is None and self.cached_key is None

    def _check_no_window(self, why: str | None) -> None:
        if why is not None and self.local_window_size is not None:
            raise GraphError(
                "this attention falls back to Flax, which has no local_window_size",
                expected="local_window_size=None",
                got=f"local_window_size={self.local_window_size!r}",
                why=why,
                fix="pass the window as a mask, or remove the cause",
            )

    def _check_pages(self) -> None:
        if self.page_size is None:
            return
        check_page_size(self.page_size)
        plain = self._attention() is ops.attention_fn
        if why := self.unfused or (None if plain else "its attention_fn also rotates"):
            raise GraphError(
                "this attention cannot read pages, but page_size is set",
                expected="nnx.dot_product_attention or jax_cudnn.ops.attention_fn as attention_fn",
                got=f"page_size={self.page_size}",
                why=why,
                fix="leave out page_size: the cache is then one array",
            )

    def _with(self, **attributes: Any) -> Any:
        """Flax's layer with the attributes of this one, except the given ones."""
        layer = object.__new__(self.flaxs())
        vars(layer).update(vars(self), **attributes)
        return layer

    def _joint(
        self,
        query: jax.Array,
        key: Any,
        value: Any,
        *,
        deterministic: bool | None = None,
        qkv_sharding: Any = None,
        input_positions: Any = None,
        **_: Any,
    ) -> jax.Array | None:
        """The three projections of the same inputs, if only attention reads them; else None."""
        itself = all(x is None or x is query for x in (key, value))
        still = self.deterministic if deterministic is None else deterministic
        rate = self.dropout_rate
        drops = rate != 0 and not (still and 0 < rate < 1)  # Flax rejects other rates
        behind = self.normalize_qk or drops
        if not itself or behind or qkv_sharding is not None or input_positions is not None:
            return None
        if hasattr(self, "__captures__"):  # nnx.capture may read each projection's result
            return None
        if query.shape[-1] != self.in_features or query.ndim < 3:
            return None
        return joint.projected((self.query, self.key, self.value), query)

    def _of_joint(self, projected: jax.Array, is_causal: bool) -> Any:
        """Flax's layer, with projections and attention that use one array."""

        def projection(x: jax.Array, out_sharding: Any = None) -> jax.Array:
            return projected

        def attention(
            query: Any, key: Any, value: Any, *, precision: Any = None, **_: Any
        ) -> jax.Array:
            assert query is key is value is projected, "Flax changes projections before attention"
            return joint.attention(
                query,
                self.num_heads,
                is_causal=is_causal,
                local_window_size=self.local_window_size,
                precision=precision,
            )

        return self._with(
            attention_fn=attention, query=projection, key=projection, value=projection
        )


def _sown(attention: Any, layer: nnx.Module, *operands: Any, **named: Any) -> jax.Array:
    """Attention with the layer as ``module``, so that it sows its weights there."""
    return attention(*operands, **{**named, "module": layer})


def _attention_with_rope(
    query: jax.Array, key: jax.Array, value: jax.Array, *, rope: Any, **named: Any
) -> jax.Array:
    rotate = jax.vmap(rope, in_axes=-2, out_axes=-2)
    return ops.attention_fn(rotate(query), rotate(key), value, **named)
