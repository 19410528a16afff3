"""Attention of a Graph whose tokens lie behind each other (ragged offsets) or in pages.

Such a graph holds cuDNN's calls as they were written. In its spec attention of tensors with ragged
offsets is that of packed tokens, and the integers that say where tokens lie are brought into the
arrays' bounds before each run: a plan would read foreign memory where they are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._core.errors import GraphError
from .._core.graph.source import user_line
from .._core.graph.spec import Call, GraphSpec, Tensor, intern
from .._core.graph.vocabulary import vocabulary
from ..ops.attention import Sdpa
from ..ops.attention_base import LENGTHS
from ..ops.attention_packed import KEYS, QUERIES, PackedSdpa, PackedSdpaBackward
from ..ops.attention_paged import PagedSdpa

PAGES = {"paged_attention_k_table": "page_table_k", "paged_attention_v_table": "page_table_v"}
"""What the frontend calls the tables of pages, and the ports' names."""
IN_MEMORY = (*LENGTHS, *PAGES.values())
"""Ports that cuDNN reads in the GPU's memory, also where they have one element."""
_KINDS = {**QUERIES, **KEYS}
_PACKED = ("sdpa", "sdpa_backward")
_TOKENS_FIRST = (0, 2, 1, 3)


def paged_node(attributes: Mapping[str, Any], ports: Iterable[str]) -> PagedSdpa:
    """The node of attention over pages; GraphError where it takes no such port."""
    if further := {*ports} - {"q", "k", "v", *IN_MEMORY}:
        raise GraphError(
            f"attention over pages takes no {', '.join(sorted(further))}",
            expected="q, k, v, both tables of pages, and both lengths of sequences",
            fix="jax_cudnn.ops.paged_dot_product_attention says what there is",
        )
    if missing := [port for port in IN_MEMORY if port not in ports]:
        frontend = {port: name for name, port in PAGES.items()}
        raise GraphError(
            "attention over pages lacks " + ", ".join(frontend.get(p, p) for p in missing),
            fix="give both tables, seq_len_q and seq_len_kv",
        )
    return PagedSdpa(Sdpa.create(**attributes), heads_first=True, queries_heads_first=True)


def packed(
    spec: GraphSpec, offsets: Mapping[str, str], known: Mapping[str, Tensor], order: Sequence[str]
) -> GraphSpec:
    """The graph with packed attention for that of tensors with ragged offsets.

    Args:
        spec: the graph as it was written.
        offsets: the tensor of ragged offsets for each tensor that has one.
        known: all tensors by name.
        order: the names of all inputs.

    Raises: GraphError where another operation reads such a tensor, and for attention of which some
    tensors have no offsets, or lie in another order in memory.
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
    return intern(replace(spec, tensors=kept, calls=tuple(calls), inputs=inputs, _cache={}))


def _ports(spec: GraphSpec, call: Call, offsets: Mapping[str, str]) -> dict[str, str]:
    """The tensors at the ports of attention of packed tokens, without statistics that nobody reads;
    GraphError for what it does not take."""
    ports = dict((*call.inputs, *call.outputs))
    read = {*spec.outputs, *(name for c in spec.calls for _, name in c.inputs)}
    if ports.get("Stats") not in (*read, *offsets):
        ports.pop("Stats", None)
    bare = [name for port, name in ports.items() if port in _KINDS and name not in offsets]
    wrong = ports.keys() - {*_KINDS, *LENGTHS, "bias", "dBias"}
    if call.node.method not in _PACKED or wrong:
        named = ", ".join(sorted(wrong)) if call.node.method in _PACKED else "ragged offsets"
        raise _refusal(f"{call.name} takes no {named}", "sdpa and sdpa_backward of packed tokens")
    if bare:
        raise _refusal(
            f"{call.name}: tensors without a ragged offset beside others that have one",
            "a ragged offset for " + ", ".join(p for p in ports if p in _KINDS),
            got=f"none for {', '.join(bare)}",
        )
    if missing := [port for port in LENGTHS if port not in ports]:
        raise _refusal(f"{call.name}: packed tokens without {' and '.join(missing)}", "both")
    for port, name in ports.items():
        tensor = spec.tensor(name)
        stated = tensor.order or (_TOKENS_FIRST if port in dict(call.outputs) else (0, 1, 2, 3))
        if port in _KINDS and _apparent(tensor, stated) != _apparent(tensor, _TOKENS_FIRST):
            raise _refusal(
                f"{call.name}: {port} does not lie with its tokens in front of its heads",
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
        fix="jax_cudnn.ops.packed_dot_product_attention takes packed tokens, (T, H, D), directly",
        where=user_line(),
    )


def _packed_calls(
    spec: GraphSpec,
    call: Call,
    ports: Mapping[str, str],
    offsets: Mapping[str, str],
    tensors: dict[str, Tensor],
) -> list[Call]:
    """Packed attention between what shows (B, H, S, D) as (B S, H, D) and back."""
    moves: dict[str, list[Call]] = {}
    operands, results = dict(call.inputs), {p: n for p, n in call.outputs if p in ports}
    at: dict[str, str] = {}
    for port, name in ports.items():
        if port in _KINDS:
            kind = f"ragged_offset_{_KINDS[port]}"
            if at.setdefault(kind, offsets[name]) != offsets[name]:
                raise _refusal(f"{call.name}: {port} has other offsets than its counterpart", "one")
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
    """What makes ``name::packed``, (B S, H, D), of a tensor (B, H, S, D), or the way back."""
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
    """GraphError where what is to be brought into bounds is computed in the graph."""
    for call in spec.calls:
        if isinstance(call.node, (PackedSdpa, PackedSdpaBackward, PagedSdpa)):
            for port, name in call.inputs:
                if port in call.node.integers and name not in spec.inputs:
                    raise GraphError(
                        f"{call.name}: {port} is computed in the graph",
                        why="it is brought into the bounds of the arrays before the graph runs",
                        fix="make it an input of the graph",
                        where=user_line(),
                    )
