"""Values with one scale per block: MXFP8, MXFP4 and NVFP4 as graph nodes, around products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.builder import register
from .._core.graph.by_reference import Tangent
from .._core.graph.dims import Dims, Shape, integers
from .._core.graph.dtypes import CUDNN_FLOATS, E8M0, FP4, FP8, canonical
from .._core.graph.layout import packed_strides
from .._core.graph.node import Fold, Node, frozen, matched
from .._core.graph.planned import About, Anchor, Example, Seen, View
from .._core.reasons import Reason
from .._core.rules import Derivation, GraphSpec, GraphTensor, Handles, Tensor, Tensors, Values
from .mxfp8 import (
    blocks_of,
    dequantized,
    fitting_scales,
    powers,
    scales_of,
    scales_shape,
    without_blocks,
)
from .scaling import E4M3, E5M2, largest

_FORMATS = {32: ((*FP8, FP4), E8M0), 16: ((FP4,), E4M3)}
"""By the size of blocks: dtypes of values, the usual one first, and the dtype of scales."""
_KNOWN = "32 values of float8 or float4 with float8_e8m0fnu, or 16 of float4 with float8_e4m3fn"
_REQUIRES = "cuDNN 9.28, SM 100, before a matmul of which both operands are dequantized"
_ROW = 16  # bytes to which rows are aligned


def _check_size(size: int) -> None:
    if size not in _FORMATS:
        raise GraphError("block_size is not valid", expected=_KNOWN, got=f"blocks of {size}")


class BlockScaling(Node):
    """The common base of both nodes."""

    scaled = ("", "")
    """The ports of values and of their scales."""

    @property
    def blocks(self) -> tuple[int, int]:
        """The axis of the blocks, -1 or -2, and the number of values in each."""
        raise NotImplementedError

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        yield Fold(dict.fromkeys(tensors, 0))

    def layout(self, tensors: Tensors, order: Sequence[int]) -> Seen:
        # Arrays of scales are tiles in row-major order; cuDNN wants strides with the blocks' axis
        # innermost, which with this order of tiles only state the axis.
        port = self.scaled[1]
        shape = tensors[port].shape
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
        row = 2 * _ROW if values.dtype == FP4 else _ROW
        if scales.dtype != _FORMATS[block][1] or scales.order not in (None, (0, 1, 2)):
            return Reason(f"{scale} has another dtype or memory order than cuDNN's")
        if innermost != axis + 3 and (port == "Y" or values.dtype == FP4):
            return Reason(
                f"the blocks of {port} are not contiguous in memory: state it with .set_stride"
            )
        if size % block or values.shape[innermost] % row:
            return Reason(
                f"blocks of {block} along {size} are not all full, or rows of "
                f"{values.shape[innermost]} {values.dtype} not a multiple of {_ROW} bytes"
            )
        return None


@register
@frozen
class BlockScaleDequantize(BlockScaling):
    """Values times the scales of their blocks: ``OUT_0 = input * descale[block]``.

    On Blackwell cuDNN multiplies two such operands as they are: let the results enter one matmul,
    A with blocks along K, (B, M, K), and B with blocks along K, (B, K, N).

    Args:
        input: (B, M, K) in float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
        descale: the scales in cuDNN's order of tiles F8_128x4, as
            :func:`jax_cudnn.ops.quantize_mxfp8` and ``block_scale_quantize`` give them, for blocks
            along K (B, M', (K/n)'), along M (B, (M/n)', K'): sizes of blocks are rounded up to
            multiples of 4, the others to 128. float8_e8m0fnu for blocks of 32 (MXFP8, MXFP4),
            float8_e4m3fn for blocks of 16 (NVFP4).
        block_size: [1, n] for blocks of n along K, [n, 1] along M; n is 32 or 16.
        is_negative_scale: must be False.

    Returns: (B, M, K) in float32. Its derivatives are those of the product; with respect to
    float8_e8m0fnu there are none, as it has no 0 and no signs.

    Raises GraphError, GraphTypeError: dtypes are of no format, or scales do not fit. Source: cuDNN
    documentation, "Block Scale Dequantize"; OCP Microscaling Formats 1.0.
    """

    method = "block_scale_dequantize"
    ports = Dims.parse("input: b m k, descale: *s -> OUT_0: b m k")
    about = About(requires=_REQUIRES)
    dtypes = (*FP8, FP4)
    scaled = ("input", "descale")
    examples = (
        Example.of(
            f"input: 2 128 64, descale: {E8M0} 2 128 4",
            E4M3,
            block_size=[1, 32],
            positive=("descale",),
            alone=False,
        ),
        Example.of(
            f"input: 1 64 96, descale: {E4M3} 1 4 128",
            FP4,
            block_size=[16, 1],
            positive=("descale",),
            alone=False,
        ),
    )

    block_size: tuple[int, ...]

    @classmethod
    def create(cls, block_size: Any, is_negative_scale: bool = False) -> BlockScaleDequantize:
        given = block_size if isinstance(block_size, (list, tuple)) else [block_size]
        sizes = integers("block_size", given, 1, block_size)
        if len(sizes) != 2 or min(sizes) != 1:
            raise GraphError(
                "block_size is not valid",
                expected="[1, n] for blocks along the last dimension, [n, 1] along the one before",
                got=f"block_size={block_size!r}",
            )
        _check_size(max(sizes))
        if is_negative_scale:
            raise GraphError("is_negative_scale is not supported", expected="False", got="True")
        return cls(sizes)

    @property
    def blocks(self) -> tuple[int, int]:
        return (-1 if self.block_size[0] == 1 else -2), max(self.block_size)

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        self.ports.match({port: tensor.shape for port, tensor in inputs.items()})
        values, scales = inputs["input"], inputs["descale"]
        dtypes, dtype = _FORMATS[self.blocks[1]]
        if values.dtype not in dtypes or scales.dtype != dtype:
            raise GraphTypeError(
                "these dtypes are of no block format",
                expected=_KNOWN,
                got=f"{values.dtype} with {scales.dtype}, blocks of {self.blocks[1]}",
                fix="g.block_scale_quantize or jax_cudnn.ops.quantize_mxfp8 makes both",
            )
        fitting_scales(scales, values, *self.blocks)
        return {"OUT_0": (values.shape, "float32")}

    def reference(self, input: jax.Array, descale: jax.Array) -> tuple[jax.Array, ...]:
        return (dequantized(input, descale, *self.blocks),)

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if tensors["OUT_0"].name in graph.outputs:
            return Reason("cuDNN writes no dequantized values: they enter a matmul")
        return super().support(tensors, graph)


@register
@frozen
class BlockScaleQuantize(BlockScaling):
    """Rounds values to 8 or 4 bits with one scale per block.

    ``scale = round_up(max(abs(block)) / largest)``, with the largest value of Y's dtype, and
    rounding up in the dtype of scales; ``Y = round(input / scale)``, to the nearest, 0 for a scale
    of 0.

    Args:
        input: (B, M, N) in float32, bfloat16 or float16.
        block_size: 32 for scales in float8_e8m0fnu (MXFP8, or MXFP4), or 16 for float4_e2m1fn with
            scales in float8_e4m3fn (NVFP4).
        axis: that of the blocks, 2 (the default) or 1. cuDNN needs it innermost in memory: for 1,
            state it by ``Y.set_stride``.
        transpose: pygraph's flag for the memory order of Y; no effect on values.
        out_data_type: the dtype of Y: float8_e4m3fn (the default for blocks of 32), float8_e5m2 or
            float4_e2m1fn. ``Y.set_data_type(...)`` is equivalent, as in pygraph.

    Returns: Y, (B, M, N), and scale, in cuDNN's order of tiles: see ``block_scale_dequantize``. If
    a block holds NaN or infinity, its scale is NaN. The derivative is that of ``input / scale``
    with the scales fixed, as they are piecewise constant; the rounding of Y is a cast, which passes
    tangents on as JAX's does, in Y's dtype.

    Raises GraphError, GraphTypeError: the block size, axis or dtype is not valid. Source: cuDNN
    documentation, "Block Scale Quantize"; OCP Microscaling Formats 1.0.
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
        cls,
        block_size: int,
        axis: int | None = None,
        transpose: bool = False,
        out_data_type: Any = None,
    ) -> BlockScaleQuantize:
        size, at = integers("block_size and axis", (block_size, 2 if axis is None else axis), -2)
        _check_size(size)
        if at not in (2, 1, -1, -2):
            raise GraphError("axis is not valid", expected="2 or 1", got=f"axis={axis!r}")
        dtype = _FORMATS[size][0][0] if out_data_type is None else canonical(out_data_type)
        return cls(size, at % 3, bool(transpose), dtype)

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
        scales = scales_shape(shape, *self.blocks)
        return {"Y": (shape, self.out_data_type), "scale": (scales, dtype)}

    def reference(self, input: jax.Array) -> tuple[jax.Array, ...]:
        axis, block = self.blocks
        blocks, most = blocks_of(input, axis, block)
        most = jax.lax.stop_gradient(most)
        if block == 32:
            factor, codes = powers(most, self.out_data_type)
            scale = scales_of(codes, axis)
        else:
            codes, by = _rounded_up(most / largest(self.out_data_type))
            factor = jnp.where(by == 0, 0, 1 / by)
            scale = scales_of(codes, axis, E4M3).astype(jnp.float32)
        scaled = blocks * factor[..., None]
        return without_blocks(scaled, input.shape, axis), jax.lax.stop_gradient(scale)

    def jvp(
        self, g: Derivation, tangents: Values, inputs: Values, outputs: Values
    ) -> dict[str, GraphTensor]:
        node = Tangent(self, ("input",), ("Y",), ("input",))  # scales have none
        (out,) = g.apply(node, **inputs, **{node.given["input"]: tangents["input"]})
        return {"Y": out}

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        if not {"Y", "scale"} <= {*tensors} or tensors["Y"].dtype != self.out_data_type:
            return Reason("one of its results is not used, or has another dtype")
        if not {tensors["Y"].name, tensors["scale"].name} <= {*graph.outputs}:
            return Reason("what it computes is read in the same graph")
        return super().support(tensors, graph)


def _rounded_up(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The codes of the smallest float8_e4m3fn that are at least x, and their values; 448 at most,
    NaN for what is not finite."""
    near = jnp.minimum(x, largest(E4M3)).astype(E4M3)
    codes = jax.lax.bitcast_convert_type(near, jnp.uint8)
    below = (near.astype(jnp.float32) < x) & (codes < 0x7E)
    codes = jnp.where(jnp.isfinite(x), codes + below, 0x7F).astype(jnp.uint8)
    return codes, jax.lax.bitcast_convert_type(codes, jnp.dtype(E4M3)).astype(jnp.float32)
