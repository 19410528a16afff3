"""Blocks with scales: values by the formats' definitions, derivatives, plans, errors."""

import re

import absent_gpus
import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest

import jax_cudnn as jc

E4M3, E5M2, E8M0, E2M1 = (
    jnp.dtype(f"float{x}") for x in ("8_e4m3fn", "8_e5m2", "8_e8m0fnu", "4_e2m1fn")
)


@jc.graph
def quantize(g, x, block_size, axis, dtype):
    y, scale = g.block_scale_quantize(x, block_size=block_size, axis=axis)
    return y.set_data_type(dtype), scale


@jc.graph
def dequantize(g, y, scale, block_size):
    return g.block_scale_dequantize(y, scale, block_size=list(block_size))


@jc.graph
def product(g, a, a_scale, b, b_scale, block_size):
    b.set_stride([b.shape[1] * b.shape[2], 1, b.shape[1]])
    a = g.block_scale_dequantize(a, a_scale, block_size=[1, block_size])
    b = g.block_scale_dequantize(b, b_scale, block_size=[block_size, 1])
    return g.matmul(a, b)


@jc.graph
def quantized_product(g, a, a_scale, b, b_scale, block_size):
    y = product.fn(g, a, a_scale, b, b_scale, block_size)
    return g.block_scale_quantize(g.relu(y), block_size=block_size)


FORMATS = {"MXFP8": (32, E4M3), "MXFP8 e5m2": (32, E5M2), "MXFP4": (32, E2M1), "NVFP4": (16, E2M1)}
each_format = pytest.mark.parametrize("name", FORMATS)


def exact(y, scale, axis, block):
    """Values times scales in float64, found byte by byte."""
    y, scale = (np.asarray(x).astype(np.float64) for x in (y, scale))
    each = oracle_attention.scales_of_blocks(scale[:, None], (1, *y.shape), axis, block)
    return y * each[:, 0]


