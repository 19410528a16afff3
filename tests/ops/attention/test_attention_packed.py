"""Packed attention: examples of different lengths one behind the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import CAUSAL, LAST, bounds, drawing, outcome, turned
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, primitives, relative_error

import jax_cudnn as jc
from jax_cudnn.ops import attention_reference

S = jax.ShapeDtypeStruct
ours = jc.ops.packed_dot_product_attention


@pytest.fixture
def normal(key):
    return drawing(key)


@pytest.fixture
def blocks(monkeypatch):
    """The reference takes a few rows of an example at a time, with some left over."""
    monkeypatch.setattr(attention_reference, "_SCORES", 200)


def qkv(normal, t=40, s=40, n=4, k=2, h=8, e=None, dtype="float32"):
    return [normal(shape, dtype) for shape in ((t, n, h), (s, k, h), (s, k, e or h))]


def offsets(*ends):
    return np.array(ends, "int32")


def exact(q, k, v, queries, keys, dout, dlogs=None, bias=None, **bounds):
    """One example after the other: the result, the statistic, and the gradients."""
    dlogs = np.zeros(q.shape[:2]) if dlogs is None else dlogs
    out, logs = np.zeros(dout.shape), np.full(dlogs.shape, -np.inf)
    gradients = [np.zeros(x.shape) for x in (q, k, v)]
    longest = [int(np.diff(ends).max()) for ends in (queries, keys)]
    scores = np.zeros((len(queries) - 1, q.shape[1], *longest))
    whole = np.broadcast_to(0.0 if bias is None else np.asarray(bias, np.float64), scores.shape)
    for i in range(len(queries) - 1):
        own, others = (slice(int(ends[i]), int(ends[i + 1])) for ends in (queries, keys))
        t, s = (max(x.stop - x.start, 0) for x in (own, others))
        if t == 0 or s == 0:
            continue
        given = (turned(x[part][None]) for x, part in ((q, own), (k, others), (v, others)))
        found = oracle_attention.Attention(*given, bias=whole[i, :, :t, :s], **bounds)
        back = found.gradients(turned(dout[own][None]), turned(dlogs[own][None, ..., None]))
        out[own], logs[own] = turned(found.out)[0], turned(found.stats)[0, ..., 0]
        for gradient, part, name in zip(gradients, (own, others, others), "qkv", strict=True):
            gradient[part] = turned(back[name])[0]
        scores[i, :, :t, :s] = back["scores"][0]
    if bias is not None:
        axes = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
        gradients.append(scores.sum(axes, keepdims=True))
    return out, logs, *gradients


def packed(queries, keys=None, **arguments):
    both = (queries, queries if keys is None else keys)
    lengths = [int(np.diff(ends).max()) for ends in both]
    return functools.partial(
        ours, query_offsets=queries, key_value_offsets=keys, max_query_length=lengths[0],
        max_key_value_length=lengths[1], return_residual=True, **arguments,
    )  # fmt: skip


EMPTY, OTHER = offsets(0, 0, 12, 12, 40, 40), offsets(0, 9, 9, 20, 33)
KEYS = offsets(2, 10, 15, 15, 38)
CASES = {
    "causal": (offsets(0, 17, 30, 40), None, CAUSAL, None),
    "window, empty examples": (EMPTY, None, {"local_window_size": (3, 2)}, None),
    "from the last, other keys": (OTHER, KEYS, {**LAST, "local_window_size": (4, 0)}, None),
    "tokens of no example": (offsets(3, 17, 30), None, LAST, None),
    "one token each": (np.arange(41, dtype="int32"), None, {}, None),
    "bias of heads": (offsets(0, 13, 13, 22, 31), None, CAUSAL, (1, 4, 13, 13)),
    "bias of queries": (offsets(0, 13, 13, 22, 31), None, CAUSAL, (4, 1, 13, 1)),
    "bias of keys": (offsets(0, 13, 13, 22, 31), None, CAUSAL, (4, 4, 1, 13)),
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_each_example_by_itself(name, normal):
    queries, keys, band, shape = CASES[name]
    operands = qkv(normal, e=6)
    bias = [normal(shape)] if shape else []
    dout, dlogs = normal((40, 4, 6)), normal((40, 4))
    got = outcome(packed(queries, keys, **band), [*operands, *bias], dout, dlogs)
    keys = queries if keys is None else keys
    want = exact(*operands, queries, keys, dout, dlogs, *bias, **bounds(**band))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b[np.isfinite(b)]).max()))


def test_what_is_longer_than_said_is_left_out(normal):
    """Never read: offsets beyond the arrays and lengths beyond the limits are cut; and the longest
    keys are as long as the longest queries by default."""
    q, k, v = qkv(normal, t=20, s=20)
    got = ours(q, k, v, query_offsets=offsets(0, 12, 90), max_query_length=6)
    assert got.shape == q.shape
    for part in (slice(0, 6), slice(12, 18)):
        want = exact(q[part], k[part], v[part], [0, 6], [0, 6], q[part])[0]
        np.testing.assert_allclose(got[part], want, atol=1e-5)
    assert not got[6:12].any()
    assert not got[18:].any()
    backwards = ours(q, k, v, query_offsets=offsets(15, 3, -4), max_query_length=6)
    assert not backwards.any()
    wide = packed(offsets(0, 7, 20), scale=jnp.float32(0.2))(q, k, v)[0]
    np.testing.assert_allclose(wide, packed(offsets(0, 7, 20), scale=0.2)(q, k, v)[0], atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4, 8), (20, 4, 8)])
def test_without_tokens_or_without_examples(shape):
    q, k = jnp.ones(shape), jnp.ones((shape[0], 2, 8))
    ends = offsets(0) if shape[0] else offsets(0, 0)
    out, logs = ours(q, k, k, query_offsets=ends, max_query_length=4, return_residual=True)
    assert out.shape == shape
    assert not out.any()
    assert np.isneginf(logs).all()


@pytest.mark.usefixtures("blocks")
def test_what_is_no_number_stays_in_its_example(normal):
    operands = qkv(normal, t=24, s=24)

    @jax.jit
    def missing(*operands):
        run = packed(offsets(0, 9, 24))
        squares = lambda *x: (lambda found: (jnp.sum(found[0] ** 2), found))(run(*x))  # noqa: E731
        gradients, results = jax.grad(squares, (0, 1, 2), has_aux=True)(*operands)
        return [jnp.isnan(x).reshape(24, -1).any(1) for x in (*results, *gradients)]

    for at in range(3):
        given = [*operands]
        given[at] = given[at].at[5, 1, 0].set(jnp.nan)
        for x in missing(*given)[: None if at < 2 else 1]:
            assert x[:9].any()
            assert not x[9:].any()


# -- transformations -------------------------------------------------------------------------------

ENDS = offsets(0, 7, 7, 20, 31)


def attend(q, k, v, ends=ENDS):
    return ours(q, k, v, query_offsets=ends, max_query_length=16, is_causal=True)


def plain_attend(q, k, v):
    parts = [slice(0, 7), slice(7, 20), slice(20, 31)]
    each = [jax.nn.dot_product_attention(q[i], k[i], v[i], is_causal=True) for i in parts]
    return jnp.concatenate([*each, jnp.zeros((9, *q.shape[1:]))])


@pytest.mark.long
def test_forward_mode_and_second_derivatives(normal):
    operands, along = (tuple(qkv(normal, n=2, k=1, h=4)) for _ in range(2))
    cubes = lambda f: jax.grad(lambda *x: jnp.sum(f(*x) ** 3), (0, 1, 2))  # noqa: E731

    @functools.partial(jax.jit, static_argnums=0)
    def found(f):
        squares = lambda q: jnp.sum(cubes(f)(q, *operands[1:])[0] ** 2)  # noqa: E731
        first, second = (jax.jvp(g, operands, along)[1] for g in (f, cubes(f)))
        return first, second, jax.grad(squares)(operands[0])

    want = jax.tree.leaves(found(plain_attend))
    for a, b in zip(jax.tree.leaves(found(attend)), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("axes", [(0, None, None, None), (0, 0, 0, 0)])
def test_vmap_runs_in_turn(axes, normal):
    """Also over offsets: the elements may be packed differently."""
    own = jnp.stack([ENDS, offsets(0, 3, 10, 11, 25), offsets(5, 9, 20, 30, 40)])
    operands = [
        x if a is None else normal((3, *x.shape)) for x, a in zip(qkv(normal), axes, strict=False)
    ]
    operands.append(ENDS if axes[3] is None else own)
    f = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(attend(*x) ** 2), (0, 1, 2)))
    got = jax.jit(jax.vmap(f, axes))(*operands)
    each = [
        f(*(x if a is None else x[i] for x, a in zip(operands, axes, strict=True)))
        for i in range(3)
    ]
    want = jax.tree.map(lambda *x: jnp.stack(x), *each)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_heads_may_be_sharded(normal):
    operands = qkv(normal, n=8, k=4)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("heads",))
    by_heads = P(None, "heads")
    step = jax.grad(lambda *x: jnp.sum(attend(*x) ** 2), (0, 1, 2))
    specs = (by_heads, by_heads, by_heads, P())
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:3])
    for a, b in zip(jax.jit(mapped)(*operands, ENDS), jax.jit(step)(*operands, ENDS), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_memory_is_linear_in_the_number_of_tokens():
    """Of 16k tokens in 64 examples up to 8k: padded they were half a million."""
    x, ends = S((16384, 1, 16), "float32"), S((65,), "int32")

    def loss(x, ends):
        return ours(x, x, x, query_offsets=ends, max_query_length=8192, is_causal=True).sum()

    compiled = jax.jit(jax.grad(loss)).lower(x, ends).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**29


# -- plans, and the GPU ----------------------------------------------------------------------------

# Five examples, one without queries, another without keys; the last tokens belong to none.
QUERIES, OTHERS = offsets(0, 96, 96, 150, 240, 290), offsets(0, 160, 200, 200, 290, 380)
PLANNED = {
    "window": ({**CAUSAL, "local_window_size": (32, 0)}, {}),
    "from the last": (LAST, {"s": 700}),
    "bias": ({}, {"n": 4, "k": 4, "bias": (1, 4, 96, 160)}),
    "values of another size": ({}, {"e": 64, "h": 128}),
}


def prepared(normal, name, dtype="bfloat16", implementation="cudnn"):
    arguments, sizes = PLANNED[name]
    sizes = {"t": 300, "s": 400, "n": 8, "k": 2, "h": 64} | sizes
    shape = sizes.pop("bias", None)
    bias = [normal(shape, dtype)] if shape else []
    function = packed(QUERIES, OTHERS, implementation=implementation, **arguments)
    return function, [*qkv(normal, **sizes, dtype=dtype), *bias]


def gradients(function, count):
    loss = lambda *x: (function(*x)[0].astype("float32") ** 2).sum()  # noqa: E731
    return jax.grad(loss, tuple(range(count)))


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "gpu"), [("window", "B200"), ("from the last", "H200"), ("bias", "H200")]
)
def test_forward_and_backward_are_a_plan_each(name, gpu, normal):
    function, operands = prepared(normal, name)
    step = gradients(function, len(operands))
    assert primitives(jax.make_jaxpr(step)(*operands)).count("cudnn") == 2
    first, second = graphs_of(step, *operands)
    assert (methods(first), methods(second)) == (["packed_sdpa"], ["packed_sdpa_backward"])
    with jc.target(gpu):
        plans = jc.plans(step, *operands)
        text = jax.jit(step).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    for plan in plans.values():
        (segment,) = plan.segments
        assert segment.plan is not None
    # What a plan leaves unwritten is zero beforehand: O and Stats; dQ, dK and dV (and dBias).
    calls = [line for line in text.splitlines() if "@jax_cudnn" in line]
    count = [line.count("output_operand_alias<") for line in calls]
    assert count == [2, 3]
    for line, results in zip(calls, count, strict=True):
        aliases = line.partition("output_operand_aliases = [")[2].partition("]}")[0]
        operands = line.rpartition(" : (")[2].partition(") ->")[0].split(", ")
        for i in range(results):
            of = aliases.partition(f"output_tuple_indices = [{i}], operand_index = ")[2]
            assert int(of.partition(",")[0]) == len(operands) - results + i


@pytest.mark.deviceless
def test_the_backward_is_xlas_on_an_a100_with_a_reason(normal):
    """cuDNN reads no packed statistic there."""
    function, operands = prepared(normal, "window", implementation=None)
    with jc.target("A100"):
        forward, backward = jc.plans(gradients(function, 3), *operands).values()
        assert forward.segments[0].plan is not None
        (segment,) = backward.segments
        assert segment.plan is None
        assert "LSE is not supported" in segment.reason
        with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError):
            jc.plans(gradients(function, 3), *operands)


@pytest.mark.deviceless
def test_other_operations_are_no_part_of_the_plan():
    """They would see the packed array otherwise than attention does."""
    q = S((300, 8, 64), "bfloat16")
    (spec,) = graphs_of(lambda q: packed(offsets(0, 100, 300))(q, q, q), q)

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


def compare(normal, function, operands, queries, keys, **bounds):
    q, _, v, *bias = operands
    dout = normal((*q.shape[:2], v.shape[2]), q.dtype)
    got = [np.asarray(x, np.float64) for x in outcome(function, operands, dout)]
    want = exact(*operands[:3], queries, keys, np.asarray(dout, "f8"), None, *bias, **bounds)
    np.testing.assert_allclose(got[1], want[1], atol=2e-2)
    for a, b in zip([got[0], *got[2:]], [want[0], *want[2:]], strict=True):
        assert np.isfinite(a).all()
        assert relative_error(a, b) < 2e-2
    unseeing, unseen = np.isneginf(want[1]).all(1), ~want[4].any((1, 2))
    for x, rows in ((got[0], unseeing), (got[2], unseeing), (got[3], unseen), (got[4], unseen)):
        assert not x[rows].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PLANNED)
def test_results_and_gradients_on_the_gpu(name, dtype, normal):
    compare(normal, *prepared(normal, name, dtype), QUERIES, OTHERS, **bounds(**PLANNED[name][0]))


@pytest.mark.gpu
def test_realistic_lengths_and_offsets_out_of_range_on_the_gpu(normal):
    """8 examples of up to 2048 tokens, with as many heads as language models have."""
    lengths = np.array([2048, 64, 0, 1500, 300, 777, 128, 1000])
    ends = offsets(0, *lengths.cumsum())
    operands = qkv(normal, t=6000, s=6000, n=16, k=4, h=128, dtype="bfloat16")
    compare(normal, packed(ends, implementation="cudnn", **CAUSAL), operands, ends, ends, right=0)
    operands = qkv(normal, t=256, s=256, h=64, dtype="bfloat16")
    call = jax.jit(functools.partial(ours, max_query_length=64), static_argnames="implementation")
    for ends in (offsets(0, 100, 5000), offsets(200, 100, -7), offsets(-50, 0, 256)):
        got, want = (
            np.asarray(call(*operands, query_offsets=ends, implementation=i), np.float64)
            for i in ("cudnn", "xla")
        )
        np.testing.assert_allclose(got, want, atol=2e-2)
