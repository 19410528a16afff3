"""Layers under NNX's transforms, saved and loaded, and planned for a GPU in a training step."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax_cases import CASES, Case, assert_near

import jax_cudnn as jc
import jax_cudnn.flax as jnn

named = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


class Block(nnx.Module):
    """One layer of each kind, of a library. Of a bias before BatchNorm the gradient is rounding."""

    def __init__(self, of, rngs, channels=8):
        self.conv = of.Conv(channels, channels, (3, 3), use_bias=False, rngs=rngs)
        self.norm = of.BatchNorm(channels, rngs=rngs)
        self.up = of.Linear(channels, 2 * channels, rngs=rngs)
        self.down = of.LinearGeneral(2 * channels, channels, rngs=rngs)
        self.rows = of.LayerNorm(channels, rngs=rngs)

    def __call__(self, x):
        x = x + jax.nn.relu(self.norm(self.conv(x)))
        return x + self.down(jax.nn.gelu(self.up(self.rows(x))))


def pair(**named):
    return (Block(of, nnx.Rngs(0), **named) for of in (jnn, nnx))


def images(key, *lead):
    return jax.random.normal(key, (*lead, 2, 4, 4, 8))


# -- transforms ------------------------------------------------------------------------------------


@named
def test_layers_under_jit_vmap_and_remat(case: Case, key):
    """An ensemble of two, each on its own input, rematerialized in the derivative."""

    def of(cls):
        @nnx.vmap(in_axes=0)
        def make(key):
            return case.made(cls, key)

        return make(jax.random.split(jax.random.key(0), 2))

    @nnx.jit
    def run(layers, x):
        def loss(layers, x):
            y = nnx.vmap(nnx.remat(lambda layer, x: layer(x)))(layers, x)
            return (y.astype(jnp.float32) ** 2).mean(), y

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layers, x)

    x = jax.random.normal(key, (2, *case.shape))
    layers = [of(cls) for cls in (case.ours, case.ours.flaxs())]
    assert_near(*(run(layer, x) for layer in layers), 5e-5)
    assert_near(*(nnx.state(layer) for layer in layers), 5e-5)  # running statistics


def test_scan_over_layers(key):
    def of(library):
        @nnx.vmap(in_axes=0)
        def make(key):
            return Block(library, nnx.Rngs(key))

        return make(jax.random.split(jax.random.key(0), 3))

    @nnx.jit
    def run(blocks, x):
        def loss(blocks, x):
            y = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
                x, blocks
            )
            return (y**2).mean()

        return nnx.value_and_grad(loss)(blocks, x)

    blocks = [of(library) for library in (jnn, nnx)]
    assert_near(*(run(b, images(key)) for b in blocks), 1e-4)
    assert_near(*(nnx.state(b, nnx.BatchStat) for b in blocks), 1e-4)


OWN = {
    "GatedMLP": lambda rngs: jnn.GatedMLP(8, 16, rngs=rngs),
    "ConvNormAct": lambda rngs: jnn.ConvNormAct(8, 8, (3, 3), rngs=rngs),
}


@pytest.mark.parametrize("name", OWN)
def test_layers_that_flax_has_not_under_vmap_scan_and_remat(name, key):
    """Stacked layers run by scan are those layers one after the other."""
    layers = nnx.vmap(lambda key: OWN[name](nnx.Rngs(key)))(jax.random.split(key, 3))
    graph, state = nnx.split(layers)
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], state) for i in range(3)]

    def scanned(layers, x):
        call = nnx.remat(lambda x, layer: x + layer(x))
        y = nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)
        return (y**2).mean(), y

    def unrolled(layers, x):
        y = x
        for layer in layers:
            y = y + layer(y)
        return (y**2).mean(), y

    x, each = images(key), nnx.List([nnx.merge(graph, part) for part in parts])
    gradients, y = nnx.grad(scanned, has_aux=True)(layers, x)
    want, wanted = nnx.grad(unrolled, has_aux=True)(each, x)
    assert_near(y, wanted, 1e-5)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(want[i] for i in range(3)))
    assert_near(gradients, stacked, 1e-4)
    apart = [nnx.merge(graph, part)(x) for part in parts]
    assert_near(nnx.vmap(lambda layer: layer(x))(nnx.merge(graph, state)), jnp.stack(apart), 1e-5)


# -- training --------------------------------------------------------------------------------------


@nnx.jit
def step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def test_models_train_and_evaluate_alike(key):
    """Losses of steps, statistics, and results with running averages; with parameters that one
    model has learned the other one goes on."""
    x, y = images(key, 2)
    ours, theirs = pair()
    losses = []
    for model in (ours, theirs):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        losses.append([float(step(model, optimizer, x, y)) for _ in range(4)])
        model.eval()
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][-1] < losses[0][0]
    assert_near(nnx.state(ours), nnx.state(theirs), 1e-4)
    assert_near(ours(x), theirs(x), 1e-4)
    nnx.update(theirs, nnx.state(ours))
    assert_near(ours(y), theirs(y))


@pytest.mark.parametrize("momentum", [0.9, 0.5])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["batch_norm", "batch_norm relu"])
def test_running_statistics_are_flaxs(key, name, momentum, dtype):
    ours, theirs = CASES[name].both(momentum=momentum, dtype=dtype)
    x = 3 * jax.random.normal(key, (16, 3, 3, 8)) + 2
    for layer in (ours, theirs):
        layer(x)
        layer(x, use_running_average=True)  # changes nothing
        layer(2 * x)
        layer.eval()
        layer(x)
    assert_near(nnx.state(ours, nnx.BatchStat), nnx.state(theirs, nnx.BatchStat), 1e-5)
    assert_near(ours(x), theirs(x), 1e-5 if dtype is None else 2**-5)


def test_batch_norm_asks_which_mode():
    ours = jnn.BatchNorm(8, use_running_average=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="use_running_average"):
        ours(jnp.ones((2, 8)))
    view = nnx.view(ours, use_running_average=True)
    np.testing.assert_allclose(view(jnp.ones((2, 8))), 1, rtol=1e-4)


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_conv_norm_act_is_its_layers(key, averages, dtype):
    """One graph or two, against Flax's layers; leading batch dimensions, a residual."""
    conv = nnx.Conv(8, 16, (3, 3), 2, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0))
    norm = nnx.BatchNorm(16, dtype=dtype, use_running_average=averages, rngs=nnx.Rngs(0))
    block = jnn.ConvNormAct(
        8, 16, (3, 3), 2, dtype=dtype, use_running_average=averages, rngs=nnx.Rngs(1)
    )
    block.conv.activation = None
    nnx.update(block, nnx.State({"conv": nnx.state(conv), "norm": nnx.state(norm)}))
    kx, kr = jax.random.split(key)
    x, residual = images(kx, 3), jax.random.normal(kr, (3, 2, 2, 2, 16)).astype(dtype or "float32")
    want = jax.nn.relu(norm(conv(x)) + residual)
    got = block(x, residual=residual)
    assert got.dtype == want.dtype
    assert_near(got, want, 2e-5 if dtype is None else 2**-5)
    assert_near(nnx.state(block.norm), nnx.state(norm), 1e-5 if dtype is None else 2**-7)
    biased = jnn.ConvNormAct(8, 16, (3, 3), use_bias=True, rngs=nnx.Rngs(0))
    assert_near(biased(x), jax.nn.relu(nnx.BatchNorm(16, rngs=nnx.Rngs(0))(biased.conv(x))))


