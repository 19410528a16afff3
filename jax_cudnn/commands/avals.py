"""Shapes and functions on a command line: ``bf16[8,64,28,28]``, ``module:name``."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.trace import GraphFunction

_SHORT = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
    "s16": "int16",
    "s32": "int32",
    "s64": "int64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "c64": "complex64",
    "c128": "complex128",
    "pred": "bool",
}
_KINDS = "biufcV"  # of NumPy; V are bfloat16 and the like
_AVAL = re.compile(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*")


def add_function(parser: Any) -> None:
    """Adds the arguments that name a function and what it is called with."""
    parser.add_argument("function", help="module:function")
    parser.add_argument("arguments", nargs="*", help="dtype[sizes], or static arguments key=value")


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
    try:
        dtype = jnp.dtype(_SHORT.get(match[1], match[1]))
        if dtype.kind not in _KINDS:
            raise TypeError(f"JAX has no arrays of {dtype}")
    except TypeError as error:
        raise GraphTypeError(
            "JAX has no dtype of this name",
            expected=f"a name such as bfloat16, or one of {', '.join(_SHORT)}",
            got=f"{match[1]!r} in {text!r}",
        ) from error
    return jax.ShapeDtypeStruct(tuple(map(int, sizes.split(","))) if sizes else (), dtype)


def parse_arguments(texts: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Positional shapes, and keywords from ``key=value`` with a Python literal."""
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
                f"the value of {key} is not a Python literal",
                expected="key=value with a Python literal, such as causal=True or mode='ADD'",
                got=repr(text),
            ) from None
    return positional, static


def called(text: str, positional: Sequence[Any], static: Mapping[str, Any]) -> Callable[..., Any]:
    """The function that ``module:name`` names; GraphTypeError if it does not take these
    arguments."""
    function = load_function(text)
    if isinstance(function, GraphFunction):  # which says it itself
        return function
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
    return function


def load_function(text: str) -> Callable[..., Any]:
    """The function that ``module:name`` names; ``name`` may contain dots.

    The module may be in the current folder. Raises GraphError if the module or name does not exist,
    and GraphTypeError if the object is not callable; errors of the module itself propagate.
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
            raise GraphError(
                f"module {module!r} has no {name!r}",
                expected="one of " + ", ".join(n for n in vars(found) if not n.startswith("_"))
                if hasattr(found, "__dict__")
                else None,
                got=repr(text),
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
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise _failed(name, text, error) from error  # an import of the user's module is missing
        raise GraphError(
            f"there is no module {error.name!r}",
            expected="a module in the current folder, or an installed one",
            got=repr(text),
            fix="run the command in the module's folder, or install it",
        ) from error
    except Exception as error:
        raise _failed(name, text, error) from error
    finally:
        sys.path.remove("")


def _failed(name: str, text: str, error: Exception) -> GraphError:
    """That a module cannot be imported, with the line of it that fails."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f"{frame.filename}:{frame.lineno}" for frame in frames if "importlib" not in frame.filename
    ]
    if isinstance(error, SyntaxError):
        own = [f"{error.filename}:{error.lineno}"]
    return GraphError(
        f"module {name!r} cannot be imported",
        got=repr(text),
        why=f"{type(error).__name__}: {error}" + f" ({own[-1]})" * bool(own),
        fix=f"python -c 'import {name}' shows all of it",
    )
