"""``bisect`` compares each fused operation of a program with its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Bisection


def bisect(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Bisection:
    """Find the fused operation that differs most from its reference, or produces the first NaN.

    Runs the program of ``jax.jit(fn)`` on the default device, step by step. At each graph of this
    package, including tangents and backwards, it runs the graph as the program does and, on the
    same operands, its reference in float32, or in float64 if it has float64 arrays (products at
    precision "highest"). It steps through loops (``scan``, ``while_loop``) and the taken branch of
    ``cond``, and enters jit, remat, custom derivatives and ``shard_map``.

    For each result ``f`` with reference ``r`` it reports the largest ``|f - r|``, the relative
    error ``|f - r| / |r|`` in the Euclidean norm, and both in units of the error that rounding
    explains: the rounding of the result's dtype and of the arithmetic (float64, float32, or TF32
    where a GPU may use it), and the change of the reference when its operands change by as much. A
    correct operation is between 0 and about 1; from 4 on it is suspect.

    Args:
        fn: a function of arrays, jitted or not, that contains graphs.
        *args, **kwargs: its arguments: arrays in any pytree; other values stay Python values.

    Returns:
        A :class:`Bisection` with ``worst``, ``first_nan`` and ``entries``; prints as a table, the
        most suspicious operation first, with next steps.

    Raises:
        GraphTypeError: ``fn`` is not a function or cannot be traced by ``jax.jit``, or ``bisect``
            is called inside a traced function or with shapes instead of arrays.
        GraphError: the program contains no graph that can be inspected.

    Limits: operations between graphs are compiled in parts, so XLA may fuse them differently than
    in the whole program; a graph inside something that is not entered (listed in ``notes``) runs
    without comparison; only results of a graph are compared; arrays must be on devices of this
    process. Without an NVIDIA GPU, XLA runs the reference as the fused operation, so only rounding
    differs.

    See also ``jax.config.update("jax_debug_nans", True)``, which raises a FloatingPointError with
    the name of the graph that returned a NaN (inside a loop or a compiled gradient it names only
    that), and ``jax.experimental.checkify`` with ``float_checks``, which finds the first NaN that
    a graph returns inside compiled programs. Neither looks inside a graph: a NaN that reaches no
    result, a division by zero without a NaN, and an index out of bounds stay unseen.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> block = jc.graph(lambda g, x, w: g.relu(g.matmul(x, w)))
        >>> loss = lambda x, w: block(x, w).sum()
        >>> report = jc.bisect(jax.grad(loss, (0, 1)), jnp.ones((1, 8, 8)), jnp.ones((1, 8, 8)))
        >>> report.first_nan is None, report.suspects
        (True, ())
    """
    from . import program  # and all that runs it: importing jax_cudnn does without

    return program.inspected(fn, args, kwargs)