@pytest.mark.parametrize(("activation", "function"), [("silu", jax.nn.silu), ("gelu", jax.nn.gelu)])
@pytest.mark.parametrize("use_bias", [False, True])
def test_gated_mlp_is_its_layers(key, activation, function, use_bias):
    mlp = jnn.GatedMLP(8, 24, 4, activation=activation, use_bias=use_bias, rngs=nnx.Rngs(0))

    @functools.partial(nnx.jit, static_argnames="call")
    def run(mlp, x, call):
        return nnx.grad(lambda mlp, x: (call(mlp, x) ** 2).sum(), argnums=(0, 1))(mlp, x)

    x = jax.random.normal(key, (2, 3, 8))
    plain = run(mlp, x, call=lambda m, x: m.down(function(m.gate(x)) * m.up(x)))
    assert_near(run(mlp, x, call=lambda m, x: m(x)), plain, 5e-5)
    assert mlp(x[0, 0]).shape == (4,)


def test_a_gated_mlp_computes_through_layers_put_in_it(key):
    def mlp():
        return jnn.GatedMLP(4, 8, rngs=nnx.Rngs(0))

    def twice(x):
        return [m.down(jax.nn.silu(m.gate(x)) * m.up(x)) for m in made]

    class Doubled(jnn.Linear):
        def __call__(self, inputs, out_sharding=None):
            return 2 * super().__call__(inputs, out_sharding)

    x = jax.random.normal(key, (3, 4))
    made = [mlp(), mlp(), mlp()]
    made[0].up = nnx.LoRA(4, 2, 8, base_module=made[0].up, rngs=nnx.Rngs(1))
    made[1].up = Doubled.of(made[1].up)
    made[2].up.activation = "relu"
    assert_near([m(x) for m in made], twice(x))
    assert_near(made[1](x), 2 * mlp()(x))


