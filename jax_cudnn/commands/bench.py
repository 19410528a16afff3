"""``python -m jax_cudnn bench module:function``: time your own function against XLA."""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from .._core import context
from .._core.auto import plan_graph
from .._core.errors import JaxCudnnError
from .._core.graph.spec import GraphSpec
from .._core.planning.cost import Cost, cost
from .._core.plans.plan import Plan
from .._core.primitive import calls_in
from .._core.user_context import XLA
from . import timing
from .functions import add_command, called
from .timing import Comparison as Comparison
from .timing import Formulation as Formulation
from .timing import compare as compare
from .timing import summary

OURS = "jax_cudnn"
TIMED, WRONG, FAILED, CHECKED = "timed", "WRONG", "failed", "checked"
_UNITS = {"tflops": "TFLOP/s", "gbytes_s": "GB/s"}
_EPILOG = """\
example:
  python -m jax_cudnn bench mymodel:block "bf16[8,64,28,28]" "bf16[64,64,3,3]" \\
      --against mymodel:plain_block
"""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m jax_cudnn``."""
    parser = add_command(
        commands,
        "bench",
        run,
        help="time your function against XLA",
        description="Times a function on random operands against another function, or against "
        "itself with its graphs run by XLA. Without a GPU, it compares the results with --against "
        "and times nothing. Exits with 1 if the results differ or the other function fails.",
        epilog=_EPILOG,
    )
    parser.add_argument("--against", help="module:function to compare with")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the results as JSON to DIR")


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command and returns the exit status."""
    function, avals, static = called(options.function, options.arguments)
    function = functools.partial(function, **static)
    label, other = "its graphs in XLA", in_xla(function)
    if options.against:
        label, (other, *_) = options.against, called(options.against, options.arguments)
        other = functools.partial(other, **static)
    environment = timing.environment()
    gpu = environment["sm_version"] is not None
    if not gpu and not options.against:
        raise JaxCudnnError(
            "bench needs an NVIDIA GPU: without one XLA runs both sides (--against OTHER compares "
            "results here)"
        )
    with Progress() as progress:
        how: Any = {"progress": progress} | ({} if gpu else {"rounds": 0})
        found = compare({OURS: function, label: other}, *_operands(function, avals), **how)
    entry = compared(found, graphs_cost(function, *avals))
    entry["operands"] = [f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in avals]
    entry["engines"] = engines(graphs(function, *avals))
    where = "{device}, cuDNN {cudnn}, jax {jax}".format(**environment)
    print(where + ("" if gpu else ". No GPU: XLA runs both sides") + f"\n\n{found}\n")
    if "tflops" in entry:
        rates = (f"{entry[kind][OURS]:g} {unit}" for kind, unit in _UNITS.items())
        print(f"{OURS}: {', '.join(rates)}, {', '.join(entry['engines']) or 'no cuDNN engine'}")
    else:
        print(entry["reason"])
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / (re.sub(r"[^\w.]+", "-", options.function) + ".json")
        result = {"environment": environment, "cases": {options.function: entry}}
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    return int(entry["status"] not in (TIMED, CHECKED))


