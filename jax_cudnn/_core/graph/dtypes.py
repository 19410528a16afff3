"""One table between JAX's dtypes and cuDNN's data types, by name (no cuDNN needed)."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import GraphError, GraphTypeError, nearest

# JAX's name -> the name of the member of cudnn.data_type.
TO_CUDNN = {
    "float32": "FLOAT",
    "bfloat16": "BFLOAT16",
    "float16": "HALF",
    "float64": "DOUBLE",
    "float8_e4m3fn": "FP8_E4M3",
    "float8_e5m2": "FP8_E5M2",
    "float8_e8m0fnu": "FP8_E8M0",
    "float4_e2m1fn": "FP4_E2M1",
    "int8": "INT8",
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOLEAN",
}
FROM_CUDNN = {cudnn: jax for jax, cudnn in TO_CUDNN.items()}
WORDS = "uint32"
"""Pairs of these along the last dimension, the low word first, are cuDNN's INT64: JAX has 64-bit
integers only where x64 is enabled."""

CUDNN_FLOATS = ("float32", "bfloat16", "float16")
FLOATS = (*CUDNN_FLOATS, "float64")
"""float64 runs in XLA: cuDNN has no engine for it."""
FP8 = ("float8_e4m3fn", "float8_e5m2")
E8M0 = "float8_e8m0fnu"
"""Powers of two: the scales of blocks, in no arithmetic."""
FP4 = "float4_e2m1fn"
"""Values of blocks, in no arithmetic. cuDNN packs two into a byte."""
NARROW = (*FP8, FP4)
INTEGERS = ("int8", "uint8", "int32", "int64")
NUMBERS = (*FLOATS, *FP8, *INTEGERS)
PRODUCTS = (*FLOATS, *FP8, "int8")
"""Element types that convolutions and matmuls take."""


def canonical(dtype: Any) -> str:
    """The JAX name of a dtype given as a NumPy or JAX dtype, a string, or a cudnn.data_type."""
    name = getattr(dtype, "name", dtype)
    if isinstance(name, str) and name in FROM_CUDNN:
        return FROM_CUDNN[name]
    fix = "cast the array before the call, for example x.astype(jnp.float32)"
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
        fix = nearest(name, TO_CUDNN, fix)
    if name == "float64" and not jax.config.read("jax_enable_x64"):
        raise GraphTypeError(
            "float64 needs jax_enable_x64",
            expected=", ".join(t for t in TO_CUDNN if t != name),
            got=name,
            fix='enable it, jax.config.update("jax_enable_x64", True), or cast the array, for '
            "example x.astype(jnp.float32)",
        )
    if name not in TO_CUDNN:
        raise GraphTypeError(
            "cuDNN has no data type for this dtype",
            expected=", ".join(TO_CUDNN),
            got=name,
            fix=fix,
        )
    return name


@functools.cache
def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return np.dtype(jnp.dtype(dtype)).itemsize


def is_floating(dtype: str) -> bool:
    return dtype in FLOATS or dtype in FP8 or dtype == FP4


def wide_dtype(*arrays: Any) -> np.dtype:
    """The dtype in which floats are computed and accumulated: float64 if any array or tensor has
    it, else float32."""
    return np.dtype("float64" if any(x.dtype == "float64" for x in arrays) else "float32")


def float32_range(name: str, value: Any) -> float:
    """The number itself; GraphError when it is finite and float32, which computes, is not."""
    if float(np.finfo(np.float32).max) < abs(value) < float("inf"):
        raise GraphError(
            f"{name!r} is too large",
            expected="a number in the range of float32, in which graphs compute",
            got=repr(value),
        )
    return float(value)


def promotes_to_integer(dtypes: Iterable[str]) -> bool:
    """Whether a Python int with arrays of these dtypes stays an integer; booleans only select."""
    kinds = {*dtypes} - {"bool"}
    return bool(kinds) and kinds <= {*INTEGERS}


def int32_range(name: str, value: Any) -> None:
    """GraphError for a Python int that int32, which computes with integer arrays, cannot hold."""
    if not -(2**31) <= value < 2**31:
        raise GraphError(
            f"{name!r} is too large",
            expected="an integer within int32, with integer tensors",
            got=repr(value),
            fix=f"give {name}={float(value)!r}, which computes in float32",
        )


# Types in which operations compute and accumulate. The last one is float32 with fewer bits kept
# between the steps of an fp8 product on the tensor cores of SM90.
COMPUTE = ("float32", "float16", "float64", "int32", "bool", "fast_float_for_fp8")


def canonical_compute(dtype: Any) -> str:
    """The name of a compute type; GraphTypeError for others."""
    name = getattr(dtype, "name", dtype)
    name = name.lower() if isinstance(name, str) else name
    if name != "fast_float_for_fp8":
        name = canonical(dtype)
    if name not in COMPUTE:
        raise GraphTypeError(
            "unsupported compute_data_type",
            expected=", ".join(COMPUTE),
            got=str(name),
            fix="leave it out, or say float32, in which products of floats accumulate; to a "
            "cudnn.pygraph give compute_data_type=cudnn.data_type.FLOAT",
        )
    return name


def arithmetic(compute: str) -> np.dtype:
    """The NumPy dtype in which a reference computes for a compute type."""
    return jnp.dtype("float32" if compute == "fast_float_for_fp8" else compute)


def cudnn_name(dtype: str) -> str:
    """The member of cudnn.data_type for a dtype or compute type."""
    return TO_CUDNN.get("int64" if dtype == WORDS else dtype) or dtype.upper()
