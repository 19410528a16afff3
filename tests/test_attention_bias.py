"""A bias of which queries or keys share elements: gradients, and what cuDNN is shown of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import normal, ours, qkv, theirs
from transformations import graphs_of, methods, relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph import layout
from jax_cudnn._core.graph.wire import wire

S = jax.ShapeDtypeStruct
B, N, T, KEYS, H = 2, 4, 96, 160, 64

SHARED = {
    "a row for each example": (B, 1, 1, KEYS),
    "a row for each head": (1, N, 1, KEYS),
    "a row for each": (B, N, 1, KEYS),
    "a row": (1, 1, 1, KEYS),
    "a column for each": (B, N, T, 1),
    "a column": (1, 1, T, 1),
    "a number for each": (B, N, 1, 1),
    "a number": (1, 1, 1, 1),
}
FULL = {name: (*shape[:2], T, KEYS) for name, shape in SHARED.items()}


def outcome(attend, along, operands, count):
    """Result and gradients by the first ``count`` operands."""

    @jax.jit
    def run(along, operands):
        out, pull = jax.vjp(lambda *x: attend(*x, *operands[count:]), *operands[:count])
        return out, *pull(along)

    return run(along, operands)


@pytest.mark.parametrize("name", SHARED)
def test_gradients_are_those_of_jax_nn(name):
    operands = (*qkv(B, T, KEYS, N, h=8), normal(SHARED[name]))
    along = normal((B, T, N, 8))
    want = outcome(lambda q, k, v, x: theirs(q, k, v, x), along, operands, 4)
    for a, b in zip(outcome(ours, along, operands, 4), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


@pytest.mark.parametrize("name", SHARED)
def test_for_cudnn_its_gradient_is_of_all_scores(name):
    """XLA computes it as it is: it takes no memory of queries times keys."""
    operands = [S((B, T, N, H), "bfloat16"), *[S((B, KEYS, N, H), "bfloat16")] * 2]
    operands.append(S(SHARED[name], "bfloat16"))
    loss = lambda *x: ours(*x).astype("float32").sum()  # noqa: E731
    _, backward = graphs_of(jax.grad(loss, (0, 1, 2, 3)), *operands)
    assert methods(backward) == ["sdpa_backward"]
    (call,) = backward.calls
    ports = dict((*call.inputs, *call.outputs))
    for port in ("bias", "dBias"):
        assert backward.tensor(ports[port]).shape == SHARED[name]
        assert wire(backward).tensor(ports[port]).shape == FULL[name]


def test_its_gradient_by_xla_takes_memory_of_some_queries_at_a_time():
    operands = [S((2, 4096, 8, 64), "float32")] * 3 + [S((2, 8, 1, 4096), "float32")]
    loss = lambda *x: (ours(*x) ** 2).sum()  # noqa: E731
    program = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*operands).compile()
    scores = 2 * 8 * 4096 * 4096 * 4
    assert program.memory_analysis().temp_size_in_bytes < scores / 2


def functions(name):
    """Attention by array for each of q, k and v, by one array, and packed; of arrays alone, a bias
    of this kind among them; and their avals."""
    if name == "qkv":
        attend = functools.partial(jc.ops.dot_product_attention_qkv, num_heads=N)
        attend = functools.partial(_bias_last, attend)
        return attend, [S((B, T, 3 * N, H), "bfloat16")], (B, N, T, T)
    if name == "packed":
        ends = {"query_offsets": (0, 60, T), "key_value_offsets": (0, 100, KEYS)}
        attend = functools.partial(
            jc.ops.packed_dot_product_attention,
            **{of: jnp.array(each, "int32") for of, each in ends.items()},
            max_query_length=60,
            max_key_value_length=100,
        )
        avals = [S((T, N, H), "bfloat16"), *[S((KEYS, N, H), "bfloat16")] * 2]
        return attend, avals, (B, N, 60, 100)
    avals = [S((B, T, N, H), "bfloat16"), *[S((B, KEYS, N, H), "bfloat16")] * 2]
    return ours, avals, (B, N, T, KEYS)


def _bias_last(attend, qkv, bias, **named):
    return attend(qkv, bias=bias, **named)


KINDS = ("arrays", "qkv", "packed")


def case(kind, name):
    attend, avals, scores = functions(kind)
    shape = tuple(a if kept > 1 else 1 for a, kept in zip(scores, SHARED[name], strict=True))
    return attend, [*avals, S(shape, "bfloat16")], scores


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHARED)
def test_cudnn_sees_it_of_all_queries_and_keys(kind, name):
    """Queries with a stride of 0, and keys by a broadcast before the call."""
    attend, avals, scores = case(kind, name)
    attend = functools.partial(attend, implementation="cudnn")
    loss = lambda *x: attend(*x).astype("float32").sum()  # noqa: E731
    count = len(avals) - 1
    with jc.target("H200"):
        plans = jc.plans(jax.grad(loss, tuple(range(count))), *avals)
    assert len(plans) == 2
    for plan in plans.values():
        (segment,) = plan.segments
        assert segment.plan is not None
    for spec in graphs_of(jax.grad(loss, tuple(range(count))), *avals):
        wired = wire(spec)
        bias = wired.tensor(dict(wired.calls[0].inputs)["bias"])
        assert bias.shape == (*SHARED[name][:2], avals[-1].shape[2], scores[3])
        shown = layout.views(wired, bias)
        if SHARED[name][2] == 1:
            (view,) = shown
            assert view.dims == (*SHARED[name][:2], *scores[2:])
            assert view.strides[2:] == (0, 1)
        else:
            assert shown == ()


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpu", ["A100", "H200", "B200"])
def test_also_its_gradient_is_cudnns(gpu, kind):
    attend, avals, _ = case(kind, "a row for each example")
    if kind == "packed" and gpu != "H200":  # cuDNN has none of packed arrays there
        return
    loss = lambda *x: attend(*x).astype("float32").sum()  # noqa: E731
    with jc.target(gpu), jc.implementation("cudnn"):
        _, backward = jc.plans(jax.grad(loss, tuple(range(len(avals)))), *avals).values()
    (segment,) = backward.segments
    assert segment.plan is not None
    assert "adds up" in " ".join(str(backward.explain()).split())


@pytest.mark.deviceless
@pytest.mark.parametrize("shape", [(B, 1, 1, KEYS), (B, 1, T, 1), (B, 1, T, KEYS)])
def test_explain_says_what_is_broadcast_and_summed(shape):
    attend, avals, _ = case("arrays", "a row")
    avals[-1] = S(shape, "bfloat16")
    with jc.target("H200"):
        said = " ".join(str(jc.plan(attend, *avals).explain()).split())
    assert ("first broadcasts the bias to [2, 1, 96, 160]" in said) == (shape[3] == 1)
    assert "the bias is read in full" in said
    assert "score_mod" not in said


@pytest.mark.deviceless
def test_a_gradient_that_its_graph_reads_is_xlas():
    """Behind the plan it would be of all scores."""

    def graph(g, q, k, v, o, dO, stats, bias):
        return g.relu(g.sdpa_backward(q, k, v, o, dO, stats, bias=bias, dBias=True)[3])

    q, k = S((B, N, T, H), "bfloat16"), S((B, N, KEYS, H), "bfloat16")
    stats, bias = S((B, N, T, 1), "float32"), S((B, 1, 1, KEYS), "bfloat16")
    with jc.target("H200"):
        segments = jc.plan(jc.graph(graph), q, k, k, q, q, stats, bias).segments
    found = {s.spec.calls[0].node.method: s for s in segments}
    assert found["sdpa_backward"].plan is not None
    assert len(found["sdpa_backward"].spec.calls) == 1


@pytest.mark.deviceless
@pytest.mark.parametrize("where", ["before", "beside"])
def test_what_else_makes_or_reads_it_is_no_part_of_the_plan(where):
    def graph(g, q, k, v, bias):
        positive = g.relu(bias)
        out, _ = g.sdpa(q, k, v, bias=positive if where == "before" else bias)
        return out, positive

    avals = [S((B, N, T, H), "bfloat16"), *[S((B, N, KEYS, H), "bfloat16")] * 2]
    avals.append(S((B, 1, 1, KEYS), "bfloat16"))
    with jc.target("H200"):
        segments = jc.plan(jc.graph(graph), *avals).segments
    found = {s.spec.calls[0].node.method: (len(s.spec.calls), s.plan is None) for s in segments}
    assert found["sdpa"] == (1, False)
    assert found["relu"][0] == 1


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", [False, True], ids=["", "with its gradient"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHARED)
def test_results_and_gradients_on_the_gpu(name, kind, gradient):
    attend, avals, scores = case(kind, name)
    operands = [normal(a.shape, a.dtype) for a in avals]
    along = normal(jax.eval_shape(attend, *avals).shape, "bfloat16")
    wide = [x.astype("float32") for x in operands]
    wide[-1] = jnp.broadcast_to(wide[-1], (*avals[-1].shape[:2], *scores[2:]))
    count = len(operands) - (not gradient)
    got = outcome(functools.partial(attend, implementation="cudnn"), along, operands, count)
    exact = functools.partial(attend, implementation="xla")
    want = [*outcome(exact, along.astype("float32"), wide, count)]
    if gradient:
        axes = [i for i in range(4) if avals[-1].shape[i] == 1]
        want[-1] = want[-1].sum(axes, keepdims=True)
        if avals[-1].shape[3] == 1:  # all keys alike: nothing but rounding
            (*got, none), (*want, _) = got, want
            assert np.abs(np.asarray(none, np.float32)).max() < 0.5
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        assert relative_error(a, b) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["deterministic", "vmap", "softcap"])
def test_what_else_there_is_beside_it_on_the_gpu(how):
    attend, avals, _ = case("arrays", "a row for each example")
    more = {
        "deterministic": {"options": jc.Options(deterministic=True)},
        "softcap": {"score_mod": jc.ops.score_mods.softcap(5.0)},
    }.get(how, {})
    operands = [normal(a.shape, a.dtype) for a in avals]
    along = normal(operands[0].shape, "bfloat16")

    def run(operands, along, **given):
        def gradients(along, *operands):
            return outcome(functools.partial(attend, **more, **given), along, operands, 3)

        if how == "vmap":
            return jax.vmap(gradients, (None, 0, None, None, None))(
                along, jnp.stack([operands[0], -operands[0]]), *operands[1:]
            )
        return gradients(along, *operands)

    want = run(
        [x.astype("float32") for x in operands], along.astype("float32"), implementation="xla"
    )
    for a, b in zip(run(operands, along), want, strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        assert relative_error(a, b) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_masks_of_padding_on_the_gpu(side, causal):
    """As of a batch of sentences: of 1, 57, 250 and 256 words."""
    q, k, v = qkv(4, 256, 256, 8, 2, 64, dtype="bfloat16")
    words = jnp.array([1, 57, 250, 256]).reshape(4, 1, 1, 1)
    place = jnp.arange(256).reshape(1, 1, 1, 256)
    mask = place < words if side == "right" else place >= 256 - words
    along = normal(q.shape, "bfloat16")

    def run(attend, dtype):
        attend = functools.partial(attend, mask=mask, is_causal=causal)
        return outcome(attend, along.astype(dtype), [x.astype(dtype) for x in (q, k, v)], 3)

    got = run(functools.partial(ours, implementation="cudnn"), "bfloat16")
    for a, b in zip(got, run(theirs, "float32"), strict=True):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        assert relative_error(a, b) < 2e-2
