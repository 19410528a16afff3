"""GraphSpec: a cuDNN graph as a frozen, hashable, printable value, used everywhere inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from ..user_context import CUDNN, XLA
from .dims import Shape
from .dtypes import itemsize
from .options import DEFAULTS, Options

if TYPE_CHECKING:
    from .node import Node


@dataclass(frozen=True)
class Tensor:
    """An edge of the graph.

    ``literal`` is set for by-value constants (a Python scalar): ``float.hex``, because equal
    floats can be different constants (0.0 and -0.0), and NaN is not equal to itself.
    ``order`` lists its dimensions from the slowest in memory to the fastest; None leaves the
    choice to :mod:`.layout`.
    """

    name: str
    shape: Shape
    dtype: str
    literal: str | None = None
    order: tuple[int, ...] | None = None

    @property
    def value(self) -> float | None:
        return None if self.literal is None else float.fromhex(self.literal)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * itemsize(self.dtype)

    def __str__(self) -> str:
        if self.value is not None:
            return repr(self.value)
        order = "" if self.order is None else f"{{{','.join(map(str, self.order))}}}"
        return f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]{order}"


@dataclass(frozen=True)
class Call:
    """One node with the names of the tensors at its ports."""

    node: Node
    name: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    @property
    def is_paired(self) -> bool:
        """Whether it draws random numbers that its derivatives draw again, in XLA or cuDNN."""
        return self.node.draws is not None and not self.node.xla_only


FLOAT64 = "cuDNN has no engine for float64"
FORWARD, TANGENT, BACKWARD = "forward", "tangent", "backward"


@dataclass(frozen=True)
class Origin:
    """The user's graph from which a graph was derived by autodiff or vmap.

    ``role`` is FORWARD (with results for the backward), TANGENT or BACKWARD (for higher orders, a
    combination of these), and empty for a user's graph. ``residuals`` names the results of a
    forward that only its derivatives need. ``family`` holds the forward and its derivatives if they
    must run in the same place. ``engine`` describes the engine that the options of the user's graph
    name; it applies to that graph only.
    """

    role: str = ""
    residuals: tuple[str, ...] = ()
    family: tuple[GraphSpec, ...] = ()
    engine: str = ""

    @cached_property
    def suffix(self) -> str:
        """What follows a graph function's name: the role of the derived graph."""
        return "" if self.role in ("", FORWARD) else f" ({self.role})"


