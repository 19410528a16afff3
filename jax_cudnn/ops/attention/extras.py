"""Extensions of attention: dropout, sinks, ALiBi and block masks.

**Dropout.** cuDNN draws its mask from a seed and an offset, 64-bit integers in device memory, and
from an element's position: forward and backward passes draw the same mask. Head h of H of example b
draws at an offset what the first one draws at the offset plus ``STEP * (b * H + h)`` (measured with
cuDNN 9.19 on an H200), so a shard of the batch can draw its part of the mask. The reference draws
other masks (with jax.random), so a graph with dropout and its derivatives run in the same place
(``Call.is_paired``). Derivatives that XLA computes for cuDNN's forward pass do not draw: they read
the mask that a forward pass writes (``rng_dump``).

**Block masks** are packed in bits: bit ``j`` of byte ``i`` says whether a tile of queries sees the
keys of tile ``8 * i + j``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.errors import GraphError, GraphTypeError, shown
from ..._core.graph.dims import Shape
from ..._core.graph.dtypes import wide_dtype
from ..._core.graph.node import Draws, advanced
from ..._core.rules import Tensor, Tensors

if TYPE_CHECKING:
    from .base import SdpaBase

TILE = 128
"""Queries, and keys, of a tile of a block mask."""
BITS = 8
CUDNN_OF_TILES = 92600  # earlier, masking the first tile of keys gives an undefined result
NEEDS_OF_TILES = "a block mask requires a Blackwell GPU and cuDNN 9.26"

WORDS = ("seed", "offset")
STEP = 32
"""What cuDNN adds to the offset for each head of each example."""
_SCORES = (("q", 0), ("q", 1), ("q", 2), ("k", 2))
DRAWS = Draws(*WORDS, "dropout_mask", "RNG_DUMP", axes=_SCORES, step=STEP)
PORTS = ", ".join(f"?{port}: *{port}" for port in (*WORDS, "dropout_mask", "sink_token"))
"""The ports of other storages than dense arrays."""
RAW = (*WORDS, "block_mask")
"""Ports with integer dtypes."""
SHARED = ("sink_token", "dSink_token")
"""Ports shared by all batch elements."""


# -- what the nodes check --------------------------------------------------------------------------


def probability(value: Any) -> float | None:
    """A node's dropout_probability; GraphError if it is not valid."""
    if value is None:
        return None
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not number or not 0 < value < 1:
        raise GraphError(
            "dropout_probability is not valid",
            expected="a Python scalar between 0 and 1, or None",
            got=shown(value),
        )
    return float(value)


def check(node: SdpaBase, inputs: Mapping[str, Tensor], scores: Shape) -> None:
    """GraphError or GraphTypeError if these operands or attributes do not fit."""
    b, h, queries, keys = scores
    wanted = {
        **dict.fromkeys(WORDS, ((1, 1, 1, 2), "uint32")),
        "dropout_mask": ((b, h, queries, keys), "float32"),
        "sink_token": ((1, h, 1, 1), "float32"),
        "block_mask": ((b, h, *tiles(queries, keys, packed=True)), "uint8"),
    }
    for port, (shape, dtype) in wanted.items():
        taken = (dtype, "float64") if dtype == "float32" else (dtype,)
        if port not in inputs or (inputs[port].shape == shape and inputs[port].dtype in taken):
            continue
        raise (GraphError if inputs[port].dtype in taken else GraphTypeError)(
            f"{port!r} has the wrong shape or dtype",
            expected=f"{dtype}{list(shape)}",
            got=f"{inputs[port].dtype}{list(inputs[port].shape)}",
            fix="jax.random.key_data(key).reshape(1, 1, 1, 2) makes such a pair of words"
            if port in WORDS
            else None,
        )
    drawn = [port for port in WORDS if port in inputs]
    drops = node.dropout_probability is not None
    whole = len(drawn) == len(WORDS) or (not drawn and "dropout_mask" in inputs)
    if drops != whole or (drawn and not whole):
        raise GraphError(
            "dropout is not complete",
            expected="all of dropout_probability, seed and offset, or none of them",
            got=", ".join([*drawn, f"dropout_probability={node.dropout_probability}"]),
        )
    if node.use_alibi_mask and node.diagonal_band_right_bound != 0:
        raise GraphError(
            "use_alibi_mask without causal attention",
            expected="diagonal_band_right_bound=0",
            got=f"diagonal_band_right_bound={node.diagonal_band_right_bound}",
            why="it lowers the scores of earlier keys by distance, and would raise later ones",
            fix="pass other distances as bias",
        )


