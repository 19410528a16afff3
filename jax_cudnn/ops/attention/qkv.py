"""Attention over queries, keys and values in one array, as a joint projection writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.dims import Shape
from ..._core.graph.node import Fold, Node, View, frozen
from ..._core.reasons import Reason
from .base import as_examples
from .bias import LENGTHS, Biased
from .tangent import Arranged

if TYPE_CHECKING:
    from ..._core.graph.node import Tensors
    from ..._core.graph.spec import GraphSpec, Tensor

_PORTS = "?bias: *bias, ?seq_len_q: *i, ?seq_len_kv: *j"


@frozen
class _Qkv(Biased, Arranged):
    """The common base of the forward and backward nodes. ``heads`` counts the query heads: the
    first of the M = heads + 2 N heads of qkv, followed by N key heads and N value heads."""

    heads: int

    @property
    def requires(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.requires

    def checked(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError or GraphTypeError if shapes or dtypes do not fit."""
        self.sizes(inputs)
        batch, tokens, heads, _ = inputs["qkv"].shape
        of_keys = (heads - self.heads) // 2
        if of_keys < 1 or heads != self.heads + 2 * of_keys or self.heads % of_keys:
            raise GraphError(
                "the numbers of heads do not fit",
                expected="N query heads, K key heads and K value heads, with N a multiple of K",
                got=f"{heads} heads in total, {self.heads} of them query heads",
            )
        wanted = dict.fromkeys(LENGTHS, (batch, 1, 1, 1))
        self.checked_shapes(inputs, {**wanted, "stats": (batch, self.heads, tokens, 1)})
        self.check_bias(inputs)

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        batch, tokens, *_ = tensors["qkv"].shape
        return (batch, self.heads, tokens, tokens)

    def key_heads(self, tensors: Mapping[str, Tensor]) -> int:
        _, (first, last), _ = self.parts(tensors["qkv"].shape[2])
        return last - first

    def parts(self, heads: int) -> tuple[tuple[int, int], ...]:
        """The ranges of query, key and value heads."""
        n = (heads - self.heads) // 2
        return (0, self.heads), (self.heads, self.heads + n), (self.heads + n, heads)

    def views(self, port: str, tensors: Mapping[str, Tensor]) -> Sequence[View]:
        """Parts of (batch, tokens, heads, size), with heads before tokens."""
        names = {"qkv": ("q", "k", "v"), "dQKV": ("dQ", "dK", "dV")}.get(port, (port,))
        if port not in ("qkv", "dQKV", "o", "O", "dO"):
            return super().views(port, tensors)
        b, s, m, d = tensors[port].shape
        strides = (s * m * d, d, m * d, 1)
        parts = self.parts(m) if len(names) > 1 else ((0, m),)
        return [
            View(name, (b, last - first, s, d), strides, first * d)
            for name, (first, last) in zip(names, parts, strict=True)
        ]

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        return self.base.emit(pygraph, tensors, common)

    def arrays(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays in the reference's form: q, k and v, with heads before tokens."""
        found = {
            port: jnp.swapaxes(x, 1, 2) if port in ("qkv", "o", "dO") else x
            for port, x in arrays.items()
        }
        qkv = found.pop("qkv")
        parts = (qkv[:, first:last] for first, last in self.parts(qkv.shape[1]))
        return found | dict(zip("qkv", parts, strict=True))

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the batch; a bias shared by the batch stays shared unless its gradient is needed."""
        return as_examples(batched, tensors, tensors, "qkv")

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        b, s, _, d = shapes["qkv"]
        return self.base.band.flops((b, self.heads, s, d), (b, 1, s, d), "dO" in shapes)


@frozen
class QkvSdpaBackward(_Qkv):
    """Gradients of attention over one array, as one array, and dBias. Source: cuDNN documentation,
    "Scaled Dot Product Attention Backward"."""

    method = "qkv_sdpa_backward"
    dims = f"qkv: b s m d, o: b s h d, dO: b s h d, stats: *l, {_PORTS} -> dQKV: b s m d, dBias: *m"

    @property
    def results(self) -> tuple[str, ...]:
        return ("dQKV", *self.base.results[3:])

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        return {
            name: (inputs[port].shape, inputs[port].dtype)
            for name, port in zip(self.results, ("qkv", "bias"), strict=False)
        }

    def support(self, tensors: Tensors, graph: GraphSpec) -> Reason | None:
        if tensors["qkv"].shape[1] == 1:
            return Reason("cuDNN does not support gradients for one query and one key")
        return super().support(tensors, graph)

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        found = self.base.attention(precision).backward(self.arrays(arrays))
        whole = jnp.concatenate([found[port] for port in ("dQ", "dK", "dV")], axis=1)
        found["dQKV"] = jnp.swapaxes(whole, 1, 2)
        return tuple(found[port] for port in self.results)


@frozen
class QkvSdpa(_Qkv):
    """Attention over qkv (B, S, M, D): O is (B, S, heads, D), Stats (B, heads, S, 1). Source: cuDNN
    documentation, "Scaled Dot Product Attention Forward"."""

    method = "qkv_sdpa"
    dims = f"qkv: b s m d, {_PORTS} -> O: b s h d, Stats: *l"

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        b, s, _, d = inputs["qkv"].shape
        found = {
            "O": ((b, s, self.heads, d), inputs["qkv"].dtype),
            "Stats": ((b, self.heads, s, 1), "float32"),
        }
        return {port: found[port] for port in self.results}

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        o, total = self.base.attention(precision).forward(self.arrays(arrays))
        return (jnp.swapaxes(o, 1, 2), total)[: len(self.results)]

    def backward(self, wanted: Collection[str]) -> Node:
        return QkvSdpaBackward(self.base.backward(wanted), self.heads)
