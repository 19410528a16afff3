"""What the frontend's own tests write: results of attention, windows of buffers, 64-bit lengths."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from helpers import has_cudnn

import jax_cudnn as jc
from jax_cudnn._core.planning import frontend

if importlib.util.find_spec("cudnn") is None:
    pytest.skip("nvidia-cudnn-frontend is not installed", allow_module_level=True)

B, H, S, D = 2, 4, 128, 64
Q, K, V = (jax.random.normal(jax.random.key(i), (B, H, S, D)) for i in range(3))


def pygraph(io="FLOAT", intermediate="FLOAT", compute="FLOAT"):
    cudnn = frontend.load()
    kinds = {"io": io, "intermediate": intermediate, "compute": compute}
    types = {f"{key}_data_type": getattr(cudnn.data_type, name) for key, name in kinds.items()}
    return cudnn.pygraph(**types), cudnn.data_type


def operands(g, names="qkv"):
    return [g.tensor(name=n, dim=[B, H, S, D], stride=[H * S * D, S * D, D, 1]) for n in names]


@pytest.mark.deviceless
@pytest.mark.parametrize("with_stats", [True, False])
@pytest.mark.parametrize("wanted", [["score_max"], ["score_sum_exp", "score_max"]])
def test_extremes_of_scores_are_results(wanted, with_stats):
    g, kind = pygraph("HALF")
    row = {"dim": [B, H, S, 1], "stride": [H * S, S, 1, 1], "data_type": kind.FLOAT}
    made = {name: g.tensor(name=name, **row) for name in wanted}
    given = {"attn_scale": 0.25, "use_causal_mask": True, "generate_stats": with_stats}
    o, stats = g.sdpa(*operands(g), **given, **made)
    o.set_output(True).set_dim([B, H, S, D]).set_stride([H * S * D, S * D, D, 1])
    results = [o, *made.values(), *[stats] * with_stats]
    for result in results[1:]:
        result.set_output(True).set_data_type(kind.FLOAT)
    function = jc.from_pygraph(g, inputs=[*"qkv"], outputs=results)
    halves = [x.astype("float16") for x in (Q, K, V)]
    got, *rows = jax.jit(function)(*halves)
    want = oracle_attention.Attention(*halves, scale=0.25, right=0)
    largest = want.scores.max(-1, keepdims=True)
    sums = np.exp(want.scores - largest).sum(-1, keepdims=True)
    exact = {"score_max": largest, "score_sum_exp": sums}
    np.testing.assert_allclose(got, want.out, rtol=1e-2, atol=1e-3)
    for name, row in zip(wanted, rows, strict=False):
        np.testing.assert_allclose(row, exact[name], rtol=1e-4, atol=1e-4)
    if with_stats:
        np.testing.assert_allclose(rows[-1], largest + np.log(sums), rtol=1e-4, atol=1e-4)
    plan = function.plan(gpus=["H200"])["H200"]
    if has_cudnn(92800):
        assert len(plan.execution_plans) == len(plan.segments) == 1


def test_results_that_attention_does_not_have_are_errors():
    g, kind = pygraph("HALF")
    row = {"dim": [B, H, S, 1], "data_type": kind.FLOAT}
    of_fp8 = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {n: g.tensor(name=n, dim=[1, 1, 1, 1], data_type=kind.FLOAT) for n in of_fp8}
    given = {"attn_scale": 0.25, "generate_stats": False, "score_max": g.tensor(name="m", **row)}
    g.sdpa_fp8(*operands(g), **scales, **given)[0].set_output(True)
    with pytest.raises(jc.GraphTypeError, match="score_max"):
        jc.from_pygraph(g)
    with jc.Graph() as graph:
        o, _, largest = graph.sdpa(Q, K, V, score_max=True)
        assert largest.get_dim() == [B, H, S, 1]
        o.set_output(True)
        with pytest.raises(jc.GraphTypeError, match="score_max=True"):
            graph.sdpa(Q, K, V, score_max=largest)
        table = jnp.zeros((B, 1, S, 1), "int32")
        paged = {"paged_attention_k_table": table, "paged_attention_v_table": table}
        with pytest.raises(jc.GraphError, match="does not compute score_max"):
            graph.sdpa(Q, K, V, score_max=True, **paged)


def in_window(g, kind, strides, result=None):
    x = g.tensor(name="x", dim=[4, 1, 8], stride=strides, data_type=kind)
    y = g.relu(x).set_output(True).set_data_type(kind)
    return y.set_dim([4, 1, 8]).set_stride(result) if result else y


@pytest.mark.parametrize("strides", [[16, 3, 1], [2, 70, 10], [48, 24, 3]])
def test_gaps_of_windows_are_dropped(strides):
    """The dims stay, and the order of dimensions in memory."""
    order = (2, 1, 0) if strides[0] == 2 else (0, 1, 2)
    g, kind = pygraph()
    with jc.Graph(inputs=["x"], outputs=["relu.0::OUT_0"]) as graph:
        in_window(graph, "FLOAT", strides, strides)
    y = in_window(g, kind.FLOAT, strides, strides)
    x = jax.random.normal(jax.random.key(0), (4, 1, 8))
    for function in (graph, jc.from_pygraph(g, inputs=["x"], outputs=[y])):
        for tensor in (*function.get_inputs(), *function.get_outputs()):
            known = tensor.get_stride()
            assert tuple(sorted((0, 2), key=lambda a, k=known: -k[a])) == (order[0], order[2])
            assert sorted(known[axis] for axis in (0, 2)) == sorted([1, 8 if order[0] == 0 else 4])
        np.testing.assert_array_equal(function(x), jnp.maximum(x, 0))
    window = np.ones((8, 1, 16), np.float32).T[::4, :, :8]  # (4, 1, 8), with its rows innermost
    with jc.Graph() as graph:
        graph.relu(window).set_output(True)
    assert graph.get_inputs()[0]._state.order == (2, 1, 0)


@pytest.mark.parametrize("strides", [[0, 8, 1], [4, 8, 1], [1, 1, 1]])
def test_strides_that_overlap_are_errors(strides):
    g, kind = pygraph()
    in_window(g, kind.FLOAT, strides)
    with pytest.raises(jc.GraphError, match="with size 1: operations broadcast it"):
        jc.from_pygraph(g)


def with_lengths(g, kind, integers, size=S):
    """Packed attention with lengths and offsets of a kind."""
    strides = [size * H * D, D, H * D, 1]
    ends = g.tensor(name="ends", dim=[B + 1, 1, 1, 1], stride=[1] * 4, data_type=integers)
    q, k, v = (
        g.tensor(name=n, dim=[B, H, size, D], stride=strides, data_type=kind, ragged_offset=ends)
        for n in "qkv"
    )
    t, s = (
        g.tensor(name=n, dim=[B, 1, 1, 1], stride=[1] * 4, data_type=integers) for n in ("t", "s")
    )
    given = {"use_padding_mask": True, "generate_stats": False, "attn_scale": 0.25}
    o, _ = g.sdpa(q, k, v, seq_len_q=t, seq_len_kv=s, **given)
    o.set_output(True).set_name("o").set_dim([B, H, size, D]).set_stride(strides)
    o.set_ragged_offset(ends)


ENDS = np.array([0, 50, 170]).reshape(-1, 1, 1, 1) * H * D


def of_lengths(convert):
    tokens = {
        name: jnp.swapaxes(x.reshape(B, S, H, D), 1, 2)
        for name, x in (("q", Q), ("k", K), ("v", V))
    }
    counts = convert(np.array([50, 120]).reshape(-1, 1, 1, 1))
    return {**tokens, "ends": convert(ENDS), "t": counts, "s": counts}


def test_64_bit_lengths_and_offsets_become_int32():
    g, kind = pygraph()
    with_lengths(g, kind.FLOAT, kind.INT64)
    with jc.Graph() as own:
        with_lengths(own, "FLOAT", "INT32")
    want = own(of_lengths(lambda x: jnp.asarray(x, "int32")))["sdpa.0::O"]
    function = jc.from_pygraph(g)
    assert {t.dtype for t in function.spec.input_tensors} == {"float32", "int32"}
    for convert in (np.int64, lambda x: jnp.asarray(x, "int32")):
        np.testing.assert_array_equal(function(of_lengths(convert))["sdpa.0::O"], want)
    given = of_lengths(np.int64)
    with pytest.raises(jc.GraphError, match="is out of range"):
        function({**given, "ends": given["ends"] + 2**40})
    with jax.enable_x64(True):
        long = of_lengths(jnp.asarray)
        assert long["ends"].dtype == jnp.int64
        far = {**long, "ends": long["ends"].at[-1].set(2**40)}  # as if it was the end
        for operands in (long, far):
            got = jax.jit(function)({**operands})["sdpa.0::O"]
            np.testing.assert_array_equal(got, want)


def test_offsets_of_tensors_that_int32_cannot_index_are_errors():
    g, kind = pygraph()
    with_lengths(g, kind.FLOAT, kind.INT64, 2**22)
    with pytest.raises(jc.GraphError, match="too large for ragged offsets"):
        jc.from_pygraph(g)


def eight_bits(key, *shape):
    return jax.random.randint(jax.random.key(key), shape, -128, 128).astype("int8")


def scaled_product(of_convolution, result="FLOAT"):
    """A product of int8 with its sum in int32 inside, then times a scale."""
    g, kind = pygraph("INT8", "INT32", "INT32")
    scale = g.tensor(name="scale", dim=[1] * (3 + of_convolution), data_type=kind.FLOAT)
    if of_convolution:
        x = g.tensor(name="x", dim=[2, 64, 8, 8], stride=[4096, 1, 512, 64])
        w = g.tensor(name="w", dim=[32, 64, 3, 3], stride=[576, 1, 192, 64])
        spatial = {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}
        total = g.conv_fprop(x, w, **spatial)
    else:
        x = g.tensor(name="x", dim=[1, 64, 2048], stride=[2048 * 64, 2048, 1])
        w = g.tensor(name="w", dim=[1, 2048, 32], stride=[2048 * 32, 1, 2048])
        total = g.matmul(x, w)
    y = g.mul(total, scale).set_output(True).set_data_type(getattr(kind, result))
    return jc.from_pygraph(g, inputs=["x", "w", "scale"], outputs=[y])


@pytest.mark.deviceless
@pytest.mark.parametrize("of_convolution", [True, False])
def test_sums_of_products_of_integers_are_int32_inside(of_convolution):
    function = scaled_product(of_convolution)
    x, w = (eight_bits(i, *t.shape) for i, t in enumerate(function.spec.input_tensors[:2]))
    if of_convolution:
        padded = np.pad(np.int64(x), ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        exact = np.einsum("nchwij,kcij->nkhw", windows, np.int64(w))
    else:
        x, w = jnp.full_like(x, 127).at[0, 0, 0].set(2), jnp.full_like(w, 127)
        exact = np.int64(x) @ np.int64(w)
        assert (exact != np.float32(exact).astype(np.int64)).any()  # float32 sums would be rounded
    (inner,) = (t for t in function.spec.tensors if t.dtype == "int32")
    scale = jnp.full((1,) * x.ndim, 0.25)
    np.testing.assert_array_equal(jax.jit(function)(x, w, scale), np.float32(exact) * 0.25)
    slope = jax.grad(lambda s: function(x, w, s).sum())(scale)
    np.testing.assert_allclose(slope, exact.sum(keepdims=True), rtol=1e-5)
    whole = scaled_product(of_convolution, "INT8")(x, w, scale / 2**14)
    rounded = np.round(np.float32(exact) * np.float32(0.25 / 2**14)).clip(-128, 127)
    np.testing.assert_array_equal(whole, rounded)
    plan = function.plan(gpus=["H200"])["H200"]
    assert plan.spec.tensor(inner.name).dtype == "int32"
    assert len(plan.execution_plans) == len(plan.segments) == 1


def test_floats_inside_are_rounded_to_whole_numbers_as_cudnn_says():
    @jc.graph(intermediate_data_type="int32")
    def twice_rounded(g, x):
        return g.add(g.mul(x, 1.5), g.identity(x)).set_data_type("float32")

    x = jnp.array([0.4, 1.4, 2.6])
    np.testing.assert_array_equal(twice_rounded(x), jnp.round(1.5 * x) + jnp.round(x))
    with pytest.raises(jc.GraphError, match="neither a float type nor int32"):
        jc.Options(intermediate_data_type="int8")
