"""Packed attention whose q, k and v lie side by side in a buffer, as in the frontend's tests."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_graph_attention as base
from test_graph_attention import BEGINS, LENGTHS, OPTIONS, B, D, H, S, as_cudnn, integers, tokens

import jax_cudnn as jc

# The heads of k and v; and of q, k, v and o the elements of a token, and from head to head.
LAYOUTS = {
    "t3hd": (H, (96, 8), (96, 8), (96, 8), (32, 8)),
    "th3d": (H, (96, 24), (96, 24), (96, 24), (32, 8)),
    "thd_t2hd": (2, (32, 8), (32, 8), (32, 8), (32, 8)),
    "gaps of tokens": (2, (64, 8), (16, 8), (48, 8), (128, 8)),
    "one buffer": (1, (48, 8), (48, 8), (48, 8), (32, 8)),
}


def column(x):
    return np.reshape(x, (-1, 1, 1, 1))


def dense(layout):
    return layout[0], *((heads * D, D) for heads in (H, layout[0], layout[0], H))


def write(g, kind, of_integers, layout, backward=False, shared=False):
    """Attention, or its backward; q, k and v have one tensor of offsets if ``shared``."""
    n, *steps = layout
    lies = {
        name: {"dim": [B, heads, S, D], "stride": [S * token, head, token, 1]}
        for name, heads, (token, head) in zip("qkvo", (H, n, n, H), steps, strict=True)
    }
    own = "qo" if shared else "qkvo"
    begins = {name: integers(g, f"{name} begins", B + 1, kind=of_integers) for name in own}
    begins = {name: begins.get(name, begins["q"]) for name in "qkvo"}
    arrays = {
        name: g.tensor(name=name, **lies[of], data_type=kind, ragged_offset=begins[of])
        for name, of in {"q": "q", "k": "k", "v": "v", "o": "o", "dO": "o"}.items()
    }
    names = "seq_len_q", "seq_len_kv"
    given = OPTIONS | {name: integers(g, name, B, kind=of_integers) for name in names}
    if backward:
        row = {"dim": [B, H, S, 1], "stride": [H * S, S, 1, 1], "data_type": kind}
        made = g.sdpa_backward(**arrays, stats=g.tensor(name="stats", **row), **given, name="a")
    else:
        forward = {name: arrays[name] for name in "qkv"}
        *made, stats = g.sdpa(**forward, **given, is_inference=False, name="a")
        stats.set_output(True)
    for x, of in zip(made, "qkv" if backward else "o", strict=False):
        x.set_output(True).set_data_type(kind).set_dim(lies[of]["dim"])
        x.set_stride(lies[of]["stride"]).set_ragged_offset(begins[of])


def operands(graph, layout, convert=jnp.asarray):
    """Offsets count elements of the layout, as cuDNN would get them."""
    n, *steps = layout
    heads = {"q": H, "k": n, "v": n, "o": H, "dO": H, "stats": H}
    given = {
        name: as_cudnn(tokens(h, 1 if name == "stats" else D, seed))
        for seed, (name, h) in enumerate(heads.items())
    }
    for name, (token, _) in zip("qkvo", steps, strict=True):
        given[f"{name} begins"] = convert(np.int64(column(BEGINS)) * token)
    return base.of(graph, base.operands(**given))


def results(graph, given):
    return {name: x for name, x in graph(given).items() if "::" in name}


@pytest.mark.deviceless
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_results_are_those_without_gaps(name, backward):
    layout = LAYOUTS[name]
    shared = layout[1][0] == layout[2][0]
    graph = base.carried_over(write, layout, backward, shared)
    plain = base.carried_over(write, dense(layout), backward)
    want = jax.jit(lambda x: results(plain, x))(operands(plain, dense(layout)))
    given = operands(graph, layout)
    assert len(given) == len(plain.get_inputs()) - 2 * shared
    got = jax.jit(lambda x: results(graph, x))(given)
    assert {*got} == {*want}
    for key, x in got.items():
        np.testing.assert_array_equal(x, want[key])


def test_gradients_are_those_of_ops():
    graph = base.carried_over(write, LAYOUTS["one buffer"], False, True)
    given = operands(graph, LAYOUTS["one buffer"])
    arrays = [given[name] for name in "qkv"]

    def ours(*x):
        return (graph({**given, **dict(zip("qkv", x, strict=True))})["a::O"] ** 2).sum()

    exact = jax.grad(lambda *x: (base.plain(*map(base.as_tokens, x)) ** 2).sum(), (0, 1, 2))
    for got, want in zip(jax.grad(ours, (0, 1, 2))(*arrays), exact(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_offsets_beyond_int32_into_a_buffer_are_divided_before_they_are_int32():
    layout = (H, *[(2**28, D)] * 3, (H * D, D))
    with jc.Graph() as graph:
        write(graph, "float32", "int64", layout)
    with jc.Graph() as plain:
        write(plain, "float32", "int32", dense(layout))
    want = results(plain, operands(plain, dense(layout)))
    for x64, convert in ((False, np.int64), (True, jnp.asarray)):
        with jax.enable_x64(x64):
            got = results(graph, operands(graph, layout, convert))
        for key, x in got.items():
            np.testing.assert_array_equal(x, want[key])


def test_windows_of_numpy_arrays_have_gaps():
    qkv = np.random.default_rng(0).standard_normal((B, S, 3, H, D), "float32")
    given = {name: qkv[:, :, i].transpose(0, 2, 1, 3) for i, name in enumerate("qkv")}
    begins, own, lengths = map(column, (BEGINS * 96, BEGINS * 32, LENGTHS))
    with jc.Graph() as graph:
        q = graph.tensor_like(given["q"], name="q").set_ragged_offset(begins)
        k = graph.tensor_like(q, name="k").set_ragged_offset(begins)
        v = graph.tensor_like(given["v"], name="v").set_ragged_offset(begins)
        o, _ = graph.sdpa(q, k, v, **OPTIONS, seq_len_q=lengths, seq_len_kv=lengths, name="a")
        o.set_output(True).set_stride([S * H * D, D, H * D, 1]).set_ragged_offset(own)
    of = {"q::ragged_offset": begins, o.name + "::ragged_offset": own, "a::seq_len_q": lengths}
    want = base.plain(*(base.as_tokens(x) for x in given.values()))
    for copy in (graph, graph.with_options(), pickle.loads(pickle.dumps(graph))):
        got = base.as_tokens(copy({**given, **of})["a::O"])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.deviceless
def test_plans_have_the_divided_offsets_as_operands():
    with jc.Graph() as graph:
        write(graph, "float16", "int32", LAYOUTS["one buffer"], shared=True)
    plan = graph.plan(gpus=["H200"])["H200"]
    assert len(plan.execution_plans) == 1
    names = [name for name in plan.spec.inputs if "begins" in name]
    assert names == ["q begins // 48 * 32", "q begins // 48 * 8", "o begins"]


DENSE = [S * H * D, D, H * D, 1]


@pytest.mark.parametrize(
    ("q", "dq", "words"),
    [
        ([S * 96 + 96, 8, 96, 1], DENSE, "q has a ragged offset, and gaps between its sequences"),
        ([S * 96, S * 24, 24, 1], DENSE, "of 16 token strides, 384"),
        ([S * 96, 8, 96, 1], DENSE, "tokens of different strides"),
    ],
    ids=["gaps between sequences", "heads first", "gradients with other strides"],
)
def test_offsets_that_cannot_be_divided_are_errors(q, dq, words):
    begins, lengths = column(BEGINS), column(LENGTHS)

    def build(g):
        x = g.tensor([B, H, S, D], q, "float32", ragged_offset=begins, name="q")
        rows = g.tensor([B, H, S, 1], data_type="float32")
        for y in g.sdpa_backward(x, x, x, x, x, rows, seq_len_q=lengths, seq_len_kv=lengths)[:3]:
            y.set_output(True).set_stride(dq).set_ragged_offset(begins)

    g = jc.Graph()
    with pytest.raises(jc.GraphError, match=words), g:
        build(g)
