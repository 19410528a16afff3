"""``jax_cudnn.accelerate`` on the GPU: chosen by a measurement while the function is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from acceleration import test_found_attention as spelled
from acceleration.test_accelerate import attend
from acceleration.test_program import arrays

import jax_cudnn as jc
from jax_cudnn._core import auto, settings
from jax_cudnn._core.primitive import in_jaxpr

pytestmark = pytest.mark.gpu

B, T, N, H = 4, 512, 8, 64


def block(p, x):
    mean = x.astype("float32").mean(-1, keepdims=True)
    wide = x.astype("float32") - mean
    y = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    y = (y * p["scale"]).astype(x.dtype)
    q, k, v = jnp.moveaxis((y @ p["qkv"]).reshape(B, T, 3, N, H), 2, 0)
    x = x + attend(q, k, v).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def parameters(dtype):
    shapes = {"qkv": (N * H, 3 * N * H), "out": (N * H, N * H), "up": (N * H, 2 * N * H)}
    shapes |= {"down": (2 * N * H, N * H), "bias": (2 * N * H,), "scale": (N * H,)}
    drawn = arrays(*shapes.values(), dtype="float32", seed=1)
    made = {name: 0.05 * x for name, x in zip(shapes, drawn, strict=True)}
    return jax.tree.map(lambda x: x.astype(dtype), made) | {"scale": made["scale"] + 1}


@pytest.mark.parametrize("tuning", ["off", "fast"])
def test_a_block_forward_and_backward(tuning, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "_given", {"plan_cache": tmp_path, "tuning": tuning})
    auto.clear()
    jax.clear_caches()
    (x,) = arrays((B, T, N * H))
    step = lambda f: jax.jit(  # noqa: E731
        jax.value_and_grad(lambda p, x: (f(p, x).astype("float32") ** 2).mean(), (0, 1))
    )
    with jax.default_matmul_precision("highest"):
        exact = step(block)(parameters("float32"), x)
    args = parameters("bfloat16"), x.astype("bfloat16")
    plain = step(block)(*args)
    fast = jc.accelerate(block)
    ours = step(fast)(*args)
    names = [name for name, _ in in_jaxpr(jax.make_jaxpr(fast)(*args).jaxpr)]
    report = fast.report(*args).to_json()
    assert "dot_product_attention" in names
    assert "H" in report["gpu"]
    kinds = [region["kind"] for region in report["regions"]]
    assert {"attention", "product"} <= {*kinds}
    for want, a, b in zip(*map(jax.tree.leaves, (exact, plain, ours)), strict=True):
        error = lambda got, want=want: np.linalg.norm(np.float64(got) - np.float64(want))  # noqa: E731
        assert error(b) <= 1.5 * error(a) + 1e-3 * np.linalg.norm(np.float64(want))


def test_float32_keeps_the_users_backward():
    args = arrays(*[(B, T, N, H)] * 3)
    fast = jc.accelerate(attend)
    gradient = jax.jit(jax.grad(lambda *x: (fast(*x) ** 2).sum(), (0, 1, 2)))
    plain = jax.jit(jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2)))
    for want, got in zip(plain(*args), gradient(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


def _errors(step, args, places):
    """Norms of the errors of a step's results against float32, of the original and of ours; and
    the graphs of ours."""
    half = [x.astype("bfloat16") if i in places else x for i, x in enumerate(args)]
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(step)(*args)
    fast = jc.accelerate(step, only="attention")
    with jc.implementation("cudnn"):
        names = [name for name, _ in in_jaxpr(jax.make_jaxpr(fast)(*half).jaxpr)]
        ours = jax.jit(fast)(*half)
    norms = []
    for found in (jax.jit(step)(*half), ours):
        pairs = zip(jax.tree.leaves(exact), jax.tree.leaves(found), strict=True)
        norms.append([np.linalg.norm(np.float64(b) - np.float64(a)) for a, b in pairs])
    sizes = [np.linalg.norm(np.float64(x)) for x in jax.tree.leaves(exact)]
    return sizes, *norms, names


BOTH = ["dot_product_attention", "dot_product_attention (backward)"]


FORMS = ("float32", "by hand", "unshifted", "log-sum-exp", "of jax.nn", "window of jax.nn")
FORMS += ("repeat", "groups", "online", "where of softmax", "softcap", "scaled before")


@pytest.mark.parametrize("name", FORMS)
def test_a_step_that_differentiates_itself(name, monkeypatch):
    sizes = {"B": 4, "T": 256, "N": 4, "H": 64}
    for size, value in sizes.items():
        monkeypatch.setattr(spelled, size, value)
    fn, _ = spelled.CASES[name]
    args = [x / 2 for x in arrays(*[(4, 256, 4, 64)] * 3)]
    step = jax.value_and_grad(lambda *x: (fn(*x).astype("float32") ** 2).sum(), (0, 1, 2))
    sizes, plain, ours, names = _errors(step, args, (0, 1, 2))
    assert names == BOTH
    for size, a, b in zip(sizes, plain, ours, strict=True):
        assert b <= 1.5 * a + 1e-3 * size


def test_the_gradient_of_a_bias_in_a_step():
    args = arrays(*[(B, T, N, H)] * 3, (N, T, T))
    step = jax.value_and_grad(
        lambda *x: (spelled.biased(*x).astype("float32") ** 2).sum(), (0, 1, 2, 3)
    )
    sizes, plain, ours, names = _errors(step, args, (0, 1, 2, 3))
    assert names == BOTH
    for size, a, b in zip(sizes, plain, ours, strict=True):
        assert b <= 1.5 * a + 1e-3 * size
