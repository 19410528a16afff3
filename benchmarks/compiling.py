"""Programs compiled side by side; what fails is told as data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import jax

Key = TypeVar("Key", bound=Hashable)


def compiled(
    programs: Mapping[Key, tuple[Callable[..., Any], tuple[Any, ...]]],
) -> tuple[dict[Key, Callable[[], Any]], dict[Key, str]]:
    """Each function compiled for its operands, bound to them and run once; and why some cannot."""
    lowered, failed = {}, {}
    for key, (function, operands) in programs.items():
        try:  # here and not in the threads below: JAX's contexts belong to a thread
            lowered[key] = jax.jit(function).lower(*operands)
        except Exception as error:
            failed[key] = told(error)
    with ThreadPoolExecutor(max_workers=max(len(lowered), 1)) as pool:
        futures = {key: pool.submit(program.compile) for key, program in lowered.items()}
    ready = {}
    for key, future in futures.items():
        try:
            call = partial(future.result(), *programs[key][1])
            jax.block_until_ready(call())
            ready[key] = call
        except Exception as error:
            failed[key] = told(error)
    return ready, failed


def told(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]
