"""fp8 attention with one scale per tensor: cuDNN's flash attention and its backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FP8
from ..._core.graph.node import Fold, Node, check_ports, frozen
from ..._core.graph.planned import About, Example
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, Tensor, Tensors, Values
from ..scaling import E4M3, E5M2
from .base import LENGTHS, AttentionBase, Deterministic, read_again
from .fp8_reference import Fp8Attention
from .fp8_tangent import gradients
from .tangent import tangents_of

TILE = 128
"""Queries and keys per tile; cuDNN's backward pass is correct only for whole tiles."""
_ONE = (1, 1, 1, 1)

_AMAX = ("Amax_S", "Amax_O", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")
"""Maxima over the whole batch."""


@frozen
class Fp8Base(AttentionBase):
    """Attention whose operands have scales."""

    dtypes = FP8
    bounds = ("left_bound", "right_bound")
    factor_dtype: ClassVar[str] = "float32"
    """The dtype of scales and descales."""
    others: ClassVar[Mapping[str, str]] = {"stats": "float32"}
    """Ports that are neither fp8 nor scales, with their dtypes."""
    rounded: ClassVar[Mapping[str, str]] = {}
    """What the reference rounds, by the names of :class:`Fp8Attention`, with the operands whose
    dtypes it takes."""

    def factor_shape(self, port: str, inputs: Mapping[str, Tensor]) -> Shape:
        """The shape of a scale or descale."""
        return _ONE

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError or GraphTypeError if shapes or dtypes do not fit."""
        lengths = dict.fromkeys(self.indices.positions, "int32")
        factors = [port for port in inputs if port.startswith(("scale_", "descale_"))]
        own = {**lengths, **self.others, **dict.fromkeys(factors, self.factor_dtype)}
        known = {port: (dtype,) for port, dtype in own.items()}
        check_ports(inputs, {}, dict.fromkeys(inputs, self.dtypes) | known)
        self.ports.match({port: tensor.shape for port, tensor in inputs.items()})
        self.checked(inputs, {port: self.factor_shape(port, inputs) for port in factors})

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        kinds = {tensors[port].dtype for port in ("q", "k", "v")}
        if len(kinds) > 1:
            return Reason(
                f"cuDNN's fp8 attention requires q, k and v of one dtype, not {', '.join(kinds)}"
            )
        if any(t.value is not None for t in tensors.values()):
            return Reason(
                "cuDNN's fp8 attention reads scales from device memory: pass them as arrays"
            )
        return read_again(self.results, tensors, graph)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the batch, if all batch elements share the scales."""
        common = {*_AMAX, *filter(self.is_common, tensors)}
        if not batched & common:
            yield Fold(dict.fromkeys({*tensors} - common, 0), summed=_AMAX)

    def descaled(self, port: str, x: jax.Array, descale: jax.Array, backward: bool) -> jax.Array:
        """An fp8 operand times its descale."""
        return x.astype(jnp.float32) * descale

    def reference(self, *, precision: object = None, **arrays: jax.Array) -> tuple[jax.Array, ...]:
        kinds: Any = {name: str(arrays[port].dtype) for name, port in self.rounded.items()}
        attention = Fp8Attention(self.attn_scale, self.band, **kinds)
        applied = {f"descale_{port}": port for port in arrays if f"descale_{port}" in arrays}
        wide = {
            port: x if port in LENGTHS else x.astype(jnp.float32)
            for port, x in arrays.items()
            if port not in applied
        }
        for name, port in applied.items():
            wide[port] = self.descaled(port, arrays[port], arrays[name], "dO" in arrays)
        found = attention.gradients(wide) if "dO" in arrays else attention.results(wide)
        return tuple(found[port] for port in self.results)

    def is_common(self, port: str) -> bool:
        """Whether all batch elements share an operand."""
        return port.startswith(("scale_", "descale_"))

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        return tangents_of(self, g, tangents, inputs, outputs)


@frozen
class Fp8Forward(Fp8Base):
    """The base of the forward nodes, which have a field ``generate_stats``; ``out`` is the dtype of
    O, by default q's."""

    out: ClassVar[str] = ""
    rounded: ClassVar = {"weights": "q"}

    @property
    def results(self: Any) -> tuple[str, ...]:
        names = self.ports.output_names
        return tuple(name for name in names if name != "Stats" or self.generate_stats)

    def without(self: Any, results: Collection[str]) -> Node:
        return dataclasses.replace(self, generate_stats=False) if "Stats" in results else self

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.check(inputs)
        q, v = inputs["q"], inputs["v"]
        found = {
            "O": ((*q.shape[:3], v.shape[3]), self.out or q.dtype),
            "Stats": ((*q.shape[:3], 1), "float32"),
        }
        return {port: found.get(port, (_ONE, "float32")) for port in self.results}


@frozen
class Fp8Backward(Deterministic, Fp8Base):
    """The base of the backward nodes; ``out`` is the dtype of the gradients, by default dO's."""

    out: ClassVar[str] = ""

    left_bound: int | None = None
    right_bound: int | None = None

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.check(inputs)
        sources = {"dQ": "q", "dK": "k", "dV": "v"}
        kind = self.out or inputs["dO"].dtype
        return {
            port: (inputs[sources[port]].shape, kind) if port in sources else (_ONE, "float32")
            for port in self.results
        }


_ROUNDING = "{} in fp8 with saturation in the second product; sums and exponentials in float32"


def _example(shapes: dict[str, Shape], factors: str, dtype: str = E4M3, **more: object) -> Example:
    """Operands whose factors are float32 values of moderate size."""
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
class SdpaFp8(Fp8Forward):
    """Attention of fp8 arrays: ``O = scale_o * softmax(scores) (descale_v * v)``, with
    ``scores = attn_scale * (descale_q * q) (descale_k * k)^T``.

    A tensor's scale multiplies its values before they are rounded to fp8 (with saturation); its
    descale, the inverse, multiplies what is computed from the rounded values. The softmax weights
    also enter the second product as fp8, scaled by ``scale_s``. The band and lengths work as in
    ``sdpa``.

    Args:
        q: (B, H, Sq, D) in fp8.
        k: (B, N, Skv, D) of q's dtype; each head serves H / N consecutive heads of q.
        v: (B, N, Skv, E) of q's dtype.
        descale_q, descale_k, descale_v: the descales of q, k and v, (1, 1, 1, 1) in float32 like
            all scales.
        descale_s: the descale of the weights, ``1 / scale_s``.
        scale_s: the scale of the weights; the largest finite fp8 value is safe, as weights are at
            most 1.
        scale_o: the scale of O.
        seq_len_q: the number of queries of each batch element, (B, 1, 1, 1) in int32; optional. The
            rows of O after them are undefined.
        seq_len_kv: the number of keys; requires seq_len_q.
        attn_scale: factor of the scores.
        diagonal_alignment: as in ``sdpa``; "BOTTOM_RIGHT" needs SM 100 or newer.
        left_bound: ``diagonal_band_left_bound`` of ``sdpa``.
        right_bound: ``diagonal_band_right_bound`` of ``sdpa``; 0 is causal attention.
        generate_stats: whether to return Stats.

    Returns: O, (B, H, Sq, E) of q's dtype (or by ``set_data_type`` another fp8 dtype, or bfloat16
    or float16 from SM 100 on); Stats as in ``sdpa``; Amax_S, the largest weight, and Amax_O, the
    largest absolute value of O before its scale, (1, 1, 1, 1) in float32. The derivative with
    respect to the fp8 operands runs in cuDNN's backward pass, with gradients scaled by bounds of
    their magnitude. Source: cuDNN documentation, "Scaled Dot Product Attention FP8 Forward".
    """

    method = "sdpa_fp8"
    ports = Dims.parse(
        "q: b h s d, k: b n t d, v: b n t e, descale_q: *q, descale_k: *k, descale_v: *v, "
        "descale_s: *s, scale_s: *f, scale_o: *o, ?seq_len_q: *i, ?seq_len_kv: *j "
        "-> O: b h s e, Stats: *l, Amax_S: *x, Amax_O: *y"
    )
    about = About(
        requires="fp8 of one dtype, SM 90, head sizes that are multiples of 16 up to 256 (SM 100: "
        "up to 128, or 192 with 128), more than one query; seq_len_q and seq_len_kv together",
        rounding=_ROUNDING.format("weights"),
    )
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
    gradients = gradients

    def backward(self) -> Node:
        """The node that computes the gradients."""
        shared = ("attn_scale", "diagonal_alignment", *self.bounds)
        return SdpaFp8Backward(**{name: getattr(self, name) for name in shared})


@register
@frozen
class SdpaFp8Backward(Fp8Backward):
    """Gradients of sdpa_fp8 with respect to the unscaled q, k and v.

    With all fp8 operands times their descales, ``P = exp(scores - stats)`` and ``dP = dO v^T``:
    ``dS = attn_scale * P * (dP - rowsum(dO * o))``, ``dQ = dS k``, ``dK = dS^T q`` and
    ``dV = P^T dO``, each times its scale. P and dS enter the products as fp8, P in q's dtype scaled
    by ``scale_s``, and dS in dO's dtype scaled by ``scale_dP``.

    Args:
        q: (B, H, Sq, D) in fp8.
        k: (B, N, Skv, D).
        v: (B, N, Skv, E).
        o: O from ``sdpa_fp8``, (B, H, Sq, E) in fp8.
        dO: the gradient with respect to O, in fp8; float8_e5m2 has more range for it.
        stats: Stats from ``sdpa_fp8``, (B, H, Sq, 1) in float32.
        descale_q, descale_k, descale_v, descale_o, descale_dO: the descales of these operands,
            (1, 1, 1, 1) in float32 like all scales.
        descale_s: the descale of the weights, ``1 / scale_s``.
        descale_dP: the descale of dS, ``1 / scale_dP``.
        scale_s: as in ``sdpa_fp8``.
        scale_dQ, scale_dK, scale_dV: the scales of the results.
        scale_dP: the scale of dS.
        seq_len_q, seq_len_kv, attn_scale: as in ``sdpa_fp8``.
        diagonal_alignment, left_bound, right_bound: as in ``sdpa_fp8``.
        use_deterministic_algorithm: sum in a fixed order. Set by ``Options(deterministic=True)``.

    Returns: dQ, dK, dV of dO's dtype (or another by ``set_data_type``), and the largest absolute
    values before scaling, amax_dQ, amax_dK, amax_dV and amax_dP (of dS), (1, 1, 1, 1) in float32.
    Source: cuDNN documentation, "Scaled Dot Product Attention FP8 Backward".
    """

    method = "sdpa_fp8_backward"
    ports = Dims.parse(
        "q: b h s d, k: b n t d, v: b n t e, o: b h s e, dO: b h s e, stats: *l, "
        "descale_q: *q, descale_k: *k, descale_v: *v, descale_o: *o, descale_dO: *p, "
        "descale_s: *s, descale_dP: *r, scale_s: *f, scale_dQ: *t, scale_dK: *u, scale_dV: *w, "
        "scale_dP: *z, ?seq_len_q: *i, ?seq_len_kv: *j -> dQ: b h s d, dK: b n t d, dV: b n t e, "
        "amax_dQ: *a, amax_dK: *b, amax_dV: *c, amax_dP: *d"
    )
    about = About(
        requires="fp8, SM 90 with head sizes of 128, or SM 100 with multiples of 16 up to 128 (or "
        "192 with 128); seq_len_q and seq_len_kv together",
        rounding=_ROUNDING.format("weights and their gradients"),
    )
    rounded: ClassVar = {"weights": "q", "slopes": "dO"}
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

    def support(self, tensors: Tensors, graph: GraphSpec) -> Reason | None:
        if tensors["q"].shape[2] % TILE or tensors["k"].shape[2] % (TILE // 2):
            return Reason(
                f"with {tensors['q'].shape[2]} queries and {tensors['k'].shape[2]} keys cuDNN's "
                f"fp8 backward writes zeros to part of dQ: pad them to multiples of {TILE}, and "
                "pass the lengths as seq_len_q and seq_len_kv"
            )
        return super().support(tensors, graph)
