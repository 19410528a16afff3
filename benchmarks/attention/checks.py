"""What the sides of an attention are held against, and how far they are from it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_cudnn._core.errors import GraphError
from jax_cudnn.commands import agreement

from ..halves import halves
from ..sides import BACKWARD, TRAINING
from .case import AttentionCase, Named

_ROWS = 64  # of a head, that are compared together


def exact(case: AttentionCase, operands: Named) -> dict[str, Named]:
    """Results of each program in float32."""
    wide = {
        name: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        for name, x in operands.items()
    }
    dy = wide.pop("dy", None)

    @jax.jit
    def results(operands: Named, dy: Any) -> dict[str, Named]:
        if not case.learned:
            return {program: case.exact.function(**operands) for program in case.programs}
        half = halves(case.exact.function, operands, case.learned)
        trained = half.training(operands)
        return {
            TRAINING: {"y": trained[0]["y"]},
            BACKWARD: half.backward(half.saved(operands, trained), dy),
        }

    with jax.default_matmul_precision("highest"):
        found = jax.block_until_ready(results(wide, dy))
    return {program: case.shown(result) for program, result in found.items()}


def difference(got: Named, want: Named) -> agreement.Difference:
    """In the norm, and the worst of some rows of a head together, next to their own size and that
    of all: of causal attention the first rows are many times as large as the last ones, whose
    rounding says nothing of theirs."""
    figures = []
    for name, x in want.items():
        if got[name].shape != x.shape:
            raise GraphError(
                f"{name} has another shape", expected=str(x.shape), got=str(got[name].shape)
            )
        figures.append(tuple(map(float, _of_rows(got[name], x))))
    relative, worst = zip(*figures, strict=True)
    return agreement.Difference(agreement.largest(relative), agreement.largest(worst))


@jax.jit
def _of_rows(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of (B, S, N, H): relative errors of all, and the worst of some rows."""
    error, size = (_means(x) for x in (got.astype(jnp.float32) - want, want))
    whole = jnp.sqrt(jnp.mean(size)) + jnp.finfo(jnp.float32).tiny
    return jnp.sqrt(jnp.mean(error)) / whole, jnp.max(jnp.sqrt(error) / (jnp.sqrt(size) + whole))


def _means(x: jax.Array) -> jax.Array:
    """The mean square of some rows of each head."""
    rows = math.gcd(x.shape[1], _ROWS)
    return jnp.mean(jnp.square(x.reshape(x.shape[0], -1, rows, *x.shape[2:])), (2, 4))
