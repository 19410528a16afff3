"""Attention of queries, keys and values in one array: beside that of three."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import drawing, outcome
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from transformations import graphs_of, methods, relative_error

import jax_cudnn as jc
from jax_cudnn._core.planning.execution_plan import VIEW

S = jax.ShapeDtypeStruct
ours, three = jc.ops.dot_product_attention_qkv, jc.ops.dot_product_attention


@pytest.fixture
def normal(key):
    return drawing(key)


def parts(qkv, heads):
    of_keys = (qkv.shape[2] - heads) // 2
    return jnp.split(qkv, [heads, heads + of_keys], axis=2)


LEFT = jnp.ones((2, 1, 1, 9), bool).at[1, ..., :3].set(False)
CASES = {
    "window": {"is_causal": True, "local_window_size": (3, 0), "scale": 0.3},
    "from the last": {"is_causal": True, "bottom_right": True},
    "hidden queries": {"is_causal": True, "mask": LEFT},
    "lengths": {
        "query_seq_lengths": jnp.array([9, 4], "int32"),
        "key_value_seq_lengths": jnp.array([7, 9], "int32"),
    },
}


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_three_arrays(name, heads, normal):
    """Of 12 heads in all: 4 of each, and 6 of queries beside 3 of keys."""
    operands = normal((2, 9, 12, 8)), normal((1, heads, 9, 9))
    given = {"return_residual": True, **CASES[name]}
    along = normal((2, 9, heads, 8)), normal((2, 9, heads))
    got = outcome(lambda x, bias: ours(x, heads, bias, **given), operands, *along)
    want = outcome(lambda x, bias: three(*parts(x, heads), bias, **given), operands, *along)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_three_in_a_dimension_of_their_own(normal):
    qkv = normal((2, 9, 3, 4, 8))
    want = ours(qkv.reshape(2, 9, 12, 8), 4, is_causal=True)
    for heads in (None, 4):
        np.testing.assert_array_equal(ours(qkv, heads, is_causal=True), want)


attend = functools.partial(ours, num_heads=4, is_causal=True)


def test_forward_mode_and_second_derivatives(normal):
    qkv, along = normal((1, 6, 8, 4)), normal((1, 6, 8, 4))
    plain = lambda qkv: jax.nn.dot_product_attention(*parts(qkv, 4), is_causal=True)  # noqa: E731
    cubes = lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 3))  # noqa: E731
    for wrapped in (lambda f: f, cubes):
        got, want = (jax.jvp(wrapped(f), (qkv,), (along,))[1] for f in (attend, plain))
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_vmap_is_further_examples(shared, normal):
    qkv, bias = normal((3, 2, 9, 8, 8)), normal((3, 1, 4, 9, 9))
    axes, bias = (0, None if shared else 0), bias[0] if shared else bias
    function = lambda x, bias: ours(x, 4, bias if shared else jnp.repeat(bias, 2, 0))  # noqa: E731
    want = jax.vmap(lambda x, bias: three(*parts(x, 4), bias), axes)(qkv, bias)
    np.testing.assert_allclose(jax.vmap(function, axes)(qkv, bias), want, atol=1e-5)
    (spec,) = graphs_of(jax.vmap(function, axes), qkv, bias)
    assert spec.tensor(spec.calls[-1].inputs[0][1]).shape[0] == 6


def test_the_batch_may_be_sharded(normal):
    qkv = normal((8, 9, 8, 8))
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
    step = jax.grad(lambda x: jnp.sum(attend(x) ** 2))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(mapped)(qkv), step(qkv), atol=1e-5)


SIZES = {"heads": (4, (2, 256, 12, 64)), "grouped": (8, (2, 200, 8 + 2 * 2, 128))}


def loss(qkv, heads, **arguments):
    return (ours(qkv, heads, is_causal=True, **arguments).astype("float32") ** 2).sum()


@pytest.mark.deviceless
@pytest.mark.parametrize(("name", "gpu"), [("heads", "A100"), ("grouped", "H200")])
def test_plans_read_and_write_parts_of_one_array(name, gpu):
    heads, shape = SIZES[name]
    step = jax.grad(functools.partial(loss, heads=heads, implementation="cudnn"))
    with jc.target(gpu):
        plans = jc.plans(step, S(shape, "bfloat16"))
        traced = jax.jit(step).trace(S(shape, "bfloat16"))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Of keys and of values, in bytes.
    offsets = [2 * shape[3] * n for n in (heads, heads + (shape[2] - heads) // 2)]
    for plan, arrays in zip(plans.values(), (1, 2), strict=True):
        (segment,) = plan.segments
        views = [row[3] for row in segment.plan.bindings if row[1] == VIEW]
        assert views == offsets * arrays
    made = [methods(spec) for spec in graphs_of(step, S(shape, "bfloat16"))]
    assert made == [["qkv_sdpa"], ["qkv_sdpa_backward"]]
    for operation in ("slice", "concatenate", "pad", "transpose"):
        assert f"stablehlo.{operation}" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_results_and_gradients_on_the_gpu(name, biased, normal):
    """Beside those of three arrays, by XLA in float32."""
    heads, shape = SIZES[name]
    operands = [normal(shape, "bfloat16")]
    operands += [normal((1, heads, shape[1], shape[1]), "bfloat16")] if biased else []
    along = normal((*shape[:2], heads, shape[3]), "bfloat16")

    def function(qkv, bias=None):
        given = {"is_causal": True, "implementation": "cudnn", "return_residual": True}
        return ours(qkv, heads, bias, **given)

    def plain(qkv, bias=None):
        given = {"is_causal": True, "implementation": "xla", "return_residual": True}
        return three(*parts(qkv, heads), bias, **given)

    want = outcome(plain, [x.astype("float32") for x in operands], along)
    for a, b in zip(outcome(function, operands, along), want, strict=True):
        assert relative_error(np.asarray(a, np.float64), np.asarray(b, np.float64)) < 2e-2


@pytest.mark.gpu
def test_the_program_on_the_gpu_copies_no_part(normal):
    """Neither in front of the forward nor behind the backward."""
    qkv = normal((2, 1024, 8 + 2 * 2, 128), "bfloat16")
    step = jax.jit(jax.grad(functools.partial(loss, heads=8, implementation="cudnn")))
    text = step.lower(qkv).compile().as_text()
    assert text.count('custom_call_target="jax_cudnn"') == 2
    moved = re.findall(r"bf16\[2,1024,\d+,128\]\S* (slice|concatenate|copy|transpose|pad)\(", text)
    assert moved == []
