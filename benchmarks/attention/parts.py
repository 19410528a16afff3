"""What several cases have in common: names of sides, operands, sides in plain JAX and PyTorch."""

from __future__ import annotations

import jax.numpy as jnp

from ..models.cases import Operand
from . import torch_sides
from .case import Array, Named, Side
from .formulations import Attended, by_blocks, in_jax_nn, plain, recomputed

JAX_NN = "jax.nn cudnn"
_IN_MEMORY = 2**32  # bytes of all scores in float32; with more, going by blocks is faster


def qkv(batch: int, size: int, heads: int, served: int, width: int) -> dict[str, Operand]:
    return {
        "q": Operand((batch, size, heads, width)),
        "k": Operand((batch, size, served, width)),
        "v": Operand((batch, size, served, width)),
    }


def xla(of: Attended, q: Operand) -> dict[str, Side]:
    """Formulations: those that hold all scores where they might be faster."""
    batch, size, heads, _ = q.shape
    found = {"by blocks": Side(by_blocks(of))}
    if 4 * batch * heads * size**2 <= _IN_MEMORY:
        name = "in jnp" if of.softcap is not None else "jax.nn xla"
        whole = plain(of) if of.softcap is not None else in_jax_nn(of, "xla")
        found |= {name: Side(whole), f"{name}, checkpoint": Side(recomputed(whole))}
    return found


def exact(of: Attended) -> Side:
    return Side(by_blocks(of, precision="highest"))


def sdpa(backend: str, causal: bool, served: int, learned: bool = True) -> list[Side]:
    """With K heads of keys and values, or, where a backend takes no such, with all N. Of a bias
    that is not ``learned`` there is no gradient, and so no backward of all operands."""
    function = torch_sides.sdpa(backend, causal, learned)

    def repeated(operands: Named) -> Named:
        heads = operands["q"].shape[2]
        more = {n: jnp.repeat(operands[n], heads // served, 2) for n in ("k", "v")}
        return {**operands, **more}

    def summed(results: Named) -> Named:
        return {n: _summed(x, served) if n in ("k", "v") else x for n, x in results.items()}

    return [Side(function, backward=learned), Side(function, repeated, summed, backward=learned)]


def _summed(x: Array, served: int) -> Array:
    grouped = x.reshape(*x.shape[:2], served, -1, x.shape[3])
    return jnp.sum(grouped.astype(jnp.float32), 3)
