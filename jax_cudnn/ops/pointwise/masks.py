"""relu with a bit mask for its derivative, as cuDNN's normalizations write and read it.

The mask of an array (N, C, ...) is an array of bytes (N, C / 8, ...): bit ``j`` of byte ``i``
belongs to channel ``8 * i + j``. This is cuDNN's channels-last layout of booleans, so a plan writes
and reads it directly. It takes a sixteenth of the memory of relu's 16-bit result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from ..._core.errors import GraphError, GraphTypeError
from ..._core.graph.boundary import BITS
from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FLOATS
from ..._core.graph.node import Fold, Node, frozen, matched
from ..._core.graph.planned import About, Edge, Example
from ..._core.reasons import Reason
from ..._core.rules import Derivation, GraphSpec, Tensor, Tensors, Values
from .activation import Relu
from .arithmetic import mul
from .logical import cmp_gt

_IMAGES, _MASK = (8, 64, 14, 14), (8, 8, 14, 14)


def _mask_shape(shape: Shape) -> Shape:
    if len(shape) < 3 or shape[1] % BITS:
        raise GraphError(
            "input does not support a bit mask",
            expected=f"(N, C, *spatial) with C a multiple of {BITS}",
            got=f"shape {list(shape)}",
            why="each byte of the mask covers eight channels",
            fix="use g.relu, whose derivative reads its result instead of a mask",
        )
    return (shape[0], shape[1] // BITS, *shape[2:])


class _OfMask(Node):
    """What the nodes that write and read a mask share: in plans they become cuDNN's own, see
    graph/boundary.py."""

    dtypes = FLOATS

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        # Into the batch or the channels: the mask and the input have these axes in common.
        yield Fold(dict.fromkeys(tensors, 0))
        yield Fold(dict.fromkeys(tensors, 1))

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        return Reason(
            f"cuDNN runs it only {self.about.requires}, with a mask that only g.masked reads"
        )


@register
@frozen
class ReluMask(_OfMask):
    """relu, and the bit mask of its positive results: ``OUT_0 = max(input, 0)``.

    The derivative reads the mask: ``g.masked(tangent, MASK)``. Use it after a batch normalization,
    whose plan writes the mask and whose backward plan reads it.

    Args:
        input: (N, C, *spatial), C a multiple of 8.

    Returns: OUT_0, like input; MASK, (N, C / 8, *spatial) of uint8, bit ``j`` of byte ``i`` for
    channel ``8 * i + j``: whether OUT_0 is greater than 0. Source: cuDNN documentation,
    ``CUDNN_POINTWISE_RELU_FWD`` and ``CUDNN_POINTWISE_CMP_GT`` with a result of
    ``CUDNN_DATA_BOOLEAN``.
    """

    method = "relu_mask"
    ports = Dims.parse("input: *x -> OUT_0: *x, MASK: *m")
    about = About(requires="together with batchnorm")
    examples = (Example({"input": _IMAGES}, alone=False),)

    has_mask: bool = True

    @property
    def results(self) -> tuple[str, ...]:
        return ("OUT_0", "MASK") if self.has_mask else ("OUT_0",)

    def boundary(self, tensors: Tensors) -> Edge:
        bits = (Relu(), ("input",), "OUT_0"), (cmp_gt(), ("OUT_0", 0.0), "MASK")
        return Edge(bits=bits, masks=("MASK",))

    def without(self, results: Collection[str]) -> Node:
        return replace(self, has_mask=False) if "MASK" in results else self

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        x = inputs["input"]
        found = {"OUT_0": (x.shape, x.dtype), "MASK": (_mask_shape(x.shape), "uint8")}
        return {port: found[port] for port in self.results}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        y = jnp.maximum(input, 0)
        return (y, _packed(y > 0)) if self.has_mask else (y,)

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Values:
        if not self.has_mask:
            return super().jvp(g, tangents, inputs, outputs)
        return {"OUT_0": g.masked(tangents["input"], outputs["MASK"])}


@register
class Masked(_OfMask):
    """Apply a mask from ``relu_mask``: ``OUT_0 = input`` where its bit is set, else 0.

    Args:
        input: (N, C, *spatial), C a multiple of 8.
        mask: (N, C / 8, *spatial) of uint8, bit ``j`` of byte ``i`` for channel ``8 * i + j``.

    Returns: OUT_0, like input. Source: cuDNN documentation, ``CUDNN_POINTWISE_MUL`` with an operand
    of ``CUDNN_DATA_BOOLEAN``.
    """

    method = "masked"
    ports = Dims.parse("input: *x, mask: *m -> OUT_0: *x")
    about = About(requires="together with batchnorm_backward")
    examples = (Example({"input": _IMAGES, "mask": _MASK}, dtypes={"mask": "uint8"}, alone=False),)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        x, mask = inputs["input"], inputs["mask"]
        wanted = _mask_shape(x.shape)
        if x.dtype not in FLOATS:
            raise GraphTypeError(
                "'input' has the wrong dtype", expected=", ".join(FLOATS), got=x.dtype
            )
        if (mask.shape, mask.dtype) != (wanted, "uint8"):
            raise GraphError(
                "'mask' does not fit 'input'",
                expected=f"uint8{list(wanted)}, as g.relu_mask returns it",
                got=f"{mask.dtype}{list(mask.shape)}",
            )
        return {"OUT_0": (x.shape, x.dtype)}

    def reference(self, input: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.where(_unpacked(mask), input, 0),)

    def boundary(self, tensors: Tensors) -> Edge:
        return Edge(bits=((mul(), ("input", "mask"), "OUT_0"),), masks=("mask",))

    def linear_in(self, ports: Collection[str]) -> bool:
        return {*ports} <= {"input"}

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        x = cotangents["OUT_0"]
        if str(x.dtype) not in FLOATS:  # relu_mask has rounded its result to float8
            x = g.rounded(x, "float32")
        return {"input": g.masked(x, inputs["mask"])}


def _packed(bits: jax.Array) -> jax.Array:
    n, c, *spatial = bits.shape
    bits = bits.reshape(n, c // BITS, BITS, *spatial)
    values = (1 << np.arange(BITS)).reshape(BITS, *(1,) * len(spatial))
    return jnp.sum(jnp.where(bits, values, 0), axis=2).astype(jnp.uint8)


def _unpacked(mask: jax.Array) -> jax.Array:
    n, bytes_, *spatial = mask.shape
    places = jnp.arange(BITS, dtype=jnp.int32).reshape(BITS, *(1,) * len(spatial))
    bits = (mask.astype(jnp.int32)[:, :, None] >> places) & 1
    return bits.reshape(n, bytes_ * BITS, *spatial) != 0
