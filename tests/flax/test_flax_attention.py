"""MultiHeadAttention: Flax's results, gradients, caches and errors, and cuDNN's plans."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_cases import WITHIN, close, loss, without_key_bias
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_cudnn as jc
import jax_cudnn.flax as jnn
from jax_cudnn.flax import joint

GROUPED = {"num_kv_heads": 2, "normalize_qk": True}
SIZES = {"qkv_features": 48, "out_features": 8, "in_kv_features": 16, "use_bias": False}
BATCH, LENGTH, FEATURES = 2, 8, 32


def pair(dtype="float32", **named):
    """Flax's layer, and ours with its Variables."""
    named = {"decode": False, "dtype": dtype, "param_dtype": dtype, **named}
    theirs = nnx.MultiHeadAttention(4, FEATURES, **named, rngs=nnx.Rngs(0))
    return theirs, jnn.MultiHeadAttention.of(theirs)


def inputs(*shape, dtype="float32", seed=1):
    return jax.random.normal(jax.random.key(seed), shape or (BATCH, LENGTH, FEATURES), dtype)


# -- results and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WITHIN)
def test_results_and_gradients_are_flaxs(dtype):
    theirs, ours = pair(dtype, **GROUPED, **SIZES)
    q = inputs(dtype=dtype)
    k = inputs(BATCH, 10, theirs.in_kv_features, dtype=dtype, seed=2)
    found = [nnx.jit(nnx.value_and_grad(loss))(layer, q, k) for layer in (ours, theirs)]
    close(*map(without_key_bias, found), within=WITHIN[dtype])


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_masks_causality_and_batches_are_flaxs(batch):
    theirs, ours = pair()
    x = inputs(*batch, LENGTH, FEATURES)
    mask = jax.random.bernoulli(jax.random.key(3), 0.7, (*batch, 1, LENGTH, LENGTH))
    mask |= jnp.eye(LENGTH, dtype=bool)  # Flax gives the mean of all values where none is seen
    for named in ({"mask": mask}, {"mask": mask.astype("float32")}, {"is_causal": True}):
        close(ours(x, **named), theirs(x, **named))
    if len(batch) < 2:
        close(ours(x, mask=mask, is_causal=True), theirs(x, mask=mask, is_causal=True))
    if len(batch) == 1:
        close(ours(x, mask=mask[:1]), theirs(x, mask=mask[:1]))


@pytest.fixture
def one_device(monkeypatch):
    """As where JAX has one device: kernels are whole then, traced ones too."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


# What is one product, and what is not: settings of the layer, and of the call.
JOINT = {
    "plain": ({}, {}),
    "without bias": ({"use_bias": False}, {}),
    "grouped heads": ({"num_kv_heads": 2}, {}),
    "float32 parameters": ({"param_dtype": "float32"}, {}),
    "causal": ({}, {"is_causal": True}),
    "no dropout now": ({"dropout_rate": 0.5}, {"deterministic": True}),
}


def three(arrays, *, dtype):
    """A promote_dtype of a user's own, who knows what Flax gives it."""
    inputs, kernel, bias = arrays
    return tuple(x.astype(dtype) for x in (inputs, kernel, bias))


APART = {
    "promotes by itself": ({"qkv_promote_dtype": three}, {}),
    "normalized": ({"normalize_qk": True}, {}),
    "dropout": ({"dropout_rate": 0.5, "broadcast_dropout": False, "deterministic": False}, {}),
    "a mask": ({}, {"mask": np.ones((1, 1, 40, 40), bool)}),
}


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
@pytest.mark.parametrize("name", [*JOINT, *APART])
def test_projections_of_the_same_inputs_are_one_product(name, batch, one_device):
    settings, call = {**JOINT, **APART}[name]
    theirs, ours = pair("bfloat16", **settings)
    x = inputs(*batch, 40, FEATURES, dtype="bfloat16")
    if name != "dropout":
        step = nnx.jit(nnx.value_and_grad(lambda layer, x: loss(layer, x, **call)))
        found = [without_key_bias(step(layer, x)) for layer in (ours, theirs)]
        close(*found, within=WITHIN["bfloat16"])
    text = str(jax.make_jaxpr(lambda x: ours(x, **call, rngs=nnx.Rngs(dropout=7)))(x))
    assert ("dot_product_attention_qkv" in text) == (name in JOINT)
    assert text.count("name=matmul") == (2 if name in JOINT else 4)


