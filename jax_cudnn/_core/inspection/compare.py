"""Compares a graph's results with its reference: is the error larger than rounding explains?

The reference itself shows how large an error rounding explains: it runs again on operands that are
perturbed by the rounding error of the arithmetic. So a sum whose terms cancel, which is inaccurate
in any arithmetic, is not reported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph.by_reference import ByReference
from ..graph.dtypes import FP8, is_floating, wide_dtype
from ..graph.node import Node
from ..graph.reference import WIDE, evaluate
from ..graph.spec import GraphSpec

# Relative errors of correct computations: in float64, in float32 (exp, tanh and similar functions
# have about 16 bits on a GPU), with operands rounded to TF32's 10 bits, in float8 products, whose
# accumulator has fewer bits, and with a 16-bit accumulator. The tolerances of the fuzzer and the
# tests are based on the same measurements.
_FLOAT64, _FLOAT32, _TF32, _FLOAT8 = 2.0**-44, 2.0**-14, 2.0**-10, 2.0**-12
_HALF_ACCUMULATOR = 2.0**-9
# At most one boolean in this many may differ.
_EDGES = 1000

Figures = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Output:
    """One result of a graph, compared with its reference in float32, or in float64 (see ``wide``).

    Attributes:
        name, dtype, shape: of the result in the graph (inside shard_map, of one device's shard).
        largest: the largest ``|result - reference|``, over the finite elements.
        relative: ``|result - reference| / |reference|`` in the Euclidean norm, over these.
        times_rounding: the larger of both in units of what rounding explains: at most about 1 for
            a correct operation. Infinite where the result is NaN or Inf and the reference is not.
        nan, inf: how many elements of the result are NaN, or infinite.
        reference_nan, reference_inf: the same for the reference, in the range of that dtype.
        reference_largest: the largest finite ``|reference|``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    largest: float
    relative: float
    times_rounding: float
    nan: int = 0
    inf: int = 0
    reference_nan: int = 0
    reference_inf: int = 0
    reference_largest: float = 0.0

    @property
    def overflows(self) -> bool:
        """Whether the reference has finite values that the dtype cannot hold."""
        if not is_floating(self.dtype) or self.dtype in FP8:  # there, they saturate
            return False
        return self.reference_largest > float(jnp.finfo(self.dtype).max)


@dataclass(frozen=True)
class Comparison:
    """The comparison of all results. ``given_nan`` and ``given_inf`` count such elements of the
    operands; ``new`` counts NaN or Inf that only the results have, ``lost`` those that only the
    reference has."""

    outputs: tuple[Output, ...]
    given_nan: int
    given_inf: int
    new: int
    lost: int


def measure(spec: GraphSpec, on_gpu: bool) -> Callable[..., Any]:
    """A function from a graph's results and operands to figures, which can be compiled."""
    return functools.partial(_figures, wide(spec), inexactness(spec, on_gpu), len(spec.outputs))


def judge(spec: GraphSpec, figures: Any, on_gpu: bool) -> Comparison:
    """The comparison from the figures, each an array with one element per device."""
    given, lost, results = jax.device_get(figures)
    unit = inexactness(spec, on_gpu)
    outputs = tuple(
        _judged(tensor.name, tensor.dtype, tensor.shape, unit, f)
        for tensor, f in zip(spec.output_tensors, results, strict=True)
    )
    new = sum(int(f["new"].sum()) for f in results)
    return Comparison(
        outputs, int(given["nan"].sum()), int(given["inf"].sum()), new, int(lost.sum())
    )


def wide(spec: GraphSpec) -> GraphSpec:
    """The graph for float32 operands, with float32 accumulation, products at precision "highest",
    and 16-bit results in float32; all of it in float64 where the graph has float64. Rounding inside
    the graph is part of its definition and stays."""
    kind = wide_dtype(*spec.tensors).name
    read = {name for call in spec.calls for _, name in call.inputs}
    last = {*spec.outputs} - read
    tensors = tuple(
        replace(t, dtype=kind)
        if is_floating(t.dtype)
        and (t.name in spec.inputs or (t.name in last and t.dtype not in FP8))
        else t
        for t in spec.tensors
    )
    options = replace(spec.options, precision="highest")
    calls = tuple(replace(call, node=_in_float32(call.node)) for call in spec.calls)
    return replace(spec, tensors=tensors, calls=calls, options=options)


def _in_float32(node: Node) -> Node:
    """A node with a float32 accumulator in place of a narrower one."""
    if isinstance(node, ByReference):
        return replace(node, base=_in_float32(node.base))
    if node.compute_data_type in ("float16", "bfloat16"):
        return replace(node, compute_data_type="float32")
    return node


def inexactness(spec: GraphSpec, on_gpu: bool) -> float:
    """The relative error of a correct computation of a graph, without the rounding of results."""
    anchored = {
        spec.tensor(name).dtype for c in spec.calls if c.node.product for _, name in c.inputs
    }
    amounts = [_FLOAT64 if spec.has_float64 else _FLOAT32]
    if on_gpu and "float32" in anchored and spec.options.precision == "default":
        amounts.append(_TF32)
    if on_gpu and anchored & {*FP8}:
        amounts.append(_FLOAT8)
    if any(c.node != _in_float32(c.node) for c in spec.calls):
        amounts.append(_HALF_ACCUMULATOR)
    made = {name for c in spec.calls for _, name in c.outputs}
    read = {name for c in spec.calls for _, name in c.inputs}
    amounts += [_half_place(spec.tensor(name).dtype) for name in made & read]
    return max(amounts)


# -- on the device ---------------------------------------------------------------------------------


def _figures(spec: GraphSpec, unit: float, count: int, *arrays: Any) -> Any:
    """For ``count`` results followed by the operands: the operands' NaN and Inf, how many results
    are finite where the reference is not, and figures for each result."""
    results, operands = arrays[:count], arrays[count:]
    floats = [x for x in operands if _floating(x)]
    given = {"nan": _total(map(jnp.isnan, floats)), "inf": _total(map(jnp.isinf, floats))}
    kind = wide_dtype(*spec.tensors).name
    widened = [x.astype(kind) if _floating(x) else x for x in operands]
    with jax.default_matmul_precision("highest"):
        references = evaluate(spec, *widened, products=WIDE)
        moved = evaluate(spec, *(_moved(x, unit) for x in widened), products=WIDE)
    each = [
        _of_result(kind, result, reference, other)
        for result, reference, other in zip(results, references, moved, strict=True)
    ]
    lost = sum((f.pop("lost") for f in each), jnp.int32(0))
    return given, lost, each


def _of_result(exact: str, result: Any, reference: Any, moved: Any) -> dict[str, Any]:
    finite, over = _range(result.dtype, reference.astype(exact))
    # Integers are subtracted as integers: float32 cannot represent all of them.
    kind = exact if _floating(result) else jnp.promote_types(result.dtype, jnp.int32)
    result, reference, moved = (x.astype(kind) for x in (result, reference, moved))
    error, move = (jnp.abs((x - reference).astype(exact)) for x in (result, moved))
    values, size = result.astype(exact), jnp.abs(reference.astype(exact))
    right = jnp.isfinite(values)
    parts = {
        "error": jnp.where(right & jnp.isfinite(size), error, 0),
        "move": jnp.where(right & jnp.isfinite(move), move, 0),
        "size": jnp.where(right & jnp.isfinite(size), size, 0),
    }
    largest = {name: jnp.max(x, initial=0) for name, x in parts.items()}
    # Squares of large or small values exceed the dtype's range.
    scale = jnp.maximum(jnp.max(jnp.stack([*largest.values()])), jnp.finfo(exact).tiny)
    squares = {f"{name}_squares": jnp.sum(jnp.square(x / scale)) for name, x in parts.items()}
    return {
        **largest,
        **squares,
        "scale": scale,
        "reference_largest": jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0),
        "nan": _total([jnp.isnan(values)]),
        "inf": _total([jnp.isinf(values)]),
        "reference_nan": _total([jnp.isnan(size)]),
        "reference_inf": _total([over & ~jnp.isnan(size)]),
        "new": _total([~right & finite]),
        "lost": _total([right & over]),
    }


