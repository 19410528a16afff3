"""ragged_dot with bias, activation and gate, and where it reads the matrices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpus import compiled
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc

ragged_dot = jc.ops.ragged_dot
ROWS, K, N, GROUPS = 12, 8, 6, 4
SIZES = [[3, 4, 2, 3], [0, 7, 0, 2], [0, 0, 0, 0], [5, 6, 7, 8], [3, -2, 4, 1]]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def operands(key, dtype, turned=False):
    shapes = (ROWS, K), (GROUPS, N, K) if turned else (GROUPS, K, N), (GROUPS, N), (ROWS, N)
    keys = jax.random.split(key, 4)
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def dense(lhs, rhs, bias, gate, sizes, activation, turned=False):
    """The same by a matrix for each row."""
    ends = jnp.cumsum(jnp.clip(jnp.array(sizes), 0))
    group = (jnp.arange(ROWS)[:, None] >= ends).sum(1)
    at = jnp.clip(group, 0, GROUPS - 1)
    y = jnp.einsum("mk,mnk->mn" if turned else "mk,mkn->mn", lhs, rhs[at])
    if bias is not None:
        y = y + bias[at]
    y = activation(y) if gate is None else activation(gate) * y
    return jnp.where(group[:, None] < GROUPS, y, 0)


def ours(lhs, rhs, bias, gate, sizes, activation, turned=False):
    how = {"activation": activation, "transpose_rhs": turned}
    return ragged_dot(lhs, rhs, jnp.array(sizes), bias=bias, gate=gate, **how)


FORMS = {
    "bias": ("bias", None, lambda y: y),
    "silu": ("", "silu", jax.nn.silu),
    "bias, sigmoid": ("bias", "sigmoid", jax.nn.sigmoid),
    "bias, jax.nn.gelu": ("bias", jax.nn.gelu, jax.nn.gelu),
    "SwiGLU": ("bias gate", "silu", jax.nn.silu),
    "bilinear": ("gate", None, lambda y: y),
}


def given(form, arrays):
    terms, name, function = FORMS[form]
    lhs, rhs, bias, gate = arrays
    return (lhs, rhs, bias if "bias" in terms else None, gate if "gate" in terms else None), (
        name,
        function,
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients(form, turned, sizes, key, x64):
    """In float64, to its precision: also the rows after the last group, which are 0."""
    arrays, (name, function) = given(form, operands(key, "float64", turned))
    weight = jax.random.normal(key, (ROWS, N), "float64")
    moving = [i for i, x in enumerate(arrays) if x is not None]

    def both(f, activation):
        def loss(*moved):
            full = list(arrays)
            for i, x in zip(moving, moved, strict=True):
                full[i] = x
            y = f(*full, sizes, activation, turned)
            return (y * weight).sum(), y

        moved = [arrays[i] for i in moving]
        return jax.jit(jax.value_and_grad(loss, range(len(moving)), has_aux=True))(*moved)

    got, want = both(ours, name), both(dense, function)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", ["bias, sigmoid", "SwiGLU"])
def test_further_derivatives_and_vmap(form, key, x64):
    arrays, (name, function) = given(form, operands(key, "float64"))
    present = [x for x in arrays if x is not None]
    sizes = jnp.array([[3, 0, 5, 2], [0, 12, 0, 0]])

    def of(f, activation):
        def run(*present):
            full = iter(present)
            return f(*(None if x is None else next(full) for x in arrays), sizes[0], activation)

        return run

    def second(f):
        loss = lambda *x: jnp.sin(f(*x)).sum()  # noqa: E731
        gradient = jax.grad(loss, range(len(present)))
        norm = lambda *x: sum(jnp.square(g).sum() for g in gradient(*x))  # noqa: E731
        forward = jax.jvp(f, tuple(present), tuple(map(jnp.cos, present)))
        return forward, jax.grad(norm, range(len(present)))(*present)

    got, want = second(of(ours, name)), second(of(dense, function))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)

    mapped = jax.vmap(lambda s, b: ours(*arrays[:2], b, arrays[3], s, name))
    many = mapped(sizes, jnp.stack([arrays[2], -arrays[2]]))
    for i, bias in enumerate((arrays[2], -arrays[2])):
        one = dense(*arrays[:2], bias, arrays[3], sizes[i], function)
        np.testing.assert_allclose(many[i], one, rtol=1e-12, atol=1e-12)


def test_shard_map_of_rows(key, x64):
    """The gradient of a bias that is not sharded is summed over the devices."""
    lhs, rhs, bias, gate = operands(key, "float64")
    sizes = jnp.array([[2, 0, 1, 3], [0, 4, 0, 1]])
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")
    x = P("x")

    def local(lhs, rhs, bias, gate, sizes):
        run = lambda *moved: ours(*moved, sizes[0], "silu")  # noqa: E731
        y, pull = jax.vjp(run, lhs, rhs, bias, gate)
        return y, pull(jnp.cos(y))[2]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(x, P(), P(), x, x), out_specs=(x, P()))
    y, of_bias = jax.jit(mapped)(lhs, rhs, bias, gate, sizes)
    halves = [
        local(lhs[s], rhs, bias, gate[s], sizes[i : i + 1])
        for i, s in enumerate((slice(6), slice(6, 12)))
    ]
    np.testing.assert_allclose(y, jnp.concatenate([h[0] for h in halves]), rtol=1e-12)
    np.testing.assert_allclose(of_bias, halves[0][1] + halves[1][1], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_round_the_product_and_the_result(dtype, key):
    lhs, rhs, bias, gate = operands(key, dtype)
    sizes = jnp.array(SIZES[0])
    got = ragged_dot(lhs, rhs, sizes, bias=bias, gate=gate, activation="silu")
    assert got.dtype == dtype
    wide = [x.astype("float32") for x in (lhs, rhs, bias, gate)]
    product = dense(*wide[:2], None, None, sizes, lambda y: y).astype(dtype).astype("float32")
    per_row = jnp.repeat(wide[2], sizes, axis=0, total_repeat_length=ROWS)
    want = (jax.nn.silu(wide[3]) * (product + per_row)).astype(dtype)
    step = float(jnp.finfo(dtype).eps)  # of one rounding of the product, in another order of sums
    np.testing.assert_allclose(
        np.asarray(got, "f"), np.asarray(want, "f"), rtol=2 * step, atol=step
    )


def test_the_derivative_keeps_no_wide_arrays(key):
    arrays = operands(key, "bfloat16")
    run = functools.partial(ours, sizes=SIZES[0], activation="silu")
    kept = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(run, *x)[1], *arrays))
    kept = [f"{aval.dtype}{[*aval.shape]}" for aval in kept]
    assert f"bfloat16[{ROWS}, {N}]" in kept
    assert f"float32[{ROWS}, {N}]" not in kept


L, R, S = np.ones((6, 4), "f"), np.ones((3, 4, 2), "f"), np.ones(3, "i")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"bias": np.ones(2, "f")}, r"bias .*\(E, N\).*\(3, 2\)"),
        ({"bias": np.ones((3, 4), "f")}, r"got.*\(3, 4\)"),
        ({"bias": np.ones((3, 2), "i")}, r"bias.astype\(jnp.float32\)"),
        ({"gate": np.ones((3, 4, 2), "f")}, r"gate .*\(M, N\).*\(6, 2\)"),
        ({"activation": "swiglu"}, "unknown activation"),
    ],
)
def test_errors(options, told):
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as error:
        ragged_dot(L, R, S, **options)
    assert re.search(told, str(error.value), re.DOTALL)


@pytest.mark.deviceless
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("turned", [False, True])
def test_where_a_compiled_program_reads_the_matrices(implementation, turned, monkeypatch):
    """Mosaic's kernels read them as they lie, forward and for the gradient of rows. XLA reads one
    of both orders as it lies, and transposes the matrices for the other product."""
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    shape = jax.ShapeDtypeStruct
    lhs, ct = shape((1024, 256), "bfloat16"), shape((1024, 384), "bfloat16")
    rhs = shape((4, 384, 256) if turned else (4, 256, 384), "bfloat16")

    def forward(lhs, rhs, sizes, ct):
        how = {"transpose_rhs": turned, "implementation": implementation}
        return ragged_dot(lhs, rhs, sizes, bias=jnp.ones((4, 384)), activation="silu", **how)

    def of_rows(lhs, rhs, sizes, ct):
        how = {"transpose_rhs": turned, "implementation": implementation}
        return jax.vjp(lambda x: ragged_dot(x, rhs, sizes, **how), lhs)[1](ct)

    copies = []
    for run in (forward, of_rows):
        text = compiled(run, lhs, rhs, shape((4,), "int32"), ct).as_text()
        assert ("mosaic_gpu" in text) == (implementation == "mosaic")
        entry = text[text.index("\nENTRY") :]
        copies.append(len(re.findall(r"= bf16\[4,(256,384|384,256)\]\S* (fusion|copy)\(", entry)))
    assert copies == ([0, 0] if implementation == "mosaic" else [turned, not turned])


def test_rows_of_one_element_after_the_groups_are_0():
    lhs = jnp.array([[1.0], [jnp.nan]])
    assert jc.ops.ragged_dot(lhs, jnp.ones((1, 1, 2)), jnp.array([1])).tolist() == [[1, 1], [0, 0]]
