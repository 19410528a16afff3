"""graph_cache: equal kinds of arguments share a graph."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError, GraphTypeError, shown
from .._core.graph.arguments import typed
from .._core.graph.source import defined_at
from .arrays import Template, is_array
from .wrapper import Graph


def graph_cache(
    fn: Callable[..., Any] | None = None,
    *,
    maxsize: int = 256,
    key_fn: Callable[..., Hashable] | None = None,
) -> Any:
    """Decorate a function that builds a graph, so that equal kinds of arguments share a graph.

    The key holds the shape, dtype and memory order of each array, in any pytree, and which
    arguments are the same array. It holds the value and type of all other arguments, including
    NumPy scalars. Defaults count as passed, and positional and keyword arguments are equivalent.
    The cache keeps the ``maxsize`` graphs used most recently. If threads request the same graph,
    one builds it and the rest wait. The cache keeps no array alive, but it does keep other
    arguments alive, such as the instance of a method.

    Args:
        fn: the function; omitted in ``@graph_cache(maxsize=...)``.
        maxsize: how many graphs to keep.
        key_fn: a function that returns the key for given arguments; keyword-only, unlike in
            ``cudnn.graph_cache``.

    Returns:
        The function, with ``cache_info()`` and ``cache_clear()``.

    Raises:
        GraphTypeError: an argument is neither an array nor hashable.

    Source: ``cudnn.graph_cache`` and "Using wrapper in larger codebases" in NVIDIA's
    cudnn-frontend.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> @jc.graph_cache
        ... def relu(x):
        ...     with jc.Graph(inputs=["relu::input"], outputs=["relu::OUT_0"]) as graph:
        ...         _ = graph.relu(input=x, name="relu").set_output(True)
        ...     return graph
        >>> x = jnp.array([-1.0, 2.0])
        >>> relu(x)(x).tolist(), relu(x) is relu(2 * x), relu.cache_info().currsize
        ([0.0, 2.0], True, 1)
    """
    if fn is None:
        return functools.partial(graph_cache, maxsize=maxsize, key_fn=key_fn)
    if not callable(fn):
        raise GraphTypeError(
            "graph_cache decorates functions",
            expected="a function that builds a graph",
            got=shown(fn),
            fix="@graph_cache, or @graph_cache(maxsize=..., key_fn=...)",
        )
    if isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 1:
        raise GraphError("invalid maxsize", expected="an integer of at least 1", got=repr(maxsize))
    return _Factory(fn, maxsize, key_fn)


class _Entry:
    """A graph that is built, or that a thread is building."""

    def __init__(self, _: Hashable) -> None:
        self.lock = threading.RLock()
        self.graph: Any = None


class _Factory:
    """The decorated function."""

    def __init__(
        self, fn: Callable[..., Any], maxsize: int, key_fn: Callable[..., Hashable] | None
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._key_fn, self._signature = fn, key_fn, None
        with contextlib.suppress(TypeError, ValueError):  # a few built-in functions have none
            self._signature = inspect.signature(fn)
        self._lock = threading.Lock()
        self._entry = functools.lru_cache(maxsize)(_Entry)
        self.cache_info, self.cache_clear = self._entry.cache_info, self._entry.cache_clear

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self._key_fn(*args, **kwargs) if self._key_fn else self._kind(args, kwargs)
        try:
            with self._lock:
                entry = self._entry(key)
        except TypeError as error:
            what, expected, fix = "a key of key_fn", "a hashable value, for example a tuple", None
            if self._key_fn is None:
                what, fix = "an argument", "pass key_fn to graph_cache"
                expected = "arrays, or hashable values such as numbers, strings and tuples"
            raise self._refusal(f"{what} is not hashable", expected, str(error), fix) from None
        with entry.lock:
            if entry.graph is None:  # also if it raised in the thread that this one waited for
                entry.graph = self._fn(*args, **kwargs)
                for leaf in jax.tree.leaves(entry.graph):
                    if isinstance(leaf, Graph):  # it serves all numbers in host memory
                        leaf._forget_numbers()
            return entry.graph

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """The key of arguments that share a graph."""
        if self._signature is not None:
            with contextlib.suppress(TypeError):  # the function will raise it
                bound = self._signature.bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
        try:
            leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
        except ValueError as error:  # JAX sorts the keys of dictionaries
            raise self._refusal(
                "an argument is not a pytree",
                "dictionaries whose keys can be sorted",
                str(error).splitlines()[0],
                "pass key_fn to graph_cache",
            ) from error
        first: dict[int, int] = {}
        kinds = (_of_leaf(leaf, first.setdefault(id(leaf), i)) for i, leaf in enumerate(leaves))
        return tree, tuple(kinds)

    def _refusal(self, what: str, expected: str, got: str, fix: str | None) -> GraphTypeError:
        where, name = defined_at(self._fn), getattr(self, "__name__", "the factory")
        return GraphTypeError(f"{name}: {what}", expected=expected, got=got, fix=fix, where=where)

    def __reduce__(self) -> str:
        return getattr(self, "__qualname__", "graph_cache")  # pickled as functions are

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the instance is the first argument, and all instances share the cache."""
        if instance is None:
            return self
        bound: Any = functools.partial(self, instance)
        bound.cache_info, bound.cache_clear = self.cache_info, self.cache_clear
        return bound


def _of_leaf(leaf: Any, place: int) -> Hashable:
    """A leaf's part of the key. ``place`` is the first place of the same object: one input."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return place, leaf.shape, leaf.dtype  # random keys
    if isinstance(leaf, np.generic):  # a graph holds its value
        return type(leaf), leaf.tobytes()
    return (place, Template.of(leaf)) if is_array(leaf) else typed(leaf)
