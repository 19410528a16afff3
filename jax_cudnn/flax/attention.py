"""MultiHeadAttention: flash attention between projections that are layers here, too."""

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

    ``softmax(q k^T / sqrt(head_dim)) v`` for each head, where q, k and v are projections of the
    inputs, and a projection of the result.

    Args: those of ``nnx.MultiHeadAttention``, and
        is_causal: a query sees keys up to its own position, without a mask in memory. The argument
            of the call, True or False, says it for one call.
        local_window_size: what ``jax_cudnn.ops.dot_product_attention`` takes, or None.
        page_size: for calls with ``decode=True``: keys and values lie in pages of so many tokens
            (``paged_cache``, a :class:`PagedCache`), or None. ``init_cache`` makes them, and a
            cache of any kind; ``nnx.view(layer, batch_size=..., max_length=...)`` makes none, of
            Flax's layer neither. Calls with ``decode=False`` neither read nor write pages.

    Shapes: inputs (*batch, length, in_features), the result (*batch, length, out_features);
    parameters as in Flax, those of the four projections and of normalize_qk's two norms.

    With ``decode`` the cache has Flax's Variables (``cached_key``, ``cached_value``,
    ``cache_index``), and attention reads them up to a length instead of through a mask. Where Flax
    takes one token, several may come: each sees those before it. Tokens behind the end of the cache
    overwrite its last ones, as in Flax: to be kept from happening by the caller. Keys are cast to
    the cache's dtype. Where a mask hides every key, the result is the mean of the values in the
    cache, while Flax's is the mean over the whole cache, empty places too.

    Flax's own way computes attention with an ``attention_fn`` of one's own (but for
    ``nnx.dot_product_attention_with_rope``, where nothing is decoded), where weights are sown, and
    where ``dropout_rate`` is not 0 and ``broadcast_dropout`` is, in training: give
    ``broadcast_dropout=False``, and cuDNN draws the mask, which is another than Flax's.

    Projections are layers of this package in any case. Of the same inputs in 16 bits they are one
    product, which attention reads where it lies, if nothing else reads them (normalize_qk, dropout,
    a mask, a cache, ``nnx.capture``), if there are at least as many tokens as features, and if all
    devices are known to have whole kernels: JAX has one device, or the types of traced kernels
    (with an explicit mesh) say so, or the kernels themselves (not traced).

    Raises:
        GraphError: ``local_window_size`` where Flax's own way computes attention (an
            ``attention_fn`` of one's own, a precision that cuDNN does not have, rotary embeddings
            beside ``decode`` or ``input_positions``); ``page_size`` below 1, or with another
            ``attention_fn`` than Flax's default or ``jax_cudnn.ops.attention_fn``; a mask or
            dropout beside pages; more tokens at once than a cache has room for.

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
            return "it has an attention_fn of its own"
        return unknown(None, self.precision)

    @property
    def kept(self) -> str | None:
        return self.unfused or unknown(self.dtype)

    @property
    def remark(self) -> str | None:
        if self.dropout_rate and self.broadcast_dropout:
            return "in training Flax computes its dropout, which examples and heads share"
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
        """``nnx.MultiHeadAttention``'s, with its arguments."""
        inputs = inputs_q, inputs_k, inputs_v
        is_causal = self.is_causal if is_causal is None else is_causal
        decode = self.decode if decode is None else decode
        attention: Any = self._attention()
        flaxs = self._flaxs_reason(attention, decode, others)
        if flaxs or decode is None or (decode and self._lacks_cache()):  # which Flax says
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
        """``nnx.MultiHeadAttention``'s; with a page_size, ``paged_cache`` for as many tokens."""
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
        """The function that attends on cuDNN, or None where it is the user's."""
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
        """Why Flax's own way computes this call, or None."""
        rotates = getattr(attention, "func", None) is _attention_with_rope
        if rotates and (decode or others.get("input_positions") is not None):
            return "rotary embeddings beside decode or input_positions are Flax's"
        return self.unfused

    def _lacks_cache(self) -> bool:
        return self.paged_cache is None and self.cached_key is None

    def _check_no_window(self, why: str | None) -> None:
        if why is not None and self.local_window_size is not None:
            raise GraphError(
                "Flax's own way computes this attention, and has no local_window_size",
                expected="local_window_size=None",
                got=f"local_window_size={self.local_window_size!r}",
                why=why,
                fix="give the window as a mask, or leave out what makes it Flax's",
            )

    def _check_pages(self) -> None:
        if self.page_size is None:
            return
        check_page_size(self.page_size)
        plain = self._attention() is ops.attention_fn
        if why := self.unfused or (None if plain else "its attention_fn does more than attend"):
            raise GraphError(
                "page_size where attention does not read pages",
                expected="nnx.dot_product_attention or jax_cudnn.ops.attention_fn as attention_fn",
                got=f"page_size={self.page_size}",
                why=why,
                fix="leave page_size out: the cache is then one array",
            )

    def _with(self, **attributes: Any) -> Any:
        """Flax's layer with all that this one has, and other attributes."""
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
        """The three projections of the same inputs, where nothing but attention reads them."""
        itself = all(x is None or x is query for x in (key, value))
        still = self.deterministic if deterministic is None else deterministic
        rate = self.dropout_rate
        drops = rate != 0 and not (still and 0 < rate < 1)  # Flax refuses other rates
        behind = self.normalize_qk or drops
        if not itself or behind or qkv_sharding is not None or input_positions is not None:
            return None
        if hasattr(self, "__captures__"):  # nnx.capture may read each projection's result
            return None
        if query.shape[-1] != self.in_features or query.ndim < 3:
            return None
        return joint.projected((self.query, self.key, self.value), query)

    def _of_joint(self, projected: jax.Array, is_causal: bool) -> Any:
        """Flax's layer whose projections and attention are of one array."""

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
    """Attention whose weights the layer gets: Flax's names itself, or none."""
    return attention(*operands, **{**named, "module": layer})


def _attention_with_rope(
    query: jax.Array, key: jax.Array, value: jax.Array, *, rope: Any, **named: Any
) -> jax.Array:
    rotate = jax.vmap(rope, in_axes=-2, out_axes=-2)
    return ops.attention_fn(rotate(query), rotate(key), value, **named)
