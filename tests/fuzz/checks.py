"""What must hold for every graph and its plan: the same computation in segments, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jax_cudnn._core.compat import Device
from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning.split import run

from .graphs import RandomGraph
from .sensitivity import Reference


class Segment(Protocol):
    """A part of a graph, with the positions of its operations in the whole."""

    @property
    def spec(self) -> GraphSpec: ...
    @property
    def calls(self) -> tuple[int, ...]: ...


class WrongSegments(JaxCudnnError):
    """The segments of a plan do not compute what the graph states."""


class WrongResult(JaxCudnnError):
    """A GPU's results are further from the reference's than rounding explains."""


def check_segments(spec: GraphSpec, segments: Sequence[Segment]) -> None:
    """Raises WrongSegments unless the segments in order compute exactly what the graph states.

    Both are run on terms instead of arrays: what a call makes is a term of its node, its operands'
    terms and the dtype of its result. Equal terms are equal bits, whatever computes them.
    """
    calls = sorted(call for segment in segments for call in segment.calls)
    if calls != [*range(len(spec.calls))]:
        raise WrongSegments("not every operation is in one segment", got=str(calls))
    known = {*spec.inputs}
    for segment in segments:
        if not known.issuperset(segment.spec.inputs):
            raise WrongSegments("a segment runs before its operands are made", got=str(segment))
        if segment.spec.options != spec.options:
            raise WrongSegments("a segment has other options", got=str(segment.spec.options))
        known |= {*segment.spec.outputs}
    table: dict[Any, int] = {}

    def execute(segment: Segment, *inputs: int) -> list[int]:
        return _terms(segment.spec, inputs, table)

    operands = [table.setdefault(tensor, len(table)) for tensor in spec.input_tensors]
    if run(segments, spec, operands, execute) != _terms(spec, operands, table):
        raise WrongSegments(
            "the segments compute something else than the graph",
            expected=str(spec),
            got="\n".join(str(segment.spec) for segment in segments),
        )


def _terms(spec: GraphSpec, operands: Sequence[int], table: dict[Any, int]) -> list[int]:
    """The outputs' terms, as numbers that stand for them in the table."""
    values = dict(zip(spec.inputs, operands, strict=True))
    for tensor in spec.constants:
        constant = tensor.literal, tensor.shape, tensor.dtype
        values[tensor.name] = table.setdefault(constant, len(table))
    for call in spec.calls:
        made = repr(call.node), tuple((port, values[name]) for port, name in call.inputs)
        for port, name in call.outputs:
            tensor = spec.tensor(name)
            term = made, port, tensor.shape, tensor.dtype
            values[name] = table.setdefault(term, len(table))
    return [values[name] for name in spec.outputs]


def check_reference(graph: RandomGraph, segments: Sequence[Segment]) -> None:
    """Raises WrongSegments unless the segments' references, run in order on arrays, give the bits
    of the graph's."""
    operands = graph.inputs()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = evaluate(graph.spec, *operands)
        got = run(segments, graph.spec, operands, lambda s, *inputs: evaluate(s.spec, *inputs))
    for name, a, b in zip(graph.spec.outputs, got, want, strict=True):
        if a.dtype != b.dtype or np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise WrongSegments(f"{name} differs from the reference's", got=str(graph.spec))


def check_result(graph: RandomGraph, device: Device) -> tuple[float, int]:
    """Runs the compiled graph on a device beside the reference on the CPU.

    Returns the largest ratio of an error to its tolerance, and how many outputs are blunt: have a
    tolerance as large as their values for more than half of the elements. Raises WrongResult.
    """
    reference = Reference(graph.spec, graph.inputs())
    with jax.default_device(device):
        got = jax.jit(graph.function)(*(np.asarray(x) for x in graph.operands()))
    found = reference.compare([np.asarray(x) for x in got])
    wrong = {n: c for n, c in zip(graph.spec.outputs, found, strict=True) if not c.right}
    if wrong:
        raise WrongResult(
            f"{', '.join(wrong)} on {device.device_kind}",
            expected="at most as many elements beyond the tolerance as are allowed",
            got="; ".join(str(comparison) for comparison in wrong.values()),
        )
    return max(c.ratio for c in found), sum(c.blunt > 0.5 for c in found)
