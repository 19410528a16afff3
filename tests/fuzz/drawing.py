"""A graph as it is drawn: its operands, its operations so far, and the values of all of these."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import oracle

from jax_cudnn._core.errors import GraphError
from jax_cudnn._core.graph.builder import GraphBuilder
from jax_cudnn._core.graph.dims import Shape
from jax_cudnn._core.graph.dtypes import CUDNN_FLOATS as FLOATS
from jax_cudnn._core.graph.dtypes import INTEGERS, is_floating
from jax_cudnn._core.graph.layout import packed_strides
from jax_cudnn._core.graph.node import Node, registry
from jax_cudnn._core.graph.spec import Tensor

ELEMENTS, FLOPS = 200_000, 2e8  # of a tensor and of an operation, at most
LARGEST, LEAST_RMS = 1000.0, 2e-3
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


class Value:
    """A tensor of the graph; ``operand`` is what it is an argument from. One that is ``aside`` is a
    further result of an operation: a statistic."""

    def __init__(self, name: str, tensor: Any, array: np.ndarray, operand: Operand | None = None):
        self.name, self.tensor, self.array, self.operand = name, tensor, array, operand
        self.shape, self.dtype = tensor.shape, str(tensor.dtype)
        self.uses, self.aside, self.positive = 0, False, float(array.min()) >= 0.2


class Step(NamedTuple):
    """A call of one of g's methods: at each port a value's name, a list of them, or a number."""

    method: str
    ports: dict[str, Any]
    attributes: dict[str, Any]
    results: tuple[str, ...]
    dtype: str | None
    layout: str | None


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
    builder: GraphBuilder = field(default_factory=GraphBuilder)

    def known(self, fits: Callable[[Value], bool]) -> list[Value]:
        return [value for value in self.values if fits(value)]

    def add(
        self, method: str, ports: Any, attributes: Any = (), dtype: Any = None, layout: Any = None
    ) -> list[Value]:
        """Adds an operation of Values, Operands, numbers and lists, and gives its results.

        Raises GraphError or GraphTypeError, and leaves the drawing as it was, where it cannot be
        written so, is too large, or its values are not tame."""
        attributes, new = dict(attributes), {}
        used = {port: each(x, lambda x: self._value(x, new)) for port, x in ports.items()}
        given = {port: each(x, lambda x: getattr(x, "tensor", x)) for port, x in used.items()}
        made = getattr(self.builder, method)(**given, **attributes)
        tensors = made if isinstance(made, tuple) else (made,)
        node = registry()[method].create(**attributes)
        lists = {port: x if isinstance(x, list) else [x] for port, x in used.items()}
        numbered = {p: f"{p}_{{}}" if isinstance(x, list) else p for p, x in used.items()}
        flat = {numbered[p].format(i): y for p, x in lists.items() for i, y in enumerate(x)}
        values = {port: x for port, x in flat.items() if isinstance(x, Value)}
        shapes = {port: value.shape for port, value in values.items()}
        shapes |= dict(zip(node.results, (t.shape for t in tensors), strict=True))
        sizes = [math.prod(shape) for shape in shapes.values()]
        flops = node.work({p: Tensor(p, shape, "float32") for p, shape in shapes.items()}).flops
        if max(sizes) > ELEMENTS or flops > FLOPS or min(sizes) == 0:
            raise GraphError("larger or smaller than the operations of a random graph")
        if node.anchor.product and not attends(node) and new:
            *_, last = new.values()
            terms = flops // 2 // math.prod(shapes[node.ports.output_names[0]])
            self._rescale(last, terms, [v for v in values.values() if v is not last])
        dtype = None if tensors[0].dtype == "bool" else dtype
        state(tensors[0], dtype, layout)
        found = []
        for port, tensor, x in zip(
            node.results, tensors, _results(node, flat, tensors), strict=True
        ):
            found.append(Value(f"v{len(self.steps)}_{port}", tensor, x))
            found[-1].aside = port != node.results[0]
        hidden = [v for v in found if attends(node) and np.isneginf(v.array).any()]
        shown = [v for v in found if v not in hidden]
        for value in shown:
            _check(value)
        for value in values.values():
            value.uses += 1
        self.values += [*new.values(), *shown]
        self.hidden += hidden
        names = {port: each(x, lambda x: getattr(x, "name", x)) for port, x in used.items()}
        results = tuple(value.name for value in found)
        self.steps.append(Step(method, names, attributes, results, dtype, layout))
        return found

    def _value(self, x: Any, new: dict[int, Value]) -> Any:
        """The value at a port: an operand gets one, the same for all its ports."""
        if not isinstance(x, Operand):
            return x
        if id(x) not in new:
            if min(x.shape, default=1) < 1 or math.prod(x.shape) > ELEMENTS:
                raise GraphError("larger or smaller than an operand of a random graph")
            number = len(self.values) + len(new)
            tensor = self.builder.input(f"x{number}", x.shape, x.dtype)
            state(tensor, None, x.layout)
            array = x.draw(self.seed, 0, number).astype(float)
            new[id(x)] = Value(f"x{number}", tensor, array, x)
        return new[id(x)]

    def _rescale(self, last: Value, terms: int, others: list[Value]) -> None:
        """Scales a new operand of a product of sums of ``terms`` so that the result has about unit
        variance."""
        if last.operand and last.dtype in FLOATS and others:
            squares = math.prod(float(np.mean(v.array * v.array)) + 1e-12 for v in others)
            scale = float(f"{(max(terms, 1) * squares) ** -0.5:.3g}")
            last.operand = replace(last.operand, scale=scale)
            last.array = last.operand.draw(self.seed, 0, int(last.name[1:])).astype(float)


def each(x: Any, function: Callable[[Any], Any]) -> Any:
    """A function of what stands at a port, or of each item of a list that does."""
    return [function(item) for item in x] if isinstance(x, list) else function(x)


def attends(node: Node) -> bool:
    """Whether a node is attention or its backward."""
    return hasattr(node, "band")


def state(tensor: Any, dtype: str | None, layout: str | None) -> None:
    """States a tensor's dtype and how it lies in memory."""
    if dtype is not None:
        tensor.set_data_type(dtype)
    if layout is not None and len(tensor.shape) > 2:
        tensor.set_stride(packed_strides(tensor.shape, LAYOUTS[layout](len(tensor.shape))))


def _results(node: Any, flat: dict[str, Any], tensors: Any) -> list[np.ndarray]:
    """What an operation's tensors keep, in float64."""
    ones = (1,) * len(tensors[0].shape)
    arrays = {port: getattr(x, "array", x) for port, x in flat.items()}
    arrays = {port: np.reshape(x, np.shape(x) or ones) for port, x in arrays.items()}
    is_backward = hasattr(node, "extent") and "grad" in arrays
    operation = _normalization_backward if is_backward else oracle.OPERATIONS[node.method]
    with np.errstate(all="ignore"):
        found = operation(node, **arrays)
        found = found if isinstance(found, tuple) else (found,)
        stored = (oracle.stored(x, str(t.dtype)) for x, t in zip(found, tensors, strict=True))
        return [x.astype(np.float64) for x in stored]


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


def _check(value: Value) -> None:
    """Raises GraphError for values with which no comparison would mean something."""
    x, limit = value.array, 2.0**20 if value.dtype == "int32" else LARGEST
    vanishes = is_floating(value.dtype) and not np.mean(x * x) >= LEAST_RMS**2
    if value.dtype != "bool" and (vanishes or not float(np.max(np.abs(x))) <= limit):
        raise GraphError("the values are not tame")
