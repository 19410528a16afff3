"""ragged_dot: values, derivatives, sizes, transformations, meshes, kernels, errors."""

import builtins
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn.ops import ragged

ragged_dot = jc.ops.ragged_dot
SIZES = {
    "whole": [3, 4, 2, 3],
    "empty groups": [0, 7, 0, 5],
    "too few": [1, 0, 2, 4],
    "none": [0, 0, 0, 0],
    "too many": [5, 6, 7, 8],
    "negative": [3, -2, 4, 1],
    "huge": [2**31 - 1, 2**31 - 1, 5, -(2**31)],
}


def operands(rows=12, k=8, n=5, groups=4, dtype="float32", turned=False):
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (groups, n, k) if turned else (groups, k, n)
    return [
        jax.random.normal(key, s, dtype)
        for key, s in zip(keys, ((rows, k), shape, (rows, n)), strict=True)
    ]


def expected(lhs, rhs, cotangent, sizes, turned=False):
    """The product and both gradients, by a loop in float64."""
    lhs, rhs, cotangent = (np.asarray(x).astype("float64") for x in (lhs, rhs, cotangent))
    rhs = rhs.swapaxes(1, 2) if turned else rhs
    y, of_lhs, of_rhs = np.zeros_like(cotangent), np.zeros_like(lhs), np.zeros_like(rhs)
    first = 0
    for group, size in enumerate(np.asarray(sizes).tolist()):
        rows = slice(first, min(first + max(size, 0), len(lhs)))
        y[rows] = lhs[rows] @ rhs[group]
        of_lhs[rows] = cotangent[rows] @ rhs[group].T
        of_rhs[group] = lhs[rows].T @ cotangent[rows]
        first = rows.stop
    return y, of_lhs, of_rhs.swapaxes(1, 2) if turned else of_rhs


def found(lhs, rhs, cotangent, sizes, **options):
    y, pull = jax.vjp(lambda a, b: ragged_dot(a, b, sizes, **options), lhs, rhs)
    return y, *pull(cotangent.astype(y.dtype))


def near(got, want, tolerance):
    for one, other in zip(got, want, strict=True):
        one = np.asarray(one).astype("float64")
        assert np.abs(one - other).max() <= tolerance * max(np.abs(other).max(), 1)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients(sizes, turned):
    arrays, sizes = operands(turned=turned), jnp.array(sizes)
    got = jax.jit(lambda *x: found(*x, transpose_rhs=turned))(*arrays, sizes)
    near(got, expected(*arrays, sizes, turned), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_16_bits(dtype, tolerance):
    arrays = operands(dtype=dtype)
    got = found(*arrays, jnp.array([3, 4, 2, 1]))
    assert [x.dtype for x in got] == [dtype] * 3
    near(got, expected(*arrays, [3, 4, 2, 1]), tolerance)
    wide = found(*arrays, jnp.array([3, 4, 2, 1]), preferred_element_type="float32")
    assert [x.dtype for x in wide] == ["float32", dtype, dtype]
    near(wide[:1], expected(*arrays, [3, 4, 2, 1])[:1], 1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_derivatives_are_those_of_lax(turned):
    lhs, rhs, tangent = operands(n=8, turned=turned)
    sizes = jnp.array([3, 0, 5, 2])

    def ours(lhs, rhs):
        return jnp.sin(ragged_dot(lhs, rhs, sizes, transpose_rhs=turned)).sum()

    def theirs(lhs, rhs):  # lax has no second derivative
        rhs = rhs.swapaxes(1, 2) if turned else rhs
        of_row = jnp.repeat(jnp.arange(4), sizes, total_repeat_length=10)
        return jnp.sin(jnp.einsum("mk,mkn->mn", lhs[:10], rhs[of_row])).sum()

    def norm(f):
        return lambda *x: sum(jnp.square(g).sum() for g in jax.grad(f, (0, 1))(*x))

    for derived in (
        lambda f: jax.jvp(f, (lhs, rhs), (tangent, rhs)),
        lambda f: jax.jvp(lambda a: f(a, rhs), (lhs,), (tangent,)),
        lambda f: jax.grad(norm(f), (0, 1))(lhs, rhs),
        lambda f: jax.jvp(jax.grad(f, (0, 1)), (lhs, rhs), (tangent, rhs)),
        lambda f: jax.grad(jax.checkpoint(f), (0, 1))(lhs, rhs),
    ):
        got, want = (jax.tree.leaves(derived(f)) for f in (ours, theirs))
        near(got, [np.asarray(x) for x in want], 1e-4)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 1, None), (None, None, 0)])
