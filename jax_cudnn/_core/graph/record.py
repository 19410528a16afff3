"""A GraphSpec as data for ``json.dumps``, and back.

A value of the package is a list: its class, and its fields by name. A float that JSON has no number
for is ``["float", "inf"]``, ``"-inf"`` or ``"nan"``. Reading makes objects of
registered nodes and of the classes listed here only, and runs nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from .node import Node, registry

_PACKAGE = __name__.partition(".")[0]
_TUPLE, _FLOAT = "tuple", "float"
VALUES = {
    "_core.graph.by_reference": "Tangent Transposed Batched",
    "_core.graph.options": "Options",
    "_core.graph.spec": "GraphSpec Tensor Call Origin",
}
"""All classes that data may name, by module, apart from registered nodes; ``ops`` adds its own."""


def encoded(value: Any) -> Any:
    """A graph, a node, or what may be a field of these, as data; TypeError for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return [_FLOAT, str(float(value))]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [_TUPLE, [encoded(item) for item in value]]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.init and field.compare]
        return [
            _title(value),
            {field.name: encoded(getattr(value, field.name)) for field in fields},
        ]
    raise TypeError(f"{type(value).__name__} cannot be written down: {value!r}"[:200])


def decoded(data: Any) -> Any:
    """What :func:`encoded` was given; KeyError, TypeError or ValueError for other data."""
    if not isinstance(data, list):
        if isinstance(data, dict):
            raise ValueError("a value has no class")
        return data
    title, content = data
    if title == _TUPLE:
        return tuple(map(decoded, content))
    if title == _FLOAT:
        return float(content)
    return checked(_class(title)(**{name: decoded(item) for name, item in content.items()}))


def _title(value: Any) -> str:
    """A node by its operation, another class by its place in the package."""
    if isinstance(value, Node) and registry().get(value.method) is type(value):
        return value.method
    module = type(value).__module__.removeprefix(f"{_PACKAGE}.")
    return f"{module}:{type(value).__qualname__}"


def _class(title: Any) -> Any:
    if title in registry():
        return registry()[title]
    module, _, name = str(title).partition(":")
    if name not in VALUES.get(module, "").split():
        raise ValueError(f"this version has no value {title!r:.100}")
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)


def checked(value: Any) -> Any:
    """The dataclass; TypeError where a field holds something else than its annotation says."""
    for name, hint in _hints(type(value)).items():
        held = getattr(value, name)
        if not _fits(held, hint):
            raise TypeError(f"{type(value).__name__}.{name} is {held!r:.100}, which is not {hint}")
    return value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, localns={"Node": Node})  # which spec.py imports for types alone
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    arguments = get_args(hint)
    if get_origin(hint) in (types.UnionType, Union):
        return any(_fits(value, kind) for kind in arguments)
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[1:] == (...,):
            return all(_fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    kind = get_origin(hint) or hint
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)
