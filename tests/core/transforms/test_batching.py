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
PAD = {"padding": [1, 1]}


def plain_fprop(x, w):
    groups = x.shape[1] // w.shape[1]
    return lax.conv_general_dilated(x, w, (1, 1), [(1, 1)] * 2, feature_group_count=groups)


def plain_dgrad(loss, w):
    image = jax.ShapeDtypeStruct((len(loss), w.shape[1], *loss.shape[2:]), loss.dtype)
    return jax.linear_transpose(lambda x: plain_fprop(x, w), image)(loss)[0]


def plain_wgrad(x, loss):
    weight = jax.ShapeDtypeStruct((loss.shape[1], x.shape[1], 3, 3), x.dtype)
    return jax.linear_transpose(lambda w: plain_fprop(x, w), weight)(loss)[0]


def block(g, x, w, b, residual):
    return g.relu(g.add(g.bias(g.conv_fprop(x, w, **PAD), b), residual))


# Each as a graph, and in plain jnp.
FUNCTIONS = {
    "fprop": (lambda g, x, w: g.conv_fprop(x, w, **PAD), plain_fprop),
    "dgrad": (lambda g, y, w: g.conv_dgrad(y, w, **PAD), plain_dgrad),
    "wgrad": (lambda g, x, y: g.conv_wgrad(x, y, **PAD), plain_wgrad),
    "matmul": (lambda g, a, b: g.matmul(a, b), jnp.matmul),
    "block": (block, lambda x, w, b, r: jax.nn.relu(plain_fprop(x, w) + b + r)),
    "dense": (
        lambda g, a, b, c: g.relu(g.bias(g.matmul(a, b), c)),
        lambda a, b, c: jax.nn.relu(a @ b + c),
    ),
    "mul": (lambda g, x, y: g.mul(x, y), jnp.multiply),
    "point fprop": (
        lambda g, x, w: g.conv_fprop(x, w),
        lambda x, w: jnp.einsum("ncxy,kcab->nkxy", x, w),
    ),
    "point dgrad": (
        lambda g, y, w: g.conv_dgrad(y, w),
        lambda y, w: jnp.einsum("nkxy,kcab->ncxy", y, w),
    ),
    "point wgrad": (
        lambda g, x, y: g.conv_wgrad(x, y).set_dim([8, 4, 1, 1]),
        lambda x, y: jnp.einsum("ncxy,nkxy->kc", x, y)[..., None, None],
    ),
}
GRAPHS = {name: jc.graph(function) for name, (function, _) in FUNCTIONS.items()}
_X, _W, _GROUPED, _B = (2, 4, 6, 6), (8, 4, 3, 3), (8, 2, 3, 3), (1, 8, 1, 1)
_LOSS = (2, 8, 6, 6)
_ONE, _ROW = (1, 4, 6), (1, 1, 6)  # matrices, one of a batch
_BLOCK, _DENSE = (_X, _W, _B, _LOSS), ((1, 5, 4), _ONE, _ROW)

# The same with a dimension of 3 in n, or in channels or features: in groups.
_XN, _XG, _YN, _YG = (6, 4, 6, 6), (2, 12, 6, 6), (6, 8, 6, 6), (2, 24, 6, 6)
_WG, _WC = (24, 4, 3, 3), (8, 12, 3, 3)
_A2, _A32, _LARGE, _MATRICES = (2, 5, 4), (3, 2, 5, 4), (2, 50, 4), ((1, 5, 4), _ONE)

