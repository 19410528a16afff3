"""A training step cut in two programs, its forward and its backward, which are timed apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

_MOVES = ("reshape", "squeeze", "expand_dims", "transpose")
_VIEWS = (*_MOVES, "broadcast_in_dim", "convert_element_type")

Named = dict[str, Any]


@dataclass(frozen=True)
class Halves:
    """A function's training step in two programs.

    Attributes:
        training: of operands by name: the results by name, and what is kept for the backward.
        saved: of operands and of what training returned: all that the backward reads.
        backward: of that and of the gradient of y: the gradients by name.
    """

    training: Callable[[Named], tuple[Named, list[Any]]]
    saved: Callable[[Named, Any], list[Any]]
    backward: Callable[[list[Any], Any], Named]


def halves(function: Callable[..., Named], operands: Named, learned: tuple[str, ...]) -> Halves:
    """Cuts the gradient of the result "y" by ``learned`` where JAX does: at what ``jax.vjp`` keeps.

    As the result of a program an operand would be copied, and a transposed one be written anew;
    in one program neither costs anything. So of what is kept, views of operands and of results are
    made again in the backward, from these.
    """
    structure: Any = None

    def whole(operands: Named) -> tuple[Named, list[Any]]:
        nonlocal structure
        fixed = {name: x for name, x in operands.items() if name not in learned}

        def of(given: Named) -> tuple[Any, Named]:
            found = function(**given, **fixed)
            return found["y"], found

        _, pull, results = jax.vjp(of, {name: operands[name] for name in learned}, has_aux=True)
        leaves, structure = jax.tree.flatten(pull)
        return results, leaves

    closed, shape = jax.make_jaxpr(whole, return_shape=True)(operands)
    cut = _Cut(closed.jaxpr, len(jax.tree.leaves(shape[0])))

    def training(operands: Named) -> tuple[Named, list[Any]]:
        results, residuals = whole(operands)
        return results, [residuals[position] for position in cut.kept]

    def saved(operands: Named, trained: Any) -> list[Any]:
        results, kept = trained
        near = [*jax.tree.leaves(operands), *jax.tree.leaves(results), *kept]
        return [near[place] for place in cut.read]

    def backward(saved: list[Any], dy: Any) -> Named:
        residuals = [source.made(saved) for source in cut.sources]
        (found,) = jax.tree.unflatten(structure, residuals)(dy)
        return found

    return Halves(training, saved, backward)


@dataclass(frozen=True)
class _Source:
    """Where the backward finds a residual.

    Attributes:
        place: of what is saved.
        undone: the moves that led to that, the last one first.
        views: what leads from there to the residual.
    """

    place: int
    undone: Sequence[Any]
    views: Sequence[Any]

    def made(self, saved: list[Any]) -> Any:
        x = saved[self.place]
        for move in self.undone:
            if move.primitive.name == "transpose":
                x = jax.lax.transpose(x, np.argsort(move.params["permutation"]))
            else:
                x = jax.lax.reshape(x, move.invars[0].aval.shape)
        for view in self.views:
            x = view.primitive.bind(x, **view.params)
        return x


class _Cut:
    """Which residuals are kept, and how all are found again.

    Attributes:
        kept: positions among the residuals.
        read: positions among operands, results and what is kept, of what the backward reads.
        sources: where it finds each residual.
    """

    def __init__(self, jaxpr: Any, results: int) -> None:
        self.kept: list[int] = []
        self.read: list[int] = []
        self.sources: list[_Source] = []
        made = {id(v): equation for equation in jaxpr.eqns for v in equation.outvars}
        found, residuals = jaxpr.outvars[:results], jaxpr.outvars[results:]
        operands = {id(variable) for variable in jaxpr.invars}
        # Of a root (a literal is not hashable) its place, and the moves to what is there.
        known: dict[int, tuple[int, list[Any]]] = {}
        for place, variable in enumerate([*jaxpr.invars, *found]):
            root, moves = _back(variable, made, _MOVES)
            known.setdefault(id(root), (place, moves))
        near = len(jaxpr.invars) + results
        for position, variable in enumerate(residuals):
            root, views = _back(variable, made, _VIEWS)
            if id(root) not in operands:  # what is computed is not converted again
                root, views = _back(variable, made, _MOVES)
            if id(root) not in known:
                root, views = variable, []
            if id(root) not in known:
                known[id(root)] = near + len(self.kept), []
                self.kept.append(position)
            place, moves = known[id(root)]
            if place not in self.read:
                self.read.append(place)
            self.sources.append(_Source(self.read.index(place), moves[::-1], views))


def _back(variable: Any, made: dict[int, Any], through: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """The variable that a view is of, and what leads from there to it."""
    views: list[Any] = []
    while (equation := made.get(id(variable))) is not None:
        sources = equation.invars
        literal = any(hasattr(source, "val") for source in sources)
        if equation.primitive.name not in through or len(sources) != 1 or literal:
            break
        views.insert(0, equation)
        variable = sources[0]
    return variable, views
