"""vmap: where the dimension goes in a graph, and what is run in turn."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import all_cases
from helpers import assert_same, python
from transformations import graphs, methods, primitives, shapes_of

import jax_cudnn as jc
from jax_cudnn._core.graph.node import registry
from jax_cudnn._core.plans import collect
from jax_cudnn._core.transforms.batch import NoFold, batch

SIZE = 3
GRAPHS = {
    "fprop": lambda g, x, w: g.conv_fprop(x, w, padding=[1, 1]),
    "matmul": lambda g, a, b: g.matmul(a, b),
    "block": lambda g, x, w, b, r: g.relu(g.add(g.bias(g.conv_fprop(x, w, padding=[1, 1]), b), r)),
    "dense": lambda g, a, b, c: g.relu(g.bias(g.matmul(a, b), c)),
    "mul": lambda g, x, y: g.mul(x, y),
}
GRAPHS = {name: jc.graph(function) for name, function in GRAPHS.items()}
_BLOCK = (2, 4, 6, 6), (8, 4, 3, 3), (1, 8, 1, 1), (2, 8, 6, 6)
_ONE, _A2 = (1, 4, 6), (2, 5, 4)  # matrices
_DENSE = (1, 5, 4), _ONE, (1, 1, 6)

# A function, shapes, what is mapped ("x", and "-" where it is not), and the new shapes of
# operands and result at the first node's ports.
FOLDS = {
    "features": ("fprop", _BLOCK[:2], "-x", _BLOCK[0], (24, 4, 3, 3), (2, 24, 6, 6)),
    "the batch": ("matmul", (_A2, _ONE), "x-", (6, 5, 4), _ONE, (6, 5, 6)),
    "columns": ("matmul", (_A2, (2, 4, 60)), "x-", (2, 15, 4), (2, 4, 60), (2, 15, 60)),
    "rows": ("dense", _DENSE, "x--", (1, 15, 4), _ONE, (1, 15, 6)),
    "parameters": ("dense", _DENSE, "-xx", (1, 5, 4), (3, 4, 6), (3, 5, 6)),
}


def operands(shapes, mapped, size=SIZE, axis=0):
    random = np.random.default_rng(0)
    made = []
    for shape, m in zip(shapes, mapped, strict=True):
        x = jnp.asarray(random.standard_normal((size, *shape) if m else shape), jnp.float32)
        made.append(jnp.moveaxis(x, 0, axis) if m else x)
    return made


def vmapped(function, mapped, axis=0, **how):
    return jax.vmap(function, in_axes=[axis if m else None for m in mapped], **how)


def in_turn(function, mapped, args, axis=0, out_axes=0):
    """What vmap gives, one example after the other."""
    size = next(x.shape[axis] for x, m in zip(args, mapped, strict=True) if m)
    results = [
        function(*(jnp.take(x, i, axis) if m else x for x, m in zip(args, mapped, strict=True)))
        for i in range(size)
    ]
    return jax.tree.map(lambda *y: jnp.stack(y, out_axes), *results)


@pytest.mark.parametrize("what", FOLDS)
def test_dimension_is_folded_into_the_graphs_own(what):
    name, shapes, which, *want = FOLDS[what]
    mapped = [letter == "x" for letter in which]
    args = operands(shapes, mapped)
    found = vmapped(GRAPHS[name], mapped)
    assert_same(found(*args), in_turn(GRAPHS[name], mapped, args))
    (spec,) = graphs(jax.make_jaxpr(found)(*args))
    assert [*shapes_of(spec, methods(spec)[0]).values()] == want


SUBSETS = {
    "fprop of groups": ("fprop", (_BLOCK[0], (8, 2, 3, 3))),
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
        assert_same(found(*args), in_turn(GRAPHS[function], mapped, args, axis, out))
        names = primitives(jax.make_jaxpr(found)(*args))
        assert names.count("cudnn") == 1
        assert {*names} <= {"cudnn", "reshape", "transpose", "squeeze", "broadcast_in_dim"}


def test_gradients_over_no_and_one_element():
    mapped = [True] * len(_BLOCK)
    total = lambda *args: jnp.sum(jnp.sin(GRAPHS["block"](*args)))  # noqa: E731
    gradients = jax.grad(total, (0, 1, 2, 3))
    args = operands(_BLOCK, mapped, 1)
    assert_same(vmapped(gradients, mapped)(*args), in_turn(gradients, mapped, args))
    none = operands(_BLOCK, mapped, 0)
    assert [x.shape for x in vmapped(gradients, mapped)(*none)] == [x.shape for x in none]


def test_vmaps_nest_with_names_for_meshes():
    """``spmd_axis_name`` says along which axis of a mesh a dimension lies."""
    mapped, function = [True] * len(_BLOCK), GRAPHS["block"]
    args = [jnp.stack([x, 2 * x]) for x in operands(_BLOCK, mapped)]
    once = vmapped(function, mapped, spmd_axis_name="model")
    nested = vmapped(once, mapped, spmd_axis_name="data", out_axes=1)
    mesh = jax.make_mesh((2, 1), ("data", "model"), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        got = jax.jit(nested)(*args)
    want = in_turn(lambda *a: in_turn(function, mapped, a), mapped, args, out_axes=1)
    assert_same(jax.device_get(got), jax.device_get(want))
    assert primitives(jax.make_jaxpr(nested)(*args)).count("cudnn") == 1


def test_what_takes_no_dimension_runs_in_turn_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(registry()["exp"], "folds", lambda *_: ())
    graph = jc.graph(lambda g, x, b: g.add(g.exp(x), b))
    one, args = [True, False], operands([(2, 7), (1, 7)], [True, False])
    mapped = vmapped(graph, one)
    with caplog.at_level(logging.DEBUG, "jax_cudnn"):
        assert_same(mapped(*args), in_turn(graph, one, args))
    reason = "exp.0 takes no dimension of vmap for x"
    assert f"runs {SIZE} times sequentially: {reason}" in caplog.text
    assert primitives(jax.make_jaxpr(mapped)(*args)) == ["cudnn"]
    # So it is among the graphs that jc.plan and jc.plans explain.
    assert [*collect.graphs(mapped, args, {})] == [
        f"<lambda> ({SIZE} times sequentially: {reason})"
    ]
    gradients = jax.grad(lambda x, b: jnp.sum(jnp.sin(graph(x, b))), (0, 1))
    assert_same(vmapped(gradients, one)(*args), in_turn(gradients, one, args))
    stacked = [jnp.stack([args[0], -args[0]], -1), args[1]]
    nested = jax.vmap(mapped, in_axes=(-1, None))
    want = in_turn(lambda *a: in_turn(graph, one, a), one, stacked, axis=-1)
    assert_same(nested(*stacked), want)
    mapped = vmapped(graph.with_options(implementation="cudnn"), one)
    with pytest.raises(jc.UnsupportedGraphError, match=r"(?s)3 times.*exp\.0 takes no"):
        jax.make_jaxpr(mapped)(*args)


def test_no_operation_of_the_table_runs_in_turn():
    """But where a result is one of all examples (a largest value), and vmap gives one of each, and
    where offsets are those of one example's groups."""
    for case in all_cases():
        spec = case.function.trace(*case.avals)[1].spec
        ports = {p.lower() for call in spec.calls for p, _ in (*call.outputs, *call.inputs)}
        if any(port.startswith(("amax", "first_token_offset")) for port in ports):
            with pytest.raises(NoFold):
                batch(spec, 2, frozenset(spec.inputs))
            continue
        for mapped in ({name} for name in spec.inputs):
            batch(spec, 2, frozenset(mapped))
        batch(spec, 2, frozenset(spec.inputs))


def test_all_processes_of_a_job_make_one_program():
    """The order of a set of names differs from process to process."""
    program = """
        import jax, jax.numpy as jnp, jax_cudnn as jc
        def loss(q):
            found = jc.ops.dot_product_attention(q, q, q, return_residual=True)
            return sum((x.astype("float32") ** 2).sum() for x in found)
        q = jax.ShapeDtypeStruct((2, 2, 8, 4, 16), "bfloat16")
        print(jax.make_jaxpr(jax.vmap(jax.grad(loss)))(q))
    """
    made = [python(program, PYTHONHASHSEED=str(seed)).stdout for seed in range(4)]
    assert made == made[:1] * 4


def test_a_number_takes_the_shape_of_the_operand_beside_it():
    """Also where vmap gives that one a dimension more."""
    graph = jc.graph(lambda g, b: g.bias(3.0, b))
    b = jnp.arange(6.0).reshape(2, 1, 3, 1, 1)
    assert_same(jax.vmap(graph)(b), 3 + b)
    assert_same(jax.vmap(jax.vmap(graph, 1, 1), 3, 3)(b[..., None]), 3 + b[..., None])
