"""The forward of a model from ``jnn.accelerate``: what stands between its layers is found."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_cudnn as jc
import jax_cudnn.flax as jnn

pytestmark = pytest.mark.deviceless
B, T, W, N = 2, 128, 128, 2
HALF = {"dtype": jnp.bfloat16}


class Block(nnx.Module):
    """An MLP, attention by a function, and a normalization whose averages change."""

    def __init__(self, rngs, rate=0.0):
        self.up, self.down = (
            nnx.Linear(W, 4 * W, rngs=rngs, **HALF),
            nnx.Linear(4 * W, W, rngs=rngs, **HALF),
        )
        self.qkv = nnx.Linear(W, 3 * W, rngs=rngs, **HALF)
        self.norm = nnx.BatchNorm(W, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, *, scale=1.0):
        x = x + self.dropout(self.down(jax.nn.gelu(self.up(x))))
        q, k, v = (y.reshape(B, T, N, -1) for y in jnp.split(self.qkv(x), 3, axis=-1))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        return self.norm((x + scale * y).astype(jnp.float32))


@nnx.jit
def step(model, optimizer, x):
    loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2 * jnp.arange(W)).mean())(model)
    optimizer.update(model, gradients)
    return loss


def inputs():
    return jax.random.normal(jax.random.key(1), (B, T, W), jnp.bfloat16)


def close(got, want, tolerance=0.05):
    got, want = (np.asarray(x, "float32") for x in (got, want))
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want) + 1e-5


def test_what_stands_between_layers_is_found():
    model = jnn.accelerate(Block(nnx.Rngs(0)))
    assert isinstance(model, Block)
    graph, state = nnx.split(model)
    names = [*jc.plans(lambda s, x: nnx.merge(graph, s)(x), state, inputs(), gpus=["H200"])["H200"]]
    assert "dot_product_attention" in names
    (up,) = [
        plan
        for plan in jc.plans(lambda s, x: nnx.merge(graph, s)(x), state, inputs(), gpus=["H200"])[
            "H200"
        ].values()
        if "gelu" in str(plan.spec)
    ]
    assert up.spec.calls[0].node.method == "matmul"


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_training_changes_what_the_model_itself_would(rate):
    theirs, x = Block(nnx.Rngs(0), rate), inputs()
    ours = jnn.accelerate(nnx.clone(theirs))
    losses = []
    for model in (theirs, ours):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        with jc.target("H200"):
            losses.append([float(step(model, optimizer, x)) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=0.02)
    assert losses[0][0] != losses[0][2]
    for kind in (nnx.BatchStat, nnx.Param, nnx.RngState):
        pairs = zip(*(jax.tree.leaves(nnx.state(m, kind)) for m in (ours, theirs)), strict=True)
        for got, want in pairs:
            if kind is nnx.RngState:
                assert (jax.random.key_data(got) if got.dtype != "uint32" else got).tolist() == (
                    jax.random.key_data(want) if want.dtype != "uint32" else want
                ).tolist()
            else:
                close(got, want)


class Growing(nnx.Module):
    """Adds a Variable when it is called; and one that branches by a value."""

    def __init__(self, rngs, branches=False):
        self.linear, self.branches = nnx.Linear(W, W, rngs=rngs), branches

    def __call__(self, x):
        y = jax.nn.gelu(self.linear(x))
        if self.branches:
            return y if y.sum() > 0 else -y
        self.sow(nnx.Intermediate, "seen", y.mean())
        return y


@pytest.mark.parametrize("branches", [False, True])
def test_what_is_no_function_of_arrays_runs_as_it_is(branches, caplog):
    x = jnp.ones((4, W))
    theirs = Growing(nnx.Rngs(0), branches)
    ours = jnn.accelerate(nnx.clone(theirs))
    with jc.target("H200"), caplog.at_level("INFO", "jax_cudnn"):
        for _ in range(2):
            close(ours(x), theirs(x), 1e-3)
    assert "Growing is called as it is: its forward is not pure" in caplog.text
    if not branches:
        assert len(jax.tree.leaves(ours.seen)) == len(jax.tree.leaves(theirs.seen))


def test_it_is_copied_and_pickled_and_called_without_a_gpu():
    model, x = jnn.accelerate(Block(nnx.Rngs(0))), inputs()
    want = nnx.clone(model)(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), nnx.clone(model)):
        assert type(other) is type(model)
        np.testing.assert_array_equal(other(x), want)
    assert type(jnn.accelerate(model)) is type(model)
    assert type(jnn.accelerate(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))) is jnn.Linear
