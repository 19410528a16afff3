"""A bias of attention of which queries, or keys, share elements: what cuDNN is shown of it.

Measured on an H200 with cuDNN 9.19: told of a dimension of one element, the backward reads a bias
(B, H, 1, Skv) wrongly (gradients are off by as much as they are, in silence), the forward one of
(B, H, 1, 1), and dBias of such a shape is written beyond its end. What is told of all dimensions in
full is right, also where the queries' have a stride of 0. So cuDNN sees a bias that queries share
as one of all of them, without a copy; keys that share an element get one each before the call; and
a gradient is computed of all scores, and summed behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .._core.errors import GraphError
from .._core.graph.dims import Shape, packed_strides
from .._core.graph.node import Node, View, frozen

if TYPE_CHECKING:
    from .._core.graph.node import Tensors
    from .._core.graph.spec import GraphSpec, Tensor

_QUERIES, _KEYS = 2, 3  # dimensions of scores (B, H, Sq, Skv)


def whole(bias: Shape, scores: Shape) -> Shape:
    """The shape of a bias with an element for each query and key."""
    return (*bias[:_QUERIES], *scores[_QUERIES:])


@frozen
class Biased(Node):
    """A node of attention with a port ``bias``, in the backward with a result ``dBias``."""

    def scores(self, tensors: Mapping[str, Tensor]) -> Shape:
        """The shape of the scores, (B, H, Sq, Skv)."""
        raise NotImplementedError

    def check_bias(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError for a bias that does not broadcast to the scores."""
        bias = inputs["bias"].shape if "bias" in inputs else (1, 1, 1, 1)
        scores = self.scores(inputs)
        if len(bias) != 4 or any(a not in (1, b) for a, b in zip(bias, scores, strict=True)):
            raise GraphError(
                "'bias' does not fit the scores",
                expected=f"{list(scores)}, or 1 in any of these",
                got=str(list(bias)),
            )

    def views(self, port: str, tensors: Tensors) -> Sequence[View]:
        """A bias that queries share as one of all of them, with a stride of 0."""
        if port != "bias":
            return ()
        bias, scores = tensors["bias"], self.scores(tensors)
        if bias.shape[_QUERIES] == scores[_QUERIES]:
            return ()
        strides = packed_strides(bias.shape, bias.order or tuple(range(len(bias.shape))))
        strides[_QUERIES] = 0
        dims = (*bias.shape[:_QUERIES], scores[_QUERIES], bias.shape[_KEYS])
        return (View(port, dims, tuple(strides)),)

    def broadcast_to(self, tensors: Tensors) -> Mapping[str, Shape]:
        """A bias whose elements keys share, with one for each of them; dBias of all scores, and
        beside it the bias."""
        if "bias" not in tensors:
            return {}
        bias, scores = tensors["bias"].shape, self.scores(tensors)
        found = {"bias": (*bias[:_KEYS], scores[_KEYS])}
        if "dBias" in tensors:
            found = dict.fromkeys(("bias", "dBias"), whole(bias, scores))
        return {port: shape for port, shape in found.items() if tensors[port].shape != shape}

    def advice(self, tensors: Tensors) -> str:
        if "bias" not in tensors:
            return ""
        wide = tensors["q" if "q" in tensors else "qkv"].dtype == "float32"  # see wrong_dtypes
        said = [
            f"the bias is read in full ({tensors['bias'].nbytes:,} bytes, again for each head "
            "and example that shares it), and no score is left out for it; a mask that is "
            + (
                "causal or a window costs nothing as is_causal and local_window_size"
                if wide
                else "causal, a window, or by lengths costs nothing as is_causal, "
                "local_window_size, query_seq_lengths and key_value_seq_lengths"
            )
            + ", and tiles of keys that these hide are passed over"
        ]
        for port, shape in self.broadcast_to(tensors).items():
            if port in ("bias", "dBias"):
                own, nbytes = tensors[port], dataclasses.replace(tensors[port], shape=shape).nbytes
                xla, cudnn = ("first broadcasts the bias to", "reads")
                if port == "dBias":
                    xla, cudnn = ("adds up", "writes")
                said.append(
                    f"where cuDNN runs it, XLA {xla} {list(shape)}, {nbytes:,} bytes in memory: "
                    f"cuDNN {cudnn} {list(own.shape)}, where queries or keys share elements, "
                    "wrongly"
                )
        return "; ".join(said)

    def refuses(self, tensors: Tensors, graph: GraphSpec) -> str | None:
        return self._refused_bias(tensors, graph) or super().refuses(tensors, graph)

    def _refused_bias(self, tensors: Tensors, graph: GraphSpec) -> str | None:
        if "bias" not in tensors:
            return None
        bias = tensors["bias"]
        wanted = whole(bias.shape, self.scores(tensors))
        instead = f"broadcast it to {list(wanted)} for one plan, or each is a plan of its own"
        if "dBias" in tensors and tensors["dBias"].shape != wanted:
            return (
                f"cuDNN writes dBias of {list(tensors['dBias'].shape)}, where queries or keys "
                f"share elements, beyond its end, and something in its plan reads it: {instead}"
            )
        read = [name for call in graph.calls for _, name in call.inputs].count(bias.name)
        alone = bias.name in graph.inputs and read == 1
        if bias.shape == wanted or (alone and bias.shape[_KEYS] == wanted[_KEYS]):
            return None
        return (
            f"cuDNN reads a bias of {list(bias.shape)}, where queries or keys share elements, "
            "wrongly but as an operand that nothing else in its plan makes or reads: "
            f"{instead}"
        )
