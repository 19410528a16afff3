"""Whether the transformations of a graph give what those of its reference do.

The reference knows no vmap: it is run for each example by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core.errors import JaxCudnnError
from .derivatives import Differentiated, grain, stored
from .sensitivity import CUT, RESULT, Arrays, Comparison, Noise, compare
from .transforms import Case

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
            the elements: they are ill-conditioned, and nothing is learnt from them.
    """

    ratio: float = 0.0
    results: int = 0
    measured: int = 0
    blunt: int = 0


def check(case: Case, got: Mapping[str, Sequence[Any]]) -> dict[str, Agreement]:
    """Each transformation's results beside the reference's; derivatives only of graphs whose
    values are all finite. Raises WrongTransform."""
    references = [Differentiated(case.spec, example.operands) for example in case.examples]
    found, wrong = {}, []
    finite = all(reference.finite for reference in references)
    for name in case.transforms if finite else ("vmap",):
        comparisons: list[Comparison] = []
        for i, arrays in enumerate(_by_example(case, name, got[name])):
            comparisons += _compared(case, references[i], name, i, arrays)
        wrong += [f"{name}: {comparison}" for comparison in comparisons if not comparison.right]
        found[name] = Agreement(
            max((c.ratio for c in comparisons), default=0.0),
            len(comparisons),
            sum(c.measured for c in comparisons),
            sum(c.blunt > 0.5 for c in comparisons),
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
) -> list[Comparison]:
    """The results of one example."""
    spec, example = case.spec, case.examples[number]
    cotangents = {spec.outputs[i]: x for i, x in zip(case.results, example.cotangents, strict=True)}
    tangents = {spec.inputs[i]: x for i, x in case.tangents.items()}

    def wanted(noise: Noise) -> Arrays:
        if name == "vmap":
            return [*reference.outputs(noise).values()]
        if name == "jvp":
            made, names = (
                reference.tangents(tangents, noise),
                [spec.outputs[i] for i in case.results],
            )
        else:
            made, names = (
                reference.gradients(cotangents, noise),
                [spec.inputs[i] for i in case.floats],
            )
        tensors = [spec.tensor(n) for n in names]
        return [stored(made.get(t.name, np.zeros(t.shape, np.float32)), t.dtype) for t in tensors]

    step = grain(spec) or (CUT if spec.has_float32_product else RESULT)
    return compare(got, wanted(None), wanted, _STEPS * step)


def _by_example(case: Case, name: str, results: Sequence[Any]) -> list[Arrays]:
    arrays = [np.asarray(x) for x in results]
    if name == "vmap":
        arrays = [np.moveaxis(x, a, 0) for x, a in zip(arrays, case.out_axes, strict=True)]
    if not name.startswith("vmap"):
        return [arrays]
    return [[x[i] for x in arrays] for i in range(len(case.examples))]
