"""A Plan as data and as bytes, without the other candidates."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, TypeVar

import jax

from ..errors import GraphError
from ..graph import record
from ..graph.dtypes import TO_CUDNN, WORDS
from ..graph.record import checked
from ..graph.reference import evaluate
from ..graph.spec import GraphSpec, intern
from ..package import version
from ..planning.planned_graph import PlannedGraph
from ..planning.stored import need, row_of, said, segments_of
from ..store.entry import Unusable, check_size, checksum, parsed
from ..user_context import IMPLEMENTATIONS

_KIND = "jax_cudnn plan"
_FORMAT = 2
_PLANS = 16  # of the largest entries of the cache fit: a graph may have many segments
_SEAL = re.compile(rb',"checksum":"([0-9a-f]{64})"}\Z')
_AGAIN = "plan the function again with jax_cudnn.plan(fn, *args) and serialize that plan"


def data(plan: PlannedGraph) -> dict[str, Any]:
    """A plan as data for ``json.dumps``."""
    return {
        "kind": _KIND,
        "format": _FORMAT,
        "jax_cudnn": version(),
        "name": plan.name,
        "gpu": plan.gpu,
        "implementation": plan.implementation,
        "engine": plan.engine,
        "workspace_bytes": plan.workspace_bytes,
        "graph": record.encoded(plan.spec),
        "segments": [
            {"graph": record.encoded(segment.spec), **row_of(segment)} for segment in plan.segments
        ],
    }


def dumped(plan: PlannedGraph) -> bytes:
    """The data as UTF-8 text, with a checksum; GraphError if it is too large to be read back."""
    text = json.dumps(data(plan), separators=(",", ":"), allow_nan=False).encode()
    try:
        check_size(text, _PLANS)
    except Unusable as error:
        fix = "serialize each of plan.parts"
        raise GraphError(f"{plan.name} cannot be serialized", got=str(error), fix=fix) from error
    return sealed(text)


def sealed(text: bytes) -> bytes:
    """JSON of an object with the SHA-256 of its bytes as its last field."""
    return b'%s,"checksum":"%s"}' % (text[:-1], checksum(text[:-1]))


P = TypeVar("P", bound=PlannedGraph)


def loaded(content: bytes, cls: type[P]) -> P:
    """The plan that :func:`dumped` wrote; GraphError for anything else.

    A plan that is returned has a graph that its nodes accept, plans that fit it (``stored.py``),
    and was written, explained and traced once.
    """
    try:
        content = bytes(memoryview(content))
        check_size(content, _PLANS)
        seal = _SEAL.search(content)
        if seal is not None and seal[1] != checksum(content[: seal.start()]):
            raise GraphError(
                "this serialized plan is damaged",
                expected="the bytes of Plan.serialize(), with their checksum at the end",
                got=f"{len(content)} bytes with another checksum",
                fix=f"copy it again, or {_AGAIN}",
            )
        found = parsed(content)
        kind, by = found["kind"], f"written by jax_cudnn {found['jax_cudnn']:.40}"
        was = f"format {found['format']:d}, {by}"
    except GraphError:
        raise
    except Exception as error:  # anything may stand there
        raise _no_plan(said(error)) from error
    if kind != _KIND:
        raise _no_plan(repr(content[:60]))
    if found["format"] != _FORMAT:
        raise GraphError(
            "this plan has another format",
            expected=f"format {_FORMAT}, written by jax_cudnn {version()}",
            got=was,
            fix=_AGAIN,
        )
    try:
        need(seal, "checksum", "that of all before it at the end", found.pop("checksum", None))
        spec = record.decoded(found["graph"])
        _check_graph(spec)
        spec = intern(spec)
        name, gpu, implementation = (found[key] for key in ("name", "gpu", "implementation"))
        plan = checked(cls(name, gpu, implementation, spec, segments_of(found["segments"], spec)))
        written = {**data(plan), "jax_cudnn": found["jax_cudnn"]}
        same = json.dumps(written, sort_keys=True) == json.dumps(found, sort_keys=True)
        need(same, "the bytes", "those of this plan", "others")
        need(implementation in IMPLEMENTATIONS, "implementation", IMPLEMENTATIONS, implementation)
        str(plan.explain())
    except Exception as error:  # anything may stand there
        raise GraphError(
            "this plan cannot be read",
            expected=f"a plan written by jax_cudnn {version()}",
            got=f"{by}: {said(error)}",
            why="a plan holds its graph, and operations differ between versions",
            fix=_AGAIN,
        ) from error
    return plan


def _check_graph(spec: Any) -> None:
    """An exception unless it is a graph whose nodes' references take their operands and give their
    results."""
    need(isinstance(spec, GraphSpec), "graph", "a graph", spec)
    names = [tensor.name for tensor in spec.tensors]
    need(len({*names}) == len(names), "tensors", "each name once", names)
    for tensor in spec.tensors:
        fits = tensor.dtype in (*TO_CUDNN, WORDS)
        fits = fits and all(size >= 0 for size in tensor.shape) and tensor.nbytes < 2**62
        if tensor.order is not None:
            fits = fits and sorted(tensor.order) == [*range(len(tensor.shape))]
        if tensor.literal is not None:
            number = float.fromhex(tensor.literal).hex()
            fits = fits and number == tensor.literal and {*tensor.shape} <= {1}
        need(fits, "tensors", "a dtype, a shape, an order and a number", repr(tensor))
    ports = {name for call in spec.calls for _, name in (*call.inputs, *call.outputs)}
    unknown = sorted({*spec.inputs, *spec.outputs, *ports} - {*names})
    need(not unknown, "graph", "tensors by name", f"no tensor {', '.join(unknown)}")
    ends = *spec.inputs, *(tensor.name for tensor in spec.constants)
    known, once = {*ends}, len({*spec.outputs}) == len(spec.outputs)
    need(once and len(known) == len(ends), "graph", "each operand and result once", spec.inputs)
    for call in spec.calls:
        ports, made = zip(*call.outputs, strict=True)
        need(ports == call.node.results, call.name, call.node.results, ports)
        need(len(dict(call.inputs)) == len(call.inputs), call.name, "each port once", call.inputs)
        need(known.issuperset(n for _, n in call.inputs), call.name, "known operands", call.inputs)
        need(known.isdisjoint(made), call.name, "new results", call.outputs)
        known.update(made)
        if jax.config.read("jax_enable_x64") or not spec.has_float64:
            read = dict.fromkeys(n for _, n in call.inputs if spec.tensor(n).literal is None)
            alone = GraphSpec(spec.tensors, (call,), tuple(read), made, spec.options)
            given = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in alone.input_tensors]
            shapes = [x.shape for x in jax.eval_shape(functools.partial(evaluate, alone), *given)]
            wanted = [tensor.shape for tensor in alone.output_tensors]
            need(shapes == wanted, call.name, shapes, wanted)
    need({*names} == known, "tensors", "an operand, a number or a result each", names)
    need({*spec.origin.residuals} <= {*spec.outputs}, "residuals", spec.outputs, spec.origin)
    for member in spec.origin.family:
        _check_graph(member)


def _no_plan(got: str) -> GraphError:
    return GraphError(
        "not a serialized plan",
        expected="the bytes of Plan.serialize()",
        got=got,
        fix=_AGAIN,
    )
