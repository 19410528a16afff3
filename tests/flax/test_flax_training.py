"""Training of models, layers that Flax does not have, and what of a step runs on cuDNN."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax_cases import assert_near

import jax_cudnn as jc
import jax_cudnn.flax as jnn


class Block(nnx.Module):
    """Layers of a library. The gradient of a bias before BatchNorm would be only rounding."""

    def __init__(self, of, key):
        rngs = nnx.Rngs(key)
        self.conv = of.Conv(8, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = of.BatchNorm(8, rngs=rngs)
        self.up = of.Linear(8, 16, rngs=rngs)
        self.down = of.LinearGeneral(16, 8, rngs=rngs)
        self.rows = of.LayerNorm(8, rngs=rngs)

    def __call__(self, x):
        x = x + jax.nn.relu(self.norm(self.conv(x)))
        return x + self.down(jax.nn.gelu(self.up(self.rows(x))))


def images(key, *lead):
    return jax.random.normal(key, (*lead, 2, 4, 4, 8))


@pytest.mark.long
def test_stacked_layers_train_and_evaluate_alike(key):
    """Losses of steps with vmap, scan and remat; statistics; results with running averages."""

    @nnx.jit
    def step(blocks, optimizer, x):
        def loss(blocks):
            call = nnx.remat(lambda x, block: block(x))
            y = nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks)
            return ((y - 1) ** 2).mean()

        value, gradients = nnx.value_and_grad(loss)(blocks)
        optimizer.update(blocks, gradients)
        return value

    found = []
    for library in (jnn, nnx):
        blocks = nnx.vmap(functools.partial(Block, library))(jax.random.split(key, 2))
        optimizer = nnx.Optimizer(blocks, optax.sgd(0.1), wrt=nnx.Param)
        losses = [step(blocks, optimizer, images(key)) for _ in range(4)]
        assert losses[-1] < losses[0]
        blocks.eval()
        results = nnx.jit(nnx.vmap(lambda block, x: block(x)))(blocks, images(key, 2))
        found.append((losses, nnx.state(blocks), results))
    assert_near(*found, 1e-4)


@pytest.mark.parametrize(("averages", "dtype"), [(False, None), (True, "bfloat16")])
def test_conv_norm_act_is_its_layers(key, averages, dtype):
    """One graph or two, compared with Flax's layers; leading batch dimensions, residuals."""
    conv = nnx.Conv(8, 16, (3, 3), 2, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))
    norm = nnx.BatchNorm(16, dtype=dtype, use_running_average=averages, rngs=nnx.Rngs(0))
    ours = jnn.ConvNormAct.of(conv, nnx.clone(norm), "relu")
    assert ours.conv.kernel is conv.kernel
    x, shape = images(key, 3), (3, 2, 2, 2, 16)
    whole = jax.random.normal(key, shape)
    for residual in (whole.astype(dtype or "float32"), whole, whole[0, 0, 0], 2.0):
        got = ours(x, residual=residual)
        want = jax.nn.relu(norm(conv(x)) + jnp.asarray(residual))
        assert got.dtype == want.dtype
        assert_near(got, want, 2e-5 if dtype is None else 2**-5)
        assert_near(nnx.state(ours.norm), nnx.state(norm), 1e-5 if dtype is None else 2**-7)


def test_blocks_compute_through_layers_put_in_them(key):
    x, norm = images(key), nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    weighted, grouped = (jnn.ConvNormAct(8, 8, (3, 3), rngs=nnx.Rngs(0)) for _ in range(2))
    weighted.conv = nnx.WeightNorm(weighted.conv, rngs=nnx.Rngs(0))
    grouped.norm = nnx.GroupNorm(8, 2, rngs=nnx.Rngs(0))
    assert_near(weighted(x), jax.nn.relu(norm(weighted.conv(x))))
    assert_near(grouped(x), jax.nn.relu(grouped.norm(grouped.conv(x))))
    mlp = jnn.GatedMLP(8, 24, rngs=nnx.Rngs(0))
    mlp.up = nnx.LoRA(8, 2, 24, base_module=mlp.up, rngs=nnx.Rngs(1))
    assert_near(mlp(x), mlp.down(jax.nn.silu(mlp.gate(x)) * mlp.up(x)))


def test_gated_mlp_is_its_layers(key):
    mlp = jnn.GatedMLP(8, 24, 4, activation="gelu", use_bias=True, rngs=nnx.Rngs(0))

    def derived(call):
        loss = nnx.grad(lambda mlp, x: (call(mlp, x) ** 2).sum(), argnums=(0, 1))
        return nnx.jit(loss)(mlp, jax.random.normal(key, (2, 3, 8)))

    plain = derived(lambda m, x: m.down(jax.nn.gelu(m.gate(x)) * m.up(x)))
    assert_near(derived(lambda m, x: m(x)), plain, 5e-5)
    assert mlp(jnp.ones(8)).shape == (4,)


BF16 = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
HEADS = {"num_kv_heads": 2, "is_causal": True, "use_bias": False, "decode": False}
STEPS = {
    "Conv": (lambda: jnn.Conv(64, 64, (3, 3), activation="relu", **BF16), (8, 28, 28, 64)),
    "Linear": (lambda: jnn.Linear(256, 1024, activation="gelu", **BF16), (512, 256)),
    "BatchNorm": (lambda: jnn.BatchNorm(64, activation="relu", **BF16), (32, 28, 28, 64)),
    "LayerNorm": (lambda: jnn.LayerNorm(1024, **BF16), (4096, 1024)),
    "GatedMLP": (lambda: jnn.GatedMLP(512, 2048, **BF16), (2048, 512)),
    "ConvNormAct": (lambda: jnn.ConvNormAct(64, 64, (3, 3), **BF16), (8, 28, 28, 64)),
    "Attention": (lambda: jnn.MultiHeadAttention(8, 512, **HEADS, **BF16), (4, 256, 512)),
}


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("name", "graphs"),
    [("GatedMLP", ["matmul", "gated_mlp", "matmul 2"]), ("ConvNormAct", ["conv"])],
)
def test_each_graph_of_a_layer_is_one_plan(name, graphs):
    make, shape = STEPS[name]
    layer = make()
    layer.eval()
    with jc.target("H200"):
        found = jc.plans(lambda x: layer(x), jax.ShapeDtypeStruct(shape, "bfloat16"))
    assert [*found] == graphs
    assert all(len(plan.segments) == 1 and plan.segments[0].plan for plan in found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_on_the_gpu_is_that_of_the_reference(name, key):
    make, shape = STEPS[name]
    graphdef, state = nnx.split(make())
    x = jax.random.normal(key, shape).astype(jnp.bfloat16)

    def loss(state, x):
        return (nnx.merge(graphdef, state)(x).astype(jnp.float32) ** 2).mean()

    found = []
    for implementation in ("split", "xla"):
        with jc.implementation(implementation):
            found.append(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(state, x))
    assert_near(*found, 2**-5)
