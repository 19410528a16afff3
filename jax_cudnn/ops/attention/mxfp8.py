"""Attention of fp8 arrays with one scale per block of 32 elements: cuDNN's MXFP8 attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import E8M0
from ..._core.graph.node import frozen
from ..._core.graph.planned import About, Example
from ..._core.reasons import Reason
from ..._core.rules import GraphSpec, Handles, Tensor
from ..mxfp8 import dequantize_mxfp8, scales_shape
from .base import AttentionBase
from .fp8 import Fp8Backward, Fp8Base, Fp8Forward

_ONE = (1, 1, 1, 1)
_OTHERS = {"stats": "float32", "o_f16": "bfloat16", "dO_f16": "bfloat16"}
_DIMS = "16 up to 128 (or 192 with 128)"


def _along(port: str, backward: bool) -> int:
    """The axis of an operand's blocks, which is the axis of summation."""
    return -2 if port.endswith("_T") or (port == "v" and not backward) else -1


def _example(shapes: dict[str, Shape], backward: bool, scaled: str, **more: Any) -> Example:
    factors = {
        f"descale_{port}": scales_shape(shapes[port], _along(port, backward))
        for port in scaled.split()
    }
    return Example(
        {**shapes, **factors},
        "float8_e4m3fn",
        dtypes={port: d for port, d in _OTHERS.items() if port in shapes}
        | dict.fromkeys(factors, E8M0),
        attributes={"attn_scale": 0.03, **more},
        positive=(*factors, "stats") if backward else tuple(factors),
        alone=False,
    )


class BlockScaled(Fp8Base):
    """The common base of the forward and backward nodes."""

    factor_dtype = E8M0

    def factor_shape(self, port: str, inputs: Mapping[str, Tensor]) -> Shape:
        operand = port.removeprefix("descale_")
        return scales_shape(inputs[operand].shape, _along(operand, "stats" in inputs))

    def is_common(self, port: str) -> bool:
        return False

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        import cudnn

        for port, tensor in tensors.items():
            if port.startswith("descale_"):
                tensor.set_reordering_type(cudnn.tensor_reordering.F8_128x4)
        return super().emit(pygraph, tensors, common)

    def descaled(self, port: str, x: jax.Array, descale: jax.Array, backward: bool) -> jax.Array:
        return dequantize_mxfp8(x, descale, _along(port, backward))


@register
@frozen
class SdpaMxfp8(BlockScaled, Fp8Forward):
    """Attention of fp8 arrays with one power-of-two scale per block of 32 elements (MXFP8).

    ``O = softmax(attn_scale * q k^T) v`` of the values times their scales. Blocks are along D for q
    and k and along the keys for v, because the products sum over these axes.
    :func:`jax_cudnn.ops.quantize_mxfp8` computes values and scales. The band and lengths work as in
    ``sdpa``.

    Args:
        q: (B, H, Sq, D) in fp8.
        k: (B, N, Skv, D) of q's dtype; each head serves H / N consecutive heads of q.
        v: (B, N, Skv, E) of q's dtype.
        descale_q: the scales of q, (B, H, Sq', D'/32) in float8_e8m0fnu, in cuDNN's order
            F8_128x4; primes mark sizes rounded up to multiples of 128.
        descale_k: the scales of k, (B, N, Skv', D'/32).
        descale_v: the scales of v, (B, N, Skv'/32, E').
        seq_len_q: the number of queries of each batch element, (B, 1, 1, 1) in int32; optional.
        seq_len_kv: the number of keys; requires seq_len_q.
        attn_scale: factor of the scores.
        diagonal_alignment: as in ``sdpa``.
        diagonal_band_left_bound, diagonal_band_right_bound: as in ``sdpa``.
        generate_stats: whether to return Stats.

    Returns: O, (B, H, Sq, E) in bfloat16; Stats as in ``sdpa``; Amax_O, the largest absolute value
    of O, (1, 1, 1, 1) in float32. Source: cuDNN documentation, "Scaled Dot Product Attention FP8
    Forward", MXFP8; OCP Microscaling Formats 1.0.
    """

    method = "sdpa_mxfp8"
    ports = Dims.parse(
        "q: b h s d, k: b n t d, v: b n t e, descale_q: *q, descale_k: *k, descale_v: *v, "
        "?seq_len_q: *i, ?seq_len_kv: *j -> O: b h s e, Stats: *l, Amax_O: *y"
    )
    about = About(
        requires=f"cuDNN 9.21, SM 100, fp8 of one dtype, head sizes that are multiples of {_DIMS}",
        rounding="weights in fp8 in the second product; sums, maxima and exponentials in float32",
    )
    out = "bfloat16"
    bounds = AttentionBase.bounds
    examples = (
        _example(
            {"q": (2, 4, 128, 128), "k": (2, 2, 256, 128), "v": (2, 2, 256, 128)}, False, "q k v"
        ),
        _example(
            {"q": (2, 4, 200, 64), "k": (2, 4, 200, 64), "v": (2, 4, 200, 64)},
            False,
            "q k v",
            diagonal_band_right_bound=0,
        ),
    )

    diagonal_band_left_bound: int | None = None
    diagonal_band_right_bound: int | None = None
    generate_stats: bool = True


