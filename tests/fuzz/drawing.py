"""A graph as it is drawn: its operands, its operations so far, and what their values are like."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.builder import GraphBuilder
from jax_cudnn._core.graph.dims import Shape, packed_strides
from jax_cudnn._core.graph.dtypes import FLOATS
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn._core.graph.tensor import GraphTensor

from . import samples

_ELEMENTS = 200_000  # of a tensor, at most
_FLOPS = 2e8  # of an operation, at most


@dataclass(frozen=True)
class Operand:
    """An array argument of the graph function, and how its elements are drawn.

    Floats are normal, times ``scale``; ``positive`` ones are magnitudes of at least 0.25.
    ``layout`` is how it lies in memory, where the function states it. Integers are at most
    ``largest`` (``positive`` ones, 1 more).
    """

    shape: Shape
    dtype: str
    scale: float = 1.0
    positive: bool = False
    layout: str | None = None
    largest: int = 4

    @property
    def strides(self) -> tuple[int, ...] | None:
        return stated(self.shape, self.layout)

    def draw(self, noise: np.random.Generator, shape: Shape | None = None) -> np.ndarray:
        """Random elements, of the operand's shape or another."""
        shape = self.shape if shape is None else shape
        return samples.draw(noise, shape, self.dtype, self.scale, self.positive, self.largest)


@dataclass(eq=False)
class Value:
    """A tensor of the graph being drawn; ``operand`` is what it is an argument from. One that is
    ``aside`` is a further result of an operation: a statistic."""

    name: str
    tensor: GraphTensor
    sample: np.ndarray
    operand: Operand | None = None
    uses: int = 0
    aside: bool = False

    @property
    def shape(self) -> Shape:
        return self.tensor.shape

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype)

    @property
    def positive(self) -> bool:
        return float(self.sample.min()) >= 0.2


@dataclass(frozen=True)
class Step:
    """A call of one of g's methods: at each port a value's name, a list of them, or a number."""

    method: str
    ports: Mapping[str, Any]
    attributes: Mapping[str, Any]
    results: tuple[str, ...]
    dtype: str | None
    strides: tuple[int, ...] | None


