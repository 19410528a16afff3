"""A graph over several devices: jit on Auto and Explicit meshes, and shard_map."""

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_same, linear, plain_linear
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYOUTS = {
    "data": (P("data"), P(), P(), P("data")),
    "both": (P("data"), *[P(None, None, "model")] * 2, P("data", None, "model")),
}


def gradients(f):
    """By all operands, and the results."""

    def total(*args):
        out = f(*args)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out)), out

    return jax.grad(total, (0, 1, 2), has_aux=True)


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_values_and_gradients_of_sharded_operands(kind, layout, key):
    *specs, out = LAYOUTS[layout]
    devices = jax.devices("cpu")[:8]
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=devices, axis_types=(kind,) * 2)
    shapes = (8, 4, 6), (1, 6, 8), (1, 1, 8)
    args = [jax.random.normal(k, s) for k, s in zip(jax.random.split(key, 3), shapes, strict=True)]
    places = [NamedSharding(mesh, spec) for spec in specs]
    sharded = [jax.device_put(a, place) for a, place in zip(args, places, strict=True)]
    want = gradients(plain_linear)(*args)
    with jax.set_mesh(mesh):
        got = jax.jit(gradients(linear))(*sharded)
        ours, theirs = (jax.eval_shape(f, *sharded) for f in (linear, plain_linear))
    assert_same(jax.device_get(got), jax.device_get(want))
    assert [s.sharding for s in ours.values()] == [s.sharding for s in theirs.values()]
    if kind is AxisType.Auto:
        mapped = jax.shard_map(linear, mesh=mesh, in_specs=tuple(specs), out_specs=out)
        assert_same(jax.device_get(jax.jit(gradients(mapped))(*sharded)), jax.device_get(want))
