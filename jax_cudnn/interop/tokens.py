"""Attention of a Graph with packed tokens (ragged offsets) or paged keys and values.

The graph holds cuDNN's calls as they were written. In its spec, packed attention replaces attention
of tensors with ragged offsets. Before each run, offsets, lengths and page tables are clipped to the
arrays' bounds: with wrong ones a plan would access memory outside of the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._core.errors import GraphError
from .._core.graph.source import user_line
from .._core.graph.spec import Call, GraphSpec, Tensor, intern
from .._core.graph.vocabulary import vocabulary
from ..ops.attention.base import LENGTHS
from ..ops.attention.nodes import Sdpa
from ..ops.attention.packed import KEYS, QUERIES, PackedSdpa, PackedSdpaBackward
from ..ops.attention.paged import PagedSdpa

PAGES = {"paged_attention_k_table": "page_table_k", "paged_attention_v_table": "page_table_v"}
"""The frontend's names of page tables, and the ports' names."""
IN_MEMORY = (*LENGTHS, *PAGES.values())
"""Ports that cuDNN reads in GPU memory even if they have one element."""
_KINDS = {**QUERIES, **KEYS}
_PACKED = ("sdpa", "sdpa_backward")
_TOKENS_FIRST = (0, 2, 1, 3)


def paged_node(attributes: Mapping[str, Any], ports: Iterable[str]) -> PagedSdpa:
    """The node of paged attention; raises GraphError for a port that it does not have."""
    if further := {*ports} - {"q", "k", "v", *IN_MEMORY}:
        raise GraphError(
            f"paged attention does not support {', '.join(sorted(further))}",
            expected="q, k, v, both page tables, and both sequence lengths",
            fix="see jax_cudnn.ops.paged_dot_product_attention",
        )
    if missing := [port for port in IN_MEMORY if port not in ports]:
        frontend = {port: name for name, port in PAGES.items()}
        raise GraphError(
            "paged attention lacks " + ", ".join(frontend.get(p, p) for p in missing),
            fix="pass both page tables, seq_len_q and seq_len_kv",
        )
    return PagedSdpa(Sdpa.create(**attributes), heads_first=True, queries_heads_first=True)


def packed(
    spec: GraphSpec, offsets: Mapping[str, str], known: Mapping[str, Tensor], order: Sequence[str]
) -> GraphSpec:
    """The graph with packed attention in place of attention of tensors with ragged offsets.

    Args:
        spec: the graph as it was written.
        offsets: the tensor of ragged offsets of each tensor that has one.
        known: all tensors by name.
        order: the names of all inputs.

    Raises:
        GraphError: another operation reads such a tensor; or some tensors of the attention have no
            offsets, or another memory order.
    """
    calls: list[Call] = []
    tensors = {tensor.name: tensor for tensor in spec.tensors}
    for call in spec.calls:
        names = [name for _, name in (*call.inputs, *call.outputs)]
        if not any(name in offsets for name in names):
            calls.append(call)
        else:
            ports = _ports(spec, call, offsets)
            for name in ports.values():
                if name in offsets:
                    tensors[offsets[name]] = known[offsets[name]]
            calls += _packed_calls(spec, call, ports, offsets, tensors)
    used = {name for call in calls for _, name in (*call.inputs, *call.outputs)}
    made = {name for call in calls for _, name in call.outputs}
    inputs = tuple(name for name in order if name in used and name not in made)
    kept = tuple(tensor for tensor in tensors.values() if tensor.name in used)
    return intern(replace(spec, tensors=kept, calls=tuple(calls), inputs=inputs))


def _ports(spec: GraphSpec, call: Call, offsets: Mapping[str, str]) -> dict[str, str]:
    """The tensors at the ports of packed attention, without unused statistics; raises GraphError
    for what it does not support."""
    ports = dict((*call.inputs, *call.outputs))
    read = {*spec.outputs, *(name for c in spec.calls for _, name in c.inputs)}
    if ports.get("Stats") not in (*read, *offsets):
        ports.pop("Stats", None)
    bare = [name for port, name in ports.items() if port in _KINDS and name not in offsets]
    wrong = ports.keys() - {*_KINDS, *LENGTHS, "bias", "dBias"}
    if call.node.method not in _PACKED or wrong:
        named = ", ".join(sorted(wrong)) if call.node.method in _PACKED else "ragged offsets"
        raise _refusal(f"{call.name} does not support {named}", "sdpa or sdpa_backward")
    if bare:
        raise _refusal(
            f"{call.name}: some tensors have no ragged offset",
            "a ragged offset for each of " + ", ".join(p for p in ports if p in _KINDS),
            got=f"none for {', '.join(bare)}",
        )
    if missing := [port for port in LENGTHS if port not in ports]:
        raise _refusal(f"{call.name}: packed tokens without {' and '.join(missing)}", "both")
    for port, name in ports.items():
        tensor = spec.tensor(name)
        stated = tensor.order or (_TOKENS_FIRST if port in dict(call.outputs) else (0, 1, 2, 3))
        if port in _KINDS and _apparent(tensor, stated) != _apparent(tensor, _TOKENS_FIRST):
            raise _refusal(
                f"{call.name}: {port} must have its tokens before its heads in memory",
                "strides of (B, H, S, D) as [S*H*D, D, H*D, 1]",
                got=f"{tensor} with dimensions in the order {stated}",
            )
    return ports


def _apparent(tensor: Tensor, order: Sequence[int]) -> list[int]:
    return [axis for axis in order if tensor.shape[axis] != 1]


def _refusal(summary: str, expected: str, got: str | None = None) -> GraphError:
    return GraphError(
        summary,
        expected=expected,
        got=got,
        fix="jax_cudnn.ops.packed_dot_product_attention takes packed tokens (T, H, D)",
        where=user_line(),
    )


def _packed_calls(
    spec: GraphSpec,
    call: Call,
    ports: Mapping[str, str],
    offsets: Mapping[str, str],
    tensors: dict[str, Tensor],
) -> list[Call]:
    """Packed attention, with conversions from (B, H, S, D) to (B S, H, D) and back."""
    moves: dict[str, list[Call]] = {}
    operands, results = dict(call.inputs), {p: n for p, n in call.outputs if p in ports}
    at: dict[str, str] = {}
    for port, name in ports.items():
        if port in _KINDS:
            kind = f"ragged_offset_{_KINDS[port]}"
            if at.setdefault(kind, offsets[name]) != offsets[name]:
                raise _refusal(
                    f"{call.name}: {port} and its counterpart have different offsets", "one"
                )
    batch = spec.tensor(ports["q"]).shape[0]
    limits = tuple(spec.tensor(ports[port]).shape[2] for port in ("q", "k"))
    totals = tuple(batch * limit for limit in limits)
    base: Any = call.node if "Stats" in ports else call.node.without(["Stats"])
    cls = PackedSdpa if call.node.method == "sdpa" else PackedSdpaBackward
    inputs = {p: f"{n}::packed" if p in _KINDS else n for p, n in operands.items()} | at
    outputs = {p: f"{n}::packed" if p in _KINDS else n for p, n in results.items()}
    for port, name in ports.items():
        if port in _KINDS:
            back = port in results
            inner = None if back and name not in spec.outputs else tensors[name].dtype
            moves[name] = _moves(tensors, name, inner or tensors[ports["q"]].dtype, back)
    node = cls(base, *limits, *totals)
    node.infer({port: tensors[name] for port, name in inputs.items()})  # raises
    made = Call(node, call.name, tuple(inputs.items()), tuple(outputs.items()))
    before = [c for name, pair in moves.items() if name in operands.values() for c in pair]
    after = [c for name, pair in moves.items() if name in results.values() for c in pair]
    return [*before, made, *after]


def _moves(tensors: dict[str, Tensor], name: str, dtype: str, back: bool) -> list[Call]:
    """Converts a tensor (B, H, S, D) to ``name::packed``, (B S, H, D), or back."""
    b, h, s, d = tensors[name].shape
    apart = Tensor(f"{name}::apart", (b, s, h, d), dtype)
    flat = Tensor(f"{name}::packed", (b * s, h, d), dtype)
    tensors |= {apart.name: apart, flat.name: flat}
    turn = vocabulary().transpose(_TOKENS_FIRST)
    if back:
        pairs = [(vocabulary().reshape(apart.shape), flat.name, apart.name)]
        pairs.append((turn, apart.name, name))
    else:
        pairs = [(turn, name, apart.name)]
        pairs.append((vocabulary().reshape(flat.shape), apart.name, flat.name))
    return [
        Call(
            node,
            f"{node.method}.{result}",
            ((node.ports.input_names[0], operand),),
            ((node.ports.output_names[0], result),),
        )
        for node, operand, result in pairs
    ]


def check_given(spec: GraphSpec) -> None:
    """Raises GraphError if the graph computes integers that must be clipped before it runs."""
    for call, tensors in spec.at_ports:
        if isinstance(call.node, (PackedSdpa, PackedSdpaBackward, PagedSdpa)):
            integers = call.node.boundary(tensors).integers
            for port, name in call.inputs:
                if port in integers and name not in spec.inputs:
                    raise GraphError(
                        f"{call.name}: the graph computes {port}",
                        why="it must be clipped to the arrays' bounds before the graph runs",
                        fix="make it an input of the graph",
                        where=user_line(),
                    )
