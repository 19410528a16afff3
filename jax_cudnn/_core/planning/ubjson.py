"""Decoder of UBJSON (draft 12, with optimised containers), the format of ``graph.serialize()``."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q", "d": ">f", "D": ">d"}
_CONSTANTS = {"Z": None, "N": None, "T": True, "F": False}


def decode(data: bytes) -> Any:
    """The Python value of a UBJSON document; ValueError when it is not one."""
    try:
        reader = _Reader(data)
        value = reader.value(reader.marker())
        if reader.at != len(data):
            raise KeyError(f"{len(data) - reader.at} bytes follow it")
        return value
    except (IndexError, struct.error, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a UBJSON document: {error!r}") from error


class _Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise IndexError("document is cut short")
        self.at += size
        return self.data[self.at - size : self.at]

    def marker(self) -> str:
        return self.take(1).decode("latin1")

    def passes(self, marker: str) -> bool:
        """Whether the next byte is this one, which is then read."""
        found = self.data[self.at : self.at + 1] == marker.encode()
        self.at += found
        return found

    def number(self, marker: str) -> Any:
        form = _NUMBERS[marker]
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number(self.marker())).decode("utf-8")

    def value(self, marker: str) -> Any:
        if marker in _NUMBERS:
            return self.number(marker)
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        if marker in "SH":
            return self.text()
        if marker == "C":
            return self.marker()
        if marker == "[":
            return list(self.items("]", lambda kind: self.value(kind or self.marker())))
        if marker == "{":
            pair = lambda kind: (self.text(), self.value(kind or self.marker()))  # noqa: E731
            return dict(self.items("}", pair))
        raise KeyError(f"unknown marker {marker!r} at byte {self.at}")

    def items(self, end: str, item: Callable[[str | None], Any]) -> Iterator[Any]:
        kind = self.marker() if self.passes("$") else None
        if self.passes("#"):
            yield from (item(kind) for _ in range(self.number(self.marker())))
        else:
            while not self.passes(end):
                yield item(kind)
