"""Attention on the GPU: cuDNN compared with XLA, which other tests compare with float64; and cases
that cuDNN's engines got wrong."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import CAUSAL, check, check_masks, lengths, made, outcome
from attention_table import (
    OF_INFINITY,
    ON_BLACKWELL,
    TABLE,
    UNSEEN,
    dense,
    fp8,
    gradients,
    in_pages,
    ints,
    one_array,
    packed,
)  # fmt: skip
from transformations import relative_error

import jax_cudnn as jc

pytestmark = pytest.mark.gpu


def drawn(normal, aval, dtype="bfloat16"):
    if aval.dtype == "bool":
        return normal(aval.shape) < 0.8
    if aval.dtype == "int32":  # for example document indices
        places = np.indices(aval.shape)[int(np.argmax(aval.shape))]
        return jnp.asarray(places // 100, "int32")
    return normal(aval.shape, dtype if aval.dtype == "bfloat16" else aval.dtype)


def near(got, want, limit=2e-2):
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(a).all()
        assert relative_error(a, b) < limit


def compare(function, operands, limit=2e-2, shared=False):
    """Results and gradients compared with XLA in float32; the gradient of a bias shared by all keys
    is 0 up to rounding."""
    places = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]
    wide = [x.astype("float32") if i in places else x for i, x in enumerate(operands)]

    def run(implementation, operands):
        f = functools.partial(function, implementation=implementation)
        return [jax.jit(f)(*operands), *jax.jit(gradients(f, places))(*operands)]

    got, want = run(None, operands), run("xla", wide)
    if shared:
        assert jnp.abs(got.pop()).max() < 0.5
        want.pop()
    near(got, want, limit)


def distant(s, b, h, i, j):
    return 4 * jnp.tanh(s / 4) - (h + 1.0) * (i - j) / 512


LENGTHS = [2048, 64, 0, 1500, 300, 777, 128, 1000]
OTHERS = {  # sizes of language models, and partial tiles
    "many tiles": dense(b=1, t=2048, s=2048, n=8, k=2, h=128, score_mod=distant, **CAUSAL),
    "fp8 of many": dense(attend=fp8, b=1, t=2048, s=2048, n=8, k=2, h=128, **CAUSAL),
    "pages": in_pages(ends=range(2048, 0, -128), n=32, k=8, h=128, per=32, **CAUSAL),
    "packed": packed(
        t=6000, s=6000, n=16, k=4, h=128, ends=[(0, *np.cumsum(LENGTHS))] * 2, **CAUSAL
    ),
    "packed, out of range": packed(
        t=256, s=256, n=4, ends=[(-50, 100, 5000), (200, 100, -7)], longest=(64, 64)
    ),
    **{
        f"{name} of {t}": dense(t=t, s=160, score_mod=change, operands=operands)
        for name, (change, operands) in OF_INFINITY.items() for t in (96, 192)
    },
}  # fmt: skip
SHARED = ("column of bias", "qkv, number as bias")
PAIRS = [
    *((n, "bfloat16") for n in (*TABLE, *OTHERS) if n not in ON_BLACKWELL and "dropout" not in n),
    *((n, "float16") for n in ("sink, lengths", "row of bias", "qkv", "packed, bias", "documents")),
    *((n, "float32") for n in ("odd lengths", "window, lengths", "row of bias", "sink")),
]


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_results_and_gradients(name, dtype, normal):
    function, avals, _ = TABLE.get(name) or OTHERS[name]
    operands = [drawn(normal, a, dtype) for a in avals]
    compare(function, operands, 0.13 if "fp8" in name else 2e-2, shared=name in SHARED)


ONE = {"b": 4, "t": 1, "lengths": ([1, 0, 1, 0], [77, 77, 0, 0])}
ONE_QUERY = {
    "own keys": dense(**ONE),
    "shared keys": dense(k=2, **ONE),
    "bias": dense(bias=(1, 4, 1, 256), **ONE),
    "qkv": one_array(t=1, query_seq_lengths=ints(1, 0), key_value_seq_lengths=ints(1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_QUERY)
def test_one_query_that_is_not_there(name, normal):
    """cuDNN computes it whatever its length; gradients are XLA's."""
    function, avals, _ = ONE_QUERY[name]
    operands = [drawn(normal, a) for a in avals]
    got, want = (function(*operands, implementation=i) for i in ("cudnn", "xla"))
    near([got], [want])
    compare(function, operands)


