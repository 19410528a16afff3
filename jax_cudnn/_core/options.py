"""Options: what a user may decide about the choice of a plan. A part of the GraphSpec."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from . import compat
from .dims import integers
from .dtypes import canonical, canonical_compute
from .errors import GraphError, GraphTypeError

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
    **dict.fromkeys(("high", "tensorfloat32", "bfloat16_3x", "TF32_TF32_F32_X3"), "high"),
    **dict.fromkeys(("highest", "float32", "F32_F32_F32"), "highest"),
}


@dataclass(frozen=True)
class Options:
    """How cuDNN is to choose a plan. Hashable; equal options of equal graphs share a plan.

    Attributes:
        heuristics: modes asked in turn, of "A", "B" and "FALLBACK".
        select_numeric_notes, deselect_numeric_notes: keep only, or leave out, engines that carry
            one of these notes ("TENSOR_CORE", "NONDETERMINISTIC", "WINOGRAD", ...).
        select_behavior_notes, deselect_behavior_notes: the same for behaviour notes
            ("RUNTIME_COMPILATION", "CUBLASLT_DEPENDENCY", ...).
        max_workspace: plans that need more bytes of workspace are left out.
        engine, knobs: this engine, by cuDNN's number, with these knobs
            (``{"TILE_SIZE": 3}``); heuristics are not asked.
        deterministic: leave out engines whose results can differ from run to run. Also so where
            XLA_FLAGS holds ``--xla_gpu_deterministic_ops`` or
            ``--xla_gpu_exclude_nondeterministic_ops``.
        precision: of products of float32, as in lax: "default" (TF32 allowed), "high" or
            "highest" (float32). None takes ``jax.default_matmul_precision``.
        intermediate_data_type: the dtype of values inside the graph.
        compute_data_type: of nodes for which none is named; None is float32, and int32 for
            products of integers.

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
        for name in ("max_workspace", "engine"):
            value = getattr(self, name)
            put(name, None if value is None else integers(name, [value])[0])
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
            raise GraphError("knobs without an engine", fix="name the engine: engine=...")
        if not isinstance(self.deterministic, bool):
            raise GraphTypeError(
                "deterministic is not valid", expected="True or False", got=repr(self.deterministic)
            )
        if self.precision is not None:
            put("precision", normal_precision(self.precision))
        put("intermediate_data_type", canonical(self.intermediate_data_type))
        if self.compute_data_type is not None:
            put("compute_data_type", canonical_compute(self.compute_data_type))

    def resolved(self) -> Options:
        """The same with what the surroundings decide: precision of JAX, determinism of XLA."""
        return dataclasses.replace(
            self,
            precision=self.precision or normal_precision(compat.matmul_precision()),
            deterministic=self.deterministic or _xla_is_deterministic(),
        )

    def __str__(self) -> str:
        """What differs from the defaults."""
        changed = (
            (f.name, getattr(self, f.name))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return ", ".join(f"{k}={v!r}" for k, v in changed if (k, v) != ("precision", "default"))


def replaced(options: Options, changes: Mapping[str, Any]) -> Options:
    """Options with some of them changed; GraphTypeError that lists them for unknown names."""
    known = [field.name for field in dataclasses.fields(Options)]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise GraphTypeError(
            "unknown option", expected=", ".join(known), got=", ".join(map(repr, unknown))
        )
    return dataclasses.replace(options, **changes)


def normal_precision(precision: Any) -> str:
    """lax's precision, however it is spelled, as "default", "high" or "highest"."""
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


def _names(option: str, values: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """Members of cuDNN's enum by name, given as strings, as its members, or as one of them."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        values = (values,)
    names = tuple(str(getattr(value, "name", value)) for value in values)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise GraphError(
            f"unknown name in {option}", expected=", ".join(known), got=", ".join(unknown)
        )
    return names


def _xla_is_deterministic() -> bool:
    flags = re.findall(
        r"--xla_gpu_(?:deterministic_ops|exclude_nondeterministic_ops)(?:=(\w+))?",
        os.environ.get("XLA_FLAGS", ""),
    )
    return any(value.lower() in ("", "true", "1") for value in flags)


DEFAULTS = Options()
