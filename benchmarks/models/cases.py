"""Named cases from real models: a graph, and the best that XLA is known to do with the same.

Both sides take the arrays that a JAX model holds: images channels-last (NHWC, NDHWC), matrices
row-major. Weights and results of ``wgrad`` may have the order each side likes best, because a
model can hold them so; `Formulation.prepare` and `finish` reorder them outside the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn.commands.bench import drawn
from jax_cudnn.commands.comparison import Formulation


@dataclass(frozen=True)
class Operand:
    """An array of a case: random normal numbers times ``scale`` plus ``offset``, or integers up
    to 127."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    scale: float = 1.0
    offset: float = 0.0

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def array(self, key: jax.Array) -> jax.Array:
        return drawn(key, self.aval, self.scale, self.offset)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ModelCase:
    """A computation of a real model, as a graph and as plain JAX.

    Attributes:
        name: ``model/shape/part``.
        model: where the shape is from.
        part: what it computes, such as "dgrad" or "scale, bias, relu".
        ours: the graph on the model's arrays, as a function or a Formulation.
        xla: formulations in plain JAX, by name; the fastest one is the opponent.
        operands: what both sides get; `Formulation.prepare` may reorder them.
        small: the same case with small shapes, which tests run on a CPU.
    """

    name: str
    model: str
    part: str
    ours: Callable[..., Any]
    xla: Mapping[str, Formulation]
    operands: tuple[Operand, ...]
    small: ModelCase | None = None

    @property
    def functions(self) -> dict[str, Formulation]:
        """Ours first, as :func:`compare` takes them."""
        ours = self.ours if isinstance(self.ours, Formulation) else Formulation(self.ours)
        return {"jax_cudnn": ours, **self.xla}

    @property
    def what(self) -> str:
        return " ".join(map(str, self.operands))

    @property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(operand.aval for operand in self.operands)

    def arrays(self, key: jax.Array) -> list[jax.Array]:
        """Random operands, the same for the same key."""
        keys = jax.random.split(key, len(self.operands))
        return [operand.array(k) for operand, k in zip(self.operands, keys, strict=True)]


def model_cases() -> tuple[ModelCase, ...]:
    """All cases, in the order of the table."""
    from . import convs, matmuls, streams  # they import ModelCase from here

    return (*convs.cases(), *matmuls.cases(), *streams.cases())
