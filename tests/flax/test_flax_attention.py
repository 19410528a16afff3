"""MultiHeadAttention: Flax's results, gradients and errors; one product where kernels are whole."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import WITHIN, close, loss, without_key_bias
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_cudnn as jc
import jax_cudnn.flax as jnn

BATCH, LENGTH, FEATURES = 2, 8, 32


def pair(dtype="float32", **named):
    """Flax's layer, and ours with its Variables."""
    named = {"decode": False, "dtype": dtype, "param_dtype": dtype, **named}
    theirs = nnx.MultiHeadAttention(4, FEATURES, **named, rngs=nnx.Rngs(0))
    return theirs, jnn.MultiHeadAttention.of(theirs)


def inputs(*shape, dtype="float32", seed=1):
    return jax.random.normal(jax.random.key(seed), shape or (BATCH, LENGTH, FEATURES), dtype)


def derived(layer, *arrays, **call):
    step = nnx.jit(nnx.value_and_grad(functools.partial(loss, **call)))
    return without_key_bias(step(layer, *arrays))


@pytest.mark.parametrize("dtype", WITHIN)
def test_results_and_gradients_are_flaxs(dtype):
    sizes = {"qkv_features": 48, "out_features": 8, "in_kv_features": 16, "use_bias": False}
    layers = pair(dtype, num_kv_heads=2, normalize_qk=True, **sizes)
    q, k = inputs(dtype=dtype), inputs(BATCH, 10, 16, dtype=dtype, seed=2)
    close(*(derived(layer, q, k) for layer in reversed(layers)), within=WITHIN[dtype])


def test_masks_and_causality_are_flaxs():
    """Also padding: nnx.make_attention_mask hides all keys from a padded query."""
    theirs, ours = pair()
    x, i = inputs(3, LENGTH, FEATURES), jnp.arange(LENGTH)
    mask = jax.random.bernoulli(jax.random.key(3), 0.7, (3, 1, LENGTH, LENGTH)) | (i[:, None] == i)
    valid = i >= jnp.array([3, 0, 1])[:, None]
    padded = nnx.make_attention_mask(valid, valid, dtype=bool)
    for call in ({"mask": mask.astype("float32")}, {"mask": padded, "is_causal": True}):
        close(derived(ours, x, **call), derived(theirs, x, **call), within=1e-5)


def test_own_arguments_are_masks_and_a_call_decides_what_is_causal():
    theirs, _ = pair()
    x, i = inputs(), jnp.arange(LENGTH)
    own = {"is_causal": True, "local_window_size": 3}
    ours = jnn.MultiHeadAttention(4, FEATURES, **own, decode=False, rngs=nnx.Rngs(0))
    nnx.update(ours, nnx.state(theirs))
    want = theirs(x, mask=((i[:, None] >= i) & (i[:, None] - i <= 3))[None, None])
    close(ours(x), want)
    sown, _ = nnx.capture(ours, nnx.Intermediate)(x, sow_weights=True)  # by Flax
    close(sown, want)
    ours.local_window_size = None
    close(ours(x, is_causal=False), theirs(x))


@pytest.mark.parametrize("shared", [True, False])
def test_dropout(shared):
    theirs, ours = pair(dropout_rate=0.5, broadcast_dropout=shared, deterministic=False)
    x = inputs()
    close(ours(x, deterministic=True), theirs(x, deterministic=True))
    results = [layer(x, rngs=nnx.Rngs(dropout=7)) for layer in (ours, theirs)]
    if shared:  # Flax draws it
        close(*results)
    else:
        assert np.abs(results[0] - theirs(x, deterministic=True)).max() > 1e-2
        close(results[0], ours(x, rngs=nnx.Rngs(dropout=7)))


def test_functions_of_ones_own_and_precision():
    theirs, ours = pair()
    x = inputs()

    def doubled(query, key, value, **named):
        return 2 * nnx.dot_product_attention(query, key, value, **named)

    layers = pair(attention_fn=doubled)
    close(*(layer(x) for layer in layers))
    layers[1].local_window_size = 2  # which is not ignored
    with pytest.raises(jc.GraphError, match=r"no local_window_size(?s:.)*custom attention_fn"):
        layers[1](x)
    scaled = pair(attention_fn=functools.partial(jc.ops.attention_fn, scale=8**-0.5))[1]
    assert scaled.unfused is None
    close(scaled(x), theirs(x))
    precise = pair(precision="highest")[1]
    assert "precision='highest'" in str(jax.make_jaxpr(lambda x: precise(x))(x))
    assert type(ours.out) is type(ours.query) is jnn.LinearGeneral


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax has no RoPE")
def test_rotary_embeddings():
    rotating = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    theirs, ours = pair(attention_fn=rotating)
    assert ours.unfused is None
    close(ours(inputs(), is_causal=True), theirs(inputs(), is_causal=True))
    ours.local_window_size = 2
    for call in ({"decode": True}, {"input_positions": np.arange(LENGTH)}):
        with pytest.raises(jc.GraphError, match=r"no local_window_size(?s:.)*rotary embeddings"):
            ours(inputs(), **call)