def rows(function, operands, **more):
    """The result, the statistic and the gradients, from cuDNN and from XLA in float32."""
    found = []
    for implementation, dtype in ((None, "bfloat16"), ("xla", "float32")):
        given = {"implementation": implementation, "return_residual": True, **more}
        operands = [x.astype(dtype) for x in operands]
        shape = jax.eval_shape(functools.partial(function, **given), *operands)[0].shape
        along = jnp.broadcast_to(jnp.cos(jnp.arange(shape[-1])), shape)
        found.append(outcome(functools.partial(function, **given), operands, along))
    return ([np.asarray(x, np.float64) for x in each] for each in found)


UNSEEING = ("window of all lengths", "more queries than keys", "pages, prefill", "packed, window")


@pytest.mark.parametrize("name", ["window", *UNSEEING, "sink, lengths"])
def test_queries_that_see_no_key_and_statistics(name, normal):
    """Natural log-sum-exps; rows that see no key keep their initial value."""
    function, avals, _ = UNSEEN if name == "window" else TABLE[name]
    got, want = rows(function, [drawn(normal, a) for a in avals])
    unseen = np.isneginf(want[1])
    assert unseen.any() or name == "sink, lengths"
    np.testing.assert_array_equal(np.isneginf(got[1]), unseen)
    for x in (got[0], got[2]):  # O and dQ have a row for each statistic
        np.testing.assert_array_equal(x[unseen], 0)
    near([got[1][~unseen], *got[2:]], [want[1][~unseen], *want[2:]])


def test_dropout(normal):
    """Forward and backward passes drop the same weights, which the forward pass writes."""
    dtype = "bfloat16"
    check_masks(limit=2e-2, implementation="cudnn", dtype=dtype, t=128)
    has = {"rate": 0.1, "sink": True, "alibi": True, **lengths([256, 128], [253, 133])}
    sizes = {"t": 256, "s": 256, "k": 2, "h": 64}
    case = made(normal, sizes, {**has, **CAUSAL}, dtype, implementation="cudnn")
    check(normal, *case, 2e-2, of_logs=False)


def test_dropout_of_a_part_of_the_batch(normal):
    """Shards of a batch rely on it: 32 more in the offset is the next head, or example."""
    mask = jax.jit(jc.graph(lambda g, q, seed, offset: g.sdpa(
        q, q, q, seed=seed, offset=offset, dropout_probability=0.4, rng_dump=True)[-1]
    ).with_options(implementation="cudnn"))  # fmt: skip
    q = normal((4, 3, 128, 64), "bfloat16")
    words = [jnp.array([n, 0], jnp.uint32).reshape(1, 1, 1, 2) for n in (7, 5, 5 + 32 * 2 * 3)]
    np.testing.assert_array_equal(mask(q[2:], words[0], words[2]), mask(q, *words[:2])[2:])


ORDERED = {
    "arrays": functools.partial(dense, b=1, t=2048, s=2048, h=128, sink=True, **CAUSAL),
    "fp8": functools.partial(dense, attend=fp8, b=1, t=2048, s=2048, h=128, **CAUSAL),
}


@pytest.mark.parametrize("kind", ORDERED)
def test_a_deterministic_backward_repeats(kind, normal):
    found, operands = [], None
    for deterministic in (True, False):
        function, avals, count = ORDERED[kind](options=jc.Options(deterministic=deterministic))
        operands = operands or [drawn(normal, a) for a in avals]
        step = jax.jit(gradients(function, range(count)))
        found.append([np.asarray(x, np.float32) for x in step(*operands)])
        for _ in range(5 * deterministic):
            for a, b in zip(step(*operands), found[0], strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), b)
    near(*found, 1e-2)