@register
@frozen
class SdpaMxfp8Backward(BlockScaled, Fp8Backward):
    """Gradients of sdpa_mxfp8.

    With ``P = exp(scores - stats)`` and ``dP = dO v^T``:
    ``dS = attn_scale * P * (dP - rowsum(dO_f16 * o_f16))``, ``dQ = dS k_T``, ``dK = dS^T q_T`` and
    ``dV = P^T dO_T``. An operand of two products is passed twice: with blocks along D, and with the
    suffix _T as the same values (not transposed) with blocks along the tokens.

    Args:
        q: (B, H, Sq, D) in fp8, blocks along D.
        q_T: q with blocks along the queries.
        k: (B, N, Skv, D), blocks along D.
        k_T: k with blocks along the keys.
        v: (B, N, Skv, E), blocks along E, unlike in ``sdpa_mxfp8``.
        o_f16: O from ``sdpa_mxfp8``, (B, H, Sq, E) in bfloat16.
        dO_f16: the gradient with respect to O in bfloat16.
        dO: the same in fp8, blocks along E.
        dO_T: the same, blocks along the queries.
        stats: Stats from ``sdpa_mxfp8``, (B, H, Sq, 1) in float32.
        descale_q, descale_q_T, descale_k, descale_k_T, descale_v, descale_dO, descale_dO_T: the
            scales of these operands from :func:`jax_cudnn.ops.quantize_mxfp8`.
        seq_len_q, seq_len_kv, attn_scale, diagonal_alignment: as in ``sdpa_mxfp8``.
        left_bound: ``diagonal_band_left_bound`` of ``sdpa_mxfp8``.
        right_bound: ``diagonal_band_right_bound`` of ``sdpa_mxfp8``.
        use_deterministic_algorithm: sum in a fixed order. Set by ``Options(deterministic=True)``.

    Returns: dQ, dK, dV in bfloat16, and their largest absolute values, amax_dQ, amax_dK and
    amax_dV, (1, 1, 1, 1) in float32. Source: cuDNN documentation, "Scaled Dot Product Attention FP8
    Backward", MXFP8.
    """

    method = "sdpa_mxfp8_backward"
    ports = Dims.parse(
        "q: b h s d, q_T: b h s d, k: b n t d, k_T: b n t d, v: b n t e, o_f16: b h s e, "
        "dO_f16: b h s e, dO: b h s e, dO_T: b h s e, stats: *l, descale_q: *a, descale_q_T: *b, "
        "descale_k: *c, descale_k_T: *d, descale_v: *e, descale_dO: *f, descale_dO_T: *g, "
        "?seq_len_q: *i, ?seq_len_kv: *j -> dQ: b h s d, dK: b n t d, dV: b n t e, "
        "amax_dQ: *o, amax_dK: *p, amax_dV: *q"
    )
    about = About(
        requires="cuDNN 9.21, SM 100, float8_e4m3fn, head sizes that are multiples of 16 up to 128",
        rounding="the scores' gradients also enter their products as block-scaled fp8",
    )
    out = "bfloat16"
    others: ClassVar[Mapping[str, str]] = _OTHERS
    examples = (
        _example(
            dict.fromkeys(("q", "q_T", "o_f16", "dO_f16", "dO", "dO_T"), (2, 4, 128, 128))
            | dict.fromkeys(("k", "k_T", "v"), (2, 2, 256, 128))
            | {"stats": (2, 4, 128, 1)},
            True,
            "q q_T k k_T v dO dO_T",
        ),
    )

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if tensors["q"].shape[3] > 128:
            return Reason(
                "the order of the scales of q_T and k_T is unknown for head sizes above 128"
            )
        return super().support(tensors, graph)
