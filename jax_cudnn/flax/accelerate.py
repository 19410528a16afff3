"""Replace Flax's layers in a model, sharing its Variables."""

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
from .forward import through_accelerate
from .layer import SWAPPED, Layer, shallow, taken
from .reports import Entry, Report

M = TypeVar("M", bound=nnx.Module)
_EMPTY = types.CellType()
_FUNCTIONS = (
    (nnx.dot_product_attention, "attention_fn"),
    (jax.nn.dot_product_attention, "dot_product_attention"),
    (lax.dot_general, "dot_general"),
    (lax.conv_general_dilated, "conv_general_dilated"),
)


def accelerate(model: M) -> M:
    """Returns a copy of the model in which cuDNN layers replace Flax's, where there is one.

    The copy shares all Variables with the given model: training one trains the other, and
    ``nnx.state`` of both is the same. The given model, its lists, dicts and tuples do not change.
    A layer that the model holds in several places, also in a cycle, is one layer in the copy.
    State that is not a Variable is separate: ``eval()`` and ``train()`` of the copy do not change
    the given model, nor the other way round; so are ``init_cache`` and views.

    :func:`report` lists which layers are replaced, which are not, and why. These stay as they are:

    - classes derived from a layer of Flax, because they may compute something else;
    - layers that would fall back to Flax's implementation for any operands;
    - layers that have an attribute with the name of one of our arguments;
    - BatchNorm, because XLA is faster for one without a fused activation or residual;
    - layers in containers other than lists, dicts and tuples.

    The copy's ``__call__`` goes through :func:`jax_cudnn.accelerate`, which finds what stands
    between layers: a gelu after a Linear, ``jax.nn.dot_product_attention``, norms written out. Its
    class is then derived from the model's. A ``__call__`` that adds Variables, changes parameters,
    or branches by values runs as it is, and so do other methods. :func:`report` lists layers alone;
    :func:`jax_cudnn.explain` shows what a program holds.

    A function that holds a module (a ``lambda`` that uses ``self``, ``jax.jit(self.method)``) keeps
    calling the original module, with Flax's layers, and ignores ``eval()`` of the copy.

    Args:
        model: an NNX module, concrete or abstract (``nnx.eval_shape``); also under ``nnx.jit``.

    Returns:
        A model of a class derived from the model's. If the model is a single layer, our layer.

    Raises:
        GraphTypeError: the model is not an NNX module.
        GraphError: modules are nested deeper than Python's recursion limit.

    Source: ``flax.nnx``, "Surgery".

    Example:
        >>> import jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu)
        >>> fast = jnn.accelerate(model)
        >>> type(fast.layers[0]) is jnn.Linear, fast.layers[0].kernel is model.layers[0].kernel
        (True, True)
    """
    made = _copied(model)[0]
    return made if isinstance(made, Layer) or type(made) in SWAPPED else through_accelerate(made)


def report(model: nnx.Module) -> Report:
    """Lists which layers of a model :func:`accelerate` replaces, which it keeps, and why.

    The report of a model and of its accelerated copy are equal. Functions that a module calls are
    not listed, only those that it holds as attributes.

    Args:
        model: an NNX module, before or after :func:`accelerate`.

    Returns:
        A :class:`Report`. ``print(report)`` shows it as a table.

    Raises:
        GraphTypeError: the model is not an NNX module.
        GraphError: modules are nested deeper than Python's recursion limit.

    Example:
        >>> import jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu)
        >>> print(jnn.report(model))
        path      class   swapped  why
        layers.0  Linear  yes
        1 swapped, 0 kept
    """
    return _copied(model)[1]


def _copied(model: M) -> tuple[M, Report]:
    _check_module(model)
    copied = _Copy()
    try:
        made = copied.of(model, ())
        copied.note_others(model)
    except RecursionError as error:
        raise GraphError(
            "the model's modules are nested too deeply",
            expected="a depth within Python's recursion limit",
            got=f"a limit of {sys.getrecursionlimit()}",
            fix="hold layers in an nnx.List, or raise sys.setrecursionlimit",
        ) from error
    return made, Report(tuple(copied.entries.values()))


