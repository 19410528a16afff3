"""Runs a plan: in a program, or eagerly on given arrays, on a given GPU, optionally in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from . import compat, ffi
from .compat import Device
from .cuda import CudaDevice
from .errors import GraphError, GraphTypeError, TargetError, shown
from .graph.boundary import boundary
from .graph.layout import layout
from .graph.spec import GraphSpec, Tensor
from .graph.xla_form import NARROW, evaluate
from .planning.planned_graph import PlannedGraph, PlannedSegment, Segments

InPlace = Mapping[str | int, str | int]

# https://docs.nvidia.com/deeplearning/cudnn/backend/latest/developer/graph-api.html
_ONE_NODE = (
    "cuDNN supports in-place operation for graphs of one node only; in larger graphs it treats a "
    "result that shares an operand's memory as a cycle"
)


def run(plan: PlannedGraph, name: str, *arrays: Any, **how: Any) -> list[jax.Array]:
    """The outputs of a graph according to its plan: cuDNN segments by :func:`ffi.call`, which takes
    ``how``, XLA segments by their reference."""
    read = {tensor for segment in plan.segments for tensor in segment.spec.inputs}

    def part(segment: PlannedSegment, *inputs: Any) -> Sequence[jax.Array]:
        if segment.plan is None:
            form = "" if segment.strict else NARROW
            given = boundary(segment.spec).clipped(inputs)
            return evaluate(segment.spec, *given, products=form, read=read)
        return ffi.call(segment.plan, segment.spec, name, *inputs, **how)

    return in_order(plan.segments, plan.spec, arrays, part)


def in_order(
    segments: Segments,
    spec: GraphSpec,
    operands: Sequence[Any],
    execute: Callable[..., Sequence[Any]],
) -> list[Any]:
    """The outputs of a graph, segment by segment: ``execute(segment, *inputs)`` gives outputs."""
    values = dict(zip(spec.inputs, operands, strict=True))
    for segment in segments:
        results = execute(segment, *(values[name] for name in segment.spec.inputs))
        values.update(zip(segment.spec.outputs, results, strict=True))
    return [values[name] for name in spec.outputs]


# -- eagerly ---------------------------------------------------------------------------------------


def execute(
    plan: PlannedGraph,
    arrays: Sequence[Any],
    device: Device | None,
    in_place: InPlace | None,
) -> Any:
    """See :meth:`jax_cudnn.Plan.execute`."""
    pairs = _pairs(plan, {} if in_place is None else in_place)
    placed = on_device(plan, arrays, device)
    outputs = program(plan, pairs)(*placed)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


@functools.lru_cache(maxsize=256)
def program(plan: PlannedGraph, in_place: tuple[tuple[int, int], ...] = ()) -> Any:
    """The jitted function that runs a plan; ``in_place`` pairs operands and results by position."""
    planned = functools.partial(run, plan, plan.name, in_place=dict(in_place))
    return jax.jit(planned, donate_argnums=[operand for operand, _ in in_place])


# -- arrays and GPUs -------------------------------------------------------------------------------


def on_device(
    plan: PlannedGraph,
    arrays: Sequence[Any],
    device: Device | None,
) -> list[jax.Array]:
    """The arrays on the GPU that will run the plan, after checking that they fit."""
    _check_arrays(plan, arrays)
    gpu = gpu_for(plan, arrays, device)

    def lies_there(x: Any) -> bool:  # committed: others follow ``jax.default_device``
        return isinstance(x, jax.Array) and x.committed and x.devices() == {gpu}

    return [x if lies_there(x) else jax.device_put(x, gpu) for x in arrays]


def gpu_for(
    plan: PlannedGraph,
    arrays: Sequence[Any],
    device: Device | None,
) -> Device:
    """The given GPU, else that of the arrays, else that of the plan, else the first of its model.

    Raises:
        TargetError: there is no GPU, or it has another model.
        GraphTypeError: ``device`` is not a jax.Device.
    """
    if device is not None and not isinstance(device, jax.Device):
        raise GraphTypeError(
            f"{plan.name}: device is not a jax.Device",
            expected="one of jax.devices()",
            got=shown(device),
            fix='device=jax.devices("cuda")[0]',
        )
    if device is None:
        used = {d: None for x in arrays if isinstance(x, jax.Array) for d in x.devices()}
        own = plan.site.ordinal if isinstance(plan.site, CudaDevice) else None
        local = [*used, *sorted(jax.local_devices(), key=lambda d: d.local_hardware_id != own)]
        device = next(filter(compat.is_cuda, local), None)
    if device is None or not compat.is_cuda(device):
        raise TargetError(
            f"{plan.name}: a plan executes on an NVIDIA GPU only",
            got="no GPU in this process" if device is None else str(device),
            why="a plan is a cuDNN kernel",
            fix="call the function itself: elsewhere it runs its reference, with the same results",
        )
    models = {own.device_name for own in plan.execution_plans} - {device.device_kind}
    if models:
        raise TargetError(
            f"{plan.name}: this plan is for another GPU",
            expected=", ".join(sorted(models)),
            got=f"{device.device_kind}, {device}",
            why="a cuDNN plan runs only on the GPU model for which it was built",
            fix="plan for this GPU: jax_cudnn.plan(fn, *args) outside jax_cudnn.target",
        )
    return device


def _check_arrays(plan: PlannedGraph, arrays: Sequence[Any]) -> None:
    expected = plan.spec.input_tensors
    if len(arrays) != len(expected):
        raise GraphError(
            f"{plan.name}: expected {len(expected)} arrays, got {len(arrays)}",
            expected=", ".join(map(str, expected)) or "none",
            got=f"{len(arrays)} arrays",
        )
    for tensor, array in zip(expected, arrays, strict=True):
        if isinstance(array, Tracer):
            raise GraphTypeError(
                f"{plan.name}: a plan executes with arrays, not tracers",
                got=str(array),
                fix="inside jit, call the function; fn.with_options(**plan.pinned)(...) makes the "
                "same choice of engine",
            )
        if not isinstance(array, (jax.Array, np.ndarray, np.generic)) or (
            (array.shape, array.dtype.name) != (tensor.shape, tensor.dtype)
        ):
            shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
            raise GraphError(
                f"{plan.name}: operand {tensor.name!r} does not fit the plan",
                expected=str(tensor),
                got=repr(array)[:80] if dtype is None else f"{dtype}{list(shape or ())}",
                why="a plan has fixed shapes and dtypes",
            )


# -- in place --------------------------------------------------------------------------------------


def _pairs(plan: PlannedGraph, in_place: InPlace) -> tuple[tuple[int, int], ...]:
    """Operands and results by position, after checking that they may share memory."""
    if not isinstance(in_place, Mapping):
        raise GraphTypeError(
            f"{plan.name}: in_place is not a dictionary",
            expected='results and the operands whose memory they reuse: {0: 0}, or {"y": "x"}',
            got=shown(in_place),
        )
    if not in_place:
        return ()
    spec, own = plan.spec, plan.only
    call, *others = spec.calls
    if others:
        raise _not_in_place(plan, _ONE_NODE, got=", ".join(call.name for call in spec.calls))
    if not call.node.ports.is_elementwise or own.tables:
        why = f"{call.name} would read elements that it has already overwritten"
        raise _not_in_place(plan, why, expected="an elementwise operation")
    pairs = []
    for output, operand in in_place.items():
        result, source = _tensor(plan, output, "outputs"), _tensor(plan, operand, "inputs")
        if (result.shape, result.dtype) != (source.shape, source.dtype) or result.dtype == "bool":
            why = "a result and the operand whose memory it reuses need the same shape and dtype"
            raise _not_in_place(plan, why, got=f"{source} and {result}; booleans are converted")
        orders = {layout(spec).order(tensor) for tensor in (result, source)}
        if orders != {tuple(range(len(result.shape)))}:
            why = "JAX arrays are row-major, and this plan uses another layout: XLA would copy them"
            raise _not_in_place(plan, why, got=f"orders {orders} of {source} and {result}")
        pairs.append((spec.inputs.index(source.name), spec.outputs.index(result.name)))
    for both in zip(*pairs, strict=True):  # operands, results
        if len({*both}) < len(both):
            why = "each operand can hold one result, and each result can reuse one operand"
            raise _not_in_place(plan, why, got=repr(in_place))
    return tuple(sorted(pairs))


def _tensor(plan: PlannedGraph, key: str | int, which: str) -> Tensor:
    names: tuple[str, ...] = getattr(plan.spec, which)
    known = {**dict(zip(names, names, strict=True)), **dict(enumerate(names))}
    if key not in known:
        raise GraphError(
            f"{plan.name}: in_place names something that is not an input or output of the graph",
            expected=f"{{output: operand}}; {which}: {', '.join(names)}, or their positions",
            got=repr(key),
        )
    return plan.spec.tensor(known[key])


def _not_in_place(plan: PlannedGraph, why: str, **parts: str) -> GraphError:
    return GraphError(
        f"{plan.name}: this graph cannot run in place",
        why=why,
        fix="omit in_place, or donate the array to a jitted function: XLA then reuses its memory "
        "for a later result",
        **parts,
    )
