"""vmap: where the dimension goes in a graph, and what is run in turn."""

import dataclasses
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases
from helpers import assert_same
from jax import lax
from transformations import equations, graphs, methods, primitives, shapes_of

import jax_cudnn as jc
from jax_cudnn._core.graph import builder
from jax_cudnn._core.graph.builder import register
from jax_cudnn._core.graph.example import Example
from jax_cudnn._core.graph.node import REGISTRY, Node
from jax_cudnn._core.planning import collect
from jax_cudnn._core.transforms.batch import NoFold, batch

SIZE = 3


@jc.graph
def fprop(g, x, w):
    return g.conv_fprop(x, w, padding=[1, 1])


@jc.graph
def dgrad(g, loss, w):
    return g.conv_dgrad(loss, w, padding=[1, 1])


@jc.graph
def wgrad(g, x, loss):
    return g.conv_wgrad(x, loss, padding=[1, 1])


@jc.graph
def matmul(g, a, b):
    return g.matmul(a, b)


@jc.graph
def block(g, x, w, b, residual):
    return g.relu(g.add(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b), residual))


@jc.graph
def dense(g, a, b, c):
    return g.relu(g.bias(g.matmul(a, b), c))


@jc.graph
def product(g, x, y):
    return g.mul(x, y)


def plain_fprop(x, w):
    groups = x.shape[1] // w.shape[1]
    return lax.conv_general_dilated(x, w, (1, 1), [(1, 1)] * 2, feature_group_count=groups)


def plain_dgrad(loss, w):
    image = jax.ShapeDtypeStruct((len(loss), w.shape[1], *loss.shape[2:]), loss.dtype)
    return jax.linear_transpose(lambda x: plain_fprop(x, w), image)(loss)[0]


def plain_wgrad(x, loss):
    weight = jax.ShapeDtypeStruct((loss.shape[1], x.shape[1], 3, 3), x.dtype)
    return jax.linear_transpose(lambda w: plain_fprop(x, w), weight)(loss)[0]


def plain_block(x, w, b, residual):
    return jax.nn.relu(plain_fprop(x, w) + b + residual)


PLAIN = {
    fprop: plain_fprop,
    dgrad: plain_dgrad,
    wgrad: plain_wgrad,
    matmul: jnp.matmul,
    block: plain_block,
    dense: lambda a, b, c: jax.nn.relu(a @ b + c),
    product: jnp.multiply,
}
_X, _W, _GROUPED, _B = (2, 4, 6, 6), (8, 4, 3, 3), (8, 2, 3, 3), (1, 8, 1, 1)
_LOSS = (2, 8, 6, 6)
_ONE, _ROW = (1, 4, 6), (1, 1, 6)  # matrices, one of a batch
_BLOCK, _DENSE = (_X, _W, _B, _LOSS), ((1, 5, 4), _ONE, _ROW)