class _Copy:
    """Copies whatever holds modules, each object once."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.entries: dict[Any, Entry] = {}

    def of(self, value: Any, path: tuple[str, ...]) -> Any:
        """The value for the new model: the same object if it holds no module."""
        if id(value) in self.made:
            if entry := self.entries.get(id(value)):  # another path to the same object
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
            why = "a function that holds a module: it calls the original module, in its modes"
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
        """Adds an entry to the report."""
        self.entries[key] = Entry(_joined(path), name, swapped, why)

    def note_others(self, model: nnx.Module) -> None:
        """Adds an entry for each layer of Flax that was not reached."""
        for path, module in nnx.iter_graph(model):
            if type(module) in SWAPPED and id(module) not in self.made:
                why = "it is in a container other than a list, dict or tuple"
                where = tuple(map(str, path))
                self.note(id(module), where, type(module).__name__, False, why)

    def note_function(self, value: Any, path: tuple[str, ...]) -> None:
        """Adds an entry for a function that a user's module holds and ``ops`` has, too."""
        inner = value.func if isinstance(value, functools.partial) else value
        for function, ours in _FUNCTIONS:
            if inner is function:
                why = f"your own module holds it: jax_cudnn.ops.{ours} can replace it"
                self.note(path, path, function.__name__, False, why)


def _holds_a_module(value: Any, seen: set[int]) -> bool:
    """Whether a function reaches a module: it is bound to one, wraps one, or has one as a default,
    in its closure or in a global that it uses; a callable object, in an attribute."""
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
        held += [x for x in named if isinstance(x, nnx.Module)]  # not through global functions
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
    """Whether a module is replaced, and why not (or when Flax computes a part of it); None for
    modules that the report leaves out."""
    kind = type(module)
    if ours is not None or isinstance(module, Layer):
        layer: Layer = module if ours is None else ours
        return not layer.kept, layer.kept or layer.remark or ""
    if why := taken(module):
        return False, why
    if bases := [base.__name__ for base in kind.__mro__ if base in SWAPPED]:
        return False, f"a class derived from {bases[0]}: it may compute something else"
    if isinstance(module, nnx.Module) and kind.__module__.startswith("flax.nnx.nn."):
        return False, "jax_cudnn has no such layer"
    return None


_ADVICE = {
    "flax.linen": "pass jax_cudnn.ops.attention_fn, dot_general and conv_general_dilated to "
    'Linen\'s layers ("Flax Linen" in docs/flax_and_others.md)',
    "equinox": "call jax_cudnn.ops in an equinox.Module of your own "
    '("Equinox" in docs/flax_and_others.md)',
    "haiku": "call jax_cudnn.ops in a haiku.Module of your own "
    '("Haiku" in docs/flax_and_others.md)',
}
"""What to do with a model of another framework."""


def _framework(model: Any) -> str | None:
    """The framework that defines a model, or the model that a method or a wrapper holds: known by
    the names of modules, so that the framework is not imported."""
    while model is not None:
        for kind in (model, *type(model).__mro__, *getattr(model, "__mro__", ())):
            for name in _ADVICE:
                if f"{getattr(kind, '__module__', '')}.".startswith(f"{name}."):
                    return name
        held = (getattr(model, name, None) for name in ("__self__", "__wrapped__", "func"))
        model = next((inner for inner in held if inner is not None), None)
    return None


def _check_module(model: Any) -> None:
    if isinstance(model, nnx.Pytree):
        return
    fix = "pass the module itself, as its class or nnx.merge returns it"
    if framework := _framework(model):
        fix = _ADVICE[framework]
    kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise GraphTypeError(
        "jax_cudnn.flax takes modules of Flax NNX",
        expected="an nnx.Module",
        got=kind,
        fix=fix,
    )
