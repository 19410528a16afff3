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
    from .commands import bench, cache, demo, doctor, functions

    parser = argparse.ArgumentParser(prog="python -m jax_cudnn", description=_ABOUT)
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_parser(commands)
    bench.add_parser(commands)
    doctor.add_parser(commands)
    functions.add_parsers(commands)
    cache.add_parser(commands)
    options = parser.parse_args(arguments)
    if options.command != "doctor" and not device_nodes() and "JAX_PLATFORMS" not in os.environ:
        # Without a GPU the CUDA plugin only prints that it finds none.
        jax.config.update("jax_platforms", "cpu")
    try:
        return options.run(options)
    except JaxCudnnError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
