"""Settings of the process: the plan cache, measuring, how long processes wait for each other."""

from __future__ import annotations

import os
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from .errors import GraphError, GraphTypeError, nearest, shown

_LARGEST = 2**63  # of seconds and bytes
_UNCHANGED: Any = ...  # None means something: no cache on disk
OFF, FAST, FULL = TUNING = ("off", "fast", "full")
VARIABLE = "JAX_CUDNN_TUNING"


@dataclass(frozen=True)
class Settings:
    """The values that ``configure`` sets."""

    plan_cache: Path | None
    plan_cache_bytes: int = 2**30
    job_timeout: float = 300.0
    tuning: str = "fast"
    tuning_seconds: float = 120.0


_given: dict[str, Any] = {}


def configure(
    *,
    plan_cache: str | os.PathLike[str] | None = _UNCHANGED,
    plan_cache_bytes: int = _UNCHANGED,
    job_timeout: float = _UNCHANGED,
    tuning: str = _UNCHANGED,
    tuning_seconds: float = _UNCHANGED,
) -> None:
    """Change settings of this process for all later plans; omitted settings keep their value.

    Args:
        plan_cache: the folder that keeps plans for later processes. Plans hold kernels that run on
            your GPU: let nobody else write there. None keeps plans in memory only. Default:
            ``jax_cudnn/plans`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``).
        plan_cache_bytes: the largest size of the folder in bytes; the least recently used plans
            are deleted first. Default: 1 GiB.
        job_timeout: how long, in seconds, a process of a ``jax.distributed`` job waits for the
            plans of the process that makes them. Default: 300.
        tuning: how implementation="auto" chooses where the GPU is in the process: "fast" measures
            the main ways to run a graph, about a second for most new graphs; "full" measures up to
            twelve engines of cuDNN, whatever they gain; "off" decides by the measurements that ship
            with the package, so that equal versions choose equally on every machine.
            Default: the environment variable ``JAX_CUDNN_TUNING``, else "fast".
        tuning_seconds: how long this process may measure in total; later graphs are decided as
            with "off". Default: 120.

    Raises:
        GraphTypeError: a value of the wrong type.
        GraphError: not a valid path, not a positive number, or no kind of tuning. All settings
            stay unchanged then.

    Example:
        >>> import jax_cudnn as jc
        >>> jc.configure(plan_cache="/scratch/plans", plan_cache_bytes=10**9)  # doctest: +SKIP
    """
    global _given
    changes: dict[str, Any] = {}
    if plan_cache is not _UNCHANGED:
        changes["plan_cache"] = None if plan_cache is None else _folder(plan_cache)
    if plan_cache_bytes is not _UNCHANGED:
        changes["plan_cache_bytes"] = _positive("plan_cache_bytes", plan_cache_bytes, Integral)
    if job_timeout is not _UNCHANGED:
        changes["job_timeout"] = _positive("job_timeout", job_timeout, Real)
    if tuning is not _UNCHANGED:
        changes["tuning"] = _tuning("tuning", tuning)
    if tuning_seconds is not _UNCHANGED:
        changes["tuning_seconds"] = _positive("tuning_seconds", tuning_seconds, Real)
    _given = {**_given, **changes}


def settings() -> Settings:
    """The current settings."""
    found = {"plan_cache": _default_folder(), **_given}
    if "tuning" not in found and (named := os.environ.get(VARIABLE)):
        found["tuning"] = _tuning(VARIABLE, named)
    return Settings(**found)


def _tuning(name: str, value: Any) -> str:
    if value not in TUNING:
        raise GraphError(
            f"{name} is not valid",
            expected=", ".join(map(repr, TUNING)),
            got=shown(value),
            fix=nearest(value, TUNING) or "use one of these, or leave it out",
        )
    return value


def _default_folder() -> Path | None:
    """The platform's cache folder; None for a user without a home."""
    import platformdirs

    folder = platformdirs.user_cache_path("jax_cudnn", appauthor=False) / "plans"
    return folder if folder.is_absolute() else None


def _folder(path: str | os.PathLike[str]) -> Path:
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise GraphTypeError(
            "plan_cache is not a folder",
            expected="a path, or None for plans in memory only",
            got=shown(path),
        )
    try:
        if not text or "\0" in text:
            raise ValueError
        return Path(text).expanduser().absolute()
    except (ValueError, RuntimeError):  # RuntimeError: ~ of an unknown user
        raise GraphError(
            "plan_cache is not a folder",
            expected="a path, or None for plans in memory only",
            got=repr(path),
        ) from None


def _positive(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise GraphTypeError(
            f"{name} is not valid",
            expected="a whole number" if kind is Integral else "a number",
            got=shown(value),
        )
    if not 0 < value < _LARGEST:
        raise GraphError(
            f"{name} is not valid", expected="more than 0, and finite", got=f"{name}={shown(value)}"
        )
    return int(value) if kind is Integral else float(value)
