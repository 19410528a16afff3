"""All exceptions of this package: each says what was expected, what was got, why, and the fix."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Iterable
from typing import Any

import jax
import numpy as np


class JaxCudnnError(Exception):
    """Base of every error this package raises on purpose.

    ``expected``, ``got``, ``why`` and ``fix`` are the parts of the message, kept as attributes
    so that tools can use them.
    """

    def __init__(
        self,
        summary: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        where: str | None = None,
    ):
        self.summary, self.expected, self.got = summary, expected, got
        self.why, self.fix, self.where = why, fix, where
        super().__init__(summary)

    def __str__(self) -> str:
        parts = [self.summary]
        for label in ("expected", "got", "why", "where", "fix"):
            text = getattr(self, label)
            if text:
                title = {"fix": "what to do", "where": "at"}.get(label, label)
                parts.append(f"  {title}: {text}")
        return "\n".join(parts)

    def __reduce__(self):
        # Errors cross the pipe of the planning worker; keyword arguments must survive pickling.
        return rebuild, (type(self), self.__dict__.copy())


def rebuild(cls: type[JaxCudnnError], state: dict) -> JaxCudnnError:
    """An error of another process from its class and attributes."""
    error = cls.__new__(cls)
    Exception.__init__(error, state.get("summary", ""))
    error.__dict__.update(state)
    return error


class GraphError(JaxCudnnError, ValueError):
    """An invalid graph: a wrong shape, rank, attribute or port."""


class GraphTypeError(JaxCudnnError, TypeError):
    """A value of the wrong type: a wrong dtype, or not a graph tensor."""


class GraphAttributeError(GraphTypeError, AttributeError):
    """An array attribute accessed on a graph tensor."""


class UnsupportedGraphError(JaxCudnnError, NotImplementedError):
    """cuDNN has no engine for this graph on this GPU.

    ``graph`` is the printed graph, ``reasons`` maps each engine (or step) to cuDNN's reason, the
    most telling one first; ``reason`` is that one.
    """

    def __init__(
        self,
        summary: str,
        *,
        graph: str = "",
        reasons: dict[str, str] | None = None,
        **parts: str | None,
    ):
        super().__init__(summary, **parts)
        self.graph, self.reasons = graph, reasons or {}

    @property
    def reason(self) -> str:
        return next(iter(self.reasons.values()), "") or self.why or self.summary

    def __str__(self) -> str:
        text = super().__str__()
        if self.reasons:
            lines = "\n".join(f"    {engine}: {reason}" for engine, reason in self.reasons.items())
            text += f"\n  cuDNN's reasons:\n{lines}"
        if self.graph:
            text += "\n  graph:\n" + "\n".join("    " + line for line in self.graph.splitlines())
        return text


class TargetError(JaxCudnnError, ValueError):
    """No GPU to plan for: none in the compilation and no ``jax_cudnn.target``, or mixed models."""


class LibraryError(JaxCudnnError, RuntimeError):
    """cuDNN, its frontend or this package's binary is missing, or two copies disagree."""


class LibraryImportError(LibraryError, ImportError):
    """A part of this package needs a library that is missing or too old."""


class LibraryAttributeError(LibraryError, AttributeError):
    """The same error when that part is accessed as an attribute of the package."""


class PlanningError(JaxCudnnError, RuntimeError):
    """Planning failed for a reason that may pass, such as too little memory: nothing is stored."""


class PlanningWorkerError(PlanningError):
    """The subprocess that plans without a GPU failed; its output is part of the message."""


class JobError(JaxCudnnError, RuntimeError):
    """The processes of a jax.distributed job did not agree on a plan in time."""


def shown(value: Any) -> str:
    """A wrong value as an error states it: one line of at most 200 characters, an array as dtype
    and shape."""
    with contextlib.suppress(TypeError, ValueError):  # dictionaries whose keys have no order
        value = jax.tree.map(_brief, value)
    plain = value is None or isinstance(value, (str, int, float, list, tuple, dict, _Text))
    return " ".join(f"{'' if plain else f'{type(value).__name__}: '}{value!r}".split())[:200]


class _Text(str):
    __repr__ = str.__str__


def _brief(leaf: Any) -> Any:
    if isinstance(leaf, np.generic):
        return leaf.item()
    array = hasattr(leaf, "dtype") and hasattr(leaf, "nbytes")
    return _Text(f"{leaf.dtype}{list(leaf.shape)} array") if array else leaf


def one_of(what: str, value: Any, known: Collection[str]) -> str:
    """A name, given as such or as an enum's member; GraphError if it is not one of the known."""
    name = getattr(value, "name", value)
    if isinstance(name, str) and name in known:
        return name
    raise GraphError(
        f"unknown {what}",
        expected=", ".join(map(repr, known)),
        got=shown(value),
        fix=nearest(value, known),
    )


def nearest(given: Any, names: Iterable[str], otherwise: str | None = None) -> str | None:
    """What to do about an unknown name: "did you mean 'gelu'?", or ``otherwise``."""
    known = {name.lower(): name for name in names}
    part = given.lower() if isinstance(given, str) else ""
    near = [name for name in known if part and name.startswith(part)][:3]
    near = near or difflib.get_close_matches(part, known, n=2)
    return f"did you mean {' or '.join(repr(known[n]) for n in near)}?" if near else otherwise