def sizes_of(name, shapes):
    block, dtype = FORMATS[name]
    (m, k, n), scale = shapes, E4M3 if block == 16 else E8M0
    up = lambda x, by: -(-x // by) * by  # noqa: E731
    blocks = up(-(-k // block), 4)
    avals = ((1, m, k), dtype), ((1, up(m, 128), blocks), scale)
    avals += ((1, k, n), dtype), ((1, blocks, up(n, 128)), scale)
    return [jax.ShapeDtypeStruct(*x) for x in avals]


@each_format
@pytest.mark.parametrize("axis", [2, 1])
def test_values_are_as_near_as_the_format_permits(name, axis, key):
    block, dtype = FORMATS[name]
    spread = jnp.exp((block - 15) / 4 * jax.random.normal(key, (2, 72, 1)))
    x = jax.random.normal(key, (2, 72, 80)) * spread
    y, scale = quantize(x, block, axis, dtype.name)
    assert (y.dtype, scale.dtype) == (dtype, E4M3 if block == 16 else E8M0)
    got = exact(y, scale, axis - 3, block)
    np.testing.assert_array_equal(
        dequantize(y, scale, (1, block) if axis == 2 else (block, 1)), got.astype(np.float32)
    )
    factor = got / np.where(y == 0, np.nan, np.asarray(y).astype(np.float64))
    step = {E4M3: 2**-3, E5M2: 2**-2, E2M1: 0.5}[dtype]  # of a float in [1, 2)
    tiny = float(jnp.finfo(dtype).smallest_normal)
    distance = np.abs(got - np.asarray(x, np.float64))
    ulp = step * np.exp2(np.floor(np.log2(np.maximum(np.abs(x) / factor, tiny)))) * factor
    # In tests of JAX 0.10, XLA's older code for CPUs (conftest.py) rounds to float16 before.
    half = 0.502 if jax.__version__.startswith("0.10.") else 0.5001
    assert (distance <= half * ulp)[y != 0].all()
    # The largest value of a block is in range, and would not be with a scale half as large.
    assert float(jnp.abs(y.astype("float32")).max()) > float(jnp.finfo(dtype).max) / 2.01


def test_blocks_of_zeros_and_of_what_is_not_finite():
    x = jnp.zeros((1, 4, 64)).at[0, 1, 3].set(jnp.nan).at[0, 2, 40].set(jnp.inf)
    for block in (32, 16):
        y, scale = jc.graph(lambda g, x, n=block: g.block_scale_quantize(x, block_size=n))(x)
        got = np.asarray(dequantize(y, scale, (1, block)))
        assert not got[0, [0, 3]].any()
        assert not got[0, 1, 32:].any()
        assert np.isnan(got[0, [1, 2], [3, 40]]).all()


def test_a_scale_is_the_least_that_keeps_a_block_in_range():
    scales = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    near = (6 * scales[1:]).view(np.int32)[:, None] + [-8, 0, 8]
    most = np.float32([*near.astype(np.int32).view(np.float32).ravel(), 0, 1e-30, 5000, 1e30])
    x = np.zeros((1, most.size, 16), np.float32)
    x[..., 5] = -most
    _, scale = jax.jit(lambda x: quantize(x, 16, 2, "float4_e2m1fn"))(x)
    want = scales[np.minimum(np.searchsorted(scales, most / np.float32(6)), 0x7E)]
    np.testing.assert_array_equal(exact(np.ones_like(x), scale, -1, 16)[0, :, 0], want)


@pytest.mark.deviceless
def test_no_scale_depends_on_a_cast_that_xla_leaves_out():
    """A cast of the scales to float8 and back: they were rounded to the nearest on GPUs. (Y is of
    float4.)"""
    run = lambda x: quantize(x, 16, 2, "float4_e2m1fn")  # noqa: E731
    text = absent_gpus.compiled(run, jax.ShapeDtypeStruct((1, 64, 64), "float32")).as_text()
    assert " = f8e4m3fn[" in text
    assert not re.search(r" = f8e4m3fn\S* convert\(", text)


@each_format
def test_a_product_is_that_of_the_exact_values(name, key):
    block, dtype = FORMATS[name]
    a, b = jax.random.normal(key, (1, 40, 96)), jax.random.normal(key, (1, 96, 24))
    a, b = quantize(a, block, 2, dtype.name), quantize(b, block, 1, dtype.name)
    want = exact(*a, -1, block) @ exact(*b, -2, block)
    got = np.asarray(jax.jit(product, static_argnums=4)(*a, *b, block), np.float64)
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@each_format
@pytest.mark.parametrize("shapes", [(128, 256, 64), (200, 128, 96)], ids=str)
@pytest.mark.deviceless
def test_products_are_one_plan_for_blackwell_and_xlas_elsewhere(name, shapes):
    block, _ = FORMATS[name]
    avals = sizes_of(name, shapes)
    for function in (product, quantized_product) if block == 16 else (product,):
        (plan,) = jc.plan(function, *avals, block, gpus=["B200"]).values()
        (segment,) = plan.segments
        assert segment.plan is not None
    with jc.target("H200"):
        calls = [s.spec.calls for s in jc.plan(product, *avals, block).segments if s.plan]
    assert all("block_scale" not in call.name for each in calls for call in each)


@pytest.mark.deviceless
def test_values_of_4_bits_are_bytes_of_two_to_a_plan():
    avals = sizes_of("NVFP4", (128, 256, 64))
    with jc.target("B200"):
        traced = jax.jit(quantized_product, static_argnums=4).trace(*avals, 16)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call @jax_cudnn" in line)
    types = call.rpartition(" : ")[2]
    assert types.startswith("(tensor<1x128x128xui8>, tensor<1x128x16xf8E4M3FN>, ")
    assert "tensor<1x128x64xui8>" in types  # B, (K/2, N)
    assert "tensor<1x128x32xui8>" in types  # the result, (M, N/2)
    assert "f4E2M1FN" not in types


def test_packed_bytes_hold_the_first_value_in_the_lower_bits():
    from jax_cudnn._core.graph.boundary import _packed, _unpacked, stored
    from jax_cudnn._core.graph.spec import Tensor

    codes = np.arange(32, dtype=np.uint8).reshape(1, 4, 8) % 16
    x = jnp.asarray(codes.view(np.uint8)).astype("uint8")
    values = jax.lax.bitcast_convert_type(
        (x[..., ::2] | x[..., 1::2] << 4).astype("uint8"), E2M1
    ).reshape(1, 4, 8)
    row = Tensor("x", (1, 4, 8), "float4_e2m1fn")
    column = Tensor("x", (1, 4, 8), "float4_e2m1fn", order=(0, 2, 1))
    assert (stored(row), stored(column)) == (((1, 4, 4), "uint8"), ((1, 2, 8), "uint8"))
    np.testing.assert_array_equal(_packed(values, 2), codes[..., ::2] | codes[..., 1::2] << 4)
    np.testing.assert_array_equal(_packed(values, 1), codes[:, ::2] | codes[:, 1::2] << 4)
    for inner in (2, 1):
        np.testing.assert_array_equal(_unpacked(_packed(values, inner), inner), values)


def test_the_derivative_holds_scales_fixed(key):
    x = jax.random.normal(key, (1, 32, 64))
    both = lambda x: dequantize(*quantize(x, 32, 2, "float8_e5m2"), (1, 32))  # noqa: E731
    np.testing.assert_array_equal(jax.grad(lambda x: both(x).sum())(x), 1)
    np.testing.assert_array_equal(jax.jvp(both, (x,), (x * 0 + 1,))[1], 1)
    assert not jax.grad(lambda x: jax.grad(lambda x: both(x).sum())(x).sum())(x).any()
    y, scale = quantize(x, 16, 2, "float4_e2m1fn")
    grad = jax.grad(lambda s: dequantize(y, s, (1, 16)).sum())(scale)
    want = np.asarray(y.astype("float32")).reshape(32, 4, 16).sum(-1)
    np.testing.assert_array_equal(grad[0, 0], want[0].astype(E4M3))
    y, scale = quantize(x, 32, 2, "float8_e4m3fn")
    with pytest.raises(jc.GraphTypeError, match="no derivative with respect to scale"):
        jax.grad(lambda s: dequantize(y, s, (1, 32)).sum())(scale)


def test_batches_enter_the_batch(key):
    x = jax.random.normal(key, (3, 2, 40, 64))
    got = jax.vmap(lambda x: quantize(x, 16, 2, "float4_e2m1fn"))(x)
    for i in range(3):
        for one, of_all in zip(quantize(x[i], 16, 2, "float4_e2m1fn"), got, strict=True):
            np.testing.assert_array_equal(of_all[i], one)


def test_a_mesh_shards_batches_and_rows_of_whole_tiles(key):
    """But not blocks, nor the other dimension beside blocks along the last but one."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def placed(x, *axes):
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))

    def text_of(*operands):
        return jax.jit(dequantize, static_argnums=2).lower(*operands).compile().as_text()

    for axis, block in ((2, 32), (2, 16), (1, 16)):
        dtype = "float8_e4m3fn" if block == 32 else "float4_e2m1fn"
        x = jax.random.normal(key, (2, 256, 384))
        want = quantize(x, block, axis, dtype)
        sizes = (1, block) if axis == 2 else (block, 1)
        back = dequantize(*want, sizes)
        for at in range(3):
            sharded = [None] * at + ["data"]
            got = jax.jit(lambda x, n=block, a=axis, d=dtype: quantize(x, n, a, d))(
                placed(x, *sharded)
            )
            for one, other in zip(got, want, strict=True):
                np.testing.assert_array_equal(one.astype("float32"), other.astype("float32"))
            there = placed(want[0], *sharded), placed(want[1], *sharded)
            got = jax.jit(dequantize, static_argnums=2)(*there, sizes)
            np.testing.assert_array_equal(got, back)
            in_place = at == 0 or (at, axis) == (1, 2)
            assert ("all-gather" not in text_of(*there, sizes)) == in_place
            if in_place:
                assert got.sharding.is_equivalent_to(there[0].sharding, 3)


WRONG = [
    (
        lambda: quantize(jnp.ones((1, 4, 32)), 8, 2, "float8_e4m3fn"),
        "block_size or axis is not valid",
    ),
    (lambda: quantize(jnp.ones((1, 4, 32)), 32, 0, "float8_e4m3fn"), "or axis is not valid"),
    (lambda: quantize(jnp.ones((1, 4, 32)), 32, 2, "bfloat16"), "Y cannot have this dtype"),
    (lambda: quantize(jnp.ones((1, 4, 32)), 16, 2, "float8_e4m3fn"), "Y cannot have this dtype"),
    (lambda: quantize(jnp.ones((4, 32)), 32, 2, "float8_e4m3fn"), "'input' has the wrong rank"),
    (lambda: quantize(jnp.ones((1, 4, 32), int), 32, 2, "float8_e4m3fn"), "does not take int"),
    (
        lambda: dequantize(jnp.ones((1, 4, 32), E4M3), jnp.ones((1, 4, 1), E8M0), (1, 32)),
        r"(?s)scales do not fit the values.*\[1, 128, 4\]",
    ),
    (
        lambda: dequantize(jnp.ones((1, 4, 32), E4M3), jnp.ones((1, 128, 4), E4M3), (1, 16)),
        "of no block format",
    ),
    (
        lambda: dequantize(jnp.ones((1, 4, 32), E4M3), jnp.ones((1, 128, 4), E8M0), (32,)),
        r"(?s)block_size is not valid.*\[1, n\]",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[m for _, m in WRONG])
def test_bad_input_is_told(call, message):
    with pytest.raises(jc.JaxCudnnError, match=message):
        call()


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("sizes", "why"), [((128, 72, 64), "not all full"), ((128, 48, 64), "not a multiple of 16")]
)
def test_why_a_product_is_not_cudnns(sizes, why):
    function = product.with_options(implementation="cudnn")
    with jc.target("B200"), pytest.raises(jc.UnsupportedGraphError, match=why):
        jc.plan(function, *sizes_of("NVFP4", sizes), 16)


def test_a_pygraph_of_blocks_is_taken(key):
    cudnn = pytest.importorskip("cudnn")
    kind, tiles = cudnn.data_type, cudnn.tensor_reordering
    a, b = jax.random.normal(key, (2, 1, 128, 128))
    arrays = [*quantize(a, 32, 2, "float8_e4m3fn"), *quantize(b, 32, 1, "float8_e4m3fn")]

    def taken(reordering):
        g = cudnn.pygraph(intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT)
        kinds = {"data_type": kind.FP8_E8M0, "reordering_type": reordering}
        x = g.tensor(dim=[1, 128, 128], stride=[16384, 128, 1], data_type=kind.FP8_E4M3)
        x_scale = g.tensor(dim=[1, 128, 4], stride=[512, 4, 1], **kinds)
        w = g.tensor(dim=[1, 128, 128], stride=[16384, 1, 128], data_type=kind.FP8_E4M3)
        w_scale = g.tensor(dim=[1, 4, 128], stride=[512, 1, 4], **kinds)
        left = g.block_scale_dequantize(x, x_scale, block_size=[1, 32])
        right = g.block_scale_dequantize(w, w_scale, block_size=[32, 1])
        y, scale = g.block_scale_quantize(
            g.matmul(left, right), block_size=32, axis=2, transpose=False
        )
        y.set_output(True).set_data_type(kind.FP8_E5M2)
        scale.set_output(True).set_data_type(kind.FP8_E8M0).set_reordering_type(tiles.F8_128x4)
        return jc.from_pygraph(g, inputs=[x, x_scale, w, w_scale], outputs=[y, scale])

    got = taken(tiles.F8_128x4)(*arrays)
    want = quantize(product(*arrays, 32), 32, 2, "float8_e5m2")
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.astype("float32"), other.astype("float32"))
    with pytest.raises(jc.GraphError, match="scales of blocks are not in tiles"):
        taken(tiles.NONE)


def test_gradients_of_values_in_4_bits(key):
    """Of a quantized product, by values in 4 bits: those with scales fixed, rounded once."""
    a, b = jax.random.normal(key, (1, 128, 64)), jax.random.normal(key, (1, 64, 128))
    a, b = quantize(a, 16, 2, "float4_e2m1fn"), quantize(b, 16, 1, "float4_e2m1fn")
    (y, scale), pull = jax.vjp(lambda v: quantized_product(v, a[1], *b, 16), a[0])
    (got,) = pull((jnp.ones_like(y), jnp.zeros_like(scale)))
    assert got.dtype == E2M1
    slope = (exact(*a, -1, 16) @ exact(*b, -2, 16) > 0) / np.where(
        exact(jnp.ones_like(y), scale, -1, 16) > 0, exact(jnp.ones_like(y), scale, -1, 16), np.inf
    )
    wide = slope @ np.swapaxes(exact(*b, -2, 16), 1, 2) * exact(jnp.ones_like(a[0]), a[1], -1, 16)
    want = jnp.asarray(np.clip(wide, -6, 6), "float32").astype(E2M1).astype("float32")
    assert (np.asarray(got.astype("float32")) == np.asarray(want)).mean() > 0.99
