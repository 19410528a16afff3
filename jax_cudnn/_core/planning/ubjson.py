"""Decoder of UBJSON (draft 12, with optimised containers), the format of ``graph.serialize()``."""

from __future__ import annotations

import struct
from typing import Any

_NUMBERS = {"i": ">b", "U": ">B", "I": ">h", "l": ">i", "L": ">q", "d": ">f", "D": ">d"}
_CONSTANTS = {"Z": None, "N": None, "T": True, "F": False}


def decode(data: bytes) -> Any:
    """The Python value of a UBJSON document; ValueError when it is not one."""
    try:
        reader = _Reader(data)
        value = reader.value()
        if reader.at != len(data):
            raise KeyError(f"{len(data) - reader.at} bytes follow it")
        return value
    except (IndexError, struct.error, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a UBJSON document: {error!r}") from error


class _Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def marker(self) -> str:
        self.at += 1
        return chr(self.data[self.at - 1])

    def peek(self) -> str:
        return chr(self.data[self.at])

    def take(self, size: int) -> bytes:
        if size < 0 or self.at + size > len(self.data):
            raise IndexError("document is cut short")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, marker: str) -> Any:
        form = _NUMBERS[marker]
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        return self.take(self.number(self.marker())).decode("utf-8")

    def value(self, marker: str | None = None) -> Any:
        marker = marker or self.marker()
        if marker in _NUMBERS:
            return self.number(marker)
        if marker in _CONSTANTS:
            return _CONSTANTS[marker]
        if marker in "SH":
            return self.text()
        if marker == "C":
            return self.take(1).decode("latin1")
        if marker == "[":
            return list(self.items("]", self.value))
        if marker == "{":
            return dict(self.items("}", lambda kind: (self.text(), self.value(kind))))
        raise KeyError(f"unknown marker {marker!r} at byte {self.at}")

    def items(self, end: str, item: Any) -> Any:
        kind = count = None
        if self.peek() == "$":
            self.at += 1
            kind = self.marker()
        if self.peek() == "#":
            self.at += 1
            count = self.number(self.marker())
        if count is not None:
            for _ in range(count):
                yield item(kind)
            return
        while self.peek() != end:
            yield item(kind)
        self.at += 1
