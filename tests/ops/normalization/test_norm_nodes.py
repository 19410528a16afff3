"""Nodes of normalizations in graphs: shapes of scales, vmap, how cuDNN sees them, neighbours."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_cudnn as jc
from jax_cudnn._core.graph.boundary import boundary
from jax_cudnn._core.graph.layout import layout
from jax_cudnn._core.planning import losses

S = jax.ShapeDtypeStruct
# Of x and scale; cuDNN has engines for all of them.
SHAPES = {
    "rmsnorm": ((64, 256), (1, 256)),
    "layernorm": ((64, 256), (1, 256)),
    "adalayernorm": ((4, 16, 256), (4, 1, 256)),
    "instancenorm": ((4, 64, 8, 6), (1, 64, 1, 1)),
    "batchnorm": ((4, 64, 8, 6), (1, 64, 1, 1)),
}


def drawn(shapes, dtype="float32"):
    random = np.random.default_rng(0)
    return [jnp.asarray(abs(random.standard_normal(s)) + 0.1, dtype) for s in shapes]


def spec_of(function, *shapes, dtype="bfloat16"):
    return jc.graph(function).trace(*(S(shape, dtype) for shape in shapes))[1].spec


def forward(kind, phase="TRAINING"):
    """Graph function of x, scale and bias (and, of batchnorm, running statistics)."""
    if kind == "batchnorm":
        return lambda g, *operands: [*g.batchnorm(*operands, 1e-3, 0.2)]

    def function(g, x, scale, *bias):
        bias = {"bias": bias[0]} if bias else {}
        made = getattr(g, kind)(x, scale, **bias, epsilon=1e-3, norm_forward_phase=phase)
        return [made] if phase == "INFERENCE" else [*made]

    return function


def check(function, operands, **options):
    """A graph beside the oracle."""
    function = jc.graph(function).with_options(**options)
    outputs = jax.jit(function)(*operands)
    trace = function.trace(*operands)[1]
    given = [operands[i] for i in trace.operands]
    oracle.check_outputs(trace.spec, given, outputs, on_gpu=bool(options))
    return outputs


MERGED = {
    # kind, x, scale -> the dimensions behind each of cuDNN's
    ("layernorm", (2, 3, 4, 10), (1, 1, 4, 10)): ((0, 1), (2, 3)),
    ("rmsnorm", (2, 1, 3, 1, 4, 10), (1, 1, 1, 1, 1, 10)): ((0, 1, 2, 3, 4), (5,)),
    ("adalayernorm", (3, 2, 4, 10), (3, 1, 4, 10)): ((0,), (1,), (2, 3)),
    # Only their meaning tells these apart: the scale has all that x has.
    ("adalayernorm", (1, 1, 10), (1, 1, 10)): ((0,), (1,), (2,)),
    ("adalayernorm", (3, 10), (3, 10)): ((0,), (1,)),
}


@pytest.mark.parametrize(("kind", "x", "scale"), MERGED)
def test_dimensions_that_no_tensor_tells_apart_are_one(kind, x, scale):
    """The same with statistics and without."""
    for phase in ("TRAINING", "INFERENCE"):
        spec = boundary(spec_of(forward(kind, phase), x, scale, scale)).planned
        groups = layout(spec).merged
        assert groups == MERGED[kind, x, scale]
        for tensor in (t for t in spec.tensors if t.value is None):
            dims, strides = layout(spec).views[tensor.name]
            assert dims == tuple(int(np.prod([tensor.shape[i] for i in g])) for g in groups)
            assert strides[-1] == 1 or dims[-1] == 1


def test_a_residual_parts_what_it_is_broadcast_along():
    for residual, groups in (((2, 3, 8), ((0, 1), (2,))), ((2, 1, 8), ((0,), (1,), (2,)))):
        add = lambda g, x, s, r: g.add(g.layernorm(x, s, s, 1e-5)[0], r)  # noqa: E731
        assert layout(spec_of(add, (2, 3, 8), (1, 1, 8), residual)).merged == groups


def test_stated_orders():
    def transposed(both):
        def function(g, x, s):
            x.set_stride([1, 4])
            y, *_ = g.layernorm(x, s, s, 1e-5)
            return y.set_stride([1, 4]) if both else y

        return spec_of(function, (4, 8), (4, 1) if both else (1, 8))

    assert layout(transposed(both=False)).merged is None
    spec = transposed(both=True)
    assert layout(spec).merged == ((1,), (0,))
    assert layout(spec).views["x"] == ((8, 4), [4, 1])


def avals(kind, dtype="bfloat16"):
    """Of x, an array of its shape, and scale, bias, running statistics."""
    x, scale = SHAPES[kind]
    of_parameters = "float32" if kind in ("instancenorm", "batchnorm") else dtype
    return [*[S(x, dtype)] * 2, *[S(scale, of_parameters)] * (4 if kind == "batchnorm" else 2)]


# What is done to y, x or scale; r is an array of x's shape.
BEHIND = {
    "add": lambda g, y, r: g.add(y, r),
    "mul, gelu": lambda g, y, r: g.gelu(g.mul(y, r)),
    "add, relu": lambda g, y, r: g.relu(g.add(y, r)),
}
# Which cuDNN takes into the plan of the node.
TAKEN = [
    *(("rmsnorm", what) for what in ("add", "mul, gelu", "add in front", "1 + scale")),
    *(("layernorm", what) for what in ("mul, gelu", "add in front", "1 + scale")),
    *(("adalayernorm", what) for what in ("add, relu", "add in front")),
    *((kind, "add, relu") for kind in ("batchnorm", "instancenorm")),
]


def around(kind, what, phase="TRAINING"):
    """Graph function of x, r, scale, bias, ...: the node with something behind or in front."""

    def function(g, x, r, scale, *others):
        dtype = x.dtype
        scale = g.add(scale, 1.0) if what == "1 + scale" else scale
        x = g.add(x, r) if what == "add in front" else x
        y, *statistics = forward(kind, phase)(g, x, scale, *others)
        y = BEHIND[what](g, y, r) if what in BEHIND else y
        return [y.set_data_type(dtype), *statistics]

    return function


def planned(function, *operands, implementation="cudnn"):
    with jc.target("H200"):
        return jc.plan(jc.graph(function).with_options(implementation=implementation), *operands)


@pytest.mark.deviceless
@pytest.mark.parametrize(("kind", "what"), TAKEN)
def test_neighbours_are_in_the_plan(kind, what):
    assert len(planned(around(kind, what), *avals(kind)).execution_plans) == 1


B, F = "bfloat16", "float32"
REFUSED = [
    (
        lambda g, x, r, s: [x := g.add(x, r).set_data_type(x.dtype), *g.rmsnorm(x, s, epsilon=1.0)],
        avals("rmsnorm")[:3], "computes an operand of rmsnorm",
    ),
    (forward("batchnorm"), [S((4, 12, 8, 8), B), *[S((1, 12, 1, 1), F)] * 4], "12 channels"),
    (
        lambda g, x, s, e: g.rmsnorm(x, s, epsilon=e)[0], [S((64, 64), B), S((1, 64), B), S((), F)],
        "epsilon is computed on the device",
    ),
    (
        lambda g, x, s: g.layernorm(x.set_stride([1, 8, 64]), s, s, 1e-5)[0],
        [S((8, 8, 64), B), S((1, 1, 64), B)], "memory",
    ),
    (forward("rmsnorm"), [S((64, 1), B), *[S((1, 1), B)] * 2], "a single element"),
    # nvidia-cudnn-frontend 1.28 reads a null pointer there, which would end the process.
    (forward("adalayernorm"), [S((2, 24, 96), F), S((2, 1, 96), F)], "pass a bias of zeros"),
]  # fmt: skip


@pytest.mark.deviceless
@pytest.mark.usefixtures("no_plans")
@pytest.mark.parametrize(("function", "operands", "words"), REFUSED, ids=[w for *_, w in REFUSED])
def test_what_cudnn_is_not_asked_for(function, operands, words, monkeypatch):
    monkeypatch.setattr(losses, "table", dict)  # which may name another reason
    with pytest.raises(jc.UnsupportedGraphError, match=words):
        planned(function, *operands)
    plan = planned(function, *operands, implementation="split")
    assert re.search(words, " ".join(str(plan.explain()).split()))


@pytest.mark.deviceless
def test_a_gradient_behind_is_cut_off(caplog):
    """Of float32 it ends the process that plans, which on a GPU is the user's."""

    def function(g, x, y, scale, bias):
        return g.swish_backward(y, forward("layernorm")(g, x, scale, bias)[0])

    operands = [*[S((64, 4096), F)] * 2, *[S((1, 4096), F)] * 2]
    plan = planned(function, *operands, implementation="split")
    assert [segment.plan is None for segment in plan.segments] == [False, True]
    assert "planner fails with swish_backward.0" in str(plan.explain())
    assert "died" not in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [B, F])
@pytest.mark.parametrize(("kind", "what"), TAKEN)
def test_neighbours_in_the_plan_are_computed_rightly(kind, what, dtype):
    operands = [drawn([a.shape], a.dtype)[0] for a in avals(kind, dtype)]
    for phase in ("TRAINING", "INFERENCE")[: 1 if kind == "batchnorm" else 2]:
        check(around(kind, what, phase), operands, implementation="cudnn")
