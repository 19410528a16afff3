"""What a random graph is transformed with, the program of all transformations, and whether it gives
what those of the reference do. The reference knows no vmap: it is run for each example."""

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from oracle import stored

from jax_cudnn._core.graph.dtypes import is_floating
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.primitive import bind

from .comparison import Comparison, Noise, check_right, compare
from .reference import CUT, RESULT, Named, Reference, grain

TRANSFORMS = ("grad", "jvp", "vmap", "vmap of grad")
_USUAL, _LARGEST = 2.0**8, 2.0**10  # derivatives, at most
_STEPS = 2  # of the coarsest rounding: an error up to here is none, and nothing is measured

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """A graph, operands and cotangents of the float results for each example of vmap (the first is
    also that of grad and jvp), tangents of some operands, and their axes of vmap. ``floats`` and
    ``results`` are positions of what has gradients and cotangents."""

    spec: GraphSpec
    floats: list[int]
    results: list[int]
    operands: list[Arrays]
    cotangents: list[Arrays]
    tangents: Mapping[int, np.ndarray]
    axes: list[int | None]
    transforms: Sequence[str]

    @property
    def data(self) -> tuple[Any, ...]:
        """The arrays that :meth:`program` takes."""

        def stacked(each: list[Arrays], axes: Sequence[int | None]) -> Arrays:
            pairs = zip(zip(*each, strict=True), axes, strict=True)
            return [xs[0] if axis is None else np.stack(xs, axis) for xs, axis in pairs]

        cotangents = stacked(self.cotangents, [0] * len(self.cotangents[0]))
        stacks = stacked(self.operands, self.axes), cotangents
        return self.operands[0], self.cotangents[0], dict(self.tangents), *stacks

    def program(self) -> Callable[..., dict[str, Any]]:
        """A function of :attr:`data`: the results of each transformation; of jvp the float results
        and their tangents."""

        def function(*operands: Any) -> list[Any]:
            return bind(self.spec, "random", *operands)

        def floats(operands: Any, moving: Any) -> list[Any]:
            results = function(*(moving.get(i, x) for i, x in enumerate(operands)))
            return [results[i] for i in self.results]

        def gradients(operands: Any, cotangents: Any) -> Any:
            at = {i: operands[i] for i in self.floats}
            (found,) = jax.vjp(functools.partial(floats, operands), at)[1](cotangents)
            return [*found.values()]

        def transformed(operands: Any, cotangents: Any, tangents: Any, *stacks: Any) -> Any:
            def jvp() -> list[Any]:
                at = {i: operands[i] for i in tangents}
                both = jax.jvp(functools.partial(floats, operands), (at,), (tangents,))
                return [*both[0], *both[1]]

            made: dict[str, Callable[[], Any]] = {
                "grad": lambda: gradients(operands, cotangents),
                "jvp": jvp,
                "vmap": lambda: jax.vmap(function, in_axes=self.axes)(*stacks[0]),
                "vmap of grad": lambda: jax.vmap(gradients, in_axes=(self.axes, 0))(*stacks),
            }
            return {name: made[name]() for name in self.transforms}

        return transformed


