"""``bisect`` compares each fused operation of a program with its reference.

The program's jaxpr is traced anew (:mod:`.rewrite`) with a comparison after each graph, whose
figures a callback brings to the host while the compiled program runs.
"""

from __future__ import annotations

import linecache
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.core
import numpy as np

from .. import compat
from ..errors import GraphError, GraphTypeError, shown
from ..graph.source import users_place
from ..plans.collect import is_array, of_arrays
from .compare import judge
from .report import BOTH, FUSED, Bisection, Entry
from .rewrite import Place, Rewriter, holds_graph


def bisect(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Bisection:
    """Find the fused operation that differs most from its reference, or produces the first NaN.

    Runs the program of ``jax.jit(fn)`` with a comparison after each graph of this package,
    including tangents and backwards: on the graph's operands it evaluates the reference in float32,
    or in float64 if the graph has float64 arrays (products at precision "highest"). It follows
    loops (``scan``, ``while_loop``), the taken branch of ``cond``, jit, remat, custom derivatives
    and ``shard_map``.

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

    Limits: XLA fuses no operation of a graph with those around it, as it may in the program itself;
    the operands of each graph are copied to the host, which takes time, and for which JAX needs a
    CPU device, too (``JAX_PLATFORMS=cuda,cpu``, or unset); a graph inside something that is not
    followed (listed in ``notes``) runs without comparison; only results of a graph are compared;
    arrays must be on devices of this process. Without an NVIDIA GPU, XLA runs the reference as the
    fused operation, so only rounding differs.

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
    name = getattr(fn, "__name__", type(fn).__name__)
    if not callable(fn):
        raise GraphTypeError(
            "bisect takes a function",
            expected="a function of arrays, or a jitted one",
            got=shown(fn),
        )
    jaxpr, operands = _traced(fn, args, kwargs, name)
    if not any(map(holds_graph, jaxpr.eqns)):
        raise GraphError(
            f"{name} contains no cuDNN graph",
            expected="a function that calls jax_cudnn.ops or functions decorated with "
            "@jax_cudnn.graph",
            got="a program of XLA's own operations",
            why="operations that no result needs are removed, as in jit",
        )
    record = _Record()
    rewriter = Rewriter(record.see)
    compared = jax.jit(lambda *arrays: [*rewriter.run(jaxpr, arrays), np.int8(0)])
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
        results = jax.block_until_ready(compared(*operands))
        jax.effects_barrier()
    entries = record.entries()
    if not entries:
        raise GraphError(
            f"no graph of {name} could be inspected",
            got=", ".join(rewriter.unseen) or "branches and loops that run none of them",
            fix="call bisect with the inner function and its arguments"
            if rewriter.unseen
            else "pass arguments for which a graph runs",
        )
    device = min(results[-1].devices(), key=lambda device: device.id)
    on_gpu = compat.is_cuda(device)
    return Bisection(name, device.device_kind, on_gpu, entries, tuple(rewriter.unseen))


Run = tuple[int, ...]


class _Record:
    """What callbacks bring: compares each run of a graph once all its devices have called, and
    keeps the operands of those to be reported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[Run, tuple[Any, Place, dict[int, Any]]] = {}
        self._entries: dict[Run, Entry] = {}
        self._kept: dict[str, tuple[tuple[float, Run], list[Any]]] = {}
        """For ``worst`` and ``first_nan``: the rank of the run, and its operands on each device."""

    def see(
        self, equation: Any, place: Place, run: Any, device: Any, figures: Any, operands: Any
    ) -> None:
        """Called by the program. ``run`` sorts all runs in program order.

        It does not wait for ``operands``: on a CPU, the thread that copies them may be in another
        callback. Scalars are there at once.
        """
        run, figures = tuple(map(int, run)), jax.device_get(figures)
        with self._lock:
            *_, devices = self._arrived.setdefault(run, (equation, place, {}))
            devices[int(device)] = figures, operands
            if len(devices) == place.devices:
                self._compare(run)

    def entries(self) -> tuple[Entry, ...]:
        """All runs in program order."""
        for run in [*self._arrived]:  # in branches that only some devices take
            self._compare(run)
        for what, ((_, run), shards) in self._kept.items():
            entry = self._entries[run]
            if what == "worst" or entry.nonfinite in (FUSED, BOTH):
                arrays = [np.stack(x) if isinstance(x, tuple) else np.asarray(x) for x in shards]
                operands = dict(zip(entry.spec.inputs, arrays, strict=True))
                self._entries[run] = replace(entry, operands=operands)
        return tuple(self._entries[run] for run in sorted(self._entries))

    def _compare(self, run: Run) -> None:
        equation, place, devices = self._arrived.pop(run)
        spec, name = equation.params["spec"], equation.params["name"]
        figures, operands = zip(*(devices[i] for i in sorted(devices)), strict=True)
        shards = [*zip(*operands, strict=True)] if place.axes else operands[0]
        outputs, nonfinite = judge(spec, figures)
        line, path = _line(equation), place.path(run)
        self._entries[run] = Entry(name, spec.origin.role, path, line, outputs, nonfinite, spec)
        ranks = {
            "worst": -self._entries[run].times_rounding,
            "first_nan": nonfinite not in (FUSED, BOTH),
        }
        for what, rank in ranks.items():
            if what not in self._kept or (rank, run) < self._kept[what][0]:
                self._kept[what] = (rank, run), shards


def _traced(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
) -> tuple[Any, list[Any]]:
    """The program's jaxpr, without constants and dead code, and the operands it takes."""
    run, arrays, *_ = of_arrays(fn, args, kwargs)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays):
        raise GraphTypeError(
            "bisect runs the function",
            expected="arrays",
            got="jax.ShapeDtypeStruct",
            fix="pass arrays, for example jax.random.normal(key, shape, dtype)",
        )

    results = lambda *given: [*filter(is_array, jax.tree.leaves(run(*given)))]  # noqa: E731
    try:
        closed = jax.make_jaxpr(results)(*arrays)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise GraphTypeError(
            f"{name} cannot be traced",
            expected="a function that jax.jit can compile for these arguments",
            got=f"{type(error).__name__}: {str(error).splitlines()[0]}"[:400],
            why="bisect runs the program of jax.jit",
            fix="call bisect with the jitted part of it, or pass the values on which it branches "
            "as Python values",
        ) from error
    jaxpr, consts = compat.live_program(closed)
    operands = [*consts, *arrays]
    if any(isinstance(x, jax.core.Tracer) for x in operands):
        raise GraphTypeError(
            "bisect was called inside a traced function",
            expected="arrays with values",
            got="tracers",
            why="it runs the program, and reports on its values",
            fix="call it outside jit, grad, vmap and scan, with the function that contains these",
        )
    return jaxpr, operands


def _line(equation: Any) -> str:
    """``file:line, in function: text`` of the user's innermost frame."""
    for frame in compat.user_frames(equation):
        if place := users_place([frame]):
            text = linecache.getline(frame[0], frame[1]).strip()
            return f"{place}, in {frame[2]}" + (f": {text}" if text else "")
    return ""
