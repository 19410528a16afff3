"""What a graph costs at least: arithmetic and memory traffic, from its spec alone.

XLA's cost analysis sees nothing inside a custom call; this is what stands in for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.spec import Call, GraphSpec


@dataclass(frozen=True)
class Cost:
    """Operations (a multiply-add is two) and bytes of one execution; costs add up.

    Attributes:
        flops: operations of all nodes, whatever their element type.
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
    """The cost of a graph: a lower bound on traffic, and the arithmetic as written.

    An operand that several nodes read counts once: a fused plan loads it once or finds it in the
    cache. Workspace is not counted, because it depends on the engine.
    """
    flops = sum(
        call.node.flops({port: spec.tensor(name).shape for port, name in _ports(call)})
        for call in spec.calls
    )
    moved = sum(tensor.nbytes for tensor in (*spec.input_tensors, *spec.output_tensors))
    return Cost(flops, moved)


def _ports(call: Call) -> tuple[tuple[str, str], ...]:
    return (*call.inputs, *call.outputs)
