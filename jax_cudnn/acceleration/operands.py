"""Operands of attention's products, as they were before casts, scales and repeats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from .scores import number
from .values import Equation, Value


@dataclass(frozen=True)
class Operand:
    """An operand of a product, before it was widened, scaled and repeated: ``at`` has the dimension
    of ``value`` for each of the operand's; ``groups``: how often it was repeated, by dimension."""

    value: Value
    at: tuple[int, ...]
    factor: float
    groups: tuple[int, ...]

    def arranged(self, x: Any, order: list[int], shape: tuple[int, ...]) -> Any:
        axes = [self.at[i] for i in order]
        rest = [i for i in range(x.ndim) if i not in axes]
        return jnp.transpose(x, (*rest, *axes)).reshape(shape)


def operand(value: Value, repeats: bool) -> Operand:
    """The operand that a value is; with ``repeats``, before heads were repeated."""
    at, factor, groups = (*range(len(value.shape)),), 1.0, [1] * len(value.shape)
    while (made := value.made_by) is not None:
        if made.name == "convert_element_type" and _is_wider(made.outs[0], made.ins[0]):
            value = made.ins[0]
        elif made.name in ("mul", "div") and value.shape:
            others = [(v, number(v)) for v in made.ins]
            arrays = [v for v, n in others if n is None]
            numbers = [n for _, n in others if n is not None]
            if len(arrays) != 1 or not numbers or arrays[0].shape != value.shape:
                break
            if made.name == "div" and (arrays[0] is not made.ins[0] or not numbers[0]):
                break
            factor = factor * numbers[0] if made.name == "mul" else factor / numbers[0]
            value = arrays[0]
        elif made.name == "transpose":
            at = tuple(made.params["permutation"][i] for i in at)
            value = made.ins[0]
        elif repeats and made.name == "reshape" and (found := _repeated(made)) is not None:
            source, places, times = found
            for i, j in enumerate(at):
                groups[i] *= times[j]
            at = tuple(places[j] for j in at)
            value = source
            repeats = False
        else:
            break
    return Operand(value, at, factor, tuple(groups))


def _is_wider(wide: Value, narrow: Value) -> bool:
    kinds = all(jnp.issubdtype(v.dtype, jnp.floating) for v in (wide, narrow))
    return kinds and wide.dtype.itemsize >= narrow.dtype.itemsize


def _repeated(reshape: Equation) -> tuple[Value, tuple[int, ...], tuple[int, ...]] | None:
    """``(x, dimension of x for each of the result's, how often each is repeated)``, for
    ``jnp.repeat`` along one dimension and for a broadcast that was flattened."""
    spread = reshape.ins[0].made_by
    if spread is None or spread.name != "broadcast_in_dim" or reshape.params["dimensions"]:
        return None
    source, wide, out = spread.ins[0], spread.outs[0].shape, reshape.outs[0].shape
    from_source = {
        axis: i
        for i, axis in enumerate(spread.params["broadcast_dimensions"])
        if source.shape[i] == wide[axis]
    }
    places, times, j = [], [], 0
    for size in out:
        if j < len(wide) and wide[j] == size and j in from_source:
            places.append(from_source[j])
            times.append(1)
            j += 1
        elif j + 1 < len(wide) and wide[j] * wide[j + 1] == size and j in from_source:
            if j + 1 in from_source and wide[j + 1] != 1:
                return None
            places.append(from_source[j])
            times.append(wide[j + 1])
            j += 2
        else:
            return None
    return (source, tuple(places), tuple(times)) if j == len(wide) else None