def test_projections_of_few_tokens_of_others_and_in_float32_are_three(one_device):
    for dtype, shapes in (
        ("bfloat16", [(1, 8, FEATURES)]),
        ("bfloat16", [(2, 40, FEATURES), (2, 40, FEATURES)]),
        ("float32", [(2, 40, FEATURES)]),
    ):
        theirs, ours = pair(dtype)
        arrays = [inputs(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
        close(ours(*arrays), theirs(*arrays), within=WITHIN[dtype])
        assert "attention_qkv" not in str(jax.make_jaxpr(lambda *x, o=ours: o(*x))(*arrays))


# Where kernels lie by their metadata.
PLACES = {
    "heads": ((None, "model", None), ("model", None, None)),
    "heads without metadata": (None, None),
    "not known": (None, None),
}


def collectives(function, *arrays):
    text = jax.jit(function).lower(*arrays).compile().as_text()
    names = ("all-to-all", "collective-permute", "all-gather", "all-reduce")
    return {name: text.count(f" {name}(") for name in names}


@pytest.mark.parametrize("name", PLACES)
def test_kernels_that_devices_share_stay_apart(name):
    inner, outer = PLACES[name]
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    of = {"kernel": inner, "out_kernel": outer}
    metadata = {f"{n}_metadata": {"sharding_names": a} for n, a in of.items() if a is not None}
    with jax.set_mesh(mesh) if metadata else contextlib.nullcontext():
        theirs, _ = pair("bfloat16", use_bias=False, **metadata)
    if name == "heads without metadata":
        graph, state = nnx.split(theirs)
        places = {"query": 1, "key": 1, "value": 1, "out": 0}
        for inner, axis in places.items():
            spec = PartitionSpec(*("model" if i == axis else None for i in range(3)))
            kernel = state[inner]["kernel"]
            kernel[...] = jax.device_put(kernel[...], NamedSharding(mesh, spec))
        theirs = nnx.merge(graph, state)
    ours = jnn.MultiHeadAttention.of(theirs)
    x = inputs(4, 40, FEATURES, dtype="bfloat16")
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    counts = []
    for layer in (ours, theirs):
        graph, state = nnx.split(layer)
        counts.append(collectives(lambda s, x, g=graph: nnx.merge(g, s)(x), state, x))
    assert counts[0] == counts[1]
    close(ours(x), theirs(x), within=WITHIN["bfloat16"])  # not traced: the kernels say it
    graph, state = nnx.split(ours)
    text = str(jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, x))
    assert "dot_product_attention_qkv" not in text


def by_heads(mesh, layer):
    """A layer's graph and state, and where the state lies in tensor parallelism."""
    graph, state = nnx.split(layer)

    def place(path, _):
        outer = "'out'" in jax.tree_util.keystr(path)
        spec = PartitionSpec("model") if outer else PartitionSpec(None, "model")
        return NamedSharding(mesh, spec)

    return graph, state, jax.tree_util.tree_map_with_path(place, state)


def test_kernels_that_in_shardings_place_stay_apart():
    """Their traced types say nothing of it, nor does a mesh."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = inputs(4, 40, FEATURES, dtype="bfloat16")
    rows, found, counts = NamedSharding(mesh, PartitionSpec("data")), [], []
    for layer in pair("bfloat16", use_bias=False):
        graph, state, places = by_heads(mesh, layer)
        run = jax.jit(lambda s, x, g=graph: nnx.merge(g, s)(x), in_shardings=(places, rows))
        counts.append(collectives(run, state, x))
        found.append(run(state, x))
    assert counts[0] == counts[1]
    assert counts[0]["all-reduce"] == sum(counts[0].values()) == 1
    close(*found, within=WITHIN["bfloat16"])


@pytest.mark.parametrize("whole", [True, False])
def test_types_with_an_explicit_mesh_say_whether_kernels_are_whole(whole):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    theirs, ours = pair("bfloat16", use_bias=False)
    want = theirs(inputs(4, 40, FEATURES, dtype="bfloat16"))
    graph, state, places = by_heads(mesh, ours)
    if whole:
        places = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), state)
    state = jax.device_put(state, places)

    def run(kernel, x):
        return joint.projected([nnx.merge(graph, kernel).query] * 3, x)

    with jax.set_mesh(mesh):
        x = inputs(4, 40, FEATURES, dtype="bfloat16")
        made = jax.eval_shape(run, state, x)
        assert (made is not None) == whole
        if whole:
            got = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, x)
            close(got, want, within=WITHIN["bfloat16"])


def test_kernels_of_the_host_are_whole():
    theirs, _ = pair("bfloat16", param_dtype="float32")
    nnx.update(theirs, jax.tree.map(np.asarray, nnx.state(theirs)))
    ours, x = jnn.MultiHeadAttention.of(theirs), inputs(2, 40, FEATURES, dtype="bfloat16")
    close(ours(x), theirs(x), within=WITHIN["bfloat16"])
    assert "attention_qkv" in str(jax.make_jaxpr(lambda x: ours(x))(x))


def test_projections_are_captured_as_flaxs():
    theirs, ours = pair("bfloat16")
    x = inputs(2, 40, FEATURES, dtype="bfloat16")
    found = []
    for layer in (ours, theirs):
        _, seen = nnx.capture(layer, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)
        found.append({name: jax.tree.leaves(seen[name]) for name in ("query", "key", "value")})
    assert all(found[0].values())
    close(*found, within=WITHIN["bfloat16"])


def test_a_call_decides_what_is_causal():
    theirs, _ = pair()
    ours = jnn.MultiHeadAttention(4, FEATURES, is_causal=True, decode=False, rngs=nnx.Rngs(0))
    nnx.update(ours, nnx.state(theirs))
    for is_causal in (True, False):
        close(ours(inputs(), is_causal=is_causal), theirs(inputs(), is_causal=is_causal))
    close(ours(inputs()), theirs(inputs(), is_causal=True))


def test_own_arguments_are_masks_that_take_no_memory():
    theirs, _ = pair()
    x, i = inputs(), jnp.arange(LENGTH)
    band = (i[:, None] >= i) & (i[:, None] - i <= 3)
    for own, mask in (
        ({"is_causal": True}, i[:, None] >= i),
        ({"is_causal": True, "local_window_size": 3}, band),
    ):
        ours = jnn.MultiHeadAttention(4, FEATURES, **own, decode=False, rngs=nnx.Rngs(0))
        nnx.update(ours, nnx.state(theirs))
        close(ours(x), theirs(x, mask=mask[None, None]))
        sown, _ = nnx.capture(ours, nnx.Intermediate)(x, sow_weights=True)  # by Flax
        close(sown, theirs(x, mask=mask[None, None]))


def test_inner_layers_are_ours():
    _, ours = pair(normalize_qk=True)
    new = jnn.MultiHeadAttention(4, FEATURES, decode=False, rngs=nnx.Rngs(0))
    assert all(type(getattr(new, n)) is jnn.LinearGeneral for n in ("query", "key", "value", "out"))
    assert type(ours.out) is jnn.LinearGeneral
    assert type(ours.query_ln) is jnn.LayerNorm


@pytest.mark.parametrize("shared", [True, False])
def test_dropout(shared):
    theirs, ours = pair(dropout_rate=0.5, broadcast_dropout=shared, deterministic=False)
    x = inputs()
    assert (ours.remark is not None) == shared
    close(ours(x, deterministic=True), theirs(x, deterministic=True))
    results = [layer(x, rngs=nnx.Rngs(dropout=7)) for layer in (ours, theirs)]
    if shared:  # Flax draws it
        close(*results)
    else:
        assert np.abs(results[0] - theirs(x, deterministic=True)).max() > 1e-2
        close(results[0], ours(x, rngs=nnx.Rngs(dropout=7)))
    with pytest.raises(ValueError, match=r"deterministic|rngs"):
        pair(dropout_rate=0.5, keep_rngs=False)[1](x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rate_that_is_none_is_flaxs(rate, deterministic, dtype, one_device):
    """To refuse, or in some versions not."""
    theirs, ours = pair(dtype, dropout_rate=rate, broadcast_dropout=False)

    def outcome(layer):
        try:
            rngs = nnx.Rngs(dropout=7)
            return layer(inputs(2, 40, FEATURES), deterministic=deterministic, rngs=rngs)
        except ValueError as error:
            return type(error), str(error)

    got, want = outcome(ours), outcome(theirs)
    if isinstance(want, tuple):
        assert got == want
    else:
        np.testing.assert_allclose(got, want, rtol=0, atol=WITHIN[dtype])


@pytest.mark.parametrize("is_causal", [False, True])
def test_padded_tokens_have_flaxs_results_and_gradients(is_causal):
    """nnx.make_attention_mask hides all keys from a padded query, which a loss may read."""
    theirs = nnx.MultiHeadAttention(4, FEATURES, decode=False, rngs=nnx.Rngs(0))
    ours, _ = jnn.accelerate(theirs)
    x = inputs(2, LENGTH, FEATURES)
    valid = jnp.array([[False] * 3 + [True] * (LENGTH - 3), [True] * LENGTH])
    mask = nnx.make_attention_mask(valid, valid, dtype=bool)

    def loss(layer, x):
        return ((layer(x, mask=mask, is_causal=is_causal) - x) ** 2).sum()

    got, want = (nnx.value_and_grad(loss, argnums=(0, 1))(layer, x) for layer in (ours, theirs))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)  # a key's bias has rounding alone


def test_a_view_makes_no_cache():
    """Nor does one of Flax's layer: ``page_size`` tells of init_cache."""
    paged = jnn.MultiHeadAttention(4, FEATURES, page_size=4, decode=False, rngs=nnx.Rngs(0))
    for layer in (pair()[0], paged):
        view = nnx.view(layer, decode=True, batch_size=BATCH, max_length=LENGTH)
        with pytest.raises(ValueError, match="init_cache"):
            view(inputs()[:, :1])


def test_sown_weights_are_flaxs():
    found = []
    for layer in pair():
        _, sown = nnx.capture(layer, nnx.Intermediate)(inputs(), sow_weights=True)
        found.append(jax.tree.leaves(sown))
    close(*found)


def test_functions_of_ones_own():
    theirs, _ = pair()
    x = inputs()

    def doubled(query, key, value, **named):
        return 2 * nnx.dot_product_attention(query, key, value, **named)

    def of(function):
        return pair(attention_fn=function)[1]

    assert of(doubled).unfused == "it has an attention_fn of its own"
    close(of(doubled)(x), pair(attention_fn=doubled)[0](x))
    assert of(jc.ops.attention_fn).unfused is None
    close(of(functools.partial(jc.ops.attention_fn, scale=8**-0.5))(x), theirs(x))


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax has no RoPE")
def test_rotary_embeddings():
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())
    theirs, ours = pair(attention_fn=attend)
    assert ours.unfused is None
    close(ours(inputs(), is_causal=True), theirs(inputs(), is_causal=True))


