"""Loads the shared library, registers it with XLA, and makes the custom call."""

from __future__ import annotations

import ctypes
import functools
import glob
import itertools
import os
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
from .planning.execution_plan import ExecutionPlan

TARGET = "jax_cudnn"
TIMED_TARGET = "jax_cudnn_timed"
LIBRARY = "libjax_cudnn.so"
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
    loaded.JaxCudnnLoadedVersion.restype = ctypes.c_int64
    loaded.JaxCudnnSetFallbackPath(os.fsencode(_packaged_cudnn() or ""))
    return loaded


@functools.cache
def register(target: str = TARGET) -> None:
    """Registers the handlers with XLA; safe without a CUDA plugin, where nothing calls them."""
    loaded, kind = library(), "Timed" if target == TIMED_TARGET else ""
    handlers = {
        "instantiate": loaded.JaxCudnnInstantiate,
        "initialize": getattr(loaded, f"JaxCudnn{kind}Initialize"),
        "execute": getattr(loaded, f"JaxCudnn{kind}Execute"),
    }
    capsules = {stage: jax.ffi.pycapsule(function) for stage, function in handlers.items()}
    jax.ffi.register_ffi_target(target, capsules, platform=PLATFORM)


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
    target: str = TARGET,
    in_place: Mapping[int, int] = MappingProxyType({}),
    after: jax.Array | None = None,
) -> tuple[Sequence[jax.Array], jax.Array]:
    """The custom call: operands and outputs in the plan's layouts, and the workspace.

    ``in_place``: operands by position whose memory a result takes. ``after``: the workspace of
    another call, which this one then follows; it does not read it.
    """
    register(target)
    edge = boundary(spec)
    planned, given = edge.planned, edge.sent(operands)
    results = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for shape, dtype in map(stored, planned.output_tensors)
    ]
    given += [jnp.asarray(table, jnp.float32) for table in plan.tables]
    initial = boundary(planned).initial
    begun = [  # results that the plan writes a part of, and what the other parts hold
        (i, _word(value, result.dtype))
        for i, (t, result) in enumerate(zip(planned.output_tensors, results, strict=True))
        if (value := initial.get(t.name)) is not None
    ]
    followed = () if after is None else (after,)
    orders = layout(planned).orders
    layouts_in = [orders[name] for name in planned.inputs]
    layouts_out = [orders[name] for name in planned.outputs]
    flat = (0,)
    workspace = jax.ShapeDtypeStruct((max(1, plan.workspace_bytes),), jnp.uint8)
    *outputs, used = jax.ffi.ffi_call(
        target,
        [*results, workspace],
        input_layouts=[*layouts_in, *(flat for _ in (*plan.tables, *followed))],
        output_layouts=[*layouts_out, flat],
        input_output_aliases=dict(in_place),
    )(*given, *followed, **attributes(plan, name, [*itertools.chain(*begun)]))
    return edge.received(outputs), used


def attributes(plan: ExecutionPlan, name: str, initial: Sequence[int] = ()) -> dict[str, Any]:
    """The custom call's attributes; ``checksum`` is of the others, see csrc/plan.h."""
    given = {
        "plan": plan.text,
        "name": name,
        "cudnn_version": np.int64(plan.cudnn_version),
        "device_name": plan.device_name,
        "bindings": np.array(plan.bindings, np.int64).reshape(-1),
        "fills": np.array(plan.fills, np.int64).reshape(-1),
        "initial": np.array(initial, np.int64),
        "scalars": np.frombuffer(plan.scalars, np.uint8),
        "workspace_bytes": np.int64(plan.workspace_bytes),
        "plan_workspace_offset": np.int64(plan.plan_workspace_offset),
    }
    values = (value for _, value in sorted(given.items()))
    data = b"".join(v.encode() if isinstance(v, str) else v.tobytes() for v in values)
    return {**given, "checksum": np.int64(zlib.crc32(data))}


def _word(value: float, dtype: Any) -> int:
    """The 4 bytes that the executor repeats in a result of this value."""
    assert value == 0 or dtype == np.float32
    return int(np.float32(value).view(np.uint32))


def _packaged_cudnn() -> str | None:
    """libcudnn of the nvidia-cudnn package, for a process in which JAX has loaded none."""
    packages = sysconfig.get_path("purelib")
    found = glob.glob(os.path.join(packages, "nvidia", "cudnn", "lib", "libcudnn.so.9"))
    return found[0] if found else None
