"""GraphSpec -> cudnn.pygraph -> ExecutionPlan: this and :mod:`.listing` drive cuDNN's frontend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..cuda import CudaDevice
from ..errors import JaxCudnnError
from ..graph.dtypes import cudnn_name
from ..graph.spec import GraphSpec
from ..reasons import Kind, Reason, Reasons
from . import choice, failure, frontend, ubjson
from .candidates import Numbers
from .deviceless.profiles import Profile
from .execution_plan import ExecutionPlan, decode, uids
from .unsupported import engine_reasons, unsupported

Config = tuple[int, Numbers]
"""An engine and the values of its knobs."""
_NONE_PROPOSED = "cuDNN proposed no engine that matches the options (engine and notes)"


@contextlib.contextmanager
def at(site: Profile | CudaDevice) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """cuDNN's frontend, a GPU's properties, and what a graph of the frontend's takes for that GPU:
    a real handle, or in the deviceless worker the properties."""
    cudnn = frontend.load()
    if isinstance(site, Profile):
        properties = cudnn.create_device_properties(site.properties_json)
        where = {"device_property": properties, "sm_version": site.sm_version}
        yield cudnn, site.properties_json, where
    else:
        with site.planning_handle(cudnn) as handle:
            yield cudnn, site.properties(cudnn), {"handle": handle}


def build_for(spec: GraphSpec, site: Profile | CudaDevice) -> ExecutionPlan:
    """The plan for a GPU. For one that is not here it runs in the deviceless worker."""
    with at(site) as (cudnn, properties, where):
        found = _first(spec, cudnn, properties, where)
        if isinstance(found, ExecutionPlan):
            return found
        if other := choice.other_form(spec, cudnn.backend_version()):
            second = _first(other, cudnn, properties, where)
            if isinstance(second, ExecutionPlan):
                return second
            # Other kinds say that the form has no engine here.
            found |= {name: r for name, r in second.items() if r.kind is Kind.WORKSPACE}
        raise unsupported(spec, found)


def _first(
    spec: GraphSpec, cudnn: Any, properties: str, where: dict[str, Any]
) -> ExecutionPlan | Reasons:
    """The first acceptable candidate, or why there is none."""
    reasons: Reasons = {}
    try:
        graph = operation_graph(spec, cudnn, **where)
        choice.propose(graph, spec, cudnn)
    except Exception as error:
        return reasons_of(error, cudnn)
    candidates = configs(graph)
    for index in choice.order(spec, candidates):
        engine, knobs = candidates[index]
        if not choice.is_chosen(spec, engine, knobs):
            continue
        name = graph.get_plan_name_at_index(index)
        if wrong := choice.barred(spec, engine, knobs):
            reasons[name] = wrong
            continue
        try:
            graph.build_plan_at_index(index)
        except Exception as error:
            (reasons[name], *_) = reasons_of(error, cudnn).values()
            continue
        needed = graph.get_workspace_size()
        if too_much := choice.too_large(spec, properties, needed):
            reasons[name] = too_much
            continue
        blob = ubjson.decode(bytes(graph.serialize()))
        notes = behavior_notes(graph, index)
        pairs = tuple(knobs.items())
        return decode(spec, blob, name, needed, len(candidates), engine, pairs, notes)
    return reasons or {"heuristics": Reason(_NONE_PROPOSED, Kind.OPTIONS)}


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


def configs(graph: Any) -> list[Config]:
    """The engines with the values of their knobs by name that a graph of the frontend proposes."""
    every = map(graph.get_engine_and_knobs_at_index, range(graph.get_execution_plan_count()))
    return [(int(engine), _named(knobs)) for engine, knobs in every]


def _named(knobs: dict[Any, int]) -> Numbers:
    return Numbers(sorted((getattr(k, "name", str(k)), int(v)) for k, v in knobs.items()))


def reasons_of(error: Exception, cudnn: Any) -> Reasons:
    """What an exception of the frontend says of a graph; raises what says something else.

    The frontend raises RuntimeError both for graphs that cuDNN cannot represent and for a failing
    device, and Python's exceptions in its Python parts.
    """
    if isinstance(error, JaxCudnnError):
        raise error
    if isinstance(error, (cudnn.cudnnGraphNotSupportedError, RuntimeError)):
        if failed := failure.passing(error):
            raise failed from error
    elif not isinstance(error, (AssertionError, ValueError)):
        raise error
    elif _raised_in(error).partition(".")[0] != cudnn.__name__:
        raise error
    return engine_reasons(str(error))


def _raised_in(error: BaseException) -> str:
    """The module whose code raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")


def _emit(spec: GraphSpec, graph: Any, cudnn: Any) -> None:
    places = uids(spec)
    constants = [constant.name for constant in spec.constants]
    tensors: dict[str, list[Any]] = {}

    def data_type(dtype: str) -> Any:
        return getattr(cudnn.data_type, cudnn_name(dtype))

    for name in (*spec.inputs, *constants):
        tensor = spec.tensor(name)
        tensors[name] = [
            graph.tensor(
                name=f"{name}.{part.port}" if part.port else name,
                dim=list(part.dims),
                stride=list(part.strides),
                data_type=data_type(tensor.dtype),
                is_pass_by_value=name in constants,
                uid=places[name, i],
            )
            for i, part in enumerate(spec.layout.shown[name])
        ]
    for call in spec.calls:
        inputs = {
            part.port or port: given
            for port, name in call.inputs
            for part, given in zip(spec.layout.shown[name], tensors[name], strict=True)
        }
        compute = data_type(call.node.compute_data_type)
        common = {"name": call.name, "compute_data_type": compute}
        made = iter(call.node.emit(graph, inputs, common))
        for _, name in call.outputs:
            tensor, tensors[name] = spec.tensor(name), []
            for i, part in enumerate(spec.layout.shown[name]):
                out = next(made)
                out.set_dim(list(part.dims)).set_stride(list(part.strides))
                out.set_data_type(data_type(tensor.dtype))
                if name in spec.outputs:
                    out.set_output(True).set_uid(places[name, i])
                tensors[name].append(out)
        assert next(made, None) is None, f"{call.node.method} has more results than ports"
