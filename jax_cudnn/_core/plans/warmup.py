"""``warmup``: plans a whole program ahead of time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

from .. import compat, context
from ..errors import GraphTypeError, shown
from ..planning import progress
from .collect import advised, in_jaxpr, is_sharded
from .support import plans


def warmup(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Plan every graph of a program ahead of its first call, also for other processes.

    The program is traced and lowered, but not compiled or run; its plans stay in memory and in
    the plan cache. Graphs inside a sharded program are planned for the shapes of one device; where
    arrays are sharded, XLA compiles it for their mesh to find these.

    Args:
        fn: a function of arrays, jitted or not (static arguments and shardings are kept).
        *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` for shapes alone.

    Returns:
        The lowered program, whose ``.compile()`` continues on a machine with that GPU. It is
        lowered for the GPU of ``jax_cudnn.target`` if set, else for the devices of ``fn``. Without
        a GPU and a target nothing is planned, with a warning.

    Raises:
        JaxCudnnError: planning failed; tracing and lowering raise their own errors.

    Example:
        >>> import jax, jax_cudnn as jc
        >>> relu = jc.graph(lambda g, x: g.relu(x))
        >>> with jc.target("H200"):                                           # doctest: +SKIP
        ...     lowered = jc.warmup(relu, jax.ShapeDtypeStruct((64, 128), "bfloat16"))
    """
    if not callable(fn):
        raise GraphTypeError(
            "warmup takes a function",
            expected="a function of arrays, or a jitted one",
            got=shown(fn),
        )
    jitted: Any = fn if hasattr(fn, "trace") and hasattr(fn, "lower") else jax.jit(fn)
    with advised(args):
        traced = jitted.trace(*args, **kwargs)
    graphs = {*in_jaxpr(traced.jaxpr.jaxpr)}
    nothing = not context.targeted() and not any(map(compat.is_cuda, jax.local_devices()))
    if graphs and nothing:
        warnings.warn(
            "jax_cudnn.warmup plans nothing: there is no GPU. Name one: with "
            'jax_cudnn.target("H200"): ...',
            stacklevel=2,
        )
    elif graphs and is_sharded(traced.jaxpr.jaxpr, args):  # XLA says what a device computes
        plans(fn, *args, **kwargs)
    with progress.counted(len(graphs)):
        return traced.lower(lowering_platforms=("cuda",)) if context.targeted() else traced.lower()