def test_vmap_and_its_gradient(axes):
    lhs, rhs, cotangent = operands()
    sizes = jnp.array([[3, 4, 2, 1], [0, 0, 12, 0]])
    full = jnp.stack([lhs, 2 * lhs]), jnp.stack([rhs, -rhs], axis=axes[1] or 0), sizes
    given = [
        x if a is not None else o for x, a, o in zip(full, axes, (lhs, rhs, sizes[0]), strict=True)
    ]
    got = jax.vmap(lambda a, b, s: found(a, b, cotangent, s), axes)(*given)
    for i in range(2):
        one = [x if a is None else jnp.take(x, i, a) for x, a in zip(given, axes, strict=True)]
        near([x[i] for x in got], expected(*one[:2], cotangent, one[2]), 1e-5)


def test_scan():
    lhs, rhs, _ = operands(n=8)
    sizes = jnp.array([[3, 4, 2, 1], [0, 0, 12, 0]])

    def step(x, s):
        return (ragged_dot(x, rhs, s), None)

    want = ragged_dot(ragged_dot(lhs, rhs, sizes[0]), rhs, sizes[1])
    near([jax.lax.scan(step, lhs, sizes)[0]], [np.asarray(want)], 1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_shard_map_of_rows(check):
    """Weights are not sharded: their gradient is summed over the devices."""
    arrays = operands(rows=24)
    sizes = jnp.array([[3, 4, 2, 1], [0, 0, 12, 0]])
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")

    def local(lhs, rhs, cotangent, sizes):
        y, of_lhs, of_rhs = found(lhs, rhs, cotangent, sizes[0])
        return y, of_lhs, of_rhs if check else jax.lax.psum(of_rhs, "x")

    x = P("x")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(x, P(), x, x), out_specs=(x, x, P()), check_vma=check
    )
    lhs, rhs, cotangent = arrays
    halves = [
        expected(lhs[s], rhs, cotangent[s], sizes[i])
        for i, s in enumerate((slice(12), slice(12, 24)))
    ]
    want = [np.concatenate([h[i] for h in halves]) for i in range(2)]
    near(jax.jit(mapped)(*arrays, sizes), [*want, halves[0][2] + halves[1][2]], 1e-5)


def test_a_mesh_that_xla_partitions():
    lhs, rhs, cotangent = operands(rows=24)
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")
    sharded = jax.device_put(lhs, NamedSharding(mesh, P("x")))
    sizes = jnp.array([7, 0, 11, 5])
    got = jax.jit(found)(sharded, rhs, cotangent, sizes)
    near(got, expected(lhs, rhs, cotangent, sizes), 1e-5)


def test_explicit_axes():
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    lhs, rhs, cotangent = operands(rows=24)
    sizes = put(jnp.array([7, 0, 11, 6]), "x")
    places = {"rows": (["x"], []), "groups": ([], ["x"]), "sum": ([None, "x"], [None, "x"])}
    for name, (of_lhs, of_rhs) in places.items():
        a, b = put(lhs, *of_lhs), put(rhs, *of_rhs)
        y = ragged_dot(a, b, sizes)
        assert y.sharding.spec == P("x" if name == "rows" else None, None)
        got = jax.jit(found)(a, b, jax.device_put(cotangent, y.sharding), sizes)
        for x, own in zip(got, (y, a, b), strict=True):
            assert x.sharding.is_equivalent_to(own.sharding, x.ndim)
        near(got, expected(lhs, rhs, cotangent, jnp.array([7, 0, 11, 6])), 1e-5)


SHAPES = (
    jax.ShapeDtypeStruct((512, 256), "bfloat16"),
    jax.ShapeDtypeStruct((4, 256, 128), "bfloat16"),
)


def lowered(f, *shapes, gpu="H200"):
    sizes = jax.ShapeDtypeStruct((4,), "int32")
    with jc.target(gpu):
        traced = jax.jit(f).trace(*shapes, sizes)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def unchecked(monkeypatch):
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def test_the_kernel_is_in_a_program_for_hopper(unchecked):
    assert "mosaic_gpu" in lowered(ragged_dot, *SHAPES)
    turned = jax.ShapeDtypeStruct((4, 128, 256), "bfloat16")

    def of_lhs(a, b, s):
        return jax.vjp(lambda a: ragged_dot(a, b, s, transpose_rhs=True), a)[1]

    assert "mosaic_gpu" in lowered(
        lambda a, b, s: of_lhs(a, b, s)(jnp.ones((512, 128), "bfloat16")), SHAPES[0], turned
    )


