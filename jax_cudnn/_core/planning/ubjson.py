"""Decoder of UBJSON as ``graph.serialize()`` writes it: containers without counts and types."""

from __future__ import annotations

import io
import struct
from typing import Any

_NUMBERS = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q", "d": ">f", "D": ">d"}
_CONSTANTS = {"Z": None, "T": True, "F": False}


def decode(data: bytes) -> Any:
    """The Python value of a UBJSON document; ValueError when it is not one."""
    file = io.BytesIO(data)
    try:
        value = _value(file, _marker(file))
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a UBJSON document: {error!r} at byte {file.tell()}") from error
    if file.read(1):
        raise ValueError(f"not a UBJSON document: bytes follow byte {file.tell() - 1}")
    return value


def _marker(file: io.BytesIO) -> str:
    return file.read(1).decode("latin1")


def _value(file: io.BytesIO, marker: str) -> Any:
    if marker == "[":
        return [_value(file, kind) for kind in iter(lambda: _marker(file), "]")]
    if marker == "{":
        names = (_text(file, kind) for kind in iter(lambda: _marker(file), "}"))
        return {name: _value(file, _marker(file)) for name in names}
    if marker in ("S", "H"):
        return _text(file, _marker(file))
    return _CONSTANTS[marker] if marker in _CONSTANTS else _number(file, marker)


def _number(file: io.BytesIO, marker: str) -> Any:
    form = _NUMBERS[marker]
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _text(file: io.BytesIO, marker: str) -> str:
    size = _number(file, marker)
    return struct.unpack(f"{size}s", file.read(size))[0].decode()
