"""The graphs that a gradient's program holds: how many, of which nodes, and what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import FUSIONS
from helpers import assert_same, linear
from jax import lax
from transformations import equations, graphs_of, methods, primitives

import jax_cudnn as jc
from jax_cudnn._core import primitive
from jax_cudnn._core.planning import collect

_IMAGE, _WEIGHT, _CHANNELS = (2, 4, 6, 6), (4, 4, 3, 3), (1, 4, 1, 1)
_CONV = (_IMAGE, _WEIGHT)


def conv(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1])


def two_activations(g, x):
    return g.gelu(g.exp(x * 0.5) + 1.0)


# Function of g, shapes of its operands.
GRAPHS = {
    "conv": (conv, _CONV),
    "conv, bias": (lambda g, x, w, b: g.bias(conv(g, x, w), b), (*_CONV, _CHANNELS)),
    "conv, scale": (lambda g, x, w, s: g.scale(conv(g, x, w), s), (*_CONV, _CHANNELS)),
    "conv, bias, relu": (
        lambda g, x, w, b: g.relu(g.bias(conv(g, x, w), b)),
        (*_CONV, _CHANNELS),
    ),
    "conv, bias, gelu": (
        lambda g, x, w, b: g.gelu_approx_tanh(g.bias(conv(g, x, w), b)),
        (*_CONV, _CHANNELS),
    ),
    "conv, add, relu": (
        lambda g, x, w, r: g.relu(g.add(conv(g, x, w), r)),
        (*_CONV, _IMAGE),
    ),
    "conv, scale, bias, gelu": (
        lambda g, x, w, s, b: g.gelu(g.bias(g.scale(conv(g, x, w), s), b)),
        (*_CONV, _CHANNELS, _CHANNELS),
    ),
    "conv and its gelu": (
        lambda g, x, w: (lambda y: (y, g.gelu(y)))(conv(g, x, w)),
        _CONV,
    ),
    "matmul": (lambda g, a, b: g.matmul(a, b), ((2, 5, 4), (2, 4, 3))),
    "matmul, bias, gelu": (
        lambda g, a, b, c: g.gelu(g.bias(g.matmul(a, b), c)),
        ((1, 5, 4), (1, 4, 3), (1, 1, 3)),
    ),
    "activations": (two_activations, (_IMAGE,)),
    "product, tanh": (lambda g, x, y: g.tanh(g.mul(x, y)), (_IMAGE, _IMAGE)),
}
each_graph = pytest.mark.parametrize("what", GRAPHS)


def case(what, dtype="bfloat16"):
    function, shapes = GRAPHS[what]
    random = np.random.default_rng(0)
    return jc.graph(function), [
        jnp.asarray(random.standard_normal(shape), jnp.dtype(dtype)) for shape in shapes
    ]


def total(f):
    return lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*args))).astype(
        jnp.float32
    )


def value_and_gradients(what, wrap=lambda f: f, dtype="bfloat16", by=None):
    """The two graphs of a training step: forward and backward."""
    function, args = case(what, dtype)
    by = tuple(range(len(args))) if by is None else by
    return graphs_of(jax.value_and_grad(total(wrap(function)), by), *args)


def roles(specs):
    return [spec.origin.role for spec in specs]


# -- how many equations --------------------------------------------------------------------------


@each_graph
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_forward_is_one_equation_and_no_other(what, wrap):
    function, args = case(what)
    assert primitives(jax.make_jaxpr(wrap(function))(*args)) == ["cudnn"]


@each_graph
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradient_is_one_forward_and_one_backward(what, wrap):
    assert roles(value_and_gradients(what, wrap)) == ["forward", "backward"]


@each_graph
def test_tangent_is_one_graph_beside_the_forward(what):
    function, args = case(what)
    specs = graphs_of(lambda *a: jax.jvp(function, a, a), *args)
    assert roles(specs) == ["forward", "tangent"]


def repeated(f):
    """Two layers in a loop, by scan over weights."""

    def run(x, w, *rest):
        return lax.scan(lambda h, w: (f(h, w, *rest), None), x, jnp.stack([w, w]))[0]

    return run


@pytest.mark.parametrize("what", ["conv", "conv, bias, relu", "conv, bias, gelu"])
def test_in_a_loop_over_layers_each_loop_holds_one(what):
    assert roles(value_and_gradients(what, repeated)) == ["forward", "backward"]


# What the backward reads of the forward's own results or residuals: nothing, of these.
READS_OPERANDS_ALONE = {"conv", "conv, bias", "matmul", "activations", "product, tanh"}


@each_graph
def test_remat_computes_the_forward_again_where_the_backward_reads_it(what):
    again = [] if what in READS_OPERANDS_ALONE else ["forward"]
    assert roles(value_and_gradients(what, jax.checkpoint)) == ["forward", *again, "backward"]


@each_graph
def test_save_cudnn_keeps_the_forward(what):
    wrap = functools.partial(jax.checkpoint, policy=jc.save_cudnn)
    assert roles(value_and_gradients(what, wrap)) == ["forward", "backward"]


def test_what_is_computed_again_is_only_what_the_backward_reads():
    _, again, _ = value_and_gradients("conv, bias, gelu", jax.checkpoint)
    assert methods(again) == ["conv_fprop", "bias", "identity"]


@pytest.mark.parametrize(
    "policy",
    [
        jc.save_cudnn,
        jax.checkpoint_policies.save_from_both_policies(
            jc.save_cudnn, jax.checkpoint_policies.dots_saveable
        ),
    ],
    ids=["alone", "beside another policy"],
)
def test_save_cudnn_computes_all_else_again(policy):
    function, args = case("conv, bias, gelu", "float32")

    def block(*args):
        return jnp.cos(function(*(jnp.tanh(a) for a in args)))

    def program(**remat):
        f = jax.value_and_grad(lambda *a: jax.checkpoint(block, **remat)(*a).sum(), (0, 1, 2))
        return f, primitives(jax.make_jaxpr(jax.jit(f))(*args))

    kept, names = program(policy=policy)
    assert (names.count("cudnn"), names.count("tanh")) == (2, 6)
    again, names = program()
    assert (names.count("cudnn"), names.count("tanh")) == (3, 6)
    plain = jax.value_and_grad(lambda *a: block(*a).sum(), (0, 1, 2))
    assert_same(kept(*args), plain(*args))
    assert_same(again(*args), plain(*args))


# -- what is not needed --------------------------------------------------------------------------


def lowered(function, *args):
    """The graphs that lowering gets."""
    found = []

    def evaluate(spec, *operands, **options):
        found.append(spec)
        return real(spec, *operands, **options)

    real = primitive.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitive, "evaluate", evaluate)
        jax.jit(function).lower(*args)
    return found


def test_frozen_weights_have_no_weight_gradient():
    for by, missing, there in ((0, "conv_wgrad", "conv_dgrad"), (1, "conv_dgrad", "conv_wgrad")):
        function, args = case("conv, bias, relu")
        nodes = [m for s in lowered(jax.grad(total(function), by), *args) for m in methods(s)]
        assert missing not in nodes
        assert nodes.count(there) == nodes.count("conv_fprop") == 1


def test_stop_gradient_and_jit_with_unused_gradients_leave_nodes_out():
    function, args = case("conv, bias, relu")
    frozen = lambda x, w, b: function(x, lax.stop_gradient(w), b)  # noqa: E731
    unused = lambda *a: jax.grad(total(function), (0, 1, 2))(*a)[0]  # noqa: E731
    for program in (jax.grad(total(frozen)), unused):
        nodes = [m for s in lowered(program, *args) for m in methods(s)]
        assert not {"conv_wgrad", "reduction"} & {*nodes}
        assert "conv_dgrad" in nodes


def test_gradient_by_a_bias_alone_needs_no_convolution():
    function, args = case("conv, bias")
    pullback = lambda y, *a: jax.vjp(lambda b: function(*a[:2], b), a[2])[1](y)  # noqa: E731
    y = jnp.ones((2, 4, 6, 6), jnp.bfloat16)
    (spec,) = lowered(pullback, y, *args)
    assert methods(spec) == ["reduction"]


def test_unused_results_are_removed_before_lowering():
    x, w, b = jnp.ones((2, 3, 4)), jnp.ones((1, 4, 5)), jnp.ones((1, 1, 5))
    (spec,) = lowered(lambda *a: linear(*a)["hidden"], x, w, b)
    assert methods(spec) == ["matmul", "mul", "add"]
    two = jc.graph(lambda g, x, y: (g.exp(x), g.sin(y)))
    (spec,) = lowered(lambda x, y: two(x, y)[1], x, x + 1)
    assert (methods(spec), len(spec.inputs)) == (["sin"], 1)
    assert lowered(lambda x, y: (two(x, y), x)[1], x, x) == []
    specs = lowered(lambda *a: jax.jvp(two, a, a)[1][0], x, x + 1)
    assert [methods(spec) for spec in specs] == [["exp"], ["mul"]]


def test_unused_results_of_a_loop_are_removed_before_lowering():
    two = jc.graph(lambda g, x: (g.exp(x), g.sin(x)))
    step = lambda h, _: two(h)  # noqa: E731
    (spec,) = lowered(lambda x: lax.scan(step, x, None, length=2)[0], jnp.ones((2, 3)))
    assert methods(spec) == ["exp"]


def test_one_result_without_a_cotangent_has_no_backward_node():
    function, args = case("conv and its gelu")
    specs = graphs_of(jax.grad(total(lambda *a: function(*a)[0]), (0, 1)), *args)
    assert not [m for s in specs for m in methods(s) if "gelu" in m]


# -- what is kept --------------------------------------------------------------------------------


def residuals(what, dtype="bfloat16", by=None):
    """Of the forward: the node that made each, and the dtype in which it is kept."""
    forward, _ = value_and_gradients(what, dtype=dtype, by=by)
    makers = {name: call for call in forward.calls for _, name in call.outputs}
    found = []
    for name in forward.origin.residuals:
        call = makers[name]
        if call.node.method == "identity":  # a cast
            call = makers[call.inputs[0][1]]
        found.append((call.node.method, forward.tensor(name).dtype))
    return found


KEPT = {
    "conv": [],
    "conv, bias": [],
    "conv, scale": ["conv_fprop"],
    "conv, bias, relu": [],
    "conv, bias, gelu": ["bias"],
    "conv, add, relu": [],
    "conv, scale, bias, gelu": ["conv_fprop"],
    "conv and its gelu": [],
    "matmul": [],
    "matmul, bias, gelu": ["bias"],
    "activations": [],
    "product, tanh": [],
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@each_graph
def test_only_what_the_backward_needs_is_kept_in_the_operands_dtype(what, dtype):
    assert residuals(what, dtype) == [(method, dtype) for method in KEPT[what]]


def test_relu_keeps_its_result_and_gelu_its_operand():
    forward, backward = value_and_gradients("conv, bias, relu")
    assert len(forward.outputs) == 1
    assert backward.tensor(forward.outputs[0]) in backward.input_tensors
    (mask,) = (call for call in backward.calls if call.node.method == "relu_backward")
    assert dict(mask.inputs)["input"] == forward.outputs[0]
    forward, backward = value_and_gradients("conv, bias, gelu")
    assert forward.origin.residuals == forward.outputs[1:]
    (slope,) = (c for c in backward.calls if c.node.method == "gelu_approx_tanh_backward")
    assert dict(slope.inputs)["input"] in backward.inputs


def test_of_a_frozen_scale_nothing_is_kept():
    assert residuals("conv, scale", by=(0, 1)) == []
    assert residuals("conv, scale", by=2) == [("conv_fprop", "bfloat16")]


def test_pointwise_values_are_computed_again_from_what_is_kept():
    """scale's derivative needs the convolution, and gelu's the sum behind it: one is enough."""
    _, backward = value_and_gradients("conv, scale, bias, gelu")
    again = methods(backward)[: methods(backward).index("gelu_backward")]
    assert again == ["scale", "bias"]
    _, backward = value_and_gradients("activations")
    assert methods(backward)[:3] == ["mul", "exp", "add"]
    assert len(backward.inputs) == 2  # x and the cotangent


def test_the_narrowest_place_is_cut():
    """Of large values made of a small one, the small one is kept, though it is needed nowhere."""

    def function(g, x, w, y):
        row = g.reduction(g.conv_fprop(x, w), mode="MAX", out_dims=[1, 4, 1, 1])
        return g.mul(g.exp(g.mul(row, y)), y)

    shapes = _IMAGE, (4, 4, 1, 1), (8, 4, 6, 6)
    graph = jc.graph(function)
    args = [jnp.ones(shape) for shape in shapes]
    forward, backward = graphs_of(jax.value_and_grad(total(graph), 2), *args)
    (name,) = forward.origin.residuals
    assert forward.tensor(name).shape == (1, 4, 1, 1)
    assert "exp" in methods(backward)


def test_what_jumps_is_kept_and_not_computed_again():
    """Of a residual that is rounded, a comparison could come out otherwise than in the forward."""

    def chosen(g, x, w, y):
        product = conv(g, x, w)
        return g.binary_select(product, y, g.cmp_gt(product, 0.5))

    def steps(g, x, w, y):
        return g.mul(g.floor(conv(g, x, w) * 2.0), y)

    args = [jnp.ones(shape, jnp.bfloat16) for shape in (*_CONV, _IMAGE)]
    for function, kept, dtype in ((chosen, "cmp_gt", "bool"), (steps, "floor", "bfloat16")):
        step = jax.value_and_grad(total(jc.graph(function)), (0, 1, 2))
        forward, backward = graphs_of(step, *args)
        (name,) = forward.origin.residuals
        assert (name.split(".")[0], forward.tensor(name).dtype) == (kept, dtype)
        assert kept not in methods(backward)


def test_what_is_no_pointwise_operation_is_not_computed_again():
    """A product of two matmuls, each of which the other's gradient needs."""
    graph = jc.graph(lambda g, a, b, c: g.mul(g.matmul(a, b), g.matmul(a, c)))
    args = [jnp.ones(s) for s in ((2, 5, 4), (2, 4, 3), (2, 4, 3))]
    forward, backward = graphs_of(jax.value_and_grad(total(graph), (1, 2)), *args)
    assert len(forward.origin.residuals) == 2
    assert methods(backward).count("matmul") == 2  # of the gradients


