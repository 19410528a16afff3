"""What a graph costs, from its spec alone: arithmetic, memory traffic, the least time on a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ..cuda import CudaDevice
from ..graph.dtypes import itemsize
from ..graph.spec import Call, GraphSpec, Tensor
from . import frontend
from .deviceless.profiles import Profile


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
    return any(port in call.node.indices.selecting for port, _ in call.inputs)


def flops(call: Call, tensors: Mapping[str, Tensor]) -> int:
    """The least operations of a call; 0 where it selects by value."""
    return 0 if selects(call) else call.node.work(tensors).flops


_FLOPS_PER_CYCLE = {80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 120: 1024}
"""Of one SM's tensor cores with 16-bit operands, by compute capability times ten (NVIDIA's
architecture whitepapers): narrower operands are proportionally faster, float32 runs as TF32.
GeForce cards accumulate in float32 at half this rate."""


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
    work = 0.0
    for call, tensors in spec.at_ports:
        if call.node.anchor.product:  # of the rate for its narrower factor
            width = min(itemsize(spec.tensor(name).dtype) for _, name in call.inputs[:2])
            work += flops(call, tensors) * width / 2
    if work and not peak:
        return None
    read = {name for call in spec.calls if not selects(call) for _, name in call.inputs}
    operands = [tensor for tensor in spec.input_tensors if tensor.name in read]
    moved = sum(tensor.nbytes for tensor in (*operands, *spec.output_tensors))
    return max(moved / rate, work / peak if work else 0.0)
