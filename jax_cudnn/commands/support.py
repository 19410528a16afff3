"""``python -m jax_cudnn support``: where a function's graphs run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .._core.plans.support import support
from .avals import add_function, called, parse_arguments

_EXAMPLE = """\
examples:
  python -m jax_cudnn support mymodel:conv_bias_relu "bf16[8,64,28,28]" "bf16[64,64,3,3]" \\
      "bf16[1,64,1,1]" --gpus H100,B200
  python -m jax_cudnn support mymodel:block "f32[1,128,64]" causal=True
"""


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m jax_cudnn``."""
    parser = commands.add_parser(
        "support",
        help="plan a function's graphs for GPUs, absent ones included",
        description="Where a function's graphs run: cuDNN's plan for each GPU, or why it has none. "
        "Exits with 1 if a graph has no plan on one of the GPUs.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_function(parser)
    parser.add_argument("--gpus", help="GPUs, separated by commas (default: all)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command and returns the exit status."""
    positional, static = parse_arguments(options.arguments)
    gpus = options.gpus.split(",") if options.gpus else None
    function = called(options.function, positional, static)
    found = support(function, *positional, gpus=gpus, **static)
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(found.to_markdown() if options.markdown else found)
    return 0 if found else 1
