"""Runs a function and records how each of its graphs compares with its reference."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.core

from .. import compat
from ..errors import GraphError, GraphTypeError, shown
from .compare import Comparison, judge, measure
from .interpret import Interpreter, holds_graph
from .interpret import Path as Way
from .places import Place
from .report import BOTH, FUSED, OPERANDS, REFERENCE, Bisection, Entry

_PACKAGE = str(Path(os.path.abspath(__file__)).parents[2]) + os.sep


def inspected(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Bisection:
    """What :func:`.bisect.bisect` returns, and raises."""
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
    observer = _Observer()
    interpreter = Interpreter(observer.see)
    with jax.debug_nans(False), jax.debug_infs(False), jax.disable_jit(False):
        interpreter.run(jaxpr, operands)
    if not observer.entries:
        raise GraphError(
            f"no graph of {name} could be inspected",
            got=", ".join(interpreter.unseen) or "branches and loops that run none of them",
            fix="call bisect with the inner function and its arguments"
            if interpreter.unseen
            else "pass arguments for which a graph runs",
        )
    return observer.report(name, tuple(interpreter.unseen))


class _Observer:
    """Compares each graph that it receives, and keeps the operands of those to be reported."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._device: Any = None
        self._measures: dict[Any, Callable[..., Any]] = {}
        self._worst = -1.0
        self._operands: dict[str, tuple[int, dict[str, Any]]] = {}

    def see(
        self, equation: Any, place: Place, path: Way, operands: list[Any], results: list[Any]
    ) -> None:
        spec, name = equation.params["spec"], equation.params["name"]
        if self._device is None:
            self._device = min(results[0].devices(), key=lambda device: device.id)
        on_gpu = compat.is_cuda(self._device)
        avals = [v.aval for v in (*equation.outvars, *equation.invars)]
        key = spec, place, place.kinds(avals)
        if key not in self._measures:
            self._measures[key] = place.measured(measure(spec, on_gpu), avals)
        figures = self._measures[key](*results, *operands)
        found = judge(spec, figures, on_gpu)
        entry = Entry(
            name,
            spec.origin.role,
            "/".join(path),
            _line(equation),
            found.outputs,
            _nonfinite(found),
            spec,
        )
        kept = len(self.entries), dict(zip(spec.inputs, operands, strict=True))
        if entry.times_rounding > self._worst:
            self._worst, self._operands["worst"] = entry.times_rounding, kept
        if entry.nonfinite in (FUSED, BOTH):
            self._operands.setdefault("first_nan", kept)
        self.entries.append(entry)

    def report(self, name: str, notes: tuple[str, ...]) -> Bisection:
        entries = list(self.entries)
        for position, operands in self._operands.values():
            entries[position] = replace(entries[position], operands=operands)
        kind = self._device.device_kind
        return Bisection(name, kind, compat.is_cuda(self._device), tuple(entries), notes)


def _nonfinite(found: Comparison) -> str:
    nan = any(output.nan for output in found.outputs)
    if not nan and not any(output.inf for output in found.outputs):
        return REFERENCE if found.lost and not (found.given_nan or found.given_inf) else ""
    if found.given_nan or (found.given_inf and not nan):
        return OPERANDS
    return FUSED if found.new else BOTH


def _traced(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str
) -> tuple[Any, list[Any]]:
    """The program's jaxpr, without constants and dead code, and the operands it takes."""
    leaves, structure = jax.tree.flatten((args, dict(kwargs)))
    positions = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = [leaves[i] for i in positions]
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in arrays):
        raise GraphTypeError(
            "bisect runs the function",
            expected="arrays",
            got="jax.ShapeDtypeStruct",
            fix="pass arrays, for example jax.random.normal(key, shape, dtype)",
        )

    def of_arrays(*given: Any) -> list[Any]:
        filled = list(leaves)
        for i, array in zip(positions, given, strict=True):
            filled[i] = array
        positional, keywords = jax.tree.unflatten(structure, filled)
        return [x for x in jax.tree.leaves(fn(*positional, **keywords)) if _is_array(x)]

    try:
        closed = jax.make_jaxpr(of_arrays)(*arrays)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        raise GraphTypeError(
            f"{name} cannot be traced",
            expected="a function that jax.jit can compile for these arguments",
            got=f"{type(error).__name__}: {str(error).splitlines()[0]}"[:400],
            why="bisect runs the program of jax.jit step by step",
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
            why="it runs the program step by step",
            fix="call it outside jit, grad, vmap and scan, with the function that contains these",
        )
    return jaxpr, operands


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _line(equation: Any) -> str:
    """``file:line, in function: text`` of the user's innermost frame."""
    for file, number, function in compat.user_frames(equation):
        if not os.path.abspath(file).startswith(_PACKAGE):
            text = linecache.getline(file, number).strip()
            place = f"{file}:{number}, in {function}"
            return f"{place}: {text}" if text else place
    return ""
