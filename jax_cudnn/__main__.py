"""Shell: ``python -m jax_cudnn demo | bench | doctor | explain | support | cache``."""

from __future__ import annotations

import argparse
import os
import sys

import jax

from . import JaxCudnnError
from ._core.cuda import device_nodes
from ._core.package import version

_ABOUT = "Commands of jax_cudnn: a demo, timing, checks of the installation, plans and their cache."


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; prints errors of this package without a traceback."""
    from .commands import bench, cache, explain, support

    parser = argparse.ArgumentParser(prog="python -m jax_cudnn", description=_ABOUT)
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(dest="command", required=True)
    demos = "train a small classifier on real data and run it fused"
    commands.add_parser("demo", help=demos, description=f"{demos.capitalize()}.")
    bench.add_parser(commands)
    checks = "check the installation: versions, GPUs, drivers"
    doctor = commands.add_parser("doctor", help=checks, description=f"C{checks[1:]}.")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    explain.add_parser(commands)
    support.add_parser(commands)
    cache.add_parser(commands)
    options = parser.parse_args(arguments)
    if options.command != "doctor" and not device_nodes() and "JAX_PLATFORMS" not in os.environ:
        # Without a GPU the CUDA plugin only prints that it finds none.
        jax.config.update("jax_platforms", "cpu")
    try:
        if options.command == "explain":
            return explain.run(options)
        elif options.command == "demo":
            from .commands.demo import demo

            demo()
        elif options.command == "support":
            return support.run(options)
        elif options.command == "cache":
            return cache.run(options)
        elif options.command == "doctor":
            from .commands.doctor import doctor as examine

            return examine(as_json=options.json)
        else:
            return bench.run(options)
    except JaxCudnnError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
