"""Replace Flax's layers in a model, sharing its Variables; send its forward through
:func:`jax_cudnn.accelerate`, which finds what stands between the layers."""

from __future__ import annotations

import copy
import functools
import logging
import operator
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import jax
from flax import nnx
from jax import lax

from .._core.errors import GraphError, GraphTypeError
from .._core.text import aligned
from .layer import SWAPPED, Layer, replacement, shallow, taken

M = TypeVar("M", bound=nnx.Module)
log = logging.getLogger("jax_cudnn")
_FUNCTIONS = (
    (nnx.dot_product_attention, "attention_fn"),
    (jax.nn.dot_product_attention, "dot_product_attention"),
    (lax.dot_general, "dot_general"),
    (lax.conv_general_dilated, "conv_general_dilated"),
)
"""Functions that a user's module may hold, and those of ``ops`` that can replace them."""
_ADVICE = {
    "flax.linen": "pass jax_cudnn.ops.attention_fn, dot_general and conv_general_dilated to "
    'Linen\'s layers ("Flax Linen" in docs/flax_and_others.md)',
    "equinox": "call jax_cudnn.ops in an equinox.Module of your own "
    '("Equinox" in docs/flax_and_others.md)',
    "haiku": "call jax_cudnn.ops in a haiku.Module of your own "
    '("Haiku" in docs/flax_and_others.md)',
}
"""What to do with a model of another framework."""


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
    cls = type(made)
    layer = issubclass(cls, Layer) or cls in SWAPPED
    if callable(made) and not layer and not hasattr(cls, "_accelerated_forward"):
        made.__class__ = _derived(cls)
    return made


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


@dataclass(frozen=True)
class Entry:
    """One layer of a model, or one function that a module holds.

    Attributes:
        path: its path in the model, ``blocks.0.attention``; all paths, if it has several.
        name: the name of its class or of the function.
        swapped: whether the accelerated model has a layer of this package there.
        why: why not; for a swapped layer, when Flax computes a part of it.
    """

    path: str
    name: str
    swapped: bool
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The result of :func:`jax_cudnn.flax.report`: the layers that are swapped or kept, and why.

    Attributes:
        entries: in the model's order: layers of Flax and of this package, and functions that
            ``jax_cudnn.ops`` could replace. Modules of your own have no entry; their layers have.

    Example:
        >>> import jax_cudnn.flax as jnn
        >>> from flax import nnx
        >>> report = jnn.report(nnx.Embed(3, 4, rngs=nnx.Rngs(0)))
        >>> [(entry.name, entry.why) for entry in report.kept]
        [('Embed', 'jax_cudnn has no such layer')]
    """

    entries: tuple[Entry, ...]

    @property
    def swapped(self) -> tuple[Entry, ...]:
        """The entries with a layer of this package."""
        return tuple(entry for entry in self.entries if entry.swapped)

    @property
    def kept(self) -> tuple[Entry, ...]:
        """The entries that stay as they are."""
        return tuple(entry for entry in self.entries if not entry.swapped)

    def to_json(self) -> list[dict[str, Any]]:
        """The entries as plain data."""
        return [asdict(entry) for entry in self.entries]

    def __str__(self) -> str:
        """A table, followed by the counts."""
        head = ("path", "class", "swapped", "why")
        rows = [(e.path, e.name, "yes" if e.swapped else "no", e.why) for e in self.entries]
        return "\n".join(
            (*aligned([head, *rows]), f"{len(self.swapped)} swapped, {len(self.kept)} kept")
        )


def _copied(model: M) -> tuple[M, Report]:
    _check_module(model)
    copied = _Copy()
    try:
        made = copied.of(model, ())
        for path, module in nnx.iter_graph(model):
            if type(module) in SWAPPED and id(module) not in copied.made:
                why = "it is in a container other than a list, dict or tuple"
                copied.note(id(module), map(str, path), type(module).__name__, False, why)
    except RecursionError as error:
        raise GraphError(
            "the model's modules are nested too deeply",
            expected="a depth within Python's recursion limit",
            got=f"a limit of {sys.getrecursionlimit()}",
            fix="hold layers in an nnx.List, or raise sys.setrecursionlimit",
        ) from error
    return made, Report(tuple(copied.entries.values()))


class _Copy:
    """Copies whatever holds modules, each object once, and reports what it finds."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.entries: dict[Any, Entry] = {}

    def of(self, value: Any, path: tuple[str, ...]) -> Any:
        """The value for the new model: the same object if it holds no module."""
        if id(value) in self.made:
            if entry := self.entries.get(id(value)):  # another path to the same object
                where = f"{entry.path}, {'.'.join(path)}"
                self.entries[id(value)] = replace(entry, path=where)
            return self.made[id(value)]
        if isinstance(value, nnx.Variable):
            return value
        if isinstance(value, nnx.Pytree):
            return self.of_module(value, path)
        if isinstance(value, (list, dict)):
            made = self.made[id(value)] = copy.copy(value)
            for key, inner in enumerate(value) if isinstance(value, list) else value.items():
                made[key] = self.of(inner, (*path, str(key)))
            return made
        if isinstance(value, tuple):
            parts = [self.of(x, (*path, str(i))) for i, x in enumerate(value)]
            if all(map(operator.is_, parts, value)):
                return value
            cls: Any = type(value)
            return cls._make(parts) if hasattr(cls, "_make") else cls(parts)
        if isinstance(value, functools.partial):
            func, args = self.of(value.func, path), self.of(value.args, path)
            named = {name: self.of(x, (*path, name)) for name, x in value.keywords.items()}
            old = value.func, value.args, *value.keywords.values()
            same = all(map(operator.is_, (func, args, *named.values()), old))
            return value if same else type(value)(func, *args, **named)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nnx.Pytree):
            return types.MethodType(value.__func__, self.of(value.__self__, path))
        return value

    def of_module(self, module: Any, path: tuple[str, ...]) -> Any:
        cls, ours = type(module), replacement(module)
        if fate := _fate(module, ours):
            self.note(id(module), path, cls.__name__, *fate)
        swapped = ours is not None and not ours.kept
        made = self.made[id(module)] = ours if swapped else shallow(module, cls)
        flaxs = cls.__module__.startswith("flax.") or isinstance(module, (Layer, *SWAPPED))
        for name, inner in vars(module).items():
            if name.startswith("_pytree__"):
                continue
            where = (*path, name)
            function = inner.func if isinstance(inner, functools.partial) else inner
            for theirs, replaces in () if flaxs else _FUNCTIONS:
                if function is theirs:
                    why = f"your own module holds it: jax_cudnn.ops.{replaces} can replace it"
                    self.note(where, where, theirs.__name__, False, why)
            copied = self.of(inner, where)
            if copied is not inner:
                vars(made)[name] = copied
        return made

    def note(self, key: Any, path: Iterable[str], name: str, swapped: bool, why: str) -> None:
        """Adds an entry to the report."""
        self.entries[key] = Entry(".".join(path) or "model", name, swapped, why)


