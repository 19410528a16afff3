"""The planning worker: ``python -m jax_cudnn._core.planning.deviceless.worker FD NULL_DRIVER``.

A process with the null driver in place of ``libcuda.so.1``, which must never use a GPU.
``client.py`` starts it; it answers over the connection ``FD`` and ends when the other side is gone.
A request is ``("package.module:function", args, kwargs)``; an answer is ``("ok", result)`` or
``("error", pickled exception or None, its type and traceback as text)``. The first message comes
without a request, once the worker is ready.

Its stdout and stderr are a file that the client owns, so nothing printed here, not even by cuDNN,
can get between the messages.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import select
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from ...errors import LibraryError


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    threading.Thread(target=_end_with_client, args=(connection.fileno(),), daemon=True).start()
    try:
        _load_null_driver(sys.argv[2])
    except Exception as error:
        connection.send(_failure(error))
        return
    connection.send(("ok", None))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(request)
        return pickle.dumps(("ok", resolve(function)(*args, **kwargs)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # sys.exit() in a planning function is its error, not our end
        return pickle.dumps(_failure(error))


def resolve(function: str) -> Any:
    """The object with the name ``"package.module:qualified.name"``."""
    module, _, name = function.partition(":")
    if not module or not name:
        raise ValueError(f"expected 'package.module:function', got {function!r}")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _failure(error: BaseException) -> tuple[str, bytes | None, str]:
    text = "".join(traceback.format_exception(error))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # many exceptions pickle, but cannot be made again
    except Exception:
        pickled = None
    return "error", pickled, text


def _load_null_driver(path: str) -> None:
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        pass
    else:
        raise LibraryError(
            "the planning worker already has a CUDA driver loaded",
            expected="a process without libcuda.so.1",
            why="without a GPU, cuDNN plans on the null driver, which must be the only one",
            fix="do not preload libcuda.so.1 (LD_PRELOAD, a sitecustomize module)",
        )
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _end_with_client(fd: int) -> None:
    # Registering no events leaves POLLHUP: the client closed its end or was killed. That may
    # happen while a plan is built, so this is a thread. No clean-up: that of cuDNN can hang.
    poll = select.poll()
    poll.register(fd, 0)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
