"""Transformations of random graphs, many of them: each is planned, run and compared.

For every graph, gradients, tangents, a vmap and a vmap of the gradients are one program. The graphs
that it holds, all derived from the random one, are planned for a GPU as that is; and the program
gives what the reference's transformations give.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jax_cudnn._core.cuda import CudaDevice
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning import placement
from jax_cudnn._core.planning.collect import graphs
from jax_cudnn._core.planning.plan import Plan
from jax_cudnn._core.primitive import bind
from jax_cudnn._core.settings import configure

from . import samples
from .agreements import Agreement, check
from .checks import check_segments
from .graphs import random_graph
from .interpreter import interpreted
from .pool import in_processes
from .runs import Site, questions, summary, told
from .transforms import TRANSFORMS, Case, draw

CPU, GPU, INTERPRETER = "CPU", "GPU", "interpreter"
_TIMEOUT = 900.0  # seconds for a graph


@dataclass(frozen=True)
class Transformed:
    """What became of the transformations of one random graph.

    Attributes:
        seed: of the graph.
        nodes: operations in it.
        graphs: how many different graphs its transformations hold.
        segments: of the plans of all these; the second number is that of cuDNN's.
        questions: how many graphs cuDNN's support was asked for, by the splitter.
        seconds: of planning them all.
        agreements: for each transformation that the graph has, how close its results are.
        problem: why the graph counts as failed; empty if it does not.
    """

    seed: int
    nodes: int = 0
    graphs: int = 0
    segments: tuple[int, int] = (0, 0)
    questions: int = 0
    seconds: float = 0.0
    agreements: Mapping[str, Agreement] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class TransformChecks:
    """What is done with the transformations of each graph.

    Attributes:
        site: the GPU that is planned for; None for no planning.
        runner: what runs them: XLA on the CPU or on that GPU, or the interpreter, which compiles
            nothing.
    """

    site: Site | None = None
    runner: str = INTERPRETER

    def outcome(self, seed: int) -> Transformed:
        """Draws the graph of a seed and checks it; never raises."""
        facts: dict[str, Any] = {}
        try:
            graph = random_graph(seed)
            facts["nodes"] = len(graph.spec.calls)
            case = draw(graph.spec, graph.inputs, seed)
            if self.site is not None:
                facts |= self._planned(case)
            facts["agreements"] = check(case, self.results(case))
        except Exception as error:  # whatever it is, it is what is looked for
            facts["problem"] = told(error)
        return Transformed(seed, **facts)

    def plans(self, case: Case) -> list[Plan]:
        """Those of all graphs in the program, whose segments compute what the graphs do."""
        assert self.site is not None
        plans = []
        for name, spec in graphs(program(case), case.data, {}).items():
            plans.append(placement.place(spec, self.site, name))
            check_segments(spec, plans[-1].segments)
        return plans

    def _planned(self, case: Case) -> dict[str, Any]:
        began = time.perf_counter()
        plans = self.plans(case)
        seconds = time.perf_counter() - began
        segments = [segment.plan is not None for plan in plans for segment in plan.segments]
        return {
            "graphs": len(plans),
            "segments": (len(segments), sum(segments)),
            "questions": sum(questions(plan.spec, self.site, plan.name) for plan in plans),
            "seconds": seconds,
        }

    def results(self, case: Case) -> dict[str, list[np.ndarray]]:
        """What the program gives."""
        if self.runner == INTERPRETER:
            return interpreted(program(case))(*case.data)
        with jax.default_device(self._device):
            return jax.tree.map(np.asarray, jax.jit(program(case))(*case.data))

    @property
    def _device(self) -> Any:
        if self.runner == CPU:
            return jax.local_devices(backend="cpu")[0]
        assert isinstance(self.site, CudaDevice)
        devices = jax.local_devices(backend="gpu")
        return next(d for d in devices if d.local_hardware_id == self.site.ordinal)

    def problem(self, spec: GraphSpec) -> str:
        """What is wrong with the transformations of any graph, for normal operands; empty if
        nothing is."""

        def operands(number: int) -> list[np.ndarray]:
            noise = np.random.default_rng(number)
            return [samples.draw(noise, t.shape, t.dtype, 0.3) for t in spec.input_tensors]

        try:
            case = draw(spec, operands, 0)
            if self.site is not None:
                self.plans(case)
            check(case, self.results(case))
        except Exception as error:
            return told(error)
        return ""


def program(case: Case) -> Callable[..., dict[str, Any]]:
    """The transformations of a case's graph."""

    def transformed(*operands: Any) -> list[Any]:
        return bind(case.spec, "random", *operands)

    return case.program(transformed)


# -- many of them ----------------------------------------------------------------------------------


def fuzz(
    seeds: Iterable[int],
    checks: TransformChecks,
    workers: int = 1,
    progress: Callable[[Transformed], None] = lambda outcome: None,
) -> list[Transformed]:
    """The outcomes of many graphs, each checked by one of several processes; ``progress`` is called
    with each outcome.

    What kills a process, or spoils its GPU context, costs one graph: it is an outcome with a
    problem, and the next graph gets another process.
    """
    outcomes = []
    for outcome in in_processes(
        _Work(checks),
        seeds,
        lost=lambda seed, why: Transformed(seed, problem=why),
        spoiled=lambda outcome: bool(outcome.problem),
        workers=workers,
        timeout=_TIMEOUT,
        variables=_variables(checks.runner),
    ):
        progress(outcome)
        outcomes.append(outcome)
    return outcomes


def _variables(runner: str) -> dict[str, str]:
    """Every program runs once: on the CPU what compiles fastest is best. A GPU is shared."""
    if runner == GPU:
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    given = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": f"{given} --xla_backend_optimization_level=0".strip()}


@dataclass(frozen=True)
class _Work:
    """What a process does with a seed."""

    checks: TransformChecks

    def __call__(self, seed: int) -> Transformed:
        configure(plan_cache=None)  # planning is what is looked at
        if self.checks.runner != GPU:
            jax.config.update("jax_platforms", "cpu")
        return self.checks.outcome(seed)


def figures(outcomes: Sequence[Transformed]) -> dict[str, Any]:
    """What happened, in numbers that JSON can hold; ``failures`` should be empty."""
    found = {
        name: [o.agreements[name] for o in outcomes if name in o.agreements] for name in TRANSFORMS
    }
    return {
        "graphs": len(outcomes),
        "nodes": sum(outcome.nodes for outcome in outcomes),
        "derived_graphs": sum(outcome.graphs for outcome in outcomes),
        "segments": sum(outcome.segments[0] for outcome in outcomes),
        "segments_of_cudnn": sum(outcome.segments[1] for outcome in outcomes),
        "questions": summary([outcome.questions for outcome in outcomes]),
        "planning_s": summary([outcome.seconds for outcome in outcomes]),
        "transforms": {
            name: {
                "graphs": len(each),
                "results": sum(a.results for a in each),
                "worst_ratio": round(max((a.ratio for a in each), default=0.0), 3),
                "measured": sum(a.measured for a in each),
                "blunt": sum(a.blunt for a in each),
                "untame": sum(a.untame for a in each),
            }
            for name, each in found.items()
        },
        "failures": [[o.seed, o.problem] for o in outcomes if o.problem],
    }
