"""Why cuDNN does not run a graph: values of a kind, by which they are ranked and advised on."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.IntEnum):
    """What a reason is about, from the most telling kind to the least."""

    RULE = enum.auto()  # of this package; cuDNN was not asked
    BROADCAST = enum.auto()  # a rule, too
    REQUIREMENT = enum.auto()  # of a node for some of its operands
    WORKSPACE = enum.auto()
    OPTIONS = enum.auto()
    ENGINE = enum.auto()  # wrong, or of the Python frontend
    COMPILATION = enum.auto()
    ANCHORS = enum.auto()
    FACTORS = enum.auto()
    CHANNEL = enum.auto()
    NUMBER = enum.auto()
    TENSOR_CORES = enum.auto()
    LAYOUT = enum.auto()
    DTYPE = enum.auto()
    REDUCED = enum.auto()
    REDUCTION = enum.auto()
    PATTERN = enum.auto()
    SHAPE = enum.auto()
    OTHER = enum.auto()
    ARCHITECTURE = enum.auto()  # engines of other GPUs


ADVICE = {
    Kind.BROADCAST: "broadcast that operand before the call: jnp.broadcast_to(x, shape)",
    Kind.ANCHORS: "cut the function into graphs of one convolution or matmul each",
    Kind.COMPILATION: "use bfloat16 or float16 operands",
    Kind.FACTORS: "use one dtype for both operands; .set_data_type rounds a value that is computed "
    "in the graph (next to a 16-bit operand that is the default)",
    Kind.CHANNEL: "apply the operation in jnp, or in a graph with a convolution or matmul",
    Kind.TENSOR_CORES: "use bfloat16 or float16 operands: each GPU has tensor cores for these",
    Kind.LAYOUT: "use rank 4 (NCHW dims) for the tensors of a convolution and rank 3 for those of "
    "a matmul",
    Kind.DTYPE: "use bfloat16 or float16 inputs; keep the result of a reduction in float32",
    Kind.REDUCED: "reduce the last dimension, all other dimensions, or everything, as the last "
    "operation",
    Kind.PATTERN: "cut the function into smaller graphs: one convolution or matmul each, a "
    "reduction last",
    Kind.SHAPE: "pad channels and features to a multiple of 8",
}
"""What to do about a kind of reason."""


@dataclass(frozen=True)
class Reason:
    """Why cuDNN, or one of its engines, does not run a graph."""

    text: str
    kind: Kind = Kind.RULE

    def __str__(self) -> str:
        return self.text


Reasons = dict[str, Reason]
"""By engine, operation or step of planning."""
