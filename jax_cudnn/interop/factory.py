"""graph_cache: call a function that builds a graph once for each kind of arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.leaves import typed
from .._core.graph.source import defined_at
from .tensors import Template, is_array
from .wrapper import Graph


class CacheInfo(NamedTuple):
    """Statistics of a cache, as of ``functools.lru_cache``."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


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
            got=f"{type(fn).__name__}: {fn!r}"[:200],
            fix="@graph_cache, or @graph_cache(maxsize=..., key_fn=...)",
        )
    if isinstance(maxsize, bool) or not isinstance(maxsize, int) or maxsize < 1:
        raise GraphError("invalid maxsize", expected="an integer of at least 1", got=repr(maxsize))
    return _Factory(fn, maxsize, key_fn)


class _Entry:
    """A graph that is built, or that a thread is building."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.graph: Any = None
        self.failed = False


class _Factory:
    """The decorated function."""

    def __init__(
        self, fn: Callable[..., Any], maxsize: int, key_fn: Callable[..., Hashable] | None
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._maxsize, self._key_fn = fn, maxsize, key_fn
        self._parameters = _parameters(fn)
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._hits = self._misses = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = self._key(args, kwargs)
        while True:
            entry = self._asked_for(key)
            with entry.lock:
                if entry.failed:  # in the thread that this one waited for
                    continue
                if entry.graph is None:
                    try:
                        entry.graph = _for_all_numbers(self._fn(*args, **kwargs))
                    except BaseException:
                        entry.failed = True
                        self._forget(key, entry)
                        raise
                return entry.graph

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        if self._key_fn is not None:
            return self._key_fn(*args, **kwargs)
        if self._parameters is not None:
            with contextlib.suppress(TypeError):  # the function will raise it
                bound = self._parameters.bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
        try:
            return _kind(args, kwargs)
        except ValueError as error:  # JAX sorts the keys of dictionaries
            raise GraphTypeError(
                f"{self._title}: an argument is not a pytree",
                expected="dictionaries whose keys can be sorted",
                got=str(error).splitlines()[0],
                fix="pass key_fn to graph_cache",
                where=defined_at(self._fn),
            ) from error

    def _asked_for(self, key: Hashable) -> _Entry:
        try:
            return self._entry(key)
        except TypeError as error:
            own = self._key_fn is None
            raise GraphTypeError(
                f"{self._title}: {'an argument' if own else 'a key of key_fn'} is not hashable",
                expected="arrays, or hashable values such as numbers, strings and tuples"
                if own
                else "a hashable value, for example a tuple",
                got=str(error),
                fix="pass key_fn to graph_cache" if own else None,
                where=defined_at(self._fn),
            ) from None

    @property
    def _title(self) -> str:
        return getattr(self, "__name__", "the factory")

    def __reduce__(self) -> str:
        return getattr(self, "__qualname__", "graph_cache")  # pickled as functions are

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the instance is the first argument, and all instances share the cache."""
        if instance is None:
            return self
        bound: Any = functools.partial(self, instance)
        bound.cache_info, bound.cache_clear = self.cache_info, self.cache_clear
        return bound

    def cache_info(self) -> CacheInfo:
        """Hits, misses, and the number of graphs."""
        with self._lock:
            return CacheInfo(self._hits, self._misses, self._maxsize, len(self._entries))

    def cache_clear(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self._entries.clear()
            self._hits = self._misses = 0

    def _entry(self, key: Hashable) -> _Entry:
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._hits += 1
                self._entries.move_to_end(key)
                return found
            self._misses += 1
            while len(self._entries) >= self._maxsize:
                self._entries.popitem(last=False)
            made = self._entries[key] = _Entry()
            return made

    def _forget(self, key: Hashable, entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                del self._entries[key]


def _for_all_numbers(made: Any) -> Any:
    """The function's result, whose graphs forget the values of scalars in host memory: they serve
    all arrays of their kind."""
    for leaf in jax.tree.leaves(made):
        if isinstance(leaf, Graph) and leaf._recorder is not None:
            for tensor in leaf._recorder.handles.values():
                tensor.number = None
    return made


def _parameters(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # for a few built-in functions
        return None


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """The key of arguments that share a graph."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
    first: dict[int, int] = {}
    kinds = (_of_leaf(leaf, first.setdefault(id(leaf), i)) for i, leaf in enumerate(leaves))
    return structure, tuple(kinds)


def _of_leaf(leaf: Any, place: int) -> Hashable:
    """A leaf's part of the key. ``place`` is the first place of the same object: one input."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return place, leaf.shape, leaf.dtype  # random keys
    if isinstance(leaf, np.generic):  # a graph holds its value
        return type(leaf), leaf.tobytes()
    return (place, Template.of(leaf)) if is_array(leaf) else typed(leaf)
