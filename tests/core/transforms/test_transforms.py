"""Loops, branches, custom rules, odd operands and meshes: what the table does not show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, linear, normal, plain_linear
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc


def operands(key, *shapes):
    return normal(key, *(shapes or ((2, 3, 4), (1, 4, 4), (1, 1, 4))))


def total(f):
    """A scalar that weighs every output element differently."""

    def scalar(*args):
        leaves = jax.tree.leaves(f(*args))
        return sum(jnp.sum(y * jnp.sin(jnp.arange(y.size) + 1.0).reshape(y.shape)) for y in leaves)

    return scalar


def half(args):
    return tuple(0.5 * arg for arg in args)


def vmapped(f):
    """Along the first and the last of three operands."""

    def run(x, w, b):
        stacked = [jnp.stack([arg, -arg, 2 * arg], axis) for arg, axis in ((x, 0), (b, 1))]
        return jax.vmap(f, in_axes=(0, None, 1))(stacked[0], w, stacked[1])

    return run


def loops(f):
    """A scan, a switch and a map in batches."""

    def run(x, *rest):
        step = lambda carry, x: (carry + total(f)(x, *rest), carry)  # noqa: E731
        branches = [lambda *a: f(*half(a)), f]
        return (
            lax.scan(step, 0.0, jnp.stack([x, -x])),
            lax.switch(jnp.int32(jnp.sum(x) > -1e6), branches, x, *rest),
            lax.map(lambda x: f(x, *rest), jnp.stack([x, 2 * x, -x]), batch_size=2),
        )

    return run


def grad(f):
    """Of all floats that a function gives, by all operands."""
    return jax.grad(total(f), (0, 1, 2))


def jvp(f):
    return lambda *args: jax.jvp(f, args, half(args))


def third_order(f):
    """At small operands: where gelu is nearly linear, float32 has nothing of its third one."""
    return lambda *args: jvp(jvp(grad(f)))(*half(args))


TRANSFORMS = {
    "third_order": third_order,
    "grad of loops": lambda f: grad(loops(f)),
    "vmap_grad of loops": lambda f: vmapped(grad(loops(jax.checkpoint(f)))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_those_of_jnp(transform, key):
    args, apply = operands(key), TRANSFORMS[transform]
    assert_same(jax.jit(apply(linear))(*args), jax.jit(apply(plain_linear))(*args))


def test_types_are_known_and_disable_jit_export_and_donation_change_nothing(key):
    args = operands(key)
    for of in (grad, jvp, vmapped):
        assert jax.eval_shape(of(linear), *args) == jax.eval_shape(of(plain_linear), *args)
    assert not any(a.weak_type for a in jax.make_jaxpr(linear)(*args).out_avals)
    want = jax.jit(grad(plain_linear))(*args)
    with jax.disable_jit():
        assert_same(grad(linear)(*args), want)
    called = jax.export.export(jax.jit(linear), platforms=["cpu"])(*args).call
    assert_same(jax.jit(grad(called))(*args), want)
    donated = [jnp.array(a) for a in args]
    assert_same(jax.jit(grad(linear), donate_argnums=(0, 1, 2))(*donated), want)
    assert all(a.is_deleted() for a in donated)


def test_gradients_beside_operands_and_results_of_integers():
    quantized = jc.graph(lambda g, x, w, s: g.matmul(x, g.mul(w, s).set_data_type("float32")))
    plain = lambda x, w, s: x @ (w.astype(jnp.float32) * s)  # noqa: E731
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((2, 3, 4)), jnp.float32)
    args = x, jnp.asarray(random.integers(-9, 9, (1, 4, 5)), jnp.int8), jnp.float32(0.25)
    by = (0, 2)
    assert_same(jax.grad(total(quantized), by)(*args), jax.grad(total(plain), by)(*args))
    along = jnp.ones_like(x), np.zeros(args[1].shape, jax.dtypes.float0), jnp.float32(2)
    assert_same(jax.jvp(quantized, args, along), jax.jvp(plain, args, along))
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(total(quantized), 1)(*args)
    by_w = jax.grad(total(quantized), 1, allow_int=True)(*args)
    assert (by_w.dtype, by_w.shape) == (jax.dtypes.float0, args[1].shape)


LAYOUTS = {
    "data": (P("data"), P(), P(), P("data")),
    "both": (P("data"), *[P(None, None, "model")] * 2, P("data", None, "model")),
}


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_values_and_gradients_of_sharded_operands(kind, layout, key):
    *specs, out = LAYOUTS[layout]
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=devices, axis_types=(kind,) * 2)
    args = operands(key, (8, 4, 6), (1, 6, 8), (1, 1, 8))
    places = [NamedSharding(mesh, spec) for spec in specs]
    sharded = [jax.device_put(a, place) for a, place in zip(args, places, strict=True)]
    want = grad(plain_linear)(*args)
    with jax.set_mesh(mesh):
        got = jax.jit(grad(linear))(*sharded)
        ours, theirs = (jax.eval_shape(f, *sharded) for f in (linear, plain_linear))
    assert_same(jax.device_get(got), jax.device_get(want))
    assert [s.sharding for s in ours.values()] == [s.sharding for s in theirs.values()]
    if kind is AxisType.Auto:
        mapped = jax.shard_map(linear, mesh=mesh, in_specs=tuple(specs), out_specs=out)
        assert_same(jax.device_get(jax.jit(grad(mapped))(*sharded)), jax.device_get(want))
