"""Packed attention: examples of different lengths one behind the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain_attention
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, primitives, relative_error

import jax_cudnn as jc
from jax_cudnn.ops import attention_reference

S = jax.ShapeDtypeStruct
ours = jc.ops.packed_dot_product_attention
RNG = np.random.default_rng(0)


def normal(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def qkv(t=40, s=40, n=4, k=2, h=8, e=None, dtype="float32"):
    return normal((t, n, h), dtype), normal((s, k, h), dtype), normal((s, k, e or h), dtype)


@pytest.fixture(scope="module", params=[2**24, 200], ids=["whole", "blocks"])
def blocks(request):
    """The reference takes all rows of an example at a time, or a few, with some left over."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_reference, "_SCORES", request.param)
        yield
    jax.clear_caches()


def offsets(*ends):
    return jnp.array(ends, "int32")


def agree(queries, keys, operands, limit=2e-5, **band):
    """Results and gradients, also by the statistic, are those of each example by itself."""
    q, _, v = operands[:3]
    dout, dlogs = normal((*q.shape[:2], v.shape[2])), normal(q.shape[:2])
    got = plain_attention.with_gradients(packed(queries, keys, **band), operands, dout, dlogs)
    keys = queries if keys is None else keys
    bias = operands[3] if len(operands) > 3 else None
    want = plain_attention.exact_packed(*operands[:3], queries, keys, dout, dlogs, bias, **band)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=limit * max(1, np.abs(b[np.isfinite(b)]).max()))


def result(queries, keys, q, k, v, **band):
    """Of each example by itself."""
    zeros = np.zeros((*q.shape[:2], v.shape[2]))
    return plain_attention.exact_packed(q, k, v, queries, keys, zeros, zeros[..., 0], **band)[0]


LAYOUTS = {
    "one behind the other": (offsets(0, 17, 30, 40), None),
    "empty examples": (offsets(0, 0, 12, 12, 40, 40), None),
    "tokens of no example": (offsets(3, 17, 30), None),
    "other keys": (offsets(0, 9, 9, 20, 33), offsets(2, 10, 15, 15, 38)),
    "one token each": (jnp.arange(41, dtype="int32"), None),
    "one example": (offsets(0, 40), None),
}
BANDS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "bottom right": {"causal": True, "bottom_right": True},
    "window at the end": {"causal": True, "window": (4, 0), "bottom_right": True},
}


def packed(queries, keys, window=None, causal=False, **arguments):
    both = (queries, queries if keys is None else keys)
    lengths = [int(jnp.diff(ends).max()) for ends in both]

    def call(q, k, v, bias=None):
        return ours(
            q, k, v, bias, query_offsets=queries, key_value_offsets=keys,
            max_query_length=lengths[0], max_key_value_length=lengths[1], is_causal=causal,
            local_window_size=window, return_residual=True, **arguments,
        )  # fmt: skip

    return call


# -- results and gradients -------------------------------------------------------------------------


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize(
    ("layout", "band"),
    [(layout, "causal") for layout in LAYOUTS]
    + [
        (layout, band)
        for layout in ("empty examples", "other keys")
        for band in BANDS
        if band != "causal"
    ],
)
def test_each_example_sees_its_own_keys(layout, band):
    queries, keys = LAYOUTS[layout]
    agree(queries, keys, qkv(e=6), **BANDS[band])


@pytest.mark.wide
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("shape", [(1, 4, 13, 13), (4, 1, 13, 1), (1, 1, 1, 13), (4, 4, 1, 1)])
def test_a_bias_is_by_position_in_an_example(shape):
    queries = offsets(0, 13, 13, 22, 31)
    agree(queries, None, (*qkv(t=35, s=35), normal(shape)), causal=True)


def test_offsets_of_lengths_and_longest_lengths_by_default():
    lengths = jnp.array([5, 0, 20], "int32")
    ends = jnp.cumulative_sum(lengths, include_initial=True, dtype="int32")
    q, k, v = qkv(t=25, s=25)
    got = ours(q, k, v, query_offsets=ends, max_query_length=32)
    np.testing.assert_allclose(got, result(ends, ends, q, k, v), atol=1e-5)
    keys = offsets(0, 3, 9, 25)
    got = ours(q, k, v, query_offsets=ends, key_value_offsets=keys, max_query_length=20)
    np.testing.assert_allclose(got, result(ends, keys, q, k, v), atol=1e-5)


