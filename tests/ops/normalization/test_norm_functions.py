"""The norms of jax_cudnn.ops x their options, beside float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cotangents_of, exactly, outcome
from norm_calls import KINDS, PLANNED, assert_close, group, instance, layer, rms
from transformations import graphs_of, methods

import jax_cudnn as jc
from jax_cudnn._core.graph.wire import wire

each_kind = pytest.mark.parametrize("name", KINDS)


@each_kind
def test_epsilon_as_an_array_with_its_gradient(name):
    case = KINDS[name]
    operands, epsilon = case.operands(), jnp.float32(0.3)
    cotangents = cotangents_of(jax.eval_shape(case, *operands))
    got = outcome(lambda e, *a: case(*a, epsilon=e), [epsilon, *operands], cotangents)
    want = exactly(lambda e, *a: case.plain(*a, epsilon=e), [epsilon, *operands], cotangents)
    assert_close(got, want)
    assert np.abs(want[1][0]) > 1e-2


def total(case, **keywords):
    return lambda *o: jnp.sum(jnp.sin(case.y(*o, **keywords).astype(jnp.float32)))


METHODS = {"rms": "rmsnorm", "ada": "adalayernorm", "instance": "instancenorm"}


@each_kind
def test_a_gradient_is_one_forward_and_one_backward(name):
    """The backward reads its operands and statistics, and nothing else of the size of x; what it
    writes and nobody reads has memory, and is dropped. Without gradient there are no statistics."""
    case = PLANNED["group, one"] if name == "group" else KINDS[name]
    avals, method = case.avals(), METHODS.get(name, "layernorm")
    assert {r.dtype.name for r in jax.eval_shape(case, *avals)[1:]} == {"float32"}
    forward, backward = graphs_of(jax.grad(total(case), tuple(range(len(avals)))), *avals)
    assert forward.output_tensors[0].dtype == "bfloat16"
    assert (methods(forward), methods(backward)) == ([method], [f"{method}_backward"])
    ports = [port for port, result in forward.calls[0].outputs if result in forward.outputs]
    assert ports == (["Y", "inv_var"] if name == "rms" else ["Y", "mean", "inv_var"])
    large = [t for t in backward.input_tensors if np.prod(t.shape) >= np.prod(case.x)]
    assert len(large) == 2, "x and the cotangent"
    _, backward = graphs_of(jax.grad(total(case)), *avals)
    (call,) = wire(backward).calls
    written = [port for port, _ in call.outputs]
    assert written == (["DX", "DScale"] if name == "rms" else ["DX", "DScale", "DBias"])
    assert (len(backward.outputs), len(wire(backward).outputs)) == (1, len(written))
    assert wire(backward).outputs[0] == backward.outputs[0]

    (alone,) = graphs_of(case.y, *avals)
    (call,) = wire(alone).calls
    assert call.node.norm_forward_phase == "INFERENCE"
    assert [port for port, _ in call.outputs] == ["Y"]


def test_group_norm_takes_arguments_in_the_order_of_other_libraries():
    x, scale, bias = (
        jnp.arange(n * 16.0).reshape(s) for n, s in ((12, (2, 6, 16)), (1, 16), (1, 16))
    )
    want = jc.ops.group_norm(x, scale=scale, bias=bias, num_groups=8)
    np.testing.assert_array_equal(jc.ops.group_norm(x, 8, scale, bias), want)
    words = r"not an integer[^$]*float32\[16\] array[^$]*group_norm\(x, num_groups, scale, bias\)"
    with pytest.raises(jc.GraphTypeError, match=words):
        jc.ops.group_norm(x, scale, bias)


def test_group_norm_with_a_scale_by_channel_keeps_x_and_statistics_alone():
    x = jnp.ones((2, 4, 4, 16), jnp.bfloat16)
    scale = bias = jnp.ones(16, jnp.bfloat16)
    _, pull = jax.eval_shape(
        lambda x, *o: jax.vjp(lambda x, *o: group(x, 4, *o), x, *o), x, scale, bias
    )
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.size >= x.size]
    assert {str(leaf.dtype) for leaf in kept} == {"bfloat16"}
    assert len(kept) <= 2, "x, and a view of it"


X, SHAPE, DTYPE = jnp.zeros((4, 6, 8)), jc.GraphError, jc.GraphTypeError
WRONG = {
    "scale": (lambda: layer(X, jnp.ones(6)), SHAPE, r"scale[^$]*\(8,\)[^$]*\(6,\)"),
    "scale of two axes": (lambda: rms(X, jnp.ones(8), axis=(1, 2)), SHAPE, r"\(6, 8\)"),
    "integers": (lambda: layer(X.astype(int)), DTYPE, r"x[^$]*int32[^$]*x.astype"),
    "axis": (lambda: rms(X, axis=3), SHAPE, "rank 3[^$]*axis=3"),
    "axis twice": (lambda: rms(X, axis=(1, -2)), SHAPE, r"different axes[^$]*\(1, -2\)"),
    "groups": (lambda: group(X, num_groups=3), SHAPE, "divisor of 8"),
    "channels first": (lambda: instance(X, axis=0), SHAPE, "axis=0"),
    "no spatial axis": (lambda: instance(X[0]), SHAPE, r"\*spatial"),
    "epsilons": (lambda: rms(X, epsilon=jnp.ones(2)), SHAPE, "epsilon"),
    "negative epsilon": (lambda: rms(X, epsilon=-1.0), SHAPE, "epsilon is not a number of at"),
    "epsilon NaN": (lambda: rms(X, epsilon=jnp.nan), SHAPE, "epsilon is not a number of at least"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what):
    call, kind, words = WRONG[what]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.deviceless
@pytest.mark.parametrize("name", PLANNED)
def test_forward_and_backward_are_a_plan_each(name):
    case = PLANNED[name]
    step = jax.grad(total(case, implementation="cudnn"), tuple(range(len(case.shapes))))
    with jc.target("H200"):
        found = jc.plans(step, *case.avals())
    title = "instance_norm" if "of each channel" in name else case.function.__name__
    assert [*found] == [title, f"{title} (backward)"]
    for plan in found.values():
        assert [segment.engine != "XLA" for segment in plan.segments] == [True]
