"""An attention bias that is broadcast over queries or keys, and the form in which cuDNN gets it.

Measured on an H200 with cuDNN 9.19: if a bias is declared with dimensions of one element, the
backward pass misreads (B, H, 1, Skv) (silently, with errors as large as the gradients), the forward
pass misreads (B, H, 1, 1), and dBias of such a shape is written out of bounds. A bias declared with
full dimensions is read correctly, also with a stride of 0 along the queries. So a bias broadcast
over queries is declared in full without a copy; one broadcast over keys is copied along the keys
before the call; and a gradient is computed for all scores and summed afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError
from ..._core.graph.dims import Shape
from ..._core.graph.layout import packed_strides
from ..._core.graph.node import Indices, Node, frozen
from ..._core.graph.planned import Edge, Engines, Seen, View
from ..._core.reasons import Reason
from ..._core.rules import GraphSpec, Tensor, Tensors

LENGTHS = ("seq_len_q", "seq_len_kv")
_QUERIES, _KEYS = 2, 3  # dimensions of scores (B, H, Sq, Skv)


def clipped_lengths(scores: Shape, given: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Both lengths in the bounds of the scores, and such that cuDNN writes all results, and zeros
    where a batch element has no queries or no keys: among several queries it leaves them unwritten
    without keys, but not without queries; a single one it computes whatever its length, and is zero
    without keys."""
    count, most = scores[_QUERIES:]
    queries, keys = jnp.clip(given[LENGTHS[0]], 0, count), jnp.clip(given[LENGTHS[1]], 0, most)
    if isinstance(count, int) and count == 1:
        keys = jnp.where(queries <= 0, 0, keys)
    else:
        queries, keys = jnp.where(keys <= 0, 0, queries), jnp.where(keys <= 0, 1, keys)
    return dict(zip(LENGTHS, (queries, keys), strict=True))


def whole(bias: Shape, scores: Shape) -> Shape:
    """The shape of a bias with one element per query and key."""
    return (*bias[:_QUERIES], *scores[_QUERIES:])


