"""``python -m jax_cudnn explain`` and ``support``, and a function that a command line names:
``module:name``, with its arguments as ``bf16[8,64,28,28]`` and ``key=value``."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.trace import GraphFunction
from .._core.plans.explain import explain
from .._core.plans.support import support

# As JAX and XLA print them; "f8e4m3fn" is float8_e4m3fn.
_KINDS = {"f": "float", "bf": "bfloat", "f8": "float8_", "s": "int", "i": "int", "u": "uint"}
_KINDS |= {"c": "complex"}
_AVAL = re.compile(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*")
_EXPLAIN = """\
example:
  python -m jax_cudnn explain mymodel:block "f32[1,128,64]" causal=True --gpu H200
"""
_SUPPORT = """\
examples:
  python -m jax_cudnn support mymodel:conv_bias_relu "bf16[8,64,28,28]" "bf16[64,64,3,3]" \\
      "bf16[1,64,1,1]" --gpus H100,B200
  python -m jax_cudnn support mymodel:block "f32[1,128,64]" causal=True
"""


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], **texts: str
) -> argparse.ArgumentParser:
    """Adds a command on a function and its arguments; its parser."""
    form = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, formatter_class=form, **texts)
    parser.add_argument("function", help="module:function")
    parser.add_argument(
        "arguments",
        nargs="*",
        help='dtype[sizes], such as "bf16[8,64,28,28]", or static arguments key=value',
    )
    parser.set_defaults(run=run)
    return parser


def add_parsers(commands: Any) -> None:
    """Adds explain and support to the subparsers of ``python -m jax_cudnn``."""
    parser = add_command(
        commands,
        "explain",
        _explain,
        help="what is fused in a function, what it costs, and what to change",
        description="For each cuDNN graph of a function: where it is called, what is fused into "
        "which plan, memory traffic and times, and what to change.",
        epilog=_EXPLAIN,
    )
    parser.add_argument("--gpu", help="a GPU's name (default: the GPU of this machine)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--html", action="store_true", help="print HTML, with pictures")
    form.add_argument("--json", action="store_true", help="print JSON")
    parser = add_command(
        commands,
        "support",
        _support,
        help="plan a function's graphs for GPUs, absent ones included",
        description="Where a function's graphs run: cuDNN's plan for each GPU, or why it has none. "
        "Exits with 1 if a graph has no plan on one of the GPUs.",
        epilog=_SUPPORT,
    )
    parser.add_argument("--gpus", help="GPUs, separated by commas (default: all)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--json", action="store_true", help="print JSON")


def _explain(options: argparse.Namespace) -> int:
    function, positional, static = called(options.function, options.arguments)
    found = explain(function, *positional, gpu=options.gpu, **static)
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(found._repr_html_() if options.html else found)
    return 0


def _support(options: argparse.Namespace) -> int:
    function, positional, static = called(options.function, options.arguments)
    gpus = options.gpus.split(",") if options.gpus else None
    found = support(function, *positional, gpus=gpus, **static)
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        print(found.to_markdown() if options.markdown else found)
    return 0 if found else 1


def parse_aval(text: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype in ``dtype[sizes]``, as JAX and XLA print them.

    ``bf16[8,64,28,28]``, ``bfloat16[8,64]``, ``f8e4m3fn[128,128]``, ``s8[4]``; ``f32[]`` is a
    scalar. Raises GraphError for any other text, and GraphTypeError for an unknown dtype.

    Example:
        >>> parse_aval("bf16[8,64]")
        ShapeDtypeStruct(shape=(8, 64), dtype=bfloat16)
    """
    match = _AVAL.fullmatch(text)
    sizes = match[2].strip().removesuffix(",") if match else ""
    if match is None or (sizes and not all(size.strip().isdigit() for size in sizes.split(","))):
        raise GraphError(
            "not a dtype with a shape",
            expected="dtype[sizes], for example bf16[8,64,28,28] or float32[]",
            got=repr(text),
            fix="write sizes in square brackets, and quote it: shells expand brackets",
        )
    kind, rest = re.findall(r"(f8|[a-z]*)(\w*)", match[1].replace("pred", "bool"))[0]
    try:
        dtype = jnp.dtype(_KINDS.get(kind, kind) + rest)
        if dtype.kind not in "biufcV":  # V are bfloat16 and the like
            raise TypeError(f"JAX has no arrays of {dtype}")
    except TypeError as error:
        raise GraphTypeError(
            "JAX has no dtype of this name",
            expected="a name such as bfloat16, or bf16, f32, f8e4m3fn, s8, i64, u8, c64, pred",
            got=f"{match[1]!r} in {text!r}",
        ) from error
    return jax.ShapeDtypeStruct(tuple(map(int, sizes.split(","))) if sizes else (), dtype)


