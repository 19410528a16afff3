"""Attention of queries, keys and values in one array."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, relative_error

import jax_cudnn as jc
from jax_cudnn._core.planning.execution_plan import VIEW

S = jax.ShapeDtypeStruct
ours = jc.ops.dot_product_attention_qkv
RNG = np.random.default_rng(0)


def normal(shape, dtype="float32"):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def parts(qkv, heads):
    """The same by the function of three arrays, of jax.nn where that has it all."""
    of_keys = (qkv.shape[2] - heads) // 2
    return jnp.split(qkv, [heads, heads + of_keys], axis=2)


def outcome(function, operands, along):
    @jax.jit
    def run(*operands):
        out, pull = jax.vjp(function, *operands)
        return out, *pull(along.astype(out.dtype))

    return run(*operands)


CASES = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (3, 0)},
    "lengths": {
        "query_seq_lengths": jnp.array([9, 4], "int32"),
        "key_value_seq_lengths": jnp.array([7, 9], "int32"),
    },
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_jax_nn(name, heads):
    """Of 12 heads in all: 4 of each, and 6 of queries beside 3 of keys."""
    qkv, bias, along = normal((2, 9, 12, 8)), normal((1, heads, 9, 9)), normal((2, 9, heads, 8))

    def plain(qkv, bias):
        return jax.nn.dot_product_attention(*parts(qkv, heads), bias, **CASES[name])

    got = outcome(lambda qkv, bias: ours(qkv, heads, bias, **CASES[name]), (qkv, bias), along)
    for a, b in zip(got, outcome(plain, (qkv, bias), along), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("heads", [4, 6])
def test_queries_whose_keys_a_mask_hides_are_those_of_jax_nn(heads):
    qkv, along = normal((2, 9, 12, 8)), normal((2, 9, heads, 8))
    mask = jnp.ones((2, 1, 1, 9), bool).at[1, ..., :3].set(False)

    def plain(qkv):
        return jax.nn.dot_product_attention(*parts(qkv, heads), mask=mask, is_causal=True)

    got = outcome(lambda qkv: ours(qkv, heads, None, mask, is_causal=True), (qkv,), along)
    for a, b in zip(got, outcome(plain, (qkv,), along), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_three_in_a_dimension_of_their_own():
    qkv = normal((2, 9, 3, 4, 8))
    want = ours(qkv.reshape(2, 9, 12, 8), 4, is_causal=True)
    for heads in (None, 4):
        np.testing.assert_array_equal(ours(qkv, heads, is_causal=True), want)


def test_residual_mask_and_positions_from_the_last():
    qkv = normal((2, 9, 8, 8))
    mask = jnp.asarray(RNG.random((2, 1, 9, 9)) < 0.7).at[..., 0].set(True)
    given = {"is_causal": True, "bottom_right": True, "return_residual": True}
    got = ours(qkv, 4, None, mask, **given)
    want = jc.ops.dot_product_attention(*parts(qkv, 4), None, mask, **given)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=1e-5)

    def loss(f):
        return jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in f(x)))(qkv)

    of_parts = lambda x: jc.ops.dot_product_attention(*parts(x, 4), None, mask, **given)  # noqa: E731
    np.testing.assert_allclose(
        loss(lambda x: ours(x, 4, None, mask, **given)), loss(of_parts), atol=1e-4
    )


# -- transformations -------------------------------------------------------------------------------

attend = functools.partial(ours, num_heads=4, is_causal=True)


def plain_attend(qkv):
    return jax.nn.dot_product_attention(*parts(qkv, 4), is_causal=True)


def test_forward_mode_and_second_derivatives():
    qkv, along = normal((1, 6, 8, 4)), normal((1, 6, 8, 4))
    cubes = lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 3))  # noqa: E731
    for wrapped in (lambda f: f, cubes):
        got, want = (jax.jvp(wrapped(f), (qkv,), (along,))[1] for f in (attend, plain_attend))
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_vmap_is_further_examples(shared):
    qkv, bias = normal((3, 2, 9, 8, 8)), normal((1, 4, 9, 9))
    axes = (0, None if shared else 0)
    operands = (qkv, bias if shared else jnp.stack([bias, bias + 1, 2 * bias]))
    function = lambda qkv, bias: ours(qkv, 4, bias if shared else jnp.repeat(bias, 2, 0))  # noqa: E731
    plain = lambda qkv, bias: jax.nn.dot_product_attention(*parts(qkv, 4), bias)  # noqa: E731
    got, want = (jax.vmap(f, axes)(*operands) for f in (function, plain))
    np.testing.assert_allclose(got, want, atol=1e-5)
    (spec,) = graphs_of(jax.vmap(function, axes), *operands)
    ((_, first), *_) = spec.calls[-1].inputs
    assert spec.tensor(first).shape[0] == 6


def test_the_batch_may_be_sharded():
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 (host) devices")
    qkv = normal((8, 9, 8, 8))
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    step = jax.grad(lambda x: jnp.sum(attend(x) ** 2))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(mapped)(qkv), step(qkv), atol=1e-5)


# -- errors ----------------------------------------------------------------------------------------

WRONG = {
    "no number of heads": (lambda: ours(jnp.ones((2, 8, 12, 16))), ["num_heads=None"]),
    "heads": (lambda: ours(jnp.ones((2, 8, 12, 16)), 5), ["do not fit", "12, 16", "num_heads=5"]),
    "groups": (lambda: ours(jnp.ones((2, 8, 14, 16)), 4), ["a multiple of K"]),
    "rank": (lambda: ours(jnp.ones((2, 8, 12)), 4), ["(B, T, 3, N, H)"]),
    "integers": (lambda: ours(jnp.ones((2, 8, 12, 16), "int32"), 4), ["qkv has a dtype"]),
    "scale": (
        lambda: ours(jnp.ones((2, 8, 12, 16)), 4, scale=jnp.float32(0.3)),
        ["scale is no Python number", "multiply the query", "static_argnames"],
    ),
    "bias": (
        lambda: ours(jnp.ones((2, 8, 12, 16)), 4, jnp.ones((3, 1, 1, 8))),
        ["bias does not fit", "[2, 4, 8, 8]"],
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_say_what_was_expected_and_given(what):
    call, said = WRONG[what]
    with pytest.raises((jc.GraphError, jc.GraphTypeError)) as caught:
        call()
    for part in said:
        assert part in str(caught.value), str(caught.value)


# -- plans without a GPU ---------------------------------------------------------------------------

SIZES = {"heads": (2, 256, 12, 64), "grouped": (2, 200, 8 + 2 * 2, 128)}
HEADS = {"heads": 4, "grouped": 8}


def loss(qkv, heads, **arguments):
    return (ours(qkv, heads, is_causal=True, **arguments).astype("float32") ** 2).sum()


@pytest.mark.deviceless
@pytest.mark.parametrize("gpu", ["H200", "A100", "B200"])
@pytest.mark.parametrize("name", SIZES)
def test_plans_read_and_write_parts_of_one_array(name, gpu):
    step = jax.grad(functools.partial(loss, heads=HEADS[name], implementation="cudnn"))
    (_, _, m, d), n = SIZES[name], HEADS[name]
    with jc.target(gpu):
        plans = jc.plans(step, S(SIZES[name], "bfloat16"))
    offsets = [2 * d * heads for heads in (n, n + (m - n) // 2)]  # of keys and of values, in bytes
    for plan, arrays in zip(plans.values(), (1, 2), strict=True):
        (segment,) = plan.segments
        views = [row[3] for row in segment.plan.bindings if row[1] == VIEW]
        assert views == offsets * arrays


@pytest.mark.deviceless
def test_nothing_is_cut_or_put_together():
    step = jax.grad(functools.partial(loss, heads=8))
    forward, backward = graphs_of(step, S(SIZES["grouped"], "bfloat16"))
    assert (methods(forward), methods(backward)) == (["qkv_sdpa"], ["qkv_sdpa_backward"])
    with jc.target("H200"):
        traced = jax.jit(step).trace(S(SIZES["grouped"], "bfloat16"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for operation in ("slice", "concatenate", "pad", "transpose"):
        assert f"stablehlo.{operation}" not in text


# -- on the GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_results_and_gradients_on_the_gpu(name, biased, dtype):
    """Beside those of three arrays, by XLA in float32."""
    heads, shape = HEADS[name], SIZES[name]
    qkv, along = normal(shape, dtype), normal((*shape[:2], heads, shape[3]), dtype)
    operands = [qkv, *([normal((1, heads, shape[1], shape[1]), dtype)] if biased else [])]

    def function(qkv, bias=None):
        return ours(qkv, heads, bias, is_causal=True, implementation="cudnn")

    def plain(qkv, bias=None):
        given = {"is_causal": True, "implementation": "xla"}
        return jc.ops.dot_product_attention(*parts(qkv, heads), bias, **given)

    want = outcome(plain, [x.astype("float32") for x in operands], along.astype("float32"))
    for a, b in zip(outcome(function, operands, along), want, strict=True):
        a = np.asarray(a, np.float64)
        assert np.isfinite(a).all()
        assert relative_error(a, np.asarray(b, np.float64)) < 2e-2


@pytest.mark.gpu
def test_the_program_on_the_gpu_copies_no_part():
    """Neither in front of the forward nor behind the backward."""
    qkv = normal((2, 1024, 8 + 2 * 2, 128), "bfloat16")
    step = jax.jit(jax.grad(functools.partial(loss, heads=8, implementation="cudnn")))
    text = step.lower(qkv).compile().as_text()
    assert text.count('custom_call_target="jax_cudnn"') == 2
    moved = re.findall(r"bf16\[2,1024,\d+,128\]\S* (slice|concatenate|copy|transpose|pad)\(", text)
    assert moved == []
