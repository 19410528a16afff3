"""Scaled dot-product attention: cuDNN's flash attention and its backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from .._core.errors import GraphError
from .._core.graph.builder import register
from .._core.graph.dims import Shape
from .._core.graph.node import Example, Node
from .attention_base import BOTTOM_RIGHT, Attending

if TYPE_CHECKING:
    from .._core.graph.node import Values
    from .._core.graph.spec import Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation
    from .score_mod import ScoreMod


@register
@dataclass(frozen=True)
class SdpaBackward(Attending):
    """Gradients of sdpa.

    With ``P = exp(scores - stats)`` and ``dP = dO v^T``: ``dS = P * (dP - rowsum(dO * o))``,
    ``dQ = attn_scale * dS k``, ``dK = attn_scale * dS^T q``, ``dV = P^T dO``, and dBias the sum of
    dS over what bias broadcasts. Heads of k and v get the sum over the heads of q that they serve.

    Args:
        q: (B, H, Sq, D).
        k: (B, N, Skv, D).
        v: (B, N, Skv, E).
        o: the forward's O, (B, H, Sq, E).
        dO: the gradient by O.
        stats: the forward's Stats, (B, H, Sq, 1) in float32.
        bias: as in the forward.
        seq_len_q: as in the forward.
        seq_len_kv: as in the forward.
        score_mod_operands: as in the forward.
        attn_scale: as in the forward.
        diagonal_alignment: as in the forward.
        diagonal_band_left_bound: as in the forward.
        diagonal_band_right_bound: as in the forward.
        score_mod: as in the forward.
        dBias: whether that is computed, too.
        use_deterministic_algorithm: an engine whose sums have one order.

    Returns: dQ, dK, dV, and where asked for dBias, of the dtypes of q, k, v and bias. Source: cuDNN
    documentation, "Scaled Dot Product Attention Backward".
    """

    method = "sdpa_backward"
    dims = (
        "q: b h s d, k: b n t d, v: b n t e, o: b h s e, dO: b h s e, stats: *l, ?bias: *m, "
        "?seq_len_q: *i, ?seq_len_kv: *j, ?*score_mod_operands: *o "
        "-> dQ: b h s d, dK: b n t d, dV: b n t e, dBias: *m"
    )
    deterministic = False
    examples = (
        Example(
            {
                "q": (2, 4, 128, 64),
                "k": (2, 2, 128, 64),
                "v": (2, 2, 128, 64),
                "o": (2, 4, 128, 64),
                "dO": (2, 4, 128, 64),
                "stats": (2, 4, 128, 1),
            },
            dtypes={"stats": "float32"},
            attributes={"attn_scale": 0.125},
            positive=("stats",),
        ),
    )

    dBias: bool = False
    use_deterministic_algorithm: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        names = self.ports.output_names
        return names if self.dBias else names[:-1]

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        if self.dBias and "bias" not in inputs:
            raise GraphError("dBias without a bias", fix="give the bias, or leave dBias out")
        return {
            name: (inputs[port].shape, inputs[port].dtype)
            for name, port in zip(self.results, ("q", "k", "v", "bias"), strict=False)
        }

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        found = self.attention(precision).backward(arrays)
        return tuple(found[port] for port in self.results)

    def linear_in(self, port: str) -> bool:
        return port == "dO"

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, dBias=False) if "dBias" in results else self

    def keywords(self) -> dict[str, Any]:
        attributes = super().keywords()
        return {name: value for name, value in attributes.items() if value is not False}

    def callbacks(self, mod: ScoreMod, tensors: Mapping[str, Any]) -> dict[str, Any]:
        from .score_mod_emission import Emission

        both = Emission.with_derivative(mod, tensors)
        return {"score_mod": both.forward, "score_mod_bprop": both.backward}

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        if not self.dBias:
            return super().emit(pygraph, tensors, common)
        bias = tensors["bias"]
        like = {"dim": bias.get_dim(), "stride": bias.get_stride()}
        made = pygraph.tensor(
            name=f"{common['name']}::dBias", data_type=bias.get_data_type(), **like
        )
        plain = dataclasses.replace(self, dBias=False)
        return (*Attending.emit(plain, pygraph, {**tensors, "dBias": made}, common), made)


@register
@dataclass(frozen=True)
class Sdpa(Attending):
    """Attention: ``O = softmax(attn_scale * q k^T + bias) v``, row by row.

    Query ``i`` sees the keys ``j`` with ``i - left < j <= i + right``, where positions count from
    the first query and key, or, with "BOTTOM_RIGHT", so that the last ones are equal; and with
    lengths those below its example's seq_len_kv. A query that sees none, or is not below seq_len_q,
    has O = 0 and Stats = -inf.

    Args:
        q: (B, H, Sq, D).
        k: (B, N, Skv, D); each head of it serves H / N neighbouring heads of q.
        v: (B, N, Skv, E).
        bias: added to the scaled scores, (B, H, Sq, Skv) with any of these 1; optional.
        seq_len_q: how many queries of each example there are, (B, 1, 1, 1) in int32; optional.
        seq_len_kv: how many keys; together with seq_len_q.
        score_mod_operands: a list of what score_mod reads, each of the scores' shape
            (B, H, Sq, Skv), with any of these 1; floats, or int32; optional.
        attn_scale: factor of the scores.
        diagonal_alignment: "TOP_LEFT" or "BOTTOM_RIGHT", or the member of
            ``cudnn.diagonal_alignment``.
        diagonal_band_left_bound: left, at least 1; None for all keys on that side.
        diagonal_band_right_bound: right, at least 0, which is causal attention; None for all.
        score_mod: ``f(score, b, h, q, kv, *score_mod_operands)``, a function in jnp of the scaled
            scores, which gives those that bias, band and lengths are applied to; see
            :func:`jax_cudnn.ops.dot_product_attention`.
        generate_stats: whether Stats is a result.

    Returns: O, (B, H, Sq, E) of q's dtype, and Stats, (B, H, Sq, 1) in float32: the natural
    logarithm of each row's sum of exponentials of what softmax gets. Source: cuDNN documentation,
    "Scaled Dot Product Attention Forward".
    """

    method = "sdpa"
    dims = (
        "q: b h s d, k: b n t d, v: b n t e, ?bias: *m, ?seq_len_q: *i, ?seq_len_kv: *j, "
        "?*score_mod_operands: *o "
        "-> O: b h s e, Stats: *l"
    )
    examples = (
        Example(
            {"q": (2, 4, 128, 64), "k": (2, 2, 128, 64), "v": (2, 2, 128, 64)},
            attributes={"attn_scale": 0.125},
        ),
        Example(
            {"q": (2, 4, 128, 64), "k": (2, 4, 192, 64), "v": (2, 4, 192, 64)},
            "float16",
            attributes={
                "attn_scale": 0.125,
                "diagonal_alignment": BOTTOM_RIGHT,
                "diagonal_band_left_bound": 64,
                "diagonal_band_right_bound": 0,
                "generate_stats": False,
            },
        ),
        Example(
            {
                "q": (2, 4, 128, 64),
                "k": (2, 4, 128, 64),
                "v": (2, 4, 128, 64),
                "bias": (2, 1, 128, 128),
            },
            attributes={"attn_scale": 0.125},
        ),
    )

    generate_stats: bool = True

    @property
    def results(self) -> tuple[str, ...]:
        return self.ports.output_names if self.generate_stats else self.ports.output_names[:1]

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, generate_stats=False) if "Stats" in results else self

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        q, v = inputs["q"], inputs["v"]
        found = {
            "O": ((*q.shape[:3], v.shape[3]), q.dtype),
            "Stats": ((*q.shape[:3], 1), "float32"),
        }
        return {port: found[port] for port in self.results}

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        return self.attention(precision).forward(arrays)[: len(self.results)]

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        if "Stats" not in outputs:
            return super().jvp(g, tangents, inputs, outputs)
        from .attention_tangent import AttentionTangent  # importing jax_cudnn does without

        node = AttentionTangent(self, tuple(tangents), tuple(outputs), tuple(inputs))
        along = {node.given[port]: tangent for port, tangent in tangents.items()}
        made = g.apply(node, **inputs, **outputs, **along)
        return dict(zip(node.outs, made, strict=True))
