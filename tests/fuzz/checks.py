"""What must hold for every graph and call: planned, transformed and on a GPU it is right."""

import functools
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import oracle
from transformations import graphs_of

from jax_cudnn._core import auto
from jax_cudnn._core.cuda import CudaDevice, device_nodes
from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.execution import in_order
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning.deviceless import profiles
from jax_cudnn._core.planning.split import part
from jax_cudnn._core.plans.plan import Plan
from jax_cudnn._core.settings import configure

from . import alterations
from .calls import Call
from .comparison import WrongResult
from .drawing import Operand
from .functions import random_call
from .graphs import random_graph
from .interpreter import interpreted
from .meaning import graph_call
from .runner import Outcome


class WrongSegments(JaxCudnnError):
    """The segments of a plan do not compute what the graph states."""


@dataclass(frozen=True)
class Checks:
    """What is done with each graph: ``site`` (a Profile or a CudaDevice) is what is planned for;
    ``transformed`` also runs and compares its transformations, on that GPU or interpreted."""

    site: Any = None
    transformed: bool = False

    def outcome(self, kind: str, seed: int) -> Outcome:
        """Draws what a kind has for a seed and checks it; never raises."""
        try:
            return getattr(self, kind)(seed)
        except (WrongSegments, WrongResult) as error:
            return Outcome(seed, "wrong", _told(error))
        except JaxCudnnError as error:
            return Outcome(seed, "refused", _told(error))
        except jax.errors.JaxRuntimeError as error:
            return Outcome(seed, "crashed", _told(error))
        except Exception as error:  # whatever it is, it is what is looked for
            return Outcome(seed, "wrong", _told(error))

    def problem(self, spec: GraphSpec) -> str:
        """What is wrong with any graph, for normal operands; empty if nothing is."""
        tensors = enumerate(spec.input_tensors)
        operands = [Operand(t.shape, t.dtype, 0.3).draw(0, i) for i, t in tensors]
        try:
            self._of_graph(spec, operands, 0)
        except Exception as error:
            return _told(error)
        return ""

    def plans(self, specs: Sequence[GraphSpec]) -> list[Plan]:
        """Theirs, whose segments compute what the graphs do."""
        plans = [auto.plan_graph(spec, self.site, "random") for spec in specs]
        for plan in plans:
            check_segments(plan.spec, plan.segments)
        return plans

    def graphs(self, seed: int) -> Outcome:
        return self._of_graph(random_graph(seed).spec, random_graph(seed).inputs(), seed)

    def calls(self, seed: int) -> Outcome:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            call = random_call(seed, functools.partial(self.run, compiled=True))
        try:
            return self._of_call(call, seed)
        except Exception as error:
            error.add_note(call.text)
            raise

    def files(self, seed: int) -> Outcome:
        return Outcome(seed, *alterations.of_files(seed))

    def programs(self, seed: int) -> Outcome:
        if not isinstance(self.site, CudaDevice):
            raise ValueError("altered programs run on a GPU only")
        return Outcome(seed, *alterations.of_programs(seed))

    def _of_graph(self, spec: GraphSpec, operands: Sequence[Any], seed: int) -> Outcome:
        if not self.transformed:
            return Outcome(seed, segments=self._planned([spec]))
        with np.errstate(all="ignore"):  # the reference itself beside NumPy
            exact = oracle.rounded(spec, operands)
        graph_call(spec, operands, seed, ["forward"]).check({"forward": exact})
        return self._of_call(graph_call(spec, operands, seed), seed)

    def _of_call(self, call: Call, seed: int) -> Outcome:
        segments = self._planned(graphs_of(call.program(), *call.data))
        got = self.run(call.program(), *call.data, compiled=call.compiled)
        skipped = call.check(got, isinstance(self.site, CudaDevice))
        return Outcome(seed, "right", "", segments, len(call.names), skipped)

    def _planned(self, specs: Sequence[GraphSpec]) -> tuple[bool, ...]:
        """For each segment whether it is cuDNN's; none where nothing is planned."""
        plans = self.plans(specs) if self.site is not None else []
        return tuple(segment.plan is not None for plan in plans for segment in plan.segments)

    def run(self, function: Callable[..., Any], *data: Any, compiled: bool = False) -> Any:
        """What a program gives on the GPU, or interpreted or compiled for the CPU."""
        on_gpu = isinstance(self.site, CudaDevice)
        if not (on_gpu or compiled):
            return interpreted(function)(*data)
        with jax.default_device(jax.local_devices(backend="gpu" if on_gpu else "cpu")[0]):
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


def outcome(gpu: str | None, kind: str, seed: int) -> Outcome:
    """What another process does; it finds nothing of a package's ``__main__``."""
    return checks_for(gpu, kind == "graphs").outcome(kind, seed)


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
    if in_order(segments, spec, operands, execute) != _terms(spec, operands, table):
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
    words = "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
    if isinstance(error, JaxCudnnError):
        return words
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{words[:1500]} (line {frame.lineno} of {frame.filename}: {frame.line})"
