"""The cross-entropy of a linear layer, without its logits in memory."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._core.errors import GraphError, GraphTypeError, one_of, shown
from .._core.graph.dtypes import FLOATS
from .._core.primitive import align_varying, dims_of, without_explicit_axes
from .arguments import floating, int32, integer, integral, number, preferred_dtype, promoted

BLOCK = 2**27
"""Logits that are held at once by default: in bfloat16 256 MiB, enough for full speed."""
_ROWS = 128
"""Tokens of a block are a multiple of this: products are slow with odd sizes."""
_EXACT = 64.0
"""Float32 holds the exponentials of all logits that matter if their sum's logarithm is below it."""
_UP = 2.0**10
"""In float16, derivatives by logits are multiplied by it for the products: many would be 0."""


class _Loss(NamedTuple):
    """What the loss of a token is, and how many tokens a block has; None: all."""

    softcap: float | None
    smoothing: float
    z_loss: float
    element_type: Any
    wide: Any  # of sums, losses and gradients of the weight
    precision: Any
    block: int | None
    devices: int


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    block_size: int | None = None,
    preferred_element_type: Any = None,
    precision: Any = None,
) -> jax.Array:
    r"""Softmax cross-entropy of the logits ``hidden @ weight + bias``, in blocks of tokens.

    With the logits :math:`l` of a token with label :math:`y`, after
    :math:`l \leftarrow c \tanh(l / c)` for a ``softcap`` of :math:`c`, its loss is

    .. math:: \operatorname{lse}(l) - (1 - a)\, l_y - \frac{a}{V} \sum_v l_v
        + z \operatorname{lse}(l)^2

    with :math:`\operatorname{lse}(l) = \log \sum_v e^{l_v}`, the label smoothing :math:`a` and the
    ``z_loss`` :math:`z`. This equals ``optax.softmax_cross_entropy_with_integer_labels`` of the
    logits, but only the logits of one block are ever in memory. With ``"mean"`` and ``"sum"``,
    gradients are computed together with the loss, in three products; with ``"none"`` the logits
    are computed again for them. Tokens may be sharded, and so may the vocabulary. The blocks run
    in XLA on all devices.

    Args:
        hidden: (..., D) floats, what the last layer reads.
        weight: (D, V) floats. For an embedding that is also the last layer pass ``embedding.T``:
            it is not copied.
        labels: (...) integers in [0, V). The loss of another label is NaN, also of a negative one,
            which optax counts from the end.
        bias: (V,) floats.
        softcap: the bound of the logits, positive.
        label_smoothing: in [0, 1).
        z_loss: the factor of the squared logarithm of the normalizer, at least 0.
        ignore_index: tokens with this label have the loss 0 and no gradient.
        reduction: ``"mean"`` over the tokens that are not ignored (0 if there are none),
            ``"sum"``, or ``"none"`` for the loss of each token.
        block_size: the most tokens of a block; by default as many as have 2**27 logits for each
            device of the mesh that the operands' types name (set one by ``jax.set_mesh`` if only
            ``in_shardings`` say it). Pass fewer where some of its axes shard neither tokens nor
            vocabulary. Programs with symbolic sizes, for ``jax.export``, have one block.
        preferred_element_type: the dtype in which the product returns logits; by default that of
            the operands. float32 rounds less, and takes twice the memory and more time.
        precision: as in ``jnp.matmul``.

    Returns:
        In float32 (float64 for operands of float64): a scalar, or (...) for ``"none"``.

    Raises:
        GraphTypeError: an operand is not an array of floats, or labels are not integers.
        GraphError: shapes do not fit, V is 0, or an option is out of range.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> hidden, weight = jnp.ones((2, 3, 8)), jnp.zeros((8, 16))
        >>> loss = jc.ops.linear_cross_entropy(hidden, weight, jnp.zeros((2, 3), int))
        >>> print(f"{loss:.4f}")
        2.7726
    """
    hidden, weight = promoted(hidden, weight, ("hidden", "weight"))
    hidden, weight = floating("hidden", hidden), floating("weight", weight)
    bias = None if bias is None else floating("bias", bias)
    advice = "pass labels.argmax(-1) for one-hot labels"
    labels = int32("labels", integral("labels", labels, "one class index for each token", advice))
    _check(hidden, weight, labels, bias)
    _check_options(softcap, label_smoothing, z_loss, reduction)
    if block_size is not None:
        block_size = integer("block_size", block_size, 1)
    if ignore_index is not None:
        ignore_index = min(integer("ignore_index", ignore_index, -(2**31)), 2**31 - 1)
    dtype = None if preferred_element_type is None else preferred_dtype(preferred_element_type)
    if dtype not in (None, *FLOATS):
        raise GraphTypeError("logits are floats", expected=", ".join(FLOATS), got=shown(dtype))
    kept = None if ignore_index is None else labels != ignore_index
    if kept is not None:  # what it holds may be NaN
        hidden = jnp.where(kept[..., None], hidden, 0)
    devices = _devices(hidden, weight, labels)
    block = _block(math.prod(labels.shape), weight.shape[1], block_size, devices)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    loss = _Loss(softcap, label_smoothing, z_loss, dtype, wide, precision, block, devices)
    arrays = hidden, weight, bias, labels, kept
    if reduction == "none":
        spec = jax.P(*(dims_of(labels) if any(dims_of(labels)) else dims_of(hidden)[:-1]))
        return without_explicit_axes(functools.partial(_losses, loss), arrays, spec)(*arrays)
    total = _total(*arrays, loss)
    whole = jnp.ones(labels.shape, bool) if kept is None else kept
    return total if reduction == "sum" else total / jnp.maximum(whole.sum(), 1)