# What is mapped ("x", and "-" where it is not) -> the shapes at the ports of the anchor (or of the
# only node), and at those of others.
FOLDS = {
    "image: n": (fprop, (_X, _W), "x-", {"image": (6, 4, 6, 6), "weight": _W, "Y": (6, 8, 6, 6)}),
    "weight: features": (
        fprop,
        (_X, _W),
        "-x",
        {"image": _X, "weight": (24, 4, 3, 3), "Y": (2, 24, 6, 6)},
    ),
    "both: groups": (
        fprop,
        (_X, _W),
        "xx",
        {"image": (2, 12, 6, 6), "weight": (24, 4, 3, 3), "Y": (2, 24, 6, 6)},
    ),
    "image of two groups: n": (
        fprop,
        (_X, _GROUPED),
        "x-",
        {"image": (6, 4, 6, 6), "weight": _GROUPED, "Y": (6, 8, 6, 6)},
    ),
    "both of two groups: six groups": (
        fprop,
        (_X, _GROUPED),
        "xx",
        {"image": (2, 12, 6, 6), "weight": (24, 2, 3, 3), "Y": (2, 24, 6, 6)},
    ),
    "dgrad's loss: n": (
        dgrad,
        (_LOSS, _W),
        "x-",
        {"loss": (6, 8, 6, 6), "filter": _W, "DX": (6, 4, 6, 6)},
    ),
    "dgrad's weight: channels": (
        dgrad,
        (_LOSS, _W),
        "-x",
        {"loss": _LOSS, "filter": (8, 12, 3, 3), "DX": (2, 12, 6, 6)},
    ),
    "dgrad's both: groups": (
        dgrad,
        (_LOSS, _W),
        "xx",
        {"loss": (2, 24, 6, 6), "filter": (24, 4, 3, 3), "DX": (2, 12, 6, 6)},
    ),
    "wgrad's image: channels": (
        wgrad,
        (_X, _LOSS),
        "x-",
        {"image": (2, 12, 6, 6), "loss": _LOSS, "DW": (8, 12, 3, 3)},
    ),
    "wgrad's loss: features": (
        wgrad,
        (_X, _LOSS),
        "-x",
        {"image": _X, "loss": (2, 24, 6, 6), "DW": (24, 4, 3, 3)},
    ),
    "wgrad's both: groups": (
        wgrad,
        (_X, _LOSS),
        "xx",
        {"image": (2, 12, 6, 6), "loss": (2, 24, 6, 6), "DW": (24, 4, 3, 3)},
    ),
    "A: rows": (
        matmul,
        ((1, 5, 4), _ONE),
        "x-",
        {"A": (1, 15, 4), "B": _ONE, "C": (1, 15, 6)},
    ),
    "B: the batch": (
        matmul,
        ((1, 5, 4), _ONE),
        "-x",
        {"A": (1, 5, 4), "B": (3, 4, 6), "C": (3, 5, 6)},
    ),
    "A and B: the batch": (
        matmul,
        ((1, 5, 4), _ONE),
        "xx",
        {"A": (3, 5, 4), "B": (3, 4, 6), "C": (3, 5, 6)},
    ),
    "A and B of a batch": (
        matmul,
        ((2, 5, 4), (2, 4, 6)),
        "xx",
        {"A": (6, 5, 4), "B": (6, 4, 6), "C": (6, 5, 6)},
    ),
    "A of a batch, B broadcasts": (
        matmul,
        ((2, 5, 4), _ONE),
        "x-",
        {"A": (6, 5, 4), "B": _ONE, "C": (6, 5, 6)},
    ),
    "A of a batch beside a large B: rows": (
        matmul,
        ((2, 5, 4), (2, 4, 60)),
        "x-",
        {"A": (2, 15, 4), "B": (2, 4, 60), "C": (2, 15, 60)},
    ),
    "B of a batch beside a large A: columns": (
        matmul,
        ((2, 50, 4), (2, 4, 6)),
        "-x",
        {"A": (2, 50, 4), "B": (2, 4, 18), "C": (2, 50, 18)},
    ),
    "all of a block: groups": (
        block,
        _BLOCK,
        "xxxx",
        {"image": (2, 12, 6, 6), "weight": (24, 4, 3, 3), "Y": (2, 24, 6, 6)},
    ),
    "a block's images: n, its bias broadcasts": (
        block,
        _BLOCK,
        "x--x",
        {"image": (6, 4, 6, 6), "weight": _W, "Y": (6, 8, 6, 6), "bias": _B},
    ),
    "a block's weights: features": (
        block,
        _BLOCK,
        "-xxx",
        {"image": _X, "weight": (24, 4, 3, 3), "Y": (2, 24, 6, 6), "bias": (1, 24, 1, 1)},
    ),
    "rows, a bias that broadcasts": (
        dense,
        _DENSE,
        "x--",
        {"A": (1, 15, 4), "B": _ONE, "C": (1, 15, 6), "bias": _ROW},
    ),
    "a layer's parameters: the batch": (
        dense,
        _DENSE,
        "-xx",
        {"A": (1, 5, 4), "B": (3, 4, 6), "C": (3, 5, 6), "bias": (3, 1, 6)},
    ),
    "a weight beside a bias that broadcasts": (
        dense,
        _DENSE,
        "-x-",
        {"A": (1, 5, 4), "B": (3, 4, 6), "C": (3, 5, 6), "bias": _ROW},
    ),
    "rows and their biases: the batch": (
        dense,
        _DENSE,
        "x-x",
        {"A": (3, 5, 4), "B": _ONE, "C": (3, 5, 6), "bias": (3, 1, 6)},
    ),
    "elements, one broadcasts": (
        product,
        ((2, 5, 4), (1, 1, 4)),
        "x-",
        {"a": (3, 2, 5, 4), "b": (1, 1, 1, 4), "OUT_0": (3, 2, 5, 4)},
    ),
    "one that broadcasts": (
        product,
        ((2, 5, 4), (1, 1, 4)),
        "-x",
        {"a": (1, 2, 5, 4), "b": (3, 1, 1, 4), "OUT_0": (3, 2, 5, 4)},
    ),
    "a scalar": (
        product,
        ((2, 5, 4), ()),
        "-x",
        {"a": (1, 2, 5, 4), "b": (3, 1, 1, 1), "OUT_0": (3, 2, 5, 4)},
    ),
    "elements beside a scalar": (
        product,
        ((2, 5, 4), ()),
        "x-",
        {"a": (3, 2, 5, 4), "b": (1, 1, 1, 1), "OUT_0": (3, 2, 5, 4)},
    ),
}