@dataclass(frozen=True, eq=False)
class GraphSpec:
    """A graph in topological order.

    An intermediate is rounded to its tensor's dtype (float32 unless the user sets it),
    and so is an output: the spec alone states every rounding point.
    """

    tensors: tuple[Tensor, ...]
    calls: tuple[Call, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    options: Options = DEFAULTS
    origin: Origin = Origin()
    _cache: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    # JAX hashes and compares a primitive's parameters several times in each trace.
    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, GraphSpec) and hash(self) == hash(other) and self._key == other._key
        )

    @cached_property
    def _key(self) -> tuple:
        # Nodes by their text: attributes that are equal can differ (0.0 and -0.0), and NaN does
        # not equal itself.
        ports = self.inputs, self.outputs
        return self.tensors, repr(self.calls), *ports, self.options, self.origin

    def __reduce__(self):
        ports = self.inputs, self.outputs
        return GraphSpec, (self.tensors, self.calls, *ports, self.options, self.origin)

    @cached_property
    def tensor(self) -> Callable[[str], Tensor]:
        """The tensor of a name."""
        return {t.name: t for t in self.tensors}.__getitem__

    @cached_property
    def at_ports(self) -> tuple[tuple[Call, dict[str, Tensor]], ...]:
        """The calls, with the tensors at all ports of each."""
        return tuple(
            (call, {port: self.tensor(name) for port, name in (*call.inputs, *call.outputs)})
            for call in self.calls
        )

    @cached_property
    def input_tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.tensor(name) for name in self.inputs)

    @cached_property
    def output_tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.tensor(name) for name in self.outputs)

    @property
    def nbytes(self) -> int:
        """Of its operands and results."""
        return sum(tensor.nbytes for tensor in (*self.input_tensors, *self.output_tensors))

    @cached_property
    def constants(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.literal is not None)

    @cached_property
    def is_empty(self) -> bool:
        """Whether some tensor has no elements: cuDNN runs no such graph."""
        return any(isinstance(s, int) and s == 0 for t in self.tensors for s in t.shape)

    @cached_property
    def xla_only(self) -> str:
        """Why XLA runs the graph on every GPU, so that there is nothing to plan; else empty."""
        if self.is_empty:
            return "cuDNN takes no empty tensors"
        if self.options.implementation == XLA:
            return "implementation='xla'"
        may_refuse = self.options.implementation == CUDNN or self.options.engine is not None
        return FLOAT64 if self.has_float64 and not may_refuse else ""

    @cached_property
    def has_float32_product(self) -> bool:
        """Whether a convolution or matmul has an operand that may be rounded to TF32."""
        products = (c for c in self.calls if c.node.anchor.product and "float32" in c.node.dtypes)
        multiplied = {name for c in products for _, name in c.inputs}
        return any(self.tensor(name).dtype == "float32" for name in multiplied)

    @cached_property
    def has_float64(self) -> bool:
        """Whether some tensor is float64: then XLA runs the graph."""
        return any(tensor.dtype == "float64" for tensor in self.tensors)

    @cached_property
    def anchors(self) -> tuple[Call, ...]:
        """The calls around which cuDNN builds an engine."""
        return tuple(call for call in self.calls if call.node.anchor)

    @cached_property
    def is_paired(self) -> bool:
        """Whether some node must run where the nodes of the graph's family run."""
        return any(call.is_paired for call in self.calls)

    @cached_property
    def is_static(self) -> bool:
        """Whether every dimension is a number (symbolic export has dimension expressions)."""
        return all(isinstance(size, int) for t in self.tensors for size in t.shape)

    @cached_property
    def for_planning(self) -> GraphSpec:
        """The graph without its implementation and origin, on which cuDNN's plan does not
        depend."""
        if self.options.implementation is None and self.origin == Origin():
            return self
        return replace(self, options=replace(self.options, implementation=None), origin=Origin())

    def unvalued(self) -> GraphSpec:
        """The graph with all by-value constants set to 0: a plan reads them when it runs."""
        if not self.constants:
            return self
        zero = (0.0).hex()
        tensors = (t if t.literal is None else replace(t, literal=zero) for t in self.tensors)
        return intern(replace(self, tensors=tuple(tensors)))

    def canonical(self) -> GraphSpec:
        """The graph with tensors named by position, so that equal graphs compare equal."""
        return self._canonical

    @cached_property
    def _canonical(self) -> GraphSpec:
        new = {t.name: f"t{i}" for i, t in enumerate(self.tensors)}
        methods = [call.node.method for call in self.calls]
        calls = tuple(
            Call(
                call.node,
                f"{methods[i]}.{methods[:i].count(methods[i])}",
                tuple((port, new[name]) for port, name in call.inputs),
                tuple((port, new[name]) for port, name in call.outputs),
            )
            for i, call in enumerate(self.calls)
        )
        found = intern(
            GraphSpec(
                tuple(replace(t, name=new[t.name]) for t in self.tensors),
                calls,
                tuple(new[name] for name in self.inputs),
                tuple(new[name] for name in self.outputs),
                self.options,
                replace(self.origin, residuals=()),
            )
        )
        found.__dict__["_canonical"] = found
        return found

    def __str__(self) -> str:
        lines = [f"graph({', '.join(str(t) for t in self.input_tensors)})"]
        for call in self.calls:
            args = [
                f"{port}={t.value if t.value is not None else t.name}"
                for port, t in ((port, self.tensor(name)) for port, name in call.inputs)
            ]
            args += [f"{key}={value}" for key, value in call.node.keywords().items()]
            if call.node.compute_data_type != "float32":
                args.append(f"compute_data_type={call.node.compute_data_type}")
            outs = ", ".join(str(self.tensor(name)) for _, name in call.outputs)
            lines.append(f"  {outs} = {call.node.method}({', '.join(args)})")
        lines.append(f"  return {', '.join(self.outputs)}")
        if str(self.options):
            lines.append(f"  options: {self.options}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"GraphSpec({' '.join(call.node.method for call in self.calls)})"

    @cached_property
    def label(self) -> str:
        """Operations, operands and results on one line: ``matmul relu: f[2,3], f[3,4] -> f[2,4]``,
        with dtypes for f."""
        results = [self.tensor(name) for name in self.outputs]
        sides = [
            ", ".join(f"{t.dtype}[{','.join(map(str, t.shape))}]" for t in tensors)
            for tensors in (self.input_tensors, results)
        ]
        return f"{' '.join(call.node.method for call in self.calls)}: {' -> '.join(sides)}"


@lru_cache(maxsize=4096)
def intern(spec: GraphSpec) -> GraphSpec:
    """One object for equal specs, so that later comparisons are by identity."""
    return spec
