"""Named cases from real models: a graph, and the best that XLA is known to do with the same.

Both sides take the arrays that a JAX model holds: images channels-last (NHWC, NDHWC), matrices
row-major. Weights and results of ``wgrad`` may have the order each side likes best, because a
model can hold them so; `Formulation.prepare` and `finish` reorder them outside the timing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jax_cudnn._core import agreement
from jax_cudnn._core.errors import UnsupportedGraphError
from jax_cudnn._core.graph.dtypes import FP8
from jax_cudnn._core.planning.cost import Cost
from jax_cudnn._core.user_context import CUDNN, implementation
from jax_cudnn.commands import bench
from jax_cudnn.commands.timing import Formulation, compare

from ..case import LIMIT, REFERENCE, Case, Named, Operand, Side
from ..measure import Effort, Entry

Way = Callable[..., Any] | Formulation
Built = tuple[Way, dict[str, Way], tuple[Operand, ...]]
Made = Callable[[bool], "ModelCase"]
"""A case, or with True the same with small shapes, which tests run on a CPU."""


@dataclass(frozen=True)
class ModelCase:
    """A computation of a real model, as a graph and as plain JAX.

    Attributes:
        name: ``model/shape/part``.
        part: what it computes, such as "dgrad" or "scale, bias, relu".
        ours: the graph on the model's arrays.
        xla: formulations in plain JAX, by name; the fastest one is the opponent.
        operands: what both sides get; `Formulation.prepare` may reorder them.
    """

    name: str
    part: str
    ours: Way
    xla: Mapping[str, Way]
    operands: tuple[Operand, ...]

    @property
    def model(self) -> str:
        return self.name.partition("/")[0]

    @property
    def functions(self) -> dict[str, Way]:
        """Ours first, as :func:`compare` takes them."""
        return {bench.OURS: self.ours, **self.xla}

    @property
    def what(self) -> str:
        return " ".join(map(str, self.operands))

    @property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(operand.aval for operand in self.operands)

    def arrays(self, key: jax.Array) -> list[jax.Array]:
        """Random operands, the same for the same key."""
        keys = jax.random.split(key, len(self.operands))
        return [operand.array(k) for operand, k in zip(self.operands, keys, strict=True)]


def matrix_case(shape: str, part: str, build: Callable[..., Built], *arguments: Any) -> Made:
    """The case of ``build(*arguments)``, or the same with small shapes."""

    def make(tiny: bool) -> ModelCase:
        # Sizes above 1 become 64 and 128 by turns, so that a swapped pair is a wrong shape.
        sizes = iter((64, 128, 192))
        few = (next(sizes) if isinstance(a, int) and a > 1 else a for a in arguments)
        name = f"{shape}/{part.replace(', ', '-').replace(' ', '-')}"
        return ModelCase(name, part, *build(*(few if tiny else arguments)))

    return make


@dataclass(frozen=True)
class GraphCase(Case):
    """A :class:`ModelCase` as the other suites have theirs: operands x0, x1 and so on, result y."""

    total: Cost = field(default_factory=Cost)
    tolerance: float = 0.0

    def bytes(self, program: str) -> int:
        return self.total.bytes

    def limit_us(self, program: str) -> float:
        products = self.total.flops / LIMIT["tflops"]["bfloat16"] / 1e6
        return max(products, super().limit_us(program))

    def allowed(self, program: str) -> float:
        return self.tolerance


def named(case: ModelCase) -> GraphCase:
    """All sides are held against the first formulation."""

    def names(values: Iterable[Any]) -> dict[str, Any]:
        return {f"x{place}": value for place, value in enumerate(values)}

    def side(way: Way, implemented: str | None = None) -> Side:
        way = way if isinstance(way, Formulation) else Formulation(way)
        prepare, finish = way.prepare, way.finish

        def function(**given: Any) -> Named:
            with implementation(implemented) if implemented else contextlib.nullcontext():
                return {"y": way.function(*given.values())}

        return Side(
            function,
            prepare and (lambda given: names(prepare(*given.values()))),
            finish and (lambda results: {"y": finish(results["y"])}),
        )

    first = next(iter(case.xla.values()))
    return GraphCase(
        case.name,
        case.what,
        names(case.operands),
        (),
        lambda implemented: side(case.ours, implemented),
        {name: side(way) for name, way in case.xla.items()},
        side(lambda *operands: first(*operands)),
        total=bench.graphs_cost(case.ours, *case.avals),
        tolerance=agreement.tolerance(case.avals, jax.eval_shape(case.ours, *case.avals)),
    )


def base(case: ModelCase) -> Entry:
    """What is always told of a case."""
    operands = [str(operand) for operand in case.operands]
    return {"model": case.model, "part": case.part, "operands": operands}


def measure(case: ModelCase, effort: Effort) -> Entry:
    """The entry of a case: cost, times in us, ratio, differences, engines.

    Each graph of ours is one cuDNN plan (where "split" might leave it to XLA, which says nothing
    about cuDNN), and is timed against its own reference, too; not so in float8, where XLA tuned the
    reference, a product of converted operands, for minutes.
    """
    entry: Entry = {}
    with implementation(CUDNN):
        try:
            found = bench.graphs(case.ours, *case.avals)
            total = bench.graphs_cost(case.ours, *case.avals)
            entry |= {"flops": total.flops, "bytes": total.bytes}
            functions, ours = case.functions, case.ours
            ours = ours if isinstance(ours, Formulation) else Formulation(ours)
            if not any(operand.dtype in FP8 for operand in case.operands):
                plain = bench.in_xla(ours.function)
                functions[REFERENCE] = Formulation(plain, ours.prepare, ours.finish)
            arrays = case.arrays(jax.random.key(0))
            how = {"calls": effort.calls, "rounds": effort.rounds, "seconds": effort.seconds}
            result = compare(functions, *arrays, **how)
            # What XLA would run instead is not a formulation that a user would write.
            others = tuple(name for name in result.names if name != REFERENCE)
            entry |= bench.compared(replace(result, names=others), total)
            if REFERENCE in result.seconds:
                entry |= bench.ratios(result, REFERENCE, "ratio_reference")
            return entry | {"engines": bench.engines(found)}
        except UnsupportedGraphError as error:
            parts = [error.summary, error.why, *list(error.reasons.values())[:1]]
            reason = "; ".join(" ".join(part.split()) for part in parts if part)[:1000]
            return entry | {"status": "unsupported", "reason": reason}
