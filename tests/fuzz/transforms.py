"""What a random graph is transformed with, the program of all transformations, and whether it gives
what those of the reference do. The reference knows no vmap: it is run for each example."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.graph.dtypes import FP8, is_floating
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.primitive import bind

from .reference import CUT, RESULT, Comparison, Named, Noise, Reference, compare, grain

TRANSFORMS = ("grad", "jvp", "vmap", "vmap of grad")
_USUAL, _LARGEST = 2.0**8, 2.0**10  # derivatives, at most
_STEPS = 2  # of the coarsest rounding: an error up to here is none, and nothing is measured

Arrays = list[np.ndarray]


class WrongTransform(JaxCudnnError):
    """A transformed graph's results are further from the reference's than rounding explains."""


@dataclass(frozen=True)
class Case:
    """A graph, operands and cotangents of the float results for each example of vmap (the first is
    also that of grad and jvp), tangents of some operands, the axes of vmap, and which cotangents it
    runs over."""

    spec: GraphSpec
    operands: list[Arrays]
    cotangents: list[Arrays]
    tangents: Mapping[int, np.ndarray]
    axes: tuple[int | None, ...]
    out_axes: tuple[int, ...]
    mapped: tuple[bool, ...]

    @property
    def floats(self) -> list[int]:
        """Positions of the operands that have gradients."""
        return _floating(self.spec, self.spec.inputs)

    @property
    def results(self) -> list[int]:
        """Positions of the results that have cotangents."""
        return _floating(self.spec, self.spec.outputs)

    @property
    def transforms(self) -> tuple[str, ...]:
        return TRANSFORMS if self.floats and self.results else ("vmap",)

    @property
    def data(self) -> tuple[Any, ...]:
        """The arrays that :meth:`program` takes."""

        def stacked(each: list[Arrays], axes: Sequence[int | None]) -> Arrays:
            columns = zip(*each, strict=True)
            pairs = zip(columns, axes, strict=True)
            return [xs[0] if axis is None else np.stack(xs, axis) for xs, axis in pairs]

        stacks = stacked(self.operands, self.axes)
        cotangents = stacked(self.cotangents, self._axes_of_cotangents)
        return self.operands[0], self.cotangents[0], dict(self.tangents), stacks, cotangents

    @property
    def _axes_of_cotangents(self) -> list[int | None]:
        return [0 if mapped else None for mapped in self.mapped]

    def program(self) -> Callable[..., dict[str, Any]]:
        """A function of :attr:`data`: the results of each transformation; of jvp the float results
        and their tangents."""

        def function(*operands: Any) -> list[Any]:
            return bind(self.spec, "random", *operands)

        def of_some(operands: Any, positions: Any, *moving: Any) -> list[Any]:
            given = dict(enumerate(operands)) | dict(zip(positions, moving, strict=True))
            results = function(*given.values())
            return [results[i] for i in self.results]

        def gradients(operands: Any, cotangents: Any) -> Any:
            of_floats = functools.partial(of_some, operands, self.floats)
            return jax.vjp(of_floats, *(operands[i] for i in self.floats))[1](cotangents)

        def transformed(
            operands: Any, cotangents: Any, tangents: Any, stacks: Any, stacked: Any
        ) -> dict[str, Any]:
            mapped = jax.vmap(function, in_axes=self.axes, out_axes=[*self.out_axes])
            found: dict[str, Any] = {"vmap": mapped(*stacks)}
            if "grad" in self.transforms:
                found["grad"] = gradients(operands, cotangents)
                of_given = functools.partial(of_some, operands, [*tangents])
                at = [operands[i] for i in tangents]
                results, along = jax.jvp(of_given, at, [*tangents.values()])
                found["jvp"] = [*results, *along]
                in_axes = [*self.axes], self._axes_of_cotangents
                found["vmap of grad"] = jax.vmap(gradients, in_axes=in_axes)(stacks, stacked)
            return found

        return transformed


def draw(spec: GraphSpec, operands: Callable[[int], Sequence[Any]], seed: int) -> Case:
    """Examples, directions and axes of vmap, all at random; ``operands(number)`` are operands of
    the graph. Tangents and cotangents are smaller where derivatives are large."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    drawn = [[np.asarray(x) for x in operands(i)] for i in range(rng.choice((2, 2, 3)))]
    axes = [_axis(rng, x.ndim) if rng.random() < 0.6 else None for x in drawn[0]]
    if all(axis is None for axis in axes):
        some = rng.randrange(len(axes))
        axes[some] = _axis(rng, drawn[0][some].ndim)
    floats, results = _floating(spec, spec.inputs), _floating(spec, spec.outputs)
    out_axes = tuple(_axis(rng, len(tensor.shape)) for tensor in spec.output_tensors)
    mapped = tuple(rng.random() < 0.8 for _ in results)
    examples = [[x if a is not None else y for x, y, a in zip(xs, drawn[0], axes)] for xs in drawn]  # noqa: B905
    cotangents: list[Arrays] = [[] for _ in drawn]
    tangents, outputs = {}, spec.output_tensors
    if floats and results:
        reference = Reference(spec, drawn[0])
        for i in [i for i in floats if rng.random() < 0.7] or floats:
            tangents[i] = noise.standard_normal(drawn[0][i].shape, np.float32)
            tangents[i] *= max(float(np.std(drawn[0][i].astype(np.float32))), 0.1)
        scale = _scale(reference.tangents({spec.inputs[i]: x for i, x in tangents.items()}))
        dtypes = [tensor.dtype for tensor in spec.input_tensors]
        tangents = {i: stored(x * scale, dtypes[i]) for i, x in tangents.items()}
        normal = {i: noise.standard_normal((len(drawn), *outputs[i].shape), "f") for i in results}
        scale = _scale(reference.gradients({outputs[i].name: x[0] for i, x in normal.items()}))
        cotangents = [
            [
                stored(normal[i][j if varies else 0] * scale, outputs[i].dtype)
                for i, varies in zip(results, mapped, strict=True)
            ]
            for j in range(len(drawn))
        ]
    return Case(spec, examples, cotangents, tangents, tuple(axes), out_axes, mapped)