def called(
    text: str, arguments: Sequence[str]
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """The function that ``module:name`` names, its operands and its static arguments;
    GraphTypeError if it does not take these."""
    positional, static = [], {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals:
            positional.append(parse_aval(argument))
            continue
        try:
            static[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise GraphError(
                f"the value of {key} is not a Python literal",
                expected="key=value with a Python literal, such as causal=True or mode='ADD'",
                got=repr(argument),
            ) from None
    function = load_function(text)
    if isinstance(function, GraphFunction):  # which says itself what it does not take
        return function, positional, static
    with contextlib.suppress(ValueError):  # some builtins have no signature
        signature = inspect.signature(function)
        try:
            signature.bind(*positional, **static)
        except TypeError as error:
            raise GraphTypeError(
                f"{text}: {error}",
                expected=f"operands for {text}{signature}",
                got=", ".join((*map(str, positional), *static)) or "no operands",
                fix='pass each as dtype[sizes], such as "bf16[8,64]", or as key=value',
            ) from None
    return function, positional, static


def load_function(text: str) -> Callable[..., Any]:
    """The function that ``module:name`` names; ``name`` may contain dots.

    The module may be in the current folder. Raises GraphError if the module or name does not exist,
    and GraphTypeError if the object is not callable.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise GraphError(
            "not the name of a function",
            expected="module:function, for example mymodel.layers:conv_bias_relu",
            got=repr(text),
        )
    found = _module(module, text)
    for part in name.split("."):
        if not hasattr(found, part):
            names = ", ".join(n for n in getattr(found, "__dict__", ()) if not n.startswith("_"))
            expected = f"one of {names}" if names else None
            raise GraphError(
                f"module {module!r} has no {name!r}", expected=expected, got=repr(text)
            )
        found = getattr(found, part)
    if not callable(found):
        raise GraphTypeError(
            f"{text} is not a function",
            expected="a function of arrays, such as one decorated with @jax_cudnn.graph",
            got=type(found).__name__,
        )
    return found


def _module(name: str, text: str) -> Any:
    if name.endswith(".py") or "/" in name:
        dotted = name.removesuffix(".py").replace("/", ".").strip(".")
        raise GraphError(
            "a function is named by its module, not by a file",
            expected="module:function, for example mymodel.layers:conv_bias_relu",
            got=repr(text),
            fix=f"write {dotted}:{text.partition(':')[2]}",
        )
    sys.path.insert(0, "")  # as for `python -m`: the current folder
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{name}.".startswith(f"{missing}."):  # and not an import in the module
            raise GraphError(
                f"there is no module {missing!r}",
                expected="a module in the current folder, or an installed one",
                got=repr(text),
                fix="run the command in the module's folder, or install it",
            ) from error
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{f.filename}:{f.lineno}" for f in frames if "importlib" not in f.filename]
        if isinstance(error, SyntaxError):
            own = [f"{error.filename}:{error.lineno}"]
        raise GraphError(
            f"module {name!r} cannot be imported",
            got=repr(text),
            why=f"{type(error).__name__}: {error}" + f" ({own[-1]})" * bool(own),
            fix=f"python -c 'import {name}' shows all of it",
        ) from error
    finally:
        sys.path.remove("")
