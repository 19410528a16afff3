"""A model's forward through :func:`jax_cudnn.accelerate`: what stands between its layers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

M = TypeVar("M", bound=nnx.Module)
log = logging.getLogger("jax_cudnn")


class _Unlike(Exception):
    """A forward does more than to compute results and to change Variables other than parameters."""


def through_accelerate(model: M) -> M:
    """The model, which its class is then derived from, with its forward accelerated."""
    if callable(model) and not hasattr(type(model), "_accelerated_forward"):
        model.__class__ = _derived(type(model))
    return model


@functools.cache
def _derived(cls: type[M]) -> type[M]:
    """The class with an accelerated ``__call__``."""
    run = _forward(cls)

    @functools.wraps(cls.__call__, updated=())
    def __call__(self: M, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    def __reduce_ex__(self: M, protocol: Any) -> Any:
        _, _, *state = object.__reduce_ex__(self, protocol)
        return (_made, (cls,), *state)  # pickle finds the class by its name

    own = {"__call__": __call__, "__reduce_ex__": __reduce_ex__, "_accelerated_forward": True}
    names = ("__module__", "__qualname__", "__doc__")
    return type(cls)(cls.__name__, (cls,), {**own, **{n: getattr(cls, n) for n in names}})


def _made(cls: type[M]) -> M:
    return object.__new__(_derived(cls))


def _forward(cls: type[nnx.Module]) -> Callable[..., Any]:
    """The forward of a model of this class, and changes its Variables as the class does."""
    from ..acceleration.api import accelerate
    from ..acceleration.region import site

    @functools.wraps(cls.__call__, updated=())
    def pure(graph: Any, structure: Any, given: Any, args: Any, kwargs: Any) -> Any:
        weights, rest = jax.tree.unflatten(structure, given)  # Variables that no other model has
        model = nnx.merge(graph, weights, rest)
        results = cls.__call__(model, *args, **kwargs)
        after, *states = nnx.split(model, nnx.Param, ...)
        leaves, structure_after = jax.tree.flatten((*states,))
        count = len(jax.tree.leaves(states[0]))
        fits = (after, structure_after) == (graph, structure) and not _holds_modules(results)
        if not (fits and all(map(_same, leaves[:count], given[:count]))):
            raise _Unlike
        return results, leaves[count:]

    fast, left = accelerate(pure), set()

    def run(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if site() is None or _holds_modules((args, kwargs)):
            return cls.__call__(model, *args, **kwargs)
        graph, *states = nnx.split(model, nnx.Param, ...)
        given, structure = jax.tree.flatten((*states,))
        if (graph, structure) in left:
            return cls.__call__(model, *args, **kwargs)
        try:
            results, changed = fast(graph, structure, given, args, kwargs)
        except (_Unlike, jax.errors.JAXTypeError) as error:
            why = "" if isinstance(error, _Unlike) else f": {error}".partition("\n")[0]
            log.info("%s is called as it is: its forward is not pure%s", cls.__name__, why)
            left.add((graph, structure))
            return cls.__call__(model, *args, **kwargs)
        if not all(map(_same, given[-len(changed) :], changed)):
            nnx.update(model, jax.tree.unflatten(jax.tree.structure(states[1]), changed))
        return results

    return run


def _same(a: Any, b: Any) -> bool:
    return a is b


def _holds_modules(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.Variable)))
    return any(isinstance(leaf, (nnx.Pytree, nnx.Variable)) for leaf in leaves)
