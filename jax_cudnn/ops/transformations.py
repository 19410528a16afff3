"""What nodes share: derivatives of products, and how a vmap dimension enters shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from .._core.graph.dims import Shape
from .._core.graph.dtypes import FP8
from .._core.graph.node import LEAD, Fold, Node
from .._core.rules import Derivation, GraphTensor, Tensor, Tensors, Values


def product_jvp(
    self: Node, g: Derivation, tangents: Values, inputs: Values, outputs: Values
) -> dict[str, GraphTensor]:
    """``Node.jvp`` of a product: the sum of one product per operand with a tangent.

    A plan holds one product. Later operations are fused into the plan of the first product; the
    results of the remaining ones are written and rounded like arrays.
    """
    factors = {port: x for port, x in inputs.items() if port not in self.indices.positions}
    terms, dtype = [], widest(x._state for x in factors.values())
    for port, tangent in tangents.items():
        operands = {**factors, port: tangent}
        if len({x._state.dtype for x in operands.values()}) > 1:
            operands = alike(g, operands, {p: x._state for p, x in factors.items()})
        terms += g.apply(self, **{**inputs, **operands})
    terms[1:] = [g.rounded(term, dtype) for term in terms[1:]]
    return {next(iter(outputs)): g.sum(terms)}


def alike(g: Derivation, operands: Values, tensors: Tensors) -> dict[str, GraphTensor]:
    """The operands of a derivative's product in one dtype: the wider dtype of the original
    operands (``tensors``), or bfloat16 for float8, which it represents exactly."""
    dtype = widest(tensors.values())
    return {port: g.rounded(x, dtype) for port, x in operands.items()}


def widest(tensors: Iterable[Tensor]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes <= {*FP8}:
        return "bfloat16"
    (dtype, *others) = dtypes - {*FP8}
    if not others:
        return dtype
    return "float64" if "float64" in dtypes else "float32"


def grown(shape: Shape, axis: int, size: int) -> Shape:
    """A shape with a dimension of ``size`` folded into one of its axes, or leading."""
    if axis == LEAD:
        return (size, *shape)
    return (*shape[:axis], size * shape[axis], *shape[axis + 1 :])


def anywhere(
    ports: Iterable[str],
    axes: Iterable[int],
    node: Callable[[int], Node] | None = None,
    broadcast: Collection[str] = (),
) -> Iterator[Fold]:
    """For nodes that take tensors of any rank: into one of ``axes``, or leading; ``node`` gives the
    node for each of them."""
    names = tuple(ports)
    for axis in (*axes, LEAD):
        yield Fold(dict.fromkeys(names, axis), node and node(axis), broadcast)


def along(node: Node, letters: str, batched: frozenset[str], tensors: Tensors) -> Iterator[Fold]:
    """Into the dimensions of these letters of the ports, in which elements are independent of each
    other."""
    for letter in letters.split():
        axes = {
            port.name: port.axes.index(letter)
            for port in (*node.ports.inputs, *node.ports.outputs)
            if letter in port.axes and port.name in tensors
        }
        if batched <= {*axes}:
            yield Fold(axes)
