"""What is found: equations, and the function that takes their place."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import compat
from .values import CUSTOM, ELEMENTWISE, Call, Equation, Value, run_together

_CHEAP = ("transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "iota", "slice")


@dataclass(frozen=True)
class Backward:
    """The derivative of a region, where the program has it: from the cotangent of the result, as
    ``to_output`` brings it to the result's shape, to ``gradients``: values of the program, of which
    input each is the gradient, and what brings that to the value's shape."""

    equations: set[Equation]
    cotangent: Value
    to_output: Callable[[Any], Any]
    gradients: list[tuple[Value, int, Callable[[Any], Any]]]

    @property
    def values(self) -> list[Value]:
        return [value for value, *_ in self.gradients]

    @property
    def first(self) -> Equation:
        made = (value.made_by for value in self.values)
        return min((e for e in made if e is not None), key=lambda e: e.at)


@dataclass(eq=False, repr=False)
class Region:
    """Equations with one result, ``output``, which ``emit(*inputs)`` computes instead; with
    ``backward`` those of its derivative, too."""

    kind: str
    equations: set[Equation]
    inputs: list[Value]
    output: Value
    emit: Callable[..., Any]
    what: str = ""
    outcome: str = ""
    """Why XLA runs it; empty where cuDNN does."""
    gain: str = ""
    """XLA's time over cuDNN's, and whether it was measured."""
    backward: Backward | None = None
    _order: list[Equation] = field(init=False)

    def __post_init__(self) -> None:
        given = len(self.inputs)
        emit, inputs = self.emit, {*self.inputs}
        everything, todo = {*self.equations}, [*self.equations]
        while todo:  # what the equations read and the inputs are before, as a scale or a mask
            for value in todo.pop().ins:
                made = value.made_by
                if value in inputs or value.known is not None or made in everything:
                    continue
                if made is not None and (made.name in ELEMENTWISE or made.name in _CHEAP):
                    everything.add(made)
                    todo.append(made)
                else:
                    inputs.add(value)
                    self.inputs = [*self.inputs, value]
        self._order = sorted(everything, key=lambda e: e.at)
        self.emit = lambda *arrays: emit(*arrays[:given])

    def __repr__(self) -> str:
        return f"<{self.kind}: {self.what}>"

    @property
    def last(self) -> Equation:
        assert self.output.made_by is not None
        return self.output.made_by

    @property
    def first(self) -> Equation:
        return min(self.equations, key=lambda e: e.at)

    @property
    def replaced(self) -> set[Equation]:
        return self.equations | (self.backward.equations if self.backward else set())

    @property
    def reads(self) -> list[Value]:
        """The inputs, and the cotangent of the result."""
        return [*self.inputs, *([self.backward.cotangent] if self.backward else ())]

    @property
    def outputs(self) -> list[Value]:
        return [self.output, *(self.backward.values if self.backward else ())]

    @property
    def inside(self) -> set[Value]:
        """What the equations compute and nothing else reads."""
        return {v for e in self.replaced for v in e.outs} - {*self.outputs}

    @property
    def is_differentiated(self) -> bool:
        """Whether its derivative is a part of the same program."""
        return any(e.is_differentiated for e in self.equations)

    @property
    def rounds(self) -> bool:
        """Whether a value inside has fewer bits than float32."""
        floats = [v.dtype for v in self.inside if jnp.issubdtype(v.dtype, jnp.floating)]
        return any(dtype.itemsize < 4 for dtype in floats)

    def signature(self, place: str) -> Hashable:
        """Equal for regions of which the same is to be decided, and whose results the same function
        computes: those of one line with equal equations."""
        at: dict[Value, Hashable] = {}
        key: list[Hashable] = [place, self.kind, self.what]
        for i, value in enumerate(self.inputs):
            at[value] = i
            key.append((value.aval, value.varies, None if value.depth is None else id(value)))
        for i, e in enumerate(self._order):
            ins = (at[v] if v in at else _identity(v) for v in e.ins)
            key.append((e.name, *e.params.items(), *ins))
            at |= {v: (i, j) for j, v in enumerate(e.outs)}
        if self.backward is not None:
            key += [(v.aval, i) for v, i, _ in self.backward.gradients]
        return *key, at[self.output], self.output.aval

    def differentiated(self, *arrays: Any) -> tuple[Any, Callable[[Any], list[Any]]]:
        """The result, and a function of its cotangent that computes the gradients."""
        assert self.backward is not None
        backward = self.backward
        moving = sorted({i for _, i, _ in backward.gradients})

        def of(*given: Any) -> Any:
            filled = dict(zip(moving, given, strict=True))
            return self.emit(*(filled.get(i, x) for i, x in enumerate(arrays)))

        out, pull = jax.vjp(of, *(arrays[i] for i in moving))

        def gradients(cotangent: Any) -> list[Any]:
            found = dict(
                zip(moving, pull(backward.to_output(cotangent).astype(out.dtype)), strict=True)
            )
            return [
                as_aval(renamed(found[i]), value.aval) for value, i, renamed in backward.gradients
            ]

        return out, gradients

    def original(self, *arrays: Any) -> Any:
        """What the equations compute of the inputs; JAX's own functions with their derivative."""
        env = dict(zip(self.inputs, arrays, strict=True))
        done: set[Call] = set()
        for equation in self._order:
            own = next((c for c in equation.calls if c.eqn.primitive.name == CUSTOM), None)
            if own is not None and all(v in env or v.known is not None for v in own.ins):
                if own not in done:
                    run_together([own], env)
                    done.add(own)
            elif not {*equation.outs} <= env.keys():
                run_together([equation], env)
        return env[self.output]


def _identity(value: Value) -> Hashable:
    """Equal for equal numbers, and for one and the same array."""
    known = value.known
    if known is None or value.shape or not isinstance(value.dtype, np.dtype):
        return id(value if known is None else known)
    return value.dtype, np.asarray(known).tobytes()


def as_aval(x: Any, aval: Any) -> Any:
    """An array of the type of the value that it replaces."""
    if x.shape != aval.shape:
        x = jnp.reshape(x, aval.shape)
    axes = compat.varying_axes(aval) - compat.varying_axes(jax.typeof(x))
    x = jax.lax.pcast(x, tuple(axes), to="varying") if axes else x
    return compat.converted(x, aval.dtype, aval.weak_type)
