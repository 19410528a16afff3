"""Operands that say where elements of others lie: a plan that runs by itself keeps them inside."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import lowered

import jax_cudnn as jc
from jax_cudnn._core import execution
from jax_cudnn._core.graph.boundary import Boundary, boundary
from jax_cudnn._core.graph.builder import check_contract
from jax_cudnn._core.graph.node import Node, registry
from jax_cudnn._core.planning.limits import known_reasons
from jax_cudnn.ops.attention.storage import StoredSdpa

S = jax.ShapeDtypeStruct
OFFSETS = S((4,), "int32")
LENGTHS = S((3,), "int32")


def packed(q, k, v, queries, keys):
    most = {"max_query_length": 16, "max_key_value_length": 24}
    offsets = {"query_offsets": queries, "key_value_offsets": keys}
    return jc.ops.packed_dot_product_attention(q, k, v, **offsets, **most)


def gradients(*operands):
    return jax.grad(lambda *x: packed(*x).astype("float32").sum(), (0, 1, 2))(*operands)


def paged(q, k, v, table, lengths):
    return jc.ops.paged_dot_product_attention(q, k, v, table, key_value_seq_lengths=lengths)


def packed_queries(q, k, v, table, of_values, offsets, lengths):
    how = {"value_page_table": of_values, "query_offsets": offsets, "max_query_length": 16}
    return jc.ops.paged_dot_product_attention(q, k, v, table, key_value_seq_lengths=lengths, **how)


def qkv(x, n):
    lengths = {"query_seq_lengths": n, "key_value_seq_lengths": n}
    return jc.ops.dot_product_attention_qkv(x, num_heads=4, **lengths)


def test_no_plan_computes_integers_that_index():
    """Boundary.clipped leaves those as they are that a graph computes."""
    own = [StoredSdpa, *(node for node in registry().values() if node.indices.positions)]
    assert len(own) == 9
    assert [node for node in own if node.anchor.prologue or not node.anchor] == []


@pytest.mark.parametrize("two", [False, True], ids=["one anchor", "two"])
def test_computed_lengths_are_computed_before_the_plan(two):
    @jc.graph
    def summed(g, q, k, v, n, scale):
        if two:
            q = g.rmsnorm(q, scale, epsilon=1e-5)[0].set_data_type("bfloat16")
        return g.sdpa(q, k, v, seq_len_q=g.add(n, n), seq_len_kv=n)[0]

    x, n = S((3, 4, 16, 64), "bfloat16"), S((3, 1, 1, 1), "int32")
    spec = summed.trace(x, x, x, n, S((1, 1, 1, 64), "float32"))[1].spec
    assert "add.0" in known_reasons(spec)


@jc.graph
def graph(g, q, k, v, n):
    return g.sdpa(q, k, v, seq_len_q=n, seq_len_kv=n)[0]


@jc.graph
def computed(g, q, k, v, n):
    return g.sdpa(q, k, v, seq_len_q=g.identity(n), seq_len_kv=n)[0]


FACTORS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


@jc.graph
def float8(g, q, k, v, n, one):
    factors = dict.fromkeys(FACTORS, one)
    return g.sdpa_fp8(q, k, v, seq_len_q=n, seq_len_kv=n, **factors)[0]


@jc.graph
def experts(g, token, weight, offsets):
    return g.moe_grouped_matmul(token, weight.set_stride([32 * 64, 1, 32]), offsets)


@pytest.mark.deviceless
def test_attention_without_lengths_goes_into_cuda_graphs():
    """Where there is a GPU."""
    attention = jc.graph(lambda g, q, k, v: g.sdpa(q, k, v, generate_stats=False))
    avals = GRAPHS["graph"][1]
    for function, given, words in (
        (attention, avals[:3], "executes on an NVIDIA GPU"),
        (graph, avals, "clipped to their bounds"),
    ):
        made = jc.plan(function, *given, gpus=["H200"])["H200"]
        with pytest.raises(jc.JaxCudnnError, match=words):
            made.populate_cuda_graph(1, [], [])


def test_a_node_whose_bounds_are_lost_is_refused():
    spec = graph.trace(*GRAPHS["graph"][1])[1].spec
    (edge,) = boundary(spec).edges
    lost = Boundary(spec)
    lost.edges = (edge._replace(clipped=lambda given: {}),)
    with pytest.raises(KeyError):
        lost.clipped([0] * len(spec.inputs))
    own = {"__doc__": "Attention.", "method": "other", "boundary": Node.boundary}
    with pytest.raises(TypeError, match="boundary must clip"):
        check_contract(type("Other", (type(spec.calls[0].node),), own))


TOKENS = [S((40, 4, 64), "bfloat16"), *[S((60, 2, 64), "bfloat16")] * 2, OFFSETS, OFFSETS]
PAGES = [S((9, 16, 2, 64), "bfloat16")] * 2
TABLE = S((3, 4), "int32")
GRAPHS = {
    "experts": (
        experts,
        [
            S((1, 64, 32), "bfloat16"),
            S((4, 32, 64), "bfloat16"),
            S((4, 1, 1), "int32"),
        ],
    ),
    "packed": (packed, TOKENS),
    "packed_backward": (gradients, TOKENS),
    "decode": (paged, [S((3, 1, 4, 64), "bfloat16"), *PAGES, TABLE, LENGTHS]),
    "pages": (paged, [S((3, 5, 4, 64), "bfloat16"), *PAGES, TABLE, LENGTHS]),
    "packed queries, pages": (
        packed_queries,
        [
            S((40, 4, 64), "bfloat16"),
            S((9, 16, 2, 64), "bfloat16"),
            S((5, 32, 2, 64), "bfloat16"),
            *[TABLE, S((3, 2), "int32"), OFFSETS, LENGTHS],
        ],
    ),
    "qkv": (qkv, [S((3, 16, 8, 64), "bfloat16"), LENGTHS]),
    "graph": (graph, [S((3, 4, 16, 64), "bfloat16")] * 3 + [S((3, 1, 1, 1), "int32")]),
    "float8": (
        float8,
        [
            *[S((3, 4, 16, 64), "float8_e4m3fn")] * 3,
            S((3, 1, 1, 1), "int32"),
            S((1, 1, 1, 1), "float32"),
        ],
    ),
}


@functools.cache
def planned(name):
    """The last plan of a function: of a gradient the backward's."""
    function, avals = GRAPHS[name]
    with jc.target("H200"), jc.implementation("cudnn"):
        return [*jc.plans(function, *avals).values()][-1]


