"""rotary_embedding and rotary_frequencies: formulas, derivatives, meshes, errors."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc

SHAPE = (2, 7, 3, 16)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
OPTIONS = {
    "plain": {},
    "interleaved": {"interleaved": True},
    "partial": {"rotary_dim": 6, "base": 500.0},
    "partial, interleaved, scale": {"rotary_dim": 4, "interleaved": True, "scale": 1.3},
    "frequencies": {"frequencies": np.array([2.0, 0.3, 0.01])},
}
rotate = jc.ops.rotary_embedding


def inputs(*shape, dtype="float32", seed=0):
    return jax.random.normal(jax.random.key(seed), shape or SHAPE, dtype)


def expected(
    x, positions, base=10000.0, frequencies=None, rotary_dim=None, interleaved=False, scale=1.0
):
    """Products of complex numbers, in float64."""
    if frequencies is None:
        size = rotary_dim or x.shape[-1]
        frequencies = [1 / base ** (2 * i / size) for i in range(size // 2)]
    half = len(frequencies)
    x = np.array(x, "float64")
    i = np.arange(half)
    first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
    turned = x[..., first] + 1j * x[..., second]
    angles = np.asarray(positions)[..., None, None] * np.asarray(frequencies)
    turned *= scale * np.exp(1j * angles)
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_is_a_product_of_complex_numbers(options, dtype):
    options = OPTIONS[options]
    at = np.random.default_rng(0).integers(0, 500, SHAPE[:2])
    within = {"float64": 1e-12, "float32": 2e-4, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    with jax.enable_x64(dtype == "float64"), jax.numpy_rank_promotion("raise"):
        x = inputs(dtype=dtype)
        for positions in (at, at[0], at[:1], at.astype("uint16"), None):
            given = np.arange(SHAPE[1]) if positions is None else positions
            got = jax.jit(functools.partial(rotate, **options))(x, positions)
            assert got.dtype == x.dtype
            np.testing.assert_allclose(got, expected(x, given, **options), within, within)
        one = rotate(x[0], at[0], **options)
        np.testing.assert_array_equal(one, rotate(x, at, **options)[0])


def test_is_llamas_in_transformers():
    """``apply_rotary_pos_emb`` of ``modeling_llama``, written out; heads stand before tokens."""

    def rotate_half(x):
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return np.concatenate((-x2, x1), -1)

    frequencies, _ = jc.ops.rotary_frequencies(16, 500000.0, LLAMA3)
    at = np.arange(7)[None] + np.array([[0], [90]])
    embedding = np.concatenate([at[..., None] * frequencies] * 2, -1)
    cos, sin = np.cos(embedding)[:, None], np.sin(embedding)[:, None]
    q = np.moveaxis(np.asarray(inputs()), 1, 2)
    want = np.moveaxis(q * cos + rotate_half(q) * sin, 2, 1)
    np.testing.assert_allclose(rotate(inputs(), at, frequencies=frequencies), want, 2e-5, 2e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_difference_of_positions(interleaved):
    q, k = inputs(), inputs(seed=1)

    def scores(first):
        at = first + jnp.arange(SHAPE[1])
        a, b = (rotate(x, at, interleaved=interleaved) for x in (q, k))
        return jnp.einsum("btnh,bsnh->bnts", a, b)

    np.testing.assert_allclose(scores(0), scores(40), atol=1e-4)
    assert abs(scores(0) - jnp.einsum("btnh,bsnh->bnts", q, k)).max() > 0.1


def test_derivatives_and_batches():
    x, at, tangent = inputs(), jnp.arange(7) + 3, inputs(seed=1)
    frequencies = jnp.array([2.0, 0.3, 0.01])

    def f(x, frequencies, at=at):
        return rotate(x, at, frequencies=frequencies, interleaved=True)

    primal, moved = jax.jvp(lambda x: f(x, frequencies), (x,), (tangent,))
    np.testing.assert_allclose(moved, f(tangent, frequencies), 1e-5, 1e-5)  # linear
    _, pull = jax.vjp(lambda x: f(x, frequencies), x)
    np.testing.assert_allclose(pull(primal)[0], x, 1e-5, 1e-5)  # a rotation's inverse
    slope = jax.grad(lambda w: jnp.sum(tangent * f(x, w)))(frequencies)
    step = np.eye(3) * 1e-5
    given = {"rotary_dim": None, "interleaved": True}
    for got, d in zip(slope, step, strict=True):
        high, low = (expected(x, at, frequencies=frequencies + s * d, **given) for s in (1, -1))
        want = np.sum(np.asarray(tangent) * (high - low)) / 2e-5
        np.testing.assert_allclose(got, want, 5e-3, 5e-2)
    ats = jnp.stack([at, at + 5])
    np.testing.assert_allclose(
        jax.vmap(f, (0, None, 0))(x, frequencies, ats), f(x, frequencies, ats), 1e-6
    )


def transformers_frequencies(size, base, scaling):
    """``modeling_rope_utils`` of transformers, written out with loops."""
    found = []
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    for i in range(size // 2):
        f = base ** (-2 * i / size)
        if scaling["rope_type"] == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            wavelength = 2 * math.pi / f
            smooth = (length / wavelength - low) / (high - low)
            if wavelength > length / low:
                f /= factor
            elif wavelength >= length / high:
                f = (1 - smooth) * f / factor + smooth * f
        else:
            dims = [
                size * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))
                for rotations in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
            ]
            if scaling.get("truncate", True):
                dims = [math.floor(dims[0]), math.ceil(dims[1])]
            low, high = max(dims[0], 0), min(dims[1], size - 1)
            ramp = min(max((i - low) / (high - low), 0), 1)
            f = f / factor * ramp + f * (1 - ramp)
        found.append(f)
    return found


@pytest.mark.parametrize(
    ("scaling", "scale"),
    [
        (LLAMA3, 1.0),
        (YARN, 0.1 * math.log(4) + 1),
        (YARN | {"truncate": False, "beta_fast": 16, "attention_factor": 1.5}, 1.5),
        (YARN | {"mscale": 0.7, "mscale_all_dim": None}, 0.1 * math.log(4) + 1),
        (
            YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
            (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
    ],
)
def test_frequencies_are_those_of_transformers(scaling, scale):
    for size, base in ((128, 500000.0), (64, 10000.0)):
        frequencies, found = jc.ops.rotary_frequencies(size, base, scaling)
        want = transformers_frequencies(size, base, scaling)
        np.testing.assert_allclose(frequencies, want, 1e-12)
        assert found == pytest.approx(scale)
        assert frequencies[0] == 1
        assert frequencies[-1] < base ** (2 / size - 1)


def test_frequencies_without_a_scaling_are_the_default():
    plain, scale = jc.ops.rotary_frequencies(16, 500.0)
    assert scale == 1
    np.testing.assert_array_equal(rotate(inputs(), frequencies=plain), rotate(inputs(), base=500.0))
    for kind in ({"rope_type": "default"}, {"type": "default"}):
        np.testing.assert_array_equal(jc.ops.rotary_frequencies(16, 500.0, kind)[0], plain)
    linear, _ = jc.ops.rotary_frequencies(16, 500.0, {"rope_type": "linear", "factor": 2})
    np.testing.assert_allclose(linear, plain / 2)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs 4 (host) devices")
@pytest.mark.parametrize(
    ("kind", "is_set"),
    [(AxisType.Auto, True), (AxisType.Explicit, True), (AxisType.Explicit, False)],
)
def test_sharded_arrays_stay_where_they_are(kind, is_set):
    shape = (2, 4, 6, 16)
    x, at = inputs(*shape), jnp.arange(8).reshape(2, 4)
    partial = functools.partial(rotate, rotary_dim=8, interleaved=True)

    def both(x, at):
        y, pull = jax.vjp(lambda x: partial(x, at), x)
        return y, pull(y)[0]

    want = both(x, at)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    for spec in (P("data", None, "model", None), P(None, "model", None, None)):
        of_x, of_positions = NamedSharding(mesh, spec), NamedSharding(mesh, P(*spec[:2]))
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            given = jax.device_put(x, of_x), jax.device_put(at, of_positions)
            made = jax.jit(both).lower(*given).compile()
            got = made(*given)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-5)
            assert a.sharding.is_equivalent_to(given[0].sharding, 4)
        assert "all-" not in made.as_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": jnp.ones((2, 3, 4), int)}, "x has a dtype.*cast it"),
        ({"x": jnp.ones((3, 8))}, r"too few dimensions.*x\[\.\.\., None, :\]"),
        ({"x": jnp.ones((2, 3, 4, 7))}, "rotary_dim is not valid.*head size 7.*7"),
        ({"x": "no"}, "x is not an array"),
        ({"positions": jnp.ones(3)}, "positions are not integers.*float32.*astype"),
        ({"positions": jnp.arange(4)}, r"positions do not fit x.*\(3,\) or \(2, 3\).*\(4,\)"),
        ({"positions": jnp.zeros((3, 3), int)}, "positions do not fit x"),
        ({"rotary_dim": 10}, "up to the head size 8"),
        ({"rotary_dim": 2.0}, "rotary_dim is not valid.*2.0"),
        ({"frequencies": jnp.ones(3), "rotary_dim": 8}, r"one for each pair.*\(4,\).*\(3,\)"),
        ({"frequencies": jnp.ones((2, 2))}, r"one for each pair.*\(2, 2\)"),
        ({"base": -1.0}, "base is not valid"),
        ({"scale": jnp.ones(2)}, "scale is not a finite Python scalar"),
        ({"interleaved": "no"}, "interleaved is not a Python bool"),
    ],
)
def test_errors(change, words):
    with pytest.raises(jc.JaxCudnnError, match=f"(?s){words}"):
        rotate(**{"x": jnp.ones((2, 3, 4, 8))} | change)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "lama3"}, "rope_type is not valid.*llama3"),
        ({"rope_type": "dynamic"}, "rope_type is not valid.*frequencies="),
        ({"factor": 2.0}, "rope_type is not valid"),
        ({"rope_type": "linear"}, r"missing: \['factor'\]"),
        (YARN | {"rope_theta": 1e6}, r"unknown: \['rope_theta'\].*base="),
        (YARN | {"factor": "4"}, "factor is not a finite Python scalar"),
        (YARN | {"factor": 0}, "factor is not valid.*above 0"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "no range of frequencies.*low_freq_factor below"),
    ],
)
def test_errors_of_scalings(scaling, words):
    with pytest.raises(jc.JaxCudnnError, match=f"(?s){words}"):
        jc.ops.rotary_frequencies(64, 10000.0, scaling)
