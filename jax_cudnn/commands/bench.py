"""``python -m jax_cudnn bench module:function``: time your own function against XLA."""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import JaxCudnnError
from . import figures, programs, timing
from .avals import called, parse_arguments
from .comparison import Comparison as Comparison
from .comparison import Formulation as Formulation
from .comparison import compare as compare
from .figures import OURS
from .progress import Progress

_EPILOG = """\
example:
  python -m jax_cudnn bench mymodel:block "bf16[8,64,28,28]" "bf16[64,64,3,3]" \\
      --against mymodel:plain_block
"""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m jax_cudnn``."""
    parser = commands.add_parser(
        "bench",
        help="time your function against XLA",
        description="Times a function on random operands against another function, or against "
        "itself with its graphs run by XLA. Without a GPU, it compares the results with --against "
        "and times nothing. Exits with 1 if the results differ or the other function fails.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", help="module:function that takes arrays")
    parser.add_argument(
        "operands", nargs="*", help='such as "bf16[8,64,28,28]", or static arguments key=value'
    )
    parser.add_argument("--against", help="module:function to compare with")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the results as JSON to DIR")


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command and returns the exit status."""
    avals, static = parse_arguments(options.operands)

    def named(text: str) -> Callable[..., Any]:
        return functools.partial(called(text, avals, static), **static)

    function = named(options.function)
    against = (options.against, named(options.against)) if options.against else None
    gpu = timing.environment()["sm_version"] is not None
    if not gpu and against is None:
        raise JaxCudnnError(
            "bench needs an NVIDIA GPU: without one XLA runs both sides (--against OTHER compares "
            "results here)"
        )
    progress = Progress()
    how = {} if gpu else {"rounds": 0}
    result = measure(options.function, function, avals, against, progress=progress, **how)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / (re.sub(r"[^\w.]+", "-", options.function) + ".json")
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    status = result["cases"][options.function]["status"]
    return int(status not in (figures.TIMED, figures.CHECKED))


def measure(
    name: str,
    function: Callable[..., Any],
    avals: Sequence[Any],
    against: tuple[str, Callable[..., Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Times a function on random operands, prints a table, and returns the figures.

    ``options`` are those of :func:`compare`. Errors of the function propagate.
    """
    label, other = against or ("its graphs in XLA", programs.with_references(function))
    operands = _operands(function, avals)
    try:
        found = compare({OURS: function, label: other}, *operands, **options)
    finally:
        if isinstance(progress := options.get("progress"), Progress):
            progress.done()
    cost = programs.graphs_cost(function, *avals)
    entry = figures.compared(found, cost)
    entry["operands"] = [f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in avals]
    entry["engines"] = figures.engines(programs.graphs(function, *avals))
    environment = timing.environment()
    where = "{device}, cuDNN {cudnn}, jax {jax}".format(**environment)
    if environment["sm_version"] is None:
        where += ". No GPU: XLA runs both sides"
    print(f"{where}\n\n{found}\n")
    if "tflops" in entry:
        rates = (f"{entry[kind][OURS]:g} {unit}" for kind, unit in _UNITS.items())
        print(f"{OURS}: {', '.join(rates)}, {', '.join(entry['engines']) or 'no cuDNN engine'}")
    else:
        print(entry["reason"])
    return {"environment": environment, "cases": {name: entry}}


def _operands(function: Callable[..., Any], avals: Sequence[Any]) -> list[jax.Array]:
    """Random operands; those of rank 2 and more are scaled until results are of order 1, because
    at large values activations such as gelu and relu agree up to rounding."""
    keys = jax.random.split(jax.random.key(0), max(len(avals), 1))
    matrices = [len(a.shape) > 1 and jnp.issubdtype(a.dtype, jnp.floating) for a in avals]
    sizes = jax.jit(lambda *xs: [_rms(x) for x in jax.tree.leaves(function(*xs)) if x.size])
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


_UNITS = {"tflops": "TFLOP/s", "gbytes_s": "GB/s"}


def draw(
    key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float, offset: float
) -> jax.Array:
    """Normal samples times ``scale`` plus ``offset``, integers up to 127, or fair booleans."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return jax.random.bernoulli(key, 0.5, shape)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, -127, 128, jnp.int32).astype(dtype)
    # Drawn in 16 bits, because operands may take up to a GiB.
    return (jax.random.normal(key, shape, jnp.bfloat16) * scale + offset).astype(dtype)


_draw = jax.jit(draw, static_argnums=(1, 2))


def drawn(key: jax.Array, aval: Any, scale: float = 1.0, offset: float = 0.0) -> jax.Array:
    """A random array of the aval's shape and dtype."""
    return _draw(key, aval.shape, aval.dtype, scale, offset)
