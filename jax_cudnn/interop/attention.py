"""Attention of a Graph: the frontend's keywords, ragged offsets and pages.

The graph holds cuDNN's calls as they were written. In its spec, packed attention replaces attention
of tensors with ragged offsets. Before each run, offsets, lengths and page tables are clipped to the
arrays' bounds: with wrong ones a plan would access memory outside of the arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from .._core.errors import GraphError, GraphTypeError, shown
from .._core.graph.arguments import signature
from .._core.graph.node import Node, registry
from .._core.graph.spec import Call, GraphSpec, Tensor, intern
from .._core.graph.tensor import GraphTensor
from .._core.transforms.derivation import vocabulary
from ..ops.attention.base import LENGTHS
from ..ops.attention.extras import WORDS
from ..ops.attention.fp8_paged import PagedSdpaFp8
from ..ops.attention.nodes import Sdpa
from ..ops.attention.packed import KEYS, QUERIES, Packed
from ..ops.attention.paged import Paged
from ..ops.attention.storage import StoredSdpa
from .arrays import Ragged, is_array, refusal

PAGES = {"paged_attention_k_table": "page_table_k", "paged_attention_v_table": "page_table_v"}
"""The frontend's names of page tables, and the ports' names."""
IN_MEMORY = (*LENGTHS, *PAGES.values())
"""Ports that cuDNN reads in GPU memory even if they have one element."""
REQUESTED = {"rng_dump": "RNG_DUMP"}
REQUESTED |= {x: x for x in ("score_max", "score_sum_exp", "dBias", "dSink_token")}
"""Optional results of attention; the frontend requests them by passing a tensor."""
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

# -- keywords -----------------------------------------------------------------------------------


def spelled(method: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords of ``g``'s method, from those of pygraph's method."""
    if not method.startswith("sdpa") or method not in registry():
        return keywords
    names = signature(registry()[method]).parameters
    known = {name: x for name, x in keywords.items() if x is not None}
    given = {name: x for name, x in known.items() if name not in _WITHOUT_MEANING}
    _check_padding(method, given)
    _check_scale(method, given)
    _say_band(given, "diagonal_band_" if "diagonal_band_left_bound" in names else "")
    if "generate_stats" in names:
        inference = given.pop("is_inference", True)
        given.setdefault("generate_stats", not inference)
    if "dropout" in given:
        dropout = given.pop("dropout")
        if not isinstance(dropout, (tuple, list)) or len(dropout) != 3:
            raise refusal(
                "invalid dropout",
                expected="(probability, seed, offset)",
                got=shown(dropout),
                fix="to pass your own mask, use dropout_mask= and dropout_probability=",
            )
        given |= zip(("dropout_probability", "seed", "offset"), dropout, strict=True)
    for name in REQUESTED:
        if name in given and not isinstance(given[name], bool):
            raise refusal(
                f"{method}: {name} is a result",
                GraphTypeError,
                expected=f"{name}=True",
                got=shown(given[name]),
                fix=f"{method} returns it after the other results",
            )
    return given


def always_returned(port: str) -> bool:
    """Whether the frontend's method returns None for this result if it is missing."""
    return port not in (*REQUESTED.values(), "MASK")


