"""Scaled dot-product attention: cuDNN's flash attention and its backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import jax

from ..._core.errors import GraphError
from ..._core.graph import by_reference
from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.layout import packed_strides
from ..._core.graph.node import Node, frozen
from ..._core.graph.planned import Engines, Example, OtherForm
from ..._core.reasons import Kind, Reason
from ..._core.rules import Derivation, GraphSpec, Handles, Tensor, Tensors, Values
from . import extras
from .base import BOTTOM_RIGHT, Deterministic, SdpaBase
from .tangent import gradients, tangents_of

_OPTIONAL = {"dBias": "bias", "dSink_token": "sink_token"}
_EXTREMES = "score_max", "score_sum_exp"
_REQUESTED = {"RNG_DUMP": "rng_dump", **dict(zip(_EXTREMES, _EXTREMES, strict=True))}
# Hopper's engine, with the knobs (STAGES) that sum dQ in a fixed order with linear workspace.
_ORDERED = (
    6,
    {"TILE_M": 2, "TILE_N": 1, "KERNEL_CFG": 2, "STREAM_K": 0, "TILE_CGA_M": 0, "STAGES": 4},
    92500,
)


@register
@frozen
class SdpaBackward(Deterministic, SdpaBase):
    """Gradients of sdpa.

    With ``P = exp(scores - stats)`` and ``dP = dO v^T``: ``dS = P * (dP - rowsum(dO * o))``,
    ``dQ = attn_scale * dS k``, ``dK = attn_scale * dS^T q``, ``dV = P^T dO``, and dBias is dS
    summed over the broadcast dimensions of bias. dK and dV are summed over the heads of q that
    share a head of k and v. With dropout, P in dV and dP are 0 where a weight was dropped, and
    otherwise divided by ``1 - dropout_probability``. dSink_token is minus the sum of
    ``exp(sink_token - stats) * rowsum(dO * o)``.

    Args:
        q: (B, H, Sq, D).
        k: (B, N, Skv, D).
        v: (B, M, Skv, E); M may differ from N, and divides H.
        o: O from ``sdpa``, (B, H, Sq, E).
        dO: the gradient with respect to O.
        stats: Stats from ``sdpa``, (B, H, Sq, 1) in float32.
        bias, seq_len_q, seq_len_kv, dropout_mask, sink_token: as in ``sdpa``.
        seed, offset: as in ``sdpa``: the dropout mask is then the same.
        block_mask: as in ``sdpa``; the backward pass then runs in XLA.
        score_mod_operands, attn_scale, diagonal_alignment: as in ``sdpa``.
        diagonal_band_left_bound, diagonal_band_right_bound: as in ``sdpa``.
        dropout_probability, use_alibi_mask, score_mod: as in ``sdpa``.
        dBias: whether to compute dBias.
        dSink_token: whether to compute dSink_token: cuDNN in no fixed order; with dropout XLA.
        use_deterministic_algorithm: sum in a fixed order. Set by ``Options(deterministic=True)``.
            On Hopper and older it takes ``2 B H Sq Skv`` bytes of workspace (lengths rounded up to
            64); if that is too much, cuDNN 9.25 and newer have a slower engine on Hopper with
            workspace linear in the lengths. On Blackwell the workspace is small, and no engine
            supports dropout, ALiBi or dBias.

    Returns: dQ, dK, dV, and if requested dBias and dSink_token, of the dtypes of q, k, v, bias and
    sink_token. Source: cuDNN documentation, "Scaled Dot Product Attention Backward".
    """

    method = "sdpa_backward"
    ports = Dims.parse(
        "q: b h s d, k: b n t d, v: b c t e, o: b h s e, dO: b h s e, stats: *l, ?bias: *m, "
        "?seq_len_q: *i, ?seq_len_kv: *j, ?seed: *w, ?offset: *x, ?dropout_mask: *y, "
        "?sink_token: *z, ?block_mask: *a, ?*score_mod_operands: *s "
        "-> dQ: b h s d, dK: b n t d, dV: b c t e, dBias: *m, dSink_token: *z"
    )
    examples = (
        Example.of(
            "q: 2 4 128 64, k: 2 2 128 64, v: 2 2 128 64, o: 2 4 128 64, dO: 2 4 128 64, "
            "stats: float32 2 4 128 1",
            positive=("stats",),
            attn_scale=0.125,
        ),
    )

    dBias: bool = False
    dSink_token: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        left_out = [name for name in _OPTIONAL if not getattr(self, name)]
        return tuple(name for name in self.ports.output_names if name not in left_out)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.check(inputs)
        for name, port in _OPTIONAL.items():
            if getattr(self, name) and port not in inputs:
                article = "a " * (port == "bias")
                raise GraphError(
                    f"{name} without {article}{port}", fix=f"pass {port}, or omit {name}"
                )
        of = {"dQ": "q", "dK": "k", "dV": "v", **_OPTIONAL}
        return {name: (inputs[of[name]].shape, inputs[of[name]].dtype) for name in self.results}

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if "block_mask" in tensors:
            return Reason("cuDNN's attention backward does not support a block mask")
        if math.prod(self.scores(tensors)[:3]) == 1:
            # Planning crashes the process (SIGSEGV in cuDNN 9.28).
            return Reason("cuDNN's planner fails with one query of one head and batch element")
        if self.scores(tensors)[2] == 1 and "seq_len_q" in tensors:
            return Reason("with lengths, cuDNN leaves gradients of one query unwritten")
        if self.score_mod is not None:
            if self.dBias:
                return Reason("cuDNN computes a wrong dBias together with a score_mod")
            from .score_mod.emission import refused_backward  # only for planning

            if reason := refused_backward(self.score_mod, self.scores(tensors)):
                return reason
        if self.dSink_token and graph.options.deterministic:
            return Reason("cuDNN sums dSink_token in no fixed order")
        if self.dSink_token and self.dropout_probability is not None:
            return Reason("cuDNN computes a wrong dSink_token together with dropout")
        return super().support(tensors, graph)

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        found = self.attention(precision).backward(arrays)
        return tuple(found[port] for port in self.results)

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {"dO"}

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        if not self.linear_in(tangents.keys()):
            inputs = with_mask(self, g, inputs)
        return by_reference.jvp(self, g, tangents, inputs, outputs)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        inputs = with_mask(self, g, inputs)
        return by_reference.transpose(self, g, cotangents, inputs, tensors)

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, **{n: False for n in _OPTIONAL if n in results})

    @property
    def otherwise(self) -> OtherForm | None:
        if not self.use_deterministic_algorithm or self.dBias:
            return None
        return OtherForm(dataclasses.replace(self, use_deterministic_algorithm=False), *_ORDERED)

    def callbacks(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        from .score_mod.emission import Emission

        both = Emission.with_derivative(self.score_mod, tensors)
        return {"score_mod": both.forward, "score_mod_bprop": both.backward}

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        made = {}
        for name, port in _OPTIONAL.items():
            if getattr(self, name):
                like = tensors[port]
                made[name] = _declared(pygraph, common, name, like.get_dim(), like.get_data_type())
        plain = dataclasses.replace(self, dBias=False, dSink_token=False)
        return (*SdpaBase.emit(plain, pygraph, {**tensors, **made}, common), *made.values())


@register
@frozen
class Sdpa(SdpaBase):
    """Attention: ``O = softmax(attn_scale * q k^T + bias) v``, with softmax along each row.

    Query ``i`` sees the keys ``j`` with ``i - left < j <= i + right``. Positions are aligned at the
    first query and key or, with "BOTTOM_RIGHT", at the last ones. Lengths restrict this to keys
    below seq_len_kv, and a block_mask to keys in visible tiles. A query that sees no key, or is not
    below seq_len_q, has O = 0 and Stats = -inf. (Queries below seq_len_q also see the sink, if any;
    Stats is then the sink.)

    Args:
        q: (B, H, Sq, D).
        k: (B, N, Skv, D); each head serves H / N consecutive heads of q.
        v: (B, M, Skv, E); M may differ from N, and divides H.
        bias: added to the scaled scores, (B, H, Sq, Skv) or 1 in any dimension; optional.
        seq_len_q: the number of queries of each batch element, (B, 1, 1, 1) in int32; optional.
        seq_len_kv: the number of keys; requires seq_len_q. If it is 0, cuDNN leaves the results of
            that batch element unwritten: pass 0 queries and 1 key instead to get zeros. Values
            after the lengths must be finite.
        seed: of dropout, (1, 1, 1, 2) in uint32: the low and the high word of a 64-bit integer.
        offset: likewise, the start in the random stream; requires seed. pygraph's form is
            ``dropout=(dropout_probability, seed, offset)``.
        dropout_mask: instead of seed and offset, a factor for each weight as in RNG_DUMP,
            (B, H, Sq, Skv) in float32; runs in XLA.
        sink_token: one logit per head, (1, H, 1, 1) in float32, added to the sum of the softmax
            without a value.
        block_mask: which tiles of 128 queries see which tiles of 128 keys, packed in bits:
            (B, H, ceil(Sq / 128), ceil(ceil(Skv / 128) / 8)) in uint8, bit ``j`` of byte ``i`` for
            tile ``8 i + j``. Requires Blackwell and cuDNN 9.26.
        score_mod_operands: the operands of score_mod, a list of arrays of the scores' shape
            (B, H, Sq, Skv), or 1 in any dimension; floats or int32; optional.
        attn_scale: factor of the scores.
        diagonal_alignment: "TOP_LEFT" or "BOTTOM_RIGHT", or the member of
            ``cudnn.diagonal_alignment``.
        diagonal_band_left_bound: left, at least 1; None for no bound.
        diagonal_band_right_bound: right, at least 0 (0 is causal attention); None for no bound.
        dropout_probability: the probability of dropping a weight, between 0 and 1; the remaining
            weights are divided by ``1 - dropout_probability``.
        use_alibi_mask: add ``slope * (j - i)`` to the scores, with one slope per head (Press et al.
            2022, arXiv:2108.12409); requires diagonal_band_right_bound=0.
        score_mod: ``f(score, b, h, q, kv, *score_mod_operands)``, a jnp function of the scaled
            scores, applied before bias, band and lengths; see
            :func:`jax_cudnn.ops.dot_product_attention`.
        generate_stats: whether to return Stats.
        rng_dump: whether to return RNG_DUMP.
        score_max: whether to return score_max.
        score_sum_exp: whether to return score_sum_exp.

    Returns: O, (B, H, Sq, E) of q's dtype; Stats, (B, H, Sq, 1) in float32, the natural log-sum-exp
    of each row of the softmax's input; if requested RNG_DUMP, (B, H, Sq, Skv) in float32: 1 where
    dropout keeps a weight, else 0; score_max, the largest element of each row (and its sink), and
    score_sum_exp, the sum of ``exp(element - score_max)``, like Stats, -inf and 0 for a row that
    sees no key; XLA computes their derivatives. Source: cuDNN documentation, "Scaled Dot Product
    Attention Forward".
    """

    method = "sdpa"
    ports = Dims.parse(
        "q: b h s d, k: b n t d, v: b c t e, ?bias: *m, ?seq_len_q: *i, ?seq_len_kv: *j, "
        "?seed: *w, ?offset: *x, ?dropout_mask: *y, ?sink_token: *z, ?block_mask: *a, "
        "?*score_mod_operands: *s "
        "-> O: b h s e, Stats: *l, RNG_DUMP: *r, score_max: *l, score_sum_exp: *l"
    )
    examples = (
        Example.of("q: 2 4 128 64, k: 2 2 128 64, v: 2 2 128 64", attn_scale=0.125),
        Example.of(
            "q: 2 4 128 64, k: 2 4 192 64, v: 2 4 192 64",
            "float16",
            attn_scale=0.125,
            diagonal_alignment=BOTTOM_RIGHT,
            diagonal_band_left_bound=64,
            diagonal_band_right_bound=0,
            generate_stats=False,
        ),
        Example.of(
            "q: 2 4 128 64, k: 2 4 128 64, v: 2 4 128 64, bias: 2 1 128 128", attn_scale=0.125
        ),
    )

    generate_stats: bool = True
    rng_dump: bool = False
    score_max: bool = False
    score_sum_exp: bool = False
    gradients = gradients

    @property
    def results(self) -> tuple[str, ...]:
        there = {"Stats": self.generate_stats, **self._requested}
        return tuple(name for name in self.ports.output_names if there.get(name, True))

    @property
    def _requested(self) -> dict[str, bool]:
        return {name: getattr(self, attribute) for name, attribute in _REQUESTED.items()}

    def without(self, results: Collection[str]) -> Node:
        unused = {_REQUESTED[name]: False for name in results if name in _REQUESTED}
        node = dataclasses.replace(self, **unused)
        if "Stats" in results and self.dropout_probability is None:
            # With dropout the engine must stay the one that writes Stats, to keep its mask.
            node = dataclasses.replace(node, generate_stats=False)
        return node

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.check(inputs)
        if self.rng_dump and "seed" not in inputs:
            raise GraphError(
                "rng_dump without dropout", fix="pass dropout_probability, seed and offset"
            )
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        found = {
            "O": ((*q.shape[:3], v.shape[3]), q.dtype),
            **dict.fromkeys(("Stats", *_EXTREMES), ((*q.shape[:3], 1), "float32")),
            "RNG_DUMP": ((*q.shape[:3], k.shape[2]), "float32"),
        }
        return {port: found[port] for port in self.results}

    def backward(self, wanted: Collection[str]) -> Node:
        """The node that computes the gradients, optionally of bias and sink_token."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(SdpaBase)}
        return SdpaBackward(**shared, dBias="bias" in wanted, dSink_token="sink_token" in wanted)

    def xla(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...] | None:
        attention = self.attention(precision)
        if any(self._requested.values()) or not attention.sees_some(arrays):
            return None
        plain = dataclasses.replace(attention, guarded=False)
        return plain.forward(arrays)[: 1 + self.generate_stats]

    def reference(self, *, precision: Any = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        attention = self.attention(precision)
        o, stats = attention.forward(arrays)
        found: dict[str, jax.Array] = {"O": o, "Stats": stats}
        if self.rng_dump:
            found["RNG_DUMP"] = attention.mask(arrays, self.scores(cast(Any, arrays)))
        if self.score_max or self.score_sum_exp:
            found |= zip(_EXTREMES, attention.extremes(arrays), strict=True)
        return tuple(found[port] for port in self.results)

    def engines(self, tensors: Tensors, graph: GraphSpec) -> Engines:
        tiles = Reason(extras.NEEDS_OF_TILES, Kind.REQUIREMENT)
        needs = tiles if "block_mask" in tensors else None
        return super().engines(tensors, graph)._replace(needs=needs)

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        import cudnn

        if "block_mask" in tensors and cudnn.backend_version() < extras.CUDNN_OF_TILES:
            raise cudnn.cudnnGraphNotSupportedError(extras.NEEDS_OF_TILES)
        (b, h, s, _), t, kind = tensors["q"].get_dim(), tensors["k"].get_dim()[2], cudnn.data_type
        made = {
            attribute: _declared(
                pygraph, common, name, (b, h, s, 1 if name in _EXTREMES else t), kind.FLOAT
            )
            for name, attribute in _REQUESTED.items()
            if getattr(self, attribute)
        }
        plain = dataclasses.replace(self, **dict.fromkeys(made, False))
        return (*SdpaBase.emit(plain, pygraph, {**tensors, **made}, common), *made.values())

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        inputs = with_mask(self, g, inputs)
        # An 8-bit O is too coarse for the backward pass, which subtracts its products with dO.
        if "Stats" not in outputs or outputs["O"].dtype.itemsize == 1:
            return by_reference.jvp(self, g, tangents, inputs, outputs)
        outputs = {port: x for port, x in outputs.items() if port != "RNG_DUMP"}  # is constant
        return tangents_of(self, g, tangents, inputs, outputs)


def _declared(
    pygraph: Any, common: Mapping[str, Any], port: str, dims: Sequence[int], kind: Any
) -> Any:
    """A result of attention that cuDNN writes because its tensor is an argument."""
    strides = packed_strides(tuple(dims), tuple(range(len(dims))))
    name = f"{common['name']}::{port}"
    return pygraph.tensor(name=name, data_type=kind, dim=[*dims], stride=strides)


def with_mask(node: SdpaBase, g: Derivation, inputs: Values, stored: Any = None) -> Values:
    """The operands with the mask that the forward pass draws, for derivatives by the reference;
    ``stored``: the node over another storage."""
    if node.dropout_probability is None or "dropout_mask" in inputs:
        return inputs
    forward: Any = Sdpa(dropout_probability=node.dropout_probability, rng_dump=True)
    ports = ("q", "k", "v", *extras.WORDS)
    if stored is not None:
        forward = dataclasses.replace(stored, base=forward)
        ports = (*ports, *stored.indices.positions)
    operands = {port: inputs[port] for port in ports if port in inputs}
    return {**inputs, "dropout_mask": g.apply(forward, **operands)[-1]}