def test_what_is_longer_than_said_is_left_out():
    """Never read: offsets beyond the arrays and lengths beyond the limits are cut."""
    q, k, v = qkv(t=20, s=20)
    got = ours(q, k, v, query_offsets=offsets(0, 12, 90), max_query_length=6)
    want = jnp.zeros(got.shape)
    for first in (0, 12):
        part = slice(first, first + 6)
        each = plain_attention.attention(q[part], k[part], v[part], np.ones((6, 6), bool))
        want = want.at[part].set(each)
    np.testing.assert_allclose(got, want, atol=1e-5)
    backwards = ours(q, k, v, query_offsets=offsets(15, 3, -4), max_query_length=6)
    np.testing.assert_array_equal(backwards, 0)


@pytest.mark.parametrize("shape", [(0, 4, 8), (20, 4, 8)])
def test_without_tokens_or_without_examples(shape):
    q, k = jnp.ones(shape), jnp.ones((shape[0], 2, 8))
    ends = offsets(0) if shape[0] else offsets(0, 0)
    out, logs = ours(q, k, k, query_offsets=ends, max_query_length=4, return_residual=True)
    assert out.shape == shape
    np.testing.assert_array_equal(out, 0)
    assert np.isneginf(logs).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits(dtype):
    queries = offsets(0, 17, 30, 40)
    operands = qkv(dtype=dtype)
    got = packed(queries, None)(*operands)
    wide = [x.astype("float32") for x in operands]
    want = packed(queries, None, implementation="xla")(*wide)
    assert got[0].dtype == jnp.dtype(dtype)
    assert got[1].dtype == jnp.float32
    for a, b in zip(got, want, strict=True):
        assert relative_error(a.astype("float32"), b) < 1e-2


def test_a_scale_that_is_an_array():
    queries = offsets(0, 17, 40)
    operands = qkv()
    got, want = (packed(queries, None, scale=s)(*operands)[0] for s in (jnp.float32(0.2), 0.2))
    np.testing.assert_allclose(got, want, atol=1e-6)


# -- transformations -------------------------------------------------------------------------------

ENDS = offsets(0, 7, 7, 20, 31)


def attend(q, k, v, ends=ENDS):
    return ours(q, k, v, query_offsets=ends, max_query_length=16, is_causal=True)


def plain_attend(q, k, v):
    out = jnp.zeros((*q.shape[:2], v.shape[2]))
    for first, last in ((0, 7), (7, 20), (20, 31)):
        part, sees = slice(first, last), plain_attention.seen(last - first, last - first, True)
        out = out.at[part].set(plain_attention.attention(q[part], k[part], v[part], sees))
    return out


def test_a_gradient_is_one_forward_and_one_backward():
    operands = qkv(dtype="bfloat16")
    step = jax.grad(lambda *x: attend(*x).astype("float32").sum(), (0, 1, 2))
    assert primitives(jax.make_jaxpr(step)(*operands)).count("cudnn") == 2
    forward, backward = graphs_of(step, *operands)
    assert methods(forward) == ["packed_sdpa"]
    assert methods(backward) == ["packed_sdpa_backward"]
    assert [(t.shape, t.dtype) for t in forward.output_tensors] == [
        ((40, 4, 8), "bfloat16"), ((40, 4, 1), "float32"),
    ]  # fmt: skip
    (alone,) = graphs_of(attend, *operands)
    assert len(alone.outputs) == 1  # no statistic, where nothing reads it


def test_forward_mode_and_second_derivatives():
    operands, along = qkv(n=2, k=1, h=4), qkv(n=2, k=1, h=4)
    both = (attend, plain_attend)
    got, want = (jax.jit(lambda *x, f=f: jax.jvp(f, *x)[1])(operands, along) for f in both)
    np.testing.assert_allclose(got, want, atol=1e-4)
    cubes = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) ** 3), (0, 1, 2))  # noqa: E731
    got, want = (jax.jit(lambda *x, f=f: jax.jvp(cubes(f), *x)[1])(operands, along) for f in both)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)
    squares = lambda f: lambda q: jnp.sum(cubes(f)(q, *operands[1:])[0] ** 2)  # noqa: E731
    got, want = (jax.jit(jax.grad(squares(f)))(operands[0]) for f in both)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.wide