def rotating():
    return functools.partial(nnx.dot_product_attention_with_rope, rope=nnx.RoPE())


@pytest.mark.parametrize(
    ("reason", "named", "call"),
    [
        ("an attention_fn of its own", lambda: {"attention_fn": lambda *x, **named: x[0]}, {}),
        ("no precision 'ANY_F8_ANY_F8_F32'", lambda: {"precision": "ANY_F8_ANY_F8_F32"}, {}),
        *(
            pytest.param(
                "rotary embeddings beside decode",
                lambda: {"attention_fn": rotating()},
                call,
                marks=pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax has no RoPE"),
            )
            for call in ({"decode": True}, {"input_positions": np.arange(LENGTH)})
        ),
    ],
)
def test_what_is_flaxs_has_no_window_and_no_pages(reason, named, call):
    def made(**own):
        return jnn.MultiHeadAttention(4, FEATURES, **named(), **own, decode=False, rngs=nnx.Rngs(0))

    with pytest.raises(jc.GraphError, match=f"no local_window_size(?s:.)*{reason}"):
        made(local_window_size=2)(inputs(), **call)
    with pytest.raises(jc.GraphError, match="does not read pages"):
        made(page_size=4)
    layer = made()
    layer.page_size = 4
    with pytest.raises(jc.GraphError, match="does not read pages"):
        layer.init_cache((BATCH, LENGTH, FEATURES))