def operands(shapes, mapped, size=SIZE, axis=0):
    random = np.random.default_rng(0)
    stacks = [
        random.standard_normal((size, *s) if m else s) for s, m in zip(shapes, mapped, strict=True)
    ]
    return [
        jnp.moveaxis(jnp.asarray(x, jnp.float32), 0, axis if axis >= 0 else x.ndim + axis)
        if m
        else jnp.asarray(x, jnp.float32)
        for x, m in zip(stacks, mapped, strict=True)
    ]


def vmapped(function, mapped, axis=0, **how):
    return jax.vmap(function, in_axes=[axis if m else None for m in mapped], **how)


@pytest.mark.parametrize("what", FOLDS)
def test_dimension_is_folded_into_the_graphs_own(what):
    function, shapes, which, want = FOLDS[what]
    mapped = [letter == "x" for letter in which]
    args = operands(shapes, mapped)
    found = vmapped(function, mapped)
    assert_same(found(*args), vmapped(PLAIN[function], mapped)(*args))
    jaxpr = jax.make_jaxpr(found)(*args)
    (spec,) = graphs(jaxpr)
    assert methods(spec) == methods(
        function.trace(*operands(shapes, [False] * len(shapes)))[1].spec
    )
    at_ports = {port: shape for m in methods(spec) for port, shape in shapes_of(spec, m).items()}
    assert {port: at_ports[port] for port in want} == want
    assert {*primitives(jaxpr)} <= {"cudnn", "reshape", "transpose"}


# What stands in front already, and goes into the first dimension or in front of it.
RESHAPED = (
    "image: n",
    "image of two groups: n",
    "dgrad's loss: n",
    "B: the batch",
    "A and B: the batch",
    "A and B of a batch",
    "A of a batch, B broadcasts",
    "a block's images: n, its bias broadcasts",
    "a layer's parameters: the batch",
    "a weight beside a bias that broadcasts",
    "rows and their biases: the batch",
    "elements, one broadcasts",
    "one that broadcasts",
    "a scalar",
    "elements beside a scalar",
)


@pytest.mark.parametrize("what", RESHAPED)
def test_nothing_is_moved_where_shapes_alone_change(what):
    function, shapes, which, _ = FOLDS[what]
    mapped = [letter == "x" for letter in which]
    jaxpr = jax.make_jaxpr(vmapped(function, mapped))(*operands(shapes, mapped))
    assert {*primitives(jaxpr)} <= {"cudnn", "reshape"}


POINTS = {
    "fprop": (lambda g, x, w: g.conv_fprop(x, w), (_X, (8, 4, 1, 1))),
    "dgrad": (lambda g, loss, w: g.conv_dgrad(loss, w), (_LOSS, (8, 4, 1, 1))),
    "wgrad": (lambda g, x, loss: g.conv_wgrad(x, loss), (_X, _LOSS)),
}
PLAIN_POINTS = {
    "fprop": lambda x, w: jnp.einsum("ncxy,kcab->nkxy", x, w),
    "dgrad": lambda loss, w: jnp.einsum("nkxy,kcab->ncxy", loss, w),
    "wgrad": lambda x, loss: jnp.einsum("ncxy,nkxy->kc", x, loss)[..., None, None],
}


@pytest.mark.parametrize("what", POINTS)
def test_windows_of_one_element_become_a_batch_of_matmuls(what):
    function, shapes = POINTS[what]
    args = operands(shapes, [True, True])
    mapped = jax.vmap(jc.graph(function))
    assert_same(mapped(*args), jax.vmap(PLAIN_POINTS[what])(*args))
    (spec,) = graphs(jax.make_jaxpr(mapped)(*args))
    assert methods(spec) == ["matmul"]
    assert shapes_of(spec, "matmul")["C"][0] == SIZE