@pytest.mark.parametrize("axes", [(0, None, None, None), (0, 0, 0, 0), (None, None, None, 0)])
def test_vmap_runs_in_turn(axes):
    """Also over offsets: the elements may be packed differently."""
    own = [ENDS, offsets(0, 3, 10, 11, 25), offsets(5, 9, 20, 30, 40)]
    operands = [
        x if a is None else normal((3, *x.shape)) for x, a in zip(qkv(), axes, strict=False)
    ]
    operands.append(jnp.stack(own) if axes[3] == 0 else ENDS)
    for f in (attend, jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), (0, 1, 2))):
        got = jax.jit(jax.vmap(f, axes))(*operands)
        each = [
            jax.jit(f)(*(x if a is None else x[i] for x, a in zip(operands, axes, strict=True)))
            for i in range(3)
        ]
        want = jax.tree.map(lambda *x: jnp.stack(x), *each)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_heads_may_be_sharded():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 (host) devices")
    operands = qkv(n=8, k=4)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("heads",))
    by_heads = P(None, "heads")

    def gradients(q, k, v, ends):
        return jax.grad(lambda *x: jnp.sum(attend(*x, ends) ** 2), (0, 1, 2))(q, k, v)

    specs = (by_heads, by_heads, by_heads, P())
    for f, out in ((attend, by_heads), (gradients, (by_heads,) * 3)):
        mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out)
        got, want = jax.jit(mapped)(*operands, ENDS), jax.jit(f)(*operands, ENDS)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_what_is_no_number_stays_in_its_example(monkeypatch):
    monkeypatch.setattr(attention_reference, "_SCORES", 2000)
    q, k, v = qkv(t=24, s=24)
    nan = [x.at[5, 1, 0].set(jnp.nan) for x in (q, k, v)]
    ends = offsets(0, 9, 24)

    @jax.jit
    def missing(*operands):
        def loss(*x):
            out = ours(*x, query_offsets=ends, max_query_length=16, return_residual=True)
            return jnp.sum(out[0] ** 2), out

        gradients, results = jax.grad(loss, (0, 1, 2), has_aux=True)(*operands)
        return [jnp.isnan(x).reshape(24, -1).any(1) for x in (*results, *gradients)]

    for at in range(3):
        operands = [*(q, k, v)[:at], nan[at], *(q, k, v)[at + 1 :]]
        for x in missing(*operands)[: None if at < 2 else 1]:
            assert x[:9].any()
            assert not x[9:].any()


def test_memory_is_linear_in_the_number_of_tokens():
    """Of 16k tokens in 64 examples up to 8k: padded they were half a million."""
    x, ends = S((16384, 1, 16), "float32"), S((65,), "int32")

    def loss(q, k, v, ends):
        return ours(q, k, v, query_offsets=ends, max_query_length=8192, is_causal=True).sum()

    for function in (loss, jax.grad(loss, (0, 1, 2))):
        compiled = jax.jit(function).lower(x, x, x, ends).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 2**29


# -- errors ----------------------------------------------------------------------------------------

