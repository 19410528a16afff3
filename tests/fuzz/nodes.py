"""One random operation more, of any node of the registry.

What a node takes is read off its ports, element types and examples. One that is no operation on
each element and has no draw of its own in :mod:`.attributes` comes as an example of it.
"""

from __future__ import annotations

import numbers
from typing import Any

from jax_cudnn._core.errors import GraphError, GraphTypeError
from jax_cudnn._core.graph.node import REGISTRY, Node

from . import attentions, normalizations
from .attributes import DRAWS
from .drawing import Drawing, Operand
from .operands import Proposal, beside, broadcast, layout, pick, result_dtype

# Each kind's share of the operations.
_SHARES = {
    "product": 0.22,
    "each element": 0.43,
    "movement": 0.13,
    "normalization": 0.1,
    "attention": 0.04,
    "other": 0.12,
}
_TRIES = 6


def kind(node: type[Node]) -> str:
    """To which share a node belongs; one of no share is not drawn."""
    if node.row_major:
        return "attention" if node.method in attentions.DRAWS else ""
    if node.product:
        return "product"
    if node.method in normalizations.DRAWS:
        return "normalization"
    if node.moves or node.leftover:
        return "movement"
    return "other" if node.method in DRAWS else "each element"


def add_node(drawing: Drawing) -> None:
    """Adds one random operation; of what cannot be written another is drawn."""
    rng = drawing.rng
    while True:
        (share,) = rng.choices(list(_SHARES), list(_SHARES.values()))
        nodes = [node for node in REGISTRY.values() if kind(node) == share]
        (node,) = rng.choices(nodes, [len(node.examples) ** 0.5 for node in nodes])
        for _ in range(_TRIES):  # then another node: this one may be impossible here
            try:
                ports, attributes = _proposal(drawing, node)
                dtype = result_dtype(drawing)
                if share == "attention" and rng.random() < 0.6:  # cuDNN writes no other
                    dtype = ports["q"].dtype
                drawing.add(node.method, ports, attributes, dtype, layout(rng))
                return
            except (GraphError, GraphTypeError):
                continue


def _proposal(drawing: Drawing, node: type[Node]) -> Proposal:
    draw = DRAWS.get(node.method) or (_elementwise if node.ports.is_elementwise else _example)
    return draw(drawing, node)


def _elementwise(drawing: Drawing, node: type[Node]) -> Proposal:
    rng = drawing.rng
    example = rng.choice(node.examples)
    names = node.ports.input_names
    main = rng.choice([name for name in names if name not in example.dtypes])
    first = pick(drawing, node, positive=main in example.positive)
    ports: dict[str, Any] = {}
    for name in names:
        if name == main:
            ports[name] = first
        elif name in example.dtypes:  # a mask
            dtype = example.dtypes[name]
            known = [v for v in drawing.values if v.dtype == dtype]
            known = [v for v in known if len(v.shape) == len(first.shape)]
            known = known if rng.random() < 0.8 else []
            ports[name] = rng.choice([*known, Operand(broadcast(rng, first.shape), dtype)])
        else:
            ports[name] = beside(drawing, first, node.dtypes, name in example.positive)
    return ports, dict(example.attributes)


def _example(drawing: Drawing, node: type[Node]) -> Proposal:
    """Operands of an example's shapes, and its numbers."""
    example = drawing.rng.choice(node.examples)

    def operand(name: str, of: Any) -> Any:
        if isinstance(of, list):
            return [operand(name, one) for one in of]
        if isinstance(of, numbers.Number):
            return of
        dtype = example.dtypes.get(name, example.dtype)
        return Operand(of, dtype, positive=name in example.positive)

    ports = {name: operand(name, of) for name, of in example.inputs.items()}
    return ports, dict(example.attributes)
