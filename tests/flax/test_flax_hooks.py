"""lax's and Flax's functions in the places that Linen and NNX have for them."""

import functools
import inspect
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax_cases import WITHIN, close, loss, without_key_bias

import jax_cudnn as jc


def inputs(*shape, dtype="float32", seed=1):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def value_and_gradients(function, *arrays):
    """Of a sum; without that of a key's bias."""
    numbers = tuple(range(len(arrays)))
    step = jax.value_and_grad(lambda *arrays: loss(function, *arrays), numbers)
    return without_key_bias(jax.jit(step)(*arrays))


# -- attention_fn ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flaxs", [linen.dot_product_attention, nnx.dot_product_attention])
def test_arguments_are_flaxs(flaxs):
    """Linen gives a function only the arguments that its signature names."""
    ours = inspect.signature(jc.ops.attention_fn).parameters
    for name, parameter in inspect.signature(flaxs).parameters.items():
        assert name in ours
        if name != "promote_dtype":
            assert ours[name].default == parameter.default
    positional = [*inspect.signature(flaxs).parameters][:12]
    assert [*ours][:12] == positional


@pytest.mark.parametrize("flaxs", [linen.dot_product_attention, nnx.dot_product_attention])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_is_flaxs(flaxs, dtype):
    q, k, v = (inputs(2, 3, 8, 4, 16, dtype=dtype, seed=i) for i in range(3))
    bias = inputs(1, 1, 4, 8, 8, dtype=dtype, seed=4)
    mask = jnp.tril(jnp.ones((2, 1, 1, 8, 8), bool))
    named = {"bias": bias, "mask": jnp.broadcast_to(mask, (2, 3, 1, 8, 8)), "deterministic": True}
    if flaxs is nnx.dot_product_attention:
        named["bias"] = jnp.broadcast_to(bias, (2, 3, 4, 8, 8))  # NNX folds only what is whole
    want = value_and_gradients(functools.partial(flaxs, **named), q, k, v)
    got = value_and_gradients(functools.partial(jc.ops.attention_fn, **named), q, k, v)
    close(got, want, within=WITHIN[dtype])


def test_masks_broadcast_in_any_dimension_of_the_batch():
    q, k, v = (inputs(2, 3, 8, 4, 16, seed=i) for i in range(3))
    for shape in ((8, 8), (4, 8, 8), (1, 4, 8, 8), (1, 3, 1, 8, 8), (2, 1, 1, 1, 8)):
        mask = jax.random.bernoulli(jax.random.key(2), 0.8, shape).at[..., 0].set(True)
        want = linen.dot_product_attention(q, k, v, mask=mask)
        close(jc.ops.attention_fn(q, k, v, mask=mask), want)
        close(jc.ops.attention_fn(q, k, v, mask=mask.astype("float32")), want)


def test_dtypes_are_promoted_as_by_flax():
    q, k, v = inputs(8, 4, 16), inputs(8, 4, 16, dtype="bfloat16"), jnp.ones((8, 4, 16), "int32")
    assert jc.ops.attention_fn(q, k, v).dtype == "float32"
    assert jc.ops.attention_fn(v, v, v).dtype == "float32"
    assert jc.ops.attention_fn(q, k, v, dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        ("dropout that examples", {"dropout_rate": 0.5}),
        ("an einsum of", {"einsum_dot_general": jax.lax.dot_general}),
        (
            "an einsum of",
            {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum},
        ),
    ],
)
def test_what_cudnn_has_not_is_flaxs(reason, named, caplog):
    q, k, v = (inputs(2, 8, 4, 16, seed=i) for i in range(3))
    named = {**named, "dropout_rng": jax.random.key(0)}
    with caplog.at_level(logging.DEBUG, logger="jax_cudnn"):
        got = jc.ops.attention_fn(q, k, v, **named)
    assert reason in caplog.text
    close(got, linen.dot_product_attention(q, k, v, **named))
    with pytest.raises(jc.GraphError, match="does not take these arguments"):
        jc.ops.attention_fn(q, k, v, alibi=True, is_causal=True, **named)


def test_float64_is_flaxs():
    with jax.enable_x64(True):
        x = inputs(2, 8, 4, 16, dtype="float64")
        close(jc.ops.attention_fn(x, x, x), nnx.dot_product_attention(x, x, x))


@pytest.mark.parametrize(
    "band",
    [
        {"is_causal": True, "local_window_size": 2},
        {"local_window_size": (2, 1), "bottom_right": True},
        {"key_value_seq_lengths": np.asarray([3, 8], "int32"), "bottom_right": True},
        {"is_causal": True, "key_value_seq_lengths": np.asarray([6, 8], "int32")},
    ],
)
def test_bands_and_lengths_hold_where_flax_computes(band):
    q, k, v = inputs(2, 4, 4, 16), inputs(2, 8, 4, 16, seed=2), inputs(2, 8, 4, 16, seed=3)
    own = jc.ops.attention_fn(q, k, v, **band)
    with jax.numpy_rank_promotion("raise"):
        flaxs = jc.ops.attention_fn(q, k, v, **band, einsum_dot_general=jax.lax.dot_general)
    hidden = (own == 0).all((-1, -2))  # no key is seen: 0, where Flax gives the mean
    close(own, jnp.where(hidden[..., None, None], 0, flaxs))
    assert not hidden[1].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linens_layer_takes_it(dtype):
    made = functools.partial(
        linen.MultiHeadDotProductAttention, 4, dtype=dtype, qkv_features=32, precision="highest"
    )
    theirs, ours = made(), made(attention_fn=jc.ops.attention_fn)
    x, mask = inputs(2, 8, 32, dtype=dtype), linen.make_causal_mask(jnp.ones((2, 8)))
    params = theirs.init(jax.random.key(0), x)
    within = WITHIN[dtype]
    found = [
        value_and_gradients(lambda p, m=m: m.apply(p, x, mask=mask), params) for m in (ours, theirs)
    ]
    close(*found, within=within)
    sown = [
        m.apply(params, x, sow_weights=True, mutable=["intermediates"])[1] for m in (ours, theirs)
    ]
    close(*sown, within=within)