def _range(dtype: Any, reference: Any) -> tuple[Any, Any]:
    """Where a wide reference is certainly finite in a dtype, and where it certainly is not.

    It does not convert to the dtype and back, because XLA may remove that.
    """
    if not jnp.issubdtype(dtype, jnp.floating) or str(dtype) in FP8:  # they saturate
        finite = jnp.isfinite(reference)
        return finite, ~finite
    info, size = jnp.finfo(dtype), jnp.abs(reference)
    largest, eps, most = float(info.max), float(info.eps), float(jnp.finfo(size.dtype).max)
    return size <= largest * (1 - eps), ~(size <= min(largest * (1 + eps), most))


def _moved(x: Any, unit: float) -> Any:
    """A wide array with each element changed by ``unit``, up or down; equal ones stay equal."""
    if not _floating(x):
        return x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    if bits.ndim > x.ndim:  # the halves of float64
        bits = bits[..., 0] ^ bits[..., 1]
    mixed = (bits ^ (bits >> 15)) * np.uint32(0x9E3779B1)
    up = (mixed >> 31) == 1
    return x * jnp.where(up, 1 + unit, 1 - unit).astype(x.dtype)


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _total(masks: Any) -> Any:
    return sum((jnp.sum(mask, dtype=jnp.int32) for mask in masks), jnp.int32(0))


