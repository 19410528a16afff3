"""graph_cache: a function that builds a graph, called once for each kind of arguments."""

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
from .declaring import Declaring
from .templates import Template, is_array


class CacheInfo(NamedTuple):
    """What a cache was asked for; as ``functools.lru_cache`` has it."""

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
    """Decorate a function that builds a graph: equal kinds of arguments give the same graph.

    Of arrays, in any pytree, shape, dtype and memory order are the kind, and which of them are the
    same array; of all else, NumPy's scalars too, the value and its type. Defaults count as given,
    and it is one whether an argument is given by position or by name. The graph that was asked for
    longest ago goes when there are more than ``maxsize``. Threads that ask for the same one wait
    for the first of them to build it. No array is kept alive; the instance of a method is, as
    other arguments that are no arrays are.

    Args:
        fn: the function; left out in ``@graph_cache(maxsize=...)``.
        maxsize: how many graphs are kept.
        key_fn: what makes the key of the arguments instead; by keyword, unlike in
            ``cudnn.graph_cache``.

    Returns: the function, with ``cache_info()`` and ``cache_clear()``.

    Raises: GraphTypeError for an argument that is neither an array nor hashable.

    Source: "Using wrapper in larger codebases" in NVIDIA's cudnn-frontend, where it is built by
    hand, and its ``cudnn.graph_cache``.

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
        raise GraphError(
            "maxsize is not valid", expected="an integer of at least 1", got=repr(maxsize)
        )
    return _Factory(fn, maxsize, key_fn)


class _Entry:
    """A graph that is there, or that a thread is building."""

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
                if entry.failed:  # in the thread that this one waited for: it is forgotten
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
            with contextlib.suppress(TypeError):  # which the function raises, too
                bound = self._parameters.bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
        try:
            return _kind(args, kwargs)
        except ValueError as error:  # JAX sorts the keys of dictionaries
            raise GraphTypeError(
                f"{self._title}: an argument is no pytree",
                expected="dictionaries whose keys can be sorted",
                got=str(error).splitlines()[0],
                fix="give graph_cache a key_fn",
                where=defined_at(self._fn),
            ) from error

    def _asked_for(self, key: Hashable) -> _Entry:
        try:
            return self._entry(key)
        except TypeError as error:
            own = self._key_fn is None
            raise GraphTypeError(
                f"{self._title}: {'an argument' if own else 'what key_fn returns'} is not hashable",
                expected="arrays, and Python values such as numbers, strings and tuples"
                if own
                else "a hashable value, a tuple for example",
                got=str(error),
                fix="give graph_cache a key_fn" if own else None,
                where=defined_at(self._fn),
            ) from None

    @property
    def _title(self) -> str:
        return getattr(self, "__name__", "the factory")

    def __reduce__(self) -> str:
        return getattr(self, "__qualname__", "graph_cache")  # pickled as functions are

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: its instance is the first argument; the cache is that of the class."""
        if instance is None:
            return self
        bound: Any = functools.partial(self, instance)
        bound.cache_info, bound.cache_clear = self.cache_info, self.cache_clear
        return bound

    def cache_info(self) -> CacheInfo:
        """Hits, misses, and how many graphs are kept."""
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
    """What a function made, with graphs that stand for all arrays of their kind, also where these
    are numbers in the host's memory."""
    for leaf in jax.tree.leaves(made):
        if isinstance(leaf, Declaring):
            leaf._forget_numbers()
    return made


def _parameters(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # of a few built-in functions
        return None


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """What tells apart arguments for which other graphs are built."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
    first: dict[int, int] = {}
    kinds = (_of_leaf(leaf, first.setdefault(id(leaf), i)) for i, leaf in enumerate(leaves))
    return structure, tuple(kinds)


def _of_leaf(leaf: Any, place: int) -> Hashable:
    """A leaf's kind. ``place`` is where the same object was first: the same array is one input."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return place, leaf.shape, leaf.dtype  # keys of random numbers
    if isinstance(leaf, np.generic):  # a graph has it as a number
        return type(leaf), leaf.tobytes()
    return (place, Template.of(leaf)) if is_array(leaf) else typed(leaf)