@dataclass
class Drawing:
    """What has been drawn; ``dtype`` and ``shape`` are those of many operands. What is ``hidden``
    is -inf in places, as statistics of attention are: for its backward alone."""

    rng: random.Random
    dtype: str
    shape: Shape
    values: list[Value] = field(default_factory=list)
    hidden: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._builder = GraphBuilder()
        self._noise = np.random.default_rng(self.rng.getrandbits(64))

    @property
    def operands(self) -> dict[str, Operand]:
        """The arguments by name: what operations use of them."""
        return {v.name: v.operand for v in self.values if v.operand and v.uses}

    def take(self, operand: Operand) -> Value:
        """An operand as a value, for several operations."""
        new: dict[int, Value] = {}
        self._value(operand, new)
        self.values += new.values()
        return self.values[-1]

    def add(
        self,
        method: str,
        ports: Mapping[str, Any],
        attributes: Mapping[str, Any] | None = None,
        dtype: str | None = None,
        layout: str | None = None,
    ) -> list[Value]:
        """Adds an operation and gives its results, or raises and leaves the drawing as it was.

        Args:
            method: of g.
            ports: at each port a Value, an Operand (which becomes one), a number, or a list.
            attributes: the method's other keywords.
            dtype, layout: of the first result, where they are stated; the dtype of numbers only.

        Raises:
            GraphError, GraphTypeError: the operation cannot be written so, is too large, or its
                values are not tame.
        """
        attributes = dict(attributes or {})
        new: dict[int, Value] = {}
        used = {port: _mapped(x, lambda x: self._value(x, new)) for port, x in ports.items()}
        given = {port: _mapped(x, _tensor) for port, x in used.items()}
        result = getattr(self._builder, method)(**given, **attributes)
        tensors = result if isinstance(result, tuple) else (result,)
        node = REGISTRY[method].create(**attributes)
        flat = _by_port(used)
        values = {port: x for port, x in flat.items() if isinstance(x, Value)}
        shapes = {port: value.shape for port, value in values.items()}
        shapes |= dict(zip(node.results, (t.shape for t in tensors), strict=True))
        if max(map(math.prod, shapes.values())) > _ELEMENTS or node.flops(shapes) > _FLOPS:
            raise GraphError("larger than the operations of a random graph")
        if min(map(math.prod, shapes.values())) == 0:
            raise GraphError("a tensor without elements")
        if node.product and not samples.attends(node) and new:
            *_, last = new.values()
            _rescale(last, node, shapes, [v.sample for v in values.values() if v is not last])
        inputs = {port: x.sample if isinstance(x, Value) else x for port, x in flat.items()}
        found = samples.results(node, inputs, shapes, self._noise)
        dtype = None if tensors[0].dtype == "bool" else dtype
        if dtype is not None:
            tensors[0].set_data_type(dtype)
        strides = stated(tensors[0].shape, layout)
        if strides is not None:
            tensors[0].set_stride(strides)
        for i, (tensor, sample) in enumerate(zip(tensors, found, strict=True)):
            found[i] = samples.stored(sample, str(tensor.dtype))
            if not samples.is_hidden(node, found[i]):
                samples.check(found[i], str(tensor.dtype))
        made = [
            Value(f"v{len(self.steps)}_{port}", tensor, sample, aside=port != node.results[0])
            for port, tensor, sample in zip(node.results, tensors, found, strict=True)
        ]
        for value in values.values():
            value.uses += 1
        self.values += new.values()
        for value in made:
            hidden = samples.is_hidden(node, value.sample)
            (self.hidden if hidden else self.values).append(value)
        names = {port: _mapped(x, lambda x: getattr(x, "name", x)) for port, x in used.items()}
        results = tuple(value.name for value in made)
        self.steps.append(Step(method, names, attributes, results, dtype, strides))
        return made

    def _value(self, x: Any, new: dict[int, Value]) -> Any:
        """The value at a port: an operand gets one, the same for all its ports."""
        if not isinstance(x, Operand):
            return x
        if id(x) not in new:
            name = f"x{len(self.values) + len(new)}"
            tensor = self._builder.input(name, x.shape, x.dtype)
            if x.strides is not None:
                tensor.set_stride(x.strides)
            sample = x.draw(self._noise, (samples.SIZE,)).astype(np.float32)
            new[id(x)] = Value(name, tensor, sample, x)
        return new[id(x)]


LAYOUTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "rows": lambda rank: tuple(range(rank)),
    "channels last": lambda rank: (0, *range(2, rank), 1),
    "transposed": lambda rank: (*range(rank - 2), rank - 1, rank - 2),
}


def stated(shape: Shape, layout: str | None) -> tuple[int, ...] | None:
    """The strides by which a layout is stated."""
    if layout is None or len(shape) < 3:
        return None
    return tuple(packed_strides(shape, LAYOUTS[layout](len(shape))))


def _mapped(x: Any, function: Callable[[Any], Any]) -> Any:
    return [function(item) for item in x] if isinstance(x, list) else function(x)


def _tensor(x: Any) -> Any:
    return x.tensor if isinstance(x, Value) else x


def _by_port(ports: Mapping[str, Any]) -> dict[str, Any]:
    """What stands at each port; a list at numbered ones, as in a spec."""
    flat: dict[str, Any] = {}
    for port, x in ports.items():
        flat.update(
            {f"{port}_{i}": y for i, y in enumerate(x)} if isinstance(x, list) else {port: x}
        )
    return flat


def _rescale(
    weight: Value, node: Any, shapes: Mapping[str, Shape], others: list[np.ndarray]
) -> None:
    """Scales a new operand of a product so that the result has about unit variance."""
    assert weight.operand is not None
    if weight.dtype in FLOATS and others:
        scale = float(f"{samples.weight_scale(node, shapes, others):.3g}")
        weight.operand = replace(weight.operand, scale=scale)
        weight.sample = weight.sample * np.float32(scale)