# -- on the host -----------------------------------------------------------------------------------


def _judged(name: str, dtype: str, shape: Sequence[int], unit: float, f: Figures) -> Output:
    scales = f["scale"].astype(np.float64)
    top = float(scales.max())

    def norm(of: str) -> float:
        return top * math.sqrt(float(np.sum(f[f"{of}_squares"] * (scales / top) ** 2)))

    norms = {of: norm(of) for of in ("error", "move", "size")}
    largest = {of: float(f[of].max()) for of in ("error", "move", "size")}
    count = math.prod(shape) * scales.size
    relative = norms["error"] / norms["size"] if norms["size"] else math.inf
    times = _ratio(norms["error"], _explained(dtype, unit, norms, math.sqrt(count)))
    if dtype != "bool":  # a boolean is either right or entirely wrong
        single = _explained(dtype, unit, largest, 1.0)
        times = max(times, _ratio(largest["error"], single))
    counted = ("nan", "inf", "reference_nan", "reference_inf")
    return Output(
        name,
        dtype,
        tuple(shape),
        largest=largest["error"],
        relative=relative if norms["error"] else 0.0,
        times_rounding=math.inf if f["new"].any() else times,
        reference_largest=float(f["reference_largest"].max()),
        **{of: int(f[of].sum()) for of in counted},
    )


def _explained(dtype: str, unit: float, of: Mapping[str, float], count: float) -> float:
    """The error that rounding explains: in norm for all, or for one element."""
    if dtype == "bool":
        return of["move"] + max(1.0, count / math.sqrt(_EDGES))
    if not is_floating(dtype):  # to the nearest integer
        return of["move"] + 0.5 * count
    least = max(float(jnp.finfo(dtype).smallest_subnormal), (dtype != "float64") * 2.0**-126)
    return max(_half_place(dtype), unit) * of["size"] + of["move"] + least * count


def _half_place(dtype: str) -> float:
    """The relative rounding error of a float: half a unit in the last place."""
    return float(jnp.finfo(dtype).eps) / 2 if is_floating(dtype) else 0.0


def _ratio(error: float, explained: float) -> float:
    return error / explained if error else 0.0