def test_residuals_and_roles_have_names_for_those_who_ask():
    function, args = case("conv, bias, gelu")
    named = collect.graphs(jax.value_and_grad(total(function), (0, 1, 2)), args, {})
    assert [(n, s.origin.role) for n, s in named.items()] == [
        ("<lambda>", "forward"),
        ("<lambda> (backward)", "backward"),
    ]
    forward, _ = named.values()
    assert forward.origin.residuals == ("bias.0::OUT_0:bfloat16",)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", ["conv_bias_relu", "conv_scale_bias_swish", "matmul_bias_gelu"])
def test_a_residual_is_written_by_the_plan_that_computes_it(name):
    """And each product of the backward has a plan."""
    (graph,) = (case for case in FUSIONS if case.name == name)
    step = jax.value_and_grad(total(graph.function), tuple(range(len(graph.avals))))
    with jc.target("H200"):
        forward, backward = jc.plans(step, *graph.avals).values()
    assert (forward.spec.origin.role, backward.spec.origin.role) == ("forward", "backward")
    assert len(forward.segments) == len(forward.execution_plans) == 1
    products = [call for call in backward.spec.calls if call.node.anchor]
    assert len(backward.execution_plans) == len(products) == 2


# -- per example ---------------------------------------------------------------------------------


def test_gradients_of_each_example_are_one_forward_and_one_backward():
    function, (x, w, b) = case("conv, bias, relu", "float32")
    each = jax.vmap(jax.grad(total(function), (1, 2)), in_axes=(0, None, None))
    jaxpr = jax.make_jaxpr(each)(x[:, None], w, b)
    assert not {"scan", "while"} & {*primitives(jaxpr)}
    forward, backward = graphs_of(each, x[:, None], w, b)
    assert methods(forward) == ["conv_fprop", "bias", "relu"]
    (call,) = (c for c in backward.calls if c.node.method == "conv_wgrad")
    at = {port: backward.tensor(n).shape for port, n in (*call.inputs, *call.outputs)}
    assert at == {"image": (1, 8, 6, 6), "loss": (1, 8, 6, 6), "DW": (8, 4, 3, 3)}  # two groups
    assert len([e for e in equations(jaxpr) if e.primitive.name == "cudnn"]) == 2