def test_a_conv_norm_act_computes_through_layers_put_in_it(key):
    def block(**named):
        return jnn.ConvNormAct(8, 8, (3, 3), rngs=nnx.Rngs(0), **named)

    x = images(key)
    weighted, grouped, activated = block(), block(), block(activation="silu")
    weighted.conv = nnx.WeightNorm(weighted.conv, rngs=nnx.Rngs(0))
    grouped.norm = nnx.GroupNorm(8, 2, rngs=nnx.Rngs(0))
    activated.norm.activation = "relu"
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    assert_near(weighted(x), jax.nn.relu(norm(weighted.conv(x))))
    assert_near(grouped(x), jax.nn.relu(grouped.norm(grouped.conv(x))))
    assert_near(activated(x), jax.nn.silu(jax.nn.relu(norm(activated.conv(x)))))


@pytest.mark.parametrize("averages", [False, True])
def test_a_residual_of_conv_norm_act_broadcasts_and_widens(key, averages):
    block = jnn.ConvNormAct(
        8, 8, (3, 3), dtype="bfloat16", use_running_average=averages, rngs=nnx.Rngs(0)
    )
    x, y = images(key), block.norm(block.conv(images(key)))
    for shape in ((8,), (4, 8), y.shape):
        residual = jax.random.normal(key, shape)
        got = block(x, residual=residual)
        assert got.dtype == jnp.float32
        assert_near(got, jax.nn.relu(y + residual), 2**-6)


def test_conv_norm_act_of_layers_shares_and_keeps_what_they_have(key):
    class Mine(jnn.ConvNormAct):
        def __init__(self, features, rngs):
            super().__init__(features, features, 3, rngs=rngs)

    conv = jnn.Conv(8, 8, (3, 3), use_bias=False, activation="gelu", rngs=nnx.Rngs(0))
    norm = jnn.BatchNorm(8, activation="silu", rngs=nnx.Rngs(0))
    made = Mine.of(conv, norm)
    assert (made.conv.activation, made.activation, type(made)) == ("gelu", "silu", Mine)
    assert made.conv.kernel is conv.kernel
    assert made.norm.mean is norm.mean
    x = images(key)
    assert_near(nnx.jit(lambda m, x: m(x))(made, x), norm(conv(x)))
    assert Mine.of(conv, norm, "relu").activation == "relu"
    assert norm.activation == "silu"
    derived = type("Derived", (nnx.Conv,), {})(8, 8, (3, 3), rngs=nnx.Rngs(0))
    with pytest.raises(jc.GraphError, match="Derived"):
        jnn.ConvNormAct.of(derived, norm)


# -- checkpoints -----------------------------------------------------------------------------------


