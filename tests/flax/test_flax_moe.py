"""MoE against a loop over tokens and experts in NumPy."""

import contextlib
import re

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from absent_gpus import compiled, h200s
from flax import nnx
from helpers import placed, whole
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
import jax_cudnn.flax as jnn


def looped(moe, x):
    """The result and the loss, in float64."""
    gate, up, down, router = (
        np.asarray(p[...]).astype("float64")
        for p in (moe.gate, moe.up, moe.down, moe.router.kernel)
    )
    tokens = np.asarray(x).astype("float64").reshape(-1, x.shape[-1])
    y, counts = np.zeros_like(tokens), np.zeros(moe.num_experts)
    logits = tokens @ router
    for i, token in enumerate(tokens):
        best = np.argsort(-logits[i])[: moe.top_k]
        weights = np.exp(logits[i, best])
        for expert, weight in zip(best, weights / weights.sum(), strict=True):
            gated = token @ gate[expert]
            y[i] += weight * (gated / (1 + np.exp(-gated)) * (token @ up[expert])) @ down[expert]
            counts[expert] += 1
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return y.reshape(x.shape), moe.num_experts * (counts / counts.sum() * shares.mean(0)).sum()


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_layer_is_a_loop(top_k, key):
    moe = jnn.MoE(8, 12, 4, top_k, rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (2, 5, 8))
    y, loss = nnx.jit(lambda m, x: m(x, return_loss=True))(moe, x)
    want, balance = looped(moe, x)
    assert np.allclose(y, want, atol=1e-5)
    assert np.allclose(loss, balance, rtol=1e-5)
    assert np.array_equal(moe(x), y)
    assert moe(jnp.ones(8)).shape == (8,)


def test_dtypes(key):
    moe = jnn.MoE(8, 12, 4, 2, dtype="bfloat16", param_dtype="float32", rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (10, 8), "bfloat16")
    assert moe(x).dtype == "bfloat16"
    assert moe.gate[...].dtype == "float32"
    assert np.allclose(moe(x).astype("float32"), looped(moe, x)[0], atol=0.05)


def test_gradients_are_differences(key):
    moe = jnn.MoE(8, 12, 4, 2, rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (10, 8))
    graph, state = nnx.split(moe)

    def loss(state, x):
        y, balance = nnx.merge(graph, state)(x, return_loss=True)
        return (y**2).sum() + balance

    jax.test_util.check_grads(loss, (state, x), 1, ["rev"], atol=0.05, rtol=0.05, eps=1e-3)
    assert all(jnp.abs(g).max() > 0 for g in jax.tree.leaves(jax.grad(loss)(state, x)))