def check(case: Case, got: Mapping[str, Sequence[Any]]) -> dict[str, list[Comparison] | None]:
    """Each transformation's results beside the reference's, None for an example that is not
    compared. Raises WrongTransform."""
    spec, found, wrong = case.spec, {}, []
    references = [Reference(spec, operands) for operands in case.operands]
    for name in case.transforms:
        arrays = [np.asarray(x) for x in got[name]]
        if name == "vmap":
            arrays = [np.moveaxis(x, a, 0) for x, a in zip(arrays, case.out_axes, strict=True)]
        for number, reference in enumerate(references if "vmap" in name else references[:1]):
            example = [x[number] for x in arrays] if "vmap" in name else arrays
            found[f"{name} {number}"] = comparisons = _compared(
                case, reference, name, number, example
            )
            wrong += [f"{name}: {c}" for c in comparisons or () if not c.right]
    if wrong:
        raise WrongTransform(
            "other results than the reference's",
            expected="at most as many elements beyond the tolerance as are allowed",
            got="; ".join(wrong),
        )
    return found


def _compared(
    case: Case, reference: Reference, name: str, number: int, got: Arrays
) -> list[Comparison] | None:
    """The results of one example; None where the reference's derivatives say nothing."""
    spec = case.spec
    results = [spec.outputs[i] for i in case.results]
    if name == "vmap":
        return _beside(spec, spec.outputs, reference.values, got)
    if name == "jvp":
        tangents = {spec.inputs[i]: x for i, x in case.tangents.items()}
        names, run = results, functools.partial(reference.tangents, tangents)
    else:
        names = [spec.inputs[i] for i in case.floats]
        cotangents = dict(zip(results, case.cotangents[number], strict=True))
        run = functools.partial(reference.gradients, cotangents)
    tame = all(_magnitude(x) <= _LARGEST for x in run().values())
    if not (tame and reference.comparable):
        return None
    values = _beside(spec, results, reference.values, got[: len(results)]) if name == "jvp" else []
    return [*values, *_beside(spec, names, run, got[len(values) :])]


def _beside(
    spec: GraphSpec, names: Sequence[str], run: Callable[..., Named], got: Arrays
) -> list[Comparison]:
    """Arrays beside what the reference has for these tensors."""

    def arrays(noise: Noise | None) -> Arrays:
        found = run(noise=noise)
        return [stored(found[name], spec.tensor(name).dtype) for name in names]

    step = grain(spec) or (CUT if spec.has_float32_product else RESULT)
    return compare(got, arrays(None), arrays, _STEPS * step)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """A float as an array of this dtype has it: float8 saturates."""
    if dtype in FP8:
        x = np.clip(x, -float(jax.numpy.finfo(dtype).max), float(jax.numpy.finfo(dtype).max))
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(jax.numpy.dtype(dtype))


def _floating(spec: GraphSpec, names: Sequence[str]) -> list[int]:
    return [i for i, name in enumerate(names) if is_floating(spec.tensor(name).dtype)]


def _axis(rng: random.Random, rank: int) -> int:
    """Where a further dimension may stand: mostly in front."""
    return 0 if rng.random() < 0.4 else rng.randint(-rank - 1, rank)


def _scale(derivatives: Named) -> np.float32:
    """What makes the first example's derivatives at most 256, so that float16 holds them: a power
    of 2; not of what would then still be large."""
    largest = max((_magnitude(x) for x in derivatives.values()), default=0.0)
    exponent = math.floor(math.log2(_USUAL / largest)) if 0 < largest < math.inf else 0
    return np.float32(2.0 ** min(0, max(exponent, -10)))


def _magnitude(x: np.ndarray) -> float:
    """The largest; infinite if one is no number."""
    found = float(np.max(np.abs(x), initial=0))
    return math.inf if math.isnan(found) else found