def operands(plan, low, high):
    """Floats, and integers from everywhere."""
    random = np.random.default_rng(0)
    for tensor in plan.spec.input_tensors:
        values = random.integers(low, high, tensor.shape)
        if tensor.dtype != "int32":
            values = random.standard_normal(tensor.shape)
        yield jnp.asarray(values, tensor.dtype)


def integers(spec, values):
    """What a graph is given at each port of integers, and the shapes at all its ports."""
    ((call, ports),) = [(c, p) for c in spec.calls if (p := c.node.indices.positions)]
    given = dict(zip(spec.inputs, values, strict=True))
    found = {port: np.asarray(given[name]) for port, name in call.inputs if name in given}
    shapes = {port: spec.tensor(name).shape for port, name in (*call.inputs, *call.outputs)}
    return {port: x for port, x in found.items() if port in ports}, shapes


@pytest.mark.deviceless
@pytest.mark.parametrize("name", GRAPHS)
def test_a_plan_gets_no_integers_out_of_bounds(name, monkeypatch):
    plan, got = planned(name), []

    def call(target, results, **how):
        def run(*arrays, **attributes):
            got.append(arrays)
            return [jnp.zeros(x.shape, x.dtype) for x in results]

        return run

    monkeypatch.setattr(jax.ffi, "ffi_call", call)
    with jax.disable_jit():
        execution.program.__wrapped__(plan)(*operands(plan, -1000, 100000))
    found, shapes = integers(plan.spec, got[0])
    assert len(found) >= (1 if name == "experts" else 2)
    for port, x in found.items():
        assert x.min() >= 0, port
        if port.startswith("ragged_offset_"):
            kind = port.removeprefix("ragged_offset_")
            ports = {"o": ("o", "O"), "stats": ("stats", "Stats")}.get(kind, (kind,))
            for array in ports:
                if array in shapes:
                    assert x.max() <= np.prod(shapes[array]), port
        elif port.startswith("page_table"):
            assert x.max() < shapes[port.removeprefix("page_table_")][0]
    if name == "experts":
        assert found["first_token_offset"].max() <= 64
        assert (np.diff(found["first_token_offset"].ravel()) >= 0).all()
    if name in ("pages", "decode"):
        assert found["seq_len_kv"].max() <= 4 * 16
        assert found["seq_len_q"].max() <= shapes["q"][1]
    if name in ("qkv", "graph", "float8"):
        assert max(x.max() for x in found.values()) <= 16