def _devices(*arrays: jax.Array) -> int:
    """Over how many devices axes that are not manual may spread the arrays."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return max(
        math.prod(size for name, size in mesh.shape.items() if name not in mesh.manual_axes)
        for mesh in meshes
    )


def _block(tokens: Any, vocabulary: Any, most: int | None, devices: int) -> int | None:
    """How many tokens a block has; None: all."""
    if not (isinstance(tokens, int) and isinstance(vocabulary, int)):  # symbolic
        return None
    if most is None:
        count = -(-tokens // max(BLOCK * devices // max(vocabulary, 1), _ROWS))
        count = 1 << max(count - 1, 0).bit_length()  # it often divides the tokens
        block = -(-tokens // count)
        block = -(-block // _ROWS) * _ROWS
    else:
        block = -(-tokens // max(-(-tokens // most), 1))
    return block if block < tokens else None


def _check(hidden: jax.Array, weight: jax.Array, labels: jax.Array, bias: jax.Array | None) -> None:
    fits = weight.ndim == 2 and hidden.ndim > 0 and hidden.shape[-1] == weight.shape[0]
    if not fits or labels.shape != hidden.shape[:-1]:
        raise GraphError(
            "the shapes of hidden, weight and labels do not fit",
            expected="hidden (..., D), weight (D, V), labels (...)",
            got=f"hidden {hidden.shape}, weight {weight.shape}, labels {labels.shape}",
            fix="pass weight.T" if hidden.shape[-1:] == weight.shape[1:] else None,
        )
    if weight.shape[1] == 0:
        raise GraphError("weight has no classes", expected="V above 0", got=f"{weight.shape}")
    if bias is not None and bias.shape != weight.shape[1:]:
        raise GraphError(
            "bias does not have one element for each class",
            expected=f"({weight.shape[1]},)",
            got=f"{bias.shape}",
        )


def _check_options(softcap: Any, smoothing: Any, z: Any, reduction: Any) -> None:
    smoothing, z = number("label_smoothing", smoothing), number("z_loss", z)
    one_of("reduction", reduction, ("mean", "sum", "none"))
    for name, valid, expected, got in (
        ("softcap", softcap is None or number("softcap", softcap) > 0, "above 0, or None", softcap),
        ("label_smoothing", 0 <= smoothing < 1, "at least 0 and below 1", smoothing),
        ("z_loss", z >= 0, "at least 0", z),
    ):
        if not valid:
            raise GraphError(f"{name} is not valid", expected=expected, got=shown(got))


def _in_blocks(
    run: Any, start: Any, loss: _Loss, arrays: tuple[jax.Array, ...], further: tuple[Any, ...]
) -> Any:
    """Scan over blocks of tokens. A block takes tokens from all over the array, so that where they
    are sharded, each device has a part of each block. ``further``: what all blocks read."""
    tokens, each = arrays[0].shape[0], loss.block
    read = jax.tree.leaves((arrays, further))
    start = jax.tree.map(lambda x: align_varying((x, *read))[0], start)
    if each is None:
        return run(start, arrays)
    count = -(-tokens // each)
    more = each * count - tokens

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1)) if more else x
        return jnp.moveaxis(x.reshape(each, count, *x.shape[1:]), 1, 0)

    start, stacked = lax.scan(jax.checkpoint(run, prevent_cse=False), start, [*map(split, arrays)])
    return start, jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(each * count, *x.shape[2:])[:tokens], stacked
    )


def _tokens(hidden: jax.Array, labels: jax.Array, kept: Any) -> tuple[jax.Array, ...]:
    """(..., D) and (...) as (B, D) and (B,)."""
    tokens = math.prod(labels.shape)
    whole = jnp.ones(tokens, bool) if kept is None else kept.ravel()
    return hidden.reshape(tokens, hidden.shape[-1]), labels.ravel(), whole


def _product(hidden: jax.Array, weight: jax.Array, loss: _Loss) -> jax.Array:
    return jnp.matmul(
        hidden, weight, precision=loss.precision, preferred_element_type=loss.element_type
    )


def _logits(product: jax.Array, bias: Any, loss: _Loss) -> jax.Array:
    """In the type of the sums, with the softcap."""
    logits = product.astype(loss.wide)
    logits = logits if bias is None else logits + bias.astype(loss.wide)
    return loss.softcap * jnp.tanh(logits / loss.softcap) if loss.softcap else logits


def _zeros(labels: jax.Array, like: jax.Array) -> jax.Array:
    """(B, 1), and no constant: JAX would move that out of the loop, and hold (B, V) of it."""
    return (labels[:, None] * 0).astype(like.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _normalizers(product: jax.Array, bias: Any, loss: _Loss) -> tuple[jax.Array, jax.Array]:
    """What is subtracted from the logits, (B,), and the logarithms of the sums of exponentials of
    the differences: apart, because their sum would round a large one.

    On one device the largest logits are subtracted only where a sum needs it: that takes a pass
    over all logits. Several devices would have to agree on this.
    """

    def scaled() -> tuple[jax.Array, jax.Array]:
        logits = _logits(product, bias, loss)
        most = logits.max(axis=1, initial=-jnp.inf)
        most = jnp.where(jnp.isfinite(most), most, 0)
        return most, jnp.log(jnp.exp(logits - most[:, None]).sum(axis=1))

    if loss.devices > 1:
        return scaled()
    plain = jnp.log(jnp.exp(_logits(product, bias, loss)).sum(axis=1))
    nothing = plain * 0  # outside of the branch, which XLA turns into a selection if it computes
    return lax.cond((jnp.abs(plain) < _EXACT).all(), lambda: (nothing, plain), scaled)


@_normalizers.defjvp
def _normalizers_jvp(loss: _Loss, primals: Any, tangents: Any) -> Any:
    shift, lse = _normalizers(primals[0], primals[1], loss)
    logits, tangent = jax.jvp(lambda x, bias: _logits(x, bias, loss), primals, tangents)
    weights = jnp.exp(logits - shift[:, None] - lse[:, None])
    mean = (weights * tangent).sum(axis=1) / weights.sum(axis=1)  # roundings of lse cancel
    return (shift, lse), (jnp.zeros_like(shift), mean)


def _parts(
    product: jax.Array, bias: Any, labels: jax.Array, loss: _Loss
) -> tuple[jax.Array, jax.Array]:
    """The loss of each token, and its derivative by the logits before the softcap."""
    cap, a, z, size = loss.softcap, loss.smoothing, loss.z_loss, product.shape[1]
    logits, (shift, lse) = _logits(product, bias, loss), _normalizers(product, bias, loss)
    shifted, column = logits - shift[:, None], labels[:, None]
    picked = jnp.take_along_axis(product, column, 1, mode="fill", fill_value=jnp.nan)[:, 0]
    its_bias = None if bias is None else bias.at[labels].get(mode="clip")
    picked = jnp.where(labels < 0, jnp.nan, _logits(picked, its_bias, loss)) - shift
    losses, slopes = lse - (1 - a) * picked, jnp.exp(shifted - lse[:, None])
    if a:
        losses = losses - a * shifted.mean(axis=1)
    if z:
        losses = losses + z * jnp.square(shift + lse)
        slopes = slopes * (1 + 2 * z * (shift + lse)[:, None])
    hit = column == jnp.arange(size, dtype=labels.dtype)
    slopes = slopes - (1 - a) * hit - (a / size if a else 0)
    return losses, slopes * (1 - jnp.square(logits / cap)) if cap else slopes


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _of_product(product: jax.Array, bias: Any, labels: jax.Array, loss: _Loss) -> jax.Array:
    return _parts(product, bias, labels, loss)[0]


@_of_product.defjvp
def _of_product_jvp(loss: _Loss, primals: Any, tangents: Any) -> Any:
    losses, slopes = _parts(primals[0], primals[1], primals[2], loss)
    tangent = tangents[0].astype(loss.wide)
    tangent = tangent if tangents[1] is None else tangent + tangents[1].astype(loss.wide)
    return losses, (slopes * tangent).sum(axis=1)


def _losses(
    loss: _Loss, hidden: jax.Array, weight: jax.Array, bias: Any, labels: jax.Array, kept: Any
) -> jax.Array:
    """The loss of each token."""
    wide, narrow = weight.astype(loss.wide), weight.dtype  # gradients add up in float32

    def run(_: None, block: Any) -> tuple[None, jax.Array]:
        hidden, labels, kept = block
        found = _of_product(_product(hidden, wide.astype(narrow), loss), bias, labels, loss)
        return None, jnp.where(kept, found, 0)

    return _in_blocks(run, None, loss, _tokens(hidden, labels, kept), ())[1].reshape(labels.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def _total(
    hidden: jax.Array, weight: jax.Array, bias: Any, labels: jax.Array, kept: Any, loss: _Loss
) -> jax.Array:
    """The sum of the losses."""

    def whole(hidden: Any, weight: Any, bias: Any, labels: Any, kept: Any) -> jax.Array:
        def run(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
            hidden, labels, kept = block
            found = _of_product(_product(hidden, weight, loss), bias, labels, loss)
            return total + jnp.where(kept, found, 0).sum(), None

        tokens, start = _tokens(hidden, labels, kept), jnp.zeros((), loss.wide)
        return _in_blocks(run, start, loss, tokens, (weight, bias))[0]

    arrays = hidden, weight, bias, labels, kept
    return without_explicit_axes(whole, arrays, jax.P())(*arrays)


@functools.partial(_total.defjvp, symbolic_zeros=True)
def _total_jvp(loss: _Loss, primals: Any, tangents: Any) -> Any:
    """All gradients in one pass, times the tangents: in reverse mode JAX turns this around."""
    wide = loss.wide
    scale = _UP if primals[0].dtype == jnp.float16 else 1
    product: Any = functools.partial(
        lax.dot_general, precision=loss.precision, preferred_element_type=wide
    )

    def whole(hidden: Any, weight: Any, bias: Any, labels: Any, kept: Any) -> Any:
        def run(sums: Any, block: Any) -> Any:
            hidden, labels, kept = block
            total, by_weight, by_bias = sums
            losses, slopes = _parts(_product(hidden, weight, loss), bias, labels, loss)
            slopes = jnp.where(kept[:, None], slopes, _zeros(labels, slopes))
            narrow = (slopes * scale).astype(hidden.dtype)
            by_hidden = product(narrow, weight, (((1,), (1,)), ((), ()))) / scale
            by_weight = by_weight + product(hidden, narrow, (((0,), (0,)), ((), ()))) / scale
            total = total + jnp.where(kept, losses, 0).sum()
            return (total, by_weight, by_bias + slopes.sum(axis=0)), by_hidden.astype(hidden.dtype)

        start = tuple(jnp.zeros(shape, wide) for shape in ((), weight.shape, weight.shape[1:]))
        tokens = _tokens(hidden, labels, kept)
        (total, by_weight, by_bias), by_hidden = _in_blocks(
            run, start, loss, tokens, (weight, bias)
        )
        return total, by_hidden.reshape(hidden.shape), by_weight, by_bias

    hidden, weight, bias, *_ = (() if x is None else dims_of(x) for x in primals)
    specs = jax.P(), *(jax.P(*dims) for dims in (hidden, weight, bias or weight[1:]))
    total, *gradients = without_explicit_axes(whole, primals, specs)(*primals)
    out = jnp.zeros((), wide)
    for gradient, tangent in zip(gradients, tangents, strict=False):
        if tangent is not None and not isinstance(tangent, SymbolicZero):
            out = out + (gradient.astype(wide) * tangent.astype(wide)).sum()
    return total, out
