"""cuDNN's native CUDA graphs, for users who build CUDA graphs themselves.

XLA programs need none of this: XLA's command buffers capture our calls.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from . import candidates, execution, ffi
from .compat import Device
from .errors import GraphError, GraphTypeError, LibraryError, UnsupportedGraphError
from .graph.boundary import boundary, stored
from .graph.layout import layout
from .graph.merging import is_reread
from .graph.spec import Tensor

if TYPE_CHECKING:
    from .planning.execution_plan import ExecutionPlan
    from .planning.planned_graph import PlannedGraph

NOTE = "SUPPORTS_CUDA_GRAPH_NATIVE_API"
_INSTEAD = "capture a jitted call on a stream, or rely on XLA's command buffers"


class _Buffer(ctypes.Structure):
    """csrc/executor.h's ``Buffer``."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_int64))


def record(
    plan: PlannedGraph,
    cuda_graph: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    workspace: Any,
    update: bool,
) -> None:
    """See :meth:`jax_cudnn.Plan.populate_cuda_graph`."""
    own = plan.only
    _check(plan)
    if not _is_address(cuda_graph):
        raise GraphTypeError(
            f"{plan.name}: not a CUDA graph",
            expected="a cudaGraph_t as an integer",
            got=repr(cuda_graph)[:80],
        )
    arrays = [x for x in (*operands, *results, workspace) if isinstance(x, jax.Array)]
    device = execution.gpu_for(plan, arrays, None)
    given = [
        *_pointers(plan, plan.spec.input_tensors, operands, "operands", device),
        *_pointers(plan, plan.spec.output_tensors, results, "results", device),
        _workspace(plan, workspace, device),
    ]
    message = _library().JaxCudnnRecord(
        ctypes.c_void_p(_call_site(own, plan.name)),
        ctypes.c_int32(device.local_hardware_id),
        ctypes.c_void_p(device.get_stream_for_external_ready_events()),
        (_Buffer * len(given))(*given),
        ctypes.c_size_t(len(operands)),
        ctypes.c_size_t(len(given) - len(operands)),
        ctypes.c_void_p(int(cuda_graph)),
        ctypes.c_int(update),
    )
    if message:
        raise LibraryError(message.decode(errors="replace"))


@functools.cache
def _library() -> ctypes.CDLL:
    loaded = ffi.library()
    loaded.JaxCudnnNewCallSite.restype = ctypes.c_char_p
    loaded.JaxCudnnRecord.restype = ctypes.c_char_p
    return loaded


_one_at_a_time = threading.Lock()


def _call_site(plan: ExecutionPlan, name: str) -> int:
    with _one_at_a_time:  # else two threads would make one each, and both are kept
        return _new_call_site(plan, name)


@functools.cache  # never freed: CUDA graphs that use its kernels may exist
def _new_call_site(plan: ExecutionPlan, name: str) -> int:
    given, site = ffi.attributes(plan, name), ctypes.c_void_p()
    rows = given["rows"]
    message = _library().JaxCudnnNewCallSite(
        *(given[key].encode() for key in ("device_name", "name", "plan")),
        rows.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)),
        ctypes.c_size_t(rows.size),
        ctypes.c_int64(given["checksum"]),
        ctypes.byref(site),
    )
    if message:
        raise LibraryError(message.decode(errors="replace"))
    assert site.value is not None
    return site.value