WIDE = (2, 40, FEATURES)
DROPPED = {"dropout_rate": 0.5, "broadcast_dropout": False, "deterministic": False}
# Settings of the layer and of the call, inputs, whether they are one product.
JOINT = {
    "plain": ({}, {}, [WIDE], True),
    "two batch dimensions": ({"use_bias": False}, {}, [(2, 3, 40, FEATURES)], True),
    "grouped heads": ({"num_kv_heads": 2, "param_dtype": "float32"}, {}, [WIDE], True),
    "flat biases": ({}, {}, [WIDE], True),
    "causal": ({"dropout_rate": 0.5}, {"is_causal": True, "deterministic": True}, [WIDE], True),
    "dropout": (DROPPED, {}, [WIDE], False),
    "few tokens": ({}, {}, [(1, 8, FEATURES)], False),
    "other inputs": ({}, {}, [WIDE, WIDE], False),
    "float32": ({"dtype": "float32"}, {}, [WIDE], False),
}


@pytest.mark.parametrize("name", JOINT)
def test_projections_of_the_same_inputs_are_one_product(name, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # kernels are whole then, traced ones too
    settings, call, shapes, one = JOINT[name]
    layers = pair(**{"dtype": "bfloat16", **settings})
    for part in (layers[0].query, layers[0].key, layers[0].value) if name == "flat biases" else ():
        part.bias.set_value(part.bias[...].ravel())  # of both, which share it
    arrays = [inputs(*shape, dtype=layers[0].dtype, seed=i) for i, shape in enumerate(shapes)]
    if one:
        close(*(derived(one, *arrays, **call) for one in layers[::-1]), within=WITHIN["bfloat16"])

    def run(*arrays):
        return layers[1](*arrays, **call, rngs=nnx.Rngs(dropout=7))

    text = str(jax.make_jaxpr(run)(*arrays))
    assert ("dot_product_attention_qkv" in text) == one
    assert text.count("name=matmul") == (2 if one else 4)


def test_grouped_heads_are_one_product_of_whole_kernels():
    """On several devices not of traced kernels, which may be sharded later, nor of sharded ones."""
    layer, x = pair("bfloat16", num_kv_heads=2)[1], inputs(*WIDE, dtype="bfloat16")
    graph, state = nnx.split(layer)
    joint = lambda fn, *args: "attention_qkv" in str(jax.make_jaxpr(fn)(*args))  # noqa: E731
    held = lambda state: joint(lambda x: nnx.merge(graph, state)(x), x)  # noqa: E731
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    assert not joint(lambda state, x: nnx.merge(graph, state)(x), state, x)
    assert not held(jax.device_put(state, NamedSharding(mesh, P("x"))))
    assert all(map(held, (state, jax.tree.map(np.asarray, state))))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", ["heads", "query's heads", "features", "batch", "FSDP"])
def test_one_product_of_sharded_kernels(axis, kind, monkeypatch):
    """On a mesh as alone; there are no more collectives, unless features alone are sharded."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    layer, x = pair("bfloat16")[1], inputs(8, *WIDE[1:], dtype="bfloat16")
    graph, state = nnx.split(layer)
    of_query = {"features": P("x"), "FSDP": P("x"), "batch": P()}.get(axis, P(None, "x"))
    of = {"query": of_query, "out": P("x") if axis == "heads" else P()}
    of |= dict.fromkeys(("key", "value"), P() if axis == "query's heads" else of_query)
    fsdp, of_size = axis == "FSDP", (None, "x")  # features of kernels, and sizes of heads of biases
    ends = {name: of_size[name == "out" :] if fsdp else own[1:] for name, own in of.items()}
    spec = lambda path: P(*ends[path[0].key]) if path[1].key == "bias" else of[path[0].key]  # noqa: E731
    where = jax.tree.map_with_path(lambda path, _: NamedSharding(mesh, spec(path)), state)
    placed = jax.device_put(state, where)
    rows = jax.device_put(x, NamedSharding(mesh, P() if "heads" in axis else P("x")))
    step = lambda state, x: loss(nnx.merge(graph, state), x)  # noqa: E731
    moved, out = [], where if fsdp else None
    for joint in ((axis, kind) != ("query's heads", AxisType.Explicit), False):
        run = jax.jit(jax.value_and_grad(step, (0, 1)), out_shardings=(None, (out, None)))
        assert ("attention_qkv" in str(jax.make_jaxpr(run)(placed, rows))) == joint
        both = run(placed, rows), jax.value_and_grad(step, (0, 1))(state, x)
        close(*map(without_key_bias, both), within=0.04)
        text = run.lower(placed, rows).compile().as_text()
        moved.append(Counter(re.findall(r" (all-[a-z-]+|reduce-scatter|collective-\w+)\(", text)))
        monkeypatch.setattr(jnn.MultiHeadAttention, "_joint", lambda *a: None)
        jax.clear_caches()
    assert axis == "features" or moved[0] <= moved[1], moved
