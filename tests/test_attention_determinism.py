"""``Options(deterministic=True)`` reaches the backward of each kind of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformations import graphs_of, relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.node import REGISTRY
from jax_cudnn.ops.ordered import Ordered

S = jax.ShapeDtypeStruct
DETERMINISTIC = jc.Options(deterministic=True)
LENGTH, HEADS, WIDTH = 2048, 4, 128


def packed(q, k, v, **options):
    ends = jnp.array([0, LENGTH // 2, LENGTH], "int32")
    return jc.ops.packed_dot_product_attention(
        q, k, v, query_offsets=ends, max_query_length=LENGTH, is_causal=True, **options
    )


def of_one_array(qkv, **options):
    return jc.ops.dot_product_attention_qkv(qkv, HEADS, is_causal=True, **options)


ARRAYS = [(1, LENGTH, HEADS, WIDTH)] * 3
KINDS = {
    "dense": (functools.partial(jc.ops.dot_product_attention, is_causal=True), ARRAYS),
    "packed": (packed, [(LENGTH, HEADS, WIDTH)] * 3),
    "qkv": (of_one_array, [(1, LENGTH, 3 * HEADS, WIDTH)]),
    "fp8": (functools.partial(jc.ops.dot_product_attention_fp8, is_causal=True), ARRAYS),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def gradients(kind, options):
    function, shapes = KINDS[kind]
    loss = lambda *x: (function(*x, options=options).astype("float32") ** 2).sum()  # noqa: E731
    return jax.grad(loss, tuple(range(len(shapes)))), [S(shape, "bfloat16") for shape in shapes]


def backward(plans):
    *_, last = plans.values()
    return last


@each_kind
def test_the_backward_is_asked_for_sums_of_one_order(kind):
    for options in (DETERMINISTIC, jc.Options()):
        step, avals = gradients(kind, options)
        nodes = [call.node for spec in graphs_of(step, *avals) for call in spec.calls]
        (node,) = [n for n in nodes if n.method.endswith("backward")]
        assert node.deterministic is options.deterministic
        assert node.keywords().get("use_deterministic_algorithm", False) is options.deterministic


def test_each_backward_of_the_registry_is_settled():
    backwards = {
        node for name, node in REGISTRY.items() if "sdpa" in name and name.endswith("backward")
    }
    assert backwards == {node for node in REGISTRY.values() if issubclass(node, Ordered)}
    for node in backwards:
        plain = node.create(**node.examples[0].attributes)
        assert (plain.deterministic, plain.settled().deterministic) == (False, True)


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", ["dense", "packed", "qkv"])
def test_its_workspace_is_that_of_all_scores(kind):
    """Of 16 bits, on Hopper; which fp8's backward does without."""
    found = []
    for options in (DETERMINISTIC, jc.Options()):
        step, avals = gradients(kind, options)
        with jc.target("H200"):
            (segment,) = backward(jc.plans(step, *avals)).segments
        found.append(segment.plan.workspace_bytes)
    scores = 2 * HEADS * LENGTH**2
    assert found[0] >= scores > found[1]


@pytest.mark.deviceless
@pytest.mark.parametrize("kind", ["dense", "packed", "qkv"])
def test_beyond_the_limit_there_is_another_engine_or_a_reason(kind):
    small = jc.Options(deterministic=True, max_workspace=2**24)
    step, avals = gradients(kind, small)
    with jc.target("H200"):
        (segment,) = backward(jc.plans(step, *avals)).segments
    if segment.plan is None:
        assert "max_workspace" in segment.reason
    else:  # from cuDNN 9.25 on
        assert segment.plan.workspace_bytes <= 2**24


@pytest.mark.gpu
@each_kind
def test_it_repeats_on_the_gpu(kind, key):
    step, avals = gradients(kind, jc.Options(deterministic=True, implementation="split"))
    operands = [
        jax.random.normal(k, a.shape, a.dtype)
        for k, a in zip(jax.random.split(key, len(avals)), avals, strict=True)
    ]
    step = jax.jit(step)
    first = [np.asarray(x, np.float32) for x in step(*operands)]
    for _ in range(5):
        for a, b in zip(step(*operands), first, strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), b)
    usual = jax.jit(gradients(kind, jc.Options())[0])(*operands)
    for a, b in zip(first, usual, strict=True):
        assert np.isfinite(a).all()
        assert relative_error(a, np.asarray(b, np.float32)) < 1e-2
