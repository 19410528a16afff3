"""Normalizations and attention of arrays that a mesh with explicit axes shards: as Flax's."""

import functools

import jax
import pytest
from flax import nnx
from flax_cases import assert_near
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
import jax_cudnn.flax as jnn

pytestmark = pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs 4 (host) devices")


def random(*shape, seed=1):
    return jax.random.normal(jax.random.key(seed), shape)


def mesh():
    kinds = (AxisType.Explicit,) * 2
    return jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds))


def assert_alike(functions, *arrays):
    """Results, the gradients of a sum of sines of them, and how these are sharded."""

    def loss(function, *arrays):
        y = function(*arrays)
        return jax.numpy.sin(y).sum(), y

    by = (*range(1, 1 + len(arrays)),)
    run = jax.jit(jax.grad(loss, by, has_aux=True), static_argnums=0)
    got, want = (run(function, *arrays) for function in functions)
    assert_near(got, want, 1e-5)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert jax.typeof(x).sharding == jax.typeof(y).sharding


NORMS = {name: {} for name in ("InstanceNorm", "LayerNorm", "RMSNorm", "BatchNorm")}
NORMS["GroupNorm"] = {"num_groups": 4}


@pytest.mark.parametrize("name", NORMS)
def test_normalizations_of_sharded_images(name):
    def run(of):
        return lambda x: getattr(of, name)(8, **NORMS[name], rngs=nnx.Rngs(0))(x)

    with mesh():
        for spec in (P(None, None, "data"), P("data", "model")):
            assert_alike((run(jnn), run(nnx)), jax.device_put(random(4, 8, 8, 8), spec))


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_under_a_mask_where_heads_are_sharded(heads):
    mask = (random(4, 1, 8, 8, seed=4) > 0).at[:, :, 3].set(heads == 2)  # or else a hidden row
    with mesh():
        operands = (
            jax.device_put(random(4, 8, n, 16, seed=i), P("data", None, "model"))
            for i, n in enumerate((4, heads, heads))
        )
        mask = jax.device_put(mask, P("data"))
        both = jc.ops.dot_product_attention, jax.nn.dot_product_attention
        assert_alike([functools.partial(f, mask=mask) for f in both], *operands)


def test_a_layer_of_attention_whose_kernels_are_sharded_by_heads():
    def run(of, mask, x):
        layer = of.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
        for part in (layer.query, layer.key, layer.value):
            part.kernel.set_value(jax.device_put(part.kernel[...], P(None, "model")))
            part.bias.set_value(jax.device_put(part.bias[...], P("model")))
        layer.out.kernel.set_value(jax.device_put(layer.out.kernel[...], P("model")))
        graph, state = nnx.split(layer)

        def call(x, state):
            return nnx.merge(graph, state)(x, mask=mask, out_sharding=P("data"))

        y = jax.jit(call)(x, state)
        return y, jax.typeof(y).sharding.spec

    with mesh():
        x = jax.device_put(random(4, 8, 32), P("data"))
        for mask in (None, jax.device_put(random(4, 1, 8, 8) > 0, P("data"))):
            (got, spec), (want, wanted) = (run(of, mask, x) for of in (jnn, nnx))
            assert_near(got, want, 1e-5)
            assert spec == wanted
