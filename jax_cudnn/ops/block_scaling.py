"""Values with one scale per block: MXFP8, MXFP4 and NVFP4 as graph nodes, around products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.builder import register
from .._core.graph.by_reference import Tangent
from .._core.graph.dims import Dims, Shape, integers
from .._core.graph.dtypes import CUDNN_FLOATS, E8M0, FP4, FP8, canonical
from .._core.graph.layout import packed_strides
from .._core.graph.node import Fold, Node, frozen, int_tuple, matched
from .._core.graph.planned import About, Anchor, Example, Seen, View
from .._core.reasons import Reason
from .._core.rules import Derivation, GraphSpec, Handles, Tensor, Tensors, Values
from . import mxfp8
from .scaling import E4M3, E5M2, largest

_FORMATS = {32: ((*FP8, FP4), E8M0), 16: ((FP4,), E4M3)}
"""By the size of blocks: dtypes of values, the usual one first, and the dtype of scales."""
_KNOWN = "32 values of float8 or float4 with float8_e8m0fnu, or 16 of float4 with float8_e4m3fn"


class BlockScaling(Node):
    """The common base of both nodes."""

    scaled: ClassVar[tuple[str, str]]
    """The ports of values and of their scales."""
    blocks: ClassVar[Any]
    """The axis of the blocks, -1 or -2, and the number of values in each; by the attributes."""

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        yield Fold(dict.fromkeys(tensors, 0))

    def layout(self, tensors: Tensors, order: Sequence[int]) -> Seen:
        # Arrays of scales are tiles in row-major order; cuDNN wants strides with the blocks' axis
        # innermost, which with this order of tiles only state the axis.
        port, shape = self.scaled[1], tensors[self.scaled[1]].shape
        strides = packed_strides(shape, (0, 1, 2) if self.blocks[0] == -1 else (0, 2, 1))
        return Seen({port: (View(port, shape, tuple(strides)),)})

    def emit(self, pygraph: Any, tensors: Handles, common: Handles) -> tuple[Any, ...]:
        import cudnn

        made = super().emit(pygraph, tensors, common)
        scales = {**tensors, **dict(zip(self.results, made, strict=True))}[self.scaled[1]]
        scales.set_reordering_type(cudnn.tensor_reordering.F8_128x4)
        return made

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        port, scale = self.scaled
        values, scales, (axis, block) = tensors[port], tensors[scale], self.blocks
        innermost = (values.order or (0, 1, 2))[-1]
        size = values.shape[axis]
        row = 32 if values.dtype == FP4 else 16  # to 16 bytes they are aligned
        if scales.dtype != _FORMATS[block][1] or scales.order not in (None, (0, 1, 2)):
            return Reason(f"{scale} has another dtype or memory order than cuDNN's")
        if innermost != axis + 3 and (port == "Y" or values.dtype == FP4):
            return Reason(f"the blocks of {port} are not contiguous in memory: use .set_stride")
        if size % block or values.shape[innermost] % row:
            return Reason(
                f"blocks of {block} along {size} are not all full, or rows of "
                f"{values.shape[innermost]} {values.dtype} not a multiple of 16 bytes"
            )
        return None


@register
@frozen
class BlockScaleDequantize(BlockScaling):
    """Values times the scales of their blocks: ``OUT_0 = input * descale[block]``.

    On Blackwell cuDNN multiplies two such operands as they are: let both results enter a matmul.

    Args:
        input: (B, M, K) in float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
        descale: the scales in cuDNN's order of tiles F8_128x4, as ``block_scale_quantize`` and
            :func:`jax_cudnn.ops.quantize_mxfp8` give them: (B, M', (K/n)') for blocks along K,
            (B, (M/n)', K') for blocks along M, with numbers of blocks rounded up to multiples of
            4, the others to 128. float8_e8m0fnu for n = 32, float8_e4m3fn for n = 16.
        block_size: [1, n] for blocks of n along K, [n, 1] along M; n is 32 (MXFP8, MXFP4) or 16
            (NVFP4).
        is_negative_scale: must be False.

    Returns: (B, M, K) in float32. Its derivatives are those of the product; with respect to
    float8_e8m0fnu there are none. Raises GraphError, GraphTypeError: dtypes are of no format, or
    scales do not fit. Source: cuDNN documentation, "Block Scale Dequantize"; OCP Microscaling
    Formats 1.0.
    """

    method = "block_scale_dequantize"
    ports = Dims.parse("input: b m k, descale: *s -> OUT_0: b m k")
    about = About(requires="cuDNN 9.28, SM 100, before a matmul with both operands dequantized")
    dtypes = (*FP8, FP4)
    scaled = ("input", "descale")
    examples = (
        Example.of(
            f"input: 2 128 64, descale: {E8M0} 2 128 4", E4M3, block_size=[1, 32], alone=False
        ),
        Example.of(
            f"input: 1 64 96, descale: {E4M3} 1 4 128",
            FP4,
            block_size=[16, 1],
            positive=("descale",),
            alone=False,
        ),
    )

    block_size: tuple[int, ...] = int_tuple(1)
    is_negative_scale: bool = False

    @property
    def blocks(self) -> tuple[int, int]:
        return (-1 if self.block_size[0] == 1 else -2), max(self.block_size)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.ports.match({port: tensor.shape for port, tensor in inputs.items()})
        if len(self.block_size) != 2 or min(self.block_size) > 1 or self.is_negative_scale:
            raise GraphError(
                "block_size is not valid, or is_negative_scale not False",
                expected="[1, n] for blocks along the last dimension, [n, 1] along the one before",
                got=f"{list(self.block_size)}, {self.is_negative_scale}",
            )
        values, scales = inputs["input"], inputs["descale"]
        dtypes, dtype = _FORMATS.get(self.blocks[1], ((), ""))
        if values.dtype not in dtypes or scales.dtype != dtype:
            raise GraphTypeError(
                "these dtypes are of no block format",
                expected=_KNOWN,
                got=f"{values.dtype} with {scales.dtype}, blocks of {self.blocks[1]}",
            )
        mxfp8.fitting_scales(scales, values, *self.blocks)
        return {"OUT_0": (values.shape, "float32")}

    def reference(self, input: jax.Array, descale: jax.Array) -> tuple[jax.Array, ...]:
        return (mxfp8.dequantized(input, descale, *self.blocks),)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if tensors["OUT_0"].name in graph.outputs:
            return Reason("cuDNN writes no dequantized values: they enter a matmul")
        return super().support(tensors, graph)


@register
@frozen
class BlockScaleQuantize(BlockScaling):
    """Rounds values to 8 or 4 bits with one scale per block:
    ``scale = round_up(max(abs(block)) / largest)``, in the dtype of scales, with the largest value
    of Y's dtype; ``Y = round(input * (1 / scale))``, to the nearest, 0 for a scale of 0.

    Args:
        input: (B, M, N) in float32, bfloat16 or float16.
        block_size: 32 for scales in float8_e8m0fnu (MXFP8, MXFP4), 16 for float8_e4m3fn (NVFP4).
        axis: that of the blocks, 2 (the default) or 1. cuDNN needs it innermost in memory: for 1,
            state it by ``Y.set_stride``.
        transpose: pygraph's flag for the memory order of Y; no effect on values.
        out_data_type: the dtype of Y: float8_e4m3fn (the default for blocks of 32), float8_e5m2 or
            float4_e2m1fn. ``Y.set_data_type(...)`` is equivalent, as in pygraph.

    Returns: Y, (B, M, N), and scale, in cuDNN's order of tiles: see ``block_scale_dequantize``. If
    a block holds NaN or infinity, its scale is NaN. The derivative is that of ``input / scale``
    with the scales fixed, as they are piecewise constant; the rounding of Y passes tangents on, in
    Y's dtype. Raises GraphError, GraphTypeError: the block size, axis or dtype is not valid.
    Source: cuDNN documentation, "Block Scale Quantize"; OCP Microscaling Formats 1.0.
    """

    method = "block_scale_quantize"
    ports = Dims.parse("input: b m n -> Y: b m n, scale: *s")
    about = About(
        requires="cuDNN 9.28, SM 100, after a matmul, blocks along the innermost dimension",
        rounding="scales are rounded up",
    )
    anchor = Anchor(keeps_dtypes=True)
    dtypes = CUDNN_FLOATS
    scaled = ("Y", "scale")
    examples = (
        Example.of("input: 2 128 64", block_size=32, axis=2, alone=False),
        Example.of(
            "input: 1 64 128", "float32", block_size=32, axis=1, out_data_type=E5M2, alone=False
        ),
        Example.of("input: 1 128 64", "float32", block_size=16, axis=2, alone=False),
    )

    block_size: int
    axis: int = 2
    transposed: bool = False
    out_data_type: str = E4M3

    @classmethod
    def create(
        cls, block_size: int, axis: Any = 2, transpose: bool = False, out_data_type: Any = None
    ) -> BlockScaleQuantize:
        size, at = integers("block_size and axis", (block_size, 2 if axis is None else axis))
        if size not in _FORMATS or at not in (2, 1):
            got = f"blocks of {size}, axis={axis!r}"
            expected = f"{_KNOWN}; axis 2 or 1"
            raise GraphError("block_size or axis is not valid", expected=expected, got=got)
        return cls(size, at, bool(transpose), canonical(out_data_type or _FORMATS[size][0][0]))

    @property
    def blocks(self) -> tuple[int, int]:
        return self.axis - 3, self.block_size

    def keywords(self) -> dict[str, Any]:
        return {"block_size": self.block_size, "axis": self.axis, "transpose": self.transposed}

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        matched(self, inputs)
        dtypes, dtype = _FORMATS[self.block_size]
        if self.out_data_type not in dtypes:
            raise GraphTypeError(
                f"Y cannot have this dtype with blocks of {self.block_size}",
                expected=" or ".join(dtypes),
                got=self.out_data_type,
            )
        shape = inputs["input"].shape
        scales = mxfp8.scales_shape(shape, *self.blocks), dtype
        return {"Y": (shape, self.out_data_type), "scale": scales}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        axis, block = self.blocks
        blocks, most = mxfp8.blocks_of(input, axis, block)
        most, dtype = jax.lax.stop_gradient(most), _FORMATS[block][1]
        factor, codes = (mxfp8.powers if block == 32 else _rounded_up)(most, self.out_data_type)
        values = mxfp8.without_blocks(blocks * factor[..., None], input.shape, axis)
        return values, mxfp8.scales_of(codes, axis, dtype)

    def jvp(self, g: Derivation, tangents: Values, inputs: Values, outputs: Values) -> Any:
        node = Tangent(self, ("input",), ("Y",), ("input",))  # scales have none
        (out,) = g.apply(node, **inputs, **{node.given["input"]: tangents["input"]})
        return {"Y": out}

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        made = {tensors[port].name for port in self.scaled if port in tensors} & {*graph.outputs}
        if len(made) < 2 or tensors["Y"].dtype != self.out_data_type:
            return Reason("one of its results is not returned, or has another dtype")
        return super().support(tensors, graph)


def _rounded_up(most: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """As :func:`.mxfp8.powers`, with numbers of float8_e4m3fn, 448 at most; by bits, because XLA
    for GPUs leaves out a cast to float8 and back."""
    x = most / largest(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    normal = ((bits + 0xFFFFF) >> 20) - (120 << 3)  # 3 bits of mantissa; biases 127 and 7
    codes = jnp.where(x < 2**-6, jnp.ceil(x * 2**9).astype(jnp.int32), normal)
    codes = jnp.where(jnp.isfinite(x), jnp.minimum(codes, 0x7E), 0x7F).astype(jnp.uint8)
    by = jax.lax.bitcast_convert_type(codes, jnp.dtype(E4M3)).astype(jnp.float32)
    return jnp.where(by == 0, 0, 1 / by), codes