# A function, shapes, what is mapped ("x", and "-" where it is not), whether shapes alone
# change, and the new shapes of operands and result at the first node's ports.
# fmt: off
FOLDS = {
    "image: n": ("fprop", (_X, _W), "x-", True, _XN, _W, _YN),
    "weight: features": ("fprop", (_X, _W), "-x", False, _X, _WG, _YG),
    "both: groups": ("fprop", (_X, _W), "xx", False, _XG, _WG, _YG),
    "image of two groups: n": ("fprop", (_X, _GROUPED), "x-", True, _XN, _GROUPED, _YN),
    "both of two groups: six": ("fprop", (_X, _GROUPED), "xx", False, _XG, (24, 2, 3, 3), _YG),
    "dgrad's loss: n": ("dgrad", (_LOSS, _W), "x-", True, _YN, _W, _XN),
    "dgrad's weight: channels": ("dgrad", (_LOSS, _W), "-x", False, _LOSS, _WC, _XG),
    "dgrad's both: groups": ("dgrad", (_LOSS, _W), "xx", False, _YG, _WG, _XG),
    "wgrad's image: channels": ("wgrad", (_X, _LOSS), "x-", False, _XG, _LOSS, _WC),
    "wgrad's loss: features": ("wgrad", (_X, _LOSS), "-x", False, _X, _YG, _WG),
    "wgrad's both: groups": ("wgrad", (_X, _LOSS), "xx", False, _XG, _YG, _WG),
    "A: rows": ("matmul", _MATRICES, "x-", False, (1, 15, 4), _ONE, (1, 15, 6)),
    "B: the batch": ("matmul", _MATRICES, "-x", True, (1, 5, 4), (3, 4, 6), (3, 5, 6)),
    "A and B: the batch": ("matmul", _MATRICES, "xx", True, (3, 5, 4), (3, 4, 6), (3, 5, 6)),
    "A and B of a batch": ("matmul", (_A2, (2, 4, 6)), "xx", True, (6, 5, 4), (6, 4, 6), (6, 5, 6)),
    "A of a batch, B broadcasts": ("matmul", (_A2, _ONE), "x-", True, (6, 5, 4), _ONE, (6, 5, 6)),
    "large B": ("matmul", (_A2, (2, 4, 60)), "x-", False, (2, 15, 4), (2, 4, 60), (2, 15, 60)),
    "large A": ("matmul", (_LARGE, (2, 4, 6)), "-x", False, _LARGE, (2, 4, 18), (2, 50, 18)),
    "all of a block: groups": ("block", _BLOCK, "xxxx", False, _XG, _WG, _YG),
    "a block's images: n": ("block", _BLOCK, "x--x", True, _XN, _W, _YN),
    "a block's weights: features": ("block", _BLOCK, "-xxx", False, _X, _WG, _YG),
    "rows, a bias that broadcasts": ("dense", _DENSE, "x--", False, (1, 15, 4), _ONE, (1, 15, 6)),
    "parameters: the batch": ("dense", _DENSE, "-xx", True, (1, 5, 4), (3, 4, 6), (3, 5, 6)),
    "rows and their biases: the batch": ("dense", _DENSE, "x-x", True, (3, 5, 4), _ONE, (3, 5, 6)),
    "elements": ("mul", (_A2, (1, 1, 4)), "x-", True, _A32, (1, 1, 1, 4), _A32),
    "one that broadcasts": ("mul", (_A2, (1, 1, 4)), "-x", True, (1, 2, 5, 4), (3, 1, 1, 4), _A32),
    "a scalar": ("mul", (_A2, ()), "-x", True, (1, 2, 5, 4), (3, 1, 1, 1), _A32),
    "a window of one element": ("point fprop", (_X, (8, 4, 1, 1)), "xx", False),
    "its dgrad": ("point dgrad", (_LOSS, (8, 4, 1, 1)), "xx", False),
    "its wgrad": ("point wgrad", (_X, _LOSS), "xx", False),
}
# fmt: on


def operands(shapes, mapped, size=SIZE, axis=0):
    random = np.random.default_rng(0)
    made = []
    for shape, m in zip(shapes, mapped, strict=True):
        x = jnp.asarray(random.standard_normal((size, *shape) if m else shape), jnp.float32)
        made.append(jnp.moveaxis(x, 0, axis) if m else x)
    return made


def vmapped(function, mapped, axis=0, **how):
    return jax.vmap(function, in_axes=[axis if m else None for m in mapped], **how)


@pytest.mark.parametrize("what", FOLDS)
def test_dimension_is_folded_into_the_graphs_own(what):
    name, shapes, which, in_place, *want = FOLDS[what]
    mapped = [letter == "x" for letter in which]
    args = operands(shapes, mapped)
    found = vmapped(GRAPHS[name], mapped)
    assert_same(found(*args), vmapped(FUNCTIONS[name][1], mapped)(*args))
    jaxpr = jax.make_jaxpr(found)(*args)
    (spec,) = graphs(jaxpr)
    if name.startswith("point"):
        assert methods(spec) == ["matmul"]
        assert shapes_of(spec, "matmul")["C"][0] == SIZE
    else:
        at_ports = shapes_of(spec, methods(spec)[0])
        assert [*at_ports.values()] == want
    assert {*primitives(jaxpr)} <= {"cudnn", "reshape"} | ({*()} if in_place else {"transpose"})