def test_precision_reaches_cudnn():
    _, ours = pair(precision="highest")
    assert "precision='highest'" in str(jax.make_jaxpr(lambda x: ours(x))(inputs()))
    _, ours = pair(precision="ANY_F8_ANY_F8_F32")
    assert "no precision" in ours.unfused


def test_float64_is_flaxs():
    with jax.enable_x64(True):
        theirs, ours = pair(dtype="float64")
        close(ours(inputs(dtype="float64")), theirs(inputs(dtype="float64")))


# -- decoding --------------------------------------------------------------------------------------


@nnx.jit
def next_tokens(layer, part, mask):
    return layer(part, decode=True, mask=mask)


def decoded(layer, x, steps, mask=None):
    """The results for tokens that come so many at a time."""
    parts = jnp.split(x, np.cumsum(steps)[:-1], axis=-2)
    return jnp.concatenate([next_tokens(layer, part, mask) for part in parts], axis=-2)


@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_decoding_is_flaxs_and_full_attention(batch):
    theirs, ours = pair(**GROUPED)
    x = inputs(*batch, LENGTH, FEATURES)
    for layer in (theirs, ours):
        layer.init_cache(x.shape)
    found = [decoded(layer, x, [1] * LENGTH) for layer in (ours, theirs)]
    close(*found)
    close(found[0], theirs(x, is_causal=True))
    for name in ("cached_key", "cached_value", "cache_index"):
        close(getattr(ours, name)[...], getattr(theirs, name)[...])


