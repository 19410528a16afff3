"""expert_parallel: what four devices compute is what one does, and rows move, weights do not."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpus import compiled, h200s
from helpers import placed, whole
from jax import lax
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
from jax_cudnn.ops import experts

ROWS, K, N, E = 10, 3, 5, 8
COUNT = min(4, len(jax.devices()))
SIZES = {
    "mixed": [[1, 2, 0, 3, 1, 1, 0, 2], [0, 0, 4, 1, 0, 2, 3, 0], [2] * 5 + [0] * 3, [1] * 8],
    "all to one expert": [[0, 0, 0, 0, 0, 10, 0, 0]] * 4,
    "all to the first": [[10, 0, 0, 0, 0, 0, 0, 0]] * 4,
    "none": [[0] * 8] * 4,
    "one device sends": [[1] * 8, [0] * 8, [0] * 8, [0] * 8],
    "too many": [[9] * 8, [0, 9, 9, 0, 0, 0, 0, 0], [-3] * 4 + [4] * 4, [1] * 8],
}


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def emulated(operand, output, first, sent, place, received, *, axis_name):
    """ragged_all_to_all by its documentation, with all arrays on each device."""
    every = [lax.all_gather(x, axis_name) for x in (operand, first, sent, place)]
    here, devices = lax.axis_index(axis_name), lax.axis_size(axis_name)
    slices = len(first) // devices
    of_sender = lax.all_to_all(sent, axis_name, 0, 0, tiled=True)
    output = jnp.where((of_sender == received).all(), output, jnp.nan)  # both sides agree
    for source in range(devices):
        for i in range(slices):
            rows, begin, count, at = (x[source] for x in every)
            j = here * slices + i
            row = jnp.arange(len(output))
            taken = rows[jnp.clip(row - at[j] + begin[j], 0, len(rows) - 1)]
            inside = (row >= at[j]) & (row < at[j] + count[j])
            output = jnp.where(inside[:, None], taken, output)
    return output


@pytest.fixture(params=["native"] if jax.default_backend() == "gpu" else ["native", "emulated"])
def way(request, monkeypatch):
    """XLA has no ragged_all_to_all on CPUs: there its arguments are checked."""
    if request.param == "emulated":
        monkeypatch.setattr(lax, "ragged_all_to_all", emulated)
        lower = mlir.lower_fun(experts._ragged, multiple_results=True)
        mlir.register_lowering(experts.exchange_p, lower, platform="cpu")
        jax.clear_caches()
    yield
    if request.param == "emulated":
        lower = mlir.lower_fun(experts._padded, multiple_results=True)
        mlir.register_lowering(experts.exchange_p, lower, platform="cpu")
        jax.clear_caches()


EXPERTS = P("expert")


def parallel(mesh, axis="expert", spec=EXPERTS, **options):
    def local(rows, weights, sizes):
        def product(rows, sizes):
            return jnp.sin(jc.ops.ragged_dot(rows, weights, sizes))

        return jc.ops.expert_parallel(product, rows, sizes.reshape(-1), axis, **options)

    return jax.shard_map(local, mesh=mesh, in_specs=(spec, P(axis), spec), out_specs=spec)


def alone(rows, weights, sizes):
    """Each device's rows with all experts."""
    each = zip(rows.reshape(len(sizes), ROWS, K), sizes, strict=True)
    return jnp.concatenate([jnp.sin(jc.ops.ragged_dot(x, weights, s)) for x, s in each])


def near(got, want, tolerance=1e-12):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(whole(one, other), other, rtol=tolerance, atol=tolerance)


def operands(key, devices=4):
    one, other = jax.random.split(key)
    rows = jax.random.normal(one, (devices * ROWS, K), "float64")
    return rows, jax.random.normal(other, (E, K, N), "float64")


@pytest.mark.several_gpus
@pytest.mark.skipif(E % COUNT > 0 or COUNT < 2, reason="needs 2 or 4 devices")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients_are_those_of_one_device(sizes, key, x64, way):
    mesh = Mesh(jax.devices()[:COUNT], "expert")
    rows, weights = operands(key, COUNT)
    sizes = jnp.array(sizes)[:COUNT]

    def both(f, *given):
        def loss(rows, weights):
            y = f(rows, weights, sizes)
            return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum(), y

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*given)

    sharded = [placed(x, NamedSharding(mesh, P())) for x in (rows, weights)]
    near(both(parallel(mesh), *sharded), both(alone, rows, weights))


