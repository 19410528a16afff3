"""What a random graph is transformed with, and the program of all transformations."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_cudnn._core.graph.dtypes import is_floating
from jax_cudnn._core.graph.spec import GraphSpec

from .derivatives import Differentiated, stored

TRANSFORMS = ("grad", "jvp", "vmap", "vmap of grad")
_USUAL, _LARGEST = 2.0**8, 2.0**10  # derivatives, at most

Arrays = list[np.ndarray]
Function = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Example:
    """Operands, and cotangents of the results that are floats."""

    operands: Arrays
    cotangents: Arrays


@dataclass(frozen=True)
class Case:
    """What a graph is transformed with. The first example is also that of grad and jvp.

    Attributes:
        spec: the graph.
        examples: what vmap runs over; equal in what is not mapped.
        tangents: of operands, by position: of some of those that are floats.
        axes: of vmap, for each operand; None where all examples have the same.
        out_axes: of vmap, for each result.
        mapped: of the cotangents, which vmap runs over.
    """

    spec: GraphSpec
    examples: tuple[Example, ...]
    tangents: Mapping[int, np.ndarray]
    axes: tuple[int | None, ...]
    out_axes: tuple[int, ...]
    mapped: tuple[bool, ...]

    @property
    def floats(self) -> list[int]:
        """Positions of the operands that have gradients."""
        return floating(self.spec, self.spec.inputs)

    @property
    def results(self) -> list[int]:
        """Positions of the results that have cotangents."""
        return floating(self.spec, self.spec.outputs)

    @property
    def transforms(self) -> tuple[str, ...]:
        """Those that there are: without floats no derivatives."""
        return TRANSFORMS if self.floats and self.results else ("vmap",)

    @property
    def data(self) -> tuple[Any, ...]:
        """The arrays that :meth:`program` takes."""
        first = self.examples[0]
        stacks = [
            x if axis is None else np.stack([e.operands[i] for e in self.examples], axis)
            for i, (x, axis) in enumerate(zip(first.operands, self.axes, strict=True))
        ]
        cotangents = [
            np.stack([e.cotangents[i] for e in self.examples]) if mapped else x
            for i, (x, mapped) in enumerate(zip(first.cotangents, self.mapped, strict=True))
        ]
        return first.operands, first.cotangents, dict(self.tangents), stacks, cotangents

    def program(self, function: Function) -> Callable[..., dict[str, Any]]:
        """A function of :attr:`data`: the results of each transformation of ``function``; of jvp
        the float results and their tangents."""

        def gradients(operands: Any, cotangents: Any) -> Any:
            of_floats, at = self._of(function, operands, self.floats)
            return jax.vjp(of_floats, *at)[1](cotangents)

        def transformed(
            operands: Any, cotangents: Any, tangents: Any, stacks: Any, stacked: Any
        ) -> dict[str, Any]:
            found = {
                "vmap": jax.vmap(function, in_axes=self.axes, out_axes=[*self.out_axes])(*stacks)
            }
            if "grad" in self.transforms:
                of_some, at = self._of(function, operands, [*tangents])
                in_axes = [*self.axes], [0 if mapped else None for mapped in self.mapped]
                found["grad"] = gradients(operands, cotangents)
                results, along = jax.jvp(of_some, at, [*tangents.values()])
                found["jvp"] = [*results, *along]
                found["vmap of grad"] = jax.vmap(gradients, in_axes=in_axes)(stacks, stacked)
            return found

        return transformed

    def _of(
        self, function: Function, operands: Sequence[Any], positions: Sequence[int]
    ) -> tuple[Callable[..., list[Any]], list[Any]]:
        """The float results as a function of some operands, and these."""

        def of_some(*moving: Any) -> list[Any]:
            given = list(operands)
            for i, x in zip(positions, moving, strict=True):
                given[i] = x
            results = function(*given)
            return [results[i] for i in self.results]

        return of_some, [operands[i] for i in positions]


def draw(spec: GraphSpec, operands: Callable[[int], Sequence[Any]], seed: int) -> Case:
    """Examples, directions and axes of vmap, all at random.

    ``operands(number)`` are operands of the graph, other ones for other numbers. Tangents and
    cotangents are smaller where derivatives are large.
    """
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    drawn = [[np.asarray(x) for x in operands(i)] for i in range(rng.choice((2, 2, 3)))]
    axes = [_axis(rng, x.ndim) if rng.random() < 0.6 else None for x in drawn[0]]
    if all(axis is None for axis in axes):
        some = rng.randrange(len(axes))
        axes[some] = _axis(rng, drawn[0][some].ndim)
    floats, results = floating(spec, spec.inputs), floating(spec, spec.outputs)
    differentiated = Differentiated(spec, drawn[0])
    along = [i for i in floats if rng.random() < 0.7] or floats
    others = [np.asarray(x) for x in operands(len(drawn))]
    tangents = {
        i: others[i].astype(np.float32) * noise.choice((-1, 1), others[i].shape) for i in along
    }
    named = {spec.inputs[i]: x for i, x in tangents.items()}
    scale = _scale(differentiated.tangents(named))
    tangents = {i: stored(x * scale, spec.input_tensors[i].dtype) for i, x in tangents.items()}
    mapped = tuple(rng.random() < 0.8 for _ in results)
    cotangents: list[Arrays] = [[] for _ in drawn]
    for i, varies in zip(results, mapped, strict=True):
        tensor = spec.output_tensors[i]
        normal = noise.standard_normal((len(drawn), *tensor.shape), np.float32)
        scale = _scale(differentiated.gradients({tensor.name: normal[0]}))
        for j, given in enumerate(cotangents):
            given.append(stored(normal[j if varies else 0] * scale, tensor.dtype))
    examples = tuple(
        Example([drawn[0][i] if axis is None else xs[i] for i, axis in enumerate(axes)], given)
        for xs, given in zip(drawn, cotangents, strict=True)
    )
    out_axes = tuple(_axis(rng, len(tensor.shape)) for tensor in spec.output_tensors)
    return Case(spec, examples, tangents, tuple(axes), out_axes, mapped)


def floating(spec: GraphSpec, names: Sequence[str]) -> list[int]:
    """Positions of the tensors that are floats."""
    return [i for i, name in enumerate(names) if is_floating(spec.tensor(name).dtype)]


def _axis(rng: random.Random, rank: int) -> int:
    """Where a further dimension may stand: mostly in front."""
    return 0 if rng.random() < 0.4 else rng.randint(-rank - 1, rank)


def _scale(derivatives: Mapping[str, np.ndarray]) -> np.float32:
    """What makes the first example's derivatives at most 256, so that float16 holds them: a power
    of 2; not of what would then still be large, see :func:`tame`."""
    largest = max((_magnitude(x) for x in derivatives.values()), default=0.0)
    exponent = math.floor(math.log2(_USUAL / largest)) if 0 < largest < math.inf else 0
    return np.float32(2.0 ** min(0, max(exponent, -10)))


def tame(derivatives: Mapping[str, np.ndarray]) -> bool:
    """Whether derivatives are finite, and none is so large that it says nothing of a graph, as
    beside a pole."""
    return all(_magnitude(x) <= _LARGEST for x in derivatives.values())


def _magnitude(x: np.ndarray) -> float:
    """The largest; infinite if one is no number."""
    found = float(np.max(np.abs(x), initial=0))
    return math.inf if math.isnan(found) else found
