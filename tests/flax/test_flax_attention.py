"""MultiHeadAttention: Flax's results, gradients and errors; one product where kernels are whole."""

import contextlib
import functools

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
from jax_cudnn.flax import joint

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


# -- results and gradients -------------------------------------------------------------------------


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
    for call in (
        {"mask": mask.astype("float32")},
        {"mask": mask[:1], "is_causal": True},
        {"mask": padded, "is_causal": True},
    ):
        close(derived(ours, x, **call), derived(theirs, x, **call), within=1e-5)


def test_own_arguments_are_masks_and_a_call_decides_what_is_causal():
    theirs, _ = pair()
    x, i = inputs(), jnp.arange(LENGTH)
    causal = i[:, None] >= i
    for own, mask in (
        ({"is_causal": True}, causal),
        ({"is_causal": True, "local_window_size": 3}, causal & (i[:, None] - i <= 3)),
    ):
        ours = jnn.MultiHeadAttention(4, FEATURES, **own, decode=False, rngs=nnx.Rngs(0))
        nnx.update(ours, nnx.state(theirs))
        want = theirs(x, mask=mask[None, None])
        close(ours(x), want)
        sown, _ = nnx.capture(ours, nnx.Intermediate)(x, sow_weights=True)  # by Flax
        close(sown, want)
    ours.local_window_size = None
    close(ours(x, is_causal=False), theirs(x))


@pytest.mark.parametrize("shared", [True, False])
def test_dropout(shared):
    theirs, ours = pair(dropout_rate=0.5, broadcast_dropout=shared, deterministic=False)
    assert (ours.remark is not None) == shared
    x = inputs()
    close(ours(x, deterministic=True), theirs(x, deterministic=True))
    results = [layer(x, rngs=nnx.Rngs(dropout=7)) for layer in (ours, theirs)]
    if shared:  # Flax draws it
        close(*results)
    else:
        assert np.abs(results[0] - theirs(x, deterministic=True)).max() > 1e-2
        close(results[0], ours(x, rngs=nnx.Rngs(dropout=7)))
    with pytest.raises(ValueError, match=r"deterministic|rngs"):
        pair(dropout_rate=0.5, keep_rngs=False)[1](x)


def test_functions_of_ones_own_and_precision():
    theirs, ours = pair()
    x = inputs()

    def doubled(query, key, value, **named):
        return 2 * nnx.dot_product_attention(query, key, value, **named)

    def of(function):
        return pair(attention_fn=function)[1]

    assert of(doubled).unfused == "it has an attention_fn of its own"
    close(of(doubled)(x), pair(attention_fn=doubled)[0](x))
    assert of(jc.ops.attention_fn).unfused is None
    close(of(functools.partial(jc.ops.attention_fn, scale=8**-0.5))(x), theirs(x))
    precise = pair(precision="highest")[1]
    assert "precision='highest'" in str(jax.make_jaxpr(lambda x: precise(x))(x))
    inner = (ours.query, ours.key, ours.value, ours.out, pair(normalize_qk=True)[1].query_ln)
    assert [type(layer) for layer in inner] == [*[jnn.LinearGeneral] * 4, jnn.LayerNorm]


has_rope = pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax has no RoPE")


def rotating():
    return functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())


@has_rope
def test_rotary_embeddings():
    theirs, ours = pair(attention_fn=rotating())
    assert ours.unfused is None
    close(ours(inputs(), is_causal=True), theirs(inputs(), is_causal=True))
    for layer in pair(attention_fn=nnx.dot_product_attention_with_rope):  # without tables
        with pytest.raises(TypeError, match="rope"):
            layer(inputs())
    named = {"attention_fn": rotating(), "local_window_size": 2, "decode": False}
    banded = jnn.MultiHeadAttention(4, FEATURES, **named, rngs=nnx.Rngs(0))
    for call in ({"decode": True}, {"input_positions": np.arange(LENGTH)}):
        with pytest.raises(jc.GraphError, match=r"no local_window_size(?s:.)*rotary embeddings"):
            banded(inputs(), **call)


@pytest.mark.parametrize(
    ("reason", "named"),
    [
        ("an attention_fn of its own", {"attention_fn": lambda *x, **named: x[0]}),
        ("no precision 'ANY_F8_ANY_F8_F32'", {"precision": "ANY_F8_ANY_F8_F32"}),
    ],
)
def test_what_is_flaxs_has_no_window_and_no_pages(reason, named):
    def made(**own):
        return jnn.MultiHeadAttention(4, FEATURES, **named, **own, decode=False, rngs=nnx.Rngs(0))

    with pytest.raises(jc.GraphError, match=f"no local_window_size(?s:.)*{reason}"):
        made(local_window_size=2)(inputs())
    with pytest.raises(jc.GraphError, match="does not read pages"):
        made(page_size=4)
    layer = made()
    layer.page_size = 4
    with pytest.raises(jc.GraphError, match="does not read pages"):
        layer.init_cache((BATCH, LENGTH, FEATURES))


# -- one product of queries, keys and values -------------------------------------------------------


