"""Matrix multiplication; also of arrays with several dimensions for rows, columns and the sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..._core.graph.builder import register
from ..._core.graph.dims import Dims, Shape
from ..._core.graph.dtypes import FP8, PRODUCTS, arithmetic, itemsize
from ..._core.graph.layout import packed_strides
from ..._core.graph.node import LEAD, Algebra, Fold, Node, frozen
from ..._core.graph.planned import ANY, MATRICES, About, Anchor, Edge, Engines, Example, Work
from ..._core.graph.promotion import computed, is_tiny, product_dtype, product_operands
from ..._core.graph.spec import Call
from ..._core.reasons import Kind, Reason
from ..._core.rules import Derivation, GraphSpec, GraphTensor, Tensor, Tensors, Values
from ..pointwise.elementwise import Pointwise
from ..transformations import alike, product_jvp

_ALIGNED = 16  # bytes


def _computing(names: Iterable[str], graph: GraphSpec) -> list[Call]:
    """The calls that compute these tensors before a product, last first."""
    needed, found = {*names}, []
    for call in reversed(graph.calls):
        if not call.node.anchor and needed & {name for _, name in call.outputs}:
            needed.update(name for _, name in call.inputs)
            found.append(call)
    return found


def _turned(rank: int) -> tuple[int, ...]:
    """The memory order of transposed matrices."""
    return (*range(rank - 2), rank - 1, rank - 2)


def turned(g: Derivation, x: GraphTensor) -> GraphTensor:
    """A batch of matrices, transposed without a copy."""
    swapped = _turned(x.ndim)
    order = x._state.order or tuple(range(x.ndim))
    result = g.transposed(x, swapped)
    return g.ordered(result, tuple(swapped.index(axis) for axis in order))


@register
@frozen
class Matmul(Node):
    """Batched matrix product ``C[...,m,n] = sum over k of A[...,m,k] * B[...,k,n]``.

    Args:
        A: (..., M, K), with any number of batch dimensions.
        B: (..., K, N), with as many batch dimensions; size 1 in one operand broadcasts.
            ``.set_stride`` on an operand declares that it is stored transposed, which avoids a
            copy.
        padding: pygraph's value for elements beyond ragged sizes; no effect on full matrices.

    Element types: floats, accumulated in float32 (float32 inputs may be rounded to TF32, as in
    lax at default precision); int8, accumulated in int32. Raises GraphError if the shapes do not
    fit. Source: cuDNN documentation, ``CUDNN_BACKEND_OPERATION_MATMUL``.
    """

    method = "matmul"
    ports = Dims.parse("A: ... m k, B: ... k n -> C: ... m n")
    about = About(
        requires="operands of one dtype, or two float8 formats; cast an operand of another dtype "
        "in the graph with g.identity(x).set_data_type(...), which costs no pass over memory; "
        "batch dimensions that broadcast all or none, in every tensor of the graph, and are "
        "contiguous in memory",
        jax_names=("matmul", "dot", "dot_general", "einsum", "tensordot"),
    )
    anchor = Anchor(product=True, prologue=ANY, broadcasts=ANY, order=MATRICES)
    dtypes = PRODUCTS
    examples = (
        Example.of("A: 1 128 256, B: 1 256 512"),
        Example.of("A: 4 64 96, B: 4 96 40", "float16"),
        Example.of("A: 3 63 65, B: 1 65 33", "float32"),
        Example.of("A: 1 64 32, B: 4 32 48", padding=1.0),
        Example.of("A: 2 64 128, B: 2 128 32", "int8"),
        Example.of("A: 2 3 64 128, B: 2 3 128 32"),
        Example.of("A: 2 3 64 32, B: 1 1 32 48", "float16"),
        Example.of("A: 64 128, B: 128 32", "float16"),
        Example.of("A: 1 64 128, B: float8_e5m2 1 128 64", "float8_e4m3fn", out="bfloat16"),
        Example.of("A: 1 64 128, B: float32 1 128 64", alone=False),
    )

    padding: float = 0.0

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, tuple[Shape, str]]:
        return {"C": (super().infer(inputs)["C"][0], product_dtype(inputs))}

    def support(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Reason | None:
        floats = {tensors["A"].dtype, tensors["B"].dtype} & {"float32"}
        if floats and graph.options.precision in ("high", "highest"):
            return Reason(
                "cuDNN multiplies float32 matrices in TF32 only, which precision "
                f"{graph.options.precision!r} forbids (supported: precision 'default'; bfloat16, "
                "float16, float8 and int8 at any precision; float32 convolutions)",
                Kind.DTYPE,
            )
        read = [
            {name, *(source for call in _computing([name], graph) for _, source in call.inputs)}
            for name in (tensors["A"].name, tensors["B"].name)
        ]
        if any(math.prod(graph.tensor(name).shape) > 1 for name in set.intersection(*read)):
            # Measured on an H200 with cuDNN 9.19: relative errors of 0.4 to 1.7.
            if tensors["A"].name == tensors["B"].name:
                return Reason("both operands are the same tensor")
            return Reason(
                "both operands are computed from the same tensor: compute one before the call"
            )
        result = tensors["C"]
        innermost = result.order[-1] if result.order else len(result.shape) - 1
        if innermost < len(result.shape) - 2 and result.shape[innermost] > 1:
            # Seen on an H200 with cuDNN 9.19, in float32 (random call 49): most of it was wrong.
            return Reason("the batch of the result is innermost in memory")
        if tensors["A"].shape[-1] == 1:
            # Seen on an H200 with cuDNN 9.19, in one of two runs of the tangent of a random graph
            # (seed 81): results that are not finite.
            return Reason("an outer product: the contracted dimension is 1")
        computed = {tensors["A"].name, tensors["B"].name} - {*graph.inputs}
        batch = tensors["C"].shape[:-2]
        if any(t.name in computed and t.shape[:-2] != batch for t in tensors.values()):
            # Measured on an H200 with cuDNN 9.19: the kernel reads out of bounds.
            return Reason("an operand is computed in the graph and then broadcast over the batch")
        before = _computing(computed, graph)
        singular = [c for c in before if isinstance(c.node, Pointwise) and c.node.singular]
        if singular:
            # Measured on an H200 with cuDNN 9.19: operands beyond the edge of a matrix count as 0,
            # which becomes an infinity here, and infinity times another 0 makes the result NaN.
            return Reason(f"{singular[0].name} computes an operand and is not finite at 0")
        tiled = {n for call in graph.calls for port, n in call.inputs if port == "descale"}
        whole = [t for t in graph.input_tensors if math.prod(t.shape) > 1 and t.name not in tiled]
        rows = [t.shape[-1] * itemsize(t.dtype) for t in whole]
        if computed and any(size % _ALIGNED for size in rows):
            # Measured on an H200 with cuDNN 9.19: wrong results with rows of 12 bytes.
            return Reason(
                "an operand is computed in the graph from arrays whose rows are not a multiple of "
                f"{_ALIGNED} bytes"
            )
        return None

    def engines(self, tensors: Mapping[str, Tensor], graph: GraphSpec) -> Engines:
        # Measured on an H200 with cuDNN 9.19: with float32 operands, the cuBLASLt engine writes
        # garbage into 16-bit and 8-bit results.
        narrow = {tensor.dtype for tensor in graph.output_tensors} - {"float32"}
        return Engines(wrong=(0,) if graph.has_float32_product and narrow else ())

    def linear_in(self, ports: Collection[str]) -> bool:
        return len(ports) == 1

    jvp = product_jvp

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        operands = {port: tensors[port] for port in ("A", "B")}
        known = alike(g, {**inputs, **cotangents}, operands)
        (port,) = operands.keys() - inputs.keys()
        shape, loss = tensors[port].shape, known["C"]
        ones = (1,) * (loss.ndim - 2)
        if port == "B" and shape[:-2] == ones != loss.shape[:-2] == known["A"].shape[:-2]:
            # The sum over the batch becomes a sum over rows.
            rows = math.prod(loss.shape[:-1])
            known = {p: g.reshaped(known[p], (*ones, rows, known[p].shape[-1])) for p in ("A", "C")}
        # The cotangent has the memory order of its operand.
        lies_turned = tensors[port].order == _turned(len(shape))
        if port == "A":
            pair = (
                (known["B"], turned(g, known["C"]))
                if lies_turned
                else (known["C"], turned(g, known["B"]))
            )
        else:
            pair = (
                (turned(g, known["C"]), known["A"])
                if lies_turned
                else (turned(g, known["A"]), known["C"])
            )
        product = Matmul(compute_data_type=self.compute_data_type)
        (out,) = g.apply(product, A=pair[0], B=pair[1])
        out = turned(g, out) if lies_turned else out
        return {port: g.reduced(out, shape)}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        shape = tensors["A"].shape
        row, column = len(shape) - 2, len(shape) - 1
        rows, columns = Fold({"A": row, "C": row}), Fold({"B": column, "C": column})
        alone = shape[:-2] == (1,) * row
        if batched == {"A"} and alone:
            yield rows
        # Only along the batch an operand may broadcast.
        yield Fold(dict.fromkeys(tensors, 0 if row else LEAD), broadcast=("A", "B"))
        if batched == {"A"} and not alone:
            yield rows
        if batched == {"B"}:
            yield columns

    def work(self, tensors: Tensors) -> Work:
        (a, _), (c,) = self.ports.inputs, self.ports.outputs
        sizes = zip(tensors["A"].shape[::-1], a.axes[::-1], strict=False)
        depth = [size for size, axis in sizes if axis not in c.axes]
        return Work(2 * math.prod((*tensors["C"].shape, *depth)), self.method)

    def boundary(self, tensors: Tensors) -> Edge:
        batch = tuple(map(max, tensors["A"].shape[:-2], tensors["B"].shape[:-2]))
        whole = (batch, (1,) * len(batch))
        others = {port: t for port, t in tensors.items() if t.shape[:-2] not in whole}
        return Edge({port: (*batch, *tensor.shape[-2:]) for port, tensor in others.items()})

    def reference(
        self, A: jax.Array, B: jax.Array, *, precision: Any = None
    ) -> tuple[jax.Array, ...]:
        A, B = product_operands(A, B, accumulator=arithmetic(self.compute_data_type))
        return self._multiplied(A, B, precision)

    def xla(
        self, A: jax.Array, B: jax.Array, *, precision: Any = None
    ) -> tuple[jax.Array, ...] | None:
        # XLA multiplies float8 as it is, but for tiny matrices.
        first = self.batched if isinstance(self, Contraction) else -2
        matrices = (math.prod(x.shape[first:]) for x in (A, B))
        own = str(A.dtype) in FP8 and A.dtype == B.dtype and not is_tiny(*matrices)
        return self._multiplied(A, B, precision) if own else None

    def _multiplied(self, A: jax.Array, B: jax.Array, precision: Any) -> tuple[jax.Array, ...]:
        """The product of operands of one dtype."""
        kind = arithmetic(self.compute_data_type)
        return (jnp.matmul(A, B, precision=precision, preferred_element_type=kind),)


@frozen
class Contraction(Matmul):
    """``lax.dot_general`` of arranged operands: A (batch, rows, depth), B (batch, depth, columns),
    C (batch, rows, columns), with this many dimensions of each.

    All dimensions stay apart, so that a mesh may shard each of them. Where cuDNN is planned, a
    matmul of three dimensions replaces this node (``boundary.py``).
    """

    algebra = Algebra(merged=lambda node, _: Matmul(compute_data_type=node.compute_data_type))

    batched: int = 0
    rows: int = 1
    depth: int = 1
    columns: int = 1

    @property
    def ports(self) -> Dims:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _ports(self.batched, self.rows, self.depth, self.columns)

    def transpose(
        self, g: Derivation, cotangents: Values, inputs: Values, tensors: Tensors
    ) -> Values:
        operands = {port: tensors[port] for port in ("A", "B")}
        known = alike(g, {**inputs, **cotangents}, operands)
        (port,) = operands.keys() - inputs.keys()
        lead, tensor = self.batched, tensors[port]
        (batch, *others), ones = {x.shape[:lead] for x in known.values()}, (1,) * lead
        if port == "B" and tensor.shape[:lead] == ones != batch and not others:
            # The sum over the batch is one over rows.
            node = replace(self, batched=0, rows=lead + self.rows)
            like = {**tensors, "B": replace(tensor, shape=tensor.shape[lead:], order=None)}
            made = node.transpose(g, {"C": known["C"]}, {"A": known["A"]}, like)
            return {port: g.reshaped(made[port], tensor.shape)}
        if port == "A":
            first, shared = self.rows, self.columns
            sides = [(known["C"], self.rows), (known["B"], self.depth)]
        else:
            first, shared = self.depth, self.rows
            sides = [(known["A"], self.depth), (known["C"], self.columns)]
        # The cotangent has the memory order of its operand.
        lies_turned = tensor.order == _swapped(len(tensor.shape), lead, first)
        (left, rows), (right, columns) = sides[::-1] if lies_turned else sides
        if port == "A":
            right = _exchanged(g, right, lead, columns)
        else:
            left = _exchanged(g, left, lead, shared)
        node = replace(self, rows=rows, depth=shared, columns=columns)
        (out,) = g.apply(node, A=left, B=right)
        out = _exchanged(g, out, lead, rows) if lies_turned else out
        return {port: g.reduced(out, tensor.shape)}

    def folds(self, batched: frozenset[str], size: int, tensors: Tensors) -> Iterable[Fold]:
        at, operands = self.batched, ("A", "B")
        if batched == {"A"} and not at:
            yield Fold({"A": LEAD, "C": LEAD}, replace(self, rows=self.rows + 1))
        others = [tensors[port].shape[:at] for port in operands if port not in batched]
        if at and others == [(1,) * at]:
            yield Fold(dict.fromkeys(tensors, 0), broadcast=operands)
        node = replace(self, batched=at + 1)
        yield Fold(dict.fromkeys(tensors, LEAD), node, broadcast=() if at else operands)
        if batched == {"A"} and at and self.rows:
            yield Fold({"A": at, "C": at})
        if batched == {"B"} and self.columns:
            yield Fold({"B": at + self.depth, "C": at + self.rows})

    def boundary(self, tensors: Tensors) -> Edge:
        return Edge()

    def _multiplied(self, A: jax.Array, B: jax.Array, precision: Any) -> tuple[jax.Array, ...]:
        arrays = A, B
        letters = dict.fromkeys(axis for port in self.ports.inputs for axis in port.axes)
        number = {letter: i for i, letter in enumerate(letters)}
        given: list[Any] = []
        for x, other, port in zip(arrays, arrays[::-1], self.ports.inputs, strict=True):
            thin = tuple(i for i in range(self.batched) if x.shape[i] == 1 != other.shape[i])
            axes = [number[a] for i, a in enumerate(port.axes) if i not in thin]
            given += [jnp.squeeze(x, thin), axes]
        result = [number[a] for a in self.ports.outputs[0].axes]
        kind = arithmetic(self.compute_data_type)
        y = jnp.einsum(*given, result, precision=precision, preferred_element_type=kind)
        return (y,)


def contracted(
    g: Any, a: GraphTensor, b: GraphTensor, *, batched: int, depth: int, orders: Any = (None, None)
) -> GraphTensor:
    """The product of arranged operands, in these memory orders."""
    for x, order in zip((a, b), orders, strict=True):
        if order is not None:
            x.set_stride(packed_strides(x.shape, order))
    rows, columns = a.ndim - batched - depth, b.ndim - batched - depth
    node = Contraction(batched=batched, rows=rows, depth=depth, columns=columns)
    inputs = {"A": a._state, "B": b._state}
    return g._append(computed(node, g._options.compute_data_type, inputs), inputs)


@functools.cache
def _ports(batched: int, rows: int, depth: int, columns: int) -> Dims:
    def letters(letter: str, count: int) -> str:
        return " ".join(f"{letter}{i}" for i in range(count))

    b, m, k, n = map(letters, "bmkn", (batched, rows, depth, columns))
    return Dims.parse(f"A: {b} {m} {k}, B: {b} {k} {n} -> C: {b} {m} {n}", b)


def _swapped(rank: int, lead: int, first: int) -> tuple[int, ...]:
    """The axes with the groups that follow the batch exchanged; ``first`` is the first's rank."""
    at = lead + first
    return (*range(lead), *range(at, rank), *range(lead, at))


def _exchanged(g: Derivation, x: GraphTensor, lead: int, first: int) -> GraphTensor:
    """An operand with its two groups exchanged, without a copy."""
    axes = _swapped(x.ndim, lead, first)
    order: Sequence[int] = x._state.order or range(x.ndim)
    return g.ordered(g.transposed(x, axes), tuple(axes.index(axis) for axis in order))