FUNCTIONS = {
    "fprop": (fprop, (_X, _W)),
    "fprop of groups": (fprop, (_X, _GROUPED)),
    "dgrad": (dgrad, (_LOSS, _W)),
    "wgrad": (wgrad, (_X, _LOSS)),
    "matmul": (matmul, ((1, 5, 4), _ONE)),
    "batch of matmuls": (matmul, ((2, 5, 4), (2, 4, 6))),
    "matmul, B broadcasts": (matmul, ((2, 5, 4), _ONE)),
    "matmul, A broadcasts": (matmul, ((1, 5, 4), (2, 4, 6))),
    "block": (block, _BLOCK),
    "dense": (dense, _DENSE),
    "dense of a batch": (dense, ((2, 5, 4), _ONE, (2, 5, 6))),
    "scalar": (product, ((2, 5, 4), ())),
    "scalars": (product, ((), ())),
}
SUBSETS = [
    (name, mapped)
    for name, (_, shapes) in FUNCTIONS.items()
    for mapped in itertools.product([True, False], repeat=len(shapes))
    if any(mapped)
]


@pytest.mark.parametrize(
    ("name", "mapped"),
    SUBSETS,
    ids=lambda v: v if isinstance(v, str) else "".join("-x"[m] for m in v),
)
def test_any_subset_of_operands_is_one_graph(name, mapped):
    function, shapes = FUNCTIONS[name]
    args = operands(shapes, mapped)
    assert_same(vmapped(function, mapped)(*args), vmapped(PLAIN[function], mapped)(*args))
    names = primitives(jax.make_jaxpr(vmapped(function, mapped))(*args))
    assert names.count("cudnn") == 1
    assert {*names} <= {"cudnn", "reshape", "transpose", "squeeze", "broadcast_in_dim"}


AXES = {"front": (0, 0), "last": (-1, -1), "second": (1, 2), "in last, out front": (-1, 0)}
each_function = pytest.mark.parametrize("name", ["fprop", "wgrad", "dense of a batch", "block"])


@each_function
@pytest.mark.parametrize("axes", AXES)
def test_any_axis(name, axes):
    (function, shapes), (axis, out) = FUNCTIONS[name], AXES[axes]
    mapped = [True] * len(shapes)
    args = operands(shapes, mapped, axis=axis)
    got = vmapped(function, mapped, axis, out_axes=out)(*args)
    assert_same(got, vmapped(PLAIN[function], mapped, axis, out_axes=out)(*args))


@each_function
@pytest.mark.parametrize("size", [0, 1])
def test_dimensions_of_no_and_of_one_element(name, size):
    function, shapes = FUNCTIONS[name]
    mapped = [i != 1 for i in range(len(shapes))]
    args = operands(shapes, mapped, size)
    got = vmapped(function, mapped)(*args)
    assert got.shape[0] == size
    assert_same(got, vmapped(PLAIN[function], mapped)(*args))


@each_function
@pytest.mark.parametrize("size", [0, 1])
def test_gradients_over_dimensions_of_no_and_of_one_element(name, size):
    function, shapes = FUNCTIONS[name]
    mapped = [True] * len(shapes)
    args = operands(shapes, mapped, size)

    def gradients(f):
        total = lambda *args: jnp.sum(jnp.sin(f(*args)))  # noqa: E731
        return vmapped(jax.grad(total, tuple(range(len(shapes)))), mapped)

    assert_same(gradients(function)(*args), gradients(PLAIN[function])(*args))


@each_function
def test_vmaps_nest_with_names_for_meshes(name):
    """``spmd_axis_name`` says along which axis of a mesh a dimension lies."""
    function, shapes = FUNCTIONS[name]
    mapped = [True] * len(shapes)
    inner = operands(shapes, mapped)
    args = [jnp.stack([x, 2 * x]) for x in inner]

    def nested(f):
        once = vmapped(f, mapped, spmd_axis_name="model")
        return vmapped(once, mapped, spmd_axis_name="data", out_axes=1)

    mesh = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        got = jax.jit(nested(function))(*args)
    assert_same(jax.device_get(got), jax.device_get(nested(PLAIN[function])(*args)))
    assert primitives(jax.make_jaxpr(nested(function))(*args)).count("cudnn") == 1


