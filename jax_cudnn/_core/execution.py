"""A plan that runs by itself: on given arrays, on a given GPU, once or in place of an operand."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer

from . import compat, ffi, lowering
from .compat import Device
from .cuda import CudaDevice
from .errors import GraphError, GraphTypeError, TargetError
from .graph import layout
from .graph.bounds import bounded
from .graph.spec import GraphSpec, Tensor

if TYPE_CHECKING:
    from .planning.execution_plan import ExecutionPlan
    from .planning.plan import Plan

InPlace = Mapping[str | int, str | int]

# https://docs.nvidia.com/deeplearning/cudnn/backend/latest/developer/graph-api.html
_ONE_NODE = (
    "cuDNN takes a graph of several operations in which a result has an operand's memory for a "
    "cycle; it supports in-place operation for graphs of one node"
)


def execute(
    plan: Plan,
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
def program(plan: Plan, in_place: tuple[tuple[int, int], ...] = ()) -> Any:
    """The jitted function of a plan's arrays; ``in_place`` has operands and results by position."""
    call = functools.partial(_call, in_place=dict(in_place))
    run = functools.partial(lowering.run, plan, plan.name, call)
    return jax.jit(run, donate_argnums=[operand for operand, _ in in_place])


def _call(own: ExecutionPlan, spec: GraphSpec, name: str, *operands: Any, **how: Any) -> Any:
    return ffi.call(own, spec, name, *bounded(spec, operands), **how)


# -- arrays and GPUs -------------------------------------------------------------------------------


def on_device(
    plan: Plan,
    arrays: Sequence[Any],
    device: Device | None,
) -> list[jax.Array]:
    """The arrays on the GPU that the plan is to run on, once they are seen to fit."""
    _check_arrays(plan, arrays)
    gpu = gpu_for(plan, arrays, device)
    return [x if _lies_on(x, gpu) else jax.device_put(x, gpu) for x in arrays]


def gpu_for(
    plan: Plan,
    arrays: Sequence[Any],
    device: Device | None,
) -> Device:
    """The GPU named, else that of the arrays, else the plan's own, else the first of its model.

    TargetError where there is none, or one of another model; GraphTypeError for what is no device.
    """
    if device is not None and not isinstance(device, jax.Device):
        raise GraphTypeError(
            f"{plan.name}: device is no device of JAX",
            expected="one of jax.devices()",
            got=f"{type(device).__name__}: {device!r}"[:200],
            fix='device=jax.devices("cuda")[0]',
        )
    if device is None:
        used = {d: None for x in arrays if isinstance(x, jax.Array) for d in x.devices()}
        local = [*used, *sorted(jax.local_devices(), key=lambda d: not _is_planned_on(plan, d))]
        device = next(filter(compat.is_cuda, local), None)
    if device is None or not compat.is_cuda(device):
        raise TargetError(
            f"{plan.name}: a plan executes on an NVIDIA GPU",
            got="no GPU in this process" if device is None else str(device),
            why="what is planned is cuDNN's kernel",
            fix="call the function itself, which runs everywhere: its reference computes the same",
        )
    models = {own.device_name for own in plan.execution_plans} - {device.device_kind}
    if models:
        raise TargetError(
            f"{plan.name}: this plan is for another GPU",
            expected=", ".join(sorted(models)),
            got=f"{device.device_kind}, {device}",
            why="a cuDNN plan runs only on the model that it was built for",
            fix="plan for this GPU: jax_cudnn.plan(fn, *args) outside of jax_cudnn.target",
        )
    return device


def _is_planned_on(plan: Plan, device: Device) -> bool:
    own = plan.site.ordinal if isinstance(plan.site, CudaDevice) else None
    return compat.is_cuda(device) and device.local_hardware_id == own


def _lies_on(array: Any, device: Device) -> bool:
    """Whether an array stays there: one that is not committed follows ``jax.default_device``."""
    return isinstance(array, jax.Array) and array.committed and array.devices() == {device}


def _check_arrays(plan: Plan, arrays: Sequence[Any]) -> None:
    expected = plan.spec.input_tensors
    if len(arrays) != len(expected):
        raise GraphError(
            f"{plan.name}: not as many arrays as the graph has operands",
            expected=", ".join(map(str, expected)) or "none",
            got=f"{len(arrays)} arrays",
        )
    for tensor, array in zip(expected, arrays, strict=True):
        if isinstance(array, Tracer):
            raise GraphTypeError(
                f"{plan.name}: a plan executes arrays, not values of a trace",
                got=str(array),
                fix="inside jit call the function, with this plan's choice if you like: "
                "fn.with_options(**plan.pinned)(...)",
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


def _pairs(plan: Plan, in_place: InPlace) -> tuple[tuple[int, int], ...]:
    """Operands and results by position, once it is seen that they may share memory."""
    if not isinstance(in_place, Mapping):
        raise GraphTypeError(
            f"{plan.name}: in_place is no dictionary",
            expected='results and the operands whose memory they take: {0: 0}, or {"y": "x"}',
            got=f"{type(in_place).__name__}: {in_place!r}"[:200],
        )
    if not in_place:
        return ()
    spec, own = plan.spec, plan.only
    call, *others = spec.calls
    if others:
        raise _not_in_place(plan, _ONE_NODE, got=", ".join(call.name for call in spec.calls))
    if not call.node.ports.is_elementwise or own.tables:
        why = f"{call.name} reads elements that it would have written already"
        raise _not_in_place(plan, why, expected="an operation on each element")
    pairs = []
    for output, operand in in_place.items():
        result, source = _tensor(plan, output, "outputs"), _tensor(plan, operand, "inputs")
        if (result.shape, result.dtype) != (source.shape, source.dtype) or result.dtype == "bool":
            why = "a result takes an operand's memory where both have one shape and dtype"
            raise _not_in_place(plan, why, got=f"{source} and {result}; booleans are converted")
        orders = {layout.major_to_minor(spec, tensor) for tensor in (result, source)}
        if orders != {tuple(range(len(result.shape)))}:
            why = "JAX's arrays lie row-major, and cuDNN's here in another order: XLA copies them"
            raise _not_in_place(plan, why, got=f"orders {orders} of {source} and {result}")
        pairs.append((spec.inputs.index(source.name), spec.outputs.index(result.name)))
    for both in zip(*pairs, strict=True):  # operands, results
        if len({*both}) < len(both):
            why = "one operand's memory holds one result, and a result lies in one operand's"
            raise _not_in_place(plan, why, got=repr(in_place))
    return tuple(sorted(pairs))


def _tensor(plan: Plan, key: str | int, which: str) -> Tensor:
    names: tuple[str, ...] = getattr(plan.spec, which)
    known = {**dict(zip(names, names, strict=True)), **dict(enumerate(names))}
    if key not in known:
        raise GraphError(
            f"{plan.name}: in_place names no tensor at the graph's edge",
            expected=f"{{output: operand}}; {which}: {', '.join(names)}, or their positions",
            got=repr(key),
        )
    return plan.spec.tensor(known[key])


def _not_in_place(plan: Plan, why: str, **parts: str) -> GraphError:
    return GraphError(
        f"{plan.name}: this graph cannot run in place",
        why=why,
        fix="leave in_place out, or donate the array to a jitted function: XLA then gives its "
        "memory to a later result",
        **parts,
    )
