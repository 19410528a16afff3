"""What a graph costs, from its spec alone: arithmetic and memory traffic. XLA's cost analysis
sees nothing inside a custom call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..graph.spec import Call, GraphSpec, Tensor


@dataclass(frozen=True)
class Cost:
    """Operations (a multiply-add is two) and bytes of one execution; costs add up.

    Attributes:
        flops: the least operations of all nodes, whatever their element type. Attention counts
            the scores that causality and windows leave, and 0 with what selects by value: lengths,
            packed sequences, pages, block masks.
        bytes: each operand read once and each result written once. By-value constants and
            intermediates take no memory traffic in a fused plan.
    """

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)


def cost(spec: GraphSpec) -> Cost:
    """The cost of a graph. An operand that several nodes read counts once; workspace, which depends
    on the engine, does not."""
    return Cost(sum([flops(call, tensors) for call, tensors in spec.at_ports]), spec.nbytes)


def selects(call: Call) -> bool:
    """Whether it selects by value what it reads."""
    return any(port in call.node.selecting for port, _ in call.inputs)


def flops(call: Call, tensors: Mapping[str, Tensor]) -> int:
    """The least operations of a call; 0 where it selects by value."""
    shapes = {port: tensor.shape for port, tensor in tensors.items()}
    return 0 if selects(call) else call.node.flops(shapes)
