"""What fp8 attention and its backward have in common: attributes, shapes, scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.dims import Shape
from .._core.graph.dtypes import FP8
from .._core.graph.node import NUMBERS_ONLY, Node
from .attention_base import _LENGTHS, BOTTOM_RIGHT, TOP_LEFT, _bound
from .attention_reference import Band

if TYPE_CHECKING:
    from .._core.graph.node import Tensors, Values
    from .._core.graph.spec import GraphSpec, Tensor
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation

TILE = 128
"""Queries and keys of a tile of cuDNN's: of whole ones it needs no lengths."""


@dataclass(frozen=True)
class Scaled(Node):
    """Attention whose operands have scales of their own. Subclasses state the fields ``bounds``,
    which pygraph's methods name differently, and the ports that are fp8 and float32."""

    anchor = True
    product = True
    row_major = True
    apart = True
    writes_all = True
    broadcasts_around = NUMBERS_ONLY
    dtypes = FP8
    of_all_examples = (
        "Amax_S", "Amax_O", "amax_dQ", "amax_dK", "amax_dV", "amax_dP",
    )  # fmt: skip
    bounds: ClassVar[tuple[str, str]] = ("left_bound", "right_bound")
    others: ClassVar[Mapping[str, str]] = {"stats": "float32"}
    """Ports that are neither fp8 nor factors, with their dtypes."""

    attn_scale: float = 1.0
    diagonal_alignment: str = TOP_LEFT

    @classmethod
    def create(cls, **attributes: Any) -> Node:
        alignment = attributes.get("diagonal_alignment", TOP_LEFT)
        name = getattr(alignment, "name", alignment)
        if name not in (TOP_LEFT, BOTTOM_RIGHT):
            raise GraphError(
                "unknown diagonal_alignment",
                expected=f"{TOP_LEFT!r} or {BOTTOM_RIGHT!r}",
                got=repr(alignment),
            )
        for bound, least in zip(cls.bounds, (1, 0), strict=True):
            attributes[bound] = _bound(bound, attributes.get(bound), least)
        return super().create(**{**attributes, "diagonal_alignment": name})

    @property
    def band(self) -> Band:
        left, right = (getattr(self, bound) for bound in self.bounds)
        return Band(left, right, self.diagonal_alignment == BOTTOM_RIGHT)

    def factor_shape(self, port: str, inputs: Mapping[str, Tensor]) -> Shape:
        """The shape of a scale or descale."""
        return (1, 1, 1, 1)

    def factor_dtype(self) -> str:
        return "float32"

    def checked(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError or GraphTypeError for shapes and dtypes that do not fit."""
        lengths = dict.fromkeys(_LENGTHS, "int32")
        factors = [port for port in inputs if port.startswith(("scale_", "descale_"))]
        wanted = {**lengths, **self.others, **dict.fromkeys(factors, self.factor_dtype())}
        for port, tensor in inputs.items():
            allowed = (wanted[port],) if port in wanted else self.dtypes
            if tensor.dtype not in allowed:
                raise GraphTypeError(
                    f"{port!r} has the wrong dtype",
                    expected=" or ".join(allowed),
                    got=f"{tensor.dtype}{list(tensor.shape)}",
                )
        self.ports.match({port: tensor.shape for port, tensor in inputs.items()})
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
        shapes = {port: self.factor_shape(port, inputs) for port in factors}
        shapes |= {**dict.fromkeys(_LENGTHS, (q[0], 1, 1, 1)), "stats": (*q[:3], 1)}
        for port, shape in shapes.items():
            if port in inputs and inputs[port].shape != shape:
                raise GraphError(
                    f"{port!r} has the wrong shape",
                    expected=str(list(shape)),
                    got=f"{list(inputs[port].shape)}, beside q {list(q)} and v {list(v)}",
                )
        if (_LENGTHS[0] in inputs) != (_LENGTHS[1] in inputs):
            raise GraphError(
                "one of the lengths is missing",
                expected="seq_len_q and seq_len_kv, or neither",
                got=", ".join(inputs),
            )

    def refuses(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> str | None:
        kinds = {tensors[port].dtype for port in ("q", "k", "v")}
        if len(kinds) > 1:
            return f"cuDNN's fp8 attention takes q, k and v of one dtype, not {', '.join(kinds)}"
        if any(t.value is not None for t in tensors.values()):
            return "cuDNN's fp8 attention reads factors from the GPU's memory: give them as arrays"
        return None

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        (b, h, s, d), (*_, t, e) = shapes["q"], shapes["v"]
        return 2 * b * h * s * t * (d + e)

    def folds(self, batched: frozenset[str], tensors: Tensors) -> Iterable[dict[str, int]]:
        """As further examples, where these have their factors in common."""
        common = {*self.of_all_examples, *filter(self.is_common, tensors)}
        if not batched & common:
            yield dict.fromkeys({*tensors} - common, 0)

    def is_common(self, port: str) -> bool:
        """Whether an operand is one for all examples."""
        return port.startswith(("scale_", "descale_"))

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        from .attention_fp8_tangent import WideTangent

        node = WideTangent(self, tuple(tangents), tuple(outputs), tuple(inputs))
        along = {node.given[port]: tangent for port, tangent in tangents.items()}
        return dict(zip(node.outs, g.apply(node, **inputs, **along), strict=True))

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
