"""What must hold for every graph: planned, transformed and on a GPU it computes the same."""

import functools
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_cudnn._core.cuda import CudaDevice, device_nodes
from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning import placement
from jax_cudnn._core.planning.collect import graphs
from jax_cudnn._core.planning.plan import Plan
from jax_cudnn._core.planning.split import part, run
from jax_cudnn._core.settings import configure
from jax_cudnn.deviceless import profiles

from . import transforms
from .drawing import Operand
from .graphs import random_graph
from .interpreter import interpreted


class WrongSegments(JaxCudnnError):
    """The segments of a plan do not compute what the graph states."""


@dataclass(frozen=True)
class Outcome:
    """What became of one random graph: for each planned segment whether it is cuDNN's, for how many
    examples derivatives say nothing, and why it counts as failed, if so."""

    seed: int
    segments: tuple[bool, ...] = ()
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
        try:
            return self._outcome(random_graph(seed).spec, random_graph(seed).inputs, seed)
        except Exception as error:  # whatever it is, it is what is looked for
            return Outcome(seed, problem=_told(error))

    def problem(self, spec: GraphSpec) -> str:
        """What is wrong with any graph, for normal operands; empty if nothing is."""

        def operands(number: int) -> list[np.ndarray]:
            tensors = enumerate(spec.input_tensors)
            return [Operand(t.shape, t.dtype, 0.3).draw(number, i) for i, t in tensors]

        try:
            return self._outcome(spec, operands, 0).problem
        except Exception as error:
            return _told(error)

    def plans(self, specs: dict[str, GraphSpec]) -> list[Plan]:
        """Those whose segments compute what the graphs do."""
        plans = [placement.place(spec, self.site, name) for name, spec in specs.items()]
        for plan in plans:
            check_segments(plan.spec, plan.segments)
        return plans

    def _outcome(self, spec: GraphSpec, operands: Callable[[int], Any], seed: int) -> Outcome:
        case = transforms.draw(spec, operands, seed) if self.transformed else None
        segments, skipped = [], 0
        if self.site is not None:
            specs = graphs(case.program(), case.data, {}) if case else {f"random_{seed}": spec}
            segments = [segment for plan in self.plans(specs) for segment in plan.segments]
        if case:
            skipped = transforms.check(case, self.run(case.program(), *case.data))
        elif isinstance(self.site, CudaDevice):
            got = self.run(lambda *xs: transforms.bind(spec, "random", *xs), *operands(0))
            transforms.check_results(spec, operands(0), got)
        return Outcome(seed, tuple(s.plan is not None for s in segments), skipped)

    def run(self, function: Callable[..., Any], *data: Any) -> Any:
        """What a program gives on the GPU, or interpreted."""
        if not isinstance(self.site, CudaDevice):
            return interpreted(function)(*data)
        with jax.default_device(jax.local_devices(backend="gpu")[0]):
            return jax.device_get(jax.jit(function)(*data))


@functools.cache
def checks_for(gpu: str | None, transformed: bool) -> Checks:
    """For a profile, nothing (``none``), this machine's GPU, or an H200 where there is none."""
    if not device_nodes() and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    configure(plan_cache=None)  # planning is what is looked at
    if gpu is None and device_nodes():
        return Checks(CudaDevice(jax.devices("gpu")[0].local_hardware_id), transformed)
    return Checks(None if gpu == "none" else profiles.get(gpu or "H200"), transformed)


def outcome(gpu: str | None, transformed: bool, seed: int) -> Outcome:
    """What another process does; it finds nothing of a package's ``__main__``."""
    return checks_for(gpu, transformed).outcome(seed)


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


def smallest(spec: GraphSpec, problem: Callable[[GraphSpec], str]) -> GraphSpec:
    """What is left of a graph when operations are taken away as long as ``problem`` says the same,
    up to the first colon."""
    kind, position = problem(spec).partition(":")[0], 0
    while position < len(spec.calls) > 1:
        fewer = part(spec, (i for i in range(len(spec.calls)) if i != position))
        same = problem(fewer).partition(":")[0] == kind
        spec, position = (fewer, 0) if same else (spec, position + 1)
    return spec


def _told(error: Exception) -> str:
    """The error in its own words if it is ours, else with the place that raised it."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, JaxCudnnError):
        return words
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{words[:500]} (line {frame.lineno} of {frame.filename}: {frame.line})"
