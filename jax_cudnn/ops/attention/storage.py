"""Attention over other storages than dense arrays with heads before tokens: one node, for the
forward and the backward pass, and what it asks of a storage.

Functions of ``jax_cudnn.ops`` create these nodes and check their integer operands, because a plan
reads out of bounds if these are wrong. So ``g`` has no method for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph import by_reference
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FLOATS
from ..._core.graph.node import Draws, Fold, Indices, Node, frozen, matched
from ..._core.graph.planned import About, Edge, Engines, View, Work
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, Handles, Tensor, Tensors, Values
from . import extras
from .base import GIVEN_MASK, SdpaBase, batch_folds, check_shapes, wrong_dtypes
from .bias import LENGTHS, HasBias, clipped_lengths
from .nodes import with_mask
from .reference import Arrays, Attention
from .tangent import gradients, tangents_of


class Storage:
    """How attention's arrays lie in memory: a frozen dataclass, whose fields are attributes of the
    operation. The defaults are those of arrays (B, S, H, D)."""

    name: ClassVar[str]
    """The prefix of the node's method."""
    forward: ClassVar[str]
    """The forward node's ports, see :mod:`..._core.graph.dims`."""
    backward: ClassVar[str] = ""
    """The backward node's ports; empty without one."""
    gradients: ClassVar[Mapping[str, str]] = {"dQ": "q", "dK": "k", "dV": "v"}
    """The backward node's results, and the ports of which they are the gradients."""
    about: ClassVar[About] = SdpaBase.about
    indices: ClassVar[Indices] = HasBias.indices
    draws: ClassVar[Draws | None] = None
    """What dropout draws; None without dropout."""
    initial: ClassVar[Mapping[str, float]] = {}
    """What tokens of no sequence hold in the results."""

    def check(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
        """GraphError if shapes do not fit."""
        raise NotImplementedError

    def made(self, inputs: Mapping[str, Tensor]) -> tuple[Shape, Shape]:
        """The shapes of O and Stats."""
        raise NotImplementedError

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        """The shape of the scores, (B, H, Sq, Skv)."""
        raise NotImplementedError

    def key_heads(self, tensors: Mapping[str, Tensor]) -> int:
        return min(tensors[port].shape[1] for port in ("k", "v"))

    def flops(self, band: Any, tensors: Tensors) -> int | None:
        """As in :class:`Work`; None if the results' sizes are the best estimate."""
        return None

    def refused(self, tensors: Tensors) -> Reason | None:
        """Why cuDNN does not run it, or None."""
        return None

    def views(self, port: str, tensors: Tensors) -> Sequence[View] | None:
        """How cuDNN sees the array at a port; None for other operands."""
        raise NotImplementedError

    def clipped(self, tensors: Tensors, given: Arrays) -> Mapping[str, jax.Array]:
        """The operands that index others, in the bounds of the arrays."""
        return clipped_lengths(self.scores(tensors), given)

    def emit(self, base: Node, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        return base.emit(pygraph, tensors, common)

    def run(self, attention: Attention, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """O and Stats."""
        raise NotImplementedError

    def run_backward(self, attention: Attention, arrays: Arrays) -> dict[str, jax.Array]:
        """The gradients by result."""
        raise NotImplementedError

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """See :meth:`Node.folds`."""
        return ()


def tokens_first(port: str, shape: Shape, name: str = "", first: int = 0, count: int = 0) -> View:
    """``count`` heads from ``first`` on of (B, S, H, D), with heads before tokens."""
    b, s, h, d = shape
    return View(name or port, (b, count or h, s, d), (s * h * d, d, h * d, 1), first * d)


@frozen
class StoredSdpa(HasBias):
    """``base`` over arrays in another storage. Source: cuDNN documentation, "Scaled Dot Product
    Attention Forward" and "Backward": strides, ragged tensors and paged attention."""

    base: Any  # Sdpa or SdpaBackward
    storage: Any

    anchor = SdpaBase.anchor
    dtypes = FLOATS
    gradients = gradients

    @property
    def is_backward(self) -> bool:
        return self.base.results[0] == "dQ"

    @property
    def method(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"{self.storage.name}_{self.base.method}"

    @property
    def about(self) -> About:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.storage.about

    @property
    def draws(self) -> Draws | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.draws and self.storage.draws

    @property
    def indices(self) -> Indices:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.storage.indices

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Dims.parse(self.storage.backward if self.is_backward else self.storage.forward)

    @property
    def score_mod(self) -> Any:
        return self.base.score_mod

    @property
    def results(self) -> tuple[str, ...]:
        results = self.base.results
        return (*self.storage.gradients, *results[3:]) if self.is_backward else results

    def deterministic(self) -> Node | None:
        return dataclasses.replace(self, base=self.base.deterministic())

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, base=self.base.without(results))

    def backward(self, wanted: Collection[str]) -> Node:
        """The node that computes the gradients with respect to these ports."""
        return dataclasses.replace(self, base=self.base.backward(wanted))

    def linear_in(self, ports: Collection[str]) -> bool:
        return self.base.linear_in(ports)

    def keywords(self) -> dict[str, Any]:
        own = {f.name: getattr(self.storage, f.name) for f in dataclasses.fields(self.storage)}
        return self.base.keywords() | own

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        sizes = matched(self, {port: x for port, x in inputs.items() if port not in extras.RAW})
        self.storage.check(inputs, sizes)
        self.check_bias(inputs)
        extras.check(self.base, inputs, self.scores(inputs))
        if self.is_backward:
            of = {**self.storage.gradients, "dBias": "bias", "dSink_token": "sink_token"}
            return {name: (inputs[of[name]].shape, inputs[of[name]].dtype) for name in self.results}
        o, stats = self.storage.made(inputs)
        dtype = inputs["q" if "q" in inputs else "qkv"].dtype
        drawn = self.scores(inputs), "float32"
        found = {"O": (o, dtype), "Stats": (stats, "float32"), "RNG_DUMP": drawn}
        return {port: found[port] for port in self.results}

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        return self.storage.scores(tensors)

    def key_heads(self, tensors: Mapping[str, Tensor]) -> int:
        return self.storage.key_heads(tensors)

    def work(self, tensors: Tensors) -> Work:
        found = self.storage.flops(self.base.band, tensors)
        return super().work(tensors) if found is None else Work(found, self.method)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if reason := self.storage.refused(tensors) or super().support(tensors, graph):
            return reason
        if len(graph.calls) > 1:
            return Reason(f"{self.method} needs its own plan, because of its storage layout")
        if "dSink_token" in self.results:
            return Reason("cuDNN's sum for dSink_token does not skip tokens of no sequence")
        return (
            Reason(GIVEN_MASK) if "dropout_mask" in tensors else wrong_dtypes(self.results, tensors)
        )

    def engines(self, tensors: Tensors, graph: GraphSpec) -> Engines:
        plain = self.storage.name == "paged" and not {"bias", "seed", "sink_token"} & {*tensors}
        found = Engines() if plain else super().engines(tensors, graph)
        other = self.base.otherwise
        if other is not None:
            other = other._replace(node=dataclasses.replace(self, base=other.node))
        return found._replace(otherwise=other)

    def views(self, port: str, tensors: Tensors) -> Sequence[View]:
        found = self.storage.views(port, tensors)
        return super().views(port, tensors) if found is None else found

    def boundary(self, tensors: Tensors) -> Edge:
        return super().boundary(tensors)._replace(initial=self.storage.initial)

    def clipped(self, tensors: Tensors, given: Arrays) -> Mapping[str, jax.Array]:
        return self.storage.clipped(tensors, given)

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        return self.storage.emit(self.base, pygraph, tensors, common)

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        attention = self.base.attention(precision)
        found: dict[str, jax.Array] = {}
        if self.is_backward:
            found = self.storage.run_backward(attention, arrays)
        else:
            found["O"], found["Stats"] = self.storage.run(attention, arrays)
        if "RNG_DUMP" in self.results:
            found["RNG_DUMP"] = attention.mask(arrays, self.scores(cast(Any, arrays)))
        return tuple(found[port] for port in self.results)

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        if not (self.is_backward and self.linear_in(tangents.keys())):
            inputs = with_mask(self.base, g, inputs, self)
        outputs = {port: x for port, x in outputs.items() if port != "RNG_DUMP"}  # is constant
        known = "Stats" in outputs and bool(self.storage.backward) and not self.is_backward
        # XLA adds up the gradient of sinks by tokens.
        if not known or ("sink_token" in tangents and outputs["Stats"].ndim != inputs["q"].ndim):
            return by_reference.jvp(self, g, tangents, inputs, outputs)
        return tangents_of(self, g, tangents, inputs, outputs)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        inputs = with_mask(self.base, g, inputs, self)
        return by_reference.transpose(self, g, cotangents, inputs, tensors)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        return self.storage.folds(batched, size, tensors)


_QKV_PORTS = "?bias: *bias, ?seq_len_q: *i, ?seq_len_kv: *j"


@dataclasses.dataclass(frozen=True)
class InOneArray(Storage):
    """Queries, keys and values in one array, as joint projections write it: qkv (B, S, 3, H, D),
    whose heads can be sharded; or (B, S, M, D), where ``heads`` counts the query heads: the first
    of the M = heads + 2 N heads, followed by N key heads and N value heads. O is (B, S, H, D),
    Stats (B, H, S, 1); the gradient is one array, too."""

    heads: int | None

    name = "qkv"
    gradients: ClassVar = {"dQKV": "qkv"}

    @property
    def forward(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"qkv: {self._letters}, {_QKV_PORTS} -> O: b s h d, Stats: *l"

    @property
    def backward(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        given = f"qkv: {self._letters}, o: b s h d, dO: b s h d, stats: *l, {_QKV_PORTS}"
        return f"{given} -> dQKV: {self._letters}, dBias: *m"

    @property
    def _letters(self) -> str:
        return "b s three h d" if self.heads is None else "b s m d"

    def counts(self, shape: Shape) -> tuple[int, int]:
        """The numbers of query heads and of key heads in qkv."""
        if self.heads is None:
            return shape[3], shape[3]
        return self.heads, (shape[2] - self.heads) // 2

    def check(self, inputs: Mapping[str, Tensor], sizes: Mapping[str, Any]) -> None:
        batch, tokens, count, *_ = shape = inputs["qkv"].shape
        of_queries, of_keys = self.counts(shape)
        total = 3 if self.heads is None else of_queries + 2 * of_keys
        if of_keys < 1 or count != total or of_queries % of_keys:
            raise GraphError(
                "the numbers of heads do not fit",
                expected="N query heads, K key heads and K value heads, with N a multiple of K",
                got=f"{[*shape]}, {of_queries} query heads",
            )
        lengths = dict.fromkeys(LENGTHS, (batch, 1, 1, 1))
        check_shapes(inputs, {**lengths, "stats": (batch, of_queries, tokens, 1)})

    def made(self, inputs: Mapping[str, Tensor]) -> tuple[Shape, Shape]:
        (b, s, *_, d), (heads, _) = inputs["qkv"].shape, self.counts(inputs["qkv"].shape)
        return (b, s, heads, d), (b, heads, s, 1)

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        batch, tokens, *_ = shape = tensors["qkv"].shape
        return (batch, self.counts(shape)[0], tokens, tokens)

    def key_heads(self, tensors: Mapping[str, Tensor]) -> int:
        return self.counts(tensors["qkv"].shape)[1]

    def flops(self, band: Any, tensors: Tensors) -> int | None:
        b, heads, s, _, d = *self.scores(tensors), tensors["qkv"].shape[-1]
        return band.flops((b, heads, s, d), (b, 1, s, d), "dO" in tensors)

    def refused(self, tensors: Tensors) -> Reason | None:
        if "dO" in tensors and tensors["qkv"].shape[1] == 1:
            return Reason("cuDNN does not support gradients for one query and one key")
        return None

    def views(self, port: str, tensors: Tensors) -> Sequence[View] | None:
        if port not in ("qkv", "dQKV", "o", "O", "dO"):
            return None
        shape = b, s, *_, d = tensors[port].shape
        names = {"qkv": ("q", "k", "v"), "dQKV": ("dQ", "dK", "dV")}.get(port)
        if names is None:
            return (tokens_first(port, shape),)
        n, k = self.counts(shape)
        flat, parts = (b, s, n + 2 * k, d), ((0, n), (n, k), (n + k, k))
        return [
            tokens_first(port, flat, name, *part) for name, part in zip(names, parts, strict=True)
        ]

    def _arrays(self, arrays: Arrays) -> dict[str, jax.Array]:
        """The arrays in the reference's form: q, k and v, with heads before tokens."""
        qkv = arrays["qkv"]
        n, k = self.counts(qkv.shape)
        if self.heads is None:
            parts = [jax.lax.index_in_dim(qkv, i, 2, keepdims=False) for i in range(3)]
        else:
            parts = jax.lax.split(qkv, (n, k, k), 2)
        turned = dict(zip("qkv", parts, strict=True))
        turned |= {port: arrays[port] for port in ("o", "dO") if port in arrays}
        return {**arrays, **{port: jnp.swapaxes(x, 1, 2) for port, x in turned.items()}}

    def run(self, attention: Attention, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        o, total = attention.forward(self._arrays(arrays))
        return jnp.swapaxes(o, 1, 2), total

    def run_backward(self, attention: Attention, arrays: Arrays) -> dict[str, jax.Array]:
        found = attention.backward(self._arrays(arrays))
        parts = [jnp.swapaxes(found[port], 1, 2) for port in ("dQ", "dK", "dV")]
        if self.heads is None:
            parts = [x[:, :, None] for x in parts]
        return {**found, "dQKV": jnp.concatenate(parts, axis=2)}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        return map(Fold, batch_folds(batched, tensors, tensors, "qkv"))