def test_integers_and_booleans_are_folded_beside_floats():
    chosen = jc.graph(lambda g, x, y, mask: g.binary_select(x, y, mask))
    x = jnp.arange(24.0).reshape(3, 2, 4)
    mask = jnp.arange(3 * 8).reshape(3, 2, 4) % 3 == 0
    got = jax.vmap(chosen, in_axes=(0, None, 0))(x, -x[0], mask)
    assert_same(got, jnp.where(mask, x, -x[0]))
    product = jc.graph(lambda g, a, b: g.matmul(a, b))
    a = jnp.arange(3 * 10, dtype=jnp.int8).reshape(3, 1, 2, 5)
    b = jnp.arange(15, dtype=jnp.int8).reshape(1, 5, 3)
    got = jax.vmap(product, in_axes=(0, None))(a, b)
    want = np.asarray(a, np.int32) @ np.asarray(b, np.int32)
    assert (got.dtype, got.shape) == (jnp.int32, want.shape)
    np.testing.assert_array_equal(got, want)


def test_per_example_gradients_of_a_network_are_graphs_of_groups():
    """vmap of grad: each example its own weight gradient, of one grouped convolution."""
    strided = jc.graph(lambda g, x, w, b: g.relu(g.bias(g.conv_fprop(x, w, stride=[2, 2]), b)))

    def network(conv, second):
        def loss(weights, image, label):
            x = image[None]
            for w, b in weights[:2]:
                x = conv(x, w, b)
            logits = second(x.reshape(1, 1, -1), weights[2])[0, 0]
            return -jax.nn.log_softmax(logits)[label]

        return loss

    def plain_conv(x, w, b):
        return jax.nn.relu(lax.conv_general_dilated(x, w, (2, 2), "VALID") + b)

    random = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32) * 0.3  # noqa: E731
    weights = [
        (draw(4, 3, 3, 3), draw(1, 4, 1, 1)),
        (draw(6, 4, 3, 3), draw(1, 6, 1, 1)),
        draw(1, 24, 5),
    ]
    images, labels = draw(SIZE, 3, 11, 11), jnp.array([0, 3, 4])

    def per_example(loss):
        return jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))

    args = weights, images, labels
    assert_same(
        per_example(network(strided, matmul))(*args),
        per_example(network(plain_conv, jnp.matmul))(*args),
    )
    jaxpr = jax.make_jaxpr(per_example(network(strided, matmul)))(*args)
    assert not {"scan", "while"} & {*primitives(jaxpr)}
    specs = graphs(jaxpr)
    forwards = [s for s in specs if "conv_fprop" in methods(s)]
    weights_of = [s for s in specs if "conv_wgrad" in methods(s)]
    assert len(forwards) == len(weights_of) == 2
    for spec in forwards:  # one weight for all examples
        assert shapes_of(spec, "conv_fprop")["image"][0] == SIZE
    first, second = sorted(weights_of, key=lambda s: shapes_of(s, "conv_wgrad")["image"][1])
    assert shapes_of(first, "conv_wgrad")["DW"] == (SIZE * 4, 3, 3, 3)
    assert shapes_of(first, "conv_wgrad")["image"][1] == SIZE * 3
    assert shapes_of(second, "conv_wgrad")["DW"] == (SIZE * 6, 4, 3, 3)
    assert len(specs) == 6  # forward and backward of each layer


# -- a node that takes no dimension --------------------------------------------------------------


@pytest.fixture
def running_sum():
    """Registers a node without ``folds``, and takes it back."""

    @register
    @dataclasses.dataclass(frozen=True)
    class RunningSum(Node):
        """Sums of all elements up to each. Source: this test."""

        method = "running_sum"
        dims = "a: n c -> Y: n c"
        examples = (Example({"a": (2, 3)}),)

        def reference(self, a):
            return (jnp.cumsum(a.reshape(-1)).reshape(a.shape),)

    yield jc.graph(lambda g, x, b: g.add(g.running_sum(x), b))
    del REGISTRY["running_sum"], builder.GraphBuilder.running_sum


def plain_running_sum(x, b):
    return jnp.cumsum(x.reshape(-1)).reshape(x.shape) + b


