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

from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning import placement
from jax_cudnn._core.planning.plan import Plan
from jax_cudnn._core.planning.split import part, search

from .checks import check_reference, check_result, check_segments
from .graphs import RandomGraph, random_graph

Site = Any
"""A Profile or a CudaDevice."""


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
        return questions(graph.spec, self.site, graph.function.name)

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


def questions(spec: GraphSpec, site: Site, name: str) -> int:
    """How many parts of a graph the splitter asks for, once they have been answered."""
    asked = 0

    def ask(piece: GraphSpec) -> Any:
        nonlocal asked
        asked += 1
        return placement.refusal(piece, site, name)

    search(spec.for_planning().canonical(), ask)
    return asked


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
        "questions": summary([outcome.questions for outcome in done]),
        "planning_s": summary([outcome.seconds for outcome in done]),
        "worst_ratio": round(max((outcome.ratio for outcome in done), default=0.0), 3),
        "blunt_outputs": sum(outcome.blunt for outcome in done),
        "failures": [[o.seed, o.problem] for o in outcomes if o.problem],
    }


def render(results: Sequence[Mapping[str, Any]]) -> str:
    """Figures as tables in Markdown, a row for each result: of graphs, and of transformations."""
    transformed = [result for result in results if "transforms" in result]
    forward = [result for result in results if "transforms" not in result]
    parts = [_table(_HEADER, map(_row, forward))] if forward else []
    if transformed:
        parts.append(_table(_TRANSFORMS_HEADER, map(_transforms_row, transformed)))
    return "\n\n".join(parts)


_HEADER = (
    *("random graphs", "operations", "planned for", "run on it", "one cuDNN plan", "cut"),
    *("all in XLA", "worst error / tolerance", "failures"),
)
_TRANSFORMS_HEADER = (
    *("random graphs", "with derived graphs", "planned for", "run on", "results compared"),
    "worst error / tolerance: grad, jvp, vmap, vmap of grad",
    *("tolerance measured", "ill-conditioned", "failures"),
)


def _row(result: Mapping[str, Any]) -> Iterable[Any]:
    ran = result["run_on_the_gpu"]
    return (
        result["graphs"],
        result["nodes"],
        _planned_for(result),
        "yes" if ran else "no",
        result["one_plan"],
        result["graphs"] - result["one_plan"] - result["by_xla_alone"],
        result["by_xla_alone"],
        result["worst_ratio"] if ran else "",
        len(result["failures"]),
    )


def _transforms_row(result: Mapping[str, Any]) -> Iterable[Any]:
    found = result["transforms"].values()
    return (
        result["graphs"],
        result["derived_graphs"],
        _planned_for(result),
        "it" if result["run_on_the_gpu"] else "the CPU",
        sum(each["results"] for each in found),
        ", ".join(str(each["worst_ratio"]) for each in found),
        sum(each["measured"] for each in found),
        sum(each["blunt"] + each["untame"] for each in found),
        len(result["failures"]),
    )


def _planned_for(result: Mapping[str, Any]) -> str:
    versions = result["environment"]
    if result["gpu"] == "none":
        return f"nothing, jax {versions['jax']}, {versions['date']}"
    return f"{result['gpu']}, cuDNN {versions['cudnn']}, {versions['date']}"


def _table(header: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    text = (" | ".join(map(str, line)) for line in lines)
    return "\n".join(
        f"| {line} |" if "---" not in line else f"|{line.replace(' ', '')}|" for line in text
    )


def _sorted(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(key): counts[key] for key in sorted(counts)}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 95 per cent, largest and sum."""
    ordered = sorted(values) or [0]

    def at(share: float) -> float:
        return round(ordered[min(int(share * len(ordered)), len(ordered) - 1)], 3)

    return {"median": at(0.5), "p95": at(0.95), "max": at(1.0), "sum": round(sum(ordered), 1)}
