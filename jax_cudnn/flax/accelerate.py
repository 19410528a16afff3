"""A model whose layers are ours, with the Variables of one of Flax's."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import jax
from flax import nnx
from jax import lax

from .._core.errors import GraphError, GraphTypeError
from .layer import SWAPPED, Layer, shallow, taken
from .report import Entry, Report

M = TypeVar("M", bound=nnx.Module)
_EMPTY = types.CellType()
_FUNCTIONS = (
    (nnx.dot_product_attention, "attention_fn"),
    (jax.nn.dot_product_attention, "dot_product_attention"),
    (lax.dot_general, "dot_general"),
    (lax.conv_general_dilated, "conv_general_dilated"),
)


def accelerate(model: M) -> tuple[M, Report]:
    """The model with every layer of Flax in whose place there is one here, and what was swapped.

    The new model shares all Variables with the given one: training one trains the other. The
    given one is as before, and so are its lists, dicts and tuples. What stands in several places
    of it, also in a cycle, does so in the new one. ``nnx.state`` of both is the same. What is no
    Variable is of each model: ``eval()`` and ``train()``, ``init_cache``, views.

    Layers in other containers than these stay Flax's. A function that holds a module (a ``lambda``
    that names ``self``, ``jax.jit(self.method)``) goes on computing with that one: with Flax's
    layers, and in its modes, whatever ``eval()`` of the new model says. The report tells of both.

    Args:
        model: a module, abstract (``nnx.eval_shape``) or not; also under ``nnx.jit``.

    Returns: the new model, of the same class (of one layer, of ours), and a :class:`Report`;
    ``print(report)`` shows a table. Classes that are derived from a layer of Flax are not swapped,
    because they may compute something else, nor are layers that Flax's own way computes whatever
    their operands are, layers with an attribute of your own that is an argument here, nor a
    BatchNorm: without an activation or residual of ours, XLA's is faster.

    Raises:
        GraphTypeError: what is given is no module of NNX.
        GraphError: modules are nested deeper than Python's limit of recursion.

    Source: ``flax.nnx``, "Surgery".

    Example:
        >>> import jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.relu)
        >>> fast, report = jnn.accelerate(model)
        >>> type(fast.layers[0]) is jnn.Linear, fast.layers[0].kernel is model.layers[0].kernel
        (True, True)
        >>> print(report)
        path      class   swapped  why
        layers.0  Linear  yes
        1 swapped, 0 kept
    """
    _check_module(model)
    copied = _Copy()
    try:
        made = copied.of(model, ())
        copied.note_others(model)
    except RecursionError as error:
        raise GraphError(
            "the model's modules are nested too deep",
            expected="a depth within Python's limit of recursion",
            got=f"a limit of {sys.getrecursionlimit()}",
            fix="hold layers in an nnx.List, or raise sys.setrecursionlimit",
        ) from error
    return made, Report(tuple(copied.entries.values()))


class _Copy:
    """A copy of what holds modules, one for each object."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.entries: dict[Any, Entry] = {}

    def of(self, value: Any, path: tuple[str, ...]) -> Any:
        """The value for the new model; itself where it holds no module."""
        if id(value) in self.made:
            if entry := self.entries.get(id(value)):  # another path of the same
                where = f"{entry.path}, {_joined(path)}"
                self.entries[id(value)] = replace(entry, path=where)
            return self.made[id(value)]
        if isinstance(value, nnx.Variable):
            return value
        if isinstance(value, nnx.Pytree):
            return self.of_module(value, path)
        if isinstance(value, (list, dict)):
            return self.of_container(value, path)
        if isinstance(value, tuple):
            parts = [self.of(x, (*path, str(i))) for i, x in enumerate(value)]
            if _same(parts, value):
                return value
            made: Any = type(value)
            return made._make(parts) if hasattr(made, "_make") else made(parts)
        if isinstance(value, functools.partial):
            func, args = self.of(value.func, path), self.of(value.args, path)
            named = {name: self.of(x, (*path, name)) for name, x in value.keywords.items()}
            same = func is value.func and args is value.args
            if same and _same(named.values(), value.keywords.values()):
                return value
            return type(value)(func, *args, **named)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nnx.Pytree):
            return types.MethodType(value.__func__, self.of(value.__self__, path))
        if callable(value) and _holds_a_module(value, set()):
            name = str(getattr(value, "__name__", type(value).__name__))
            why = "a function that holds a module: it computes with that one, and in its modes"
            self.note(path, path, name, False, why)
        return value

    def of_module(self, module: Any, path: tuple[str, ...]) -> Any:
        fits = type(module) in SWAPPED and not taken(module)
        ours = SWAPPED[type(module)].of(module) if fits else None
        if why := _told(module, ours):
            self.note(id(module), path, type(module).__name__, *why)
        swapped = ours is not None and not ours.kept
        made = self.made[id(module)] = ours if swapped else shallow(module, type(module))
        for name, inner in vars(module).items():
            if name.startswith("_pytree__"):
                continue
            flaxs = type(module).__module__.startswith("flax.")
            if not flaxs and not isinstance(module, (Layer, *SWAPPED)):
                self.note_function(inner, (*path, name))
            copied = self.of(inner, (*path, name))
            if copied is not inner:
                vars(made)[name] = copied
        return made

    def of_container(self, container: Any, path: tuple[str, ...]) -> Any:
        made = self.made[id(container)] = copy.copy(container)
        items = enumerate(container) if isinstance(container, list) else container.items()
        for key, inner in items:
            made[key] = self.of(inner, (*path, str(key)))
        return made

    def note(self, key: Any, path: tuple[str, ...], name: str, swapped: bool, why: str) -> None:
        """An entry of what the report tells of."""
        self.entries[key] = Entry(_joined(path), name, swapped, why)

    def note_others(self, model: nnx.Module) -> None:
        """An entry of each layer of Flax that was not reached."""
        for path, module in nnx.iter_graph(model):
            if type(module) in SWAPPED and id(module) not in self.made:
                why = "it is in a container that accelerate does not look into"
                where = tuple(map(str, path))
                self.note(id(module), where, type(module).__name__, False, why)

    def note_function(self, value: Any, path: tuple[str, ...]) -> None:
        """An entry of a function that a module of the user's calls."""
        inner = value.func if isinstance(value, functools.partial) else value
        for function, ours in _FUNCTIONS:
            if inner is function:
                why = f"a function of your own module: jax_cudnn.ops.{ours} can stand for it"
                self.note(path, path, function.__name__, False, why)