Q = jnp.ones((20, 4, 8), "bfloat16")
given = functools.partial(ours, query_offsets=offsets(0, 8, 20), max_query_length=12)
WRONG = {
    "rank": (lambda: given(Q[None], Q, Q), ["query has the wrong rank", "(T, N, H)"]),
    "heads": (lambda: given(Q, Q[:, :3], Q[:, :3]), ["do not fit together", "N a multiple"]),
    "dtypes": (lambda: given(Q, Q, Q.astype("float16")), ["different dtypes"]),
    "offsets": (
        lambda: given(Q, Q, Q, query_offsets=jnp.array([0.0, 20.0])),
        ["query_offsets is not valid", "int32[B + 1]", "float32[2]", "cumulative_sum"],
    ),
    "offsets of keys": (
        lambda: given(Q, Q, Q, key_value_offsets=offsets(0, 20)),
        ["not of the same examples", "int32[3]", "int32[2]"],
    ),
    "a length": (
        lambda: given(Q, Q, Q, max_query_length=0),
        ["max_query_length is not valid", "at least 1", "static"],
    ),
    "a length that is traced": (
        lambda: given(Q, Q, Q, max_key_value_length=jnp.int32(3)),
        ["max_key_value_length is not valid", "static"],
    ),
    "bias": (
        lambda: given(Q, Q, Q, jnp.ones((3, 4, 12, 12))),
        ["bias does not fit", "[2, 4, 12, 12]", "[3, 4, 12, 12]"],
    ),
    "too many elements": (
        lambda: jax.eval_shape(
            functools.partial(ours, query_offsets=offsets(0, 8), max_query_length=12),
            *[S((2**16, 256, 128), "bfloat16")] * 3,
        ),
        ["'q' has too many elements", "2**31"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    call, parts = WRONG[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


# -- plans without a GPU ---------------------------------------------------------------------------

PLANNED = {
    "causal": ({"is_causal": True}, {}),
    "all": ({}, {"n": 4, "k": 4}),
    "window": ({"is_causal": True, "local_window_size": (32, 0)}, {}),
    "bottom right": ({"is_causal": True, "bottom_right": True}, {"s": 700}),
    "bias": ({}, {"n": 4, "k": 4, "bias": (1, 4, 96, 160)}),
    "values of another size": ({}, {"e": 64, "h": 128}),
}


QUERIES, KEYS = offsets(0, 96, 96, 150, 240, 290), offsets(0, 160, 200, 200, 290, 380)


def prepared(name, implementation="cudnn", dtype="bfloat16"):
    """A function of arrays alone, and their avals: five examples, one without tokens."""
    arguments, sizes = PLANNED[name]
    sizes = {"t": 300, "s": 400, "n": 8, "k": 2, "h": 64, "e": None, "bias": None} | sizes
    t, s, n, k, h, e, bias = sizes.values()
    avals = [S((t, n, h), dtype), S((s, k, h), dtype), S((s, k, e or h), dtype)]
    avals += [S(bias, dtype)] if bias else []

    def function(*operands, return_residual=False):
        return ours(
            *operands, query_offsets=QUERIES, key_value_offsets=KEYS, max_query_length=96,
            max_key_value_length=160, implementation=implementation,
            return_residual=return_residual, **arguments,
        )  # fmt: skip

    return function, avals


def gradients(function, count):
    return jax.grad(lambda *x: (function(*x).astype("float32") ** 2).sum(), tuple(range(count)))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "gpu"), [*((name, "H200") for name in PLANNED), ("causal", "B200"), ("all", "B200")]
)
def test_forward_and_backward_are_a_plan_each(name, gpu):
    function, avals = prepared(name)
    with jc.target(gpu):
        plans = jc.plans(gradients(function, len(avals)), *avals)
    title = "packed_dot_product_attention"
    assert [*plans] == [title, f"{title} (backward)"]
    for plan in plans.values():
        (segment,) = plan.segments
        assert segment.plan is not None


@pytest.mark.deviceless
def test_the_backward_is_xlas_on_an_a100_with_a_reason():
    """cuDNN reads no packed statistic there."""
    function, avals = prepared("causal", None)
    with jc.target("A100"):
        forward, backward = jc.plans(gradients(function, 3), *avals).values()
        assert forward.segments[0].plan is not None
        (segment,) = backward.segments
        assert segment.plan is None
        assert "LSE is not supported" in segment.reason
        with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError):
            jc.plans(gradients(prepared("causal")[0], 3), *avals)


@pytest.mark.deviceless
def test_what_a_plan_leaves_unwritten_is_zero_beforehand():
    function, avals = prepared("causal")
    with jc.target("H200"):
        lowered = jax.jit(gradients(function, 3)).trace(*avals).lower(lowering_platforms=("cuda",))
    calls = [line for line in lowered.as_text().splitlines() if "@jax_cudnn" in line]
    results = [line.count("output_operand_alias<") for line in calls]
    assert results == [2, 3]  # O and Stats; dQ, dK and dV
    for line in calls:
        aliases = line.partition("output_operand_aliases = [")[2].partition("]}")[0]
        operands = line.rpartition(" : (")[2].partition(") ->")[0].split(", ")
        for i in range(line.count("output_operand_alias<")):
            of = aliases.partition(f"output_tuple_indices = [{i}], operand_index = ")[2]
            assert int(of.partition(",")[0]) == len(operands) - results[calls.index(line)] + i


@pytest.mark.deviceless
def test_other_operations_are_no_part_of_the_plan():
    """They would see the packed array otherwise than attention does."""

    def attend(*operands):
        ends = offsets(0, 100, 300)
        return ours(*operands, query_offsets=ends, max_query_length=200)

    q = S((300, 8, 64), "bfloat16")
    (spec,) = graphs_of(attend, q, q, q)

    @jc.graph
    def scaled(g, *operands):
        names = spec.inputs
        ports = {port: operands[names.index(name)]._state for port, name in spec.calls[0].inputs}
        out, _ = g._append(spec.calls[0].node, ports)
        return g.mul(out.set_data_type("bfloat16"), 2.0)

    avals = [S(t.shape, t.dtype) for t in spec.input_tensors]
    with jc.target("H200"):
        with pytest.raises(jc.UnsupportedGraphError, match="ranks 3, 4"):
            jc.plan(scaled.with_options(implementation="cudnn"), *avals)
        first, second = jc.plan(scaled, *avals).segments
    assert (first.plan is None, second.plan is None) == (False, True)
    (call,) = spec.calls
    tensors = {port: spec.tensor(name) for port, name in (*call.inputs, *call.outputs)}
    two = jc.graph(lambda g, q: g.relu(g.relu(q))).trace(q)[1].spec
    assert call.node.refuses(tensors, spec) is None
    assert "by itself" in call.node.refuses(tensors, two)


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PLANNED)
def test_results_and_gradients_on_the_gpu(name, dtype):
    """An example has no queries, another no keys, and the last tokens belong to none."""
    function, avals = prepared(name, dtype=dtype)
    operands = [normal(a.shape, a.dtype) for a in avals]
    band = dict(PLANNED[name][0])
    names = {"is_causal": "causal", "local_window_size": "window"}
    band = {names.get(key, key): value for key, value in band.items()}
    compare_on_the_gpu(function, operands, QUERIES, KEYS, band)


