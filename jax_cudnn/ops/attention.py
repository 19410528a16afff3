"""Scaled dot-product attention: cuDNN's flash attention and its backward."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.builder import register
from .._core.graph.dims import Shape
from .._core.graph.dtypes import FLOATS
from .._core.graph.node import NUMBERS_ONLY, Example, Node, float32_range
from .attention_reference import Attention, Band

if TYPE_CHECKING:
    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation

TOP_LEFT, BOTTOM_RIGHT = "TOP_LEFT", "BOTTOM_RIGHT"
_LENGTHS = ("seq_len_q", "seq_len_kv")
_REQUIRES = (
    "bfloat16 or float16, sizes of heads multiples of 8, SM 80; seq_len_q and seq_len_kv together"
)
_SHAPES = "bias is (B, H, Sq, Skv) with any of these 1; lengths are (B, 1, 1, 1) in int32"


def _bound(name: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise GraphError(
            f"{name} is not valid",
            expected=f"an integer of at least {least}, or None",
            got=repr(value)[:200],
        )
    return int(value)


@dataclass(frozen=True)
class Attending(Node):
    """What the forward and the backward have in common."""

    anchor = True
    product = True
    row_major = True
    writes_all = True
    broadcasts_around = NUMBERS_ONLY
    dtypes = FLOATS
    requires = _REQUIRES
    rounding = "weights of 16 bits in the second product; sums, maxima and exponentials in float32"
    mirrored: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Ports of equal shape."""

    attn_scale: float = 1.0
    diagonal_alignment: str = TOP_LEFT
    diagonal_band_left_bound: int | None = None
    diagonal_band_right_bound: int | None = None

    @classmethod
    def _made(
        cls, attn_scale: float, diagonal_alignment: Any, left: Any, right: Any, **others: Any
    ) -> Node:
        alignment = getattr(diagonal_alignment, "name", diagonal_alignment)
        if alignment not in (TOP_LEFT, BOTTOM_RIGHT):
            raise GraphError(
                "unknown diagonal_alignment",
                expected=f"{TOP_LEFT!r} or {BOTTOM_RIGHT!r}",
                got=repr(diagonal_alignment),
            )
        if not isinstance(attn_scale, numbers.Real):
            raise GraphTypeError(
                "attn_scale is no number",
                expected="a Python number: it is static",
                got=f"{type(attn_scale).__name__}: {attn_scale!r}"[:200],
                fix="multiply q by what JAX traces",
            )
        attributes: dict[str, Any] = {
            "attn_scale": float32_range("attn_scale", attn_scale),
            "diagonal_alignment": alignment,
            "diagonal_band_left_bound": _bound("diagonal_band_left_bound", left, 1),
            "diagonal_band_right_bound": _bound("diagonal_band_right_bound", right, 0),
        }
        return cls(**attributes, **others)

    @property
    def band(self) -> Band:
        left, right = self.diagonal_band_left_bound, self.diagonal_band_right_bound
        return Band(left, right, self.diagonal_alignment == BOTTOM_RIGHT)

    def sizes(self, inputs: Mapping[str, Tensor]) -> dict[str, int | Shape]:
        for port in _LENGTHS:
            if port in inputs and inputs[port].dtype != "int32":
                raise GraphTypeError(
                    f"{port!r} has the wrong dtype",
                    expected="int32",
                    got=f"{inputs[port].dtype}{list(inputs[port].shape)}",
                )
        return super().sizes({port: x for port, x in inputs.items() if port not in _LENGTHS})

    def checked(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError or GraphTypeError for shapes and dtypes that do not fit."""
        self.sizes(inputs)
        if self.compute_data_type != "float32":
            raise GraphTypeError(
                f"compute_data_type {self.compute_data_type} is not for {self.method}",
                expected="float32",
                got=self.compute_data_type,
            )
        q, k, v = (inputs[port].shape for port in ("q", "k", "v"))
        if k[1] == 0 or q[1] % max(k[1], 1) or v[1] != k[1]:
            raise GraphError(
                "the numbers of heads do not fit",
                expected="as many heads of k and v, and of q a multiple of that",
                got=f"q has {q[1]} heads, k {k[1]}, v {v[1]}",
            )
        scores = (*q[:3], k[2])
        wanted = dict.fromkeys(_LENGTHS, ((q[0], 1, 1, 1),))
        wanted |= {"stats": ((*q[:3], 1),), "o": ((*q[:3], v[3]),), "dO": ((*q[:3], v[3]),)}
        for port, shapes in wanted.items():
            if port in inputs and inputs[port].shape not in shapes:
                raise GraphError(
                    f"{port!r} has the wrong shape",
                    expected=str(list(shapes[0])),
                    got=f"{list(inputs[port].shape)}, beside q {list(q)} and k {list(k)}",
                )
        bias = inputs["bias"].shape if "bias" in inputs else (1, 1, 1, 1)
        if len(bias) != 4 or any(a not in (1, b) for a, b in zip(bias, scores, strict=True)):
            raise GraphError(
                "'bias' does not fit the scores",
                expected=f"{list(scores)}, or 1 in any of these",
                got=str(list(bias)),
            )
        if (_LENGTHS[0] in inputs) != (_LENGTHS[1] in inputs):
            raise GraphError(
                "one of the lengths is missing",
                expected="seq_len_q and seq_len_kv, or neither",
                got=", ".join(inputs),
            )

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        (b, h, s, d), (*_, t, e) = shapes["q"], shapes["v"]
        return 2 * b * h * s * t * (d + e)

    def folds(self, batched: frozenset[str], tensors: Tensors) -> Iterable[dict[str, int]]:
        """As further examples; a bias of all examples stays one, unless its gradient is wanted."""
        whole = {*tensors} - {"bias"}
        shared = "bias" in tensors and tensors["bias"].shape[0] != tensors["q"].shape[0]
        if "bias" in tensors and ("bias" in batched or "dBias" in tensors or not shared):
            if shared:
                return
            whole |= {"bias"}
        yield dict.fromkeys(whole, 0)

    def keywords(self) -> dict[str, Any]:
        attributes = super().keywords()
        if self.band == Band(bottom_right=self.band.bottom_right):
            del attributes["diagonal_alignment"]
        return attributes

    def emit(
        self, pygraph: Any, tensors: Mapping[str, Any], common: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        import cudnn

        keywords = self.keywords()
        if alignment := keywords.pop("diagonal_alignment", None):
            keywords["diagonal_alignment"] = getattr(cudnn.diagonal_alignment, alignment)
        if _LENGTHS[0] in tensors:
            keywords["use_padding_mask"] = True
        made = getattr(pygraph, self.method)(**tensors, **keywords, **common)
        return tuple(tensor for tensor in made if tensor is not None)

    def _attention(self, precision: Any) -> Attention:
        return Attention(self.attn_scale, self.band, precision)


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
        attn_scale: as in the forward.
        diagonal_alignment: as in the forward.
        diagonal_band_left_bound: as in the forward.
        diagonal_band_right_bound: as in the forward.
        dBias: whether that is computed, too.
        use_deterministic_algorithm: an engine whose sums have one order.

    Returns: dQ, dK, dV, and where asked for dBias, of the dtypes of q, k, v and bias. Source: cuDNN
    documentation, "Scaled Dot Product Attention Backward".
    """

    method = "sdpa_backward"
    dims = (
        "q: b h s d, k: b n t d, v: b n t e, o: b h s e, dO: b h s e, stats: *l, ?bias: *m, "
        "?seq_len_q: *i, ?seq_len_kv: *j -> dQ: b h s d, dK: b n t d, dV: b n t e, dBias: *m"
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

    @classmethod
    def create(
        cls,
        attn_scale: float = 1.0,
        diagonal_alignment: Any = TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dBias: bool = False,
        use_deterministic_algorithm: bool = False,
    ) -> Node:
        band = diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound
        flags = {"dBias": dBias, "use_deterministic_algorithm": use_deterministic_algorithm}
        return cls._made(attn_scale, *band, **flags)

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
        found = self._attention(precision).backward(arrays)
        return tuple(found[port] for port in self.results)

    def linear_in(self, port: str) -> bool:
        return port == "dO"

    def without(self, results: Collection[str]) -> Node:
        return dataclasses.replace(self, dBias=False) if "dBias" in results else self

    def keywords(self) -> dict[str, Any]:
        attributes = super().keywords()
        return {name: value for name, value in attributes.items() if value is not False}

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
        attn_scale: factor of the scores.
        diagonal_alignment: "TOP_LEFT" or "BOTTOM_RIGHT", or the member of
            ``cudnn.diagonal_alignment``.
        diagonal_band_left_bound: left, at least 1; None for all keys on that side.
        diagonal_band_right_bound: right, at least 0, which is causal attention; None for all.
        generate_stats: whether Stats is a result.

    Returns: O, (B, H, Sq, E) of q's dtype, and Stats, (B, H, Sq, 1) in float32: the natural
    logarithm of each row's sum of exponentials of what softmax gets. Source: cuDNN documentation,
    "Scaled Dot Product Attention Forward".
    """

    method = "sdpa"
    dims = (
        "q: b h s d, k: b n t d, v: b n t e, ?bias: *m, ?seq_len_q: *i, ?seq_len_kv: *j "
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

    @classmethod
    def create(
        cls,
        attn_scale: float = 1.0,
        diagonal_alignment: Any = TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        generate_stats: bool = True,
    ) -> Node:
        band = diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound
        return cls._made(attn_scale, *band, generate_stats=generate_stats)

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
        return self._attention(precision).forward(arrays)[: len(self.results)]

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
