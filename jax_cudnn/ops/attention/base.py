"""What all attention nodes share, and the base of sdpa and its backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..._core.errors import GraphError, GraphTypeError, one_of, shown
from ..._core.graph.dims import Shape
from ..._core.graph.dtypes import FLOATS
from ..._core.graph.node import Draws, Fold, Indices, Node, check_ports, frozen, matched
from ..._core.graph.planned import (
    NUMBERS_ONLY,
    ROW_MAJOR,
    About,
    Anchor,
    Engines,
    OtherForm,
    Seen,
    Work,
)
from ..._core.reasons import Reason
from ..._core.rules import GraphSpec, Handles, Tensor, Tensors
from . import extras
from .bias import LENGTHS, HasBias, HasLengths
from .reference import Attention, Band, bound
from .score_mod.value import is_operand

TOP_LEFT, BOTTOM_RIGHT = "TOP_LEFT", "BOTTOM_RIGHT"
_OF_HEADS = 8  # head sizes are multiples of this
_REQUIRES = (
    "bfloat16 or float16, in the forward without lengths also float32 (products in TF32), head "
    "sizes that are multiples of 8, SM 80; seq_len_q and seq_len_kv together"
)
GIVEN_MASK = "a given dropout_mask runs only in XLA: cuDNN draws it from seed and offset"


@frozen
class Deterministic(Node):
    """A backward with a fixed order of summation if requested. The engines' notes do not report
    determinism here, so options alone cannot exclude the others."""

    use_deterministic_algorithm: bool = False

    def deterministic(self) -> Node | None:
        return dataclasses.replace(self, use_deterministic_algorithm=True)


def checked_band(attributes: dict[str, Any], bounds: Sequence[str]) -> dict[str, Any]:
    """The attributes with the alignment by name and the left and right bounds as integers;
    GraphError if they are not valid."""
    alignment = attributes.get("diagonal_alignment", TOP_LEFT)
    name = one_of("diagonal_alignment", alignment, (TOP_LEFT, BOTTOM_RIGHT))
    checked = {
        bound: _bound(bound, attributes.get(bound), least)
        for bound, least in zip(bounds, (1, 0), strict=True)
    }
    return {**attributes, **checked, "diagonal_alignment": name}


def _bound(name: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise GraphError(
            f"{name} is not valid",
            expected=f"an integer of at least {least}, or None",
            got=shown(value),
        )
    return bound(value)


def check_heads(q: int, k: int, v: int) -> None:
    """GraphError if these numbers of heads do not fit together."""
    if 0 in (k, v) or q % k or q % v:
        raise GraphError(
            "the numbers of heads do not fit",
            expected="numbers of heads of k and of v that divide that of q",
            got=f"q has {q} heads, k {k}, v {v}",
        )


def check_shapes(inputs: Mapping[str, Tensor], wanted: Mapping[str, Shape]) -> None:
    """GraphError if operands do not have these shapes, or if only one of the lengths is there."""
    check_ports(inputs, wanted, sources=("q", "k", "qkv"))
    if (LENGTHS[0] in inputs) != (LENGTHS[1] in inputs):
        raise GraphError(
            "one of the lengths is missing",
            expected="both seq_len_q and seq_len_kv, or neither",
            got=", ".join(inputs),
        )


def odd_heads(tensors: Mapping[str, Tensor]) -> Reason | None:
    """Why cuDNN does not support these head sizes, or None."""
    for size in (tensors[port].shape[3] for port in ("q", "v")):
        if size % _OF_HEADS:
            return Reason(
                f"the head size is {size}, and cuDNN requires a multiple of {_OF_HEADS}: pad "
                f"query, key and value with zeros to {size + -size % _OF_HEADS}, pass "
                f"scale={size}**-0.5, and slice the result"
            )
    return None


def batch_folds(
    batched: Collection[str], tensors: Tensors, ports: Collection[str], queries: str
) -> Iterable[dict[str, int]]:
    """The ways to fold a vmap dimension into the batch of these ports; a bias and operands of
    score_mod that the batch shares stay shared if possible, except for a bias whose gradient is
    wanted."""
    one = {p for p in ports if (p == "bias" or is_operand(p)) and tensors[p].shape[0] == 1}
    shared = one - {*batched} - ({"bias"} if "dBias" in tensors else set())
    for kept in (shared, set()) if shared else (shared,):
        mapped = [port for port in ports if port not in kept]
        if mapped and all(tensors[p].shape[0] == tensors[queries].shape[0] for p in mapped):
            yield dict.fromkeys(mapped, 0)


_ALIKE = {"O": "q", "dQ": "q", "dK": "k", "dV": "v", "dQKV": "qkv", "dBias": "bias"}


def wrong_dtypes(results: Collection[str], tensors: Tensors) -> Reason | None:
    """Why cuDNN does not run attention with these dtypes, or None. All of this was measured:

    - with mixed operand dtypes it reads all in the first one's dtype, some out of bounds;
    - in float32 it writes nonzero results for queries after their length;
    - it writes results in the operands' dtype, whatever the arrays' dtype.
    """
    ports = [port for port in ("q", "k", "v", "qkv", "o", "dO") if port in tensors]
    if len({tensors[port].dtype for port in ports}) > 1:
        said = ", ".join(f"{port} {tensors[port].dtype}" for port in ports)
        return Reason(
            f"cuDNN requires attention operands of one dtype, not {said}: cast them, or set the "
            "dtype of computed ones by .set_data_type"
        )
    if "seq_len_q" in tensors and tensors[ports[0]].dtype == "float32":
        return Reason(
            "in float32 cuDNN's attention writes nonzero results for queries after seq_len_q: "
            "use a mask (B, 1, 1, S) for the keys, or compute in 16 bits"
        )
    for port in results:
        like = tensors.get(_ALIKE.get(port, ""))
        if like is not None and tensors[port].dtype != like.dtype:
            return Reason(f"cuDNN writes {port} only in {like.dtype}, the dtype of {_ALIKE[port]}")
    return None


def read_again(results: Collection[str], tensors: Tensors, graph: GraphSpec) -> Reason | None:
    """Why an operation that reads an attention result is not part of its plan, or None: cuDNN
    accepts some such graphs, but a pointer is missing when they run (measured for dQ)."""
    made = {tensors[port].name: port for port in results}
    for call in graph.calls:
        for _, name in call.inputs:
            if name in made:
                return Reason(f"attention needs its own plan, and {call.name} reads {made[name]}")
    return None


@frozen
class AttentionBase(HasLengths):
    """What attention nodes of all dtypes share. ``bounds`` names the fields with the bounds of the
    diagonal band, whose names differ between pygraph's methods."""

    anchor = Anchor(
        product=True,
        writes_all=True,
        keeps_dtypes=True,
        broadcasts=NUMBERS_ONLY,
        order=ROW_MAJOR,
    )
    bounds: ClassVar[tuple[str, str]] = ("diagonal_band_left_bound", "diagonal_band_right_bound")
    compute_dtypes: ClassVar[tuple[str, ...]] = ("float32",)

    attn_scale: float = 1.0
    diagonal_alignment: str = TOP_LEFT

    @classmethod
    def create(cls, **attributes: Any) -> Node:
        return super().create(**checked_band(attributes, cls.bounds))

    @property
    def band(self) -> Band:
        left, right = (getattr(self, bound) for bound in self.bounds)
        return Band(left, right, self.diagonal_alignment == BOTTOM_RIGHT)

    def checked(self, inputs: Mapping[str, Tensor], further: Mapping[str, Shape]) -> None:
        """GraphError or GraphTypeError if the compute type, the numbers of heads or shapes do not
        fit; ``further`` are shapes of other ports than the lengths and the statistic."""
        if self.compute_data_type not in self.compute_dtypes:
            raise GraphTypeError(
                f"{self.method} does not support compute_data_type {self.compute_data_type}",
                expected="float32",
                got=self.compute_data_type,
            )
        q, k, v = (inputs[port].shape for port in ("q", "k", "v"))
        check_heads(q[1], k[1], v[1])
        lengths = dict.fromkeys(LENGTHS, (q[0], 1, 1, 1))
        check_shapes(inputs, {**further, **lengths, "stats": (*q[:3], 1)})

    def layout(self, tensors: Tensors, order: Sequence[int]) -> Seen:
        return super().layout(tensors, order)._replace(separate=True)

    def work(self, tensors: Tensors) -> Work:
        q, v, keys = tensors["q"].shape, tensors["v"].shape, self.scores(tensors)[3]
        return Work(self.band.flops(q, (*v[:2], keys, v[3]), "dO" in tensors), self.method)

    def keywords(self) -> dict[str, Any]:
        """Without an alignment of no band, and without unset flags, some of which older frontends
        do not know; generate_stats has no default there."""
        attributes = super().keywords()
        if self.band == Band(bottom_right=self.band.bottom_right):
            del attributes["diagonal_alignment"]
        return {n: x for n, x in attributes.items() if x is not False or n == "generate_stats"}

    def arguments(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of pygraph's method."""
        import cudnn

        keywords = self.keywords()
        if alignment := keywords.pop("diagonal_alignment", None):
            keywords["diagonal_alignment"] = getattr(cudnn.diagonal_alignment, alignment)
        if LENGTHS[0] in tensors:
            keywords["use_padding_mask"] = True
        return {**tensors, **keywords}

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        made = getattr(pygraph, self.method)(**self.arguments(tensors), **common)
        return tuple(tensor for tensor in made if tensor is not None)


@frozen
class SdpaBase(AttentionBase, HasBias):
    """The base of sdpa and sdpa_backward."""

    dtypes = FLOATS
    about = About(
        requires=_REQUIRES,
        rounding="16-bit weights in the second product; sums, maxima and exponentials in float32",
    )
    indices = Indices(LENGTHS, selecting=(LENGTHS[0], "block_mask"))
    compute_dtypes = ("float32", "float64")

    diagonal_band_left_bound: int | None = None
    diagonal_band_right_bound: int | None = None
    dropout_probability: float | None = None
    use_alibi_mask: bool = False
    score_mod: Any = None

    @property
    def draws(self) -> Draws | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.dropout_probability is None else extras.DRAWS

    @classmethod
    def prepared(cls, given: dict[str, Any]) -> dict[str, Any]:
        from .score_mod.written import (
            prepared,
        )  # for tracing, which importing the package does without

        def band(given: dict[str, Any]) -> Band:
            names = ("diagonal_alignment", *cls.bounds)
            plain: Any = SdpaBase.create(**{name: given[name] for name in names if name in given})
            return plain.band

        return prepared(given, band)

    @classmethod
    def create(cls, **attributes: Any) -> Node:
        rate = extras.probability(attributes.get("dropout_probability"))
        return super().create(**{**attributes, "dropout_probability": rate})

    def check(self, inputs: Mapping[str, Tensor]) -> None:
        """GraphError or GraphTypeError if operands do not fit."""
        raw = extras.RAW
        matched(self, {p: x for p, x in inputs.items() if p not in raw and not is_operand(p)})
        self.checked(inputs, {})
        self.check_bias(inputs)
        extras.check(self, inputs, self.scores(inputs))

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if reason := odd_heads(tensors) or wrong_dtypes(self.results, tensors):
            return reason
        if reason := read_again(self.results, tensors, graph):
            return reason
        if reason := super().support(tensors, graph):
            return reason
        if self.score_mod is None:
            return Reason(GIVEN_MASK) if "dropout_mask" in tensors else None
        others = {"seed", "dropout_mask", "sink_token", "block_mask"}
        if self.use_alibi_mask or others & {*tensors}:
            return Reason("a score_mod with dropout, sinks, ALiBi or block masks runs only in XLA")
        return self.score_mod.refused(tensors)

    @property
    def otherwise(self) -> OtherForm | None:
        """See :class:`Engines`."""
        return None

    def engines(self, tensors: Tensors, graph: GraphSpec) -> Engines:
        return super().engines(tensors, graph)._replace(otherwise=self.otherwise)

    def stretched(self, tensors: Tensors) -> Mapping[str, Shape]:
        return {**self._stretched(tensors), **super().stretched(tensors)}

    def _stretched(self, tensors: Tensors) -> Mapping[str, Shape]:
        """Operands of score_mod that cuDNN would misread."""
        return {} if self.score_mod is None else self.score_mod.stretches(tensors)

    def advice(self, tensors: Mapping[str, Tensor]) -> str:
        said = [advice] if (advice := super().advice(tensors)) else []
        for port, shape in self._stretched(tensors).items():
            nbytes = dataclasses.replace(tensors[port], shape=shape).nbytes
            said.append(
                f"for cuDNN, XLA first broadcasts {port}, {list(tensors[port].shape)}, to "
                f"{list(shape)}, {nbytes:,} bytes in memory, because cuDNN misreads operands that "
                "are broadcast over queries; to avoid the copy, pass an additive term as bias, use "
                "packed_dot_product_attention for documents, and (1, N, 1, 1) for values per head"
            )
        return "; ".join(said)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        """Into the batch; a bias shared by the batch stays shared unless its gradient is needed."""
        if self.score_mod is not None and self.score_mod.counts_examples:
            return
        for axes in batch_folds(batched, tensors, extras.folds(batched, tensors), "q"):
            if self.score_mod is None:
                yield Fold(axes)
            else:
                mod = self.score_mod.folded(size, axes)
                yield Fold(axes, dataclasses.replace(self, score_mod=mod))

    def arguments(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        others = [p for p in tensors if p in extras.WORDS or is_operand(p)]
        found = super().arguments({p: x for p, x in tensors.items() if p not in others})
        rate = found.pop("dropout_probability", None)
        if words := [tensors[port] for port in extras.WORDS if port in tensors]:
            found["dropout"] = (rate, *words)
        return found if self.score_mod is None else found | self.callbacks(tensors)

    def callbacks(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that pass score_mod to cuDNN."""
        from .score_mod.emission import Emission  # only for planning

        return {"score_mod": Emission(self.score_mod, tensors).forward}

    def attention(self, precision: Any) -> Attention:
        further = {"dropout": self.dropout_probability, "alibi": self.use_alibi_mask}
        return Attention(self.attn_scale, self.band, precision, **further, score_mod=self.score_mod)