class Progress:
    """Shows on stderr what a command does: on a terminal in one line that it rewrites and at the
    end clears, else in at most one line every two seconds."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._shown = -2.0

    def __call__(self, text: str) -> None:
        seconds = time.perf_counter() - self._began
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}, {seconds:.0f} s", end="", file=sys.stderr, flush=True)
        elif seconds - self._shown >= 2.0:
            self._shown = seconds
            print(f"{text}, {seconds:.0f} s", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# -- operands --------------------------------------------------------------------------------------


def _operands(function: Callable[..., Any], avals: Sequence[Any]) -> list[jax.Array]:
    """Random operands; those of rank 2 and more are scaled until results are of order 1, because
    at large values activations such as gelu and relu agree up to rounding."""
    keys = jax.random.split(jax.random.key(0), max(len(avals), 1))
    matrices = [len(a.shape) > 1 and jnp.issubdtype(a.dtype, jnp.floating) for a in avals]
    sizes = jax.jit(lambda *xs: [_rms(x) for x in jax.tree.leaves(function(*xs)) if x.size])
    operands: list[jax.Array] = []
    scale = 1.0
    for _ in range(5):
        scales = [scale if wide else 1.0 for wide in matrices]
        operands = [drawn(*one) for one in zip(keys, avals, scales, strict=False)]
        size = max(map(float, sizes(*operands)), default=0.0) if any(matrices) else 0.0
        if not 2 < size < math.inf:
            break
        scale *= size ** (-1 / sum(matrices))
    return operands


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


@functools.partial(jax.jit, static_argnums=1)
def drawn(key: jax.Array, aval: Any, scale: Any = 1.0, offset: Any = 0.0) -> jax.Array:
    """A random array of the aval's shape and dtype: normal samples times ``scale`` plus ``offset``,
    integers up to 127, or fair booleans."""
    if jnp.issubdtype(aval.dtype, jnp.bool_):
        return jax.random.bernoulli(key, 0.5, aval.shape)
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jax.random.randint(key, aval.shape, -127, 128, jnp.int32).astype(aval.dtype)
    # Drawn in 16 bits, because operands may take up to a GiB.
    normal = jax.random.normal(key, aval.shape, jnp.bfloat16)
    return (normal * scale + offset).astype(aval.dtype)


# -- figures ---------------------------------------------------------------------------------------


def compared(found: Comparison, total: Cost) -> dict[str, Any]:
    """A comparison as JSON: status, times in us, ratios, rates, differences. The first function is
    ours, and its graphs have this cost."""
    first, best, failures = found.names[0], found.best_other, "; ".join(found.failed.values())
    entry: dict[str, Any] = {
        "status": WRONG if found.wrong else TIMED if best else FAILED,
        "tolerance": found.tolerance,
        "differences": {name: d.json() for name, d in found.differences.items()},
        "not_run": {name: reason[:500] for name, reason in found.failed.items()},
    }
    if found.wrong:
        wrong = (f"{name} by {found.differences[name]}" for name in found.wrong)
        return entry | {"reason": "differs from jax_cudnn: " + "; ".join(wrong)}
    if found.differences and not found.seconds:
        reason = "The results agree. Timing needs an NVIDIA GPU: nothing was timed."
        return entry | {"status": CHECKED, "reason": reason}
    if not found.seconds:
        return entry | {"reason": f"no function ran: {failures}"}
    entry |= {"calls": found.calls, "rounds": len(found.seconds[first])}
    entry["us"] = {name: summary(values, 1e6) for name, values in found.seconds.items()}
    if best is None:
        return entry | {"reason": f"no XLA formulation ran: {failures}"}
    entry |= {"best_xla": best, **ratios(found, best, "ratio")}
    for kind, amount in (("tflops", total.flops / 1e12), ("gbytes_s", total.bytes / 1e9)):
        entry[kind] = {n: float(f"{amount / found.median(n):.4g}") for n in (first, best)}
    return entry


def ratios(found: Comparison, name: str, key: str) -> dict[str, float]:
    """A function's time divided by ours: of the medians, and the extremes over rounds."""
    rounds = found.ratios(name)
    figures = {key: found.ratio(name), f"{key}_min": min(rounds), f"{key}_max": max(rounds)}
    return {key: round(value, 4) for key, value in figures.items()}


# -- graphs in a function --------------------------------------------------------------------------

Graphs = list[tuple[GraphSpec, str, int]]
"""Each graph of a program: its spec, its name, and how often it runs. Graphs in a scan run once per
iteration; in a while loop and in each branch of a conditional they count once, because how often
they run is unknown."""


def graphs(function: Callable[..., Any], *operands: Any) -> Graphs:
    """The graphs of a function."""
    return of_jaxpr(jax.make_jaxpr(function)(*operands).jaxpr)


def of_jaxpr(jaxpr: Any) -> Graphs:
    """The graphs of a jaxpr."""
    return [(call.params["spec"], call.params["name"], n) for call, n in calls_in(jaxpr)]


def placed(graphs: Graphs) -> list[Plan]:
    """The plan of each graph for this machine's GPU or for ``jax_cudnn.target``. Raises TargetError
    if there is neither."""
    site = context.site(jax.local_devices(), "bench")
    return [Plan.of(plan_graph(spec, site, name)) for spec, name, _ in graphs]


def engines(graphs: Graphs) -> list[str]:
    """The engines of the graphs' plans, in graph order; empty without a GPU."""
    try:
        plans = placed(graphs)
    except JaxCudnnError:  # references ran, not plans
        return []
    return [s.plan.engine for plan in plans for s in plan.segments if s.plan is not None]


def graphs_cost(function: Callable[..., Any], *operands: Any) -> Cost:
    """The total cost of the function's graphs, without what XLA runs around them."""
    return sum((cost(spec) * times for spec, _, times in graphs(function, *operands)), Cost())


def in_xla(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with its graphs run by XLA, also those with an ``implementation=``."""

    def plain(*operands: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*operands)
        leaves = core.jaxpr_as_fun(_in_xla(closed))(*jax.tree.leaves(operands))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return plain


def _in_xla(value: Any) -> Any:
    """A parameter of an equation, with other graphs in the programs that it holds."""
    if isinstance(value, GraphSpec):
        return replace(value, options=replace(value.options, implementation=XLA))
    if type(value) in (tuple, list):
        return type(value)(map(_in_xla, value))
    if isinstance(value, core.Jaxpr):
        params = [{k: _in_xla(v) for k, v in e.params.items()} for e in value.eqns]
        eqns = [e.replace(params=p) for e, p in zip(value.eqns, params, strict=True)]
        return value.replace(eqns=eqns)
    if hasattr(value, "jaxpr") and hasattr(value, "consts"):  # closed, a class of older versions
        return value.replace(jaxpr=_in_xla(value.jaxpr))
    return value
