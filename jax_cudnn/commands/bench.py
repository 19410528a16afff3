"""``python -m jax_cudnn bench module:function``: one's own function, measured against XLA."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import figures, programs, timing
from .avals import load_function, parse_aval
from .comparison import Comparison as Comparison
from .comparison import Formulation as Formulation
from .comparison import compare as compare
from .figures import OURS

_EPILOG = """\
example:
  python -m jax_cudnn bench mymodel:block "bf16[8,64,28,28]" "bf16[64,64,3,3]" \\
      --against mymodel:plain_block
"""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m jax_cudnn``."""
    parser = commands.add_parser(
        "bench",
        help="time a function of yours against XLA",
        description="Times a function on random operands against another, or against itself with "
        "its graphs computed by XLA. Exits with 1 if the results differ, or nothing was timed.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", help="module:function, of arrays")
    parser.add_argument("avals", nargs="*", help='its operands, such as "bf16[8,64,28,28]"')
    parser.add_argument("--against", help="module:function of a plain function to compare with")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the figures there as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command; the exit status."""
    function = load_function(options.function)
    avals = [parse_aval(text) for text in options.avals]
    against = (options.against, load_function(options.against)) if options.against else None
    result = measure(options.function, function, avals, against)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / (re.sub(r"[^\w.]+", "-", options.function) + ".json")
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {path}")
    return 0 if result["cases"][options.function]["status"] == figures.TIMED else 1


def measure(
    name: str,
    function: Callable[..., Any],
    avals: Sequence[Any],
    against: tuple[str, Callable[..., Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Times a function on random operands, prints a table, and returns the figures.

    ``options`` are those of :func:`compare`. What the function raises is raised.
    """
    label, other = against or ("its reference in XLA", programs.with_references(function))
    keys = jax.random.split(jax.random.key(0), max(len(avals), 1))
    operands = [drawn(key, aval) for key, aval in zip(keys, avals, strict=False)]
    found = compare({OURS: function, label: other}, *operands, **options)
    cost = programs.graphs_cost(function, *avals)
    entry = figures.compared(found, cost)
    entry["operands"] = [f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in avals]
    entry["engines"] = figures.engines(programs.graphs(function, *avals))
    environment = timing.environment()
    where = "{device}, cuDNN {cudnn}, jax {jax}".format(**environment)
    if environment["sm_version"] is None:
        where += ". No GPU: both sides are XLA's, and the ratio says nothing about cuDNN"
    print(f"{where}\n\n{found}\n")
    if "tflops" in entry:
        rates = (f"{entry[kind][OURS]:g} {unit}" for kind, unit in _UNITS.items())
        print(f"{OURS}: {', '.join(rates)}, {', '.join(entry['engines']) or 'no engine of cuDNN'}")
    else:
        print(entry["reason"])
    return {"environment": environment, "cases": {name: entry}}


_UNITS = {"tflops": "TFLOP/s", "gbytes_s": "GB/s"}


def draw(
    key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float, offset: float
) -> jax.Array:
    """Normal numbers times ``scale`` plus ``offset``, integers up to 127, or fair booleans."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return jax.random.bernoulli(key, 0.5, shape)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, -127, 128, jnp.int32).astype(dtype)
    # Drawn in a 16-bit type: operands may take up to a GiB.
    return (jax.random.normal(key, shape, jnp.bfloat16) * scale + offset).astype(dtype)


_draw = jax.jit(draw, static_argnums=(1, 2))


def drawn(key: jax.Array, aval: Any, scale: float = 1.0, offset: float = 0.0) -> jax.Array:
    """A random array of this shape and dtype."""
    return _draw(key, aval.shape, aval.dtype, scale, offset)
