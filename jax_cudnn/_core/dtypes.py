"""One table between JAX's dtypes and cuDNN's data types, by name (no cuDNN needed)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from .errors import GraphTypeError

# JAX's name -> the name of the member of cudnn.data_type.
TO_CUDNN = {
    "float32": "FLOAT",
    "bfloat16": "BFLOAT16",
    "float16": "HALF",
    "float8_e4m3fn": "FP8_E4M3",
    "float8_e5m2": "FP8_E5M2",
    "int8": "INT8",
    "uint8": "UINT8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOLEAN",
}
FROM_CUDNN = {cudnn: jax for jax, cudnn in TO_CUDNN.items()}

FLOATS = ("float32", "bfloat16", "float16")


def canonical(dtype: Any) -> str:
    """The JAX name of a dtype given as a NumPy or JAX dtype, a string, or a cudnn.data_type."""
    name = getattr(dtype, "name", dtype)
    if isinstance(name, str) and name in FROM_CUDNN:
        return FROM_CUDNN[name]
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in TO_CUDNN:
        raise GraphTypeError(
            "no cuDNN data type stands for this dtype",
            expected=", ".join(TO_CUDNN),
            got=name,
            why="float64 and complex have no cuDNN kernels" if name == "float64" else None,
            fix="cast the array before the call, for example x.astype(jnp.float32)",
        )
    return name


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return np.dtype(jnp.dtype(dtype)).itemsize
