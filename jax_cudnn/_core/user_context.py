"""Values that users set with ``with``, as parts of JAX's cache keys; where a graph runs is one."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax

from .._core.errors import one_of

if TYPE_CHECKING:
    from .planning.deviceless.profiles import Profile

T = TypeVar("T")


class UserContext(Generic[T]):
    """A thread-local value, ``default`` outside any ``with``.

    JAX includes user contexts in its cache keys for tracing, lowering and compilation. A plain
    context manager is not included: the program of the first value would serve the second.
    """

    def __init__(self, default: T) -> None:
        self._context: Any = jax.make_user_context(default)

    @property
    def value(self) -> T:
        return self._context.value

    def entered(self, value: T) -> Any:
        """A context manager and decorator."""
        return _Entered(self._context, value)


class _Entered(contextlib.ContextDecorator):
    """Enters a new user context each time, so that one object can be used again and nested."""

    def __init__(self, context: Any, value: Any) -> None:
        self._context, self._value, self._inside = context, value, threading.local()

    def __repr__(self) -> str:
        return f"<jax_cudnn context: {getattr(self._value, 'name', self._value)}>"

    def __enter__(self) -> None:
        self._inside.contexts = [
            *getattr(self._inside, "contexts", ()),
            self._context(self._value),
        ]
        self._inside.contexts[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.contexts.pop().__exit__(*error)


TARGET: UserContext[Profile | None] = UserContext(None)
"""The GPU that :mod:`.context` plans for. That module loads on first use; this value exists from
the start: JAX retraces functions that it traced before a user context was created."""
WAYS: UserContext[tuple[tuple[Any, int], ...]] = UserContext(())
"""Canonical graphs with the number of the way that each runs: :func:`jax_cudnn.tune` tries them."""


AUTO, CUDNN, SPLIT, XLA = IMPLEMENTATIONS = ("auto", "cudnn", "split", "xla")

_implementation = UserContext(AUTO)


def implementation(name: str) -> Any:
    """Context manager and decorator: how graphs traced inside it run on an NVIDIA GPU.

    An explicit ``implementation=`` of a graph function or operation takes precedence. Like all
    JAX contexts it applies to the thread that entered it.

    Args:
        name: "auto" (the default): the fastest way to run the graph on this GPU, measured when it
            is first lowered, and remembered in the plan cache. Without the GPU, with
            ``deterministic`` or with ``jc.configure(tuning="off")`` it is "split". "split": cuDNN
            runs the parts for which it has engines and was not measured to be slower, XLA runs
            the rest of the same program. "cudnn": the whole graph
            is one cuDNN plan, or an UnsupportedGraphError says why not; its derivatives may take
            several plans with XLA between them, but every convolution and matmul in them runs on
            cuDNN. "xla": XLA compiles the graph's reference.

    Raises:
        GraphError: an unknown name.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> with jc.implementation("xla"):
        ...     y = relu(jnp.ones((8, 16)))
    """
    return _implementation.entered(checked(name))


def current() -> str:
    """The implementation set in this thread."""
    return _implementation.value


def checked(name: Any) -> str:
    """The name itself; GraphError for an unknown one."""
    return one_of("implementation", name, IMPLEMENTATIONS)
