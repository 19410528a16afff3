"""MultiHeadAttention: flash attention between projections that run on cuDNN, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType

from .. import ops
from .._core.errors import GraphError
from .._core.graph.options import Options
from .layer import Layer, Operands, replacement, unknown
from .linear import LinearGeneral, dense
from .paged_cache import PagedCache, check_page_size
from .rope import check_rope, check_self_attention, next_positions

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
        rope: rotates queries and keys after the projections and norms, before the cache:
            ``jax_cudnn.ops.rotary_embedding``, a ``functools.partial`` of it with its options, or
            another function of (..., T, N, H) and positions, (T,) or (..., T). Positions count from
            0, or from the tokens that the cache holds; ``input_positions`` of a call, (..., T),
            replaces them.
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

    - nothing else reads them: normalize_qk, rope, dropout, a mask, a cache, ``nnx.capture``;
    - there are at least as many tokens as features, explicit axes do not shard tokens, and they
      shard the kernels alike; and
    - there are as many key heads as query heads, or every device is known to hold whole kernels:
      JAX has one device, or the kernels' sharding (for traced kernels, the types under an explicit
      mesh) says so.

    Raises:
        GraphError: ``local_window_size`` or ``rope`` where attention falls back to Flax (a custom
            ``attention_fn``, a precision that cuDNN does not support, an ``attention_fn`` that
            rotates with ``decode`` or ``input_positions``); ``rope`` with such an
            ``attention_fn``, or with keys of other inputs than the queries; ``page_size`` below 1,
            or with an ``attention_fn`` other than Flax's default or
            ``jax_cudnn.ops.attention_fn``; a mask or dropout with pages; more tokens in one call
            than the cache has room for.

    Source: ``flax.nnx.MultiHeadAttention``; Vaswani et al. 2017, arXiv:1706.03762.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> layer = jnn.MultiHeadAttention(4, 32, is_causal=True, decode=False, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 16, 32))).shape
        (2, 16, 32)
    """

    own: ClassVar = {
        "is_causal": False,
        "local_window_size": None,
        "page_size": None,
        "rope": None,
    }
    is_causal: bool
    local_window_size: int | tuple[int, int] | None
    page_size: int | None
    rope: Callable[[jax.Array, Any], jax.Array] | None
    paged_cache: PagedCache | None = None
    query_ln: Any
    key_ln: Any

    def _keep(self, own: Any) -> None:
        super()._keep(own)
        for name, inner in vars(self).items():
            ours = replacement(inner)
            vars(self)[name] = inner if ours is None or ours.kept else ours
        check_rope(self.rope)
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
        deterministic: bool | None = None,
        rngs: Any = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool | None = None,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        **others: Any,
    ) -> jax.Array:
        """Attends; the arguments are those of ``nnx.MultiHeadAttention``."""
        is_causal = self.is_causal if is_causal is None else is_causal
        decode = self.decode if decode is None else decode
        deterministic = self.deterministic if deterministic is None else deterministic
        if rngs is None:
            rngs = self.rngs
        elif isinstance(rngs, nnx.Rngs):
            rngs = rngs.dropout
        drops = self.dropout_rate > 0 and not deterministic
        others = {name: value for name, value in others.items() if value is not None}
        positions = None if self.rope is None else others.pop("input_positions", None)
        attention: Any = self._attention()
        why = self._flaxs_reason(attention, decode, others)
        rejected = (  # by Flax
            (inputs_k is None and inputs_v is not None)
            or inputs_q.shape[-1] != self.in_features
            or decode is None
            or (decode and self.paged_cache is None and self.cached_key is None)
            or (drops and any(setting is None for setting in (deterministic, rngs)))
        )
        if why or rejected:
            self._check_flax_can(why)
            return super().__call__(
                inputs_q, inputs_k, inputs_v, mask=mask, deterministic=deterministic, rngs=rngs,
                sow_weights=sow_weights, decode=decode, is_causal=is_causal,
                out_sharding=out_sharding, qkv_sharding=qkv_sharding, **others,
            )  # fmt: skip
        inputs_k = inputs_q if inputs_k is None else inputs_k
        if self.rope is not None:
            check_self_attention(inputs_q, inputs_k)
        inputs_v = inputs_k if inputs_v is None else inputs_v
        named: dict[str, Any] = {"is_causal": is_causal, "precision": self.precision}
        if self.local_window_size is not None:
            named["local_window_size"] = self.local_window_size

        alone = mask is None and not (decode or sow_weights or drops) and qkv_sharding is None
        alone = alone and inputs_q is inputs_k is inputs_v and attention is ops.attention_fn
        alone = alone and self.rope is None
        if alone and (qkv := self._joint(inputs_q)) is not None:
            batch, options = inputs_q.shape[:-2], Options(precision=named.pop("precision"))
            qkv = qkv.reshape(-1, *qkv.shape[len(batch) :])
            x = ops.dot_product_attention_qkv(qkv, self.num_heads, options=options, **named)
            return self.out(x.reshape(*batch, *x.shape[1:]), out_sharding=out_sharding)

        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.normalize_qk:
            query, key = self.query_ln(query), self.key_ln(key)
        if self.rope is not None:
            if positions is None and decode:
                positions = next_positions(self, query.shape)
            query, key = self.rope(query, positions), self.rope(key, positions)
        named |= {
            "mask": mask,
            "dropout_rng": rngs() if drops else None,
            "dropout_rate": self.dropout_rate,
            "broadcast_dropout": self.broadcast_dropout,
            "deterministic": not drops,
            "dtype": self.dtype,
            "module": self if sow_weights else None,
        }
        if decode and self.paged_cache is not None:
            attention = partial(self._paged, attention)
        elif decode:
            key, value, filled = self._cached(key, value)
            named |= filled
        x = attention(query, key, value, **named)
        return self.out(x, out_sharding=out_sharding)

    def init_cache(self, input_shape: Any, dtype: Any = jnp.float32) -> None:
        """Makes the cache for inputs of this shape, in pages if ``page_size`` is set."""
        if self.page_size is None:
            return super().init_cache(input_shape, dtype)
        self._check_pages()
        *batch, length, _ = input_shape
        sizes = math.prod(batch), length, self.num_kv_heads, self.head_dim
        self.paged_cache = PagedCache(*sizes, page_size=self.page_size, dtype=dtype)
        return None

    def _attention(self) -> Callable[..., jax.Array] | None:
        """The attention function that runs on cuDNN, or None for a custom one."""
        function = self.attention_fn
        whole = function if isinstance(function, partial) else partial(function)
        if whole.func is ops.attention_fn:
            return function
        if function is nnx.dot_product_attention:
            return ops.attention_fn
        if whole.func is _ROPE is not None and {*whole.keywords} == {"rope"} and not whole.args:
            return partial(_attention_with_rope, **whole.keywords)
        return None

    def _flaxs_reason(self, attention: Any, decode: bool | None, others: Any) -> str | None:
        """Why this call falls back to Flax's implementation, or None."""
        rotates = getattr(attention, "func", None) is _attention_with_rope
        if rotates and self.rope is not None:
            return "its attention_fn rotates, too"
        if rotates and (decode or "input_positions" in others):
            return "rotary embeddings with decode or input_positions fall back to Flax"
        if others:
            return f"{', '.join(others)}: Flax's arguments, which cuDNN's attention does not have"
        return self.unfused

    def _check_flax_can(self, why: str | None) -> None:
        windowed = self.local_window_size is not None
        if why is not None and (windowed or self.rope is not None):
            name = "local_window_size" if windowed else "rope"
            raise GraphError(
                f"this attention falls back to Flax, which has no {name}",
                expected=f"{name}=None",
                got=f"{name}={getattr(self, name)!r}",
                why=why,
                fix=f"{'pass the window as a mask' if windowed else 'rotate elsewhere'}, or remove "
                "the cause",
            )

    def _check_pages(self) -> None:
        if self.page_size is None:
            return
        check_page_size(self.page_size)
        plain = self._attention() is ops.attention_fn
        if why := self.unfused or (None if plain else "its attention_fn rotates, or has arguments"):
            raise GraphError(
                "this attention cannot read pages, but page_size is set",
                expected="nnx.dot_product_attention or jax_cudnn.ops.attention_fn as attention_fn",
                got=f"page_size={self.page_size}",
                why=why,
                fix="leave out page_size: the cache is then one array",
            )

    def _cached(self: Any, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Writes new keys and values to the cache. Returns all of the cache, and the arguments for
        attention to its filled part, in which each token attends to those before it."""
        keys, values, index = self.cached_key, self.cached_value, self.cache_index
        *batch, most, heads, size = keys.shape
        count = key.shape[-3]
        if key.shape != (*batch, count, heads, size) or count > most:
            raise GraphError(
                "Autoregressive cache shape error",
                expected=f"keys {[*batch, 1, heads, size]}, or up to {most} tokens",
                got=str(list(key.shape)),
                fix="call init_cache with the shape of the inputs",
            )
        first = index[...]
        zero = jnp.zeros_like(first)
        at = (*(zero for _ in batch), first, zero, zero)
        for cache, new in ((keys, key), (values, value)):
            cache[...] = lax.dynamic_update_slice(cache[...], new.astype(cache.dtype), at)
        index[...] = first + count
        filled = {
            "key_value_seq_lengths": jnp.broadcast_to(first + count, math.prod(batch)),
            "is_causal": count > 1,
            "bottom_right": count > 1 or self.local_window_size is not None,
        }
        return keys[...], values[...], filled

    def _paged(self: Any, attention: Any, *operands: jax.Array, **named: Any) -> jax.Array:
        """Writes new keys and values to the pages, and attends to them."""
        given = {
            "mask": named["mask"] is not None,
            "dropout": not named["deterministic"],
            "sow_weights": named["module"] is not None,
            "attention_fn": attention is not ops.attention_fn,
        }
        if any(given.values()):
            raise GraphError(
                "attention to a paged cache does not support these",
                expected="no arguments but lengths, is_causal and local_window_size",
                got=", ".join(name for name in given if given[name]),
                fix="leave out page_size: the cache is then one array",
            )
        four = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in operands)
        options = Options(precision=self.precision)
        out = self.paged_cache(*four, local_window_size=self.local_window_size, options=options)
        return out.reshape(operands[0].shape)

    def _joint(self, x: jax.Array) -> jax.Array | None:
        """The projections of x in one product, (..., T, 3, H, D), or (..., T, N + 2 K, D) with
        grouped heads: attention reads its parts in place. None if other code reads a projection,
        if it is not one product in 16 bits, if tokens are too few, or if parts would move."""
        one, *others = layers = self.query, self.key, self.value
        if self.normalize_qk or not 0 <= self.dropout_rate < 1 or hasattr(self, "__captures__"):
            return None  # Flax rejects other rates; nnx.capture may read each projection
        if x.ndim < 3 or not all(map(_plain, layers)):
            return None
        settings = ("dtype", "precision", "in_features")
        same = [getattr(a, name) == getattr(one, name) for a in others for name in settings]
        same += [a.kernel.shape[::2] == one.kernel.shape[::2] for a in others]
        same += [(a.bias is None) == (one.bias is None) for a in others]
        given = [layer.kernel[...] for layer in layers]
        given += [jnp.reshape(p.bias[...], p.out_features) for p in layers if p.bias is not None]
        types = [jax.typeof(w).sharding for w in given]  # which jnp.stack wants to be equal
        same += [types[i] == types[i // 3 * 3] for i in range(len(types))]
        same += [jax.typeof(x).sharding.spec[-2] is None]  # attention of all three has no parts
        few = isinstance(x.size, int) and x.size < x.shape[-1] ** 2
        grouped = any(a.kernel.shape != one.kernel.shape for a in others)
        if few or not all(same) or (grouped and not all(map(_whole, given))):
            return None
        x, *given = promote_dtype((x, *given), dtype=one.dtype)
        if x.dtype.name not in ("bfloat16", "float16"):
            return None
        joined = partial(jnp.concatenate, axis=-2) if grouped else partial(jnp.stack, axis=-3)
        bias = joined(given[3:]) if given[3:] else None
        separate = bias is not None and not any(jax.typeof(bias).sharding.spec)
        fixed = lax.stop_gradient(bias) if separate else bias
        operands = Operands(x, joined(given[:3]), fixed, x.dtype.name)
        y = dense(operands, (((x.ndim - 1,), (0,)), ((), ())), one.precision, None)
        return _with_bias(y, bias) if separate else y


@jax.custom_jvp
def _with_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """``y``, of which ``bias`` is a part already, with its gradient. On automatic axes XLA shards
    the gradients of one graph alike, but kernels and biases may be sharded differently."""
    return y


@_with_bias.defjvp
def _with_bias_jvp(primals: Any, tangents: Any) -> Any:
    y, bias = (x.astype("float32") for x in tangents)  # in which the gradients of rows add up
    moved = y + jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))
    return primals[0], moved.astype(primals[0].dtype)


def _attention_with_rope(
    query: jax.Array, key: jax.Array, value: jax.Array, *, rope: Any, **named: Any
) -> jax.Array:
    rotate = jax.vmap(rope, in_axes=-2, out_axes=-2)
    return ops.attention_fn(rotate(query), rotate(key), value, **named)


def _plain(layer: Any) -> bool:
    """Whether a projection is a plain product with a kernel (features, heads, size)."""
    if type(layer) is not LinearGeneral:
        return False
    one_axis = len(layer.in_features) == 1 and layer.axis == (-1,) and not layer.batch_axis
    untouched = layer.activation is None and layer.preferred_element_type is None
    untouched &= layer.promote_dtype is promote_dtype  # a custom one expects three arrays
    return one_axis and untouched and layer.unfused is None and len(layer.kernel.shape) == 3


def _whole(parameter: Any) -> bool:
    """Whether each device is known to hold the whole parameter: otherwise concatenating along the
    heads and splitting again would move parts between devices. A traced parameter does not say so
    without a mesh (``jax.jit(..., in_shardings=...)`` applies later) or with Auto axes."""
    if not isinstance(parameter, Tracer):
        return not isinstance(parameter, jax.Array) or parameter.sharding.is_fully_replicated
    sharding = jax.typeof(parameter).sharding
    mesh = sharding.mesh
    kinds = {kind for kind, n in zip(mesh.axis_types, mesh.axis_sizes, strict=True) if n > 1}
    if mesh.empty or AxisType.Auto in kinds:
        return jax.device_count() == 1
    return not any(sharding.spec)