def test_decoding_with_a_mask_is_flaxs():
    theirs, ours = pair()
    x = inputs()
    mask = jnp.arange(LENGTH) % 3 != 1
    for layer in (theirs, ours):
        layer.init_cache(x.shape)
    found = [
        decoded(layer, x, [1] * LENGTH, mask=mask[None, None, None]) for layer in (ours, theirs)
    ]
    close(*found)


@pytest.mark.parametrize("page_size", [None, 5])
@pytest.mark.parametrize("window", [None, 3])
def test_several_tokens_at_a_time(window, page_size):
    named = {"is_causal": True, "local_window_size": window, "page_size": page_size}
    ours = jnn.MultiHeadAttention(4, FEATURES, **named, decode=False, rngs=nnx.Rngs(0))
    x = inputs()
    want = ours(x)
    for steps in ([LENGTH], [4, 1, 3]):
        ours.init_cache(x.shape)
        close(decoded(ours, x, steps), want)


def test_decoding_of_16_bits_in_a_cache_of_32():
    _, ours = pair("bfloat16")
    x = inputs(dtype="bfloat16")
    ours.init_cache(x.shape)
    assert ours.cached_key.dtype == "float32"
    close(decoded(ours, x, [1] * LENGTH), ours(x, is_causal=True), within=WITHIN["bfloat16"])


def test_decoding_says_what_is_missing():
    _, ours = pair()
    with pytest.raises(ValueError, match="init_cache"):
        ours(inputs()[:, :1], decode=True)
    with pytest.raises(ValueError, match="No `decode` argument"):
        pair(decode=None)[1](inputs())
    ours.init_cache((BATCH, LENGTH, FEATURES))
    with pytest.raises(ValueError, match="Autoregressive cache shape error"):
        ours(inputs(3, 1, FEATURES), decode=True)
    with pytest.raises(ValueError, match="Autoregressive cache shape error"):
        ours(inputs(BATCH, LENGTH + 1, FEATURES), decode=True)


def test_decoding_in_a_loop():
    """Under nnx.jit and nnx.scan the cache is state."""
    _, ours = pair()
    x = inputs()
    want = ours(x, is_causal=True)
    ours.init_cache(x.shape)

    @nnx.jit
    def run(layer, tokens):
        def step(layer, token):
            return layer, layer(token[:, None], decode=True)[:, 0]

        return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(layer, tokens)[1]

    close(run(ours, x.swapaxes(0, 1)).swapaxes(0, 1), want)
    assert ours.cache_index[...] == LENGTH


