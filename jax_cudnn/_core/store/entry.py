"""The file format of the plan cache: how an entry becomes bytes, and what bytes are not one.

A line with a magic, the format and the SHA-256 of the rest; then compressed JSON of key, label and
value. JSON, and no pickle: reading an entry runs nothing of it. Yet a value is a plan, and a plan
holds code for the GPU, which a checksum does not make harmless. Import an archive, and use a folder
that others can write to, only if you trust them as you trust a program that you install. What a
value says is checked in ``planning/stored.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
LARGEST = 2**21  # bytes of an entry, also of its JSON; of 1300 plans the largest has 430 KB
MOST = 2**16  # values in its JSON, counted by the marks before them; those plans have up to 2300
STEPS = "steps"  # the key of what whole steps have chosen
NAME = re.compile(r"([0-9a-f]{64})\.plan")
_MAGIC = b"jax_cudnn plan"
_HEADER = re.compile(re.escape(_MAGIC) + rb" (\d{1,9}) ([0-9a-f]{64})\n")


class Unusable(Exception):
    """Why bytes are not an entry."""


class Content(NamedTuple):
    """What an entry holds; ``label`` says to humans what it is."""

    key: str
    value: dict[str, Any]
    label: str


Check = Callable[[Content], object]
"""Raises Unusable for an entry whose value does not fit its key."""


def digest(key: str) -> str:
    """The name of a key's entry: its SHA-256, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


def encode(content: Content) -> bytes:
    """Its file. Raises Unusable if it is too large to be read back."""
    text = json.dumps(content._asdict(), separators=(",", ":")).encode()
    check_size(text)
    body = zlib.compress(text)
    return b"%s %d %s\n" % (_MAGIC, FORMAT, checksum(body)) + body


def decode(data: bytes, name: str) -> Content:
    """The entry whose key has this digest; raises Unusable for whatever else it can be."""
    header = _HEADER.match(data)
    if header is None:
        incomplete = _MAGIC.startswith(data[: len(_MAGIC)])
        raise Unusable("damaged: no header" if incomplete else "foreign: no entry of this cache")
    version, body = int(header[1]), data[header.end() :]
    if version != FORMAT:
        age = "older" if version < FORMAT else "newer"
        raise Unusable(f"{age}: format {version}, read is {FORMAT}")
    if checksum(body) != header[2]:
        raise Unusable("damaged: not the bytes that were written")
    try:
        text = zlib.decompressobj().decompress(body, LARGEST + 1)
        check_size(text)
        fields = parsed(text)
        content = Content(fields["key"], fields["value"], fields["label"])
    except (zlib.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Unusable(f"damaged: no entry inside ({error!r:.200})") from error
    if not all(map(isinstance, content, (str, dict, str))):
        raise Unusable("damaged: no entry inside")
    if digest(content.key) != name:
        raise Unusable("foreign: the entry of another key")
    return content


def parsed(text: bytes) -> Any:
    """JSON that has a UTF-8 form, without NaN; ValueError or RecursionError for anything else."""
    found = json.loads(text.decode(), parse_constant=_no_number)
    if b"\\u" in text:  # it may stand for half of a character, a lone surrogate
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_size(text: bytes, times: int = 1) -> None:
    """Raises Unusable for JSON of more than ``times`` the largest entry, before it is parsed."""
    marks = sum(map(text.count, (b",", b"[", b"{")))
    largest, most = times * LARGEST, times * MOST
    if len(text) > largest or marks > most:
        raise Unusable(
            f"too large: {len(text)} bytes and {marks} values, at most {largest} and {most}"
        )


def read(path: Path) -> bytes:
    """At most ``LARGEST`` bytes of a regular file; nothing waits for a pipe, or reads a device."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise Unusable("foreign: no file")
    with open(path, "rb") as file:
        return file.read(LARGEST)


def checksum(body: bytes) -> bytes:
    """Its SHA-256, in hexadecimal."""
    return hashlib.sha256(body).hexdigest().encode()
