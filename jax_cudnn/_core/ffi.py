"""Loads the shared library, registers it with XLA, and makes the custom call."""

from __future__ import annotations

import ctypes
import functools
import glob
import math
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
from .graph.boundary import initial_values, stored, wire
from .graph.layout import layout
from .graph.merging import is_reread, reread, widened
from .graph.spec import GraphSpec, Tensor
from .package import packaged_library
from .planning.execution_plan import CONSTANT, RESULT, ExecutionPlan

TARGET = "jax_cudnn"
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
    sent, wide = wire(spec), widened(spec)
    operands = tuple(
        x if wired is t else _sent(x, t, wired)
        for x, t, wired in zip(operands, wide.input_tensors, sent.input_tensors, strict=True)
    )
    results = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for shape, dtype in map(stored, sent.output_tensors)
    ]
    operands += tuple(jnp.asarray(table, jnp.float32) for table in plan.tables)
    initial = initial_values(sent)
    begun = [  # results that the plan writes a part of, and what the other parts hold
        (i, 0, math.prod(result.shape) * result.dtype.itemsize, _word(value, result.dtype))
        for i, (t, result) in enumerate(zip(sent.output_tensors, results, strict=True))
        if (value := initial.get(t.name)) is not None
    ]
    followed = () if after is None else (after,)
    orders = layout(sent).orders
    layouts_in = [orders[name] for name in sent.inputs]
    layouts_out = [orders[name] for name in sent.outputs]
    flat = (0,)
    workspace = jax.ShapeDtypeStruct((max(1, plan.workspace_bytes),), jnp.uint8)
    *outputs, used = jax.ffi.ffi_call(
        TARGET,
        [*results, workspace],
        input_layouts=[*layouts_in, *(flat for _ in (*plan.tables, *followed))],
        output_layouts=[*layouts_out, flat],
        input_output_aliases=dict(in_place),
    )(*operands, *followed, **attributes(plan, name, begun))
    own = outputs[: len(spec.outputs)]  # the rest is unused
    given = zip(own, sent.output_tensors, wide.output_tensors, strict=False)
    return [y if wired is t else _given(y, wired, t) for y, wired, t in given], used


def attributes(
    plan: ExecutionPlan, name: str, begun: Sequence[tuple[int, int, int, int]] = ()
) -> dict[str, Any]:
    """The custom call's attributes. All numbers are 64 bits.

    ``plan``, ``name`` (for messages), ``device_name``, ``cudnn_version``, ``workspace_bytes`` (of
    the last result) and ``plan_workspace_offset`` (where cuDNN's own begins in it) are the plan's.

    ``bindings``: rows (uid, kind, value, bytes), what each tensor of the plan points to: the
    graph's operands in order, its results in order, and more. The uid -1: it is not the plan's.

    - 0, operand, and 1, result: its number, and its exact bytes.
    - 2, workspace: an offset in it before cuDNN's own, a multiple of 16.
    - 3, constant: value and bytes are its 16 bytes, which cuDNN reads on the host.
    - 4, view: an earlier row, and the offset from its pointer, a multiple of 16.

    ``memsets``: rows (result, offset, bytes, word), what is written before each execution: 4 bytes
    that are repeated, or zeros. Memset, because a captured copy would read its source again at each
    replay, and because XLA passes a result other memory than the operand that it should alias
    where it fuses the call with slices of its operands.

    ``checksum``: the CRC-32 of all others in alphabetical order. A damaged or edited program is
    rejected before cuDNN sees it; it does not protect against a program with another checksum.
    """
    results = sum(kind == RESULT for _, kind, _, _ in plan.bindings)
    bindings = [
        (uid, kind, *struct.unpack_from("<2q", plan.scalars, at))
        if kind == CONSTANT
        else (uid, kind, at, size)
        for uid, kind, at, size in plan.bindings
    ]
    fills = [(results, at, unit * count, word) for at, unit, count, word in plan.fills]
    given = {
        "plan": plan.text,
        "name": name,
        "cudnn_version": np.int64(plan.cudnn_version),
        "device_name": plan.device_name,
        "bindings": np.array(bindings, np.int64).reshape(-1),
        "memsets": np.array([*fills, *begun], np.int64).reshape(-1),
        "workspace_bytes": np.int64(plan.workspace_bytes),
        "plan_workspace_offset": np.int64(plan.plan_workspace_offset),
    }
    data = b"".join(as_bytes(value) for _, value in sorted(given.items()))
    return {**given, "checksum": np.int64(zlib.crc32(data))}


def as_bytes(value: Any) -> bytes:
    """An attribute as the executor reads it."""
    return value.encode() if isinstance(value, str) else value.tobytes()


def _word(value: float, dtype: Any) -> int:
    """The 4 bytes that the executor repeats in a result of this value."""
    assert value == 0 or dtype == np.float32
    return int(np.float32(value).view(np.uint32))


def _sent(x: jax.Array, tensor: Tensor, wired: Tensor) -> jax.Array:
    """What a plan reads for a tensor of the graph, see graph/boundary.py."""
    if is_reread(tensor, wired):
        x = reread(jnp.broadcast_to(x, tensor.shape), tensor, wired)
    shape, dtype = stored(wired)
    return jnp.broadcast_to(x.astype(dtype), shape)


def _given(x: jax.Array, wired: Tensor, tensor: Tensor) -> jax.Array:
    """What a plan has written for a tensor of the graph: added up where that has one element, and a
    boolean again, see graph/boundary.py."""
    x = reread(x, wired, tensor) if is_reread(tensor, wired) else x
    pairs = zip(x.shape, tensor.shape, strict=True)
    axes = tuple(i for i, (own, wanted) in enumerate(pairs) if own != wanted)
    x = jnp.sum(x, axes, dtype=jnp.float32, keepdims=True) if axes else x
    return x.astype(tensor.dtype)


def _packaged_cudnn() -> str | None:
    """libcudnn of the nvidia-cudnn package, for a process in which JAX has loaded none."""
    packages = sysconfig.get_path("purelib")
    found = glob.glob(os.path.join(packages, "nvidia", "cudnn", "lib", "libcudnn.so.9"))
    return found[0] if found else None