def _fate(module: nnx.Module, ours: Layer | None) -> tuple[bool, str] | None:
    """Whether a module is replaced, and why not (or when Flax computes a part of it); None for
    modules that the report leaves out."""
    layer: Any = module if isinstance(module, Layer) else ours
    if layer is not None:
        return not layer.kept, layer.kept or layer.remark or ""
    if why := taken(module):
        return False, why
    if bases := [base.__name__ for base in type(module).__mro__ if base in SWAPPED]:
        return False, f"a class derived from {bases[0]}: it may compute something else"
    if isinstance(module, nnx.Module) and type(module).__module__.startswith("flax.nnx.nn."):
        return False, "jax_cudnn has no such layer"
    return None


def _check_module(model: Any) -> None:
    if isinstance(model, nnx.Pytree):
        return
    kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise GraphTypeError(
        "jax_cudnn.flax takes modules of Flax NNX",
        expected="an nnx.Module",
        got=kind,
        fix=_advice(model) or "pass the module itself, as its class or nnx.merge returns it",
    )


def _advice(model: Any) -> str | None:
    """What to do with a model of another framework, or with a method or a wrapper of one. The names
    of modules tell, so that no framework is imported."""
    while model is not None:
        for cls in (model, *type(model).__mro__, *getattr(model, "__mro__", ())):
            for name, advice in _ADVICE.items():
                if f"{getattr(cls, '__module__', '')}.".startswith(f"{name}."):
                    return advice
        held = (getattr(model, name, None) for name in ("__self__", "__wrapped__", "func"))
        model = next((inner for inner in held if inner is not None), None)
    return None


class _Impure(Exception):
    """A forward does more than to compute results and to change Variables other than parameters."""


@functools.cache
def _derived(cls: type[M]) -> type[M]:
    """The class with an accelerated ``__call__``."""

    def __reduce_ex__(self: M, protocol: Any) -> Any:
        _, _, *state = object.__reduce_ex__(self, protocol)
        return (_made, (cls,), *state)  # pickle finds the class by its name

    own = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    own |= {"__call__": _forward(cls), "__reduce_ex__": __reduce_ex__, "_accelerated_forward": True}
    return type(cls)(cls.__name__, (cls,), own)


def _made(cls: type[nnx.Module]) -> Any:
    derived = _derived(cls)
    return derived.__new__(derived)


def _forward(cls: type[nnx.Module]) -> Callable[..., Any]:
    """``__call__`` of a class, which changes a model's Variables as the class itself does."""
    from ..acceleration.api import accelerate
    from ..acceleration.region import site

    @functools.wraps(cls.__call__, updated=())
    def pure(graph: Any, structure: Any, given: Any, args: Any, kwargs: Any) -> Any:
        weights, rest = jax.tree.unflatten(structure, given)  # Variables that no other model has
        model = nnx.merge(graph, weights, rest)
        results = cls.__call__(model, *args, **kwargs)
        after, *states = nnx.split(model, nnx.Param, ...)
        leaves, structure_after = jax.tree.flatten((*states,))
        count = len(jax.tree.leaves(states[0]))
        fits = (after, structure_after) == (graph, structure) and not _holds_modules(results)
        if not (fits and all(map(operator.is_, leaves[:count], given[:count]))):
            raise _Impure
        return results, leaves[count:]

    fast, left = accelerate(pure), set()

    @functools.wraps(cls.__call__, updated=())
    def forward(model: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if site() is None or _holds_modules((args, kwargs)):
            return cls.__call__(model, *args, **kwargs)
        graph, *states = nnx.split(model, nnx.Param, ...)
        given, structure = jax.tree.flatten((*states,))
        if (graph, structure) in left:
            return cls.__call__(model, *args, **kwargs)
        try:
            results, changed = fast(graph, structure, given, args, kwargs)
        except (_Impure, jax.errors.JAXTypeError) as error:
            why = "" if isinstance(error, _Impure) else f": {error}".partition("\n")[0]
            log.info("%s is called as it is: its forward is not pure%s", cls.__name__, why)
            left.add((graph, structure))
            return cls.__call__(model, *args, **kwargs)
        if not all(map(operator.is_, given[-len(changed) :], changed)):
            nnx.update(model, jax.tree.unflatten(jax.tree.structure(states[1]), changed))
        return results

    return forward


def _holds_modules(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (nnx.Pytree, nnx.Variable)))
    return any(isinstance(leaf, (nnx.Pytree, nnx.Variable)) for leaf in leaves)
