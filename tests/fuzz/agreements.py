"""Whether the transformations of a graph give what those of its reference do.

The reference knows no vmap: it is run for each example by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.graph.spec import GraphSpec

from .derivatives import Differentiated, grain, stored
from .sensitivity import CUT, RESULT, Arrays, Comparison, Noise, compare
from .transforms import Case, tame

_STEPS = 2
"""Of the coarsest rounding in a graph: an error up to here is none, and nothing is measured."""


class WrongTransform(JaxCudnnError):
    """A transformed graph's results are further from the reference's than rounding explains."""


@dataclass(frozen=True)
class Agreement:
    """How close the results of a transformation are to the reference's.

    Attributes:
        ratio: the largest error in units of its tolerance.
        results: how many arrays were compared, those of each example of vmap by themselves.
        measured: of them, how many have errors larger than a rounding, and are right by what the
            reference moves when it is disturbed.
        blunt: of them, how many have a tolerance as large as their values for more than half of
            the elements: nothing is learnt from these.
        untame: how many examples were left out: the reference has values or derivatives there that
            are not finite, or larger than what is worth comparing, or rows to normalize whose
            elements are all but equal.
    """

    ratio: float = 0.0
    results: int = 0
    measured: int = 0
    blunt: int = 0
    untame: int = 0


def check(case: Case, got: Mapping[str, Sequence[Any]]) -> dict[str, Agreement]:
    """Each transformation's results beside the reference's. Raises WrongTransform."""
    references = [Differentiated(case.spec, example.operands) for example in case.examples]
    found, wrong = {}, []
    for name in case.transforms:
        comparisons: list[Comparison] = []
        examples = [
            _compared(case, references[i], name, i, arrays)
            for i, arrays in enumerate(_by_example(case, name, got[name]))
        ]
        comparisons = [c for example in examples for c in example or ()]
        wrong += [f"{name}: {comparison}" for comparison in comparisons if not comparison.right]
        found[name] = Agreement(
            max((c.ratio for c in comparisons), default=0.0),
            len(comparisons),
            sum(c.measured for c in comparisons),
            sum(c.blunt > 0.5 for c in comparisons),
            examples.count(None),
        )
    if wrong:
        raise WrongTransform(
            "other results than the reference's",
            expected="at most as many elements beyond the tolerance as are allowed",
            got="; ".join(wrong),
        )
    return found


def _compared(
    case: Case, reference: Differentiated, name: str, number: int, got: Arrays
) -> list[Comparison] | None:
    """The results of one example; None where the reference's are untame."""
    spec, example = case.spec, case.examples[number]
    results = [spec.outputs[i] for i in case.results]
    if name == "vmap":
        return _beside(spec, spec.outputs, reference.outputs, got)
    if name == "jvp":
        tangents = {spec.inputs[i]: x for i, x in case.tangents.items()}
        names, run = results, functools.partial(reference.tangents, tangents)
    else:
        names = [spec.inputs[i] for i in case.floats]
        cotangents = dict(zip(results, example.cotangents, strict=True))
        run = functools.partial(reference.gradients, cotangents)
    if not (reference.finite and reference.conditioned and tame(run(None))):
        return None
    if name == "jvp":
        values, got = got[: len(results)], got[len(results) :]
        return [
            *_beside(spec, results, reference.outputs, values),
            *_beside(spec, names, run, got),
        ]
    return _beside(spec, names, run, got)


def _beside(
    spec: GraphSpec,
    names: Sequence[str],
    run: Callable[[Noise], Mapping[str, np.ndarray]],
    got: Arrays,
) -> list[Comparison]:
    """Arrays beside what the reference has for these tensors: zeros where it has nothing."""
    tensors = [spec.tensor(name) for name in names]

    def arrays(noise: Noise) -> Arrays:
        found = run(noise)
        return [stored(found.get(t.name, np.zeros(t.shape, np.float32)), t.dtype) for t in tensors]

    step = grain(spec) or (CUT if spec.has_float32_product else RESULT)
    return compare(got, arrays(None), arrays, _STEPS * step)


def _by_example(case: Case, name: str, results: Sequence[Any]) -> list[Arrays]:
    arrays = [np.asarray(x) for x in results]
    if name == "vmap":
        arrays = [np.moveaxis(x, a, 0) for x, a in zip(arrays, case.out_axes, strict=True)]
    if not name.startswith("vmap"):
        return [arrays]
    return [[x[i] for x in arrays] for i in range(len(case.examples))]
