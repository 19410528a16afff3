"""Graphs of 8-bit, mixed and full-precision products, and of stated layouts: what tests run
beside the fusions of :mod:`.cases`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from .._core.graph.dims import packed_strides
from .case import Case, case

_IMAGE, _WEIGHT, _BIAS = (8, 64, 28, 28), (64, 64, 3, 3), (1, 64, 1, 1)
_A, _B = (1, 128, 256), (1, 256, 512)
_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"


def dtype_cases() -> Iterator[Case]:
    """All of them, named by what they multiply and what leaves the graph."""
    yield _named("conv_int8_to_float32", ((_IMAGE, "int8"), (_WEIGHT, "int8")), _conv("float32"))
    yield _named(
        "conv_int8_scale_bias_relu_to_int8",
        ((_IMAGE, "int8"), (_WEIGHT, "int8"), (_BIAS, "float32"), (_BIAS, "float32")),
        lambda g, x, w, s, b: g.relu(
            g.conv_fprop(x, w, padding=[1, 1]) * s * 0.01 + b
        ).set_data_type("int8"),
    )
    yield _named("matmul_int8", ((_A, "int8"), (_B, "int8")), lambda g, a, b: g.matmul(a, b))
    yield _named(
        "matmul_int8_scale_to_bfloat16",
        ((_A, "int8"), (_B, "int8"), ((1, 1, 512), "float32")),
        lambda g, a, b, s: (g.matmul(a, b) * s).set_data_type("bfloat16"),
    )
    for wide in ("bfloat16", "float16"):
        yield _named(
            f"matmul_{wide}_by_int8",
            ((_A, wide), (_B, "int8")),
            lambda g, a, b, wide=wide: g.matmul(a, g.identity(b).set_data_type(wide)),
        )
    for first, second in ((_E4M3, _E4M3), (_E4M3, _E5M2), (_E5M2, _E5M2)):
        name = f"{first[7:11]}_by_{second[7:11]}"
        yield _named(f"matmul_{name}", ((_A, first), (_B, second)), lambda g, a, b: g.matmul(a, b))
        yield _named(f"conv_{name}", ((_IMAGE, first), (_WEIGHT, second)), _conv("float32"))
    yield _named(
        "matmul_float8_scale_bias_gelu_to_float8",
        ((_A, _E4M3), (_B, _E4M3), ((1, 1, 512), "float32")),
        lambda g, a, b, bias: g.gelu_approx_tanh(
            g.bias(g.matmul(a, b.set_stride(_transposed(b))) * 0.5, bias)
        ).set_data_type(_E4M3),
    )
    yield _named(
        "conv_float8_fast_scale_relu_to_float8",
        ((_IMAGE, _E4M3), (_WEIGHT, _E4M3)),
        lambda g, x, w: g.relu(
            g.conv_fprop(x, w, padding=[1, 1], compute_data_type="fast_float_for_fp8") * 0.5
        ).set_data_type(_E4M3),
    )
    yield _named(
        "conv_float32_highest",
        ((_IMAGE, "float32"), (_WEIGHT, "float32"), (_BIAS, "float32")),
        lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b)),
        precision="highest",
    )
    yield _named(
        "conv_float16_accumulated_in_float16",
        ((_IMAGE, "float16"), (_WEIGHT, "float16")),
        lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1], compute_data_type="float16"),
    )
    yield _named(
        "conv_bias_relu_intermediates_bfloat16",
        ((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16"), (_BIAS, "bfloat16")),
        lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b)),
        intermediate_data_type="bfloat16",
    )
    yield _named(
        "matmul_of_transposed_operands",
        ((_A, "bfloat16"), (_B, "bfloat16")),
        lambda g, a, b: g.matmul(a.set_stride(_transposed(a)), b.set_stride(_transposed(b))),
    )
    yield _named(
        "conv_nchw",
        ((_IMAGE, "bfloat16"), (_WEIGHT, "bfloat16")),
        lambda g, x, w: _row_major(g.conv_fprop(_row_major(x), _row_major(w), padding=[1, 1])),
    )


def _named(name: str, avals: tuple[Any, ...], fn: Callable[..., Any], **options: Any) -> Case:
    fn.__name__ = name
    made = case(*avals)(fn)
    return dataclasses.replace(made, function=made.function.with_options(**options))


def _conv(out: str) -> Callable[..., Any]:
    return lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1]).set_data_type(out)


def _transposed(x: Any) -> list[int]:
    return packed_strides(x.shape, (0, 2, 1))


def _row_major(x: Any) -> Any:
    return x.set_stride(packed_strides(x.shape, tuple(range(x.ndim))))
