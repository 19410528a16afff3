"""``python -m jax_cudnn explain``: what a function's graphs run as, and what they cost."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .._core.plans.explain import explain
from .avals import add_function, called, parse_arguments

_EXAMPLE = 'python -m jax_cudnn explain mymodel:block "f32[1,128,64]" causal=True --gpu H200'


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of ``python -m jax_cudnn``."""
    parser = commands.add_parser(
        "explain",
        help="what is fused in a function, what it costs, and what to change",
        description="For each cuDNN graph of a function: where it is called, what is fused into "
        "which plan, memory traffic and times, and what to change.",
        epilog=f"example: {_EXAMPLE}",
    )
    add_function(parser)
    parser.add_argument("--gpu", help="a GPU's name (default: the GPU of this machine)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--html", action="store_true", help="print HTML, with pictures")
    form.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command and returns the exit status."""
    positional, static = parse_arguments(options.arguments)
    function = called(options.function, positional, static)
    found = explain(function, *positional, gpu=options.gpu, **static)
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(found._repr_html_() if options.html else found)
    return 0