@frozen
class HasLengths(Node):
    """An attention node with ports ``seq_len_q`` and ``seq_len_kv``."""

    indices = Indices(LENGTHS, selecting=LENGTHS[:1])

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        """The shape of the scores, (B, H, Sq, Skv)."""
        return (*tensors["q"].shape[:3], tensors["k"].shape[2])

    def boundary(self, tensors: Tensors) -> Edge:
        return Edge(clipped=functools.partial(self.clipped, tensors))

    def clipped(self, tensors: Tensors, given: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        """Lengths clipped to the number of tokens."""
        return clipped_lengths(self.scores(tensors), given)


@frozen
class HasBias(HasLengths):
    """An attention node that also has a port ``bias``, and a result ``dBias`` in the backward
    pass."""

    def key_heads(self, tensors: Mapping[str, Tensor]) -> int:
        """The fewest heads of k and v."""
        return min(tensors[port].shape[1] for port in ("k", "v"))

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        # Found on an H200 with cuDNN 9.19 by random calls 8 and 101, in float32 with a bias: where
        # heads share keys, half of engine 1's result for one query is wrong. The next choice,
        # engine 2, has never run on one query.
        _, heads, queries, _ = self.scores(tensors)
        grouped = self.key_heads(tensors) < heads
        wrong = (1, 2) if "O" in tensors and queries == 1 and grouped else ()
        return super().engines(tensors, graph)._replace(wrong=wrong)

    def boundary(self, tensors: Tensors) -> Edge:
        advice = functools.partial(self.advice, tensors)
        return super().boundary(tensors)._replace(shapes=self.stretched(tensors), advice=advice)

    def check_bias(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError if the bias does not broadcast to the scores."""
        bias = inputs["bias"].shape if "bias" in inputs else (1, 1, 1, 1)
        scores = self.scores(inputs)
        if len(bias) != 4 or any(a not in (1, b) for a, b in zip(bias, scores, strict=True)):
            raise GraphError(
                "'bias' does not fit the scores",
                expected=f"{list(scores)}, or 1 in any dimension",
                got=str(list(bias)),
            )

    def layout(self, tensors: Tensors, order: Sequence[int]) -> Seen:
        return Seen({port: self.views(port, tensors) for port in tensors})

    def views(self, port: str, tensors: Tensors) -> Sequence[View]:
        """A bias broadcast over queries, declared in full with a stride of 0."""
        if port != "bias":
            return ()
        bias, scores = tensors["bias"], self.scores(tensors)
        if bias.shape[_QUERIES] == scores[_QUERIES]:
            return ()
        strides = packed_strides(bias.shape, bias.order or tuple(range(len(bias.shape))))
        strides[_QUERIES] = 0
        dims = (*bias.shape[:_QUERIES], scores[_QUERIES], bias.shape[_KEYS])
        return (View(port, dims, tuple(strides)),)

    def stretched(self, tensors: Tensors) -> Mapping[str, Shape]:
        """A bias broadcast over keys, copied along them; for dBias, both in full."""
        if "bias" not in tensors:
            return {}
        bias, scores = tensors["bias"].shape, self.scores(tensors)
        found = {"bias": (*bias[:_KEYS], scores[_KEYS])}
        if "dBias" in tensors:
            found = dict.fromkeys(("bias", "dBias"), whole(bias, scores))
        return {port: shape for port, shape in found.items() if tensors[port].shape != shape}

    def advice(self, tensors: Tensors) -> str:
        """On a bias, which has cheaper forms."""
        if "bias" not in tensors:
            return ""
        wide = tensors["q" if "q" in tensors else "qkv"].dtype == "float32"  # see wrong_dtypes
        said = [
            f"cuDNN reads the whole bias ({tensors['bias'].nbytes:,} bytes, again for each head "
            "and batch element that shares it) and computes all scores; "
            f"is_causal{'' if wide else ', query_seq_lengths, key_value_seq_lengths'} and "
            "local_window_size cost nothing instead, and skip hidden tiles of keys"
        ]
        for port, shape in self.stretched(tensors).items():
            if port in ("bias", "dBias"):
                own, nbytes = tensors[port], dataclasses.replace(tensors[port], shape=shape).nbytes
                xla, cudnn = ("first broadcasts the bias to", "reads")
                if port == "dBias":
                    xla, cudnn = ("afterwards sums dBias of", "writes")
                said.append(
                    f"for cuDNN, XLA {xla} {list(shape)}, {nbytes:,} bytes in memory, because "
                    f"cuDNN {cudnn} {list(own.shape)}, which is broadcast over queries or keys, "
                    "incorrectly"
                )
        return "; ".join(said)

    def support(self, tensors: Tensors, graph: GraphSpec) -> Reason | None:
        if "bias" not in tensors:
            return super().support(tensors, graph)
        bias = tensors["bias"]
        if "O" in tensors and bias.order:  # random graph 704, on an H200
            *_, fastest = (axis for axis in bias.order if bias.shape[axis] > 1 or axis == _KEYS)
            if fastest != _KEYS:
                return Reason(
                    "cuDNN misreads a bias whose fastest dimension in memory is not its keys"
                )
        wanted = whole(bias.shape, self.scores(tensors))
        instead = f"broadcast it to {list(wanted)} for one plan, or use separate plans"
        if "dBias" in tensors and tensors["dBias"].shape != wanted:
            return Reason(
                f"cuDNN writes dBias of {list(tensors['dBias'].shape)}, which is broadcast over "
                f"queries or keys, out of bounds, and an operation in its plan reads it: {instead}"
            )
        read = [name for call in graph.calls for _, name in call.inputs].count(bias.name)
        alone = bias.name in graph.inputs and read == 1
        if bias.shape == wanted or (alone and bias.shape[_KEYS] == wanted[_KEYS]):
            return super().support(tensors, graph)
        return Reason(
            f"cuDNN misreads a bias of {list(bias.shape)}, which is broadcast over queries or "
            "keys, unless it is an operand that no other operation in its plan computes or reads: "
            f"{instead}"
        )
