"""A graph over several devices: jit on Auto and Explicit meshes, and shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same, linear, plain_linear
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def gradients(f):
    """By all operands, and the results."""

    def total(*args):
        out = f(*args)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), out

    return jax.grad(total, (0, 1, 2), has_aux=True)


def mesh(kind):
    devices = np.array(jax.devices("cpu")[:8]).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def sharded_operands(key, axes, kind):
    m = mesh(kind)
    kx, kw, kb = jax.random.split(key, 3)
    x, w = jax.random.normal(kx, (8, 4, 6)), jax.random.normal(kw, (1, 6, 8))
    args = [x, w, jax.random.normal(kb, (1, 1, 8))]
    return (
        m,
        args,
        [jax.device_put(a, NamedSharding(m, s)) for a, s in zip(args, axes, strict=True)],
    )


LAYOUTS = {
    "data": (P("data"), P(), P()),
    "model": (P(), P(None, None, "model"), P(None, None, "model")),
    "both": (P("data"), P(None, None, "model"), P(None, None, "model")),
}
needs_devices = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")


@needs_devices
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_jit_on_a_sharded_mesh(kind, layout, key):
    m, args, sharded = sharded_operands(key, LAYOUTS[layout], kind)
    with jax.set_mesh(m):
        got = jax.jit(gradients(linear))(*sharded)
    assert_same(jax.device_get(got), jax.device_get(gradients(plain_linear)(*args)))


@needs_devices
@pytest.mark.parametrize("layout", LAYOUTS)
def test_explicit_output_sharding_is_that_of_jnp(layout, key):
    m, _, sharded = sharded_operands(key, LAYOUTS[layout], AxisType.Explicit)
    with jax.set_mesh(m):
        got = jax.eval_shape(linear, *sharded)
        want = jax.eval_shape(plain_linear, *sharded)
    assert jax.tree.map(lambda s: s.sharding.spec, got) == jax.tree.map(
        lambda s: s.sharding.spec, want
    )


@needs_devices
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_map_with_check_vma(layout, key):
    specs = LAYOUTS[layout]
    m, args, sharded = sharded_operands(key, specs, AxisType.Auto)
    out = P("data" if layout != "model" else None, None, "model" if layout != "data" else None)

    def mapped(f):
        return jax.shard_map(f, mesh=m, in_specs=specs, out_specs=out, check_vma=True)

    got = jax.jit(gradients(mapped(linear)))(*sharded)
    assert_same(jax.device_get(got), jax.device_get(gradients(plain_linear)(*args)))