def test_linen_dropout_of_each_weight_is_ours():
    layer = linen.MultiHeadDotProductAttention(
        4, dropout_rate=0.5, broadcast_dropout=False, attention_fn=jc.ops.attention_fn
    )
    x = inputs(2, 8, 32)
    params = layer.init({"params": jax.random.key(0)}, x, deterministic=True)

    def run(seed):
        return layer.apply(params, x, deterministic=False, rngs={"dropout": jax.random.key(seed)})

    close(run(1), run(1))
    assert np.abs(run(1) - run(2)).max() > 1e-3


def test_linens_decoding_takes_it():
    x = inputs(2, 6, 32)
    found = []
    for named in ({}, {"attention_fn": jc.ops.attention_fn}):
        layer = linen.MultiHeadDotProductAttention(4, decode=True, **named)
        state = layer.init(jax.random.key(0), x)
        outs = []
        for i in range(6):
            out, cache = layer.apply(state, x[:, i : i + 1], mutable=["cache"])
            state = {**state, **cache}
            outs.append(out)
        found.append(jnp.concatenate(outs, 1))
    close(*found)


def test_nnx_layer_takes_it():
    theirs = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    ours = nnx.MultiHeadAttention(
        4, 32, decode=False, attention_fn=jc.ops.attention_fn, rngs=nnx.Rngs(0)
    )
    x = inputs(2, 8, 32)
    close(ours(x, is_causal=True), theirs(x, is_causal=True))
    for layer in (ours, theirs):
        layer.init_cache(x.shape)
    close(*(layer(x[:, :1], decode=True) for layer in (ours, theirs)))


# -- products and convolutions ---------------------------------------------------------------------

LINEN = {
    "Dense": (linen.Dense, (16,), "dot_general", (2, 3, 8)),
    "DenseGeneral": (linen.DenseGeneral, ((4, 5),), "dot_general", (2, 3, 8)),
    "DenseGeneral of batches": (
        functools.partial(linen.DenseGeneral, axis=(-1,), batch_dims=(0,)),
        (5,),
        "dot_general",
        (2, 3, 8),
    ),
    "Conv": (linen.Conv, (16, (3, 3)), "conv_general_dilated", (2, 9, 9, 8)),
    "Conv of strides": (
        functools.partial(linen.Conv, strides=2, feature_group_count=2, padding="VALID"),
        (16, (3,)),
        "conv_general_dilated",
        (2, 9, 8),
    ),
}


@pytest.mark.parametrize("name", LINEN)
def test_linens_layers_take_laxs_functions(name):
    cls, arguments, hook, shape = LINEN[name]
    theirs, ours = cls(*arguments), cls(*arguments, **{hook: getattr(jc.ops, hook)})
    x = inputs(*shape)
    params = theirs.init(jax.random.key(0), x)
    found = [value_and_gradients(m.apply, params, x) for m in (ours, theirs)]
    close(*found, within=1e-5)


NNX = {
    "Linear": (nnx.Linear, (8, 16), "dot_general", (2, 3, 8)),
    "LinearGeneral": (nnx.LinearGeneral, ((3, 8), (4, 5)), "dot_general", (2, 3, 8)),
    "Conv": (nnx.Conv, (8, 16, (3, 3)), "conv_general_dilated", (2, 9, 9, 8)),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx_layers_take_laxs_functions(name):
    cls, arguments, hook, shape = NNX[name]
    named = {"axis": (-2, -1)} if name == "LinearGeneral" else {}
    theirs = cls(*arguments, **named, rngs=nnx.Rngs(0))
    ours = cls(*arguments, **named, **{hook: getattr(jc.ops, hook)}, rngs=nnx.Rngs(0))
    x = inputs(*shape)

    found = [nnx.value_and_grad(loss, argnums=(0, 1))(layer, x) for layer in (ours, theirs)]
    close(*map(jax.tree.leaves, found), within=1e-5)


# -- plans and the GPU -----------------------------------------------------------------------------


def linens(**named):
    return linen.MultiHeadDotProductAttention(8, dtype="bfloat16", qkv_features=512, **named)


@pytest.mark.deviceless
def test_linens_training_is_planned_on_cudnn():
    layer = linens(attention_fn=functools.partial(jc.ops.attention_fn, is_causal=True))
    x = jax.ShapeDtypeStruct((4, 256, 512), "bfloat16")
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    with jc.target("H200"):
        plans = jc.plans(
            jax.grad(lambda p, x: layer.apply(p, x).astype("float32").sum()), params, x
        )
    assert [*plans] == ["dot_product_attention", "dot_product_attention (backward)"]
    assert all(plan.engine for plan in plans.values())


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_linens_training_on_the_gpu(masked):
    x = inputs(4, 256, 512, dtype="bfloat16")
    mask = linen.make_causal_mask(x[..., 0]) if masked else None
    params = linens().init(jax.random.key(0), x)
    found = [
        value_and_gradients(lambda p, m=m: m.apply(p, x, mask=mask), params)
        for m in (linens(attention_fn=jc.ops.attention_fn), linens())
    ]
    close(*found, within=WITHIN["bfloat16"])
