"""What must hold for every graph: it is planned, and computes the same in segments, transformed,
and on a GPU.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning import placement
from jax_cudnn._core.planning.collect import graphs
from jax_cudnn._core.planning.plan import Plan
from jax_cudnn._core.planning.split import part, run

from . import transforms
from .drawing import Operand
from .graphs import random_graph
from .interpreter import interpreted
from .reference import Comparison, Reference, compare


class WrongSegments(JaxCudnnError):
    """The segments of a plan do not compute what the graph states."""


class WrongResult(JaxCudnnError):
    """A GPU's results are further from the reference's than rounding explains."""


@dataclass(frozen=True)
class Outcome:
    """What became of one random graph: operations, for each planned segment whether it is cuDNN's,
    seconds of planning, how close each result is, and why it counts as failed, if it does."""

    seed: int
    nodes: int = 0
    segments: tuple[bool, ...] = ()
    seconds: float = 0.0
    comparisons: tuple[Comparison, ...] = ()
    skipped: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Checks:
    """What is done with each graph: ``site`` (a Profile or a CudaDevice) is what is planned for;
    ``transformed`` also runs and compares its transformations, on that GPU or interpreted."""

    site: Any = None
    transformed: bool = False

    def outcome(self, seed: int) -> Outcome:
        """Draws the graph of a seed and checks it; never raises."""
        facts: dict[str, Any] = {}
        try:
            graph = random_graph(seed)
            facts["nodes"] = len(graph.spec.calls)
            facts |= self._facts(graph.spec, graph.inputs, seed)
        except Exception as error:  # whatever it is, it is what is looked for
            facts["problem"] = told(error)
        return Outcome(seed, **facts)

    def problem(self, spec: GraphSpec) -> str:
        """What is wrong with any graph, for normal operands; empty if nothing is."""

        def operands(number: int) -> list[np.ndarray]:
            tensors = enumerate(spec.input_tensors)
            return [Operand(t.shape, t.dtype, 0.3).draw(number, i) for i, t in tensors]

        try:
            self._facts(spec, operands, 0)
        except Exception as error:
            return told(error)
        return ""

    def plans(self, specs: dict[str, GraphSpec]) -> list[Plan]:
        """Those whose segments compute what the graphs do."""
        plans = [placement.place(spec, self.site, name) for name, spec in specs.items()]
        for plan in plans:
            check_segments(plan.spec, plan.segments)
        return plans

    def _facts(self, spec: GraphSpec, operands: Callable[[int], Any], seed: int) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        case = transforms.draw(spec, operands, seed) if self.transformed else None
        if self.site is not None:
            began = time.perf_counter()
            specs = graphs(case.program(), case.data, {}) if case else {f"random_{seed}": spec}
            plans = self.plans(specs)
            facts["seconds"] = time.perf_counter() - began
            segments = [segment for plan in plans for segment in plan.segments]
            facts["segments"] = tuple(segment.plan is not None for segment in segments)
        if case:
            found = transforms.check(case, self.run(case.program(), *case.data)).values()
            facts["comparisons"] = tuple(c for each in found for c in each or ())
            facts["skipped"] = [*found].count(None)
        elif isinstance(self.site, CudaDevice):
            arrays = operands(0)
            got = self.run(lambda *xs: transforms.bind(spec, "random", *xs), *arrays)
            facts["comparisons"] = tuple(check_results(spec, arrays, got))
        return facts

    def run(self, function: Callable[..., Any], *data: Any) -> Any:
        """What a program gives on the GPU, or interpreted."""
        if not isinstance(self.site, CudaDevice):
            return interpreted(function)(*data)
        devices = jax.local_devices(backend="gpu")
        device = next(d for d in devices if d.local_hardware_id == self.site.ordinal)
        with jax.default_device(device):
            data = jax.tree.map(np.asarray, data)
            return jax.tree.map(np.asarray, jax.jit(function)(*data))


def check_segments(spec: GraphSpec, segments: Sequence[Any]) -> None:
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

    def execute(segment: Any, *inputs: int) -> list[int]:
        return _terms(segment.spec, inputs, table)

    operands = [table.setdefault(tensor, len(table)) for tensor in spec.input_tensors]
    if run(segments, spec, operands, execute) != _terms(spec, operands, table):
        parts = "\n".join(str(segment.spec) for segment in segments)
        raise WrongSegments("the segments compute something else", expected=str(spec), got=parts)


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


def check_results(spec: GraphSpec, operands: Sequence[Any], got: Sequence[Any]) -> list[Comparison]:
    """A graph's results beside the reference's. Raises WrongResult."""
    reference = Reference(spec, operands)

    def outputs(noise: Any) -> list[np.ndarray]:
        values = reference.values(noise)
        return [values[name] for name in spec.outputs]

    found = compare(got, outputs(None), outputs)
    wrong = {n: c for n, c in zip(spec.outputs, found, strict=True) if not c.right}
    if wrong:
        comparisons = "; ".join(map(str, wrong.values()))
        raise WrongResult(f"{', '.join(wrong)} beyond the tolerance", got=comparisons)
    return found


def check_bits(spec: GraphSpec, segments: Sequence[Any], operands: Sequence[Any]) -> None:
    """Raises WrongSegments unless the segments' references give the bits of the graph's."""
    want = evaluate(spec, *operands)
    got = run(segments, spec, operands, lambda s, *inputs: evaluate(s.spec, *inputs))
    for name, a, b in zip(spec.outputs, got, want, strict=True):
        if a.dtype != b.dtype or np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise WrongSegments(f"{name} differs from the reference's", got=str(spec))


def smallest(spec: GraphSpec, problem: Callable[[GraphSpec], str]) -> GraphSpec:
    """What is left of a graph when operations are taken away as long as ``problem`` says the same,
    up to the first colon."""
    kind, position = problem(spec).partition(":")[0], 0
    while position < len(spec.calls) > 1:
        fewer = part(spec, (i for i in range(len(spec.calls)) if i != position))
        if problem(fewer).partition(":")[0] == kind:
            spec, position = fewer, 0
        else:
            position += 1
    return spec


def told(error: Exception) -> str:
    """The error in its own words if it is ours, else with the place that raised it."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, JaxCudnnError):
        return words
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{words[:500]} (line {frame.lineno} of {frame.filename}: {frame.line})"