@pytest.mark.parametrize(
    ("gpu", "shapes", "options"),
    [
        ("A100", SHAPES, {}),
        ("H200", SHAPES, {"preferred_element_type": "float32"}),
        ("H200", [jax.ShapeDtypeStruct(s.shape, "float32") for s in SHAPES], {}),
        (
            "H200",
            [
                jax.ShapeDtypeStruct((*s.shape[:-1], s.shape[-1] - d), "bfloat16")
                for s, d in zip(SHAPES, (0, 1), strict=False)
            ],
            {},
        ),
        ("H200", [jax.ShapeDtypeStruct((60, 256), "bfloat16"), SHAPES[1]], {}),
    ],
    ids=["A100", "float32 result", "float32", "127 columns", "60 rows"],
)
def test_other_programs_are_lax(gpu, shapes, options):
    assert "mosaic_gpu" not in lowered(lambda *x: ragged_dot(*x, **options), *shapes, gpu=gpu)


def test_without_absl_it_is_lax(monkeypatch, unchecked):
    real = builtins.__import__

    def without(name, *rest, **named):
        if "ragged_dot_mgpu" in name:
            raise ImportError("no absl")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    ragged._kernels.cache_clear()
    try:
        assert "mosaic_gpu" not in lowered(lambda *x: ragged_dot(*x), *SHAPES)  # a new trace
    finally:
        ragged._kernels.cache_clear()


def test_an_exported_program_without_a_target_is_lax():
    exported = jax.export.export(jax.jit(ragged_dot), platforms=("cpu", "cuda"))(
        *operands()[:2], jnp.array(SIZES["whole"])
    )
    arrays = operands()
    got = exported.call(*arrays[:2], jnp.array(SIZES["whole"]))
    near([got], expected(*arrays, SIZES["whole"])[:1], 1e-5)


L, R, S = np.ones((6, 4), "f"), np.ones((3, 4, 2), "f"), np.ones(3, "i")


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ((L, R.swapaxes(1, 2), S), {}, "pass transpose_rhs=True"),
        ((L, R, S), {"transpose_rhs": True}, "pass transpose_rhs=False"),
        ((L[None], R, S), {}, r"lhs \(M, K\), rhs \(E, K, N\), group_sizes \(E,\)"),
        ((L, R, S[:2]), {}, r"group_sizes int32\[2\]"),
        ((L, R, S.astype("f")), {}, r"group_sizes.astype\(jnp.int32\)"),
        ((L.astype("i"), R.astype("i"), S), {}, "multiplies floats"),
        ((L, R, S), {"group_offset": jnp.array(1)}, "has no group_offset"),
        ((L, R, S), {"implementation": "cudnn"}, "unknown implementation"),
        ((L, R, S), {"transpose_rhs": "no"}, "not a Python bool"),
        ((L, R, S), {"preferred_element_type": "complex64"}, "preferred_element_type"),
    ],
)
def test_errors(given, options, told):
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as error:
        ragged_dot(*given, **options)
    assert re.search(told, str(error.value))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [4096, 1000, 104, 100])
@pytest.mark.parametrize(
    "parts", [[0.1, 0, 0.33, 0.57], [0, 0.3, 0.2, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
)
def test_the_kernels_compute_what_float64_does(dtype, turned, rows, parts):
    """Rows after the last group are not numbers."""
    lhs, rhs, cotangent = operands(rows, 256, 192, 4, dtype, turned)
    sizes = jnp.array([int(part * rows) for part in parts])
    end = int(sizes.sum())
    arrays = lhs.at[end:].set(jnp.nan), rhs, cotangent.at[end:].set(jnp.nan)
    program = jax.jit(lambda *x: found(*x, transpose_rhs=turned)).lower(*arrays, sizes)
    if jax.devices()[0].compute_capability == "9.0":
        calls = re.findall(r"custom_call @mosaic_gpu", program.as_text())
        assert len(calls) == (3 if rows % 8 == 0 else 0)
    near(program.compile()(*arrays, sizes), expected(*arrays, sizes, turned), 1e-2)