def compare_on_the_gpu(function, operands, queries, keys, band):
    q, _, v = operands[:3]
    dout = normal((*q.shape[:2], v.shape[2]), q.dtype)
    attend = functools.partial(function, return_residual=True)
    got = plain_attention.with_gradients(attend, operands, dout)
    bias = operands[3] if len(operands) > 3 else None
    none = np.zeros(q.shape[:2])
    want = plain_attention.exact_packed(*operands[:3], queries, keys, dout, none, bias, **band)
    got = [np.asarray(x, np.float64) for x in got]
    np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(want[1]))
    finite = np.isfinite(want[1])
    np.testing.assert_allclose(got[1][finite], want[1][finite], atol=2e-2)
    for a, b in zip([got[0], *got[2:]], [want[0], *want[2:]], strict=True):
        assert np.isfinite(a).all()
        assert relative_error(a, b) < 2e-2
    unseeing, unseen = np.isneginf(want[1]).all(1), ~want[4].any((1, 2))
    for x, rows in ((got[0], unseeing), (got[2], unseeing), (got[3], unseen), (got[4], unseen)):
        np.testing.assert_array_equal(x[rows], 0)


@pytest.mark.gpu
def test_realistic_lengths_on_the_gpu():
    """8 examples of up to 2048 tokens, with as many heads as language models have."""
    lengths = np.array([2048, 64, 0, 1500, 300, 777, 128, 1000])
    ends = jnp.asarray(np.concatenate([[0], lengths.cumsum()]), "int32")
    operands = qkv(t=6000, s=6000, n=16, k=4, h=128, dtype="bfloat16")
    attention = functools.partial(
        ours, query_offsets=ends, max_query_length=2048, is_causal=True, implementation="cudnn"
    )
    compare_on_the_gpu(attention, operands, ends, ends, {"causal": True})


@pytest.mark.gpu
def test_offsets_out_of_range_on_the_gpu():
    """Brought into the arrays beforehand."""
    operands = qkv(t=256, s=256, h=64, dtype="bfloat16")
    call = functools.partial(ours, max_query_length=64, implementation="cudnn")
    for ends in (offsets(0, 100, 5000), offsets(200, 100, -7), offsets(-50, 0, 256)):
        got = jax.jit(functools.partial(call, query_offsets=ends))(*operands)
        want = call(*operands, query_offsets=ends, implementation="xla")
        a, b = (np.asarray(x, np.float64) for x in (got, want))
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=2e-2)