def tiles(queries: int, keys: int, packed: bool = False) -> tuple[int, int]:
    """The numbers of tiles of queries and keys; with ``packed``, bytes for the latter."""
    columns = -(-keys // TILE)
    return -(-queries // TILE), -(-columns // BITS) if packed else columns


# -- the reference ---------------------------------------------------------------------------------


def kept(
    arrays: Mapping[str, jax.Array], rate: float, shape: tuple[int, ...], first: Any
) -> jax.Array:
    """1 where a weight is kept and 0 where it is dropped, (B, H, S, T) for S queries from ``first``
    on. Each query draws independently of how many are computed at a time."""
    b, h, queries, keys = shape
    seed = jax.random.wrap_key_data(arrays["seed"].reshape(2), impl="threefry2x32")
    offsets = advanced(arrays["offset"].reshape(2), STEP * jnp.arange(b * h, dtype=jnp.uint32))

    def bits(offset: jax.Array, row: jax.Array) -> jax.Array:
        key = functools.reduce(jax.random.fold_in, (*offset, row), seed)
        return jax.random.bits(key, (keys,), jnp.uint32)

    of_rows = jax.vmap(bits, (None, 0))
    drawn = jax.vmap(of_rows, (0, None))(offsets, first + jnp.arange(queries))
    return (drawn.reshape(shape) >= np.uint32(rate * 2**32)).astype(jnp.float32)


def slopes(heads: int, dtype: Any = np.float32) -> np.ndarray:
    """ALiBi's slope of each head: ``2 ** (-8 i / n)`` for i = 1 ... n, where n is the largest power
    of two up to ``heads``; the remaining heads have the slopes for 2 n at odd i.

    Source: Press et al. 2022, arXiv:2108.12409, and the authors' code for other head counts.
    """
    n = 1 << (heads.bit_length() - 1)
    exponents = [*range(1, n + 1), *(i + 0.5 for i in range(heads - n))]
    return np.array([2.0 ** (-8.0 * e / n) for e in exponents], dtype)


def seen_tiles(mask: jax.Array, rows: jax.Array, keys: int) -> jax.Array:
    """Whether queries at positions ``rows`` see keys by a block mask: (B, H, S, T)."""
    columns = jnp.arange(keys) // TILE
    of_rows = jnp.take(mask, rows // TILE, axis=2, mode="clip")
    return (of_rows[..., columns // BITS] >> (columns % BITS).astype(mask.dtype)) & 1 != 0


def packed(mask: jax.Array) -> jax.Array:
    """Booleans (B, N, tiles of queries, tiles of keys) packed along the last axis into bytes."""
    columns = mask.shape[-1]
    count = -(-columns // BITS)
    padded = jnp.pad(mask, [(0, 0)] * 3 + [(0, count * BITS - columns)])
    bits = padded.reshape(*mask.shape[:3], count, BITS).astype(jnp.uint8)
    return jnp.sum(bits << np.arange(BITS, dtype=np.uint8), axis=-1, dtype=jnp.uint8)


def weights(scores: jax.Array, stats: jax.Array) -> jax.Array:
    """The softmax weights of rows with these statistics: 0 in rows that see no key, NaN where
    scores are NaN."""
    return jnp.exp(scores - jnp.where(jnp.isneginf(stats), jnp.inf, stats))


def sink_gradient(o: jax.Array, grad: jax.Array, stats: jax.Array, sink: jax.Array) -> jax.Array:
    """The gradient of the sinks (1, H, 1, 1): minus the sum of each query's sink weight times
    ``rowsum(dO * o)``. Arrays of packed tokens are (T, H, E)."""
    if o.ndim == 3:
        o, grad, stats = (jnp.swapaxes(x, 0, 1)[None] for x in (o, grad, stats))
    kind = wide_dtype(grad, o)
    mean = jnp.sum(grad.astype(kind) * o.astype(kind), axis=-1, keepdims=True)
    along = jnp.where(jnp.isneginf(stats), 0, weights(sink, stats) * mean)
    return -jnp.sum(along, axis=(0, 2), keepdims=True)


def folds(batched: frozenset[str], tensors: Tensors) -> Collection[str]:
    """The ports whose batch a vmap dimension is folded into; none if it cannot be folded.

    A call has one seed: elements folded into one call would draw other masks than separate calls.
    """
    shared = {port for port in SHARED if port in tensors}
    if "seed" in tensors or "dropout_mask" in tensors or batched & shared:
        return ()
    return () if "dSink_token" in tensors else [p for p in tensors if p not in shared]
