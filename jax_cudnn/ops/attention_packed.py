"""Attention over variable-length sequences packed along the token axis, without padding."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp

from .._core.errors import GraphError
from .._core.graph.dims import Shape
from .._core.graph.node import Node, View, frozen
from .._core.reasons import Reason
from .attention_arranged import Arranged
from .attention_bias import LENGTHS, Biased
from .attention_packed_reference import Packing

if TYPE_CHECKING:
    from .._core.graph.node import Tensors
    from .._core.graph.spec import GraphSpec, Tensor

# Port -> the offsets of its array; ports of queries and ports of keys.
QUERIES = {"q": "q", "dQ": "q", "o": "o", "O": "o", "dO": "o", "stats": "stats", "Stats": "stats"}
KEYS = {"k": "k", "dK": "k", "v": "v", "dV": "v"}
_OFFSETS = tuple(f"ragged_offset_{kind}" for kind in ("q", "k", "v", "o", "stats"))
_OFFSETS_OF = {port: f"ragged_offset_{kind}" for port, kind in (QUERIES | KEYS).items()}
_INTEGERS = (*LENGTHS, *_OFFSETS)
_PORTS = ", ".join(f"?{port}: *{port}" for port in _INTEGERS)
_MOST = 2**31  # elements that 32-bit offsets can address


@frozen
class _Packed(Biased, Arranged):
    """The common base of the forward and backward nodes.

    ``max_seq_len_q`` and ``max_seq_len_kv`` bound the lengths; ``max_total_seq_len_q`` and
    ``max_total_seq_len_kv`` are T and S, from which cuDNN computes its workspace size. seq_len_q
    and seq_len_kv are (B, 1, 1, 1), and each ragged_offset is (B + 1, 1, 1, 1): the offset in
    elements at which each sequence begins, and the end of the last one.
    """

    max_seq_len_q: int
    max_seq_len_kv: int
    max_total_seq_len_q: int
    max_total_seq_len_kv: int

    integers = _INTEGERS
    offsets = _OFFSETS_OF
    requires = (
        "bfloat16 or float16, head sizes that are multiples of 8, SM 80, and SM 90 for gradients; "
        "arrays of fewer than 2**31 elements"
    )

    @property
    def limits(self) -> tuple[int, int]:
        return self.max_seq_len_q, self.max_seq_len_kv

    def checked(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError or GraphTypeError if shapes or dtypes do not fit."""
        sizes = self.sizes(inputs)
        batch = inputs["seq_len_q"].shape[0]
        assert (self.max_total_seq_len_q, self.max_total_seq_len_kv) == (sizes["t"], sizes["s"])
        lengths = dict.fromkeys(LENGTHS, (batch, 1, 1, 1))
        offsets = dict.fromkeys(_OFFSETS, (batch + 1, 1, 1, 1))
        wanted = {**lengths, **offsets, "stats": (*inputs["q"].shape[:2], 1)}
        self.checked_shapes(inputs, wanted)
        self.check_bias(inputs)
        if not sizes["n"] or inputs["q"].shape[1] % inputs["k"].shape[1]:
            raise GraphError(
                "the numbers of heads do not fit",
                expected="a multiple of k's heads for q",
                got=f"q has {inputs['q'].shape[1]} heads, k {inputs['k'].shape[1]}",
            )
        for port in ("q", "k", "v", "o"):
            size = math.prod(inputs[port].shape) if port in inputs else 0
            if isinstance(size, int) and size >= _MOST:
                raise GraphError(
                    f"{port!r} has too many elements",
                    expected="fewer than 2**31",
                    got=f"{list(inputs[port].shape)}",
                    why="offsets count elements in 32 bits",
                    fix="split the sequences between several calls",
                )

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        return (tensors["seq_len_q"].shape[0], tensors["q"].shape[1], *self.limits)

    def views(self, port: str, tensors: Mapping[str, Tensor]) -> Sequence[View]:
        """(tokens, heads, size) as sequences of the maximum length, each from its offset on."""
        limit = self.limits[port in KEYS]
        if port not in QUERIES and port not in KEYS:
            return super().views(port, tensors)
        batch, (_, heads, size) = tensors["seq_len_q"].shape[0], tensors[port].shape
        strides = (limit * heads * size, size, heads * size, 1)
        return (View(port, (batch, heads, limit, size), strides),)

    def refuses(self, tensors: Tensors, graph: GraphSpec) -> Reason | None:
        if self.max_seq_len_q == 1:
            return Reason("cuDNN computes a single query of a sequence whatever its length")
        return super().refuses(tensors, graph)

    def bounded(self, given: Mapping[str, jax.Array], tensors: Tensors) -> Mapping[str, jax.Array]:
        """Offsets clipped to their arrays, and lengths clipped to the distance between offsets."""
        found = dict(given)
        rooms: tuple[list[jax.Array], list[jax.Array]] = ([], [])  # of queries, of keys
        for port, offset in self.offsets.items():
            if offset in given and port in tensors:
                tokens, *token = tensors[port].shape
                size = math.prod(token)
                found[offset] = jnp.clip(found[offset] // size, 0, tokens) * size
                rooms[port in KEYS].append(jnp.diff(found[offset], axis=0) // size)
        for port, room, limit in zip(LENGTHS, rooms, self.limits, strict=True):
            most = jnp.clip(jnp.min(jnp.stack(room), axis=0), 0, limit)
            found[port] = jnp.clip(given[port], 0, most)
        return found

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        arrays = {port: x for port, x in tensors.items() if port not in _OFFSETS}

        def placed(port: str, x: Any) -> None:
            if port in self.offsets:
                x.set_ragged_offset(tensors[self.offsets[port]])

        for port, x in arrays.items():
            placed(port, x)
        made = self.base.emit(pygraph, arrays, {**common, **self.totals})
        for port, x in zip(self.results, made, strict=True):
            placed(port, x)
        return made

    @property
    def totals(self) -> dict[str, int]:
        """Further arguments of pygraph's method."""
        return {}

    def packing(self, precision: Any) -> Packing:
        return Packing(self.base.attention(precision), *self.limits)


@frozen
class PackedSdpaBackward(_Packed):
    """Gradients of packed attention, (T, H, D), (S, N, D) and (S, N, E), and dBias; 0 for tokens of
    no sequence. Source: cuDNN documentation, "Scaled Dot Product Attention Backward"."""

    method = "packed_sdpa_backward"
    dims = (
        "q: t h d, k: s n d, v: s n e, o: t h e, dO: t h e, stats: *l, ?bias: *m, "
        f"{_PORTS} -> dQ: t h d, dK: s n d, dV: s n e, dBias: *m"
    )
    initial: ClassVar = {"dQ": 0.0, "dK": 0.0, "dV": 0.0}

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        return {
            name: (inputs[port].shape, inputs[port].dtype)
            for name, port in zip(self.results, ("q", "k", "v", "bias"), strict=False)
        }

    @property
    def totals(self) -> dict[str, int]:
        return {
            "max_total_seq_len_q": self.max_total_seq_len_q,
            "max_total_seq_len_kv": self.max_total_seq_len_kv,
        }

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        found = self.packing(precision).backward(arrays)
        return tuple(found[port] for port in self.results)


@frozen
class PackedSdpa(_Packed):
    """Attention of each sequence's queries (T, H, D) over its keys and values, (S, N, D) and
    (S, N, E). O is (T, H, E) and Stats (T, H, 1); 0 and -inf for tokens of no sequence. Source:
    cuDNN documentation, "Scaled Dot Product Attention Forward"."""

    method = "packed_sdpa"
    dims = f"q: t h d, k: s n d, v: s n e, ?bias: *m, {_PORTS} -> O: t h e, Stats: *l"
    initial: ClassVar = {"O": 0.0, "Stats": -math.inf}

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        (t, h, _), (*_, e) = inputs["q"].shape, inputs["v"].shape
        found = {"O": ((t, h, e), inputs["q"].dtype), "Stats": ((t, h, 1), "float32")}
        return {port: found[port] for port in self.results}

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return self.packing(precision).forward(arrays)[: len(self.results)]

    def backward(self, wanted: Collection[str]) -> Node:
        totals = self.max_total_seq_len_q, self.max_total_seq_len_kv
        return PackedSdpaBackward(self.base.backward(wanted), *self.limits, *totals)
