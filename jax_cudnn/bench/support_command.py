"""``python -m jax_cudnn support``: the README's table, or where a user's own function runs."""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from .._core.errors import GraphError
from .._core.planning.support import support
from . import support_table
from .avals import load_function, parse_aval

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
        help="plan a function's graphs for GPUs that may be elsewhere",
        description="Where the graphs of a function run: cuDNN's plan for each GPU, or its reason "
        "in words. Exits with 1 if a graph has no plan on one of the GPUs.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("function", nargs="?", help="module:function")
    parser.add_argument("arguments", nargs="*", help="dtype[sizes], or static arguments key=value")
    parser.add_argument("--gpus", help="names of profiles, with commas (default: all, and yours)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--render", action="store_true", help="print the table of the operations' examples"
    )
    form.add_argument("--check", type=Path, metavar="FILE", help="compare it with FILE's")
    form.add_argument("--write", type=Path, metavar="FILE", help="put it into FILE")
    parser.set_defaults(error=parser.error)


def run(options: argparse.Namespace) -> int:
    """Runs the parsed command; the exit status."""
    document = options.check or options.write
    if options.render or document:
        if options.function or options.gpus:
            options.error("--render, --check and --write take no function and no --gpus")
        return _examples(options, document)
    if not options.function:
        options.error("name a function (module:function), or --render, --check or --write")
    positional, static = _arguments(options.arguments)
    gpus = options.gpus.split(",") if options.gpus else None
    found = support(load_function(options.function), *positional, gpus=gpus, **static)
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(found.to_markdown() if options.markdown else found)
    return 0 if found else 1


def _examples(options: argparse.Namespace, document: Path | None) -> int:
    if document is not None:
        support_table.block(document)  # a missing block is told before all is planned
    shown = support_table.render()
    if options.render:
        print(shown)
    elif options.write:
        support_table.write(options.write, shown)
    else:
        difference = support_table.difference(options.check, shown)
        if difference:
            print(difference)
            print(f"renew it: python -m jax_cudnn support --write {options.check}")
            return 1
    return 0


def _arguments(texts: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """Shapes by position, and ``key=value`` with a Python literal as keyword."""
    positional, static = [], {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            positional.append(parse_aval(text))
            continue
        try:
            static[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise GraphError(
                f"{key} is no static argument",
                expected="key=value with a Python literal, such as causal=True or mode='ADD'",
                got=repr(text),
            ) from None
    return positional, static
