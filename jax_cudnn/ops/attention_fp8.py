"""fp8 attention with a scale for each tensor: cuDNN's flash attention and its backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import jax

from .._core.graph.builder import register
from .._core.graph.dims import Shape
from .._core.graph.example import Example
from .._core.graph.node import Node, frozen
from .attention_fp8_base import TILE, Scaled
from .ordered import Ordered
from .scaling import E4M3, E5M2

if TYPE_CHECKING:
    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import GraphSpec, Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation

_ROUNDING = "{} in fp8 in the second product, saturated; sums and exponentials in float32"
_ONE = (1, 1, 1, 1)


def _example(shapes: dict[str, Shape], factors: str, dtype: str = E4M3, **more: object) -> Example:
    """Operands whose factors are float32 numbers of moderate size."""
    names = factors.split()
    float32 = [*names, *(port for port in ("stats",) if port in shapes)]
    return Example(
        {**shapes, **dict.fromkeys(names, _ONE)},
        dtype,
        dtypes=dict.fromkeys(float32, "float32"),
        positive=tuple(float32),
        attributes={"attn_scale": 0.125} | more,
    )


_FORWARD = "descale_q descale_k descale_v descale_s scale_s scale_o"
_BACKWARD = (
    "descale_q descale_k descale_v descale_o descale_dO descale_s descale_dP scale_s scale_dQ "
    "scale_dK scale_dV scale_dP"
)


@register
@frozen
class SdpaFp8(Scaled):
    """Attention of fp8 arrays: ``O = scale_o * softmax(scores) v``, with
    ``scores = attn_scale * (descale_q * q) (descale_k * k)^T``.

    A tensor's scale multiplies its values before they are rounded to fp8, which saturates; its
    descale, one over that, multiplies what was computed from the rounded ones. Softmax's weights
    enter the second product as fp8, too, scaled by ``scale_s``. Which keys a query sees: as in
    ``sdpa``.

    Args:
        q: (B, H, Sq, D) in fp8.
        k: (B, N, Skv, D) of q's dtype; each head of it serves H / N neighbouring heads of q.
        v: (B, N, Skv, E) of q's dtype.
        descale_q: (1, 1, 1, 1) in float32 like all factors.
        descale_k: of k.
        descale_v: of v.
        descale_s: of the weights, ``1 / scale_s``.
        scale_s: of the weights; the largest finite fp8 number is safe, as weights are at most 1.
        scale_o: of O.
        seq_len_q: how many queries of each example there are, (B, 1, 1, 1) in int32; optional. The
            rows of O behind them hold anything.
        seq_len_kv: how many keys; together with seq_len_q.
        attn_scale: factor of the scores.
        diagonal_alignment: as in ``sdpa``; "BOTTOM_RIGHT" from SM 100 on.
        left_bound: ``diagonal_band_left_bound`` of ``sdpa``.
        right_bound: ``diagonal_band_right_bound`` of ``sdpa``; 0 is causal attention.
        generate_stats: whether Stats is a result.

    Returns: O, (B, H, Sq, E) of q's dtype (another fp8 dtype, or from SM 100 on bfloat16 or
    float16, by ``set_data_type``); Stats as in ``sdpa``; Amax_S, the largest weight, and Amax_O,
    the largest absolute value of O before its scale, (1, 1, 1, 1) in float32. Differentiated by its
    fp8 operands it is cuDNN's backward, with gradients scaled by bounds of their size. Source:
    cuDNN documentation, "Scaled Dot Product Attention FP8 Forward".
    """

    method = "sdpa_fp8"
    dims = (
        "q: b h s d, k: b n t d, v: b n t e, descale_q: *q, descale_k: *k, descale_v: *v, "
        "descale_s: *s, scale_s: *f, scale_o: *o, ?seq_len_q: *i, ?seq_len_kv: *j "
        "-> O: b h s e, Stats: *l, Amax_S: *x, Amax_O: *y"
    )
    requires = (
        "fp8 of one dtype, SM 90, sizes of heads multiples of 16 up to 256 (SM 100: 128, or 192 "
        "beside 128), more than one query; seq_len_q and seq_len_kv together"
    )
    rounding = _ROUNDING.format("weights")
    examples = (
        _example({"q": (2, 4, 128, 64), "k": (2, 2, 128, 64), "v": (2, 2, 128, 64)}, _FORWARD),
        _example(
            {"q": (2, 4, 128, 128), "k": (2, 4, 192, 128), "v": (2, 4, 192, 128)},
            _FORWARD,
            E5M2,
            right_bound=0,
            left_bound=64,
            generate_stats=False,
        ),
    )

    left_bound: int | None = None
    right_bound: int | None = None
    generate_stats: bool = True

    @property
    def results(self) -> tuple[str, ...]:
        names = self.ports.output_names
        return tuple(name for name in names if name != "Stats" or self.generate_stats)

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, generate_stats=False) if "Stats" in results else self

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        q, v = inputs["q"], inputs["v"]
        found = {
            "O": ((*q.shape[:3], v.shape[3]), q.dtype),
            "Stats": ((*q.shape[:3], 1), "float32"),
        }
        return {port: found.get(port, (_ONE, "float32")) for port in self.results}

    def reference(self, *, precision: object = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        from .attention_fp8_reference import Fp8Attention  # importing jax_cudnn does without

        made = Fp8Attention(self.attn_scale, self.band).forward(arrays)
        found = dict(zip(self.ports.output_names, made, strict=True))
        return tuple(found[port] for port in self.results)

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        if "Stats" not in outputs:
            return super().jvp(g, tangents, inputs, outputs)
        from .attention_fp8_tangent import Fp8Tangent

        node = Fp8Tangent(self, tuple(tangents), tuple(outputs), tuple(inputs))
        along = {node.given[port]: tangent for port, tangent in tangents.items()}
        read = {port: outputs[port] for port in node.read}
        made = g.apply(node, **inputs, **read, **along)
        return dict(zip(node.outs, made, strict=True))


@register
@frozen
class SdpaFp8Backward(Ordered, Scaled):
    """Gradients of sdpa_fp8, by q, k, v as they were before their scales.

    With all fp8 operands times their descales, ``P = exp(scores - stats)`` and ``dP = dO v^T``:
    ``dS = attn_scale * P * (dP - rowsum(dO * o))``, ``dQ = dS k``, ``dK = dS^T q`` and
    ``dV = P^T dO``, each times its scale. P, of q's dtype, and dS, of dO's, enter the products as
    fp8, scaled by ``scale_s`` and ``scale_dP``.

    Args:
        q: (B, H, Sq, D) in fp8.
        k: (B, N, Skv, D).
        v: (B, N, Skv, E).
        o: the forward's O, (B, H, Sq, E) in fp8.
        dO: the gradient by O, in fp8; float8_e5m2 has more range for it.
        stats: the forward's Stats, (B, H, Sq, 1) in float32.
        descale_q: (1, 1, 1, 1) in float32 like all factors.
        descale_k: of k.
        descale_v: of v.
        descale_o: of o.
        descale_dO: of dO.
        descale_s: of the weights, ``1 / scale_s``.
        descale_dP: of dS, ``1 / scale_dP``.
        scale_s: as in the forward.
        scale_dQ: of dQ.
        scale_dK: of dK.
        scale_dV: of dV.
        scale_dP: of dS.
        seq_len_q: as in the forward.
        seq_len_kv: as in the forward.
        attn_scale: as in the forward.
        diagonal_alignment: as in the forward.
        left_bound: as in the forward.
        right_bound: as in the forward.
        use_deterministic_algorithm: an engine whose sums have one order. Set by
            ``Options(deterministic=True)``.

    Returns: dQ, dK, dV of dO's dtype (another by ``set_data_type``), and the largest absolute
    values before the scales, amax_dQ, amax_dK, amax_dV and amax_dP (of dS), (1, 1, 1, 1) in
    float32. Source: cuDNN documentation, "Scaled Dot Product Attention FP8 Backward".
    """

    method = "sdpa_fp8_backward"
    dims = (
        "q: b h s d, k: b n t d, v: b n t e, o: b h s e, dO: b h s e, stats: *l, "
        "descale_q: *q, descale_k: *k, descale_v: *v, descale_o: *o, descale_dO: *p, "
        "descale_s: *s, descale_dP: *r, scale_s: *f, scale_dQ: *t, scale_dK: *u, scale_dV: *w, "
        "scale_dP: *z, ?seq_len_q: *i, ?seq_len_kv: *j -> dQ: b h s d, dK: b n t d, dV: b n t e, "
        "amax_dQ: *a, amax_dK: *b, amax_dV: *c, amax_dP: *d"
    )
    requires = (
        "fp8, SM 90 with sizes of heads 128, or SM 100 with multiples of 16 up to 128 (or 192 "
        "beside 128); seq_len_q and seq_len_kv together"
    )
    rounding = _ROUNDING.format("weights and their gradients")
    examples = (
        _example(
            {
                "q": (2, 4, 128, 128),
                "k": (2, 2, 128, 128),
                "v": (2, 2, 128, 128),
                "o": (2, 4, 128, 128),
                "dO": (2, 4, 128, 128),
                "stats": (2, 4, 128, 1),
            },
            _BACKWARD,
            attn_scale=0.03,
        ),
    )

    left_bound: int | None = None
    right_bound: int | None = None

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.checked(inputs)
        kind = inputs["dO"].dtype
        sources = {"dQ": "q", "dK": "k", "dV": "v"}
        return {
            port: (inputs[sources[port]].shape, kind) if port in sources else (_ONE, "float32")
            for port in self.results
        }

    def refuses(self, tensors: Tensors, graph: GraphSpec) -> str | None:
        if tensors["q"].shape[2] % TILE or tensors["k"].shape[2] % (TILE // 2):
            return (
                f"of {tensors['q'].shape[2]} queries and {tensors['k'].shape[2]} keys cuDNN's fp8 "
                f"backward takes a part of dQ for zero: pad them to multiples of {TILE}, with "
                "their lengths as seq_len_q and seq_len_kv"
            )
        return super().refuses(tensors, graph)

    def reference(self, *, precision: object = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        from .attention_fp8_reference import Fp8Attention

        found = Fp8Attention(self.attn_scale, self.band).backward(arrays)
        return tuple(found[port] for port in self.results)
