"""``accelerate``: one line for any JAX function."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from .._core import compat, context
from .._core.errors import GraphTypeError, nearest, shown
from .._core.graph.source import users_place
from .._core.planning import placement
from .._core.planning.deviceless.profiles import Profile
from .._core.plans.collect import is_array, of_arrays
from .._core.primitive import in_jaxpr
from .._core.text import aligned
from . import attention, epilogues, loss, norms, region
from .program import Missed, Program
from .region import FAILED, NO_BACKWARD, Site, log
from .values import Equation

KINDS = ("attention", "product", "convolution", "normalization", "loss")
_CALL = "jax.grad(jc.accelerate(loss))"
_FIX = f"put accelerate around the function that is differentiated, {_CALL}"
_MOST = 256  # shapes for which a function's regions are kept
_ARRAY = object()  # in the place of an array among results
_PLAIN = str, bytes, bool, int, float, complex, np.generic  # results without arrays of the trace


def accelerate(
    fn: Callable[..., Any] | None = None,
    *,
    only: str | Iterable[str] | None = None,
    without: str | Iterable[str] = (),
    numerics: str = "fused",
) -> Any:
    """A function in which cuDNN's graphs replace what it computes with JAX's own operations.

    The function is traced. What cuDNN can run is found in its equations, however it is written, and
    replaced where :func:`jax_cudnn.implementation` "auto" finds cuDNN faster on the GPU that it is
    traced for: :func:`jax_cudnn.target`, else JAX's default device. All other equations stay as
    they are; on a CPU all do. Found is:

    - "attention": two products around a softmax, with scale, biases, causal, banded and other
      masks, lengths of keys, functions of the scores, grouped queries, in any order of axes.
    - "product", "convolution": with scale, bias, residual and activation after it, if there is
      one, and convolutions of volumes alone; an activation is recognised by its values.
    - "normalization": layer and RMS norms over the last dimensions, with their parameters.
    - "loss": the cross-entropy of a linear layer with more than 2**27 logits, which nothing else
      reads; :func:`jax_cudnn.ops.linear_cross_entropy` takes its place, in XLA.

    It may stand under or around ``jit``, ``grad``, ``vmap``, ``scan``, ``checkpoint`` and
    ``shard_map``. Put it around the function that is differentiated, ``jax.grad(jc.accelerate(
    loss))``, so that forward and backward are replaced together. In one that differentiates itself,
    as a training step, attention is found with its derivative; the report says what else would be.

    Args:
        fn: any function of arrays in pytrees, with results in pytrees. Other arguments are passed
            as they are. A callable pytree, as an Equinox module, stays one:
            ``eqx.filter_jit(jc.accelerate(model))``.
        only: the kind or kinds to look for; all by default.
        without: the kind or kinds to leave as they are.
        numerics: "fused": intermediate values are float32, and are rounded once, at the end.
            "strict": what rounds values to 16 bits inside is left as it is.

    Returns: the function. Its ``report(*args)`` says what is found, where, and what became of it.

    Scores of -1e4 and less count as hidden. Where all keys of a query are hidden by -inf, the
    original is NaN and cuDNN's result is not; with ``softmax(where=...)`` both are 0.

    Raises:
        GraphTypeError: ``fn`` is not a function, or a Flax NNX module, or a kind is unknown.

    Example:
        >>> import jax, jax.numpy as jnp, jax_cudnn as jc
        >>> def attend(q, k, v):
        ...     scores = jnp.einsum("bthd,bshd->bhts", q, k) / 8
        ...     return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        >>> fast = jc.accelerate(attend)
        >>> x = jax.ShapeDtypeStruct((2, 128, 8, 64), "bfloat16")
        >>> [region["kind"] for region in fast.report(x, x, x).to_json()["regions"]]
        ['attention']
    """
    if fn is None:
        return functools.partial(accelerate, only=only, without=without, numerics=numerics)
    if not callable(fn):
        raise GraphTypeError(
            "accelerate got no function",
            expected="a function of arrays",
            got=shown(fn),
            fix="jc.accelerate(fn), or above a function: @jc.accelerate, "
            "@jc.accelerate(only='attention')",
        )
    for owner in (fn, getattr(fn, "__self__", None)):
        if any(cls.__module__.startswith("flax.nnx") for cls in type(owner).__mro__):
            raise GraphTypeError(
                "accelerate got a Flax NNX module",
                expected="a function of arrays",
                got=type(owner).__name__,
                why="a module changes its own state, which a traced function may not",
                fix="graph, state = nnx.split(model), and accelerate "
                "lambda state, x: nnx.merge(graph, state)(x); or jax_cudnn.flax.accelerate(model)",
            )
    if numerics not in ("fused", "strict"):
        raise GraphTypeError(
            "accelerate got unknown numerics",
            expected="'fused' or 'strict'",
            got=shown(numerics),
            fix="'fused' rounds once, at the end; 'strict' as your operations do",
        )
    requested = KINDS if only is None else _listed(only)
    left = () if without is None else _listed(without)
    named = [*(("only", kind) for kind in requested), *(("without", kind) for kind in left)]
    for name, kind in named:
        if kind not in KINDS:
            raise GraphTypeError(
                f"{name} of accelerate got an unknown kind",
                expected=f"of {', '.join(map(repr, KINDS))}, one or several",
                got=shown(kind),
                fix=nearest(kind, KINDS, f"leave {name} out to look for all"),
            )
    kinds = tuple(kind for kind in KINDS if kind in requested and kind not in left)
    return Accelerated(fn, kinds, numerics == "strict")


def _listed(kinds: Any) -> tuple[Any, ...]:
    one = isinstance(kinds, (str, bytes)) or not isinstance(kinds, Iterable)
    return (kinds,) if one else tuple(kinds)


class Accelerated:
    """What :func:`accelerate` returns: the function, and ``report``."""

    def __init__(self, fn: Callable[..., Any], kinds: tuple[str, ...], strict: bool) -> None:
        self._fn, self._kinds, self._strict = fn, kinds, strict
        self._known: dict[Any, Any] = {}
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if isinstance(value := getattr(fn, name, None), str):
                setattr(self, name, value)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_modules(args, kwargs)
        where = region.site()
        if where is not None:
            found, arrays, is_new = self._found(args, kwargs, where)
            if found.program.holds_regions or is_new:  # so that it is not traced twice
                results = iter(found.program.run(*found.consts, *arrays))
                leaves = (next(results) if x is _ARRAY else x for x in found.results)
                return jax.tree.unflatten(found.tree, leaves)
        return self._fn(*args, **kwargs)

    def report(self, *args: Any, gpu: str | Profile | None = None, **kwargs: Any) -> Found:
        """What is found in the function for these arguments, and what becomes of it on a GPU.

        Args:
            *args, **kwargs: as for the function; ``jax.ShapeDtypeStruct`` instead of arrays.
            gpu: the GPU to decide for, as in :func:`jax_cudnn.target`; by default the target, or
                JAX's default device. Without one nothing is decided.

        Raises: what tracing the function raises; TargetError: there is no such GPU.
        """
        if "gpus" in kwargs:
            raise GraphTypeError(
                "a report is of one GPU", expected='gpu="H200"', got=f"gpus={shown(kwargs['gpus'])}"
            )
        with context.target(gpu) if gpu is not None else contextlib.nullcontext():
            where = region.site()
            found, *_ = self._found(args, kwargs, where)
            name = "" if where is None else placement.model(where)[0]
        title = getattr(self, "__name__", type(self._fn).__name__)
        return _reported(title, name, found, where is not None)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        method: Any = functools.partial(self, owner)
        method.report = functools.partial(self.report, owner)
        return method

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}  # what was traced is of this process

    def __repr__(self) -> str:
        return f"<accelerated {getattr(self, '__name__', self._fn)}>"

    def _found(self, args: Any, kwargs: Any, where: Site | None) -> tuple[_Found, list[Any], bool]:
        """What is found in a call, decided for a GPU; the arrays of the call; and whether the
        function was traced for it, and its program is that trace."""
        # A function that is a pytree has arrays of its own.
        called = functools.wraps(self._fn, updated=())(
            lambda fn, /, *args, **kwargs: fn(*args, **kwargs)
        )
        call = of_arrays(called, (self._fn, *args), kwargs)
        rest = tuple((i, _said(x)) for i, x in call.rest.items())
        avals = tuple(map(compat.aval_of, call.arrays))
        key = call.structure, avals, rest, where, compat.trace_context()
        try:
            found = self._known.get(key)
        except TypeError:  # an argument is not hashable
            key = found = None
        is_new = False
        if found is None:
            closed, results, tree = _traced(call.run, avals)
            sizes = (n for aval in avals for n in getattr(aval, "shape", ()))
            fixed = all(isinstance(n, int) for n in sizes)  # else known in a run alone
            fits = fixed and all(x is _ARRAY or isinstance(x, _PLAIN) for x in results)
            program, missed = search(closed, self._kinds if fits else (), self._strict)
            is_new = fits and program.jaxpr is closed.jaxpr
            if where is not None:
                region.decide((r for p in program.programs for r in p.found), where)
                for inner in program.programs:
                    inner.regions = [r for r in inner.found if not r.outcome]
            found = _Found(program, missed, closed.consts, results, tree)
            if len(self._known) >= _MOST:
                self._known.clear()
            if key is not None and not closed.consts:  # which the function may read anew
                self._known[key] = found
        return found, call.arrays, is_new


class _Found(NamedTuple):
    program: Program
    missed: Missed
    consts: list[Any]
    results: list[Any]  # leaves: ``_ARRAY``, or what is no array
    tree: Any


def _refuse_modules(args: Any, kwargs: Any) -> None:
    """Raises GraphTypeError for a Flax NNX module among arguments."""
    nnx = sys.modules.get("flax.nnx")
    is_module = lambda x: nnx is not None and isinstance(x, nnx.Pytree)  # noqa: E731
    for module in filter(is_module, jax.tree.leaves((args, kwargs), is_leaf=is_module)):
        raise GraphTypeError(
            "a function in accelerate got a Flax NNX module",
            expected="arrays in pytrees, as the nnx.State of a module",
            got=type(module).__name__,
            why="a module changes its own state, as batch norm and an optimizer do, which a traced "
            "function may not",
            fix="graph, state = nnx.split(module), pass state, and return nnx.state(module) with "
            "the results; or jax_cudnn.flax.accelerate(model)",
        )


def _flatten(fast: Accelerated) -> Any:
    """A callable pytree stays one, any other function is a part of the structure."""
    if jax.tree_util.all_leaves([fast._fn]):
        return (), (fast._fn, fast._kinds, fast._strict)
    return (fast._fn,), (None, fast._kinds, fast._strict)


jax.tree_util.register_pytree_node(
    Accelerated, _flatten, lambda aux, fns: Accelerated(fns[0] if fns else aux[0], *aux[1:])
)


def _traced(run: Callable[..., Any], avals: Any) -> Any:
    """The jaxpr of a function of arrays, the leaves of its results, and their structure."""
    reported: list[Any] = []

    @functools.wraps(run, updated=())  # errors of JAX name it, and its line
    def flat(*arrays: Any) -> Any:
        results, tree = jax.tree.flatten(run(*arrays))
        reported[:] = [_ARRAY if is_array(x) else x for x in results], tree
        return [*filter(is_array, results)]

    closed = jax.make_jaxpr(flat)(*avals)
    return closed, *reported


def search(closed: Any, kinds: Collection[str], strict: bool = False) -> tuple[Program, Missed]:
    """The program of a jaxpr with the regions in it, and what is nearly one; with ``strict``
    without those that keep values inside in 16 bits."""
    missed: Missed = []
    try:
        program = Program(closed.jaxpr, closed.consts, ())
    except Exception as error:
        log.warning(FAILED, "read the function's jaxpr", exc_info=error)
        program = Program(closed.jaxpr.replace(eqns=[], outvars=[]), closed.consts, ())
    for inner in program.programs:
        taken: set[Equation] = set()
        for module in (loss, attention, epilogues, norms):
            try:
                for found in module.find(inner, kinds, taken, missed):
                    taken |= found.replaced
                    differentiated = inner.differentiated or found.is_differentiated
                    if differentiated and module is not attention:
                        why = f"this {found.kind} is differentiated inside of the function, which"
                        missed.append((found.first, f"{why} reads values in it: {_FIX}"))
                    elif not (strict and found.rounds):
                        inner.add(found)
            except Exception as error:  # the function then runs as it was
                log.warning(FAILED, f"look at {module.__name__}", exc_info=error)
    return program, missed


def _said(leaf: Any) -> Any:
    """What distinguishes an argument that is not an array: 1 from True, and 0.0 from -0.0."""
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf


# -- the report ------------------------------------------------------------------------------------

_FIELDS = ("kind", "what", "at", "runs_on", "gain", "why")
_ALONE = {"products": "dot_general", "convolutions": "conv_general_dilated"}
_HEADER = ("kind", "what", "at", "times", "runs on", "gain", "why")


@dataclass(frozen=True)
class Found:
    """The regions of a function, and what is nearly one; prints as a table. ``data``: as
    :meth:`to_json` gives it."""

    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """``{"function", "gpu", "regions": [{"kind", "what", "at": "file:line", "times", "runs_on":
        "cuDNN", "XLA in blocks", "XLA" or "", "gain", "why"}], "missed": [{"at", "times", "why"}],
        "alone": {"products", "convolutions"}, "graphs"}``; a new dictionary each time.

        ``times``: how often a run computes it; ``gain``: XLA's time over cuDNN's, measured or
        predicted, of the forward; ``alone``: how many products and convolutions are in no region;
        ``graphs``: how many graphs of ours the function has itself."""
        return json.loads(json.dumps(self.data))

    def __str__(self) -> str:
        regions = self.data["regions"]
        rows = [tuple(str(r[name.replace(" ", "_")]) for name in _HEADER) for r in regions]
        on = Counter(r["runs_on"] for r in regions if r["runs_on"])
        where = f" for {self.data['gpu']}" if self.data["gpu"] else ""
        counts = ", ".join(f"{n} on {who}" for who, n in on.items())
        lines = [f"{self.data['function']}{where}: {len(regions)} found{': ' * bool(on)}{counts}"]
        lines += aligned([_HEADER, *rows], len(_HEADER)) if rows else []
        lines += [f"nearly, at {m['at']}: {m['why']}" for m in self.data["missed"]]
        if any(r["what"].startswith("float32 q") and r["runs_on"] != "XLA" for r in regions):
            lines.append(f"where it is differentiated, XLA runs it: {NO_BACKWARD}")
        if count := self.data["graphs"]:
            lines.append(f"written with jax_cudnn already: {count} graph{'s' * (count > 1)}")
        left = [(n, what) for what, n in self.data["alone"].items() if n]
        if alone := [f"{n} {what if n > 1 else what[:-1]}" for n, what in left]:
            lines.append(f"alone, as XLA runs them: {' and '.join(alone)}")
        return "\n".join(lines)

    __repr__ = __str__


def _reported(name: str, gpu: str, found: _Found, decided: bool) -> Found:
    """The report of a function; equal regions of one line share a row."""
    rows, nearly = Counter[tuple[str, ...]](), Counter[tuple[str, str]]()
    times: dict[Equation, int] = {}
    inside = set[Equation]()
    for item, often in _repeated(found.program, 1):
        if isinstance(item, Equation):
            times[item] = often
        else:
            runs = ("XLA" if item.outcome else item.on) if decided else ""
            rows[item.kind, item.what, _at(item.first), runs, item.gain, item.outcome] += often
            inside |= item.replaced
    for equation, why in found.missed:
        nearly[_at(equation), why] += times.get(equation, 1)
    left = [e for e in times if e not in inside and e.name in _ALONE.values()]
    hint = next((e for e in left if e.is_differentiated), None)
    if hint is not None and not any(_CALL in why for _, why in nearly):
        nearly[_at(hint), f"the function differentiates itself: {_FIX}"] = 1
    regions = [{**dict(zip(_FIELDS, row, strict=True)), "times": n} for row, n in rows.items()]
    missing = [{"at": at, "times": n, "why": why} for (at, why), n in nearly.items()]
    alone = {w: sum(times[e] for e in left if e.name == kind) for w, kind in _ALONE.items()}
    data = {"function": name, "gpu": gpu, "regions": regions, "missed": missing, "alone": alone}
    return Found({**data, "graphs": sum(1 for _ in in_jaxpr(found.program.jaxpr))})


def _at(equation: Equation) -> str:
    return users_place(compat.user_frames(equation.written))


def _repeated(program: Program, times: int) -> Iterator[tuple[region.Region | Equation, int]]:
    """Regions and equations of a program and those inside, and how often each runs."""
    yield from ((found, times) for found in program.found)
    for equation in program.equations:
        yield equation, times
        turns = equation.params["length"] if equation.name == "scan" else 1
        for inner in equation.inner.values():
            yield from _repeated(inner, times * turns)
