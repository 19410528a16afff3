"""Options: the user's constraints on the choice of a plan. A part of the GraphSpec."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from .. import compat
from ..errors import GraphError, GraphTypeError, nearest, shown
from ..user_context import AUTO, checked, current
from .dtypes import FLOATS, FP8, canonical, canonical_compute

HEURISTICS = ("A", "B", "FALLBACK")
NUMERIC_NOTES = (
    "TENSOR_CORE",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "NONDETERMINISTIC",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
    "STRICT_NAN_PROP",
)
BEHAVIOR_NOTES = (
    "RUNTIME_COMPILATION",
    "REQUIRES_FILTER_INT8x32_REORDER",
    "REQUIRES_BIAS_INT8x32_REORDER",
    "SUPPORTS_CUDA_GRAPH_NATIVE_API",
    "CUBLASLT_DEPENDENCY",
)

# How lax reads jax.default_matmul_precision; only "default" lets a GPU round float32 to TF32.
_PRECISIONS = {
    **dict.fromkeys(("default", "fastest", "bfloat16", "TF32_TF32_F32"), "default"),
    **dict.fromkeys(("BF16_BF16_F32",), "default"),
    **dict.fromkeys(("high", "tensorfloat32", "bfloat16_3x", "TF32_TF32_F32_X3"), "high"),
    **dict.fromkeys(("BF16_BF16_F32_X3",), "high"),
    **dict.fromkeys(("highest", "float32", "F32_F32_F32"), "highest"),
    **dict.fromkeys(("BF16_BF16_F32_X6", "BF16_BF16_F32_X9"), "highest"),
}


class TraceContext(NamedTuple):
    """The relevant settings of JAX and XLA: part of the key of the trace cache."""

    precision: Any = None
    deterministic: bool = False
    implementation: str = AUTO

    @classmethod
    def now(cls) -> TraceContext:
        flags = os.environ.get("XLA_FLAGS", "")
        return cls(compat.matmul_precision(), _asks_for_determinism(flags), current())


@dataclass(frozen=True)
class Options:
    """How to choose a cuDNN plan. Hashable; equal graphs with equal options share a plan.

    Attributes:
        heuristics: the modes to query, in this order, from "A", "B" and "FALLBACK".
        select_numeric_notes, deselect_numeric_notes: keep only, or exclude, engines that carry
            one of these notes ("TENSOR_CORE", "NONDETERMINISTIC", "WINOGRAD", ...).
        select_behavior_notes, deselect_behavior_notes: the same for behaviour notes
            ("RUNTIME_COMPILATION", "CUBLASLT_DEPENDENCY", ...).
        max_workspace: the largest workspace of a plan in bytes; by default a quarter of the GPU's
            memory.
        engine, knobs: use this engine, by cuDNN's index, with these knobs (``{"TILE_SIZE": 3}``),
            without heuristics and without splitting the graph. It applies to this graph alone:
            graphs derived by vmap and autodiff choose their own engine, and ``explain()`` of
            their plans says so.
        deterministic: exclude engines whose results can differ from run to run. Also set by
            ``--xla_gpu_deterministic_ops`` and ``--xla_gpu_exclude_nondeterministic_ops`` in
            XLA_FLAGS (not by ``compiler_options`` of jax.jit: plans are chosen before those
            are read).
        precision: of float32 products, as in lax: "default" (TF32 allowed), "high" or
            "highest" (float32). None follows ``jax.default_matmul_precision``.
        intermediate_data_type: the dtype of values inside the graph, except where a product
            multiplies them with a 16-bit operand: those take the dtype of that operand. "int32"
            rounds floats inside to whole numbers.
        compute_data_type: the accumulation type of convolutions and matmuls that set none; None
            means float32, and int32 for integers.
        implementation: "auto", "cudnn", "split" or "xla", see :func:`jax_cudnn.implementation`;
            None follows that context.

    Source: cuDNN documentation, "Heuristics", "Numerical notes", "Behavior notes".
    """

    heuristics: tuple[str, ...] = ("A", "FALLBACK")
    select_numeric_notes: tuple[str, ...] = ()
    deselect_numeric_notes: tuple[str, ...] = ()
    select_behavior_notes: tuple[str, ...] = ()
    deselect_behavior_notes: tuple[str, ...] = ()
    max_workspace: int | None = None
    engine: int | None = None
    knobs: tuple[tuple[str, int], ...] = ()
    deterministic: bool = False
    precision: str | None = None
    intermediate_data_type: str = "float32"
    compute_data_type: str | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        def put(field: str, value: Any) -> None:
            object.__setattr__(self, field, value)

        put("heuristics", _names("heuristics", self.heuristics, HEURISTICS))
        if not self.heuristics:
            raise GraphError("heuristics is empty", expected=f"some of {', '.join(HEURISTICS)}")
        for field, known in (("numeric", NUMERIC_NOTES), ("behavior", BEHAVIOR_NOTES)):
            for verb in ("select", "deselect"):
                name = f"{verb}_{field}_notes"
                put(name, _names(name, getattr(self, name), known))
        put("max_workspace", _count("max_workspace", self.max_workspace, "a number of bytes"))
        put("engine", _count("engine", self.engine, "the index of a cuDNN engine"))
        knobs = self.knobs.items() if isinstance(self.knobs, Mapping) else self.knobs
        try:
            pairs = sorted((str(getattr(k, "name", k)), int(v)) for k, v in knobs)
        except (TypeError, ValueError):
            raise GraphTypeError(
                "knobs is not valid",
                expected="a mapping of knob names to integers",
                got=repr(self.knobs),
            ) from None
        put("knobs", tuple(pairs))
        if self.knobs and self.engine is None:
            raise GraphError("knobs without an engine", fix="add engine=...")
        if not isinstance(self.deterministic, bool):
            raise GraphTypeError(
                "deterministic is not valid", expected="True or False", got=repr(self.deterministic)
            )
        if self.precision is not None:
            put("precision", normal_precision(self.precision))
        put("intermediate_data_type", canonical(self.intermediate_data_type))
        if self.intermediate_data_type not in (known := (*FLOATS, *FP8, "int32")):
            raise GraphError(
                "intermediate_data_type is neither a float type nor int32",
                expected=", ".join(known),
                got=self.intermediate_data_type,
                why="sums of products of integers are int32",
            )
        if self.compute_data_type is not None:
            put("compute_data_type", canonical_compute(self.compute_data_type))
        if self.implementation is not None:
            checked(self.implementation)

    @property
    def named_engine(self) -> str:
        """The engine and its knobs as text; empty if none is set."""
        if self.engine is None:
            return ""
        return f"engine={self.engine}" + (f", knobs={dict(self.knobs)}" if self.knobs else "")

    def resolved(self, context: TraceContext, float32_products: bool) -> Options:
        """These options with the settings of JAX and XLA filled in. Precision matters for float32
        products only: other graphs are the same graph at any precision. The tensors of a graph
        state that they are int32; derivatives of such a graph are computed in float32."""
        precision = "default"
        if float32_products:
            precision = self.precision or normal_precision(context.precision)
        deterministic = self.deterministic or context.deterministic
        wide = self.intermediate_data_type
        return dataclasses.replace(
            self,
            precision=precision,
            deterministic=deterministic,
            intermediate_data_type="float32" if wide == "int32" else wide,
            implementation=self.implementation or context.implementation,
        )

    def __str__(self) -> str:
        """What differs from the defaults."""
        changed = (
            (f.name, getattr(self, f.name))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        usual = (("precision", "default"), ("implementation", AUTO))
        return ", ".join(f"{k}={v!r}" for k, v in changed if (k, v) not in usual)


def replaced(options: Options, changes: Mapping[str, Any]) -> Options:
    """Options with changes; GraphTypeError for unknown names, listing the known ones."""
    known = [field.name for field in dataclasses.fields(Options)]
    changes = dict(changes)
    options = changes.pop("options", options)
    if not isinstance(options, Options):
        raise GraphTypeError(
            "options is not a jax_cudnn.Options",
            expected="jax_cudnn.Options(...)",
            got=shown(options),
        )
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise GraphTypeError(
            "unknown option",
            expected=", ".join(known),
            got=", ".join(map(repr, unknown)),
            fix=nearest(unknown[0], known),
        )
    return dataclasses.replace(options, **changes)


def normal_precision(precision: Any) -> str:
    """Any spelling of lax's precision as "default", "high" or "highest"."""
    if isinstance(precision, (tuple, list)):  # lax takes one for each operand
        both = [normal_precision(p) for p in precision]
        return max(both, key=("default", "high", "highest").index) if both else "default"
    name = "default" if precision is None else getattr(precision, "name", precision)
    known = {key.lower(): value for key, value in _PRECISIONS.items()}
    if not isinstance(name, str) or name.lower() not in known:
        raise GraphError(
            "unknown precision",
            expected=", ".join(_PRECISIONS),
            got=repr(precision),
            why="cuDNN computes products of float32 in TF32 or in float32",
        )
    return known[name.lower()]


def lax_precision(precision: str | None) -> jax.lax.Precision:
    """For the reference."""
    return jax.lax.Precision[(precision or "default").upper()]


def _count(name: str, value: Any, meaning: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise GraphError(
            f"{name} is not valid", expected=f"{meaning}, at least 0", got=f"{name}={value!r}"
        )
    return int(value)


def _names(option: str, values: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """Names of cuDNN enum members, given as strings or members, several or a single one."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = (values,)
    names = tuple(str(getattr(value, "name", value)) for value in values)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise GraphError(
            f"unknown name in {option}", expected=", ".join(known), got=", ".join(unknown)
        )
    return names


@functools.lru_cache(maxsize=64)
def _asks_for_determinism(xla_flags: str) -> bool:
    """Whether one of the two XLA flags is on; the last occurrence of each counts, as in XLA."""
    found = re.findall(
        r"--xla_gpu_(deterministic_ops|exclude_nondeterministic_ops)(?:=(\w+))?(?!\S)", xla_flags
    )
    return any(value.lower() in ("", "true", "1") for value in dict(found).values())


DEFAULTS, NO_CONTEXT = Options(), TraceContext()
