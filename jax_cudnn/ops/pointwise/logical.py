"""Comparisons, logical operations, selection, and indices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..._core.errors import GraphError, GraphTypeError, shown
from ..._core.graph.boundary import register_conversions
from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.node import LEAD, Fold, frozen, matched
from ..._core.graph.planned import CHANNELS_LAST, About, Example
from ..._core.graph.promotion import result_dtype
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Handles, Tensor, Tensors, Values
from ..transformations import anywhere
from .elementwise import IMAGES, ROWS, Pointwise, elementwise, usual

_COMPARED = (
    *usual("input", "comparison"),
    Example({"input": IMAGES, "comparison": IMAGES}, "int32"),
)
_BOOLS = tuple(Example({"a": shape, "b": shape}, "bool") for shape in (IMAGES, ROWS))


def _comparison(
    mode: str, sign: str, compare: Callable[[Any, Any], Any], *jax_names: str
) -> type[Pointwise]:
    """The node ``cmp_<mode>``, written as the operator ``sign``."""

    def cmp(input: jax.Array, comparison: jax.Array) -> jax.Array:
        return compare(input, comparison)

    of_nan = compare(math.nan, math.nan)
    cmp.__name__ = f"cmp_{mode}"
    cmp.__doc__ = f"""Whether ``input {sign} comparison``: booleans; dimensions of size 1 broadcast.

    Compares in float32 (integers exactly up to 2**24); {of_nan} where an operand is NaN.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_CMP_{mode.upper()}``.
    """
    return elementwise(result="bool", jax_names=jax_names, examples=_COMPARED)(cmp)


cmp_eq = _comparison("eq", "==", operator.eq, "equal", "eq")
cmp_neq = _comparison("neq", "!=", operator.ne, "not_equal", "ne")
cmp_gt = _comparison("gt", ">", operator.gt, "greater", "gt")
cmp_ge = _comparison("ge", ">=", operator.ge, "greater_equal", "ge")
cmp_lt = _comparison("lt", "<", operator.lt, "less", "lt")
cmp_le = _comparison("le", "<=", operator.le, "less_equal", "le")


@elementwise(dtypes=("bool",), jax_names=("logical_and", "bitwise_and"), examples=_BOOLS)
def logical_and(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether both booleans are true; dimensions of size 1 broadcast.

    Computes in booleans. Source: cuDNN documentation, ``CUDNN_POINTWISE_LOGICAL_AND``.
    """
    return jnp.logical_and(a, b)


