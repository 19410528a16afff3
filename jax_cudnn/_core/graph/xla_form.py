"""How XLA computes a graph best on a GPU: as a user of JAX would have written it.

The reference keeps every rounding of the graph, which XLA pays for with conversions that it cannot
fuse. Here, values inside of the graph have the dtype in which they are made; only results, float8
and integers are rounded as the graph says (docs/numerics.md states what this costs). Besides:

- A product of 16-bit operands has a 16-bit result where only operations that keep the size of its
  error stand between it and 16-bit results of the graph: XLA writes half as much, and its libraries
  add a bias or a residual, and a relu after them, to a result of that dtype only.
- A factor of a product's result is multiplied into an operand where that is smaller.
- A node may compute in another way than its reference (:meth:`.node.Node.xla`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from . import reference
from .dtypes import FLOATS, FP8, arithmetic, is_floating, itemsize, wide_dtype
from .node import Node
from .options import lax_precision
from .planned import MATRICES
from .reference import HALVES, applied, given, kept, rounded, steps
from .spec import Call, GraphSpec

NARROW = "narrow"
Values = Mapping[str, jax.Array]


def evaluate(
    spec: GraphSpec, *operands: jax.Array, products: str = "", read: Collection[str] = ()
) -> list[jax.Array]:
    """As :func:`.reference.evaluate`; ``products`` may also be NARROW: the form for a GPU, which
    rounds less and in other places."""
    if products != NARROW:
        return reference.evaluate(spec, *operands, products=products, read=read)
    with jax.numpy_rank_promotion("allow"):  # a user's setting is for the user's code only
        return _narrow(spec, operands, read)


def _narrow(
    spec: GraphSpec, operands: Sequence[jax.Array], read: Collection[str]
) -> list[jax.Array]:
    values, form = given(spec, operands), _Form(spec)
    returned: dict[str, jax.Array] = {}
    for call, inputs in steps(_products_last(spec), values):
        wanted = {port for port, name in call.outputs if name in {*form.readers, *spec.outputs}}
        node = call.node.without({*call.node.results} - wanted) if wanted else call.node
        if node.anchor.product:  # of a result of the graph it reads what is stored
            stored = {port: name for port, name in call.inputs if name in returned}
            inputs |= {port: returned[name] for port, name in stored.items()}
        results = dict(zip(node.results, form.results(call, node, inputs, values), strict=True))
        for port, name in call.outputs:
            if port not in results:
                continue
            result = results[port]
            dtype, inside = spec.tensor(name).dtype, name in form.readers
            if name not in spec.outputs:
                values[name] = _inside(result, dtype)
                continue
            exact = kept(result, dtype) if name in read else result
            values[name] = returned[name] = rounded(exact, dtype)
            if inside and (dtype, str(result.dtype)) == ("bfloat16", "float32"):
                values[name] = _of_bits(returned[name])
            if (wide := _summed_as_written(spec, call)) is not None:
                values[wide] = _of_bits(returned[name])
    return [returned.get(name, values[name]) for name in spec.outputs]


class _Form:
    """The dtypes in which the products of a graph and what follows them are computed."""

    def __init__(self, spec: GraphSpec) -> None:
        self.spec = spec
        self.readers: dict[str, list[Call]] = {}
        for call in spec.calls:
            for _, name in call.inputs:
                self.readers.setdefault(name, []).append(call)
        self._borne: dict[tuple[str, str], bool] = {}
        self._held: dict[str, str] = {}
        """Products, and what was added to them, in 16 bits."""
        self._scaled: dict[str, tuple[str, jax.Array | None]] = {}
        """Results that are a factor times a product -> that product, with the factor in it, and
        what is added."""

    def results(
        self, call: Call, node: Node, inputs: dict[str, jax.Array], values: Values
    ) -> Sequence[jax.Array]:
        """A call's results, before they are rounded."""
        result = call.outputs[0][1]
        if node.anchor.product:
            return self._product(call, node, inputs, values)
        held = {self._held.get(name, "") for _, name in call.inputs} - {""}
        dtype = held.pop() if len(held) == 1 else ""
        if result in self._scaled:
            product, offset = self._scaled[result]
            self._held |= {result: dtype}
            found = values[product]
            return (found if offset is None else found + offset.astype(found.dtype),)
        if dtype and (node.algebra.adds or node.algebra.multiplies) and self._bears(result, dtype):
            shape = self.spec.tensor(result).shape
            if all(str(x.dtype) == dtype or x.shape != shape for x in inputs.values()):
                self._held[result] = dtype  # also of a bias or a factor, which are few numbers
                return node.reference(**{port: x.astype(dtype) for port, x in inputs.items()})
        if node.algebra.chooses or node.algebra.moves:
            self._held |= {result: dtype}
        return node.xla(**inputs) or applied(node, inputs)

    def _product(
        self, call: Call, node: Node, inputs: dict[str, jax.Array], values: Values
    ) -> Sequence[jax.Array]:
        dtype = self._held[call.outputs[0][1]] = self._half(call)
        if dtype:
            node = replace(node, compute_data_type=dtype)
        if dtype or all(x.dtype.itemsize > 2 for x in inputs.values()):
            inputs = self._with_factor(call, inputs, values)
        precision = lax_precision(self.spec.options.precision)
        found = node.xla(**inputs, precision=precision)
        return found or node.reference(**inputs, precision=precision)

    def _half(self, call: Call) -> str:
        """The 16-bit dtype in which XLA is to write a product; "" where the graph's holds."""
        result = call.outputs[0][1]
        operands = {self.spec.tensor(name).dtype for _, name in call.inputs}
        if call.node.compute_data_type != "float32":
            return ""
        dtype = self.spec.tensor(result).dtype
        (only, *others) = operands
        if others:
            return ""
        if dtype in HALVES and (
            only == dtype or (only in FP8 and call.node.anchor.order == MATRICES)
        ):
            return dtype
        if only in FP8 and call.node.anchor.order == MATRICES:
            only = "bfloat16"  # float16 may overflow before a scale follows
        return only if only in HALVES and self._bears(result, only) else ""

    def _bears(self, name: str, dtype: str) -> bool:
        """Whether a value may be rounded to a 16-bit dtype: it becomes only results that are, and
        operations in between make no more of its error."""
        if (name, dtype) not in self._borne:
            stays = name not in self.spec.outputs
            self._borne[name, dtype] = (
                stays or self.spec.tensor(name).dtype in (dtype, *FP8)
            ) and all(self._passes(call, name, dtype) for call in self.readers.get(name, ()))
        return self._borne[name, dtype]

    def _passes(self, call: Call, name: str, dtype: str) -> bool:
        """Whether a reader of such a value makes no more of its error."""
        node = call.node
        if node.anchor.product:
            return self.spec.tensor(name).dtype == dtype
        if node.anchor:  # a normalization, and its statistics, too
            return node.algebra.smooth
        smooth = node.algebra.smooth or node.algebra.moves
        return smooth and all(self._bears(made, dtype) for _, made in call.outputs)

    def _with_factor(
        self, call: Call, inputs: dict[str, jax.Array], values: Values
    ) -> dict[str, jax.Array]:
        """The operands of a product, with the factor in them by which its only reader multiplies
        its result."""
        result = call.outputs[0][1]
        readers = self.readers.get(result, [])
        if len(readers) != 1 or result in self.spec.outputs:
            return inputs
        (reader,) = readers
        others = {port: values.get(name) for port, name in reader.inputs if name != result}
        known = {port: x for port, x in others.items() if x is not None}
        line = _line(reader.node, known) if len(known) == len(reader.inputs) - 1 else None
        scaled = None if line is None else _scaled(call.node, inputs, line[0])
        if line is None or scaled is None:
            return inputs
        self._scaled[reader.outputs[0][1]] = result, line[1]
        return scaled


