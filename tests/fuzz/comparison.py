"""Whether a result is right, by what its reference moves when that is disturbed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_cudnn._core.errors import JaxCudnnError
from jax_cudnn._core.graph.dtypes import is_floating

_RUNS, _MORE_RUNS, _EDGES = 6, 48, 500


class WrongResult(JaxCudnnError):
    """Results are further from the reference's than rounding explains."""


class Noise:
    """Relative moves of all that is computed, and of what is multiplied: up to ``amount`` and
    ``cut``."""

    def __init__(self, seed: int, amount: float = 0.0, cut: float = 0.0):
        self.rng, self.amount, self.cut = np.random.default_rng(seed), amount, cut

    def moved(self, x: np.ndarray, amount: float) -> np.ndarray:
        if not amount or not is_floating(str(x.dtype)):
            return x
        return (x * (1 + self.rng.uniform(-amount, amount, x.shape))).astype(x.dtype)


@dataclass(frozen=True)
class Comparison:
    """A result beside the reference's: the largest error in units of its tolerance, without the
    outliers that are allowed, and how many there are.

    An element's tolerance is twice its largest move in the disturbed runs, more by the root mean
    square of all moves and by one unit in the last place. Beyond it may be, unless they are larger
    than all that the reference has, twice as many elements as a disturbed run has beyond that of
    the others, and one of 500, as no number of runs finds every element that lies on an edge."""

    ratio: float
    outliers: int = 0
    allowed: int = 0

    @property
    def right(self) -> bool:
        return self.outliers <= self.allowed


def compare(got: Any, want: Any, disturbed: Callable[..., Any], step: float) -> list[Comparison]:
    """Arrays beside those that are wanted; ``disturbed`` gives these as a run with noise does.

    Where one is not right, more runs have their say. Nothing is measured where no float differs by
    more than ``step`` of itself and of the array's root mean square.
    """
    pairs = [(_distance(np.asarray(a), b), b) for a, b in zip(got, want, strict=True)]
    found = [_within(errors, b, step) for errors, b in pairs]
    runs: list[Any] = []
    for count in (_RUNS, _MORE_RUNS):
        wrong = [i for i, c in enumerate(found) if c is None or not c.right]
        if not wrong or any(found[i] and found[i].ratio > 100 for i in wrong):
            break
        runs += [disturbed(Noise(seed)) for seed in range(len(runs), count)]
        for i in wrong:
            found[i] = _measured(*pairs[i], [_distance(run[i], want[i]) for run in runs])
    return found


def check_right(found: Mapping[str, Sequence[Comparison]]) -> None:
    """Raises WrongResult unless all are right; each name may have several."""
    wrong = [f"{name}: {c}" for name, each in found.items() for c in each if not c.right]
    if wrong:
        raise WrongResult("more beyond the tolerance than is allowed", got="; ".join(wrong))


def _measured(errors: np.ndarray, want: np.ndarray, runs: list[np.ndarray]) -> Comparison:
    moves, values = np.stack(runs), np.abs(want.astype(np.float64))
    place: Any = 0.0
    if is_floating(str(want.dtype)):
        info = jnp.finfo(want.dtype)
        place = np.where(np.isfinite(values), values * float(info.eps), 0)
        place = place + float(info.smallest_subnormal)

    def tolerance(moves: np.ndarray) -> np.ndarray:
        return 2 * moves.max(0) + root_mean_square(moves) + place

    most = max(int(np.sum(x > tolerance(np.delete(moves, i, 0)))) for i, x in enumerate(moves))
    largest = float(np.max(values, initial=0, where=np.isfinite(values)))
    beyond_all = np.any(errors > np.maximum(tolerance(moves), 2 * largest))
    allowed = 0 if beyond_all else 2 * most + errors.size // _EDGES
    ratios = np.sort(_ratios(errors, tolerance(moves)))
    inside = ratios[: max(ratios.size - allowed, 1)]
    return Comparison(float(inside[-1]), int(np.sum(ratios > 1)), allowed)


def _within(errors: np.ndarray, want: np.ndarray, step: float) -> Comparison | None:
    step = step if is_floating(str(want.dtype)) else 0.0
    tolerance = step * (np.abs(want.astype(np.float64)) + root_mean_square(want))
    ratio = float(np.max(_ratios(errors, tolerance), initial=0))
    return Comparison(ratio) if ratio <= 1 else None


def _ratios(errors: np.ndarray, tolerance: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(errors == 0, 0.0, errors / tolerance).ravel()
    return np.where(np.isnan(ratios), np.inf, ratios)


def root_mean_square(x: np.ndarray) -> float:
    """Of the finite elements, in their number with the others."""
    wide = x.astype(np.float64)
    return math.sqrt(float(np.mean(np.where(np.isfinite(wide), wide, 0) ** 2))) if x.size else 0.0


def _distance(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Absolute differences; 0 between equal infinities and between NaN, infinite beside NaN."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(error), np.inf, error)