def _holds_a_module(value: Any, seen: set[int]) -> bool:
    """Whether a function reaches a module: as what it is bound to, by what it wraps, or by a
    variable of the function that it is made in or of its file; an object, by an attribute."""
    if isinstance(value, nnx.Module):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    held: list[Any] = [getattr(value, name, None) for name in ("__self__", "__wrapped__")]
    if isinstance(value, types.FunctionType):
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        held += [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        named = (value.__globals__.get(name) for name in value.__code__.co_names)
        held += [x for x in named if isinstance(x, nnx.Module)]  # not what functions of files hold
    elif isinstance(value, types.MethodType):
        held.append(value.__func__)
    elif isinstance(value, functools.partial):
        held += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, (list, tuple, dict)):
        held += value.values() if isinstance(value, dict) else value
    elif callable(value) and not isinstance(value, type):
        held += getattr(value, "__dict__", {}).values()
    return any(_holds_a_module(inner, seen) for inner in held)


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _joined(path: tuple[str, ...]) -> str:
    return ".".join(path) or "model"


def _told(module: Any, ours: Layer | None) -> tuple[bool, str] | None:
    """Whether swapped, and why or when not; None of what the report does not tell."""
    kind = type(module)
    if ours is not None:
        return not ours.kept, ours.kept or ours.remark or ""
    if why := taken(module):
        return False, why
    if isinstance(module, Layer):
        return False, "it is a layer of jax_cudnn"
    if bases := [base.__name__ for base in kind.__mro__ if base in SWAPPED]:
        return False, f"a class derived from {bases[0]}: it may compute otherwise"
    if isinstance(module, nnx.Module) and kind.__module__.startswith("flax.nnx.nn."):
        return False, "there is no such layer here"
    return None


def _check_module(model: Any) -> None:
    if isinstance(model, nnx.Pytree):
        return
    fix = "give the module itself, as nnx.merge or its class makes it"
    if any(base.__module__.startswith("flax.linen") for base in type(model).__mro__):
        fix = "Linen's layers take jax_cudnn.ops.attention_fn, dot_general, conv_general_dilated"
    kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise GraphTypeError(
        "accelerate is for modules of Flax NNX",
        expected="an nnx.Module",
        got=kind,
        fix=fix,
    )
