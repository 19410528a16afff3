"""Random graphs, many of them: each is planned for a GPU, and none may be refused or changed.

For every graph: planning raises nothing; each operation is in one of the plan's segments; the
segments in order compute what the graph states, rounding points included; and on a GPU the compiled
graph gives what the reference gives.
"""

from __future__ import annotations

import concurrent.futures
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .._core import placement
from .._core.errors import JaxCudnnError
from .._core.plan import Plan, PlannedSegment
from .._core.reference import evaluate
from .._core.spec import GraphSpec
from .._core.split import part, run, search
from .random_graphs import RandomGraph, random_graph
from .sensitivity import Reference

Site = Any
"""A Profile or a CudaDevice."""


class WrongSegments(JaxCudnnError):
    """The segments of a plan do not compute what the graph states."""


class WrongResult(JaxCudnnError):
    """A GPU's results are further from the reference's than rounding explains."""


@dataclass(frozen=True)
class Outcome:
    """What became of one random graph.

    Attributes:
        seed: of the graph.
        nodes: operations in it.
        segments: for each segment of its plan, whether cuDNN runs it.
        questions: how many graphs cuDNN's support was asked for, by the splitter.
        seconds: of planning.
        ratio: the largest error of a result on the GPU, in units of its tolerance.
        blunt: of the outputs, how many have no tolerance worth the name.
        problem: why the graph counts as failed; empty if it does not.
    """

    seed: int
    nodes: int = 0
    segments: tuple[bool, ...] = ()
    questions: int = 0
    seconds: float = 0.0
    ratio: float = 0.0
    blunt: int = 0
    problem: str = ""


def check_segments(spec: GraphSpec, segments: Sequence[PlannedSegment]) -> None:
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

    def execute(segment: PlannedSegment, *inputs: int) -> list[int]:
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
        values[tensor.name] = table.setdefault((tensor.literal, tensor.shape), len(table))
    for call in spec.calls:
        made = repr(call.node), tuple((port, values[name]) for port, name in call.inputs)
        for port, name in call.outputs:
            tensor = spec.tensor(name)
            term = made, port, tensor.shape, tensor.dtype
            values[name] = table.setdefault(term, len(table))
    return [values[name] for name in spec.outputs]


def check_reference(graph: RandomGraph, segments: Sequence[PlannedSegment]) -> None:
    """Raises WrongSegments unless the segments' references, run in order on arrays, give the bits
    of the graph's."""
    operands = graph.operands()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = evaluate(graph.spec, *operands)
        got = run(segments, graph.spec, operands, lambda s, *inputs: evaluate(s.spec, *inputs))
    for name, a, b in zip(graph.spec.outputs, got, want, strict=True):
        if a.dtype != b.dtype or np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise WrongSegments(f"{name} differs from the reference's", got=str(graph.spec))


def check_result(graph: RandomGraph, device: jax.Device) -> tuple[float, int]:  # pyright: ignore[reportInvalidTypeForm]
    """Runs the compiled graph on a device beside the reference on the CPU.

    Returns the largest ratio of an error to its tolerance, and how many outputs are blunt: have a
    tolerance as large as their values for more than half of the elements. Raises WrongResult.
    """
    operands = graph.operands()
    reference = Reference(graph.spec, operands)
    with jax.default_device(device):
        got = jax.jit(graph.function)(*(np.asarray(x) for x in operands))
    found = reference.compare([np.asarray(x) for x in got])
    wrong = {n: c for n, c in zip(graph.spec.outputs, found, strict=True) if not c.right}
    if wrong:
        raise WrongResult(
            f"{', '.join(wrong)} on {device.device_kind}",
            expected="at most as many elements beyond the tolerance as are allowed",
            got="; ".join(str(comparison) for comparison in wrong.values()),
        )
    return max(c.ratio for c in found), sum(c.blunt > 0.5 for c in found)


