"""Messages between the client and its worker: a length and a pickle, over a socket."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!Q")
Wait = Callable[[int], object]
"""Called where a socket would block, with an event (``select.POLLIN`` or ``POLLOUT``): returns when
the socket has it, or raises."""


def _block(event: int) -> None:
    """For a blocking socket, which itself waits."""


def pack(message: Any) -> bytes:
    """One message, ready to be sent. Raises what ``pickle.dumps`` raises."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, packed: bytes, wait: Wait = _block) -> None:
    """Send a packed message. Raises ``EOFError`` if the other side is gone."""
    left = memoryview(packed)
    try:
        while left:
            try:
                left = left[connection.send(left) :]
            except BlockingIOError:
                wait(select.POLLOUT)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise EOFError("the other side closed the connection") from error


def receive(connection: socket.socket, wait: Wait = _block) -> bytes:
    """The next message's pickle. Raises like ``send``."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, wait))
    return _read(connection, length, wait)


def _read(connection: socket.socket, length: int, wait: Wait) -> bytes:
    content = bytearray()
    while len(content) < length:
        try:
            chunk = connection.recv(min(length - len(content), 1 << 20))
        except BlockingIOError:
            wait(select.POLLIN)
            continue
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError("the other side closed the connection")
        content += chunk
    return bytes(content)
