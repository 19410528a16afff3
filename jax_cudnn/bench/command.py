"""The subcommand ``python -m jax_cudnn bench``: its arguments and what each of them does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .._core.errors import GraphError

_EPILOG = """\
examples:
  bench                                       everything; writes <gpu>.json
  bench --only resnet50 --out results         the cases with that in their names
  bench mymodel:block "bf16[8,64,28,28]" "bf16[64,64,3,3]" --against mymodel:plain_block
  bench --steps --out results                 training steps; writes steps_<gpu>.json
  bench --norms --out results                 normalizations; writes norms_<gpu>.json
  bench --attention --out results             attention; writes attention_<gpu>.json
  bench --flax --profile --only resnet50      training Flax's models; writes flax_<gpu>.json
  bench --render results/h200.json --plot results/h200.svg
  bench --losses results/h200.json results/norms_h200.json --write losses.json
"""

NAMED = ("steps", "norms", "attention", "flax")
"""Benches of named models, of which each has its own file."""


def add_parser(commands: Any) -> None:
    """Adds ``bench`` to the subcommands."""
    parser = commands.add_parser(
        "bench",
        help="measure on this machine's GPU against XLA, write JSON",
        description="Measures named cases of real models, or your own function, against XLA.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", nargs="?", help="module:name of a function of arrays")
    parser.add_argument("avals", nargs="*", help='its operands, such as "bf16[8,64,28,28]"')
    parser.add_argument(
        "--against", help="module:name of the plain function to compare with; by default the "
        "function itself, its graphs computed by XLA"
    )  # fmt: skip
    parser.add_argument("--only", metavar="PATTERN", help="measure cases with this in their names")
    parser.add_argument(
        "--steps", action="store_true", help="measure training steps: whole programs, with their "
        "gradients"
    )  # fmt: skip
    parser.add_argument(
        "--norms", action="store_true", help="measure normalizations, also against PyTorch if that "
        "is installed; sets XLA_PYTHON_CLIENT_PREALLOCATE=false, unless it is set, so that both "
        "find memory"
    )  # fmt: skip
    parser.add_argument(
        "--attention", action="store_true", help="measure attention, as --norms does "
        "normalizations"
    )  # fmt: skip
    parser.add_argument(
        "--flax", action="store_true", help="measure training steps of models in plain Flax, as "
        "they are and with jax_cudnn.flax.accelerate"
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="store_true", help="with --flax: also which kernels take the time"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="with --steps, --norms, --attention or --flax: small "
        "shapes, on a CPU, too"
    )  # fmt: skip
    parser.add_argument(
        "--into", type=Path, metavar="FILE", help="with --only: put these cases into this result"
    )
    parser.add_argument("--list", action="store_true", help="print the cases, measure nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="print the tables of a result, measure nothing"
    )
    parser.add_argument(
        "--losses", type=Path, nargs="+", metavar="FILE", help="print which patterns of results "
        "are lost to XLA, measure nothing"
    )  # fmt: skip
    parser.add_argument(
        "--write", type=Path, metavar="TABLE", help="with --losses: put them into this table, from "
        'which the implementation "split" reads them'
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the ratios of the result")


def bench(options: argparse.Namespace) -> int:
    """Runs it; 1 when some result is wrong or failed, so that scripts notice."""
    from . import run

    named = [name for name in NAMED if getattr(options, name)]
    if options.list:
        print(run.listing(*named[:1]))
        return 0
    if options.write and not options.losses:
        raise GraphError("--write goes with --losses", expected="--losses FILE --write TABLE")
    if options.tiny and not named:
        raise GraphError(
            "--tiny goes with --steps, --norms, --attention or --flax", expected="--steps --tiny"
        )
    if options.profile and not options.flax:
        raise GraphError("--profile goes with --flax", expected="--flax --profile")
    if len(named) > 1 or (named and (options.function or options.plot)):
        raise GraphError(
            f"--{named[0]} measures named models alone, and has no picture",
            expected=f"--{named[0]} with --only, --tiny, --into and --out",
            got="a function, --plot, or another of --steps, --norms, --attention and --flax, too",
        )
    if options.losses:
        return _losses(options.losses, options.write)
    if options.render:
        result = _read(options.render)
        print(_tables(result, options.render))
    elif options.function:
        result = _function(options)
    elif named:
        measured = getattr(run, f"run_{named[0]}")
        more = {"profiled": True} if options.profile else {}
        result = measured(
            options.out or Path("."), options.only, options.tiny, options.into, **more
        )
    else:
        result = run.run(options.out or Path("."), options.only, options.into)
    if options.plot:
        from .plot import plot

        plot(result, options.plot)
        print(f"drawn in {options.plot}")
    entries = {n: e for kind in ("cases", *NAMED) for n, e in result.get(kind, {}).items()}
    bad = [name for name, entry in entries.items() if entry["status"] in ("WRONG", "failed")]
    return 1 if bad and not options.render else 0


def _function(options: argparse.Namespace) -> dict[str, Any]:
    from . import run
    from .avals import load_function, parse_aval

    if options.only:
        raise GraphError("--only chooses among the named cases", got=f"{options.function}, too")
    function = load_function(options.function)
    avals = [parse_aval(text) for text in options.avals]
    against = (options.against, load_function(options.against)) if options.against else None
    return run.run_function(options.function, function, avals, against=against, out=options.out)


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _no_result(path, repr(error)) from error
    if not isinstance(result, dict) or "environment" not in result:
        raise _no_result(path, "JSON of another kind")
    return result


def _tables(result: dict[str, Any], path: Path) -> str:
    """Both tables; a result without one of them says so. Benches of named models have others."""
    from . import run

    try:
        for kind in NAMED:
            if kind in result:
                return getattr(run, f"render_{kind}")(result)
        return f"{run.render(result)}\n\n{run.render_cases(result)}"
    except (AttributeError, KeyError, TypeError) as error:
        raise _no_result(path, repr(error)) from error


def _losses(paths: list[Path], table: Path | None) -> int:
    from . import losses

    results = []
    for path in paths:
        results.append(_read(path))
        try:
            print(losses.render(results[-1]))
        except (AttributeError, KeyError, TypeError) as error:
            raise _no_result(path, repr(error)) from error
    if table is not None:
        losses.write(results, table)
        print(f"written to {table}")
    return 0


def _no_result(path: Path, got: str) -> GraphError:
    return GraphError(
        f"{path} is no result of bench",
        expected="the JSON that `python -m jax_cudnn bench` writes",
        got=got,
    )
