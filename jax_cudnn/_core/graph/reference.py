"""Runs a GraphSpec in jnp: lowering away from CUDA, oracle of the tests, default derivative."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import jax
import jax.numpy as jnp

from .dtypes import FP8, INTEGERS, is_floating, itemsize
from .node import Node
from .options import lax_precision
from .spec import GraphSpec

WIDE, NARROW = "wide", "narrow"
_parted: ContextVar[bool] = ContextVar("parted", default=True)
_HALVES = ("bfloat16", "float16")
_CHOSEN = [{"bfloat16"}, {"float16"}]


@contextmanager
def in_one_part() -> Iterator[None]:
    """While references are traced for their axes only, which parts would hide."""
    token = _parted.set(False)
    try:
        yield
    finally:
        _parted.reset(token)


def may_part() -> bool:
    """Whether a reference may compute in parts, to save memory."""
    return _parted.get()


def evaluate(
    spec: GraphSpec, *operands: jax.Array, products: str = "", read: Collection[str] = ()
) -> list[jax.Array]:
    """The outputs of the graph for operands in the order of ``spec.inputs``.

    Each node computes in its compute type and its result is rounded to the dtype its tensor has
    in the spec, as in a fused plan. ``read`` names the outputs that later computations of the same
    program read.

    ``products`` adapts products of 16-bit operands to a backend of XLA; their values stay the
    same. WIDE converts the operands to float32, because XLA's CPU backend lacks some of the others.
    NARROW requests a 16-bit result where the spec has one: a GPU accumulates in float32 anyway, and
    uses slow kernels for a float32 result. A bias added to it stays in 16 bits, too: XLA's matmul
    library adds it in float32 before rounding.
    """
    with jax.numpy_rank_promotion("allow"):  # a user's setting is for the user's code only
        return _evaluated(spec, operands, products, read)


def _evaluated(
    spec: GraphSpec, operands: Sequence[jax.Array], products: str, read: Collection[str]
) -> list[jax.Array]:
    values = dict(zip(spec.inputs, operands, strict=True))
    kind = "float64" if spec.has_float64 else "float32"
    for constant in spec.constants:
        assert constant.value is not None
        exact = kind if constant.dtype == "float32" else constant.dtype
        values[constant.name] = jnp.full(constant.shape, constant.value, exact)
    precision = lax_precision(spec.options.precision)
    made = {name: port for call in spec.calls for port, name in call.outputs}
    inside = {name for call in spec.calls for _, name in call.inputs}
    returned: dict[str, jax.Array] = {}
    biased = _biased(spec) if products == NARROW else {}
    for call in spec.calls:
        again = call.node.redraws({port: made.get(name, "") for port, name in call.inputs})
        node = call.node.leaving(again) if again else call.node
        inputs = {port: values[name] for port, name in call.inputs if port not in again}
        if node.product:
            name = call.outputs[0][1]
            dtype = biased.get(name, spec.tensor(name).dtype)
            node, inputs = _suited(node, inputs, dtype, products)
            results = node.reference(**inputs, precision=precision)
            if name in biased:
                values[name] = results[0]
                continue
        elif not biased.keys().isdisjoint(name for _, name in call.inputs):
            results = node.reference(**inputs)
        else:
            results = applied(node, inputs)
        for (_, name), result in zip(call.outputs, results, strict=True):
            dtype, is_read = spec.tensor(name).dtype, name in inside or name in read
            halved = (dtype, str(result.dtype)) == ("bfloat16", "float32")
            if halved and products == NARROW and name in inside and name in spec.outputs:
                kept = _kept(result, dtype) if name in read else result
                returned[name] = rounded(kept, dtype)
                values[name] = _of_bits(returned[name])
            else:
                values[name] = rounded(_kept(result, dtype) if is_read else result, dtype)
    return [returned.get(name, values[name]) for name in spec.outputs]


def applied(node: Node, inputs: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """A node's results, not yet rounded, for operands of any dtype."""
    exact = node.chooses and {str(x.dtype) for x in inputs.values()} in _CHOSEN
    if not (exact or node.product or node.moves or node.leftover):
        compute = node.accumulator
        inputs = {port: x.astype(compute) for port, x in inputs.items()}
    return node.reference(**inputs)


def _biased(spec: GraphSpec) -> dict[str, str]:
    """The 16-bit products whose only reader adds a bias, with operands and sum of one dtype: the
    names of their results, with that dtype."""
    reads = Counter(name for call in spec.calls for _, name in call.inputs)
    reads.update(spec.outputs)
    makers = {call.outputs[0][1]: call for call in spec.calls if call.node.product}
    found = {}
    for call in (call for call in spec.calls if call.node.adds):
        dtype = spec.tensor(call.outputs[0][1]).dtype
        for product in (name for _, name in call.inputs if name in makers and reads[name] == 1):
            if not spec.is_bias(call, makers[product]):
                continue
            operands = {name for _, name in (*call.inputs, *makers[product].inputs)} - {product}
            if dtype in _HALVES and {spec.tensor(name).dtype for name in operands} == {dtype}:
                found[product] = dtype
    return found


def _suited(
    node: Node, inputs: dict[str, jax.Array], result: str, products: str
) -> tuple[Node, dict[str, jax.Array]]:
    if node.compute_data_type != "float32":
        return node, inputs
    if products == WIDE:
        wide = {port: x for port, x in inputs.items() if str(x.dtype) in _HALVES}
        inputs = {**inputs, **{port: x.astype(jnp.float32) for port, x in wide.items()}}
    elif products == NARROW and result in _HALVES:
        if {str(x.dtype) for x in inputs.values()} == {result}:
            node = replace(node, compute_data_type=result)
    return node, inputs


def _of_bits(value: jax.Array) -> jax.Array:
    """bfloat16 as float32, by a bit operation that XLA does not simplify as a conversion: so it
    reads the stored value, and does not also store and read the wider one."""
    bits = jax.lax.bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)


def _kept(value: jax.Array, dtype: str) -> jax.Array:
    """A value reduced to the precision of a dtype, by a separate operation: XLA removes a
    conversion to a narrower float and back."""
    if not is_floating(dtype) or not is_floating(str(value.dtype)):
        return value
    if itemsize(dtype) >= itemsize(str(value.dtype)):
        return value
    cut, largest = rounded(value, dtype).astype(value.dtype), float(jnp.finfo(dtype).max)
    cut = jax.lax.reduce_precision(cut, jnp.finfo(value.dtype).nexp, jnp.finfo(dtype).nmant)
    return jnp.where(jnp.abs(cut) > largest, jnp.copysign(jnp.inf, cut), cut)


def rounded(value: jax.Array, dtype: str) -> jax.Array:
    """A value in another dtype, as cuDNN stores it: integers saturate, and floats round to the
    nearest integer (even); to float8 they saturate, too."""
    target = jnp.dtype(dtype)
    if value.dtype == target:
        return value
    if dtype in FP8:
        largest = float(jnp.finfo(target).max)
        return jnp.clip(value, -largest, largest).astype(target)
    if dtype in INTEGERS:
        limits = jnp.iinfo(target)
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = jnp.round(value)
        return jnp.clip(value, limits.min, limits.max).astype(target)
    return value.astype(target)
