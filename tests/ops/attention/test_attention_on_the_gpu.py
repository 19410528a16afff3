"""Attention by cuDNN on the GPU: beside float64, and what its engines were seen to get wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_attention
import pytest
from attention_checks import (
    KEY,
    ONE_ARRAY,
    PLANNED,
    UNSEEING,
    bounds,
    check,
    check_masks,
    drawing,
    kept,
    of_kind,
    of_one_array,
    of_several_dtypes,
    ours,
    outcome,
    planned,
    qkv,
    turned,
    unseeing,
)
from transformations import relative_error

import jax_cudnn as jc

pytestmark = pytest.mark.gpu
theirs = jax.nn.dot_product_attention


@pytest.fixture
def normal(key):
    return drawing(key)


def near(got, want, limit=2e-2):
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(a).all()
        assert relative_error(a, b) < limit


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PLANNED)
def test_results_and_gradients(name, dtype, normal):
    check(normal, *planned(normal, name, dtype, implementation="cudnn"), 2e-2, of_logs=False)


@pytest.mark.parametrize("name", ["lengths", "a row", "window", "sink"])
def test_forward_of_float32(name, normal):
    operands = qkv(normal, t=96, s=160, k=2, h=64)
    row, sink = normal((2, 1, 1, 160)), normal((4,))
    has, exact = {
        "lengths": ({"query_seq_lengths": jnp.array([40, 96], "int32"),
                     "key_value_seq_lengths": jnp.array([160, 90], "int32")},
                    {"queries": [40, 96], "keys": [160, 90]}),
        "a row": ({"bias": row, "is_causal": True}, {"bias": row, "right": 0}),
        "window": ({"local_window_size": (20, 9)}, bounds(local_window_size=(20, 9))),
        "sink": ({"sink": sink}, {"sink": sink}),
    }[name]  # fmt: skip
    out, logs = jax.jit(functools.partial(ours, **has, return_residual=True))(*operands)
    want = oracle_attention.Attention(*map(turned, operands), **exact)
    np.testing.assert_allclose(out, turned(want.out), atol=1e-2)
    np.testing.assert_allclose(logs, turned(want.stats)[..., 0], atol=1e-2)


@pytest.mark.parametrize("port", ["v", "k", "o", "dO"])
def test_operands_of_several_dtypes(port, normal):
    graph, operands = of_several_dtypes(normal, port, "float16")
    wide = [x.astype("float32") for x in operands]
    want = jax.jit(graph.with_options(implementation="xla"))(*wide)
    near(jax.tree.leaves(jax.jit(graph)(*operands)), jax.tree.leaves(want))


@pytest.mark.parametrize("name", ONE_ARRAY)
def test_one_array_at_several_ports(name, normal):
    operands = [normal((2, 4, 128, 64), "bfloat16") for _ in range(3)]
    for bias in ((), (normal((1, 4, 128, 128), "bfloat16"),)):
        near(*(jax.jit(of_one_array(name, i))(*operands, *bias) for i in ("cudnn", "xla")))


@pytest.mark.parametrize("name", UNSEEING)
def test_queries_that_a_band_hides_all_keys_of(name, normal):
    run, operands, _ = unseeing(normal, name, "split", "bfloat16")
    exact, _, _ = unseeing(normal, name, "xla", "float32")
    got, want = ([np.asarray(x, np.float64) for x in jax.jit(f)(*operands)] for f in (run, exact))
    hidden = np.isneginf(want[1])
    assert hidden.any()
    np.testing.assert_array_equal(np.isneginf(got[1]), hidden)
    for x in (got[0], got[2]):  # O and dQ have a row for each statistic
        np.testing.assert_array_equal(x[hidden], 0)
    near([got[1][~hidden], *got[2:]], [want[1][~hidden], *want[2:]])


@pytest.mark.parametrize("side", ["left", "right", "rows"])
def test_masks_that_hide_all_keys_of_some_queries(side, normal):
    """As of a batch of sentences: of 1, 57, 250 and 256 words."""
    operands = qkv(normal, 4, 256, 256, 8, 2, 64, dtype="bfloat16")
    words, place = jnp.array([1, 57, 250, 256]).reshape(4, 1, 1, 1), jnp.arange(256)
    mask = place < words if side == "right" else place >= 256 - words
    if side == "rows":
        mask = jnp.ones((256, 256), bool).at[jnp.array([0, 3, 200])].set(False)
    along = normal(operands[0].shape, "bfloat16")

    def run(attend, dtype):
        attend = functools.partial(attend, mask=mask, is_causal=side != "rows")
        given = [x.astype(dtype) for x in operands]
        return outcome(lambda *x: (attend(*x), 0.0), given, along)

    near(run(functools.partial(ours, implementation="cudnn"), "bfloat16"), run(theirs, "float32"))


@pytest.mark.parametrize("shape", [(2, 1, 1, 1), (1, 4, 96, 1), (2, 4, 1, 160)], ids=str)
@pytest.mark.parametrize("kind", ["arrays", "qkv", "packed"])
def test_a_bias_of_which_queries_or_keys_share_elements(kind, shape, normal):
    attend, avals, scores = of_kind(kind)
    kept_ = tuple(a if b > 1 else 1 for a, b in zip(scores, shape, strict=True))
    operands = [*(normal(a.shape, a.dtype) for a in avals), normal(kept_, "bfloat16")]
    along = normal(jax.eval_shape(attend, *avals).shape, "bfloat16")
    wide = [x.astype("float32") for x in operands]

    def run(implementation, operands):
        function = functools.partial(attend, implementation=implementation)
        return [*outcome(lambda *x: (function(*x), 0.0), operands, along)]

    got, want = run("cudnn", operands), run("xla", wide)
    if shape[3] == 1:  # its gradient is nothing but rounding: all keys alike
        (*got, none), (*want, _) = got, want
        assert np.abs(np.asarray(none, np.float32)).max() < 0.5
    near(got, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_and_backward_drop_the_same_weights(dtype):
    check_masks(limit=2e-2, implementation="cudnn", dtype=dtype, t=128)


def test_the_mask_that_is_written_is_the_one_that_is_used(normal):
    """In a causal forward and in one without statistics, too: a derivative reads the former's."""
    q, k, _ = qkv(normal, t=128, s=128, h=64, dtype="bfloat16")
    v = jnp.broadcast_to(jnp.eye(128, dtype="bfloat16")[:, None], (2, 128, 4, 128))
    written = np.asarray(kept(q, k, 0.3, implementation="cudnn")) != 0
    for causal in (False, True):
        dropped = functools.partial(ours, dropout_rate=0.3, dropout_rng=KEY, is_causal=causal)
        used = np.moveaxis(np.asarray(jax.jit(dropped)(q, k, v), np.float32) != 0, 2, 1)
        seen = np.tri(128, dtype=bool) if causal else np.ones((128, 128), bool)
        np.testing.assert_array_equal(used[..., seen], written[..., seen])


@pytest.mark.parametrize("kind", ["arrays", "packed", "qkv", "fp8", "in little workspace"])
def test_a_deterministic_backward_repeats(kind, normal):
    attend, avals, _ = of_kind(kind, length=2048, width=128)
    given = {"max_workspace": 2**25} if kind == "in little workspace" else {}
    operands = [normal(a.shape, a.dtype) for a in avals]

    def step(options):
        loss = lambda *x: (attend(*x, options=options).astype("float32") ** 2).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, tuple(range(len(operands)))))

    ordered = step(jc.Options(deterministic=True, **given))
    first = [np.asarray(x, np.float32) for x in ordered(*operands)]
    for _ in range(5):
        for a, b in zip(ordered(*operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), b)
    near(first, step(jc.Options())(*operands), 1e-2)
