"""Weights of int8 against float64, and how XLA reads them."""

import contextlib

import absent_gpus
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc

SIZES = (None, 1, 16, 64)


def dequantized(kernel, scale):
    groups = np.asarray(scale, "float64").reshape(-1, kernel.shape[1])
    return np.asarray(kernel, "float64") * np.repeat(groups, len(kernel) // len(groups), 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_weight_is_within_half_a_scale(size, key):
    w = jax.random.normal(key, (64, 24)).at[:, 3].set(0)
    kernel, scale = jc.ops.quantize_weights(w, size)
    assert kernel.dtype == "int8"
    assert scale.dtype == "float32"
    assert scale.shape == ((24,) if size is None else (64 // size, 24))
    half = dequantized(jnp.ones_like(kernel), scale) / 2
    assert (np.abs(dequantized(kernel, scale) - np.asarray(w)) <= half * 1.00001).all()
    assert np.abs(np.asarray(kernel, "int32")).max() == 127
    assert not kernel[:, 3].any()
    assert (np.asarray(scale)[..., 3] == 1).all()


def test_scales_of_16_bits_and_what_is_not_finite():
    kernel, scale = jc.ops.quantize_weights(jnp.linspace(-1, 3, 64, dtype="bfloat16")[:, None])
    assert scale.dtype == "bfloat16"
    assert (kernel.min(), kernel.max()) >= (-127, 126)
    for value in (jnp.nan, jnp.inf):
        w = jnp.ones((4, 2)).at[1, 0].set(value)
        y = jc.ops.quantized_matmul(jnp.ones((1, 4)), *jc.ops.quantize_weights(w))
        assert np.isnan(y[0, 0])
        assert y[0, 1] == 4


@pytest.mark.parametrize("rows", [(3, 5), (70, 15)], ids=["few", "many"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_values_are_those_of_the_dequantized_weights(size, dtype, rows, key):
    a, b = jax.random.split(key)
    kernel, scale = jc.ops.quantize_weights(jax.random.normal(a, (64, 24)), size)
    x = jax.random.normal(b, (*rows, 64), dtype)
    y = jc.ops.quantized_matmul(x, kernel, scale, bias=jnp.ones(24), activation="relu")
    want = np.maximum(np.asarray(x, "float64") @ dequantized(kernel, scale) + 1, 0)
    error = {"float32": 1e-5, "bfloat16": 0.02, "float16": 0.003}[dtype]
    assert y.dtype == dtype
    assert np.abs(np.asarray(y, "float64") - want).max() < error * want.max()


@pytest.mark.parametrize(("rows", "scale"), [(512, (1024,)), (64, (64, 1024))], ids=str)
def test_few_rows_read_weights_of_int8(rows, scale):
    shapes = ((rows, 8192), "bfloat16"), ((8192, 1024), "int8"), (scale, "bfloat16")
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    program = absent_gpus.compiled(
        jc.ops.quantized_matmul, *arrays, xla_gpu_enable_triton_gemm=True
    )
    dequantized = 8192 * 1024 * 2
    assert program.memory_analysis().temp_size_in_bytes < dequantized
    assert set(absent_gpus.operations(program)) == {"fusion"}


def test_a_product_with_an_epilogue_is_left_to_xla_as_the_one_without():
    shapes = ((64, 8192), "bfloat16"), ((8192, 1024), "int8"), ((1024,), "float32")
    arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with jc.target("H200"):
        for function in (
            lambda x, w, scale: jc.ops.matmul(x, w),
            lambda x, w, scale: jc.ops.matmul(x, w, scale=scale, activation="silu"),
        ):
            (plan,) = jc.plans(function, *arrays).values()
            (segment,) = plan.segments
            assert "'prologue of int8 + matmul'" in segment.reason


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"kernel": jnp.ones((8, 4))}, jc.GraphTypeError, "quantize_weights"),
        ({"x": jnp.ones((2, 8), int)}, jc.GraphTypeError, "x has a dtype"),
        ({"scale": jnp.ones(4, int)}, jc.GraphTypeError, "scale has a dtype"),
        ({"scale": jnp.ones(3)}, jc.GraphError, "scales do not fit"),
        ({"scale": jnp.ones((3, 4))}, jc.GraphError, "groups divides features"),
        ({"scale": jnp.ones((0, 4))}, jc.GraphError, "scales do not fit"),
        ({"kernel": jnp.ones((2, 8, 4), "int8")}, jc.GraphError, "scales do not fit"),
        ({"x": jnp.ones((2, 9))}, jc.GraphError, "x does not fit"),
        ({"x": jnp.ones(())}, jc.GraphError, "x does not fit"),
        ({"bias": jnp.ones(5)}, jc.GraphError, "bias does not fit"),
        ({"activation": "foo"}, jc.GraphError, "unknown activation"),
        ({"precision": "foo"}, jc.GraphError, "unknown precision"),
    ],
)
def test_what_does_not_fit(change, error, text):
    given = {"x": jnp.ones((2, 8)), "kernel": jnp.ones((8, 4), "int8"), "scale": jnp.ones(4)}
    with pytest.raises(error, match=text):
        jc.ops.quantized_matmul(**(given | change))


@pytest.mark.parametrize(
    ("kernel", "size", "error"),
    [
        (jnp.ones((8, 4)), 3, jc.GraphError),
        (jnp.ones((8, 4)), 0, jc.GraphError),
        (jnp.ones(8), None, jc.GraphError),
        (jnp.ones((8, 4), int), None, jc.GraphTypeError),
        ("foo", None, jc.GraphTypeError),
    ],
)
def test_what_cannot_be_quantized(kernel, size, error):
    with pytest.raises(error):
        jc.ops.quantize_weights(kernel, size)


def test_vectors_and_empty_arrays():
    kernel, scale = jc.ops.quantize_weights(jnp.ones((8, 4)))
    assert jc.ops.quantized_matmul(jnp.ones(8), kernel, scale).tolist() == [8.0] * 4
    assert jc.ops.quantized_matmul(jnp.ones((0, 8)), kernel, scale).shape == (0, 4)
    kernel, scale = jc.ops.quantize_weights(jnp.ones((0, 4)))
    assert jc.ops.quantized_matmul(jnp.ones((2, 0)), kernel, scale).tolist() == [[0.0] * 4] * 2


def test_small_weights_of_float16_stay():
    w = jnp.full((8, 2), 1e-6, "float16")
    kernel, scale = jc.ops.quantize_weights(w)
    np.testing.assert_allclose(dequantized(kernel, scale), np.asarray(w, "float64"), rtol=0.01)


@pytest.mark.parametrize("rows", [1, 2000])
def test_float16_keeps_outliers_and_small_scales(rows, key):
    w = jax.random.normal(key, (128, 8))
    for factor, outlier in ((1, 1000), (1e-5, 1)):
        x = jnp.ones((rows, 128), "float16").at[:, 3].set(outlier)
        quantized = jc.ops.quantize_weights(w.astype("float32") * factor, 64)
        want = np.asarray(x, "float64") @ dequantized(*quantized)
        got = np.asarray(jc.ops.quantized_matmul(x, *quantized), "float64")
        assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


@pytest.mark.parametrize(
    ("kind", "is_set"), [("Auto", True), ("Explicit", True), ("Explicit", False)]
)
@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("rows", [4, 2000])
def test_rows_features_and_columns_may_be_sharded(rows, size, kind, is_set, key):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType[kind],) * 2)
    kernel, scale = jc.ops.quantize_weights(jax.random.normal(key, (64, 32)), size)
    x = jax.random.normal(key, (rows, 64))
    want = jc.ops.quantized_matmul(x, kernel, scale)
    for of_x, of_kernel in (("a", None), (None, "b")), (("a", "b"), ("b", None)), (
        ("a", None), ("b", "a")), ((("a", "b"), None), (None, "b")):  # fmt: skip
        specs = P(*of_x), P(*of_kernel), P(*(None,) * (scale.ndim - 1), of_kernel[1])
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            placed = [
                jax.device_put(y, NamedSharding(mesh, spec))
                for y, spec in zip((x, kernel, scale), specs, strict=True)
            ]
            np.testing.assert_allclose(jax.jit(jc.ops.quantized_matmul)(*placed), want, 1e-4, 1e-4)


def test_symbolic_rows_are_exported():
    kernel, scale = jc.ops.quantize_weights(jnp.ones((16, 8)), 4)
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 16"), "float32")
    run = jax.jit(lambda x: jc.ops.quantized_matmul(x, kernel, scale))
    exported = jax.export.export(run)(x)
    np.testing.assert_allclose(exported.call(jnp.ones((3, 16))), 16 * np.ones((3, 8)), 1e-2)
