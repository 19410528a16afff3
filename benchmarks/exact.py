"""What all sides of a case are held against: the same in float32, with exact products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .case import BACKWARD, Case, Named
from .halves import halves

# Without the tuning of kernels, which takes longer than the one run that is wanted of it.
_UNTUNED: dict[str, Any] = {"xla_gpu_autotune_level": 0}


def exact(case: Case, operands: Named) -> dict[str, Named]:
    """Results of each program in float32."""
    wide = jax.tree.map(
        lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, operands
    )
    dy = wide.pop("dy", None)

    def results(operands: Named, dy: Any) -> dict[str, Named]:
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
        program = jax.jit(results).lower(wide, dy).compile(_UNTUNED)
    found = jax.block_until_ready(program(wide, dy))
    return {program: case.shown(result) for program, result in found.items()}