@dataclass(frozen=True)
class Checks:
    """What is done with each graph.

    Attributes:
        site: the GPU that is planned for.
        device: a GPU of JAX to run on, besides.
        bits: of every so many graphs, one has its references run on arrays as well; 0 for none.
    """

    site: Site
    device: Any = None
    bits: int = 10

    def plan(self, spec: GraphSpec, name: str) -> Plan:
        return placement.place(spec, self.site, name)

    def questions(self, graph: RandomGraph) -> int:
        """How many parts of the graph the splitter asks for, once they have been answered."""
        asked = 0

        def refusal(piece: GraphSpec) -> str | None:
            nonlocal asked
            asked += 1
            return placement._refusal(piece, self.site, graph.function.name)

        search(graph.spec.for_planning().canonical(), refusal)
        return asked

    def outcome(self, seed: int) -> Outcome:
        """Draws the graph of a seed and checks it; never raises."""
        facts: dict[str, Any] = {}
        try:
            graph = random_graph(seed)
            facts["nodes"] = len(graph.spec.calls)
            began = time.perf_counter()
            segments = self.plan(graph.spec, graph.function.name).segments
            facts["seconds"] = time.perf_counter() - began
            facts["segments"] = tuple(segment.plan is not None for segment in segments)
            facts["questions"] = self.questions(graph)
            check_segments(graph.spec, segments)
            if self.bits and seed % self.bits == 0:
                check_reference(graph, segments)
            if self.device is not None:
                facts["ratio"], facts["blunt"] = check_result(graph, self.device)
        except Exception as error:  # whatever it is, it is what is looked for
            facts["problem"] = told(error)
        return Outcome(seed, **facts)

    def planning_problem(self, spec: GraphSpec) -> str:
        """Why planning a graph fails; empty if it does not."""
        try:
            check_segments(spec, self.plan(spec, "part").segments)
        except Exception as error:
            return told(error)
        return ""


def smallest(spec: GraphSpec, problem: Callable[[GraphSpec], str]) -> GraphSpec:
    """What is left of a graph when operations are taken away as long as ``problem`` says the same,
    up to the first colon."""
    kind = problem(spec).partition(":")[0]
    position = 0
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
    frames = traceback.extract_tb(error.__traceback__)
    return f"{words[:500]} (line {frames[-1].lineno} of {frames[-1].filename}: {frames[-1].line})"


def fuzz(
    seeds: Iterable[int],
    checks: Checks,
    threads: int = 1,
    progress: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """The outcomes of many graphs, several at a time; ``progress`` is called with each."""
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for outcome in pool.map(checks.outcome, seeds):
            progress(outcome)
            outcomes.append(outcome)
    return outcomes


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What happened, in numbers that JSON can hold; ``failures`` should be empty."""
    done = [outcome for outcome in outcomes if outcome.segments]
    cuts = Counter(len(outcome.segments) for outcome in done)
    held = Counter(sum(outcome.segments) for outcome in done)
    return {
        "graphs": len(outcomes),
        "nodes": sum(outcome.nodes for outcome in outcomes),
        "one_plan": sum(outcome.segments == (True,) for outcome in done),
        "by_xla_alone": held[0],
        "by_segments": _sorted(cuts),
        "by_segments_of_cudnn": _sorted(held),
        "segments_of_cudnn": sum(sum(outcome.segments) for outcome in done),
        "questions": _summary([outcome.questions for outcome in done]),
        "planning_s": _summary([outcome.seconds for outcome in done]),
        "worst_ratio": round(max((outcome.ratio for outcome in done), default=0.0), 3),
        "blunt_outputs": sum(outcome.blunt for outcome in done),
        "failures": [[o.seed, o.problem] for o in outcomes if o.problem],
    }


def _sorted(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(key): counts[key] for key in sorted(counts)}


def _summary(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [0]

    def at(share: float) -> float:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)

    return {"median": at(0.5), "p95": at(0.95), "max": at(1.0), "sum": round(sum(ordered), 1)}