@pytest.mark.deviceless
def test_the_lengths_of_a_graph_are_clipped_in_a_program():
    function, avals = GRAPHS["graph"]
    with jc.implementation("cudnn"):
        text = lowered(function, *avals)
    before = text.partition("custom_call @jax_cudnn")[0]
    assert len(re.findall("call @clip", before)) == 2


@pytest.mark.deviceless
def test_packed_lengths_end_with_their_tokens():
    plan = planned("packed_backward")
    found, shapes = integers(plan.spec, boundary(plan.spec).clipped([*operands(plan, -500, 60000)]))
    for kind, length in (("q", "seq_len_q"), ("k", "seq_len_kv")):
        size = np.prod(shapes[kind][1:])
        room = np.diff(found[f"ragged_offset_{kind}"].ravel()) // size
        assert (found[length].ravel() <= np.maximum(room, 0)).all()
        assert not (found[f"ragged_offset_{kind}"] % size).any(), "whole tokens"


@pytest.mark.deviceless
def test_integers_in_bounds_stay_as_they_are():
    spec = planned("packed").spec
    (call,) = spec.calls
    starts, lengths = jnp.array([0, 16, 30, 40]), jnp.array([16, 14, 10])
    given = {}
    for port, name in call.inputs:
        tensor = spec.tensor(name)
        given[name] = jnp.ones(tensor.shape, tensor.dtype)
        if port in call.node.indices.positions:
            kind = port.removeprefix("ragged_offset_")
            size = {"q": 256, "o": 256, "stats": 4}.get(kind, 128)
            value = starts * size if port != kind else lengths
            given[name] = value.reshape(tensor.shape).astype("int32")
    for got, want in zip(boundary(spec).clipped(list(given.values())), given.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(got, "float32"), np.asarray(want, "float32"))


def test_integers_that_a_graph_computes_stay():
    spec = computed.trace(*GRAPHS["graph"][1])[1].spec
    given = [jnp.full(t.shape, 50, t.dtype) for t in spec.input_tensors]
    assert all(a is b for a, b in zip(boundary(spec).clipped(given), given, strict=True))


@pytest.mark.deviceless
def test_an_operand_of_two_ports_keeps_the_bounds_of_both():
    """5 queries, and keys of 4 pages of 16."""
    spec = planned("pages").spec
    (call,) = spec.calls
    names = dict(call.inputs)
    shared, other = names["seq_len_q"], names["seq_len_kv"]
    call = replace(call, inputs=tuple((p, shared if n == other else n) for p, n in call.inputs))
    inputs = tuple(name for name in spec.inputs if name != other)
    spec = replace(spec, calls=(call,), inputs=inputs)
    given = [jnp.full(spec.tensor(n).shape, 50, spec.tensor(n).dtype) for n in inputs]
    assert boundary(spec).clipped(given)[inputs.index(shared)].max() == 5


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHS)
def test_plans_execute_with_integers_from_everywhere(name):
    function, avals = GRAPHS[name]
    with jc.implementation("cudnn"):
        plan = [*jc.plans(function, *avals).values()][-1]
    jax.block_until_ready(plan.execute(*operands(plan, -3000, 20000)))
    jax.block_until_ready(plan.execute(*operands(plan, 0, 1)))  # the GPU's context lives