def test_pages_that_a_server_gives():
    """Examples of different lengths, with pages anywhere in a pool; one begins anew."""
    _, ours = pair()
    x = inputs(3, 12, FEATURES)
    want = ours(x, is_causal=True)
    ours.paged_cache = jnn.PagedCache(3, 12, 4, 8, page_size=4, pages=11)
    cache = ours.paged_cache
    cache.page_table[...] = jnp.asarray([[7, 0, 9], [1, 10, 2], [4, 3, 8]], jnp.int32)
    decoded(ours, x[:, :6], [6])
    cache.lengths[...] = jnp.asarray([6, 2, 0], jnp.int32)
    at = cache.lengths[...][:, None] + jnp.arange(4)
    part = jnp.take_along_axis(x, at[..., None], axis=1)
    close(ours(part, decode=True), jnp.take_along_axis(want, at[..., None], axis=1))
    assert cache.lengths[...].tolist() == [10, 6, 4]


def test_pages_take_no_mask_and_no_dropout():
    ours = jnn.MultiHeadAttention(
        4, FEATURES, page_size=4, decode=True, dropout_rate=0.5, deterministic=False,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    ours.init_cache((BATCH, LENGTH, FEATURES))
    token = inputs()[:, :1]
    with pytest.raises(jc.GraphError, match="mask, dropout, sow_weights"):
        ours(token, mask=jnp.ones((1, 1, 1, LENGTH), bool), sow_weights=True)
    assert ours(token, deterministic=True).shape == token.shape


def test_pages_hold_tokens_and_no_more():
    for size in (0, -1, "8", 8.5, True):
        with pytest.raises(jc.GraphError, match="page_size is no number of tokens"):
            jnn.MultiHeadAttention(4, FEATURES, page_size=size, rngs=nnx.Rngs(0))
        with pytest.raises(jc.GraphError, match="page_size is no number of tokens"):
            jnn.PagedCache(2, LENGTH, 4, 8, page_size=size)
    cache = jnn.PagedCache(2, LENGTH, 4, 8, page_size=4)
    x = inputs(2, LENGTH + 1, 4, 8)
    assert cache(*(x[:, :LENGTH],) * 3).shape == (2, LENGTH, 4, 8)
    with pytest.raises(jc.GraphError, match=f"up to {LENGTH} for an example"):
        cache(x, x, x)
    with pytest.raises(jc.GraphError, match=r"another batch\n.*2 examples(.|\n)*init_cache"):
        cache(x[:1, :1], x[:1, :1], x[:1, :1])


def test_a_mask_that_hides_all_gives_the_mean_of_what_is_in_the_cache():
    theirs, ours = pair()
    found = []
    for layer in (ours, theirs):
        layer.init_cache((BATCH, LENGTH, FEATURES))
        layer(inputs()[:, :1], decode=True)
        mask = jnp.zeros((1, 1, 1, LENGTH), bool)
        found.append(layer(inputs()[:, 1:2], decode=True, mask=mask))
        values = layer.cached_value[...]
        seen = values[:, :2] if layer is ours else values
        close(found[-1], layer.out(seen.mean(1, keepdims=True)))
    assert np.abs(found[0] - found[1]).max() > 1e-2


# -- transformations -------------------------------------------------------------------------------


def test_transformations():
    theirs, ours = pair()
    x = inputs()
    want = theirs(x)
    close(nnx.merge(*nnx.split(ours))(x), want)
    close(nnx.jit(lambda m, x: m(x))(ours, x), want)
    close(nnx.remat(lambda m, x: m(x))(ours, x), want)
    close(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(ours, x), want)
    grads = [nnx.grad(nnx.remat(loss))(layer, x) for layer in (ours, theirs)]
    close(*map(without_key_bias, grads))


@pytest.mark.parametrize("page_size", [None, 2])
def test_decoding_where_ranks_may_not_be_promoted(page_size):
    layer = jnn.MultiHeadAttention(
        4, FEATURES, decode=True, page_size=page_size, normalize_qk=True, rngs=nnx.Rngs(0)
    )
    layer.init_cache((BATCH, LENGTH, FEATURES))
    with jax.numpy_rank_promotion("raise"):
        for _ in range(2):
            layer(inputs(BATCH, 1, FEATURES))


@pytest.mark.skipif(not hasattr(nnx, "dot_product_attention_with_rope"), reason="not in this Flax")
def test_rotary_attention_without_its_tables_is_flaxs_to_refuse():
    theirs, ours = pair(attention_fn=nnx.dot_product_attention_with_rope)
    _, report = jnn.accelerate(nnx.Sequential(theirs))
    assert "attention_fn" in report.kept[0].why
    for layer in (ours, theirs):
        with pytest.raises(TypeError, match="rope"):
            layer(inputs())


def test_a_stack_of_layers():
    @nnx.vmap
    def made(key):
        return jnn.MultiHeadAttention(4, FEATURES, decode=False, rngs=nnx.Rngs(key))

    layers = made(jax.random.split(jax.random.key(0), 3))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x, layer):
        return x + layer(x, is_causal=True)

    y = x = inputs()
    for i in range(3):
        graph, state = nnx.split(layers)
        layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
        y = y + layer(y, is_causal=True)
    close(run(x, layers), y)


