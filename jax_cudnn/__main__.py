"""The shell commands: ``python -m jax_cudnn demo | bench``."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import JaxCudnnError


def _version() -> str:
    try:
        return version("jax-cudnn")
    except PackageNotFoundError:
        return "a source tree that is not installed"


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; errors of this package are printed without a traceback."""
    parser = argparse.ArgumentParser(prog="python -m jax_cudnn", description=__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="fit a small classifier on real data and run it fused")
    bench = commands.add_parser("bench", help="measure on this machine's GPU, write JSON")
    bench.add_argument("--out", type=Path, default=Path("."), help="folder for the results")
    bench.add_argument("--render", type=Path, help="print the table of a result, measure nothing")
    options = parser.parse_args(arguments)
    try:
        if options.command == "demo":
            from .bench.demo import demo

            demo()
        else:
            from .bench.run import render, run

            if options.render:
                try:
                    print(render(json.loads(options.render.read_text())))
                except (OSError, ValueError, KeyError) as error:
                    parser.error(f"--render {options.render}: not a result of bench: {error!r}")
            else:
                run(options.out)
    except JaxCudnnError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