def _say_band(given: dict[str, Any], prefix: str) -> None:
    """Translates causal masks and windows to bounds of a diagonal band; raises GraphError if two
    keywords contradict each other. "TOP_LEFT" is ignored: the frontend's nodes hold it by default.
    """
    right, left = f"{prefix}right_bound", f"{prefix}left_bound"
    said: dict[str, tuple[str, Any]] = {}

    def say(what: str, name: str, value: Any) -> None:
        other, had = said.setdefault(what, (name, value))
        if had != value:
            raise refusal(
                f"{other} and {name} contradict each other",
                got=f"{what} is {had!r} by the first and {value!r} by the second",
                fix="leave out one of them",
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
    lengths = [name for name in LENGTHS if name in given]
    use_padding = given.pop("use_padding_mask", None)
    if use_padding is None or bool(use_padding) == bool(lengths):
        return
    raise refusal(
        f"{method}: use_padding_mask={use_padding!r}",
        expected="seq_len_q and seq_len_kv with it" if use_padding else "no sequence lengths",
        got=", ".join(lengths) or "neither",
        why="the mask hides tokens past the sequence lengths",
        fix="pass seq_len_q=... and seq_len_kv=..., or leave out use_padding_mask"
        if use_padding
        else "leave out use_padding_mask to apply the mask, or the lengths to apply none",
    )


def _check_scale(method: str, given: dict[str, Any]) -> None:
    """Raises GraphTypeError if the scale of the scores is an operand."""
    scale = given.get("attn_scale")
    array = is_array(scale) and not isinstance(scale, np.generic)
    if array or isinstance(scale, GraphTensor):
        raise refusal(
            f"{method}: attn_scale must not be a tensor",
            GraphTypeError,
            expected="a Python number, or a NumPy scalar",
            got=shown(scale),
            why="it is an attribute of the operation, fixed in the graph, not an operand",
            fix="build a graph for each value with attn_scale=float(x), or multiply q by it before "
            "the call",
        )


# -- pages and packed tokens --------------------------------------------------------------------

_KINDS = {**QUERIES, **KEYS}
_BY_EXAMPLE = (*LENGTHS, "bias", "dBias", "sink_token", "dSink_token", *WORDS, "dropout_mask",
               "RNG_DUMP")  # fmt: skip
_STATISTICS = ("Stats", "stats")
_PACKED = ("sdpa", "sdpa_backward")
_TOKENS_FIRST = (0, 2, 1, 3)


def paged_node(
    method: str, attributes: Mapping[str, Any], operands: Mapping[str, Any], most: int | None
) -> Node:
    """The node of ``sdpa`` or ``sdpa_fp8`` over pages, with ``most`` keys; raises GraphError for a
    port that it does not have."""
    of, own = (PagedSdpaFp8, operands) if method == "sdpa_fp8" else (Sdpa, _BY_EXAMPLE)
    if further := {*operands} - {"q", "k", "v", *IN_MEMORY, *own}:
        raise GraphError(
            f"paged attention does not support {', '.join(sorted(further))}",
            expected="q, k, v, page tables, both sequence lengths, bias, dropout and sink_token",
            fix="see jax_cudnn.ops.paged_dot_product_attention",
        )
    node = of.create(**attributes)
    if further := {*node.results} - {*PagedSdpaFp8.ports.output_names, "RNG_DUMP"}:
        raise GraphError(f"paged attention does not compute {', '.join(sorted(further))}")
    if missing := [port for port in LENGTHS if port not in operands]:
        raise GraphError(
            f"paged attention lacks {', '.join(missing)}",
            fix="pass the page tables, seq_len_q and seq_len_kv",
        )
    if of is PagedSdpaFp8:  # whose operands all have ports
        return node
    storage = Paged(True, queries_heads_first=True)
    if {"bias", "seed", "dropout_mask"} & {*operands}:  # of this number of keys
        whole = storage.scores(operands)[3]
        storage = replace(storage, max_seq_len_kv=min(most or whole, whole))
    return StoredSdpa(node, storage)


def packed(
    spec: GraphSpec, offsets: Mapping[str, Ragged], known: Mapping[str, Tensor], order: list[str]
) -> GraphSpec:
    """The graph with packed attention in place of attention of tensors with ragged ``offsets``.

    ``known`` are all tensors, and ``order`` the names of all inputs. Offsets into arrays without
    the gaps of strides are further inputs. Raises GraphError if another operation reads such a
    tensor, or if some tensors of the attention have no offsets, or another memory order.
    """
    calls: list[Call] = []
    tensors = {tensor.name: tensor for tensor in spec.tensors}
    for call in spec.calls:
        names = {name for _, name in (*call.inputs, *call.outputs)}
        if not names & offsets.keys():
            calls.append(call)
            continue
        ports, ragged = _ports(spec, call, offsets)
        used = [offsets[name] for name in ports.values() if name in offsets]
        tensors |= {x.name: replace(known[x.of], name=x.name) for x in used}
        calls += _packed_calls(spec, call, ports, ragged, offsets, tensors)
    names = {name for call in calls for _, name in (*call.inputs, *call.outputs)}
    made = {name for call in calls for _, name in call.outputs}
    moved = {x.name: x.of for x in offsets.values() if x.name != x.of}
    given = (n for name in order for n in (name, *(m for m, of in moved.items() if of == name)))
    inputs = tuple(name for name in given if name in names and name not in made)
    kept = tuple(tensor for tensor in tensors.values() if tensor.name in names)
    return intern(replace(spec, tensors=kept, calls=tuple(calls), inputs=inputs))


def _refusal(summary: str, expected: str, got: str | None = None) -> Exception:
    fix = "jax_cudnn.ops.packed_dot_product_attention takes packed tokens (T, H, D)"
    return refusal(summary, expected=expected, got=got, fix=fix)


def _is_paged(node: Node) -> bool:
    return isinstance(node, StoredSdpa) and isinstance(node.storage, Paged)


def _ports(
    spec: GraphSpec, call: Call, offsets: Mapping[str, Ragged]
) -> tuple[dict[str, str], Collection[str]]:
    """The tensors at the ports of packed attention, without unused statistics, and the ports of
    packed arrays; raises GraphError for what it does not support."""
    ports = dict((*call.inputs, *call.outputs))
    read = {*spec.outputs, *(name for c in spec.calls for _, name in c.inputs), *offsets}
    paged = _is_paged(call.node)
    known = paged or call.node.method in _PACKED
    if known and ports.get("Stats") not in read:
        if "Stats" not in call.node.without(["Stats"]).results:
            ports.pop("Stats", None)
    wrong = ports.keys() - {*_KINDS, *_BY_EXAMPLE, *(PAGES.values() if paged else ())}
    if wrong or not known:
        named = ", ".join(sorted(wrong)) if known else "ragged offsets"
        raise _refusal(f"{call.name} does not support {named}", "sdpa or sdpa_backward")
    ragged = {port: x for port, x in ports.items() if port in (QUERIES if paged else _KINDS)}
    for port in _STATISTICS:  # (B, H, S, 1) without offsets
        if ragged.get(port) not in offsets:
            ragged.pop(port, None)
    if bare := [name for name in ragged.values() if name not in offsets]:
        summary = f"{call.name}: some tensors have no ragged offset"
        expected = f"a ragged offset for each of {', '.join(ragged)}"
        raise _refusal(summary, expected, got=f"none for {', '.join(bare)}")
    if missing := [port for port in LENGTHS if port not in ports]:
        raise _refusal(f"{call.name}: packed tokens without {' and '.join(missing)}", "both")
    for port, name in ragged.items():
        tensor = spec.tensor(name)
        order = tensor.order or (_TOKENS_FIRST if (port, name) in call.outputs else (0, 1, 2, 3))
        long = [axis for axis in _TOKENS_FIRST if tensor.shape[axis] != 1]
        if [axis for axis in order if axis in long] != long:
            raise _refusal(
                f"{call.name}: {port} must have its tokens before its heads in memory",
                "strides of (B, H, S, D) as [S*H*D, D, H*D, 1]",
                got=f"{tensor} with dimensions in the order {order}",
            )
    return ports, ragged


def _packed_calls(
    spec: GraphSpec,
    call: Call,
    ports: Mapping[str, str],
    ragged: Collection[str],
    offsets: Mapping[str, Ragged],
    tensors: dict[str, Tensor],
) -> list[Call]:
    """Packed attention, with conversions from (B, H, S, D) to (B S, H, D) and back."""
    inputs, outputs, at, moves = dict(call.inputs), {}, {}, {}
    for port, name in ports.items():
        back, moved = port not in inputs, name
        if port in ragged:
            moved, kind = f"{name}::packed", f"ragged_offset_{_KINDS[port]}"
            own = offsets[name].name
            if (other := at.setdefault(kind, own)) != own:
                summary = f"{call.name}: {port} and its counterpart have different offsets"
                raise _refusal(summary, "one, and the same strides", got=f"{other} and {own}")
            inner = tensors[name if not back or name in spec.outputs else ports["q"]].dtype
            moves[name] = _moves(tensors, name, inner, back)
        (outputs if back else inputs)[port] = moved
    batch = spec.tensor(ports["q"]).shape[0]
    limits = tuple(spec.tensor(ports[port]).shape[2] for port in ("q", "k"))
    base: Any = call.node if "Stats" in ports else call.node.without(["Stats"])
    if _is_paged(base):
        packed = replace(base.storage, queries_heads_first=False, max_seq_len_q=limits[0])
        node = replace(base, storage=packed)
    else:
        node = StoredSdpa(base, Packed(*limits, *(batch * limit for limit in limits)))
    inputs |= at
    node.infer({port: tensors[name] for port, name in inputs.items()})  # raises
    made = Call(node, call.name, tuple(inputs.items()), tuple(outputs.items()))
    read = {name for _, name in call.inputs}
    before = [c for name, pair in moves.items() if name in read for c in pair]
    after = [c for name, pair in moves.items() if name not in read for c in pair]
    return [*before, made, *after]


def _moves(tensors: dict[str, Tensor], name: str, dtype: str, back: bool) -> list[Call]:
    """Converts a tensor (B, H, S, D) to ``name::packed``, (B S, H, D), or back."""
    b, h, s, d = tensors[name].shape
    tokens = Tensor(f"{name}::tokens", (b, s, h, d), dtype)
    flat = Tensor(f"{name}::packed", (b * s, h, d), dtype)
    tensors |= {tokens.name: tokens, flat.name: flat}
    turn = vocabulary().transpose(_TOKENS_FIRST)
    if back:
        pairs = [(vocabulary().reshape(tokens.shape), flat.name, tokens.name)]
        pairs.append((turn, tokens.name, name))
    else:
        pairs = [(turn, name, tokens.name)]
        pairs.append((vocabulary().reshape(flat.shape), tokens.name, flat.name))
    return [_one(node, operand, result) for node, operand, result in pairs]


def _one(node: Node, operand: str, result: str) -> Call:
    inputs = ((node.ports.input_names[0], operand),)
    outputs = ((node.ports.output_names[0], result),)
    return Call(node, f"{node.method}.{result}", inputs, outputs)


def check_given(spec: GraphSpec) -> None:
    """Raises GraphError if the graph computes integers that must be clipped before it runs."""
    for call in spec.calls:
        if isinstance(call.node, (StoredSdpa, PagedSdpaFp8)):
            for port, name in call.inputs:
                if port in call.node.indices.positions and name not in spec.inputs:
                    raise refusal(
                        f"{call.name}: the graph computes {port}",
                        why="it must be clipped to the arrays' bounds before the graph runs",
                        fix="make it an input of the graph",
                    )
