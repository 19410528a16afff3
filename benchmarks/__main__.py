"""Shell: ``python -m benchmarks run | auto | tuning | render | losses | support | numerics``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import jax

from jax_cudnn import JaxCudnnError
from jax_cudnn._core.cuda import device_nodes

from . import ROOT

_EPILOG = """\
examples:
  run cases                         cases of real models, host times; writes results/<gpu>.json
  run cases --only resnet50         the cases with that in their names
  run norms --only 8192x4096 --into benchmarks/results/norms_h200.json
  run flax --profile                with the kernels that take longest
  run attention --tiny --out /tmp   small shapes, on a CPU, too
  auto --out auto.json --runs 3     the default against plain JAX, over all cases; goes on where
                                    an earlier call was cut
  auto --part 2/2 --out b.json      every second case, for a second GPU
  auto --join a.json b.json --out benchmarks/results/auto_h200.json
  tuning                            seconds of tuning, by graph and of two models' starts
  render                            writes the tables and the picture of all results
  render --check                    says whether they are what is committed
"""
# Read when JAX first asks for a device: all sides of a large model stand in memory at once.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
SUITES = ("cases", "steps", "norms", "attention", "flax")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure on this machine's GPU, write JSON")
    run.add_argument("suite", choices=SUITES)
    run.add_argument("--only", metavar="PATTERN", help="cases with this in their names")
    run.add_argument("--tiny", action="store_true", help="small shapes, on a CPU, too")
    run.add_argument("--into", type=Path, metavar="FILE", help="put them into this result")
    run.add_argument("--out", type=Path, metavar="DIR", default=Path("."))
    run.add_argument("--profile", action="store_true", help="of flax, also which kernels run")
    run.add_argument("--list", action="store_true", help="print the cases, measure nothing")
    auto = commands.add_parser("auto", help="measure the default against plain JAX, all cases")
    auto.add_argument("--out", type=Path, metavar="FILE", default=Path("auto.json"))
    auto.add_argument("--only", metavar="PATTERN", help="cases with this in their names")
    auto.add_argument("--runs", type=int, default=3, help="each compiles all anew")
    auto.add_argument("--tiny", action="store_true", help="small shapes, on a CPU, too")
    auto.add_argument("--part", metavar="I/N", default="1/1", help="every N-th case, from the I-th")
    auto.add_argument("--join", type=Path, metavar="FILE", nargs="+", help="results of parts")
    auto.add_argument("--plans", type=Path, metavar="DIR", help="a plan cache for all runs")
    auto.add_argument("--run", type=int, help=argparse.SUPPRESS)  # one run, in this process
    auto.add_argument("--crashed", action="store_true", help=argparse.SUPPRESS)
    tuning = commands.add_parser("tuning", help="measure what tuning costs")
    tuning.add_argument("--out", type=Path, metavar="FILE", default=Path("tuning.json"))
    tuning.add_argument("--only", metavar="PATTERN", help="graphs and models with this in the name")
    tuning.add_argument("--tiny", action="store_true", help="small shapes, on a CPU, too")
    render = commands.add_parser("render", help="write tables and the picture of all results")
    render.add_argument("file", type=Path, nargs="?", help="print those of this result instead")
    losses = commands.add_parser("losses", help="write the table of what cuDNN and XLA take")
    losses.add_argument("files", type=Path, nargs="*", help="of these results of auto")
    support = commands.add_parser("support", help="write docs/operations.md")
    numerics = commands.add_parser("numerics", help="write docs/numerics.md")
    for command in (render, losses, support, numerics):
        command.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    if not device_nodes() and "JAX_PLATFORMS" not in os.environ:
        # Without a GPU the CUDA plugin only prints its failure to find one.
        jax.config.update("jax_platforms", "cpu")
    try:
        if options.command == "run":
            return _run(options)
        if options.command == "auto":
            return _auto(options)
        if options.command == "tuning":
            from . import tuning

            tuning.run(options.out, options.only, options.tiny)
            return 0
        different = _written(options)
    except JaxCudnnError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    for text in different:
        print(text)
    if different:
        print(f"renew it: python -m benchmarks {options.command}")
    return 1 if different else 0


def _run(options: argparse.Namespace) -> int:
    """1 where some result is wrong or failed, so that scripts notice."""
    from . import run

    if options.list:
        print("\n".join(f"{case.name}  {case.what}" for case in run.cases(options.suite)))
        return 0
    result = run.run(
        options.suite, options.out, options.only, options.tiny, options.into, options.profile
    )
    states = [entry["status"] for entry in result[options.suite].values()]
    return 1 if {"WRONG", "failed"} & {*states} else 0


def _auto(options: argparse.Namespace) -> int:
    """1 where some default is wrong or failed."""
    from .auto import run, tables

    tiny, only, out = options.tiny, options.only, options.out
    if options.run is not None:
        todo = run.chosen(only, tiny, options.part)
        parts = int(options.part.partition("/")[2])
        run.one_run(out, todo, options.run, tiny, options.plans, options.crashed, parts)
        return 0
    if options.join:
        result = run.joined(options.join, out)
    else:
        result = run.runs(out, only, options.runs, tiny, options.part, options.plans)
    print(tables.render(result))
    print(f"written to {out}")
    return 1 if result["summary"]["not_timed"] else 0


def _written(options: argparse.Namespace) -> list[str]:
    """Writes what a command generates, or gives what differs."""
    from . import documents

    check = options.check
    if options.command == "numerics":
        from .numerics import render

        found = [documents.written(ROOT / "docs" / "numerics.md", render(), check)]
    elif options.command == "support":
        from .support_table import render

        found = [documents.placed(documents.OPERATIONS, "support", render(), check)]
    elif options.command == "losses":
        from jax_cudnn._core.planning.losses import TABLE

        from . import losses

        results = [documents.read(file) for file in options.files or documents.autos()]
        table = ROOT / TABLE.relative_to(TABLE.parents[3])
        if not results:
            return []
        found = [documents.written(table, losses.merged(results, table), check)]
    elif options.file:
        print(documents.printed(options.file))
        return []
    else:
        found = [documents.placed(*each, check) for each in documents.tables()]
        found.append(documents.picture(check))
    return [text for text in found if text]


if __name__ == "__main__":
    sys.exit(main())
