"""Builds a graph derived from another one: the ``g`` that the derivative rules of nodes take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..graph.builder import GraphBuilder
from ..graph.dims import Shape
from ..graph.dtypes import is_floating, itemsize
from ..graph.node import Node
from ..graph.options import Options
from ..graph.spec import Call, GraphSpec, Origin, Tensor, intern
from ..graph.tensor import GraphTensor


class Derivation(GraphBuilder):
    """A builder with the options of another graph, except the engine, which fits only it."""

    def __init__(self, spec: GraphSpec) -> None:
        super().__init__(replace(spec.options, engine=None, knobs=()))
        self._engine = spec.origin.engine or spec.options.named_engine
        floats = {
            t.dtype for t in (*spec.input_tensors, *spec.output_tensors) if is_floating(t.dtype)
        }
        self._narrow = floats.pop() if len(floats) == 1 else ""  # what all arrays are of
        self._moved: dict[str, GraphTensor] = {}  # what has the dtype of its operand, and that
        self._constants: dict[tuple[str | None, str, int], GraphTensor] = {}
        self._casts: dict[tuple[str, str], GraphTensor] = {}  # by what is cast, and to what

    @property
    def options(self) -> Options:
        """Those of the derived graph."""
        return self._options

    def declare(self, tensor: Tensor) -> GraphTensor:
        """An operand like a tensor of another graph; the name may differ."""
        made = self._add(tensor)
        self._inputs.append(made.name)
        return made

    def constant(self, tensor: Tensor, rank: int) -> GraphTensor:
        """A by-value constant of another graph, at a rank."""
        key = tensor.literal, tensor.dtype, rank
        if key not in self._constants:
            name = f"c{len(self._tensors)}"
            self._constants[key] = self._add(replace(tensor, name=name, shape=(1,) * rank))
        return self._constants[key]

    def apply(self, node: Node, /, **inputs: GraphTensor) -> tuple[GraphTensor, ...]:
        """The results of a node for its ports."""
        if node.algebra.moves and len(dtypes := {x._state.dtype for x in inputs.values()}) > 1:
            # Values inside a graph may be wider than the arrays with which the node was checked.
            known = (dtype for dtype in ("float64", "float32") if dtype in dtypes)
            wide = next(known, max(dtypes, key=itemsize))
            inputs = {port: self.rounded(x, wide) for port, x in inputs.items()}
        ports = {name: i for i, name in enumerate(node.ports.input_names)}
        given = sorted(inputs.items(), key=lambda item: ports.get(item[0], 0))
        results = self._append(node, {port: x._state for port, x in given})
        results = results if isinstance(results, tuple) else (results,)
        given = inputs.values()
        if node.anchor.keeps_dtypes:
            for x in results:
                self.fixed(x, x._state.dtype)
        elif node.algebra.moves:
            self._moved |= {x.name: next(iter(given)) for x in results}
        elif node.algebra.chooses and all(map(self._keeps_dtype, given)):
            dtypes = {x._state.dtype for x in given}
            for x in results if len(dtypes) == 1 else ():
                self.fixed(x, *dtypes)
        return results

    def replay(
        self, spec: GraphSpec, call: Call, values: Mapping[str, GraphTensor]
    ) -> dict[str, GraphTensor]:
        """A call of another graph, applied to other values; its results keep their dtypes."""
        made = self.apply(call.node, **{port: values[name] for port, name in call.inputs})
        results = {}
        for (_, name), x in zip(call.outputs, made, strict=True):
            tensor = spec.tensor(name)
            results[name] = self.fixed(self.ordered(x, tensor.order), tensor.dtype)
        return results

    def fixed(self, x: GraphTensor, dtype: str) -> GraphTensor:
        """A result whose dtype is set and does not change."""
        self._typed.add(x.name)
        x._state = self._tensors[x.name] = replace(x._state, dtype=dtype)
        return x

    def ordered(self, x: GraphTensor, order: tuple[int, ...] | None) -> GraphTensor:
        """A result with its order in memory."""
        x._state = self._tensors[x.name] = replace(x._state, order=order)
        return x

    def like(self, x: GraphTensor, tensor: Tensor) -> GraphTensor:
        """A result of the graph, with the memory order that another tensor states."""
        stated = x._state.order is not None or x.name in self._inputs or tensor.order is None
        return x if stated or x.shape != tensor.shape else self.ordered(x, tensor.order)

    def rounded(self, x: GraphTensor, dtype: str, alone: bool = False) -> GraphTensor:
        """The tensor in a dtype: computed in it, or cast to it.

        Others may read the tensor, too. So it is computed in that dtype only if this is the dtype
        of values inside graphs, the 16-bit dtype of all arrays, or if there is no other reader.
        """
        kept = self._keeps_dtype(x)
        if kept and x._state.dtype == dtype:
            return x
        wide = self._options.intermediate_data_type
        wide = "float64" if x._state.dtype == "float64" else wide
        harmless = alone or dtype == wide or (dtype == self._narrow and itemsize(dtype) == 2)
        if kept or not harmless:
            if (x.name, dtype) not in self._casts:
                copy = self._append(vocabulary().cast, {"input": x._state})
                self._casts[x.name, dtype] = self.fixed(copy, dtype)
            return self._casts[x.name, dtype]
        source: GraphTensor | None = x
        while source is not None and source.name not in self._typed:
            self.fixed(source, dtype)
            source = self._moved.get(source.name)
        return x

    def _keeps_dtype(self, x: GraphTensor) -> bool:
        """Whether a tensor's dtype is set: otherwise it becomes that of values inside a graph, or
        of the result array."""
        if x.name in self._inputs or x.name in self._typed or x._state.value is not None:
            return True
        return x.name in self._moved and self._keeps_dtype(self._moved[x.name])

    def sum(self, terms: Iterable[GraphTensor]) -> GraphTensor:
        """The sum of one or more tensors."""
        first, *others = terms
        for other in others:
            (first,) = self.apply(vocabulary().add, a=first, b=other)
        return first

    def reshaped(self, x: GraphTensor, shape: Shape) -> GraphTensor:
        if x.shape == tuple(shape):
            return x
        return self.apply(vocabulary().reshape(tuple(shape)), input=x)[0]

    def transposed(self, x: GraphTensor, permutation: Iterable[int]) -> GraphTensor:
        permutation = tuple(permutation)
        if permutation == tuple(range(x.ndim)):
            return x
        return self.apply(vocabulary().transpose(permutation), input=x)[0]

    def broadcast(self, x: GraphTensor, shape: Shape) -> GraphTensor:
        if x.shape == tuple(shape):
            return x
        return self.apply(vocabulary().broadcast(tuple(shape)), input=x)[0]

    def reduced(self, x: GraphTensor, shape: Shape) -> GraphTensor:
        """The sum over the dimensions that are 1 in a shape: the cotangent of a broadcast."""
        if x.shape == tuple(shape):
            return x
        return self.apply(vocabulary().sum(tuple(shape)), input=x)[0]

    def zeros(self, like: Tensor) -> GraphTensor:
        """Zeros of a tensor's shape and dtype."""
        zero = self.constant(Tensor("", (), "float32", (0.0).hex()), len(like.shape))
        return self.rounded(self.broadcast(zero, like.shape), like.dtype)

    def finished(self, outputs: Iterable[GraphTensor], origin: Origin) -> GraphSpec | None:
        """The graph that computes those tensors that are not operands; None if all are."""
        computed = [x for x in outputs if x.name not in self._inputs]
        if not computed:
            return None
        self._computed_narrow({x.name for x in computed})
        origin = replace(origin, engine=self._engine)
        return intern(replace(self.finish(computed), origin=origin))

    def _computed_narrow(self, outputs: Collection[str]) -> None:
        """Merges an elementwise operation with a cast that is the only reader of its result.

        Only if values inside the graph are float32, because then the operation does not round.
        """
        if self._options.intermediate_data_type != "float32":
            return
        readers = Counter(name for call in self._calls for name in {*dict(call.inputs).values()})
        fixed = {*outputs, *self._typed, *self._inputs}
        makers = {name: call for call in self._calls for _, name in call.outputs}
        copies = {
            name: copy.name
            for (name, _), copy in self._casts.items()
            if readers[name] == 1
            and name not in fixed
            and name in makers  # not a constant
            and self._is_elementwise(makers[name])
        }
        made = {*copies.values()}
        self._calls = [
            replace(call, outputs=tuple((port, copies.get(x, x)) for port, x in call.outputs))
            for call in self._calls
            if not made.intersection(dict(call.outputs).values())
        ]

    def _is_elementwise(self, call: Call) -> bool:
        node, ports = call.node, (*call.inputs, *call.outputs)
        if node.algebra.moves or node.algebra.chooses:
            return False
        tensors = {port: self._tensors[name] for port, name in ports}
        return node.ports.is_elementwise or bool(node.boundary(tensors).masks)


class Vocabulary(NamedTuple):
    """Nodes, or functions that make them."""

    add: Node
    """Sums two tensors."""
    cast: Node
    """Converts its operand to another dtype."""
    reshape: Callable[[Shape], Node]
    transpose: Callable[[tuple[int, ...]], Node]
    broadcast: Callable[[Shape], Node]
    """Repeats dimensions of size 1."""
    sum: Callable[[Shape], Node]
    """Sums over the dimensions that are 1 in a shape."""
    moves: tuple[type[Node], ...]
    """Classes of nodes that only move elements, which XLA does equally well outside a graph."""
    repeats: tuple[type[Node], ...]
    """Classes of nodes that repeat elements, whose transpose is a sum."""


_known: list[Vocabulary] = []


def register_vocabulary(vocabulary: Vocabulary) -> None:
    """Called once, by ``jax_cudnn.ops``."""
    _known[:] = [vocabulary]


def vocabulary() -> Vocabulary:
    """The registered operations."""
    (known,) = _known
    return known
