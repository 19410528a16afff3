"""GraphSpec -> cudnn.pygraph -> ExecutionPlan: this and :mod:`.listing` drive cuDNN's frontend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..cuda import CudaDevice
from ..errors import JaxCudnnError, UnsupportedGraphError
from ..graph import layout
from ..graph.dtypes import cudnn_name
from ..graph.spec import GraphSpec
from . import choice, failure, frontend, ubjson, workspace
from .deviceless.profiles import Profile
from .execution_plan import ExecutionPlan, Uids, decode
from .unsupported import engine_reasons, unsupported
from .workspace import Limit

FIRST_PYTHON_ENGINE = 20000
"""Engines of the frontend itself (CuTe DSL) begin here."""
PYTHON_ONLY = "runs only in the Python frontend, not inside an XLA program"
_NONE_PROPOSED = "cuDNN proposed no engine that matches the options (engine and notes)"


def build_for_profile(spec: GraphSpec, profile: Profile) -> ExecutionPlan:
    """The plan for a GPU that is not here. Runs in the deviceless worker."""
    cudnn = frontend.load()
    properties = cudnn.create_device_properties(profile.properties_json)
    limit = workspace.limit(spec, profile.properties_json)
    return _build(spec, cudnn, limit, device_property=properties, sm_version=profile.sm_version)


def build_for_device(spec: GraphSpec, device: CudaDevice) -> ExecutionPlan:
    """The plan for a GPU of this process, with a real handle."""
    cudnn = frontend.load()
    limit = workspace.limit(spec, device.properties(cudnn))
    with device.planning_handle(cudnn) as handle:
        return _build(spec, cudnn, limit, handle=handle)


def _build(spec: GraphSpec, cudnn: Any, limit: Limit, **where: Any) -> ExecutionPlan:
    try:
        return _first(spec, cudnn, limit, **where)
    except UnsupportedGraphError as error:
        other = workspace.other_form(spec, cudnn.backend_version())
        if other is None:
            raise
        try:
            return _first(other, cudnn, limit, **where)
        except UnsupportedGraphError as second:
            too_large = workspace.refusals(second.reasons)  # else that form has no engine here
            raise unsupported(spec, {**error.reasons, **too_large}) from error


def _first(spec: GraphSpec, cudnn: Any, limit: Limit, **where: Any) -> ExecutionPlan:
    """The first acceptable candidate."""
    reasons: dict[str, str] = {}
    with reasons_of(spec, cudnn):
        graph = operation_graph(spec, cudnn, **where)
        choice.propose(graph, spec, cudnn)
    count = graph.get_execution_plan_count()
    candidates = [graph.get_engine_and_knobs_at_index(index) for index in range(count)]
    for index in choice.order(spec, candidates):
        name = graph.get_plan_name_at_index(index)
        engine, knobs = candidates[index]
        if not choice.is_chosen(spec, engine, knobs):
            continue
        if engine >= FIRST_PYTHON_ENGINE:
            reasons[name] = PYTHON_ONLY
            continue
        if wrong := choice.distrusted(spec, engine, knobs):
            reasons[name] = f"computes {wrong} wrongly"
            continue
        try:
            with reasons_of(spec, cudnn):
                graph.build_plan_at_index(index)
        except UnsupportedGraphError as error:
            reasons[name] = next(iter(error.reasons.values()))
            continue
        needed = graph.get_workspace_size()
        if needed > limit.nbytes:
            reasons[name] = limit.refusal(needed)
            continue
        blob = ubjson.decode(bytes(graph.serialize()))
        notes = behavior_notes(graph, index)
        return decode(spec, blob, name, needed, count, int(engine), named(knobs), notes)
    raise unsupported(spec, reasons or {"heuristics": _NONE_PROPOSED})


def operation_graph(spec: GraphSpec, cudnn: Any, **where: Any) -> Any:
    """The graph as the frontend's, checked, without plans; ``where`` says for which GPU."""
    failure.check_room()
    graph = cudnn.pygraph(
        name="jax_cudnn",
        io_data_type=cudnn.data_type.FLOAT,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        **where,
    )
    _emit(spec, graph, cudnn)
    graph.validate()
    graph.build_operation_graph()
    return graph


def behavior_notes(graph: Any, index: int) -> tuple[str, ...]:
    """cuDNN's behaviour notes on the engine of a plan."""
    notes = graph.get_behavior_notes_for_plan_at_index(index)
    return tuple(str(getattr(note, "name", note)) for note in notes)


def named(knobs: Mapping[Any, int]) -> tuple[tuple[str, int], ...]:
    """The values of an engine's knobs by name."""
    return tuple(sorted((getattr(k, "name", str(k)), int(v)) for k, v in knobs.items()))


@contextlib.contextmanager
def reasons_of(spec: GraphSpec, cudnn: Any) -> Iterator[None]:
    """Turns the frontend's exceptions into ours.

    It raises RuntimeError both for graphs that cuDNN cannot represent and for a failing device,
    and Python's exceptions in its Python parts.
    """
    try:
        yield
    except JaxCudnnError:
        raise
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
        failed = failure.passing(error)
        raise failed or unsupported(spec, engine_reasons(str(error))) from error
    except (AssertionError, ValueError) as error:
        if _raised_in(error).partition(".")[0] != cudnn.__name__:
            raise
        raise unsupported(spec, engine_reasons(str(error))) from error


def _raised_in(error: BaseException) -> str:
    """The module whose code raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")


def _emit(spec: GraphSpec, graph: Any, cudnn: Any) -> None:
    uids = Uids.of(spec)

    def data_type(dtype: str) -> Any:
        return getattr(cudnn.data_type, cudnn_name(dtype))

    tensors: dict[str, list[Any]] = {}
    for uid_of, by_value in ((uids.inputs, False), (uids.constants, True)):
        for name, uid in uid_of.items():
            tensor = spec.tensor(name)
            tensors[name] = [
                graph.tensor(
                    name=f"{name}.{part.port}" if part.port else name,
                    dim=list(part.dims),
                    stride=list(part.strides),
                    data_type=data_type(tensor.dtype),
                    is_pass_by_value=by_value,
                    uid=uids.parts.get((name, i), uid),
                )
                for i, part in enumerate(layout.shown(spec, tensor))
            ]
    for call in spec.calls:
        inputs = {}
        for port, name in call.inputs:
            parts = layout.shown(spec, spec.tensor(name))
            inputs |= {p.port or port: x for p, x in zip(parts, tensors[name], strict=True)}
        compute = data_type(call.node.compute_data_type)
        common = {"name": call.name, "compute_data_type": compute}
        made = iter(call.node.emit(graph, inputs, common))
        for _, name in call.outputs:
            tensor, uid = spec.tensor(name), uids.outputs.get(name)
            tensors[name] = []
            for i, part in enumerate(layout.shown(spec, tensor)):
                out = next(made)
                out.set_dim(list(part.dims)).set_stride(list(part.strides))
                out.set_data_type(data_type(tensor.dtype))
                if uid is not None:
                    out.set_output(True).set_uid(uids.parts.get((name, i), uid))
                tensors[name].append(out)
        assert next(made, None) is None, f"{call.node.method} has more results than ports"
