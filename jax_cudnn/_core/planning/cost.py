"""What a graph costs, from its spec alone: arithmetic, memory traffic and the least time.

It replaces XLA's cost analysis, which sees nothing inside a custom call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ..cuda import CudaDevice
from ..graph.dtypes import itemsize
from ..graph.spec import Call, GraphSpec, Tensor
from . import frontend
from .deviceless.profiles import Profile

_FLOPS_PER_CYCLE = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
"""Of one SM's tensor cores with 16-bit operands, by compute capability times ten (NVIDIA's
architecture whitepapers): narrower operands are proportionally faster, float32 runs as TF32.
GeForce cards accumulate in float32 at half this rate."""


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
    """The cost of a graph.

    An operand that several nodes read counts once: a fused plan loads it once or finds it in the
    cache. Workspace is not counted, because it depends on the engine.
    """
    return Cost(sum([_flops(call, tensors) for call, tensors in spec.at_ports]), spec.nbytes)


def roofline(spec: GraphSpec, site: Profile | CudaDevice | None) -> float | None:
    """The least seconds that one execution takes: all bytes at the memory's full rate, or all
    products at the full rate of the tensor cores for the dtype of their factors. Of operations
    that select by value only the results count. None where the GPU's rates are not known."""
    if site is None:
        return None
    absent = isinstance(site, Profile)
    gpu = json.loads(site.properties_json if absent else site.properties(frontend.load()))
    bits = gpu.get("memoryBusWidth", 0) if absent else site.memory_bus_width()
    rate = bits / 8 * 2 * gpu.get("memClockRateKHz", 0) * 1e3
    if not rate:
        return None
    cycles = gpu["multiProcessorCount"] * gpu["smClockRateKHz"] * 1e3
    peak = cycles * _FLOPS_PER_CYCLE.get(int(gpu["deviceVer"]) // 10, 0)
    products = [(c, tensors) for c, tensors in spec.at_ports if c.node.product]
    work = sum(_flops(c, tensors) * _width(spec, c) / 2 for c, tensors in products)
    if work and not peak:
        return None
    read = {name for call in spec.calls if not _selects(call) for _, name in call.inputs}
    operands = [tensor for tensor in spec.input_tensors if tensor.name in read]
    moved = sum(tensor.nbytes for tensor in (*operands, *spec.output_tensors))
    return max(moved / rate, work / peak if work else 0.0)


def size(count: int) -> str:
    """Bytes for people, in MB from one million on."""
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count:,} bytes"


def _selects(call: Call) -> bool:
    return any(port in call.node.selecting for port, _ in call.inputs)


def _flops(call: Call, tensors: Mapping[str, Tensor]) -> int:
    shapes = {port: tensor.shape for port, tensor in tensors.items()}
    return 0 if _selects(call) else call.node.flops(shapes)


def _width(spec: GraphSpec, product: Call) -> int:
    """Bytes per element of the narrower factor of a product, one of its first two operands."""
    return min(itemsize(spec.tensor(name).dtype) for _, name in product.inputs[:2])
