"""A random graph as a call: what it means is its nodes' references, one after the other.

Each operation is differentiated in float32, at the values that the graph gives it: rounding has the
derivative of the identity, also where it saturates.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformations import in_float32

from jax_cudnn._core.graph.dtypes import FP8, is_floating
from jax_cudnn._core.graph.reference import evaluate
from jax_cudnn._core.graph.spec import GraphSpec
from jax_cudnn._core.planning.split import part
from jax_cudnn._core.primitive import bind

from .calls import FIRST, Call

LARGEST = 2.0**10  # of derivatives that say something: float16 holds them


def graph_call(
    spec: GraphSpec, operands: Sequence[Any], seed: int, names: Sequence[str] | None = None
) -> Call:
    """A graph at its operands, with these transformations or two of the first order."""
    names = names or random.Random(seed).sample(FIRST, 2)
    arrays = {f"x{i}": np.asarray(x) for i, x in enumerate(operands)}
    return Call(
        seed, str(spec), lambda **xs: bind(spec, "random", *xs.values()), meaning(spec), arrays,
        names=names, coarse=grain(spec), inside=True, wide="float32", largest=LARGEST,
    )  # fmt: skip


def meaning(spec: GraphSpec) -> Callable[..., list[jax.Array]]:
    """The results, where floats are float32, with the values that their dtypes keep."""

    def function(**operands: Any) -> list[jax.Array]:
        values = dict(zip(spec.inputs, operands.values(), strict=True))
        for position, call in enumerate(spec.calls):
            names = tuple(name for _, name in call.outputs)
            one = replace(part(spec, (position,)), outputs=names)
            given = [values[name] for name in one.inputs]
            slopes = evaluate(in_float32(one), *given)
            exact = evaluate(
                one,
                *(
                    jax.lax.stop_gradient(x).astype(one.tensor(name).dtype)
                    for name, x in zip(one.inputs, given, strict=True)
                ),
            )
            for name, slope, x in zip(names, slopes, exact, strict=True):
                floating = is_floating(one.tensor(name).dtype)
                values[name] = _with_slope(slope, x.astype(jnp.float32)) if floating else x
        return [values[name] for name in spec.outputs]

    return function


@jax.custom_jvp
def _with_slope(slope: Any, x: Any) -> Any:
    """x, with the derivatives of the other."""
    return x


@_with_slope.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


def grain(spec: GraphSpec) -> float:
    """How far the coarsest float of 16 bits rounds that a derivative of a graph may have: float8 is
    multiplied as bfloat16. Graphs of float32 alone have none: 0."""
    found = {spec.options.intermediate_data_type, *(tensor.dtype for tensor in spec.tensors)}
    if found & {"bfloat16", *FP8}:
        return float(jnp.finfo("bfloat16").eps)
    return float(jnp.finfo("float16").eps) if "float16" in found else 0.0
