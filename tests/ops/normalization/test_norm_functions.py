"""The norms of jax_cudnn.ops, batch_norm too: graphs and plans, dtypes, what random calls lack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_norm_calls import IMAGE, Case, with_
from helpers import cotangents_of, exactly, outcome, same
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from norm_calls import KINDS, PLANNED, assert_close, group, instance, layer, rms
from transformations import graphs_of, methods, relative_error

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary

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
    (call,) = boundary(backward).planned.calls
    written = [port for port, _ in call.outputs]
    assert written == (["DX", "DScale"] if name == "rms" else ["DX", "DScale", "DBias"])
    assert (len(backward.outputs), len(boundary(backward).planned.outputs)) == (1, len(written))
    assert boundary(backward).planned.outputs[0] == backward.outputs[0]

    (alone,) = graphs_of(case.y, *avals)
    (call,) = boundary(alone).planned.calls
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


MOVED = ("HWNC", "OIHW", "CHWN")
ROUNDED = [  # with dtypes of x and of parameters
    (with_(IMAGE, given="scale bias residual"), "float16", "float32"),
    (Case((2, 3, 2, 7, 2, 3), -3, given="", activation="leaky_relu"), "bfloat16", "float32"),
    (Case((5, 6, 2, 4), 0, w=(6, 4, 3, 3), numbers=MOVED), "float32", "bfloat16"),
]


@pytest.mark.parametrize(("case", "dtype", "parameters"), ROUNDED)
def test_values_are_rounded_once_to_xs_dtype_and_statistics_to_theirs(case, dtype, parameters):
    """In front of residual and activation also; of axes that random calls do not have."""
    operands = case.operands(dtype, parameters)
    got, want = case(*operands), exactly(case.plain, operands, case(*operands))[0]
    assert [g.dtype for g in got] == [dtype, parameters, parameters]
    once = {"float32": 2e-5, "bfloat16": 2**-9, "float16": 2**-12}
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) <= 2 * once[str(a.dtype)]


@pytest.mark.parametrize("case", [IMAGE, with_(IMAGE, w=(3, 3, 6, 6))], ids=["alone", "conv"])
def test_nan_in_the_running_statistics_stays_out_of_a_training_step(case):
    """Nor does infinity reach y."""
    count = len(case.arrays)
    operands = case.operands()
    good = case.plain(*operands)
    for value in (np.nan, np.inf):
        bad = jnp.full(6, value, jnp.float32)
        given = [*operands[:count], bad, bad, *operands[count + 2 :]]
        (y, *new), (dx, *_) = outcome(case, given, [jnp.sin(good[0]), *good[1:]])
        np.testing.assert_allclose(y, good[0], rtol=1e-4, atol=1e-4)
        assert not np.isfinite(new).any()
        assert np.isfinite(dx).all()


@pytest.mark.parametrize("number", [1, jnp.bfloat16(0.25)], ids=["int", "array"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_momentum_and_epsilon_in_any_form_and_the_gradient_by_it(number, training):
    case = with_(IMAGE, training=training, epsilon=float(number))
    operands = case.operands()
    operands[3] = jnp.float32(number)
    want = case.plain(*operands)
    same(case(*operands, momentum=number, epsilon=number), want, 1e-4)
    cotangents = cotangents_of(want)
    given = [jnp.float32(number), *operands]
    got = outcome(lambda e, *a: case(*a, epsilon=e), given, cotangents)
    same(got, exactly(lambda e, *a: with_(case, epsilon=e).plain(*a), given, cotangents), 2e-4)


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 (host) devices")
@pytest.mark.parametrize(
    ("w", "kind", "spec"),
    [
        ((3, 3, 8, 4), AxisType.Auto, P("data")),
        ((), AxisType.Explicit, P(None, None, None, "data")),  # where no axis is sliced
    ],
)
def test_under_jit_statistics_are_those_of_the_whole_batch(w, kind, spec):
    case = Case((16, 3, 3, 8), activation="relu", w=w)
    x, *others = case.operands()
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("data",), axis_types=(kind,))
    whole = [jax.device_put(v, NamedSharding(mesh, P())) for v in others]

    def both(f):
        def total(*a):
            y, mean, var = f(*a)
            return jnp.sum(jnp.sin(y)) + jnp.sum(mean * var)

        return jax.jit(lambda *a: (f(*a), jax.grad(total, tuple(range(len(a))))(*a)))

    with jax.set_mesh(mesh):
        got = jax.device_get(both(case)(jax.device_put(x, NamedSharding(mesh, spec)), *whole))
    same(got, both(case.plain)(x, *others), 2e-4)