def draw(
    spec: GraphSpec, operands: Callable[[int], Sequence[Any]], seed: int, count: int = 2
) -> Case:
    """So many transformations, with examples, directions and axes of vmap, all at random;
    ``operands(number)`` are operands of the graph. Tangents and cotangents are smaller where
    derivatives are large."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    drawn = [[np.asarray(x) for x in operands(i)] for i in range(rng.choice((2, 2, 3)))]
    axes = [_axis(rng, x.ndim) if rng.random() < 0.6 else None for x in drawn[0]]
    if all(axis is None for axis in axes):
        axes[0] = _axis(rng, drawn[0][0].ndim)
    drawn = [[drawn[0][i] if axes[i] is None else x for i, x in enumerate(xs)] for xs in drawn]
    inputs, outputs = spec.input_tensors, spec.output_tensors
    floats, results = _floating(inputs), _floating(outputs)
    cotangents, tangents = [[] for _ in drawn], {}
    if floats and results:
        reference = Reference(spec, drawn[0])
        for i in [i for i in floats if rng.random() < 0.7] or floats:
            tangents[i] = noise.standard_normal(inputs[i].shape, np.float32)
            tangents[i] *= max(float(np.std(drawn[0][i].astype(np.float32))), 0.1)
        scale = _scale(reference.tangents({inputs[i].name: x for i, x in tangents.items()}))
        tangents = {i: stored(x * scale, inputs[i].dtype) for i, x in tangents.items()}
        normal = {i: noise.standard_normal((len(drawn), *outputs[i].shape), "f") for i in results}
        scale = _scale(reference.gradients({outputs[i].name: x[0] for i, x in normal.items()}))
        for j in range(len(drawn)):
            cotangents[j] = [stored(normal[i][j] * scale, outputs[i].dtype) for i in results]
    names = rng.sample(TRANSFORMS, count) if floats and results else ["vmap"]
    return Case(spec, floats, results, drawn, cotangents, tangents, axes, names)


def check_results(spec: GraphSpec, operands: Sequence[Any], got: Any) -> None:
    """A graph's results beside the reference's. Raises WrongResult."""
    run = Reference(spec, operands).values
    check_right({"values": _beside(run, spec, spec.outputs, got, steps=0)})


def check(case: Case, got: Mapping[str, Sequence[Any]]) -> int:
    """Each transformation's results beside the reference's. Raises WrongResult; gives for how many
    examples its derivatives say nothing."""
    found = {}
    for number, operands in enumerate(case.operands):
        reference = Reference(case.spec, operands)
        for name in case.transforms:
            if "vmap" in name or number == 0:
                at = number if "vmap" in name else ...
                arrays = [np.asarray(x)[at] for x in got[name]]
                found[f"{name} {number}"] = _compared(case, reference, name, number, arrays)
    check_right({name: each or [] for name, each in found.items()})
    return [*found.values()].count(None)


def _compared(case: Case, reference: Reference, name: str, number: int, got: Arrays) -> Any:
    """The results of one example; None where the reference's derivatives say nothing."""
    spec = case.spec
    results = [spec.outputs[i] for i in case.results]
    if name == "vmap":
        return _beside(reference.values, spec, spec.outputs, got)
    if name == "jvp":
        given = {spec.inputs[i]: x for i, x in case.tangents.items()}
        names, run = results, functools.partial(reference.tangents, given)
    else:
        given = dict(zip(results, case.cotangents[number], strict=True))
        names = [spec.inputs[i] for i in case.floats]
        run = functools.partial(reference.gradients, given)
    if not (_largest(run()) <= _LARGEST and reference.comparable):
        return None
    values = _beside(reference.values, spec, results, got[: len(names)]) if name == "jvp" else []
    return [*values, *_beside(run, spec, names, got[len(values) :])]


def _beside(
    run: Callable[..., Named], spec: GraphSpec, names: Sequence[str], got: Any, steps: int = _STEPS
) -> list[Comparison]:
    """Arrays beside what the reference has for these tensors."""

    def arrays(noise: Noise | None = None) -> Arrays:
        found = run(noise=noise)
        return [stored(found[name], spec.tensor(name).dtype) for name in names]

    step = grain(spec) or (CUT if spec.has_float32_product else RESULT)
    return compare(got, arrays(), arrays, steps * step)


def _floating(tensors: Sequence[Any]) -> list[int]:
    return [i for i, tensor in enumerate(tensors) if is_floating(tensor.dtype)]


def _axis(rng: random.Random, rank: int) -> int:
    """Where a further dimension may stand: mostly in front."""
    return 0 if rng.random() < 0.4 else rng.randint(-rank - 1, rank)


def _scale(derivatives: Named) -> np.float32:
    """What makes the first example's derivatives at most 256, so that float16 holds them: a power
    of 2; not of what would then still be large."""
    largest = _largest(derivatives)
    exponent = math.floor(math.log2(_USUAL / largest)) if 0 < largest < math.inf else 0
    return np.float32(2.0 ** min(0, max(exponent, -10)))


def _largest(arrays: Named) -> float:
    """Infinite if an element is no number."""
    found = [float(np.max(np.abs(x), initial=0)) for x in arrays.values()]
    return math.inf if any(map(math.isnan, found)) else max(found, default=0.0)
