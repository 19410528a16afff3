"""What all sides of a case are held against: the same in float32, with exact products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .case import BACKWARD, Case, Named
from .halves import halves

# Without the tuning of kernels, which takes longer than the one run that is wanted of it.
UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0}


def exact(case: Case, operands: Named) -> dict[str, Named]:
    """Results of each program in float32."""
    found = jax.block_until_ready(lowered(case, operands).compile(UNTUNED)(operands))
    return {program: case.shown(result) for program, result in found.items()}


def lowered(case: Case, operands: Named) -> Any:
    """The program of :func:`exact`, of arrays or their shapes, before what is not looked at is
    made 0."""

    def results(operands: Named) -> dict[str, Any]:
        operands = jax.tree.map(_widened, operands)
        dy = operands.pop("dy", None)
        if case.whole:
            made = {name: make(case.exact.function) for name, make in case.whole.items()}
            return {name: function(**operands) for name, function in made.items()}
        if not case.learned:
            return dict.fromkeys(case.programs, case.exact.function(**operands))
        half = halves(case.exact.function, operands, case.learned)
        trained = half.training(operands)
        found = {BACKWARD: half.backward(half.saved(operands, trained), dy)}
        return {program: found.get(program, trained[0]) for program in case.programs}

    with jax.default_matmul_precision("highest"):
        return jax.jit(results).lower(operands)


def _widened(x: Any) -> Any:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
