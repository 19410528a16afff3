"""Translate the frontend's keywords of attention to those of a graph function's ``g``."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._core.errors import GraphError, GraphTypeError
from .._core.graph.calls import signature
from .._core.graph.node import REGISTRY
from .._core.graph.source import user_line
from .._core.graph.tensor import GraphTensor
from .templates import is_array

# Keywords that select how cuDNN runs attention, or that repeat what the operands say.
_WITHOUT_MEANING = (
    "implementation",
    "unfuse_fma",
    "max_total_seq_len_q",
    "max_total_seq_len_kv",
    "paged_attention_max_seq_len_kv",
)
_CAUSAL = {"use_causal_mask": "TOP_LEFT", "use_causal_mask_bottom_right": "BOTTOM_RIGHT"}
_WINDOWS = ("sliding_window_length", "sliding_window")
ASKED_FOR = {"rng_dump": "RNG_DUMP", "dBias": "dBias", "dSink_token": "dSink_token"}
"""Optional results of attention; the frontend requests them by passing a tensor."""


def spelled(method: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of ``g``'s method, from those of pygraph's method."""
    if not method.startswith("sdpa") or method not in REGISTRY:
        return keywords
    names = signature(REGISTRY[method]).parameters
    given = {name: value for name, value in keywords.items() if value is not None}
    for name in _WITHOUT_MEANING:
        given.pop(name, None)
    _check_padding(method, given)
    _check_scale(method, given)
    _say_band(given, "diagonal_band_" if "diagonal_band_left_bound" in names else "")
    if "generate_stats" in names:
        inference = given.pop("is_inference", True)
        given.setdefault("generate_stats", not inference)
    if "dropout" in given:
        given |= _dropout(given.pop("dropout"))
    for name in ASKED_FOR:
        if name in given and not isinstance(given[name], bool):
            raise GraphTypeError(
                f"{method}: {name} is a result",
                expected=f"{name}=True",
                got=f"{type(given[name]).__name__}: {given[name]!r}"[:200],
                fix=f"{method} returns it after the other results",
                where=user_line(),
            )
    return given


def always_returned(port: str) -> bool:
    """Whether the frontend's method returns None for this result if it is missing."""
    return port not in (*ASKED_FOR.values(), "MASK")


def _say_band(given: dict[str, Any], prefix: str) -> None:
    """Translates causal masks and windows to bounds of a diagonal band; raises GraphError if two
    keywords contradict each other. "TOP_LEFT" is ignored: the frontend's nodes hold it by default.
    """
    right, left = f"{prefix}right_bound", f"{prefix}left_bound"
    said: dict[str, tuple[str, Any]] = {}

    def say(what: str, name: str, value: Any) -> None:
        other, had = said.setdefault(what, (name, value))
        if had != value:
            raise GraphError(
                f"{other} and {name} contradict each other",
                got=f"{what} is {had!r} by the first and {value!r} by the second",
                fix="leave out one of them",
                where=user_line(),
            )
        given[what] = value

    for what in (right, left):
        if what in given:
            say(what, what, given[what])
    alignment = getattr(given.get("diagonal_alignment"), "name", given.get("diagonal_alignment"))
    if alignment not in (None, "TOP_LEFT"):
        say("diagonal_alignment", "diagonal_alignment", alignment)
    for name, alignment in _CAUSAL.items():
        if given.pop(name, False):
            say(right, name, 0)
            say("diagonal_alignment", name, alignment)
    for name in _WINDOWS:
        if name in given:
            say(left, name, given.pop(name))


def _check_padding(method: str, given: dict[str, Any]) -> None:
    """Raises GraphError if use_padding_mask contradicts the presence of sequence lengths."""
    lengths = [name for name in ("seq_len_q", "seq_len_kv") if name in given]
    asked = given.pop("use_padding_mask", None)
    if asked is None or bool(asked) == bool(lengths):
        return
    raise GraphError(
        f"{method}: use_padding_mask={asked!r}",
        expected="seq_len_q and seq_len_kv with it" if asked else "no sequence lengths",
        got=", ".join(lengths) or "neither",
        why="the mask hides tokens past the sequence lengths",
        fix="pass seq_len_q=... and seq_len_kv=..., or leave out use_padding_mask"
        if asked
        else "leave out use_padding_mask to apply the mask, or the lengths to apply none",
        where=user_line(),
    )


def _check_scale(method: str, given: dict[str, Any]) -> None:
    """Raises GraphTypeError if the scale of the scores is an operand."""
    scale = given.get("attn_scale")
    if not isinstance(scale, GraphTensor) and (
        not is_array(scale) or isinstance(scale, np.generic)
    ):
        return
    raise GraphTypeError(
        f"{method}: attn_scale must not be a tensor",
        expected="a Python number, or a NumPy scalar",
        got=f"{type(scale).__name__}: {scale!r}"[:200],
        why="it is an attribute of the operation, fixed in the graph, not an operand",
        fix="build a graph for each value with attn_scale=float(x), or multiply q by it before the "
        "call",
        where=user_line(),
    )


def _dropout(dropout: Any) -> dict[str, Any]:
    if not isinstance(dropout, (tuple, list)) or len(dropout) != 3:
        raise GraphError(
            "invalid dropout",
            expected="(probability, seed, offset)",
            got=repr(dropout)[:200],
            fix="to pass your own mask, use dropout_mask= and dropout_probability=",
            where=user_line(),
        )
    return dict(zip(("dropout_probability", "seed", "offset"), dropout, strict=True))
