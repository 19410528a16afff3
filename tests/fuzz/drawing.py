"""A graph as it is drawn: its operands, its operations so far, and the values of all of these."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle

from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.builder import GraphBuilder
from jax_cudnn._core.graph.dims import Shape, packed_strides
from jax_cudnn._core.graph.dtypes import FLOATS, INTEGERS, is_floating
from jax_cudnn._core.graph.node import REGISTRY, Node
from jax_cudnn._core.graph.tensor import GraphTensor

_ELEMENTS, _FLOPS = 200_000, 2e8  # of a tensor and of an operation, at most
_LARGEST, _LEAST_RMS = 1000.0, 2e-3

LAYOUTS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "rows": lambda rank: tuple(range(rank)),
    "channels last": lambda rank: (0, *range(2, rank), 1),
    "transposed": lambda rank: (*range(rank - 2), rank - 1, rank - 2),
}


@dataclass(frozen=True)
class Operand:
    """An argument of the graph, and how its elements are drawn."""

    shape: Shape
    dtype: str
    scale: float = 1.0
    positive: bool = False
    layout: str | None = None
    largest: int = 4

    @property
    def strides(self) -> tuple[int, ...] | None:
        return stated(self.shape, self.layout)

    def draw(self, *seeds: int) -> np.ndarray:
        """Normal floats times ``scale``, integers up to ``largest``, or fair booleans; magnitudes
        of at least 0.25 (of integers, 1) where ``positive``."""
        noise = np.random.default_rng(seeds)
        if self.dtype == "bool":
            return noise.random(self.shape) < 0.5
        if self.dtype in INTEGERS:
            least = 0 if self.dtype.startswith("u") else -self.largest
            values = noise.integers(least, self.largest + 1, self.shape)
        else:
            values = noise.standard_normal(self.shape, np.float32) * np.float32(self.scale)
        if self.positive:
            values = np.abs(values) + (1 if self.dtype in INTEGERS else 0.25)
        return np.asarray(values).astype(jnp.dtype(self.dtype))


@dataclass(eq=False)
class Value:
    """A tensor of the graph; ``operand`` is what it is an argument from. One that is ``aside`` is a
    further result of an operation: a statistic."""

    name: str
    tensor: GraphTensor
    array: np.ndarray
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
        return float(self.array.min()) >= 0.2


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

    seed: int
    rng: random.Random
    dtype: str
    shape: Shape
    values: list[Value] = field(default_factory=list)
    hidden: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._builder = GraphBuilder()

    @property
    def operands(self) -> dict[str, Operand]:
        """The arguments by name: what operations use of them."""
        return {v.name: v.operand for v in self.values if v.operand and v.uses}

    def take(self, found: Value | Operand) -> Value:
        """An operand as a value, for several operations."""
        if isinstance(found, Operand):
            found = self._value(found, {})
            self.values.append(found)
        return found

    def known(self, fits: Callable[[Value], bool]) -> list[Value]:
        return [value for value in self.values if fits(value)]

    def add(
        self,
        method: str,
        ports: Mapping[str, Any],
        attributes: Mapping[str, Any] | None = None,
        dtype: str | None = None,
        layout: str | None = None,
    ) -> list[Value]:
        """Adds an operation of Values, Operands, numbers and lists, and gives its results.

        Raises GraphError or GraphTypeError, and leaves the drawing as it was, where it cannot be
        written so, is too large, or its values are not tame."""
        attributes, new = dict(attributes or {}), {}
        used = {port: _mapped(x, lambda x: self._value(x, new)) for port, x in ports.items()}
        given = {port: _mapped(x, lambda x: getattr(x, "tensor", x)) for port, x in used.items()}
        made = getattr(self._builder, method)(**given, **attributes)
        tensors = made if isinstance(made, tuple) else (made,)
        node, flat = REGISTRY[method].create(**attributes), _by_port(used)
        values = {port: x for port, x in flat.items() if isinstance(x, Value)}
        shapes = {port: value.shape for port, value in values.items()}
        shapes |= dict(zip(node.results, (t.shape for t in tensors), strict=True))
        sizes = [math.prod(shape) for shape in shapes.values()]
        if max(sizes) > _ELEMENTS or node.flops(shapes) > _FLOPS or min(sizes) == 0:
            raise GraphError("larger or smaller than the operations of a random graph")
        if node.product and not attends(node) and new:
            *_, last = new.values()
            self._rescale(last, node, shapes, [v for v in values.values() if v is not last])
        dtype = None if tensors[0].dtype == "bool" else dtype
        if dtype is not None:
            tensors[0].set_data_type(dtype)
        if (strides := stated(tensors[0].shape, layout)) is not None:
            tensors[0].set_stride(strides)
        rank = len(tensors[0].shape)
        arrays = {port: getattr(x, "array", x) for port, x in flat.items()}
        arrays = {p: np.reshape(x, np.shape(x) or (1,) * rank) for p, x in arrays.items()}
        with np.errstate(all="ignore"):
            is_backward = hasattr(node, "extent") and method.endswith("_backward")
            operation = _normalization_backward if is_backward else oracle.OPERATIONS[method]
            exact = operation(node, **arrays)
            results = exact if isinstance(exact, tuple) else (exact,)
            results = [stored(x, str(t.dtype)) for x, t in zip(results, tensors, strict=True)]
        found = [
            Value(f"v{len(self.steps)}_{port}", tensor, x, aside=port != node.results[0])
            for port, tensor, x in zip(node.results, tensors, results, strict=True)
        ]
        unseen = [attends(node) and bool(np.isneginf(value.array).any()) for value in found]
        for value, hidden in zip(found, unseen, strict=True):
            if not hidden:
                _check(value.array, value.dtype)
        for value in values.values():
            value.uses += 1
        self.values += new.values()
        for value, hidden in zip(found, unseen, strict=True):
            (self.hidden if hidden else self.values).append(value)
        names = {port: _mapped(x, lambda x: getattr(x, "name", x)) for port, x in used.items()}
        made_names = tuple(value.name for value in found)
        self.steps.append(Step(method, names, attributes, made_names, dtype, strides))
        return found

    def _value(self, x: Any, new: dict[int, Value]) -> Any:
        """The value at a port: an operand gets one, the same for all its ports."""
        if not isinstance(x, Operand):
            return x
        if id(x) not in new:
            if min(x.shape, default=1) < 1 or math.prod(x.shape) > _ELEMENTS:
                raise GraphError("larger or smaller than an operand of a random graph")
            number = len(self.values) + len(new)
            tensor = self._builder.input(f"x{number}", x.shape, x.dtype)
            if x.strides is not None:
                tensor.set_stride(x.strides)
            array = x.draw(self.seed, 0, number).astype(float)
            new[id(x)] = Value(f"x{number}", tensor, array, x)
        return new[id(x)]

    def _rescale(self, last: Value, node: Node, shapes: Any, others: list[Value]) -> None:
        """Scales a new operand of a product so that the result has about unit variance."""
        if last.operand and last.dtype in FLOATS and others:
            terms = node.flops(shapes) // 2 // math.prod(shapes[node.ports.output_names[0]])
            squares = math.prod(float(np.mean(v.array * v.array)) + 1e-12 for v in others)
            scale = float(f"{(max(terms, 1) * squares) ** -0.5:.3g}")
            last.operand = replace(last.operand, scale=scale)
            last.array = last.operand.draw(self.seed, 0, int(last.name[1:])).astype(float)


def attends(node: Node) -> bool:
    """Whether a node is attention or its backward."""
    return hasattr(node, "band")


def stated(shape: Shape, layout: str | None) -> tuple[int, ...] | None:
    """The strides by which a layout is stated."""
    if layout is None or len(shape) < 3:
        return None
    return tuple(packed_strides(shape, LAYOUTS[layout](len(shape))))


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """What a tensor of this dtype keeps, in float64."""
    if dtype in INTEGERS:
        x = np.clip(np.rint(x), jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
    if dtype.startswith("float8"):
        x = np.clip(x, float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max))
    return np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64)


def _normalization_backward(
    node: Any, grad: Any, input: Any, scale: Any, inv_variance: Any, mean: Any = 0.0
) -> tuple[np.ndarray, ...]:
    """What the oracle gives, without its matrices of a row's length."""
    axes = node.extent.reduced(input.shape, scale.shape)
    xhat, slope = (input - mean) * inv_variance, grad * scale
    dx = slope - np.mean(slope * xhat, axes, keepdims=True) * xhat
    dx = dx - np.mean(slope, axes, keepdims=True) * node.extent.centred
    shared = tuple(i for i, size in enumerate(scale.shape) if size == 1)
    found = {"DX": inv_variance * dx, "DBias": np.sum(grad, shared, keepdims=True)}
    found["DScale"] = np.sum(grad * xhat, shared, keepdims=True)
    return tuple(found[port] for port in node.results)


def _check(array: np.ndarray, dtype: str) -> None:
    """Raises GraphError for values with which no comparison would mean something."""
    largest, limit = float(np.max(np.abs(array))), 2.0**20 if dtype == "int32" else _LARGEST
    vanishes = is_floating(dtype) and not np.mean(array * array) >= _LEAST_RMS**2
    if dtype != "bool" and (vanishes or not largest <= limit):
        raise GraphError("the values are not tame", got=f"largest {largest:g}")


def _mapped(x: Any, function: Callable[[Any], Any]) -> Any:
    return [function(item) for item in x] if isinstance(x, list) else function(x)


def _by_port(ports: Mapping[str, Any]) -> dict[str, Any]:
    """What stands at each port; a list at numbered ones, as in a spec."""
    lists = {p: x if isinstance(x, list) else None for p, x in ports.items()}
    single = {p: x for p, x in ports.items() if lists[p] is None}
    return single | {f"{p}_{i}": y for p, x in lists.items() if x for i, y in enumerate(x)}