@elementwise(dtypes=("bool",), jax_names=("logical_or", "bitwise_or"), examples=_BOOLS)
def logical_or(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether at least one boolean is true; dimensions of size 1 broadcast.

    Computes in booleans. Source: cuDNN documentation, ``CUDNN_POINTWISE_LOGICAL_OR``.
    """
    return jnp.logical_or(a, b)


@elementwise(
    dtypes=("bool",),
    jax_names=("logical_not", "bitwise_not", "invert"),
    examples=usual("input", dtypes=("bool", "bool")),
)
def logical_not(input: jax.Array) -> jax.Array:
    """Whether a boolean is false.

    Computes in booleans. Source: cuDNN documentation, ``CUDNN_POINTWISE_LOGICAL_NOT``.
    """
    return jnp.logical_not(input)


@register
class BinarySelect(Pointwise):
    """Selects elements: ``OUT_0 = input0`` where ``mask``, otherwise ``input1``.

    Args:
        input0, input1: any numeric type.
        mask: booleans (the result of a comparison), or numbers: nonzero selects ``input0``.

    All three broadcast; the result has the promoted dtype of ``input0`` and ``input1``.
    Source: cuDNN documentation, ``CUDNN_POINTWISE_BINARY_SELECT``.
    """

    method = "binary_select"
    reads: ClassVar[Mapping[str, tuple[str, ...]]] = {"input0": ("mask",), "input1": ("mask",)}
    algebra = Pointwise.algebra._replace(chooses=True)
    ports = Dims.parse("input0: ..., input1: ..., mask: ... -> OUT_0: ...")
    about = About(jax_names=("where", "select"))
    dtypes = (*Pointwise.dtypes, "bool")
    examples = (
        Example(
            {"input0": IMAGES, "input1": IMAGES, "mask": IMAGES},
            "bfloat16",
            dtypes={"mask": "bool"},
        ),
        Example({"input0": ROWS, "input1": ROWS, "mask": ROWS}, "float32", dtypes={"mask": "bool"}),
        Example({"input0": ROWS, "input1": ROWS, "mask": ROWS}, "float32", dtypes={"mask": "int8"}),
    )

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        ((output, (shape, _)),) = super().infer(inputs).items()
        numbers = {port: tensor for port, tensor in inputs.items() if port != "mask"}
        for port, tensor in numbers.items():
            if tensor.dtype == "bool":
                raise GraphTypeError(
                    f"binary_select does not take bool for {port!r}",
                    expected="numbers in input0 and input1, booleans in mask",
                    got=f"{port}: {tensor.dtype}{list(tensor.shape)}",
                    fix="the mask is the last argument; combine booleans with logical_and and "
                    "logical_or",
                )
        return {output: (shape, result_dtype(numbers))}

    def reference(
        self, input0: jax.Array, input1: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, ...]:
        return (jnp.where(mask != 0, input0, input1),)

    def slope(self, g: Derivation, port: str, t: GraphTensor, values: Values) -> GraphTensor | None:
        if port == "mask":
            return None
        first, second = (t, 0.0) if port == "input0" else (0.0, t)
        return g.binary_select(first, second, values["mask"])


@register
@frozen
class GenIndex(Pointwise):
    """The index of each element along an axis: ``OUT_0[..., i, ...] = i``, in int32.

    Args:
        input: any array; only its shape matters.
        axis: from 0, or negative from the end.

    Raises GraphError if ``input`` has no such axis. Source: cuDNN documentation,
    ``CUDNN_POINTWISE_GEN_INDEX``.
    """

    method = "gen_index"
    ports = Dims.parse("input: *x -> OUT_0: *x")  # not "...": the position of an element matters
    about = About(
        requires="tensors of rank 4 or 5 with more than one channel; in rank 3 the last axis "
        "only: cuDNN mixes up axes 0 and 1",
        jax_names=("iota", "broadcasted_iota", "arange", "indices"),
    )
    examples = (
        Example.of("input: 2 8 6 10", axis=1),
        Example.of("input: 2 8 6 10", "float32", axis=-1),
    )

    axis: int

    @classmethod
    def create(cls, axis: int) -> GenIndex:
        try:
            return cls(operator.index(axis))
        except TypeError:
            raise GraphTypeError(
                "axis is not an integer", expected="a Python integer", got=shown(axis)
            ) from None

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        shape = inputs["input"].shape
        if not -len(shape) <= self.axis < len(shape):
            raise GraphError(
                "input has no such axis",
                expected=f"axis from {-len(shape)} to {len(shape) - 1}, for {list(shape)}",
                got=f"axis={self.axis}",
            )
        return {"OUT_0": (shape, "int32")}

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        # Measured on an H200 with cuDNN 9.19: after a matmul axes 0 and 1 are mixed up, and in the
        # graph of a convolution the indices are wrong for images of 6 x 14, right for 8 x 8.
        rank = len(tensors["input"].shape)
        if rank == 3 and self.axis % rank != 2:
            return Reason(f"in rank 3 cuDNN counts along the last axis only, not along {self.axis}")
        if any(call.node.anchor.order == CHANNELS_LAST for call in graph.calls):
            return Reason("cuDNN counts wrongly in a graph with a convolution")
        return None

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        return (jax.lax.broadcasted_iota(jnp.int32, input.shape, self.axis % input.ndim),)

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        rank = len(tensors["input"].shape)
        own = self.axis % rank
        others = (axis for axis in range(rank) if axis != own)
        return anywhere(tensors, others, lambda axis: GenIndex(own + (axis == LEAD)))

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        rank = len(tensors["input"].get_dim())
        return (pygraph.gen_index(tensors["input"], axis=self.axis % rank, **common),)


register_conversions(to_boolean=cmp_gt(), from_boolean=BinarySelect())
