"""The shell commands: ``python -m jax_cudnn demo | bench | doctor | support | numerics``."""

from __future__ import annotations

import argparse
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
    from .bench import command, support_command

    parser = argparse.ArgumentParser(prog="python -m jax_cudnn", description=__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("demo", help="fit a small classifier on real data and run it fused")
    command.add_parser(commands)
    doctor = commands.add_parser("doctor", help="say what is installed and whether it fits")
    doctor.add_argument("--json", action="store_true", help="print JSON, for other programs")
    support_command.add_parser(commands)
    numerics = commands.add_parser("numerics", help="print the numerics page")
    numerics.add_argument("--write", type=Path, help="write it to this file")
    options = parser.parse_args(arguments)
    try:
        if options.command == "demo":
            from .bench.demo import demo

            demo()
        elif options.command == "support":
            return support_command.run(options)
        elif options.command == "numerics":
            from .bench.numerics import render

            page = render()
            options.write.write_text(page) if options.write else print(page, end="")
        elif options.command == "doctor":
            from .doctor.report import doctor as examine

            return examine(as_json=options.json)
        else:
            return command.bench(options)
    except JaxCudnnError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
