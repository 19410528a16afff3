"""Who runs a graph: cuDNN in one plan, cuDNN and XLA together, or XLA alone."""

from __future__ import annotations

from typing import Any

from .errors import GraphError
from .user_context import UserContext

CUDNN, SPLIT, XLA = IMPLEMENTATIONS = ("cudnn", "split", "xla")

_implementation = UserContext(SPLIT)


def implementation(name: str) -> Any:
    """Context manager and decorator: who runs the graphs traced inside of it on an NVIDIA GPU.

    An ``implementation=`` that a graph function or an operation was given comes first. Like all
    contexts of JAX it holds in the thread that entered it.

    Args:
        name: "split" (the default): cuDNN runs what it has engines for and is not measured to
            lose at, XLA the rest, in one program. "cudnn": the whole graph is one cuDNN plan, or
            an UnsupportedGraphError says why it cannot be; its derivatives may be several, with
            XLA between them, but every convolution and matmul in them is cuDNN's. "xla": the
            graph's reference.

    Raises:
        GraphError: another name.

    Example:
        >>> import jax.numpy as jnp, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> with jc.implementation("xla"):
        ...     y = relu(jnp.ones((8, 16)))
    """
    return _implementation.entered(checked(name))


def current() -> str:
    """The implementation that holds in this thread."""
    return _implementation.value


def checked(name: Any) -> str:
    """The name itself; GraphError for an unknown one."""
    if name not in IMPLEMENTATIONS:
        raise GraphError(
            "unknown implementation",
            expected=", ".join(map(repr, IMPLEMENTATIONS)),
            got=repr(name)[:200],
        )
    return name
