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
def test_its_gradient_is_computed_of_all_scores_and_summed(name):
    """And where it is not wanted, nothing is broadcast."""
    operands = [S((B, T, N, H), "bfloat16"), *[S((B, KEYS, N, H), "bfloat16")] * 2]
    operands.append(S(SHARED[name], "bfloat16"))
    loss = lambda *x: ours(*x).astype("float32").sum()  # noqa: E731
    _, without = graphs_of(jax.grad(loss, (0, 1, 2)), *operands)
    assert methods(without) == ["sdpa_backward"]
    _, backward = graphs_of(jax.grad(loss, (0, 1, 2, 3)), *operands)
    assert methods(backward) == ["broadcast_to", "sdpa_backward", "reduction"]
    call = backward.calls[1]
    assert backward.tensor(dict(call.inputs)["bias"]).shape == FULL[name]
    assert backward.tensor(dict(call.outputs)["dBias"]).shape == FULL[name]


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
@pytest.mark.parametrize("gpu", ["A100", "H200", "B200"])
def test_also_its_gradient_is_cudnns(gpu):
    attend, avals, _ = case("arrays", "a row for each example")
    loss = lambda *x: attend(*x).astype("float32").sum()  # noqa: E731
    with jc.target(gpu), jc.implementation("cudnn"):
        _, backward = jc.plans(jax.grad(loss, (0, 1, 2, 3)), *avals).values()
    assert [s.plan is not None for s in backward.segments].count(True) == 1


@pytest.mark.deviceless
def test_explain_says_why_a_gradient_of_shared_elements_is_xlas():
    """Where a graph asks for it by name; derivatives ask for that of all scores."""

    def graph(g, q, k, v, o, dO, stats, bias):
        return g.sdpa_backward(q, k, v, o, dO, stats, bias=bias, dBias=True)

    q, k = S((B, N, T, H), "bfloat16"), S((B, N, KEYS, H), "bfloat16")
    stats, bias = S((B, N, T, 1), "float32"), S((B, 1, 1, KEYS), "bfloat16")
    with jc.target("H200"):
        (segment,) = jc.plan(jc.graph(graph), q, k, k, q, q, stats, bias).segments
    assert segment.plan is None
    for words in ("cuDNN writes dBias of [2, 1, 1, 160]", "give a bias of [2, 1, 96, 160]"):
        assert words in segment.reason


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