def _line(node: Node, known: Values) -> tuple[jax.Array, jax.Array | None] | None:
    """The factor and the summand with which a node's result follows from the one operand that
    ``known`` lacks; None if it does not."""
    if node.algebra.multiplies and len(known) == 1:
        return next(iter(known.values())), None
    port, kind = node.algebra.affine, arithmetic(node.compute_data_type)
    if not port or port in known:
        return None
    zero = jnp.zeros(jnp.broadcast_shapes(*map(jnp.shape, known.values())), kind)
    function = lambda x: applied(node, {**known, port: x})[0]  # noqa: E731
    summand, factor = jax.jvp(function, (zero,), (jnp.ones_like(zero),))
    return factor, summand


def _scaled(node: Node, inputs: Values, factor: jax.Array) -> dict[str, jax.Array] | None:
    """The operands with which a product gives its result times a factor of the result's rank; None
    where that does not go into one of them."""
    port = node.algebra.scaled
    if not port or str(inputs[port].dtype) not in FLOATS:
        return None
    (own,) = (of.axes for of in node.ports.inputs if of.name == port)
    result = node.ports.outputs[0].axes
    (letter,) = {*own} & {*result}
    at = result.index(letter)
    if factor.ndim != inputs[port].ndim or factor.size not in (1, factor.shape[at]):
        return None
    factor = jnp.swapaxes(factor, own.index(letter), at)
    factor = factor.astype(wide_dtype(inputs[port], factor))
    product = inputs[port].astype(factor.dtype) * factor
    return {**inputs, port: product.astype(inputs[port].dtype)}


def _products_last(spec: GraphSpec) -> list[Call]:
    """The calls in an order in which a product comes only after what does not need it, and a sum
    after what writes its operand."""
    waiting, found = [*spec.calls], []
    while waiting:
        missing = {name for call in waiting for _, name in call.outputs}
        ready = [c for c in waiting if missing.isdisjoint(name for _, name in c.inputs)]
        call = min(
            ready,
            key=lambda call: (call.node.anchor.product, _summed_as_written(spec, call) is None),
        )
        waiting.remove(call)
        found.append(call)
    return found


def _summed_as_written(spec: GraphSpec, call: Call) -> str | None:
    """The value that a call writes as a bfloat16 result of the graph, and that is summed besides: a
    gradient, read by products and for that of a bias."""
    if call.node.method != "identity":
        return None
    ((_, name),), result = call.inputs, call.outputs[0][1]
    if (spec.tensor(name).dtype, spec.tensor(result).dtype) != ("float32", "bfloat16"):
        return None
    readers = [c for c in spec.calls if c is not call and name in {n for _, n in c.inputs}]
    sums = all(reader.node.algebra.sums for reader in readers)
    inside = name not in (*spec.inputs, *spec.outputs)
    return name if inside and sums and result in spec.outputs else None


def _inside(value: jax.Array, dtype: str) -> jax.Array:
    """A value that nothing but the graph reads: float8, float4 and integers are rounded."""
    if is_floating(dtype) and is_floating(str(value.dtype)):
        if itemsize(dtype) > itemsize(str(value.dtype)):
            return value
    return rounded(value, dtype)


def _of_bits(value: jax.Array) -> jax.Array:
    """bfloat16 as float32, by a bit operation that XLA does not simplify as a conversion: so it
    reads the stored value, and does not also store and read the wider one."""
    bits = jax.lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)
