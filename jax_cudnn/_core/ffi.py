"""Loads the shared library, registers it with XLA, and makes the custom call."""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import struct
import sysconfig
import zlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import LibraryError
from .graph.boundary import boundary, stored
from .graph.layout import layout
from .graph.spec import GraphSpec
from .package import packaged_library
from .planning.execution_plan import (
    CONSTANT,
    RESULT,
    SCALAR_STRIDE,
    SLOT,
    UNBOUND,
    ExecutionPlan,
)

TARGET = "jax_cudnn"
LIBRARY = "libjax_cudnn.so"
MEMSET = 5  # a kind of a row, after those of execution_plan.py
PLATFORM = "CUDA"  # lower case is accepted by JAX, and then never registered


@functools.cache
def library() -> ctypes.CDLL:
    """The executor. RTLD_LOCAL: its C++ runtime must not meet another library's."""
    try:
        loaded = ctypes.CDLL(str(packaged_library(LIBRARY)), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise LibraryError(
            "the executor library of jax_cudnn cannot be loaded",
            got=str(error),
            why="`pip install` builds it on Linux only; elsewhere, and on CPU and TPU, graphs run "
            "as their reference",
            fix="install the wheel for this system, or build it: pip install . (needs a C++17 "
            "compiler)",
        ) from error
    loaded.JaxCudnnLoadedPath.restype = ctypes.c_char_p
    loaded.JaxCudnnSetFallbackPath(os.fsencode(_packaged_cudnn() or ""))
    return loaded


@functools.cache
def register() -> None:
    """Registers the handlers with XLA; safe without a CUDA plugin, where nothing calls them."""
    loaded = library()
    handlers = {
        "instantiate": jax.ffi.pycapsule(loaded.JaxCudnnInstantiate),
        "initialize": jax.ffi.pycapsule(loaded.JaxCudnnInitialize),
        "execute": jax.ffi.pycapsule(loaded.JaxCudnnExecute),
    }
    jax.ffi.register_ffi_target(TARGET, handlers, platform=PLATFORM)


def call(
    plan: ExecutionPlan, spec: GraphSpec, name: str, *operands: Any, **how: Any
) -> Sequence[jax.Array]:
    """The outputs of :func:`outputs_and_workspace`."""
    return outputs_and_workspace(plan, spec, name, *operands, **how)[0]


def outputs_and_workspace(
    plan: ExecutionPlan,
    spec: GraphSpec,
    name: str,
    *operands: Any,
    in_place: Mapping[int, int] = MappingProxyType({}),
    after: jax.Array | None = None,
) -> tuple[Sequence[jax.Array], jax.Array]:
    """The custom call: operands and outputs in the plan's layouts, and the workspace.

    ``in_place``: operands by position whose memory a result takes. ``after``: the workspace of
    another call, which this one then follows; it does not read it.
    """
    register()
    edge = boundary(spec)
    planned, given = edge.planned, edge.sent(operands)
    held = [*map(stored, planned.output_tensors)]
    results = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in held]
    given += [jnp.asarray(table, jnp.float32) for table in plan.tables]
    initial = edge.initial
    begun = {  # results that the plan writes a part of, and what the other parts hold
        i: _word(value, result.dtype)
        for i, (t, result) in enumerate(zip(planned.output_tensors, results, strict=True))
        if (value := initial.get(t.name)) is not None
    }
    followed = () if after is None else (after,)
    orders = layout(planned).orders
    layouts_in = [orders[name] for name in planned.inputs]
    layouts_out = [orders[name] for name in planned.outputs]
    flat = (0,)
    workspace = jax.ShapeDtypeStruct((max(1, plan.workspace_bytes),), jnp.uint8)
    *outputs, used = jax.ffi.ffi_call(
        TARGET,
        [*results, workspace],
        input_layouts=[*layouts_in, *(flat for _ in (*plan.tables, *followed))],
        output_layouts=[*layouts_out, flat],
        input_output_aliases=dict(in_place),
    )(*given, *followed, **attributes(plan, name, begun))
    return edge.received(outputs), used


def attributes(
    plan: ExecutionPlan, name: str, begun: Mapping[int, int] = MappingProxyType({})
) -> dict[str, Any]:
    """The custom call's attributes. ``begun``: words, by results that they fill before each run.

    ``device_name`` and ``plan`` are the plan's, ``name`` is for messages. ``rows`` of 4 numbers of
    64 bits are the version of cuDNN, the bytes of the workspace (the last result), where cuDNN's
    own begins in it, and 0; and then what each tensor of the plan points to: (uid, kind, value,
    bytes), the graph's operands in order, its results in order, and more. The uid -1: it is not the
    plan's. The kinds:

    - 0, operand, and 1, result: its number, and its exact bytes.
    - 2, workspace: an offset in it before cuDNN's own, a multiple of 16.
    - 3, constant: value and bytes are its 16 bytes, which cuDNN reads on the host.
    - 4, view: an earlier row, and the offset from its pointer, a multiple of 16.
    - 5, memset: an earlier row (a result, or workspace), and the bytes that are written there
      before each execution. The uid is the word of 4 bytes that they repeat. Memset, because a
      captured copy would read its source again at each replay, and because XLA passes a result
      other memory than the operand that it should alias where it fuses the call with slices.

    ``checksum``: the CRC-32 of all others in alphabetical order. A damaged or edited program is
    rejected before cuDNN sees it; it does not protect against a program with another checksum.
    """
    rows = [(plan.cudnn_version, plan.workspace_bytes, plan.plan_workspace_offset, 0)]
    for uid, kind, place, size in plan.bindings:
        if kind == CONSTANT and not 0 <= place <= len(plan.scalars) - SCALAR_STRIDE:
            raise LibraryError(f"{name}: a constant of the plan is not in its constants")
        constant = struct.unpack_from("<2q", plan.scalars, place) if kind == CONSTANT else ()
        rows.append((uid, kind, *(constant or (place, size))))
    results = [i for i, row in enumerate(plan.bindings) if row[1] == RESULT]
    memsets = [
        (word, MEMSET, results[i], plan.bindings[results[i]][3]) for i, word in begun.items()
    ]
    for place, unit, count, word in plan.fills:
        if unit != 4 and word:
            raise LibraryError(f"{name}: the executor cannot write words of {unit} bytes")
        memsets.append((word, MEMSET, len(rows) - 1, unit * count))
        rows.append((UNBOUND, SLOT, place, unit * count))
    given = {
        "device_name": plan.device_name,
        "name": name,
        "plan": plan.text,
        "rows": np.array([*rows, *memsets], np.int64).reshape(-1),
    }
    data = b"".join(v.encode() if isinstance(v, str) else v.tobytes() for v in given.values())
    return {**given, "checksum": np.int64(zlib.crc32(data))}


def _word(value: float, dtype: Any) -> int:
    """The 4 bytes that the executor repeats in a result of this value."""
    if value and dtype != np.float32:
        raise LibraryError(f"the executor cannot fill a result of {dtype} with {value}")
    return int(np.float32(value).view(np.uint32))


def _packaged_cudnn() -> str | None:
    """libcudnn of the nvidia-cudnn package, for a process in which JAX has loaded none."""
    packages = sysconfig.get_path("purelib")
    found = glob.glob(os.path.join(packages, "nvidia", "cudnn", "lib", "libcudnn.so.9"))
    return found[0] if found else None
