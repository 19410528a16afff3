"""Normalizations and attention of arrays that a mesh with explicit axes shards: as Flax's."""

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
    return jax.set_mesh(
        jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    )


def gradients(function, *arrays):
    """Those of a sum of sines of a result, and the result."""

    def loss(*arrays):
        y = function(*arrays)
        return jax.numpy.sin(y).sum(), y

    return jax.jit(jax.grad(loss, (*range(len(arrays)),), has_aux=True))(*arrays)


def assert_alike(got, want, within=1e-5):
    assert_near(got, want, within)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert jax.typeof(x).sharding == jax.typeof(y).sharding


NORMS = {
    "GroupNorm": {"num_features": 8, "num_groups": 4},
    "InstanceNorm": {"num_features": 8},
    "LayerNorm": {"num_features": 8},
    "RMSNorm": {"num_features": 8},
    "BatchNorm": {"num_features": 8},
}


@pytest.mark.parametrize("spec", [P(None, None, "data"), P("data", "model")], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_normalizations_of_sharded_images(name, spec):
    def run(of, x):
        return gradients(lambda x: getattr(of, name)(**NORMS[name], rngs=nnx.Rngs(0))(x), x)

    with mesh():
        x = jax.device_put(random(4, 8, 8, 8), spec)
        assert_alike(run(jnn, x), run(nnx, x))


@pytest.mark.parametrize(("heads", "hidden"), [(4, True), (2, False), (2, True)])
def test_attention_under_a_mask_where_heads_are_sharded(heads, hidden):
    spec = P("data", None, "model")
    mask = random(4, 1, 8, 8, seed=4) > 0
    mask = mask.at[:, :, 3].set(not hidden)  # jax.nn's gradient of a row of no keys is another
    with mesh():
        q, k, v = (
            jax.device_put(random(4, 8, n, 16, seed=i), spec)
            for i, n in enumerate((4, heads, heads))
        )
        mask = jax.device_put(mask, P("data"))
        got, want = (
            gradients(lambda q, k, v, run=run: run(q, k, v, mask=mask), q, k, v)
            for run in (jc.ops.dot_product_attention, jax.nn.dot_product_attention)
        )
        assert_alike(got, want)


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
