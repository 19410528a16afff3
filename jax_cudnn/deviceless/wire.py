"""Messages between the client and its worker: a length and a pickle, over a socket."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("!Q")


def pack(message: Any) -> bytes:
    """One message, ready to be sent. Raises what ``pickle.dumps`` raises."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, packed: bytes, deadline: float | None = None) -> None:
    """Send a packed message. Raises ``EOFError`` if the other side is gone, ``TimeoutError`` if it
    does not receive it before ``deadline`` (of ``time.monotonic``)."""
    _limit(connection, deadline)
    try:
        connection.sendall(packed)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise EOFError("the other side closed the connection") from error


def receive(connection: socket.socket, deadline: float | None = None) -> bytes:
    """The next message's pickle. Raises like ``send``."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    return _read(connection, length, deadline)


def _read(connection: socket.socket, length: int, deadline: float | None) -> bytes:
    content = bytearray()
    while len(content) < length:
        _limit(connection, deadline)
        try:
            chunk = connection.recv(min(length - len(content), 1 << 20))
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError("the other side closed the connection")
        content += chunk
    return bytes(content)


def _limit(connection: socket.socket, deadline: float | None) -> None:
    left = None if deadline is None else deadline - time.monotonic()
    if left is not None and left <= 0:
        raise TimeoutError
    connection.settimeout(left)
