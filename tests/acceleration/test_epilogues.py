"""Products and convolutions with what follows, and normalizations, however they are written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from acceleration.test_program import arrays, replaced
from jax import nn

import jax_cudnn as jc
from jax_cudnn.acceleration.api import KINDS, search
from jax_cudnn.acceleration.epilogues import _KINKED


def gelu_by_hand(x):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def exact_gelu_by_hand(x):
    return x * (1 + jax.lax.erf(x / np.sqrt(2).astype("float32"))) / 2


ACTIVATIONS = {
    "relu": [nn.relu, lambda y: jnp.where(y > 0, y, 0)],
    "relu6": [nn.relu6],
    "leaky_relu": [lambda y: jnp.where(y > 0, y, 0.01 * y)],
    "gelu": [nn.gelu, gelu_by_hand],
    "gelu_exact": [functools.partial(nn.gelu, approximate=False), exact_gelu_by_hand],
    "silu": [nn.silu, lambda y: y * nn.sigmoid(y), lambda y: y / (1 + jnp.exp(-y))],
    "sigmoid": [nn.sigmoid],
    "tanh": [jnp.tanh],
    "elu": [nn.elu],
    "softplus": [nn.softplus, lambda y: jnp.logaddexp(y, 0.0)],
}
X, W, BIAS, RESIDUAL = arrays((2, 6, 8), (8, 12), (12,), (2, 6, 12))
IMAGE, KERNEL, PER_CHANNEL, SKIP = arrays((2, 8, 8, 4), (3, 3, 4, 6), (6,), (2, 8, 8, 6))


def conv(x, w, numbers=("NHWC", "HWIO", "NHWC"), **given):
    return jax.lax.conv_general_dilated(
        x, w, **{"window_strides": (1, 1), "padding": "SAME", **given}, dimension_numbers=numbers
    )


def batch_norm(y, s):
    return (y - s) * jax.lax.rsqrt(s**2 + 1e-3) * s + s


CASES = {
    **{f"{name} {i}": (lambda x, w, b, f=f: f(x @ w + b), (X, W, BIAS), f"+ bias + {name}")
       for name, spellings in ACTIVATIONS.items() for i, f in enumerate(spellings)},
    "bias": (lambda x, w, b: x @ w + b, (X, W, BIAS), "+ bias"),
    "residual": (lambda x, w, b, r: r + (x @ w + b), (X, W, BIAS, RESIDUAL), "+ bias + residual"),
    "scale": (lambda x, w, b: nn.relu(2 * (x @ w) * b - b), (X, W, BIAS), "+ scale + bias + relu"),
    "after a cast": (lambda x, w, b: (x @ w).astype("float32") / b + b, (X, W, BIAS),
                     "+ scale + bias"),
    "transposed weights": (lambda x, w, b: jnp.einsum("btk,nk->btn", x, w) + b, (X, W.T, BIAS),
                           "+ bias"),
    "weights on the left": (
        lambda x, w, b: jax.vmap(jax.vmap(lambda x: nn.relu(w @ x + b)))(x), (X, W.T, BIAS),
        "+ bias + relu"),
    "heads": (lambda x, w, b: jnp.einsum("btk,khd->bthd", x, w) + b,
              (X, W.reshape(8, 3, 4), BIAS.reshape(3, 4)), "+ bias"),
    "two sums": (lambda x, w, b: jnp.einsum("bthd,hdn->btn", x, w) + b,
                 (X.reshape(2, 6, 2, 4), W.reshape(2, 4, 12), BIAS), "+ bias"),
    "convolution": (lambda x, w, b: nn.relu(conv(x, w) + b), (IMAGE, KERNEL, PER_CHANNEL),
                    "+ bias + relu"),
    "strides, groups": (
        lambda x, w, b: nn.silu(conv(x, w, window_strides=(2, 2), padding=((0, 1), (2, 0)),
                                     rhs_dilation=(1, 2), feature_group_count=2) + b),
        (IMAGE, KERNEL[:, :, :2], PER_CHANNEL), "+ bias + silu"),
    "batch norm": (lambda x, w, s, r: nn.relu(batch_norm(conv(x, w), s) + r),
                   (IMAGE, KERNEL, PER_CHANNEL, SKIP), "+ bias + scale + residual + relu"),
    "channels first": (
        lambda x, w, b: conv(x, w, ("NCHW", "OIHW", "NCHW")) + b[:, None, None],
        (IMAGE.transpose(0, 3, 1, 2), KERNEL.transpose(3, 2, 0, 1), PER_CHANNEL), "+ bias"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_products_and_convolutions(name):
    fn, args, words = CASES[name]
    program, _ = search(jax.make_jaxpr(fn)(*args), KINDS)
    (region,) = program.found
    assert region.what.endswith(words)
    assert ("conv" in region.kind) == (args[0] is IMAGE or (args[0].ndim == 4 and "ch" in name))
    compare(fn, args)


def compare(fn, args):
    fast = replaced(fn)
    np.testing.assert_allclose(jax.jit(fast)(*args), fn(*args), rtol=1e-5, atol=1e-5)
    places = (*range(len(args)),)
    grads = [jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), places) for f in (fn, fast)]
    for want, got in zip(grads[0](*args), jax.jit(grads[1])(*args), strict=True):
        far = 1e-5 * max(10, float(abs(want).max()))  # sums of many products cancel
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=far)


def test_what_cudnn_does_not_fuse_is_left():
    for fn in (
        lambda x, w, b: x @ w,
        lambda x, w, b: jnp.sin(x @ w),
        lambda x, w, b: (x @ w) * RESIDUAL,
        lambda x, w, b: (lambda y: (nn.relu(y), y))(x @ w),  # read elsewhere, too
        lambda x, w, b: x.astype(int) @ w.astype(int) + 1,
    ):
        assert not search(jax.make_jaxpr(fn)(X, W, BIAS), KINDS)[0].found


def test_an_activation_in_half_precision():
    x, w, b = (a.astype("bfloat16") for a in (X, W, BIAS))
    for name in ("gelu", "silu", "relu"):
        for f in ACTIVATIONS[name]:
            (region,) = search(jax.make_jaxpr(lambda x, w, b, f=f: f(x @ w + b))(x, w, b), KINDS)[
                0
            ].found
            assert region.what.endswith(name)


GUARDED = {
    "an epsilon": lambda y: jnp.log(nn.relu(y) + 1e-6),
    "a small number": lambda y: 1 / (nn.relu(y) + 1e-2),
    "another slope": lambda y: nn.sigmoid(y) * y + 1e-4 * y,
    "another alpha": lambda y: nn.elu(y, 1.01),
    "a least value": lambda y: jnp.sqrt(jnp.maximum(nn.relu(y), 1e-6)),
    "a small threshold": lambda y: jnp.where(y > 1e-4, y, 0),
    "a test for NaN": lambda y: jnp.where(jnp.isnan(y), 0, nn.relu(y)),
    "a test for infinity": lambda y: jnp.where(jnp.isfinite(y), nn.gelu(y), 0),
    "NaN replaced": lambda y: jnp.nan_to_num(nn.relu(y)),
    "straight through": lambda y: y + jax.lax.stop_gradient(nn.relu(y) - y),
    "no derivative": lambda y: jax.lax.stop_gradient(nn.relu(y)),
    "half of one": lambda y: y * jax.lax.stop_gradient(nn.sigmoid(y)),
}


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_nearly_an_activation_is_none(name, dtype):
    x, w, b = (a.astype(dtype) for a in (3 * X, W, BIAS))
    x = x.at[0, 0, 0].set(jnp.nan) if "NaN" in name else x.at[0, 0, 0].set(jnp.inf)
    x = x if "for" in name or "NaN" in name else x.at[0, 0].set(0)
    fn, bits = lambda x, w, b: GUARDED[name](x @ w + b), jnp.finfo(dtype).eps
    both = [
        jax.jit(lambda *a, f=f: (f(*a), jax.grad(lambda *a: f(*a).sum(), (0, 1, 2))(*a)))
        for f in (fn, replaced(fn))
    ]
    for want, got in zip(*(jax.tree.leaves(f(x, w, b)) for f in both), strict=True):
        want, got = (np.asarray(v, "float32") for v in (want, got))
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        scale = np.abs(want[np.isfinite(want)]).max(initial=0)
        np.testing.assert_allclose(got, want, 8 * bits, 8 * bits * scale)


@pytest.mark.parametrize("name", ["relu", "relu6", "leaky_relu"])
def test_derivatives_at_the_kinks(name):
    one = jnp.ones((1, 1))
    run = lambda x: jc.ops.matmul(x[None, None], one, activation=name)[0, 0]  # noqa: E731
    np.testing.assert_allclose(jax.vmap(jax.grad(run))(jnp.array([0.0, 6.0])), _KINKED[name])
    named, x = getattr(nn, name), jnp.zeros((2, 8))
    for after in (lambda y: y, lambda y: jnp.maximum(y, 0)):
        fn = lambda x, w, b, after=after: after(named(x @ w + b)).sum()  # noqa: E731
        for w, b in ((W, 0 * BIAS), (0 * W, 6 + 0 * BIAS)):
            want, got = (jax.grad(f, 2)(x, w, b) for f in (fn, replaced(fn)))
            np.testing.assert_array_equal(got, want)


def test_where_cudnn_has_no_backward_the_derivative_is_the_users():
    fn = lambda x, w, b: nn.relu(x @ w + b)  # noqa: E731
    (region,) = search(jax.make_jaxpr(fn)(X, W, BIAS), KINDS)[0].found
    ones = jax.grad(lambda *a: region.original(*a).sum(), 2)(0 * X, W, 0 * BIAS)
    np.testing.assert_array_equal(ones, 0 * BIAS)


@pytest.mark.parametrize("right", [True, False])
def test_relu_as_a_product_with_a_comparison(right, caplog):
    fn = lambda x, w, b: (lambda y: y * (y > 0 if right else y >= 0))(x @ w + b)  # noqa: E731
    (region,) = search(jax.make_jaxpr(fn)(X, W, BIAS), KINDS)[0].found
    assert region.what.endswith("relu" if right else "bias")  # the derivative at 0 is 0, or 1
    assert not caplog.records


# -- normalizations --------------------------------------------------------------------------------


def by_distances(x, s, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * s + b


def in_one_pass(x, s, b):
    mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
    return (x - mean) * (jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + 1e-5) * s) + b


def by_variance(x, s, b):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * s + b


def root_mean_square(x, s, b):
    wide = x.astype("float32")
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return wide.astype(x.dtype) * (1 + s)


def over_two(x, s, b):
    axes = (-2, -1)
    return (x - x.mean(axes, keepdims=True)) / jnp.sqrt(x.var(axes, keepdims=True) + 1e-5)


NORMS = {
    **{"layer norm": [by_distances, in_one_pass, by_variance, over_two]},
    "RMS norm": [
        root_mean_square,
        lambda x, s, b: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6),
    ],
}


@pytest.mark.parametrize(
    ("kind", "i"), [(kind, i) for kind, norms in NORMS.items() for i in range(len(norms))]
)
def test_normalizations(kind, i):
    fn, args = NORMS[kind][i], (X + 1, *arrays((8,), (8,), seed=2))
    program, _ = search(jax.make_jaxpr(fn)(*args), KINDS)
    (region,) = program.found
    assert region.what.startswith(kind)
    compare(fn, args)


def test_layers_of_flax():
    nnx = pytest.importorskip("flax.nnx")
    for layer, kind in ((nnx.LayerNorm, "layer norm"), (nnx.RMSNorm, "RMS norm")):
        graph, state = nnx.split(layer(8, rngs=nnx.Rngs(0)))
        fn = lambda state, x, g=graph: nnx.merge(g, state)(x)  # noqa: E731
        program, _ = search(jax.make_jaxpr(fn)(state, X), KINDS)
        assert program.found[0].what.startswith(kind)
        np.testing.assert_allclose(replaced(fn)(state, X), fn(state, X), rtol=1e-5, atol=1e-5)


def test_what_is_no_normalization_is_left():
    x, s, b = X, *arrays((8,), (8,))
    for fn in (
        lambda x, s, b: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5),  # not the last dimensions
        lambda x, s, b: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5),
        lambda x, s, b: x / (x.sum(-1, keepdims=True) + 1e-5),
        lambda x, s, b: (
            (x - x.mean(-1, keepdims=True)) / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1)
        ),
        lambda x, s, b: (
            (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + s[0])
        ),
        lambda x, s, b: (by_variance(x, s, b), x.var(-1)),
    ):
        found = [r.kind for r in search(jax.make_jaxpr(fn)(x, s, b), KINDS)[0].found]
        assert found in ([], ["normalization"]), found
        for want, got in zip(
            *(jax.tree.leaves(f(x, s, b)) for f in (fn, replaced(fn))), strict=True
        ):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), "SAME"),
        lambda x, w: jax.lax.conv_transpose(x, w, (2, 3), "VALID"),
        lambda x, w: jax.lax.conv_transpose(x, w, (2, 2), ((1, 2), (2, 1)), rhs_dilation=(2, 1)),
        lambda x, w: jax.lax.conv_transpose(
            x, jnp.swapaxes(w, 2, 3), (2, 2), "SAME", transpose_kernel=True
        ),
        lambda x, w: conv(x, w, lhs_dilation=(2, 2), padding=((1, 1), (1, 2))),
    ],
)
def test_transposed_convolutions(make):
    program, _ = search(jax.make_jaxpr(make)(IMAGE, KERNEL), KINDS)
    (region,) = program.found
    assert region.what.endswith("transposed")
    step = lambda f: jax.value_and_grad(lambda *x: (f(*x) ** 2).sum(), (0, 1))  # noqa: E731
    want, got = step(make)(IMAGE, KERNEL), step(replaced(make))(IMAGE, KERNEL)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


def test_dilated_images_that_are_no_transposed_convolution_stay():
    for given in ({"window_strides": (2, 2)}, {"feature_group_count": 2}):
        kernel = KERNEL[:, :, :2] if "feature_group_count" in given else KERNEL
        given |= {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}
        wide = lambda x, w, g=given: conv(x, w, **g)  # noqa: E731
        program, _ = search(jax.make_jaxpr(wide)(IMAGE, kernel), KINDS)
        assert not program.found


@pytest.mark.deviceless
def test_padding_that_no_transposed_convolution_has_stays_with_a_reason():
    x, w = (a.astype("bfloat16") for a in (IMAGE, KERNEL))
    wide = lambda x, w: conv(x, w, lhs_dilation=(2, 2), padding=((5, 5), (0, 0)))  # noqa: E731
    (region,) = jc.accelerate(wide).report(x, w, gpu="H200").to_json()["regions"]
    assert region["runs_on"] == "XLA"
    assert "padding" in region["why"]


def test_a_convolution_of_volumes_is_taken_alone_and_no_cast_to_more_bits():
    x, w, b = (a.astype("bfloat16") for a in arrays((1, 4, 6, 8, 8), (3, 3, 3, 8, 16), (16,)))
    numbers = ("NDHWC", "DHWIO", "NDHWC")

    def volume(x, w):
        y = conv(x, w, numbers, window_strides=(1, 1, 1)).astype("float32")
        return y - y.mean()

    def product(x, w, b):
        return (x @ w + b).astype("float32")

    (alone,) = search(jax.make_jaxpr(volume)(x, w), KINDS, False)[0].found
    assert alone.output.dtype == "bfloat16"
    assert replaced(volume)(x, w).dtype == "float32"
    (dense,) = search(jax.make_jaxpr(product)(x, w[0, 0, 0], b), KINDS, False)[0].found
    assert dense.output.dtype == "bfloat16"
    flat = jax.make_jaxpr(lambda x, w: conv(x, w))(x[0], w[0])
    assert not search(flat, KINDS, False)[0].found


@pytest.mark.deviceless
def test_a_scale_that_the_author_widens_reaches_cudnn_as_it_is():
    def norm(x, s):
        wide = x.astype("float32")
        y = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * s.astype("float32")
        return y.astype(x.dtype)

    x, s = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8192, 1024), (1024,)))
    (region,) = jc.accelerate(norm).report(x, s, gpu="H200").to_json()["regions"]
    assert region["runs_on"] == "cuDNN"
    (spec,) = jc.plans(jc.accelerate(norm), x, s, gpus=["H200"])["H200"].values()
    assert {tensor.dtype for tensor in spec.spec.input_tensors} == {"bfloat16"}
    compare(norm, arrays((16, 64), (64,), dtype="bfloat16"))
