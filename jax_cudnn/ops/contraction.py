"""Matrix products of arrays with any number of dimensions for rows, columns and the sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .._core.graph.dims import Dims, Shape
from .._core.graph.layout import packed_strides
from .._core.graph.node import LEAD, Node, frozen
from .._core.graph.promotion import computed
from .matrix import Matmul
from .products import alike

if TYPE_CHECKING:
    from .._core.graph.node import Tensors, Values
    from .._core.graph.tensor import GraphTensor
    from .._core.transforms.derivation import Derivation


@frozen
class Contraction(Matmul):
    """``lax.dot_general`` of arranged operands: A (batch, rows, depth), B (batch, depth, columns),
    C (batch, rows, columns), with this many dimensions of each.

    All dimensions stay apart, so that a mesh may shard each of them. Where cuDNN is planned, a
    matmul of three dimensions replaces this node (``wire.py``).
    """

    batched: int = 0
    rows: int = 1
    depth: int = 1
    columns: int = 1

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _ports(self.batched, self.rows, self.depth, self.columns)

    def flops(self, shapes: Mapping[str, Shape]) -> int:
        depth = shapes["A"][self.batched + self.rows :]
        return 2 * math.prod(shapes["C"]) * math.prod(depth)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> dict[str, GraphTensor]:
        operands = {port: tensors[port] for port in ("A", "B")}
        known = alike(g, {**inputs, **cotangents}, operands)
        (port,) = operands.keys() - inputs.keys()
        lead, tensor = self.batched, tensors[port]
        (batch, *others), ones = {x.shape[:lead] for x in known.values()}, (1,) * lead
        if port == "B" and tensor.shape[:lead] == ones != batch and not others:
            # The sum over the batch is one over rows.
            node = replace(self, batched=0, rows=lead + self.rows)
            like = {**tensors, "B": replace(tensor, shape=tensor.shape[lead:], order=None)}
            made = node.transpose(g, {"C": known["C"]}, {"A": known["A"]}, like)
            return {port: g.reshaped(made[port], tensor.shape)}
        if port == "A":
            first, shared = self.rows, self.columns
            sides = [(known["C"], self.rows), (known["B"], self.depth)]
        else:
            first, shared = self.depth, self.rows
            sides = [(known["A"], self.depth), (known["C"], self.columns)]
        # The cotangent has the memory order of its operand.
        lies_turned = tensor.order == _swapped(len(tensor.shape), lead, first)
        (left, rows), (right, columns) = sides[::-1] if lies_turned else sides
        if port == "A":
            right = _turned(g, right, lead, columns)
        else:
            left = _turned(g, left, lead, shared)
        node = replace(self, rows=rows, depth=shared, columns=columns)
        (out,) = g.apply(node, A=left, B=right)
        out = _turned(g, out, lead, rows) if lies_turned else out
        return {port: g.reduced(out, tensor.shape)}

    def folds(self, batched: frozenset[str], tensors: Tensors) -> Iterable[Mapping[str, int]]:
        at, ports = self.batched, ("A", "B", "C")
        if batched == {"A"} and not at:
            yield {"A": LEAD, "C": LEAD}  # further rows
        others = [tensors[port].shape[:at] for port in ports[:2] if port not in batched]
        if at and others == [(1,) * at]:
            yield dict.fromkeys(ports, 0)
        yield dict.fromkeys(ports, LEAD)
        if batched == {"A"} and at and self.rows:
            yield {"A": at, "C": at}
        if batched == {"B"} and self.columns:
            yield {"B": at + self.depth, "C": at + self.rows}

    def broadcasts(self, port: str, axis: int) -> bool:
        return not self.batched if axis == LEAD else axis < self.batched

    def folded(self, fold: Mapping[str, int], size: int, tensors: Tensors) -> Node:
        if fold["C"] != LEAD:
            return self
        name = "batched" if "B" in fold else "rows"
        return replace(self, **{name: getattr(self, name) + 1})

    def broadcast_to(self, tensors: Tensors) -> Mapping[str, Shape]:
        return {}

    def _multiplied(self, A: jax.Array, B: jax.Array, precision: Any) -> tuple[jax.Array, ...]:
        arrays = A, B
        letters = dict.fromkeys(axis for port in self.ports.inputs for axis in port.axes)
        number = {letter: i for i, letter in enumerate(letters)}
        given: list[Any] = []
        for x, other, port in zip(arrays, arrays[::-1], self.ports.inputs, strict=True):
            thin = tuple(i for i in range(self.batched) if x.shape[i] == 1 != other.shape[i])
            axes = [number[a] for i, a in enumerate(port.axes) if i not in thin]
            given += [jnp.squeeze(x, thin), axes]
        result = [number[a] for a in self.ports.outputs[0].axes]
        kind = self.accumulator
        y = jnp.einsum(*given, result, precision=precision, preferred_element_type=kind)
        return (y,)


def contracted(
    g: Any, a: GraphTensor, b: GraphTensor, *, batched: int, depth: int, orders: Any = (None, None)
) -> GraphTensor:
    """The product of arranged operands, in these memory orders."""
    for x, order in zip((a, b), orders, strict=True):
        if order is not None:
            x.set_stride(packed_strides(x.shape, order))
    rows, columns = a.ndim - batched - depth, b.ndim - batched - depth
    node = Contraction(batched=batched, rows=rows, depth=depth, columns=columns)
    inputs = {"A": a._state, "B": b._state}
    return g._append(computed(node, g._options.compute_data_type, inputs), inputs)


@functools.cache
def _ports(batched: int, rows: int, depth: int, columns: int) -> Dims:
    def letters(letter: str, count: int) -> str:
        return " ".join(f"{letter}{i}" for i in range(count))

    b, m, k, n = map(letters, "bmkn", (batched, rows, depth, columns))
    return Dims.parse(f"A: {b} {m} {k}, B: {b} {k} {n} -> C: {b} {m} {n}", b)


def _swapped(rank: int, lead: int, first: int) -> tuple[int, ...]:
    """The axes with the groups that follow the batch exchanged; ``first`` is the first's rank."""
    at = lead + first
    return (*range(lead), *range(at, rank), *range(lead, at))


def _turned(g: Derivation, x: GraphTensor, lead: int, first: int) -> GraphTensor:
    """An operand with its two groups exchanged, without a copy."""
    axes = _swapped(x.ndim, lead, first)
    order: Sequence[int] = x._state.order or range(x.ndim)
    return g.ordered(g.transposed(x, axes), tuple(axes.index(axis) for axis in order))
