"""A function that differentiates itself: attention and its derivative are replaced as a pair."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from acceleration.test_found_attention import CASES, B, H, N, T, arrays, attend, biased, causal
from acceleration.test_program import check, replaced
from jax import nn

import jax_cudnn as jc
from jax_cudnn._core.primitive import in_jaxpr
from jax_cudnn.acceleration.api import search


def step_of(fn, places=(0, 1, 2)):
    return jax.value_and_grad(lambda *x: (fn(*x) ** 2).sum(), places)


def found(fn, *args):
    program, missed = search(jax.make_jaxpr(fn)(*args), ("attention",))
    pairs = [r.backward is not None for p in program.programs for r in p.found]
    return pairs, [why for _, why in missed]


@pytest.mark.parametrize("name", CASES)
def test_attention_and_its_derivative(name):
    fn, _ = CASES[name]
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    step = step_of(fn)
    assert found(step, q, k, v) == ([True], [])
    check(step, q, k, v, grad=False)


@pytest.mark.parametrize("name", [*CASES][::5])
def test_attention_and_its_derivative_under_checkpoint(name):
    fn, _ = CASES[name]
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    again = step_of(jax.checkpoint(lambda *x: fn(*x) ** 2))
    assert found(again, q, k, v) == ([False, True], [])
    check(again, q, k, v, kinds=("attention",) * 2, grad=False)


def test_of_some_operands_alone():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    for places in ((0,), (1,), (2,), (0, 2)):
        step = step_of(causal, places)
        assert found(step, q, k, v) == ([True], [])
        check(step, q, k, v, grad=False)
    kept = lambda q, k, v: causal(q, jax.lax.stop_gradient(k), v)  # noqa: E731
    assert found(step_of(kept), q, k, v) == ([True], [])
    check(step_of(kept), q, k, v, grad=False)


def test_one_array_as_several_operands_stays():
    x, y = arrays(*[(B, T, N, H)] * 2)
    for order in ("xxx", "xxy", "xyx", "yxx"):
        pick = lambda x, y, order=order: causal(*({"x": x, "y": y}[c] for c in order))  # noqa: E731
        assert found(step_of(pick, (0, 1)), x, y)[0] == []
        assert found(pick, x, y)[0] == [False]


def test_of_layers_in_a_loop_of_steps():
    w, x = arrays((3, N * H, 3, N, H), (B, T, N * H))

    def loss(w, x):
        for layer in w:
            q, k, v = jnp.moveaxis(jnp.einsum("btf,fcnh->btcnh", x, layer / 8), 2, 0)
            x = x + nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        return jnp.mean(x**2)

    def train(w, x):
        def step(w, x):
            value, gradient = jax.value_and_grad(loss)(w, x)
            return w - 0.1 * gradient, value

        return jax.lax.scan(step, w, jnp.stack([x, 2 * x]))

    assert found(train, w, x) == ([True] * 3, [])
    for want, got in zip(train(w, x), jax.jit(replaced(train, ("attention",)))(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(N, T, T), (B, N, T, T), (N, 1, T), (1, 1, 1, T)])
def test_of_a_bias(shape):
    q, k, v, bias = arrays(*[(B, T, N, H)] * 3, shape)
    step = step_of(biased, (0, 1, 2, 3))
    assert found(step, q, k, v, bias) == ([True], [])
    check(step, q, k, v, bias, grad=False)
    scaled = step_of(lambda q, k, v, b: biased(q, k, v, 3 * b), (0, 3))
    check(scaled, q, k, v, bias, grad=False)


def test_of_a_sum_whose_cotangent_is_one_number():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    for total in (jnp.sum, jnp.mean):
        step = jax.value_and_grad(lambda *x, t=total: t(causal(*x)), (0, 1, 2))
        assert found(step, q, k, v) == ([True], [])
        check(step, q, k, v, grad=False)


def test_of_two_biases_one_of_which_is_inside_of_a_softcap():
    q, k, v, inner, outer = arrays(*[(B, T, N, H)] * 3, *[(N, T, T)] * 2)

    def capped(q, k, v, inner, outer):
        s = jnp.einsum("bthd,bshd->bhts", q, k)
        s = 3 * jnp.tanh((s + inner) / 3) + outer
        return jnp.einsum("bhts,bshd->bthd", nn.softmax(s), v)

    def summed(q, k, v, inner, outer):
        return biased(q, k, v, inner + outer)

    def apart(q, k, v, inner, outer):
        s = 2 * (jnp.einsum("bthd,bshd->bhts", q, k) + inner) + outer
        return jnp.einsum("bhts,bshd->bthd", nn.softmax(s), v)

    args = q, k, v, inner, outer
    for fn in (capped, summed, apart):
        for places in ((0, 3), (0, 4), (0, 1, 2, 3, 4)):
            step = step_of(fn, places)
            for want, got in zip(
                jax.tree.leaves(step(*args)), jax.tree.leaves(replaced(step)(*args)), strict=True
            ):
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert found(step_of(capped, (0, 4)), *args)[0] == [True]
    assert found(step_of(capped, (0, 3)), *args)[0] == []


def test_gradients_before_the_result_stay():
    q, k, v = arrays(*[(B, T, N, H)] * 3)

    def early(q, k, v, g):
        p = nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        dp = jnp.einsum("bthd,bshd->bhts", g, v)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True))
        dq = jnp.einsum("bhts,bshd->bthd", ds, k)
        return dq, jnp.einsum("bhts,bshd->bthd", p, v)

    args = q, k, v, q + 1
    assert found(early, *args)[0] == []
    for a, b in zip(early(*args), replaced(early)(*args), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_else_reads_a_value_inside_is_in_the_report():
    q, k, v = arrays(*[(B, T, N, H)] * 3)

    def shown(q, k, v):
        p = nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        return jnp.einsum("bhts,bshd->bthd", p, v), p

    def loss(*x):
        out, p = shown(*x)
        return (out**2).sum(), p

    pairs, missed = found(jax.grad(loss, (0, 1, 2), has_aux=True), q, k, v)
    assert not pairs
    assert "put accelerate around the function that is differentiated" in missed[0]


def _own(change=lambda d, p: d):
    """Attention with a derivative written by hand, of which the scores' gradient is changed."""

    @jax.custom_vjp
    def attention(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        p = nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        out = jnp.einsum("bhts,bshd->bthd", p, v)
        return out, (q, k, v, p)

    def backward(kept, g):
        q, k, v, p = kept
        dp = jnp.einsum("bthd,bshd->bhts", g, v)
        ds = change(p * (dp - (dp * p).sum(-1, keepdims=True)), p)
        dq, dk = jnp.einsum("bhts,bshd->bthd", ds, k), jnp.einsum("bhts,bthd->bshd", ds, q)
        return dq, dk, jnp.einsum("bhts,bthd->bshd", p, g)

    attention.defvjp(forward, backward)
    return attention


def test_a_derivative_written_by_hand():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    step = step_of(_own())
    assert found(step, q, k, v) == ([True], [])
    check(step, q, k, v, grad=False)


@pytest.mark.parametrize("change", ["sign", "rows", "scale", "cotangent"])
def test_another_function_than_the_derivative_stays(change):
    q, k, v = arrays(*[(B, T, N, H)] * 3)

    def step(q, k, v, g):
        p = nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        out = jnp.einsum("bhts,bshd->bthd", p, v)
        dp = jnp.einsum("bthd,bshd->bhts", g, v)
        rows = (dp * p).sum(-2 if change == "rows" else -1, keepdims=True)
        ds = p * (dp + rows if change == "sign" else dp - rows)
        ds = ds * 1.001 if change == "scale" else ds
        g = 2 * g if change == "cotangent" else g
        return out, jnp.einsum("bhts,bshd->bthd", ds, k), jnp.einsum("bhts,bthd->bshd", p, g)

    args = q, k, v, arrays((B, T, N, H), seed=1)[0]
    pairs, _ = found(step, *args)
    assert pairs == []
    for a, b in zip(step(*args), replaced(step)(*args), strict=True):
        np.testing.assert_array_equal(a, b)


CHANGES = {
    "clip": lambda d, p: jnp.clip(d, -10, 10),
    "where of itself": lambda d, p: jnp.where(d > 30, 30, d),
    "small probabilities": lambda d, p: jnp.where(p < 1e-4, 0, d),
    "tanh far away": lambda d, p: 1e3 * jnp.tanh(d / 1e3),
    "nan_to_num": lambda d, p: jnp.nan_to_num(d),
    "rounded": lambda d, p: jax.lax.reduce_precision(d, 8, 3),
    "float8": lambda d, p: d.astype("float8_e5m2").astype(d.dtype),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_derivative_that_is_another_one_for_some_values_stays(name):
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    step = step_of(_own(CHANGES[name]))
    assert found(step, q, k, v)[0] == []


def test_a_derivative_that_depends_on_the_softmaxs_shift_stays():
    q, k, v = arrays(*[(B, T, N, H)] * 3)

    def step(q, k, v, g, least):
        s = jnp.einsum("bthd,bshd->bhts", q, k)
        most = s.max(-1, keepdims=True)
        e = jnp.exp(s - most)
        p = e / e.sum(-1, keepdims=True)
        out = jnp.einsum("bhts,bshd->bthd", p, v)
        dp = jnp.einsum("bthd,bshd->bhts", g, v)
        ds = p * (dp - (dp * p).sum(-1, keepdims=True))
        ds = ds * (most < 100).astype(s.dtype) if least else ds
        return out, jnp.einsum("bhts,bshd->bthd", ds, k)

    for least in (False, True):
        pairs, _ = found(lambda *x, least=least: step(*x, least), q, k, v, q + 1)
        assert pairs == [True] * (not least)


def test_two_attentions_of_the_same_arrays():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    for fn in (
        lambda q, k, v: causal(q, k, v) + attend(q, k, v),
        lambda q, k, v: attend(q, k, v) * attend(k, q, v),
    ):
        step = step_of(fn)
        assert found(step, q, k, v)[0] == [True, True]
        check(step, q, k, v, kinds=("attention",) * 2, grad=False)


def test_the_cotangent_may_be_the_result():
    q, k, v = arrays(*[(B, T, N, H)] * 3)

    def step(q, k, v):
        out, pull = jax.vjp(causal, q, k, v)
        return out, pull(out), pull(2 * out)

    for a, b in zip(
        jax.tree.leaves(step(q, k, v)), jax.tree.leaves(replaced(step)(q, k, v)), strict=True
    ):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


def test_what_is_computed_again_stays_behind_barriers():
    q, k, v = arrays(*[(B, T, N, H)] * 3)
    step = step_of(jax.checkpoint(lambda *x: causal(*x) ** 2))
    texts = [jax.jit(f).lower(q, k, v).as_text() for f in (step, replaced(step))]
    counts = [text.count("optimization_barrier") for text in texts]
    assert counts[0] == counts[1] > 0


@pytest.mark.deviceless
def test_products_in_loops_of_a_differentiated_function_stay():
    w, x = arrays((3, 1024, 1024), (4096, 1024), dtype="bfloat16")

    def loss(w):
        layer = jax.checkpoint(lambda x, w: (jax.nn.relu(x @ w + 1.0), None))
        return jax.lax.scan(layer, x, w)[0].astype("float32").sum()

    with jc.target("H200"):
        step = jc.accelerate(jax.value_and_grad(loss))
        assert not [*in_jaxpr(jax.make_jaxpr(step)(w).jaxpr)]


@pytest.mark.deviceless
def test_a_training_step_runs_one_graph_forward_and_one_backward():
    w, x = arrays((3, 128, 128), (2, 128, 128), dtype="bfloat16")

    def step(w, x):
        def loss(w):
            q, k, v = ((x @ w[i] / 8).reshape(2, 128, 2, 64) for i in range(3))
            return (attend(q, k, v).astype("float32") ** 2).mean()

        return jax.value_and_grad(loss)(w)

    fast = jc.accelerate(step, only="attention")
    (region,) = fast.report(w, x, gpu="H200").to_json()["regions"]
    assert region["runs_on"] == "cuDNN"
    assert region["what"].endswith("and its gradient")
    with jc.target("H200"):
        jaxpr = jax.make_jaxpr(fast)(w, x)
        names = [name for name, _ in in_jaxpr(jaxpr.jaxpr)]
        got = jax.jit(fast)(w, x)[1]
        theirs = jax.jit(step)(w, x)[1]
    assert names == ["dot_product_attention", "dot_product_attention (backward)"]
    assert "2,2,128,128" not in str(jaxpr)  # no scores, no probabilities
    want = step(w.astype("float32"), x.astype("float32"))[1]
    error = lambda x: np.linalg.norm(np.asarray(x, "float32") - want)  # noqa: E731
    assert error(got) <= 1.5 * error(theirs)
    wide = jc.accelerate(step, only="attention").report(
        w.astype("float32"), x.astype("float32"), gpu="H200"
    )
    (region,) = wide.to_json()["regions"]
    assert region["runs_on"] == "XLA"  # cuDNN has no backward of float32: both stay


@pytest.mark.deviceless
def test_a_product_whose_derivative_is_in_the_step_stays_and_is_in_the_report():
    x, w, b = arrays((4096, 1024), (1024, 4096), (4096,), dtype="bfloat16")
    loss = lambda w, b: jax.nn.gelu(x @ w + b).astype("float32").sum()  # noqa: E731
    step = jax.value_and_grad(loss, (0, 1))
    report = jc.accelerate(step).report(w, b, gpu="H200").to_json()
    assert report["regions"] == []
    assert "jax.grad(jc.accelerate(loss))" in report["missed"][0]["why"]
    with jc.target("H200"):
        inside = jax.make_jaxpr(jax.value_and_grad(jc.accelerate(loss), (0, 1)))(w, b)
    assert [name for name, _ in in_jaxpr(inside.jaxpr)]