# -- plans and the GPU -----------------------------------------------------------------------------

TOKENS = (4, 256, 512)


def large(**named):
    named = {"dtype": "bfloat16", "param_dtype": "bfloat16", "decode": False, **named}
    return jnn.MultiHeadAttention(8, TOKENS[-1], **named, rngs=nnx.Rngs(0))


def step(layer):
    """A function of state and tokens, with the state behind it."""
    graph, state = nnx.split(layer)

    def run(state, x):
        layer = nnx.merge(graph, state)
        return layer(x), nnx.state(layer)

    return run, state


def attentions(function, *avals):
    plans = jc.plans(function, *avals)
    return {name: plan for name, plan in plans.items() if "attention" in name}


@pytest.mark.deviceless
def test_training_is_planned_on_cudnn(one_device):
    run, state = step(large(is_causal=True, local_window_size=64))
    x = jax.ShapeDtypeStruct(TOKENS, "bfloat16")
    with jc.target("H200"):
        plans = attentions(jax.grad(lambda s, x: run(s, x)[0].astype("float32").sum()), state, x)
    name = "dot_product_attention_qkv"
    assert [*plans] == [name, f"{name} (backward)"]
    assert all(plan.engine for plan in plans.values())


@pytest.mark.deviceless
@pytest.mark.parametrize(("count", "page_size"), [(1, None), (8, None), (1, 16)])
def test_decoding_is_planned_on_cudnn(count, page_size):
    layer = large(decode=True, page_size=page_size)
    layer.init_cache(TOKENS, "bfloat16")
    run, state = step(layer)
    with jc.target("H200"):
        plans = attentions(run, state, jax.ShapeDtypeStruct((4, count, 512), "bfloat16"))
    (plan,) = plans.values()
    assert plan.engine


@pytest.mark.gpu
@pytest.mark.parametrize("own", [{}, {"is_causal": True}, {"num_kv_heads": 2}])
def test_training_on_the_gpu(own):
    ours = large(**own)
    x = inputs(*TOKENS, dtype="bfloat16")
    with jc.implementation("xla"):
        want = nnx.jit(nnx.value_and_grad(loss))(ours, x)
    with jc.implementation("split"):
        got = nnx.jit(nnx.value_and_grad(loss))(ours, x)
    close(without_key_bias(got), without_key_bias(want), within=WITHIN["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("count", [1, 8])
def test_decoding_on_the_gpu(count, window, page_size):
    ours = large(is_causal=True, local_window_size=window, page_size=page_size)
    x = inputs(4, 32, 512, dtype="bfloat16")
    ours.init_cache((4, 256, 512), "bfloat16")
    with jc.implementation("split"):
        got = decoded(ours, x, [count] * (32 // count))
    with jc.implementation("xla"):
        close(got, ours(x), within=WITHIN["bfloat16"])
