"""Alternatives for an unsupported graph: the dtypes with which cuDNN would run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import JaxCudnnError, PlanningError, UnsupportedGraphError
from ..graph.dtypes import FLOATS, INTEGERS
from ..graph.spec import GraphSpec

_TRIED = ("bfloat16", "float16", "float32", "float8_e4m3fn")
_ABOUT_DTYPES = ("data type", "different types", "TF32", "does not compile")


def dtypes_with_plan(
    spec: GraphSpec, error: UnsupportedGraphError, build: Callable[[GraphSpec], Any]
) -> str | None:
    """A sentence on the dtypes for which ``build`` finds a plan; None if the refusal is not about
    dtypes. It queries cuDNN, which takes up to a second."""
    if not any(words in reason for reason in error.reasons.values() for words in _ABOUT_DTYPES):
        return None
    try:
        found = [dtype for dtype, variant in _variants(spec) if _has_plan(variant, build)]
    except PlanningError:
        return None
    if not found:
        return "the graph is not supported with operands of " + ", ".join(_TRIED) + " either"
    return "the graph has a plan there with operands of " + ", ".join(found)


def _variants(spec: GraphSpec) -> Iterator[tuple[str, GraphSpec]]:
    """The graph with one dtype for all operands, and matching results."""
    anchored = {name for call in spec.calls if call.node.anchor for _, name in call.inputs}
    operands = {name for name in spec.inputs if name in anchored} or {*spec.inputs}
    old = {spec.tensor(name).dtype for name in operands}
    for dtype in _TRIED:
        if old == {dtype}:
            continue
        result = dtype if dtype in FLOATS else "float32"

        def changed(tensor: Any, dtype: str = dtype, result: str = result) -> Any:
            if tensor.name in operands:
                return replace(tensor, dtype=dtype)
            outward = tensor.name in spec.outputs and tensor.dtype in (*old, *INTEGERS)
            if outward or tensor.name in anchored:
                return replace(tensor, dtype=result if outward else dtype)
            inward = tensor.dtype in INTEGERS and tensor.name not in spec.inputs
            return replace(tensor, dtype="float32") if inward else tensor

        calls = tuple(
            replace(call, node=replace(call.node, compute_data_type="float32"))
            if call.node.compute_data_type == "int32"
            else call
            for call in spec.calls
        )
        yield dtype, replace(spec, tensors=(*map(changed, spec.tensors),), calls=calls)


def _has_plan(spec: GraphSpec, build: Callable[[GraphSpec], Any]) -> bool:
    try:
        build(spec)
    except PlanningError:
        raise
    except JaxCudnnError:  # a failure while looking for advice must not hide the refusal
        return False
    return True