def test_what_takes_no_dimension_runs_in_turn_and_says_so(running_sum, caplog):
    args = operands([(2, 4), (1, 4)], [True, False])
    mapped = vmapped(running_sum, [True, False])
    with caplog.at_level(logging.DEBUG, "jax_cudnn"):
        assert_same(mapped(*args), vmapped(plain_running_sum, [True, False])(*args))
    reason = "running_sum.0 takes no dimension of vmap for x"
    assert f"runs {SIZE} times in turn: {reason}" in caplog.text
    jaxpr = jax.make_jaxpr(mapped)(*args)
    (equation,) = [e for e in equations(jaxpr) if e.primitive.name == "cudnn"]
    assert equation.params["name"] == f"<lambda> ({SIZE} in turn: {reason})"
    assert [e.primitive.name for e in jaxpr.eqns] == ["scan"]
    # So it is among the graphs that jc.plan and jc.plans explain.
    assert [*collect.graphs(mapped, args, {})] == [equation.params["name"]]


def test_what_runs_in_turn_nests_and_is_differentiated(running_sum):
    args = operands([(2, 4), (1, 4)], [True, False])

    def gradients(f):
        total = lambda x, b: jnp.sum(jnp.sin(f(x, b)))  # noqa: E731
        return vmapped(jax.grad(total, (0, 1)), [True, False])

    assert_same(gradients(running_sum)(*args), gradients(plain_running_sum)(*args))
    stacked = [jnp.stack([args[0], -args[0]], -1), args[1]]
    nested = lambda f: jax.vmap(vmapped(f, [True, False]), in_axes=(-1, None))  # noqa: E731
    assert_same(nested(running_sum)(*stacked), nested(plain_running_sum)(*stacked))


def test_what_is_not_mapped_does_not_keep_others_from_being_folded(running_sum):
    """The node itself has no dimension of vmap here: only the bias behind it."""
    args = operands([(2, 4), (1, 4)], [False, True])
    mapped = vmapped(running_sum, [False, True])
    assert_same(mapped(*args), vmapped(plain_running_sum, [False, True])(*args))
    (spec,) = graphs(jax.make_jaxpr(mapped)(*args))
    assert shapes_of(spec, "running_sum")["a"] == (2, 4)
    assert shapes_of(spec, "add")["OUT_0"] == (SIZE, 2, 4)


def test_running_in_turn_is_an_error_under_implementation_cudnn(running_sum):
    args = operands([(2, 4), (1, 4)], [True, False])
    mapped = vmapped(running_sum.with_options(implementation="cudnn"), [True, False])
    with pytest.raises(jc.UnsupportedGraphError) as caught:
        jax.make_jaxpr(mapped)(*args)
    message = str(caught.value)
    assert f"vmap would run the graph {SIZE} times, one run after the other" in message
    assert "running_sum.0 takes no dimension of vmap for x" in message
    assert "write the dimension into the graph" in message
    with jc.implementation("cudnn"), pytest.raises(jc.UnsupportedGraphError):
        jax.make_jaxpr(vmapped(running_sum, [True, False]))(*args)


def test_no_operation_of_the_table_runs_in_turn():
    """All that is registered takes a dimension, of any one operand and of all; but where a result
    is one of all examples (a largest value), and vmap is to give one of each."""
    for case in all_cases():
        spec = case.function.trace(*case.avals)[1].spec
        if any(call.node.of_all_examples for call in spec.calls):
            with pytest.raises(NoFold):
                batch(spec, 2, frozenset(spec.inputs))
            continue
        for mapped in ({name} for name in spec.inputs):
            batch(spec, 2, frozenset(mapped))
        batch(spec, 2, frozenset(spec.inputs))


@pytest.mark.parametrize("method", ["bias", "scale"])
def test_a_number_takes_the_shape_of_the_operand_beside_it(method):
    """Also where vmap gives that one a dimension more."""
    graph = jc.graph(lambda g, b: getattr(g, method)(3.0, b))
    b = jnp.arange(6.0).reshape(2, 1, 3, 1, 1)
    want = 3.0 + b if method == "bias" else 3.0 * b
    np.testing.assert_array_equal(jax.vmap(graph)(b), want)
    np.testing.assert_array_equal(
        jax.vmap(jax.vmap(graph, 1, 1), 3, 3)(b[..., None]), want[..., None]
    )
