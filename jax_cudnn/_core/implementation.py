"""Where a graph runs: on cuDNN in one plan, split between cuDNN and XLA, or in XLA alone."""

from __future__ import annotations

from typing import Any

from .errors import GraphError, nearest, shown
from .user_context import UserContext

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
    if name not in IMPLEMENTATIONS:
        raise GraphError(
            "unknown implementation",
            expected=", ".join(map(repr, IMPLEMENTATIONS)),
            got=shown(name),
            fix=nearest(name, IMPLEMENTATIONS),
        )
    return name