SUBSETS = {
    "fprop of groups": ("fprop", (_X, _GROUPED)),
    "matmul, A broadcasts": ("matmul", ((1, 5, 4), (2, 4, 6))),
    "block": ("block", _BLOCK),
    "dense of a batch": ("dense", ((2, 5, 4), _ONE, (2, 5, 6))),
    "scalars": ("mul", ((), ())),
}


@pytest.mark.parametrize("name", SUBSETS)
def test_any_subset_of_operands_along_any_axis_is_one_graph(name):
    function, shapes = SUBSETS[name]
    axes = itertools.cycle([(0, 0), (-1, -1), (1, 0), (0, -1)])
    for mapped in itertools.product([True, False], repeat=len(shapes)):
        if not any(mapped):
            continue
        axis, out = next(axes) if shapes[0] else (0, 0)
        args = operands(shapes, mapped, axis=axis)
        found = vmapped(GRAPHS[function], mapped, axis, out_axes=out)
        want = vmapped(FUNCTIONS[function][1], mapped, axis, out_axes=out)
        assert_same(found(*args), want(*args))
        names = primitives(jax.make_jaxpr(found)(*args))
        assert names.count("cudnn") == 1
        assert {*names} <= {"cudnn", "reshape", "transpose", "squeeze", "broadcast_in_dim"}


@pytest.mark.parametrize("name", ["block", "dense of a batch"])
@pytest.mark.parametrize("size", [0, 1])
def test_values_and_gradients_over_no_and_one_element(name, size):
    function, shapes = SUBSETS[name]
    mapped = [True] * len(shapes)
    args = operands(shapes, mapped, size)

    def gradients(f):
        total = lambda *args: (jnp.sum(jnp.sin(y := f(*args))), y)  # noqa: E731
        of = jax.grad(total, tuple(range(len(shapes))), has_aux=True)
        return jax.jit(vmapped(of, mapped))

    assert_same(gradients(GRAPHS[function])(*args), gradients(FUNCTIONS[function][1])(*args))


def test_vmaps_nest_with_names_for_meshes():
    """``spmd_axis_name`` says along which axis of a mesh a dimension lies."""
    mapped = [True] * len(_BLOCK)
    args = [jnp.stack([x, 2 * x]) for x in operands(_BLOCK, mapped)]

    def nested(f):
        once = vmapped(f, mapped, spmd_axis_name="model")
        return vmapped(once, mapped, spmd_axis_name="data", out_axes=1)

    mesh = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        got = jax.jit(nested(GRAPHS["block"]))(*args)
    assert_same(jax.device_get(got), jax.device_get(nested(FUNCTIONS["block"][1])(*args)))
    assert primitives(jax.make_jaxpr(nested(GRAPHS["block"]))(*args)).count("cudnn") == 1


def test_integers_and_booleans_are_folded_beside_floats():
    chosen = jc.graph(lambda g, x, y, mask: g.binary_select(x, y, mask))
    x = jnp.arange(24.0).reshape(3, 2, 4)
    mask = jnp.arange(3 * 8).reshape(3, 2, 4) % 3 == 0
    got = jax.vmap(chosen, in_axes=(0, None, 0))(x, -x[0], mask)
    assert_same(got, jnp.where(mask, x, -x[0]))
    a = jnp.arange(3 * 10, dtype=jnp.int8).reshape(3, 1, 2, 5)
    b = jnp.arange(15, dtype=jnp.int8).reshape(1, 5, 3)
    got = jax.vmap(GRAPHS["matmul"], in_axes=(0, None))(a, b)
    want = np.asarray(a, np.int32) @ np.asarray(b, np.int32)
    assert (got.dtype, got.shape) == (jnp.int32, want.shape)
    np.testing.assert_array_equal(got, want)


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
    for words in ("3 times", "running_sum.0 takes no dimension of vmap for x"):
        assert words in str(caught.value)


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