def attending(of):
    """A layer with a cache of two tokens."""
    layer = of.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((1, 4, 8))
    for _ in range(2):
        layer(jnp.ones((1, 1, 8)))
    return layer


SAVED = {
    "layers": pair,
    "accelerated": lambda: (jnn.accelerate(Block(nnx, nnx.Rngs(0)))[0], Block(nnx, nnx.Rngs(1))),
    "cache": lambda: map(attending, (jnn, nnx)),
}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("back", [False, True])
def test_orbax_saves_one_and_loads_the_other(tmp_path, name, back):
    saved, loaded = reversed(tuple(SAVED[name]())) if back else SAVED[name]()
    nnx.update(saved, jax.tree.map(lambda x: x + 1, nnx.state(saved, nnx.Param)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", nnx.state(saved))
        checkpointer.wait_until_finished()
        nnx.update(loaded, checkpointer.restore(tmp_path / "saved", nnx.state(loaded)))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(saved), nnx.state(loaded))


# -- plans -----------------------------------------------------------------------------------------

BF16 = {"dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
STEPS = {
    "Conv": (lambda: jnn.Conv(64, 64, (3, 3), activation="relu", **BF16), (8, 28, 28, 64)),
    "Linear": (lambda: jnn.Linear(256, 1024, activation="gelu", **BF16), (512, 256)),
    "BatchNorm": (lambda: jnn.BatchNorm(64, activation="relu", **BF16), (32, 28, 28, 64)),
    "LayerNorm": (lambda: jnn.LayerNorm(1024, **BF16), (4096, 1024)),
    "GatedMLP": (lambda: jnn.GatedMLP(512, 2048, **BF16), (2048, 512)),
    "ConvNormAct": (lambda: jnn.ConvNormAct(64, 64, (3, 3), **BF16), (8, 28, 28, 64)),
}


def training(layer):
    """Result and gradients as a function of arrays, and its first argument."""
    graphdef, state = nnx.split(layer)

    def loss(state, x):
        y = nnx.merge(graphdef, state)(x)
        return (y.astype(jnp.float32) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1)), state


@pytest.mark.deviceless
@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_plans_on_cudnn(name):
    make, shape = STEPS[name]
    run, state = training(make())
    with jc.target("H200"), jc.implementation("split"):
        found = jc.plans(run, state, jax.ShapeDtypeStruct(shape, "bfloat16"))
    assert any("(backward)" in graph for graph in found)
    for graph, plan in found.items():
        assert any(segment.plan is not None for segment in plan.segments), (graph, plan)


@pytest.mark.deviceless
def test_a_gate_is_the_epilogue_of_the_second_product():
    mlp = jnn.GatedMLP(512, 2048, **BF16)
    graphdef, state = nnx.split(mlp)
    with jc.target("H200"):
        found = jc.plans(
            lambda state, x: nnx.merge(graphdef, state)(x),
            state,
            jax.ShapeDtypeStruct((2048, 512), "bfloat16"),
        )
    assert [*found] == ["matmul", "gated_mlp", "matmul 2"]
    assert all(len(plan.segments) == 1 and plan.segments[0].plan for plan in found.values())


@pytest.mark.deviceless
def test_inference_of_a_conv_norm_act_is_one_plan():
    block = jnn.ConvNormAct(64, 64, (3, 3), use_running_average=True, **BF16)
    graphdef, state = nnx.split(block)
    with jc.target("H200"):
        found = jc.plans(
            lambda state, x: nnx.merge(graphdef, state)(x),
            state,
            jax.ShapeDtypeStruct((8, 28, 28, 64), "bfloat16"),
        )
    ((segment,),) = (plan.segments for plan in found.values())
    assert segment.plan is not None


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_on_the_gpu_is_that_of_the_reference(name, key):
    make, shape = STEPS[name]
    run, state = training(make())
    x = jax.random.normal(key, shape).astype(jnp.bfloat16)
    results = []
    for implementation in (contextlib.nullcontext(), jc.implementation("xla")):
        with implementation:
            results.append(jax.jit(run)(state, x))
    for got in results[:-1]:
        assert_near(got, results[-1], 2**-5)
