"""The functions that Linen and NNX accept in place of those of lax and Flax."""

import inspect
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_cases import close, inputs, loss, without_key_bias

import jax_cudnn as jc


def value_and_gradients(function, *arrays):
    numbers = tuple(range(len(arrays)))
    step = jax.value_and_grad(lambda *arrays: loss(function, *arrays), numbers)
    return without_key_bias(jax.jit(step)(*arrays))


@pytest.mark.parametrize("flaxs", [linen.dot_product_attention, nnx.dot_product_attention])
def test_arguments_are_flaxs(flaxs):
    """Linen passes a function only the arguments in its signature."""
    ours = inspect.signature(jc.ops.attention_fn).parameters
    theirs = inspect.signature(flaxs).parameters
    assert [*ours][:12] == [*theirs][:12]
    for name in theirs.keys() - {"promote_dtype"}:
        assert ours[name].default == theirs[name].default


def test_dtypes_are_promoted_as_by_flax():
    q, k, v = inputs(8, 4, 16), inputs(8, 4, 16, dtype="bfloat16"), jnp.ones((8, 4, 16), "int32")
    assert jc.ops.attention_fn(q, k, v).dtype == "float32"
    assert jc.ops.attention_fn(v, v, v).dtype == "float32"
    assert jc.ops.attention_fn(q, k, v, dtype="float16").dtype == "float16"


def test_what_cudnn_has_not_is_flaxs(caplog):
    """Dropout that batch elements do not share; also with bands, and without rank promotion."""
    q, k, v = (inputs(2, 8, 4, 16, seed=i) for i in range(3))
    named = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    with caplog.at_level(logging.DEBUG, logger="jax_cudnn"):
        close(jc.ops.attention_fn(q, k, v, **named), linen.dot_product_attention(q, k, v, **named))
    assert "dropout mask shared by" in caplog.text
    with pytest.raises(jc.GraphError, match="does not support these arguments"):
        jc.ops.attention_fn(q, k, v, alibi=True, is_causal=True, **named)
    lengths = np.asarray([6, 8], "int32")
    band = {"is_causal": True, "local_window_size": 2, "key_value_seq_lengths": lengths}
    with jax.numpy_rank_promotion("raise"):
        flaxs = jc.ops.attention_fn(q, k, v, **band, einsum_dot_general=jax.lax.dot_general)
    close(jc.ops.attention_fn(q, k, v, **band), flaxs)


def test_linens_layer_takes_it():
    """With sown weights."""
    theirs, ours = (
        linen.MultiHeadDotProductAttention(4, **hook)
        for hook in ({}, {"attention_fn": jc.ops.attention_fn})
    )
    x, mask = inputs(2, 8, 32), linen.make_causal_mask(jnp.ones((2, 8)))
    params = theirs.init(jax.random.key(0), x)
    run = {"mask": mask, "sow_weights": True, "mutable": ["intermediates"]}
    close(ours.apply(params, x, **run), theirs.apply(params, x, **run))


STRIDED = {"strides": 2, "feature_group_count": 2, "padding": "VALID"}


@pytest.mark.parametrize(
    ("cls", "arguments", "named"),
    [
        (linen.Dense, (16,), {}),
        (linen.DenseGeneral, (5,), {"axis": (-1,), "batch_dims": (0,)}),
        (linen.Conv, (16, (3,)), STRIDED),
    ],
)
def test_linens_layers_take_laxs_functions(cls, arguments, named):
    hook = "conv_general_dilated" if cls is linen.Conv else "dot_general"
    x = inputs(2, 9, 8)
    layers = [cls(*arguments, **named, **own) for own in ({hook: getattr(jc.ops, hook)}, {})]
    params = layers[0].init(jax.random.key(0), x)
    close(*(value_and_gradients(layer.apply, params, x) for layer in layers), within=1e-5)