def test_further_derivatives_and_vmap(key, x64, way):
    mesh, sizes = Mesh(jax.devices()[:4], "expert"), jnp.array(SIZES["mixed"])
    rows, weights = operands(key)

    def derived(f):
        gradient = jax.grad(lambda *x: f(*x, sizes).sum(), (0, 1))

        def norm(*x):
            return sum(jnp.square(g).sum() for g in gradient(*x))

        forward = jax.jvp(lambda *x: f(*x, sizes), (rows, weights), (jnp.cos(rows), weights))
        return forward, jax.grad(norm, (0, 1))(rows, weights)

    near(jax.jit(lambda: derived(parallel(mesh)))(), jax.jit(lambda: derived(alone))(), 1e-10)
    many = jax.jit(jax.vmap(parallel(mesh), (0, None, None)))(
        jnp.stack([rows, -rows]), weights, sizes
    )
    near(many, jnp.stack([alone(rows, weights, sizes), alone(-rows, weights, sizes)]))
    both = jnp.stack([sizes, sizes[::-1]])
    many = jax.jit(jax.vmap(parallel(mesh), (None, None, 0)))(rows, weights, both)
    near(many, jnp.stack([alone(rows, weights, s) for s in both]))


def test_two_axes(key, x64, way):
    """Each row of the mesh exchanges among its own devices; gradients add up over both rows."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "expert"))
    f = parallel(mesh, spec=P(("data", "expert")))
    rows, weights = operands(key)
    sizes = jnp.array(SIZES["mixed"])
    got, want = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x, sizes) ** 2).sum(), (0, 1)))(
            rows, weights
        )
        for f in (f, alone)
    )
    near(got, want)


def test_most_rows_bounds_memory_and_drops_what_is_above_it(key, x64, way):
    mesh, sizes = Mesh(jax.devices()[:4], "expert"), jnp.array(SIZES["mixed"])
    rows, weights = operands(key)
    enough = parallel(mesh, most_rows=6)  # the device with most, of all
    near(jax.jit(enough)(rows, weights, sizes), alone(rows, weights, sizes))
    few = jax.jit(parallel(mesh, most_rows=1))(rows, weights, sizes)
    want = np.zeros((4, ROWS, N))
    whole = np.asarray(alone(rows, weights, sizes)).reshape(4, ROWS, N)
    for device, of_device in enumerate(np.asarray(sizes)):
        for holder in range(4):
            if of_device[2 * holder : 2 * holder + 2].sum():
                first = of_device[: 2 * holder].sum()
                want[device, first] = whole[device, first]
    near(few, want.reshape(-1, N))


@pytest.mark.deviceless
def test_a_program_for_four_gpus_moves_rows_and_no_weights():
    mesh = Mesh(np.array(h200s(4)), ("expert",))

    def aval(shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("expert")))

    f = parallel(mesh)

    def step(rows, weights, sizes):
        loss = lambda *x: jnp.square(f(*x, sizes).astype("float32")).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(rows, weights)

    avals = aval((4096, 128)), aval((8, 128, 256)), aval((4, 8), "int32")
    text = compiled(step, *avals, mesh=mesh).as_text()
    moved = re.findall(r"ragged-all-to-all(?:-start)?\(", text)
    assert len(moved) == 4  # rows and results, and the gradients of both
    gathered = re.findall(r"= \(?(.*?)\)? all-gather(?:-start)?\(", text)
    assert gathered
    assert not any("bf16" in result or "f32" in result for result in gathered)


@pytest.mark.parametrize(
    ("shapes", "axis", "told"),
    [
        (((8, 3), (6,)), "expert", "E a multiple of 4"),
        (((8, 3, 1), (8,)), "expert", r"rows \(M, K\)"),
        (((8, 3), (8,)), "model", "no such mesh axis"),
    ],
)
def test_errors(shapes, axis, told):
    mesh = Mesh(jax.devices()[:4], "expert")
    rows, sizes = jnp.ones(shapes[0]), jnp.ones(shapes[1], "int32")
    run = functools.partial(jc.ops.expert_parallel, lambda rows, sizes: rows, axis_name=axis)
    with pytest.raises(jc.GraphError, match=told):
        jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("expert"))(rows, sizes)


def test_experts_return_as_many_rows():
    run = functools.partial(
        jc.ops.expert_parallel, lambda rows, sizes: rows[:3], axis_name="expert"
    )
    mesh = Mesh(jax.devices()[:4], "expert")
    with pytest.raises(jc.GraphError, match="a row for each row"):
        jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P("expert"))(
            jnp.ones((8, 3)), jnp.ones(8, "int32")
        )