def test_more_experts_for_a_token_than_there_are():
    with pytest.raises(jc.GraphError, match="at most num_experts=2"):
        jnn.MoE(8, 12, 2, 3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("activation", ["gelu", None, jax.nn.silu])
def test_biases_and_activations(activation, key):
    moe = jnn.MoE(8, 12, 4, 2, activation=activation, use_bias=True, rngs=nnx.Rngs(0))
    keys = jax.random.split(key, 4)
    names = ("gate_bias", "up_bias", "down_bias")
    for name, one in zip(names, keys, strict=False):
        setattr(moe, name, nnx.Param(jax.random.normal(one, getattr(moe, name)[...].shape)))
    x = jax.random.normal(keys[3], (10, 8))
    best, chosen = jax.lax.top_k(moe.router(x), 2)
    gate, up, down, *biases = (getattr(moe, n)[...] for n in ("gate", "up", "down", *names))

    def all_experts(x):
        named = {"gelu": jax.nn.gelu, None: lambda x: x}.get(activation, jax.nn.silu)
        gated = named(jnp.einsum("tk,ekh->teh", x, gate) + biases[0])
        hidden = gated * (jnp.einsum("tk,ekh->teh", x, up) + biases[1])
        return jnp.einsum("teh,ehk->tek", hidden, down) + biases[2]

    each = jnp.take_along_axis(all_experts(x), chosen[..., None], 1)
    want = (each * jax.nn.softmax(best)[..., None]).sum(1)
    assert np.allclose(moe(x), want, atol=1e-4)


KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
SHAPES = {"experts": ("expert",), "data x experts": ("data", "expert")}


def meshed(names, kind, devices=None):
    devices = np.array(jax.devices()[:4] if devices is None else devices)
    kinds, grid = (KINDS[kind],) * len(names), (-1, 2)[: len(names)]
    return jax.sharding.Mesh(devices.reshape(grid), names, axis_types=kinds)


def loss_of(graph, state, x):
    y, balance = nnx.merge(graph, state)(x, return_loss=True)
    return jnp.square(y).sum() + balance, (y, balance)


def on_experts(path, _):
    return P() if "router" in jax.tree_util.keystr(path) else P("expert")


@pytest.mark.several_gpus
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2, 4 or more devices")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [(4, 6), (3,)], ids=str)
@jax.default_matmul_precision("highest")
def test_experts_on_devices_compute_what_one_device_does(shape, kind, tokens, key):
    """Values, both losses and all gradients; 3 tokens do not divide over 4 devices."""
    one = jnn.MoE(8, 12, 8, 3, use_bias=True, rngs=nnx.Rngs(0))
    many = jnn.MoE(8, 12, 8, 3, use_bias=True, expert_axis="expert", rngs=nnx.Rngs(0))
    x = jax.random.normal(key, (*tokens, 8))
    derive = jax.jit(jax.value_and_grad(loss_of, (1, 2), has_aux=True), static_argnums=0)
    want = derive(*nnx.split(one), x)
    mesh = meshed(shape, kind)
    graph, state = nnx.split(many)
    with jax.set_mesh(mesh):
        state = jax.tree_util.tree_map_with_path(
            lambda p, w: placed(w, NamedSharding(mesh, on_experts(p, w))), state
        )
        x = placed(x, NamedSharding(mesh, P(mesh.axis_names[0]) if tokens[0] == 4 else P()))
        got = derive(graph, state, x)
        eager = nnx.merge(graph, state)(x)
    pairs = zip(*map(jax.tree.leaves, ((got, eager), (want, want[0][1][0]))), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(whole(a, b), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [None, "expert"])
@pytest.mark.parametrize("sharded", ["both", "tokens", "weights", "neither"])
@pytest.mark.parametrize("is_set", [True, False])
def test_explicit_axes_of_tokens_weights_or_neither(is_set, sharded, axis, key):
    moe, x = jnn.MoE(8, 12, 8, 3, rngs=nnx.Rngs(0)), jax.random.normal(key, (4, 6, 8))
    want, mesh = moe(x), meshed(("data", "expert"), "explicit")
    graph, state = nnx.split(jnn.MoE(8, 12, 8, 3, expert_axis=axis, rngs=nnx.Rngs(0)))
    if sharded in ("both", "weights"):
        state = jax.device_put(state, NamedSharding(mesh, P()))
    if sharded in ("both", "tokens"):
        x = jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        if axis and not is_set and sharded in ("weights", "neither"):
            with pytest.raises(jc.GraphError, match="set_mesh"):
                nnx.merge(graph, state)(x)
            return
        got = nnx.merge(graph, state)(x)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    if sharded in ("both", "tokens"):
        assert got.sharding.spec == P("data", None, None)


def test_in_a_shard_map_it_takes_what_the_device_has(key):
    one = jnn.MoE(8, 12, 8, 2, rngs=nnx.Rngs(0))
    graph, state = nnx.split(jnn.MoE(8, 12, 8, 2, expert_axis="expert", rngs=nnx.Rngs(0)))
    x = jax.random.normal(key, (12, 8))

    def mapped(specs):
        return jax.shard_map(
            lambda state, x: nnx.merge(graph, state)(x),
            mesh=jax.sharding.Mesh(jax.devices()[:4], "expert"),
            in_specs=(specs, P("expert")),
            out_specs=P("expert"),
        )

    held = mapped(jax.tree_util.tree_map_with_path(on_experts, state))
    np.testing.assert_allclose(jax.jit(held)(state, x), one(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(
        jc.GraphError, match=r"2 of the 8 experts(?s:.*)\(8, 8, 12\)(?s:.*)in_specs"
    ):
        mapped(P())(state, x)


@pytest.mark.deviceless
@pytest.mark.parametrize("axis", ["expert", None])
def test_a_step_on_four_gpus_moves_tokens(axis):
    """Weights stay. Without the axis XLA gathers weights, and adds up rows of all tokens."""
    mesh = meshed(("expert",), "automatic", h200s(4))
    moe = jnn.MoE(128, 256, 8, 2, dtype="bfloat16", expert_axis=axis, rngs=nnx.Rngs(0))
    graph, state = nnx.split(moe)

    def aval(path, x):
        sharding = NamedSharding(mesh, on_experts(path, x))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    avals = jax.tree_util.tree_map_with_path(aval, state)
    sharding = NamedSharding(mesh, P("expert"))
    x = jax.ShapeDtypeStruct((16, 64, 128), "bfloat16", sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        step = jax.value_and_grad(lambda state, x: loss_of(graph, state, x)[0], (0, 1))
        text = compiled(step, avals, x, mesh=mesh).as_text()
    lines = [re.sub(r"\{.*?\}", "", line) for line in text.splitlines()]

    def results(kind):
        return " ".join(re.findall(rf"= (.*?) {kind}(?:-start)?\(", "\n".join(lines)))

    assert "s32" in results("all-gather")  # numbers of rows
    gathers = re.search(r"bf16\[8,(128,256|256,128)\]", results("all-gather")) is not None
    sums = f"bf16[{16 * 64 * 2},128]" in results("all-reduce")
    assert (gathers, sums) == ((False, False) if axis else (True, True))
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", text)) == (4 if axis else 0)


def test_experts_that_do_not_fit_the_mesh():
    moe = jnn.MoE(8, 12, 6, 2, expert_axis="expert", rngs=nnx.Rngs(0))
    with pytest.raises(jc.GraphError, match=r"jax\.set_mesh"):
        moe(jnp.ones((4, 8)))
    with jax.set_mesh(meshed(("expert",), "automatic")):
        with pytest.raises(jc.GraphError, match="multiple of 4"):
            moe(jnp.ones((4, 8)))
    with pytest.raises(jc.GraphError, match="unknown activation"):
        jnn.MoE(8, 12, 6, 2, activation="swiglu", rngs=nnx.Rngs(0))


def test_a_batch_of_nothing():
    moe = jnn.MoE(8, 32, num_experts=4, top_k=2, rngs=nnx.Rngs(0))
    y, loss = moe(jnp.zeros((0, 5, 8)), return_loss=True)
    assert y.shape == (0, 5, 8)
    assert loss == 0
    with pytest.raises(jc.GraphError, match="'xla', 'mosaic'"):
        jnn.MoE(8, 32, num_experts=4, top_k=2, implementation="cudnn", rngs=nnx.Rngs(0))
