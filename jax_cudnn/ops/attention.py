"""Scaled dot-product attention: cuDNN's flash attention and its backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax

from .._core.errors import GraphError
from .._core.graph.builder import register
from .._core.graph.dims import Shape, packed_strides
from .._core.graph.example import Example
from .._core.graph.node import Node, OtherForm, frozen
from . import attention_extras as extras
from .attention_base import BOTTOM_RIGHT, Attending
from .ordered import Ordered

if TYPE_CHECKING:
    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import GraphSpec, Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation
    from .score_mod import ScoreMod


_OPTIONAL = {"dBias": "bias", "dSink_token": "sink_token"}
# Hopper's engine with the knobs by which dQ is added up in one order, in linear workspace: STAGES.
_ORDERED = (
    6,
    {"TILE_M": 2, "TILE_N": 1, "KERNEL_CFG": 2, "STREAM_K": 0, "TILE_CGA_M": 0, "STAGES": 4},
    92500,
)


@register
@frozen
class SdpaBackward(Ordered, Attending):
    """Gradients of sdpa.

    With ``P = exp(scores - stats)`` and ``dP = dO v^T``: ``dS = P * (dP - rowsum(dO * o))``,
    ``dQ = attn_scale * dS k``, ``dK = attn_scale * dS^T q``, ``dV = P^T dO``, and dBias the sum of
    dS over what bias broadcasts. Heads of k and v get the sum over the heads of q that they serve.
    With dropout, P in dV and dP are 0 where a weight was dropped, and else divided by one minus
    dropout_probability. dSink_token is minus the sum of
    ``exp(sink_token - stats) * rowsum(dO * o)``.

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
        seed: as in the forward: then the mask is the same.
        offset: as in the forward.
        dropout_mask: as in the forward.
        sink_token: as in the forward.
        block_mask: as in the forward; then XLA runs it.
        score_mod_operands: as in the forward.
        attn_scale: as in the forward.
        diagonal_alignment: as in the forward.
        diagonal_band_left_bound: as in the forward.
        diagonal_band_right_bound: as in the forward.
        dropout_probability: as in the forward.
        use_alibi_mask: as in the forward.
        score_mod: as in the forward.
        dBias: whether that is computed, too.
        dSink_token: whether that is; cuDNN adds it up in no fixed order.
        use_deterministic_algorithm: sums have one order. Set by ``Options(deterministic=True)``.
            On Hopper and older it takes ``2 B H Sq Skv`` bytes of workspace (lengths rounded up to
            64); where that is too much, cuDNN 9.25 and newer have on Hopper a slower engine whose
            workspace is linear in the lengths. On Blackwell it has little workspace, and no engine
            beside dropout, ALiBi or dBias.

    Returns: dQ, dK, dV, and where asked for dBias and dSink_token, of the dtypes of q, k, v, bias
    and sink_token. Source: cuDNN documentation, "Scaled Dot Product Attention Backward".
    """

    method = "sdpa_backward"
    dims = (
        "q: b h s d, k: b n t d, v: b n t e, o: b h s e, dO: b h s e, stats: *l, ?bias: *m, "
        "?seq_len_q: *i, ?seq_len_kv: *j, ?seed: *w, ?offset: *x, ?dropout_mask: *y, "
        "?sink_token: *z, ?block_mask: *a, ?*score_mod_operands: *s "
        "-> dQ: b h s d, dK: b n t d, dV: b n t e, dBias: *m, dSink_token: *z"
    )
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
    dSink_token: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        left_out = [name for name in _OPTIONAL if not getattr(self, name)]
        return tuple(name for name in self.ports.output_names if name not in left_out)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        for name, port in _OPTIONAL.items():
            if getattr(self, name) and port not in inputs:
                article = "a " * (port == "bias")
                raise GraphError(
                    f"{name} without {article}{port}", fix=f"give the {port}, or leave {name} out"
                )
        of = {"dQ": "q", "dK": "k", "dV": "v", **_OPTIONAL}
        return {name: (inputs[of[name]].shape, inputs[of[name]].dtype) for name in self.results}

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        if "block_mask" in tensors:
            return "cuDNN's backward of attention takes no block mask"
        if self.score_mod is not None:
            if self.dBias:
                return "cuDNN's dBias is wrong beside a score_mod"
            if reason := self.score_mod.refused_backward(self.scores(tensors)):
                return reason
        if self.dSink_token and graph.options.deterministic:
            return "cuDNN adds up dSink_token in no fixed order"
        return super().refuses(tensors, graph)

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        found = self.attention(precision).backward(arrays)
        return tuple(found[port] for port in self.results)

    def linear_in(self, port: str) -> bool:
        return port == "dO"

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        if not all(map(self.linear_in, tangents)):
            inputs = extras.with_mask(self, g, inputs)
        return super().jvp(g, tangents, inputs, outputs)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor]:
        return super().transpose(g, cotangents, extras.with_mask(self, g, inputs), tensors)

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, **{n: False for n in _OPTIONAL if n in results})

    def instead(self) -> OtherForm | None:
        if not self.use_deterministic_algorithm or self.dBias:
            return None
        return OtherForm(dataclasses.replace(self, use_deterministic_algorithm=False), *_ORDERED)

    def callbacks(self, mod: ScoreMod, tensors: Mapping[str, Any]) -> dict[str, Any]:
        from .score_mod_emission import Emission

        both = Emission.with_derivative(mod, tensors)
        return {"score_mod": both.forward, "score_mod_bprop": both.backward}

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        made = {}
        for name, port in _OPTIONAL.items():
            if getattr(self, name):
                like = tensors[port]
                dims = like.get_dim()
                made[name] = pygraph.tensor(
                    name=f"{common['name']}::{name}",
                    data_type=like.get_data_type(),
                    dim=dims,
                    stride=packed_strides(tuple(dims), tuple(range(len(dims)))),
                )
        plain = dataclasses.replace(self, dBias=False, dSink_token=False)
        return (*Attending.emit(plain, pygraph, {**tensors, **made}, common), *made.values())


@register
@frozen
class Sdpa(Attending):
    """Attention: ``O = softmax(attn_scale * q k^T + bias) v``, row by row.

    Query ``i`` sees the keys ``j`` with ``i - left < j <= i + right``, where positions count from
    the first query and key, or, with "BOTTOM_RIGHT", so that the last ones are equal; and with
    lengths those below its example's seq_len_kv, and with a block_mask those of its tiles. A query
    that sees none, or is not below seq_len_q, has O = 0 and Stats = -inf (with a sink, which it
    sees, Stats is that; not those beyond seq_len_q).

    Args:
        q: (B, H, Sq, D).
        k: (B, N, Skv, D); each head of it serves H / N neighbouring heads of q.
        v: (B, N, Skv, E).
        bias: added to the scaled scores, (B, H, Sq, Skv) with any of these 1; optional.
        seq_len_q: how many queries of each example there are, (B, 1, 1, 1) in int32; optional.
        seq_len_kv: how many keys; together with seq_len_q. cuDNN leaves results of an example
            unwritten where this is 0: give it no queries and one key instead, for zeros. What is
            behind the lengths must be finite.
        seed: of dropout, (1, 1, 1, 2) in uint32: the low and the high word of a 64-bit integer.
        offset: likewise, where in the stream of random numbers to begin; together with seed. They
            are pygraph's ``dropout=(dropout_probability, seed, offset)``.
        dropout_mask: in place of these, what each weight is multiplied by, (B, H, Sq, Skv) in
            float32, as RNG_DUMP is; XLA runs that.
        sink_token: a logit for each head that is in the sum of softmax, and has no value:
            (1, H, 1, 1) in float32.
        block_mask: which tiles of 128 queries see which tiles of 128 keys, in bits:
            (B, H, ceil(Sq / 128), ceil(ceil(Skv / 128) / 8)) in uint8, bit ``j`` of byte ``i`` for
            tile ``8 i + j``. cuDNN has an engine for Blackwell, from 9.26 on.
        score_mod_operands: a list of what score_mod reads, each of the scores' shape
            (B, H, Sq, Skv), with any of these 1; floats, or int32; optional.
        attn_scale: factor of the scores.
        diagonal_alignment: "TOP_LEFT" or "BOTTOM_RIGHT", or the member of
            ``cudnn.diagonal_alignment``.
        diagonal_band_left_bound: left, at least 1; None for all keys on that side.
        diagonal_band_right_bound: right, at least 0, which is causal attention; None for all.
        dropout_probability: how probably a weight is dropped, between 0 and 1; the others are
            divided by one minus that.
        use_alibi_mask: add ``slope * (j - i)`` to the scores, a slope for each head (Press et al.
            2022, arXiv:2108.12409); with diagonal_band_right_bound=0 alone.
        score_mod: ``f(score, b, h, q, kv, *score_mod_operands)``, a function in jnp of the scaled
            scores, which gives those that bias, band and lengths are applied to; see
            :func:`jax_cudnn.ops.dot_product_attention`.
        generate_stats: whether Stats is a result.
        rng_dump: whether RNG_DUMP is.

    Returns: O, (B, H, Sq, E) of q's dtype, and Stats, (B, H, Sq, 1) in float32: the natural
    logarithm of each row's sum of exponentials of what softmax gets. Where asked for RNG_DUMP,
    (B, H, Sq, Skv) in float32: 1 where dropout keeps a weight, else 0. Source: cuDNN documentation,
    "Scaled Dot Product Attention Forward".
    """

    method = "sdpa"
    dims = (
        "q: b h s d, k: b n t d, v: b n t e, ?bias: *m, ?seq_len_q: *i, ?seq_len_kv: *j, "
        "?seed: *w, ?offset: *x, ?dropout_mask: *y, ?sink_token: *z, ?block_mask: *a, "
        "?*score_mod_operands: *s -> O: b h s e, Stats: *l, RNG_DUMP: *r"
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
    rng_dump: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        there = {"O": True, "Stats": self.generate_stats, "RNG_DUMP": self.rng_dump}
        return tuple(name for name in self.ports.output_names if there[name])

    def without(self, results: Collection[str]) -> Node:
        node = dataclasses.replace(self, rng_dump=self.rng_dump and "RNG_DUMP" not in results)
        if "Stats" in results and self.dropout_probability is None:
            # With dropout the engine stays the one that writes it, and with it the mask.
            node = dataclasses.replace(node, generate_stats=False)
        return node

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        if self.rng_dump and "seed" not in inputs:
            raise GraphError("rng_dump without dropout", fix="give dropout_probability and a seed")
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        found = {
            "O": ((*q.shape[:3], v.shape[3]), q.dtype),
            "Stats": ((*q.shape[:3], 1), "float32"),
            "RNG_DUMP": ((*q.shape[:3], k.shape[2]), "float32"),
        }
        return {port: found[port] for port in self.results}

    def backward(self, wanted: Collection[str]) -> Node:
        """The node of the gradients, of bias and sink_token where they are wanted."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Attending)}
        return SdpaBackward(**shared, dBias="bias" in wanted, dSink_token="sink_token" in wanted)

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        attention = self.attention(precision)
        results = attention.forward(arrays)[: 1 + self.generate_stats]
        return (*results, attention.mask(arrays)) if self.rng_dump else results

    def needs(self, ports: Collection[str]) -> str:
        return extras.NEEDS_OF_TILES if "block_mask" in ports else ""

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        import cudnn

        if "block_mask" in tensors and cudnn.backend_version() < extras.CUDNN_OF_TILES:
            raise cudnn.cudnnGraphNotSupportedError(extras.NEEDS_OF_TILES)
        plain = dataclasses.replace(self, rng_dump=False)
        if not self.rng_dump:
            return Attending.emit(plain, pygraph, tensors, common)

        (b, h, s, _), t = tensors["q"].get_dim(), tensors["k"].get_dim()[2]
        made = pygraph.tensor(
            name=f"{common['name']}::RNG_DUMP",
            data_type=cudnn.data_type.FLOAT,
            dim=[b, h, s, t],
            stride=[h * s * t, s * t, t, 1],
        )
        return (*Attending.emit(plain, pygraph, {**tensors, "rng_dump": made}, common), made)

    def keywords(self) -> dict[str, Any]:
        attributes = super().keywords()
        return (
            attributes
            if self.rng_dump
            else {k: attributes[k] for k in attributes if k != "rng_dump"}
        )

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        inputs = extras.with_mask(self, g, inputs)
        # Of eight bits O is too coarse for the backward, which subtracts its products with dO.
        if "Stats" not in outputs or outputs["O"].dtype.itemsize == 1:
            return super().jvp(g, tangents, inputs, outputs)
        from .attention_tangent import AttentionTangent  # importing jax_cudnn does without

        outputs = {port: x for port, x in outputs.items() if port != "RNG_DUMP"}  # is constant
        node = AttentionTangent(self, tuple(tangents), tuple(outputs), tuple(inputs))
        along = {node.given[port]: tangent for port, tangent in tangents.items()}
        made = g.apply(node, **inputs, **outputs, **along)
        return dict(zip(node.outs, made, strict=True))
