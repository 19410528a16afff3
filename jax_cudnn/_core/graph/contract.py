"""The contract of node classes, checked when they are registered."""

from __future__ import annotations

import dataclasses
import sys

from .dims import Dims
from .node import REGISTRY, Node


def check_contract(cls: type[Node]) -> None:
    """TypeError if a node class violates the contract; sets ``cls.ports``."""

    def check(condition: object, problem: str) -> None:
        if not condition:
            raise TypeError(f"node {cls.__name__}: {problem}")

    check(isinstance(getattr(cls, "method", None), str), "method must name pygraph's method")
    check(cls.method not in REGISTRY, f"{cls.method!r} is registered twice")
    check(dataclasses.is_dataclass(cls) and cls.__hash__, "must be a frozen dataclass")
    check(cls.reference is not Node.reference, "reference is missing")
    own = (cls.__dict__.get("__doc__") or "").strip()
    generated = f"{cls.__name__}("  # what dataclass writes where there is none
    stripped = sys.flags.optimize > 1  # python -OO removes docstrings
    check(stripped or (own and not own.startswith(generated)), "docstring is missing")
    check(cls.examples, "at least one example is needed")
    cls.ports = Dims.parse(cls.dims, cls.broadcast)
    letters = {axis for port in cls.ports.inputs for axis in port.axes}
    check(set(cls.batch.split()) <= letters, f"batch letters {cls.batch!r} are not in dims")
    for example in cls.examples:
        required = {port.name for port in cls.ports.inputs if not port.optional}
        fits = required <= {*example.inputs} <= {*cls.ports.input_names}
        check(fits, "an example's ports are wrong")
    check(cls.anchor or not cls.product, "a product is an anchor")
