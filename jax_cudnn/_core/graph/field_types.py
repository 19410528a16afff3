"""Whether the fields of a dataclass hold what their annotations say: those of one that was read."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, Union, get_args, get_origin, get_type_hints


def checked(value: Any) -> Any:
    """The dataclass; TypeError where a field holds something else than its annotation says."""
    for name, hint in _hints(type(value)).items():
        held = getattr(value, name)
        if not _fits(held, hint):
            raise TypeError(f"{type(value).__name__}.{name} is {held!r:.100}, which is not {hint}")
    return value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
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