def _check(plan: PlannedGraph) -> None:
    """Checks that cuDNN can put the plan into a CUDA graph, and that it needs nothing else."""
    own, spec = plan.only, plan.spec
    if NOTE not in own.behavior_notes:
        able = []
        if plan.site is not None:
            rows = (row for row in candidates.candidates(plan) if row.supported is not False)
            able = [row.index for row in rows if NOTE in row.behavior_notes]
        raise UnsupportedGraphError(
            f"{plan.name}: cuDNN has no native CUDA graph of this engine",
            expected=f"an engine with the behaviour note {NOTE}",
            got=f"{own.engine}, with {', '.join(own.behavior_notes) or 'no behaviour notes'}",
            fix=f"plan.select(i) with i one of {able}" if able else _INSTEAD,
        )
    sent = boundary(spec).planned
    edge = zip(
        (*spec.input_tensors, *spec.output_tensors),
        (*sent.input_tensors, *sent.output_tensors),
        strict=False,
    )
    initial = boundary(sent).initial
    around = [
        *["offsets, lengths and page indices are clipped to their bounds"] * boundary(spec).indexes,
        *("its workspace is initialised" for _ in own.fills),
        *("it reads additional tables" for _ in own.tables),
        *(
            f"{t.name} is converted"
            for t, s in edge
            if stored(s) != (s.shape if is_reread(t, s) else t.shape, t.dtype)
        ),
        *(f"{t.name} is initialised" for t in sent.output_tensors if t.name in initial),
        *(f"{name} is dropped" for name in sent.outputs[len(spec.outputs) :]),
    ]
    if around:
        raise UnsupportedGraphError(
            f"{plan.name}: this plan needs more than its kernels",
            got="; ".join(dict.fromkeys(around)),
            why="XLA does this around the call, and the CUDA graph would hold the call alone",
            fix=_INSTEAD,
        )


def _pointers(
    plan: PlannedGraph, tensors: Sequence[Tensor], arrays: Sequence[Any], what: str, device: Device
) -> list[tuple[int, int]]:
    """Pointer and bytes of each array, after checking its layout against the plan."""
    if len(arrays) != len(tensors):
        raise GraphError(
            f"{plan.name}: expected {len(tensors)} {what}, got {len(arrays)}",
            expected=", ".join(map(str, tensors)) or "none",
            got=f"{len(arrays)} {what}",
        )
    return [
        (_pointer(plan, tensor, array, device), tensor.nbytes)
        for tensor, array in zip(tensors, arrays, strict=True)
    ]


def _pointer(plan: PlannedGraph, tensor: Tensor, array: Any, device: Device) -> int:
    if _is_address(array):
        return int(array)
    order = layout(boundary(plan.spec).planned).order(tensor)
    got = _order(array) if isinstance(array, jax.Array) else None
    fits = got is not None and (array.shape, array.dtype.name) == (tensor.shape, tensor.dtype)
    if not fits or _strided(tensor.shape, got) != _strided(tensor.shape, order):
        shown = f"{array.dtype.name}{list(array.shape)}, order {got}" if got else repr(array)[:80]
        raise GraphError(
            f"{plan.name}: {tensor.name!r} does not fit the plan",
            expected=f"a JAX array {tensor} with dimensions in memory order {order}, slowest "
            "first, or a device pointer",
            got=shown,
            fix="jax.device_put(x, jax.experimental.layout.Format(Layout(order), x.sharding))",
        )
    return _address(plan, tensor.name, array, device)


def _is_address(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _address(plan: PlannedGraph, what: str, array: jax.Array, device: Device) -> int:
    """The address of an array on the GPU whose kernels will read it."""
    if array.devices() != {device}:
        raise GraphError(
            f"{plan.name}: {what!r} is not on the GPU of the plan",
            expected=str(device),
            got=", ".join(sorted(map(str, array.devices()))),
            why="the CUDA graph stores an address, which is valid on one GPU only",
            fix="move it there, jax.device_put(x, device), and keep that array alive",
        )
    return array.unsafe_buffer_pointer()


def _order(array: Any) -> tuple[int, ...]:
    """The dimensions of a JAX array, from slowest to fastest in memory."""
    order = getattr(array.format.layout, "major_to_minor", None)
    return tuple(range(array.ndim)) if order is None else tuple(order)


def _strided(shape: Sequence[int], order: Sequence[int] | None) -> list[int]:
    """The order of the dimensions whose size is not 1."""
    return [axis for axis in order or () if shape[axis] != 1]


def _workspace(plan: PlannedGraph, workspace: Any, device: Device) -> tuple[int, int]:
    needed = plan.only.workspace_bytes
    if _is_address(workspace):
        return int(workspace), needed
    if isinstance(workspace, jax.Array) and workspace.nbytes >= needed:
        return _address(plan, "workspace", workspace, device), workspace.nbytes
    if workspace is None and needed == 0:
        return 0, 0
    raise GraphError(
        f"{plan.name}: the workspace is too small",
        expected=f"a JAX array of {needed} bytes on the GPU, or a device pointer to {needed} bytes",
        got="none" if workspace is None else f"{getattr(workspace, 'nbytes', workspace)!r}",
    )
