"""``bisect``: each fused operation of a program beside its reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Bisection


def bisect(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Bisection:
    """Which fused operation of a program differs most from its reference, or makes the first NaN.

    Runs the program that ``jax.jit(fn)`` would run on the default device, one step after the
    other. At each of our graphs, its tangents and backwards included, it runs the graph as the
    program does and, on the same operands, its reference in float32 (products at precision
    "highest"). Loops (``scan``, ``while_loop``) go step by step, of ``cond`` the branch that is
    taken; jit, remat, custom derivatives and ``shard_map`` are entered, too.

    For each result ``f`` beside its reference ``r`` there is the largest ``|f - r|``, the relative
    ``|f - r| / |r|`` in the Euclidean norm, and both in units of what rounding explains: the
    rounding of the result's dtype and of the arithmetic (float32; TF32 where a GPU may use it), and
    how far the reference moves when its operands are moved by as much. A right operation is
    between 0 and about 1; from 4 on it is suspect.

    Args:
        fn: a function of arrays, jitted or not, that holds graphs.
        *args, **kwargs: its arguments: arrays in any pytree; everything else stays the Python
            value it is.

    Returns:
        A :class:`Bisection`: ``worst``, ``first_nan``, ``entries``; prints as a table, the most
        suspicious first, with what to do next.

    Raises:
        GraphTypeError: ``fn`` is no function or cannot be traced by ``jax.jit``, or ``bisect`` is
            called inside of a traced function or with shapes in place of arrays.
        GraphError: the program holds no graph of ours that can be looked into.

    What it does not see: the program's operations between graphs are compiled in parts, so that XLA
    may fuse them otherwise than in the whole; a graph inside of what is not entered (named in
    ``notes``) is run, but not compared; inside a graph nothing is looked at but its results; arrays
    must lie on devices of this process. Where no NVIDIA GPU runs the program the fused operation is
    XLA's run of the reference, and differs by rounding alone.

    See also ``jax.config.update("jax_debug_nans", True)``, which stops with a FloatingPointError
    that names the graph whose result has a NaN (inside of a loop or a compiled gradient it names
    these alone), and ``jax.experimental.checkify`` with ``float_checks``, which finds the first
    NaN in a result of a graph inside of compiled programs. Neither can look into a graph: a NaN
    that reaches no result, a division by zero that makes none and an index out of bounds inside
    stay unseen.

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
