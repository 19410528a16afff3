"""Compares a graph's results with its reference: is the error larger than rounding explains?

The reference itself shows how large an error rounding explains: it runs again on operands that are
perturbed by the rounding error of the arithmetic. So a sum whose terms cancel, which is inaccurate
in any arithmetic, is not reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph.by_reference import ByReference
from ..graph.dtypes import FP8, is_floating, wide_dtype
from ..graph.node import Node
from ..graph.reference import WIDE, evaluate
from ..graph.spec import GraphSpec, Tensor
from .report import BOTH, FUSED, OPERANDS, REFERENCE, Output

# Relative errors of correct computations: in float64, in float32 (exp, tanh and similar functions
# have about 16 bits on a GPU), with operands rounded to TF32's 10 bits, in float8 products, whose
# accumulator has fewer bits, and with a 16-bit accumulator. The tolerances of the fuzzer and the
# tests are based on the same measurements.
_FLOAT64, _FLOAT32, _TF32, _FLOAT8 = 2.0**-44, 2.0**-14, 2.0**-10, 2.0**-12
_HALF_ACCUMULATOR = 2.0**-9
# At most one boolean in this many may differ.
_EDGES = 1000


# -- on the device ---------------------------------------------------------------------------------


def measure(spec: GraphSpec, operands: Sequence[Any], results: Sequence[Any]) -> dict[str, Any]:
    """What :func:`judge` needs, as scalars: for the operands, and for each result."""
    wide, kind = _wide(spec), wide_dtype(*spec.tensors).name
    unit: Any = jax.lax.platform_dependent(
        cuda=lambda: np.float32(_inexactness(spec, True)),
        default=lambda: np.float32(_inexactness(spec, False)),
    )
    floats = [x for x in operands if _floating(x)]
    widened = [x.astype(kind) if _floating(x) else x for x in operands]
    with jax.default_matmul_precision("highest"):
        references = evaluate(wide, *widened, products=WIDE)
        moved = evaluate(wide, *(_moved(x, unit) for x in widened), products=WIDE)
    return {
        "unit": unit,
        "given_nan": sum((_count(jnp.isnan(x)) for x in floats), jnp.int32(0)),
        "given_inf": sum((_count(jnp.isinf(x)) for x in floats), jnp.int32(0)),
        "results": [
            _of_result(kind, *three) for three in zip(results, references, moved, strict=True)
        ],
    }


def _of_result(exact: str, result: Any, reference: Any, moved: Any) -> dict[str, Any]:
    finite, over = _range(result.dtype, reference.astype(exact))
    # Integers are subtracted as integers: float32 cannot represent all of them.
    kind = exact if _floating(result) else jnp.promote_types(result.dtype, jnp.int32)
    result, reference, moved = (x.astype(kind) for x in (result, reference, moved))
    error, move = (jnp.abs((x - reference).astype(exact)) for x in (result, moved))
    values, size = result.astype(exact), jnp.abs(reference.astype(exact))
    right = jnp.isfinite(values)
    found = {
        "reference_largest": jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0),
        "nan": _count(jnp.isnan(values)),
        "inf": _count(jnp.isinf(values)),
        "reference_nan": _count(jnp.isnan(size)),
        "reference_inf": _count(over & ~jnp.isnan(size)),
        "new": _count(~right & finite),
        "lost": _count(right & over),
    }
    for name, x, known in (("error", error, size), ("move", move, move), ("size", size, size)):
        x = jnp.where(right & jnp.isfinite(known), x, 0)
        found[name] = top = jnp.max(x, initial=0)
        # Squares of large or small values exceed the dtype's range.
        scaled = x / jnp.maximum(top, jnp.finfo(exact).tiny)
        found[f"{name}_squares"] = jnp.sum(jnp.square(scaled))
    return found


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


def _moved(x: Any, unit: Any) -> Any:
    """A wide array with each element changed by ``unit``, up or down; equal ones stay equal."""
    if not _floating(x):
        return x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    if bits.ndim > x.ndim:  # the halves of float64
        bits = bits[..., 0] ^ bits[..., 1]
    up = ((bits ^ (bits >> 15)) * np.uint32(0x9E3779B1)) >> 31 == 1
    return x * (1 + jnp.where(up, unit, -unit).astype(x.dtype))


def _floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _count(mask: Any) -> Any:
    return jnp.sum(mask, dtype=jnp.int32)


# -- on the host -----------------------------------------------------------------------------------


def judge(spec: GraphSpec, figures: Sequence[Any]) -> tuple[tuple[Output, ...], str]:
    """The comparison of each result, and the source of NaN and Inf, from each device's figures."""
    found = jax.tree.map(lambda *devices: np.array(devices, "float64"), *figures)
    unit, results = float(found["unit"].max()), found["results"]
    pairs = zip(spec.output_tensors, results, strict=True)
    outputs = tuple(_judged(tensor, unit, f) for tensor, f in pairs)
    given_nan, given_inf = found["given_nan"].any(), found["given_inf"].any()
    nan = any(output.nan for output in outputs)
    if not nan and not any(output.inf for output in outputs):
        lost = any(f["lost"].any() for f in results) and not (given_nan or given_inf)
        return outputs, REFERENCE if lost else ""
    if given_nan or (given_inf and not nan):
        return outputs, OPERANDS
    return outputs, FUSED if any(f["new"].any() for f in results) else BOTH


def _judged(tensor: Tensor, unit: float, f: Mapping[str, np.ndarray]) -> Output:
    parts = ("error", "move", "size")
    largest = {of: float(f[of].max()) for of in parts}
    norms = {of: math.hypot(*f[of] * np.sqrt(f[f"{of}_squares"])) for of in parts}
    relative = norms["error"] / norms["size"] if norms["size"] else math.inf
    count = math.prod(tensor.shape) * len(f["nan"])
    times = norms["error"] / _explained(tensor.dtype, unit, norms, math.sqrt(count))
    if tensor.dtype != "bool":  # a boolean is either right or entirely wrong
        times = max(times, largest["error"] / _explained(tensor.dtype, unit, largest, 1.0))
    counted = ("nan", "inf", "reference_nan", "reference_inf")
    return Output(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        largest=largest["error"],
        relative=relative if norms["error"] else 0.0,
        times_rounding=math.inf if f["new"].any() else times,
        reference_largest=float(f["reference_largest"].max()),
        **{of: int(f[of].sum()) for of in counted},
    )


def _explained(dtype: str, unit: float, of: Mapping[str, float], count: float) -> float:
    """The error that rounding explains, which is not 0: in norm for all, or for one element."""
    if dtype == "bool":
        return of["move"] + max(1.0, count / math.sqrt(_EDGES))
    if not is_floating(dtype):  # to the nearest integer
        return of["move"] + 0.5 * max(count, 1.0)
    least = max(float(jnp.finfo(dtype).smallest_subnormal), (dtype != "float64") * 2.0**-126)
    return max(_half_place(dtype), unit) * of["size"] + of["move"] + least * max(count, 1.0)


# -- of a graph ------------------------------------------------------------------------------------


def _wide(spec: GraphSpec) -> GraphSpec:
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


def _inexactness(spec: GraphSpec, on_gpu: bool) -> float:
    """The relative error of a correct computation of a graph, without the rounding of results."""
    anchored = {
        spec.tensor(name).dtype for c in spec.calls if c.node.anchor.product for _, name in c.inputs
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


def _half_place(dtype: str) -> float:
    """The relative rounding error of a float: half a unit in the last place."""
    return float(jnp.finfo(dtype).eps) / 2 if is_floating(dtype) else 0.0
