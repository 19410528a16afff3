"""Layers in float8: what they compute, their state through steps of training, errors."""

import absent_gpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_cudnn as jc
import jax_cudnn.flax as jnn

KINDS = ["current", "delayed", jc.ops.DelayedScaling.create(4, operation="matmul", margin=1.0)]


def linear(float8, **named):
    named = {"dtype": "bfloat16", **named}
    return jnn.Linear(32, 16, float8=float8, rngs=nnx.Rngs(0), **named)


def error(found, want):
    found, want = (np.asarray(a, "float64") for a in (found, want))
    return np.linalg.norm(found - want) / np.linalg.norm(want)


@pytest.mark.parametrize("kind", KINDS, ids=["current", "delayed", "state"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
def test_the_layer_is_flaxs_within_the_error_of_float8(kind, dtype, key):
    x = jax.random.normal(key, (4, 6, 32))
    ours = linear(kind, dtype=dtype, activation="gelu")
    ours.bias[...] = jnp.linspace(-1, 1, 16)
    flaxs = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    nnx.update(flaxs, nnx.state(ours, nnx.Param))

    def of(layer, finish=lambda y: y):
        graph, params, rest = nnx.split(layer, nnx.Param, ...)

        def loss(params, x):
            y = finish(nnx.merge(graph, params, rest, copy=True)(x))
            return (y.astype("float32") ** 2).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)

    ((_, y), found), ((_, want_y), want) = of(ours), of(flaxs, jax.nn.gelu)
    assert y.dtype == (dtype or "float32")
    assert 0.005 < error(y, want_y) < 0.08
    for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        assert a.dtype == "float32"
        assert error(a, b) < 0.12


@pytest.mark.parametrize("kind", KINDS, ids=["current", "delayed", "state"])
def test_training_with_donated_state(kind, key):
    """Also with one first state for several layers."""
    model = jnn.GatedMLP(16, 32, dtype="bfloat16", float8=kind, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: ((model(x) - x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    x = jax.random.normal(key, (64, 16))
    losses = [float(step(model, optimizer, x)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    if kind == "current":
        assert not nnx.state(model, jnn.ScalingState)
        return
    scaling = model.down.scaling.state()
    assert scaling.operation == "matmul"
    assert (scaling.amax_history[:4, :2] > 0).all()
    assert not scaling.amax_history[:, 2].any()
    most = scaling.amax_history.max(0)[:2]
    np.testing.assert_allclose(scaling.scale[:2], 448 / 2**scaling.margin / most, rtol=1e-6)


def test_the_gradient_of_the_state_is_the_next_state(key):
    model, x = linear("delayed"), jax.random.normal(key, (8, 32))
    kernel = float(jnp.abs(model.kernel[...]).max())
    assert model.scaling.amax_history[:2].tolist() == [[0, pytest.approx(kernel), 0], [0, 0, 0]]

    @nnx.jit
    def step(model, x):
        trained = nnx.DiffState(0, nnx.Any(nnx.Param, jnn.ScalingState))
        grads = nnx.grad(lambda model: 1e-3 * model(x).astype("float32").sum(), argnums=trained)(
            model
        )
        _, scaling = nnx.split_state(grads, nnx.Param, jnn.ScalingState)
        nnx.update(model, scaling)

    step(model, x)
    largest = [float(jnp.abs(x.astype("bfloat16")).max()), kernel, 0.001]
    np.testing.assert_allclose(model.scaling.amax_history[0], largest, rtol=1e-2)
    np.testing.assert_allclose(model.scaling.scale[2], 57344 / 0.001, rtol=1e-2)


def test_evaluation_keeps_the_state(key):
    model = linear("delayed")
    model.eval()
    before = model.scaling.amax_history[...]
    model(jax.random.normal(key, (8, 32)))
    assert np.array_equal(model.scaling.amax_history[...], before)
    model.train()
    model(jax.random.normal(key, (8, 32)))
    assert float(model.scaling.amax_history[0, 0]) > 0


def test_without_float8_nothing_changes(key):
    ours, flaxs = jnn.Linear(32, 16, rngs=nnx.Rngs(0)), nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    assert ours.float8 is None
    assert ours.scaling is None
    assert nnx.state(ours).keys() == nnx.state(flaxs).keys()
    swapped = jnn.accelerate(nnx.Sequential(flaxs, linear("delayed"))).layers
    assert swapped[0].float8 is None
    assert swapped[1].float8 == "delayed"
    again = jnn.Linear.of(swapped[1])
    assert again.scaling is swapped[1].scaling
    assert again.float8 == "delayed"


@pytest.mark.deviceless
def test_an_accelerated_model_keeps_its_products_in_float8(monkeypatch):
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    named = {"dtype": "bfloat16", "param_dtype": "bfloat16", "activation": "gelu"}

    def make():
        return nnx.Sequential(jnn.Linear(512, 1024, float8="delayed", rngs=nnx.Rngs(0), **named))

    model = nnx.eval_shape(make)
    graph, params, rest = nnx.split(jnn.accelerate(model), nnx.Param, ...)
    x = jax.ShapeDtypeStruct((2048, 512), "bfloat16")

    def step(params, rest, x):
        def loss(params, x):
            model = nnx.merge(graph, params, rest, copy=True)
            return model(x).astype("float32").sum(), nnx.state(model, jnn.ScalingState)

        return jax.grad(loss, (0, 1), has_aux=True)(params, x)

    text = absent_gpus.compiled(step, params, rest, x).as_text()
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert '"epilogue":"BIAS"' in text


def test_data_parallel_layers_have_one_scale(key):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model = linear("delayed", use_bias=False)
    x = jax.random.normal(key, (8, 32)).at[5, 3].set(50.0)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    want = nnx.jit(lambda model, x: model(x))(nnx.clone(model), x)
    with jax.set_mesh(mesh):
        found = nnx.jit(lambda model, x: model(x))(model, jax.device_put(x, spec))
    assert np.array_equal(found, want)
    assert float(model.scaling.amax_history[0, 0]) == 50.0


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"float8": "foo"}, "float8 is not valid.*\"delayed\".*'foo'"),
        ({"float8": True}, "float8 is not valid"),
        ({"float8": jc.ops.DelayedScaling.create(4)}, "operation='matmul'"),
        ({"float8": "current", "precision": "highest"}, "no precision.*leave both out"),
        ({"float8": "current", "dot_general": jc.ops.dot_general}, "no dot_general"),
    ],
)
def test_errors(named, words):
    with pytest.raises(jc.JaxCudnnError, match=f"(?s){words}"):
        linear(**named)


def test_float64_is_an_error():
    with jax.enable_x64(True), pytest.raises(jc.GraphTypeError, match="x has a dtype"):
        linear("current", dtype="float64")(jnp.ones((2, 32)))