@pytest.fixture
def one_device(monkeypatch):
    """As where JAX has one device: kernels are whole then, traced ones too."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


WIDE = (2, 40, FEATURES)
DROPPED = {"dropout_rate": 0.5, "broadcast_dropout": False, "deterministic": False}
# Settings of the layer and of the call, inputs, whether they are one product.
JOINT = {
    "plain": ({}, {}, [WIDE], True),
    "two batch dimensions": ({"use_bias": False}, {}, [(2, 3, 40, FEATURES)], True),
    "grouped heads": ({"num_kv_heads": 2, "param_dtype": "float32"}, {}, [WIDE], True),
    "causal": ({"dropout_rate": 0.5}, {"is_causal": True, "deterministic": True}, [WIDE], True),
    "promotes by itself": ({"qkv_promote_dtype": lambda x, **_: x}, {}, [WIDE], False),
    "normalized": ({"normalize_qk": True}, {}, [WIDE], False),
    "dropout": (DROPPED, {}, [WIDE], False),
    "a mask": ({}, {"mask": np.ones((1, 1, 40, 40), bool)}, [WIDE], False),
    "few tokens": ({}, {}, [(1, 8, FEATURES)], False),
    "other inputs": ({}, {}, [WIDE, WIDE], False),
    "float32": ({"dtype": "float32"}, {}, [WIDE], False),
}


@pytest.mark.parametrize("name", JOINT)
def test_projections_of_the_same_inputs_are_one_product(name, one_device):
    settings, call, shapes, one = JOINT[name]
    layers = pair(**{"dtype": "bfloat16", **settings})
    dtype = layers[0].dtype
    arrays = [inputs(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    if one:
        found = [derived(layer, *arrays, **call) for layer in layers[::-1]]
        close(*found, within=WITHIN["bfloat16"])

    def run(*arrays):
        return layers[1](*arrays, **call, rngs=nnx.Rngs(dropout=7))

    text = str(jax.make_jaxpr(run)(*arrays))
    assert ("dot_product_attention_qkv" in text) == one
    assert text.count("name=matmul") == (2 if one else 4)


def collectives(function, *arrays):
    text = jax.jit(function).lower(*arrays).compile().as_text()
    names = ("all-to-all", "collective-permute", "all-gather", "all-reduce")
    return [text.count(f" {name}(") for name in names]


def by_heads(mesh, layer):
    """A layer's graph and state, and where the state lies in tensor parallelism."""
    graph, state = nnx.split(layer)

    def place(path, _):
        outer = "'out'" in jax.tree_util.keystr(path)
        return NamedSharding(mesh, P("model") if outer else P(None, "model"))

    return graph, state, jax.tree_util.tree_map_with_path(place, state)


@pytest.mark.parametrize("said_by", ["metadata", "in_shardings"])
def test_kernels_that_devices_share_stay_apart(said_by):
    """Traced types say nothing of it, nor does a mesh of Auto axes."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, P("data"))
    x = jax.device_put(inputs(4, 40, FEATURES, dtype="bfloat16"), rows)
    names = {"kernel": (None, "model", None), "out_kernel": ("model", None, None)}
    named = {f"{n}_metadata": {"out_sharding": axes} for n, axes in names.items()}
    with jax.set_mesh(mesh) if said_by == "metadata" else contextlib.nullcontext():
        layers = pair("bfloat16", use_bias=False, **(named if said_by == "metadata" else {}))
    found, counts = [], []
    for layer in layers[::-1]:
        graph, state, places = by_heads(mesh, layer)
        given = {"in_shardings": (places, rows)} if said_by == "in_shardings" else {}
        run = jax.jit(lambda s, x, g=graph: nnx.merge(g, s)(x), **given)
        counts.append(collectives(run, state, x))
        found.append(run(state, x))
    assert counts == [[0, 0, 0, 1]] * 2
    close(*found, within=WITHIN["bfloat16"])
    if said_by == "metadata":  # not traced: the kernels say it
        assert "attention_qkv" not in str(jax.make_jaxpr(lambda x: layers[1](x))(x))


@pytest.mark.parametrize("whole", [True, False])
def test_types_with_an_explicit_mesh_say_whether_kernels_are_whole(whole):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    graph, state, places = by_heads(mesh, pair("bfloat16", use_bias=False)[1])
    whole_places = jax.tree.map(lambda _: NamedSharding(mesh, P()), state)
    state = jax.device_put(state, whole_places if whole else places)

    def run(kernel, x):
        return joint.projected([nnx.merge(graph, kernel).query] * 3, x)

    with jax.set_mesh(mesh):
        made = jax.eval_shape(run, state, inputs(4, 40, FEATURES, dtype="bfloat16"))
    assert (made is not None) == whole


def test_kernels_of_the_host_are_whole_and_projections_are_captured():
    theirs, _ = pair("bfloat16", param_dtype="float32")
    nnx.update(theirs, jax.tree.map(np.asarray, nnx.state(theirs)))
    ours, x = jnn.MultiHeadAttention.of(theirs), inputs(*WIDE, dtype="bfloat16")
    close(ours(x), theirs(x), within=WITHIN["bfloat16"])
    assert "attention_qkv" in str(jax.make_jaxpr(lambda x: ours(x))(x))
    found = []
    for layer in (ours, theirs):
        _, seen = nnx.capture(layer, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)
        found.append({name: jax.tree.leaves(seen[name]) for name in ("query", "key", "value")})
    assert all(found[0].values())
    close(*found, within=WITHIN["bfloat16"])
